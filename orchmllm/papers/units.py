"""Units: GPUs and parallelism of each module when modules have GPUs of their own (DistTrain 5,
MMScale 4).

A unit has tp * dp * pp GPUs. DP is the LLM's dp: a microbatch is one sample on each of its groups,
K = global_batch / DP microbatches make an iteration. With C the time of a sample on tp GPUs:

    stage time   T = DP / dp * C * ceil(L / pp) / L
    iteration    sum of DP / dp * C over the units + (K - 1) * largest T      (DistTrain eq. 1, 2)

Layers are whole, dp divides DP, and a unit's first stage holds the activations of as many
microbatches as there are stages from it to the end of the pipeline: the papers' relaxation has none
of the three.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from orchmllm.papers.pipeline import simulate
from orchmllm.papers.profiles import ModuleProfile

METHODS = ("exact", "convex", "ratio", "megatron")
SAME = 1 + 1e-9  # plans this close count as equally fast: fewer GPUs decide


@dataclass(frozen=True)
class UnitPlan:
    """One module's GPUs. stage_ms: of its longest stage, forward and backward of a microbatch.
    bytes: of the GPU that holds most."""

    tp: int
    dp: int
    pp: int
    gpus: int
    stage_ms: float
    bytes: float


@dataclass(frozen=True)
class UnitsPlan:
    """units in pipeline order. iteration_ms: by the formula above, which is an upper bound.
    stages_ms: forward and backward of a microbatch, of each stage with the layers as they divide.
    useful_flops: of an iteration, without recomputation. relaxed_ms: of the convex relaxation, if
    it was solved."""

    units: Mapping[str, UnitPlan]
    num_microbatches: int
    iteration_ms: float
    stages_ms: tuple[list[float], list[float]]
    useful_flops: float
    relaxed_ms: float | None = None

    @property
    def gpus(self) -> int:
        return sum(u.gpus for u in self.units.values())

    @cached_property
    def simulated_ms(self) -> float:
        """Of an iteration, by the pipeline simulator."""
        return simulate(*(np.repeat(np.array(x)[:, None], self.num_microbatches, axis=1)
                          for x in self.stages_ms))

    def mfu(self, peak_flops: float) -> float:
        """Share of the used GPUs' peak."""
        return self.useful_flops / (self.simulated_ms / 1e3 * self.gpus * peak_flops)


class Options:
    """Ways to run one module beside an LLM of dp_llm groups: columns of equal length. warm: ms of a
    microbatch in all stages, stage: in the longest; static: bytes of the state, live: bytes of a
    microbatch's activations, on the first stage's GPUs."""

    def __init__(self, p: ModuleProfile, dp_llm: int, tps: Sequence[int], dps: Sequence[int],
                 pps: Sequence[int] | None = None) -> None:
        pps = pps or sorted({-(-p.layers // k): k for k in range(p.layers, 0, -1)}.values())
        which, self.dp, self.pp = (x.ravel() for x in np.meshgrid(
            np.arange(len(tps)), dps, pps, indexing="ij"))
        self.tp = np.array(tps)[which]
        share = -(-p.layers // self.pp) / p.layers
        self.gpus = self.tp * self.dp * self.pp
        self.warm = dp_llm / self.dp * np.array([p.total_ms(tp) for tp in tps])[which]
        self.stage = self.warm * share
        state, optimizer = p.state_bytes
        self.static = share / self.tp * (state + optimizer / self.dp)
        self.live = share / self.tp * dp_llm / self.dp * p.kept_bytes

    def keep(self, mask: np.ndarray) -> Options:
        """The options at a mask. mask: (options,) bool."""
        kept = object.__new__(Options)
        vars(kept).update({name: column[mask] for name, column in vars(self).items()})
        return kept


def plan_units(profiles: Mapping[str, ModuleProfile], *, num_gpus: int, global_batch: int,
               gpu_bytes: float, tp_sizes: Sequence[int] = (1, 2, 4, 8),
               method: str = "exact", llm_pp: int | None = None) -> UnitsPlan:
    """The units of an iteration. profiles: in pipeline order, one of them named `llm`.

    method: `exact`, the fastest by the formula; `convex`, the papers' relaxation solved by CVXPY
    and rounded down; `ratio`, the fastest among those that give every module GPUs in proportion to
    its FLOPs; `megatron`, one tp of 8 and one dp for all, encoders and generators replicated over
    the tp groups, llm_pp stages of the LLM (default: the fewest that fit).

    Raises ValueError for malformed input, and when nothing fits: then it names the module that
    needs most and how many bytes are missing."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if "llm" not in profiles:
        raise ValueError(f"profiles needs a module named llm, got {', '.join(profiles) or 'none'}")
    if num_gpus < len(profiles) or global_batch < 1:
        raise ValueError(f"num_gpus {num_gpus} must be at least {len(profiles)}, one a module, and "
                         f"global_batch {global_batch} at least 1")
    problem = Problem(dict(profiles), num_gpus, global_batch, gpu_bytes, tuple(tp_sizes))
    if method == "exact":
        return problem.plan(*problem.exact())
    from orchmllm.papers import baselines

    if method == "ratio":
        return problem.plan(*problem.exact(baselines.in_proportion(problem)))
    if method == "megatron":
        return problem.plan(*baselines.megatron(problem, llm_pp))
    return baselines.convex(problem)


@dataclass
class Problem:
    """The arguments of plan_units; dp_llm, dp: the LLM's DP, and that of a unit."""

    profiles: dict[str, ModuleProfile]
    num_gpus: int
    global_batch: int
    gpu_bytes: float
    tp_sizes: tuple[int, ...]
    made: dict[tuple[str, int], Options] = field(default_factory=dict)

    def divisors(self, n: int) -> list[int]:
        """DP sizes of a unit beside an LLM of n groups."""
        return [k for k in self.dps if k <= n and n % k == 0]

    @cached_property
    def dps(self) -> list[int]:
        """DP sizes: divisors of the global batch."""
        return [k for k in range(1, min(self.global_batch, self.num_gpus) + 1)
                if self.global_batch % k == 0]

    def options(self, name: str, dp_llm: int) -> Options:
        key = name, dp_llm
        if key not in self.made:
            dps = [dp_llm] if name == "llm" else self.divisors(dp_llm)
            self.made[key] = Options(self.profiles[name], dp_llm, self.tp_sizes, dps)
        return self.made[key]

    def bounds(self) -> dict[int, float]:
        """DP -> iteration that no plan of it beats: whole GPUs and layers of the LLM alone."""
        o = Options(self.profiles["llm"], 1, self.tp_sizes, self.dps)
        others = [p for n, p in self.profiles.items() if n != "llm"]
        work = sum(min(p.total_ms(tp) * tp for tp in self.tp_sizes) for p in others)
        warm = o.warm * o.dp + sum(min(map(p.total_ms, self.tp_sizes)) for p in others)
        left = self.num_gpus - o.gpus
        stage = np.maximum(o.stage * o.dp, o.dp * work / np.maximum(left, 1))
        total = warm + (self.global_batch // o.dp - 1) * stage
        total[(left < len(others)) | (o.static + o.live * o.dp * np.minimum(
            o.pp, self.global_batch // o.dp) > self.gpu_bytes)] = np.inf
        return {dp: float(total[o.dp == dp].min()) for dp in self.dps}

    def exact(self, budgets: Mapping[str, int] | None = None) -> tuple[int, dict[str, tuple]]:
        """(DP, name -> (tp, dp, pp)) of the fastest plan, fewest GPUs among equals: DPs by their
        bound, until it exceeds the best. Raises ValueError if none fits."""
        best = (np.inf, 0, None)
        bounds = self.bounds()
        for dp in sorted(bounds, key=bounds.__getitem__):
            if not bounds[dp] <= min(best[0] * SAME, sys.float_info.max):
                break
            best = min(best, self._of_dp(dp, best[0], budgets or {}), key=lambda x: x[:2])
        if best[2] is None:
            raise ValueError(self.why_not())
        return best[2]

    def _of_dp(self, dp: int, most: float, budgets: Mapping[str, int]) -> tuple:
        """(iteration, GPUs, plan) of the fastest plan of a DP that takes at most `most`. From the
        last module to the first, since stages behind a module decide what it holds in flight."""
        none, names, steps = (np.inf, 0, None), list(self.profiles), self.global_batch // dp - 1
        options = [self.options(n, dp) for n in names]
        rooms = [budgets.get(n, self.num_gpus) for n in names]
        options = [o.keep((o.static + np.minimum(o.pp, steps + 1) * o.live <= self.gpu_bytes)
                          & (o.gpus <= room)) for o, room in zip(options, rooms, strict=True)]
        if not all(len(o.gpus) for o in options):
            return none
        warm, work, gpus = (np.array([x.min() for x in column]) for column in zip(
            *((o.warm, o.stage * o.gpus, o.gpus) for o in options), strict=True))
        # A state: GPUs, warm, longest stage, stages so far; and the option of each module in it.
        state, chosen = np.zeros((1, 4)), np.zeros((1, 0), np.int64)
        for k in reversed(range(len(names))):
            o, parts = options[k], []
            for at in np.array_split(np.arange(len(state)), 1 + len(state) * len(o.gpus) // 10**6):
                gpus_so, warm_so, stage, behind = (x[at, None] for x in state.T)
                left, behind = self.num_gpus - gpus_so - o.gpus, behind + o.pp
                stage = np.maximum(stage, o.stage)
                bound = warm_so + o.warm + warm[:k].sum() + steps * np.maximum(
                    stage, work[:k].sum() / np.maximum(left, 1))
                held = o.static + np.minimum(behind, steps + 1) * o.live
                i, j = np.nonzero((held <= self.gpu_bytes) & (left >= gpus[:k].sum())
                                  & (bound <= most * SAME))
                parts.append(np.column_stack([
                    (gpus_so + o.gpus)[i, j], (warm_so + o.warm)[i, j], stage[i, j], behind[i, j],
                    j, chosen[at[i]]]))
                if k == 0:
                    most = min(most, bound[i, j].min(initial=np.inf))
            found = np.concatenate(parts)
            state, chosen = found[:, :4], found[:, 4:].astype(np.int64)
            if not len(found):
                return none
        total = state[:, 1] + steps * state[:, 2]
        near = np.flatnonzero(total <= total.min() * SAME)
        pick = near[np.lexsort((total[near], state[near, 0]))[0]]
        choice = {n: (int(o.tp[x]), int(o.dp[x]), int(o.pp[x]))
                  for n, o, x in zip(names, options, chosen[pick], strict=True)}
        return float(total[pick]), int(state[pick, 0]), (dp, choice)

    def fits(self, dp: int, choice: Mapping[str, tuple]) -> bool:
        """Whether a plan has stages, GPUs and memory for name -> (tp, dp, pp)."""
        return all(min(c) > 0 for c in choice.values()) and (
            sum(np.prod(c) for c in choice.values()) <= self.num_gpus) and all(
            u.bytes <= self.gpu_bytes for u in self._units(dp, choice).values())

    def _units(self, dp: int, choice: Mapping[str, tuple]) -> dict[str, UnitPlan]:
        out, behind = {}, sum(c[2] for c in choice.values())
        for name, (tp, d, pp) in choice.items():
            o = Options(self.profiles[name], dp, [tp], [d], [pp])
            held = o.static + min(behind, self.global_batch // dp) * o.live
            out[name] = UnitPlan(tp, d, pp, tp * d * pp, float(o.stage[0]), float(held[0]))
            behind -= pp
        return out

    def plan(self, dp: int, choice: Mapping[str, tuple]) -> UnitsPlan:
        """What name -> (tp, dp, pp) gives beside an LLM of dp groups."""
        count, units = self.global_batch // dp, self._units(dp, choice)
        warm, forward, backward = 0.0, [], []
        for name, unit in units.items():
            p = self.profiles[name]
            total = dp / unit.dp * p.total_ms(unit.tp)
            warm += total
            layers = np.array([len(x) for x in np.array_split(range(p.layers), unit.pp)])
            forward += list(total / (1 + p.backward_units) * layers / p.layers)
            backward += list(total * p.backward_units / (1 + p.backward_units) * layers / p.layers)
        useful = self.global_batch * sum(
            p.forward_flops * (1 + p.backward_units - (p.recompute and p.input_gradient))
            for p in self.profiles.values())
        return UnitsPlan(units, count, warm + (count - 1) * max(
            u.stage_ms for u in units.values()), (forward, backward), useful)

    def why_not(self) -> str:
        """The module that misses most memory with all GPUs to itself, else that GPUs are few."""
        least = dict.fromkeys(self.profiles, np.inf)
        for name, dp in product(self.profiles, self.dps):
            o = self.options(name, dp)
            held = o.static + np.minimum(o.pp, self.global_batch // dp) * o.live
            alone = held[o.gpus <= self.num_gpus - len(self.profiles) + 1]
            least[name] = min(least[name], alone.min(initial=np.inf))
        worst = max(least, key=least.__getitem__)
        if least[worst] <= self.gpu_bytes:
            return (f"no plan on {self.num_gpus} GPUs: every module fits alone, but not all "
                    "together: give more GPUs, or recompute activations")
        return (f"no plan: module {worst!r} needs {(least[worst] - self.gpu_bytes) / 1e9:.2f} GB "
                f"more on a GPU than the {self.gpu_bytes / 1e9:.2f} GB there are, on up to "
                f"{self.num_gpus} GPUs: give more GPUs, or recompute activations")
