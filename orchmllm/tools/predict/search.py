"""The setting of a job with the best throughput that fits: batch size, microbatches, shard group,
what stays gathered and what is recomputed, by orchmllm.tools.predict.step_time and .memory.

Loads are planned once per batch size. Each phase's time is computed apart for its 9 choices, so
that all combinations are ranked at once; then memory is asked in that order, and the best that fit
are timed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from orchmllm.config.fsdp import CHOICES, RESHARD
from orchmllm.config.job import check_world, resolve
from orchmllm.config.recipe import Recipe
from orchmllm.models.whole_flops import part_counts, plan_spec
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.balance import CapError
from orchmllm.plan.layout import GENERATOR
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.room import Limit
from orchmllm.sharding.caps import is_below, room_of, with_count
from orchmllm.sharding.choice import choose_checkpointing
from orchmllm.sharding.fits import MISSED, budget_of, decide, joined, with_real_batch
from orchmllm.sharding.loads import Loads, loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.units import by_role
from orchmllm.tools.predict.examples import Examples
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.step_time import (
    PlanWork,
    StepTime,
    phase_seconds,
    timed,
    update_seconds,
    work_of,
)

KEEPS = RESHARD[::-1]  # none, node, full: from most memory to least, as CHOICES
EXACT = 30  # of those that fit, timed as a whole
LAYERED = 5  # of these, tried with choices by layer, too


@dataclass(frozen=True)
class Setting:
    """shard_size: ranks of a group; reshard, checkpointing: a value for each of PHASES."""

    batch_size: int
    microbatches: int
    shard_size: int
    reshard: tuple[str, ...]
    checkpointing: tuple[str, ...]

    def overrides(self, num_ranks: int) -> list[str]:
        """As `train` takes them; a shard group of num_ranks is written as 0, all ranks."""
        size = 0 if self.shard_size == num_ranks else self.shard_size
        return [f"train.batch_size={self.batch_size}",
                f"train.accumulation_steps={self.microbatches}", f"fsdp.shard_size={size}",
                *(f"fsdp.{p}_reshard={r}" for p, r in zip(PHASES, self.reshard, strict=True)),
                *(f"fsdp.{p}_checkpointing={c}"
                  for p, c in zip(PHASES, self.checkpointing, strict=True))]

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with this setting."""
        parts = {f"{p}_{key}": v for key, values in (
            ("reshard", self.reshard), ("checkpointing", self.checkpointing))
            for p, v in zip(PHASES, values, strict=True)}
        return replace(recipe, fsdp=replace(recipe.fsdp, shard_size=self.shard_size, **parts),
                       train=replace(recipe.train, batch_size=self.batch_size,
                                     accumulation_steps=self.microbatches))


@dataclass(frozen=True)
class Found:
    """A setting with its predicted step and the memory of the fullest rank."""

    setting: Setting
    time: StepTime
    peak_bytes: float

    @property
    def tokens_per_s(self) -> float:
        return self.time.tokens / self.time.seconds


@dataclass
class Search:
    """A recipe on a cluster. global_batch: examples a step, kept by all settings; 0: any.
    steps: of one microbatch, planned for each batch size. Raises ValueError if the ranks cannot
    hold the batch."""

    recipe: Recipe
    num_ranks: int
    hardware: Hardware
    examples: Examples
    global_batch: int = 0
    steps: int = 2
    _drawn: dict = field(default_factory=dict)
    _planned: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.global_batch % self.num_ranks:
            given = "--global-batch"
            if self.global_batch == self.recipe.train.global_batch_size:
                given = "train.global_batch_size"
            raise ValueError(
                f"{given} {self.global_batch} is no multiple of {self.num_ranks} GPUs: say "
                f"{self.global_batch // self.num_ranks * self.num_ranks or self.num_ranks}")
        if GENERATOR in part_counts(self.recipe.model):
            raise ValueError("the model makes images, and choices for its generator are not "
                             "searched: try settings with orchmllm dry-run")
        _, self.hardware = self.hardware.job(self.recipe, self.num_ranks)
        recipe = with_real_batch(self.recipe, self.num_ranks)
        self.recipe = replace(recipe, train=replace(recipe.train, global_batch_size=0))
        self.budget, self.allowed_by = budget_of(self.recipe, self.hardware.sheet.memory_bytes)
        if not self.recipe.train.accumulation_steps:
            self.recipe = self._with_caps(self.recipe)[0]

    def _with_caps(self, recipe: Recipe) -> tuple[Recipe, PlanSpec, str]:
        """with_count of a step of the recipe."""
        job = resolve(recipe, self.num_ranks, self.hardware.ranks_per_node)
        step = self.examples.draw(self.num_ranks, recipe.train.batch_size
                                  * recipe.train.least_microbatches, recipe.run.seed)
        return with_count(recipe, [step], plan_spec(job), MemoryModel.of(job), self.budget)

    def caps(self, setting: Setting) -> str:
        """What a rank may hold by a setting, in words."""
        return self._with_caps(setting.of(self.recipe))[2]

    def phases(self) -> list[str]:
        """Those of which the model has layers."""
        return [p for p in PHASES if by_role(self.recipe.model, p)["block"].size]

    def batches(self) -> list[tuple[int, int]]:
        """(batch size, microbatches) that are tried."""
        if self.global_batch:
            share = self.global_batch // self.num_ranks
            return [(b, share // b) for b in _divisors(share)]
        high = 4 * self.recipe.train.batch_size
        sizes = sorted({b for k in range(12) for b in (2**k, 3 * 2**k) if b <= high} | {
            self.recipe.train.batch_size})
        return [(b, self.recipe.train.accumulation_steps) for b in sizes]

    def groups(self) -> list[int]:
        """Shard groups that nodes are made of, or that are made of whole nodes."""
        node, out = min(self.hardware.ranks_per_node, self.num_ranks), []
        for size in _divisors(self.num_ranks):
            try:
                check_world(resolve(replace(self.recipe, fsdp=replace(
                    self.recipe.fsdp, shard_size=size)), self.num_ranks, node))
            except ValueError:
                continue
            if node % size == 0 or size % node == 0:
                out.append(size)
        if not out:  # no group is possible: the same error as for a run
            check_world(resolve(self.recipe, self.num_ranks, node))
        return out

    def drawn(self, batch_size: int, microbatches: int, group: int
              ) -> tuple[list[PlanWork], Loads] | None:
        """Work of the microbatches of the planned steps, and the loads of all of them; None if one
        of them breaks a max_rank_tokens of the recipe."""
        key = batch_size, microbatches, group if self.recipe.balance.group == "shard" else 0
        if key not in self._drawn:
            self._drawn[key] = self._plans(batch_size, microbatches, group)
        return self._drawn[key]

    def _plans(self, batch_size: int, microbatches: int, group: int, room: tuple[Limit, ...] = ()
               ) -> tuple[list[PlanWork], Loads] | None:
        """`drawn` by limits of memory; None if a step has no plan below them, too."""
        recipe = replace(self.recipe, fsdp=replace(self.recipe.fsdp, shard_size=group))
        job = resolve(recipe, self.num_ranks, self.hardware.ranks_per_node)
        spec, works, loads = replace(plan_spec(job), room=room), [], []
        for step in range(-(-self.steps // microbatches)):
            drawn = self.examples.draw(self.num_ranks, batch_size * microbatches,
                                       recipe.run.seed + step)
            try:
                plans = [plan for _, plan in plan_microbatches(drawn, spec, microbatches)]
            except CapError:
                return None
            if room and not all(is_below(plan, room) for plan in plans):
                return None
            works += [work_of(plan, recipe.model) for plan in plans]
            loads += [loads_of(plan) for plan in plans]
        return works, joined(loads)

    def planned(self, setting: Setting) -> tuple[list[PlanWork], float]:
        """The work of `drawn` of a setting, and the bytes of the fullest rank in the worst of the
        steps; where that does not fit the budget, but even shares of it do, by the limits that
        memory then gives a rank, if the steps have plans below them."""
        if setting not in self._planned:
            of = setting.batch_size, setting.microbatches, setting.shard_size
            (works, loads), memory, choice = self.drawn(*of), self.memory(setting), _choice(setting)
            peak = memory.peak(loads, choice)
            if peak > self.budget >= memory.peak(
                    loads.each(lambda _, values: np.array([values.mean()])), choice):
                room = room_of(memory, loads, choice, self.budget / MISSED)
                if found := room and self._plans(*of, room):
                    works, peak = found[0], memory.peak(found[1], choice)
            self._planned[setting] = works, peak
        return self._planned[setting]

    def memory(self, setting: Setting) -> MemoryModel:
        return MemoryModel.of(resolve(setting.of(self.recipe), self.num_ranks,
                                 self.hardware.ranks_per_node))

    def found(self, setting: Setting) -> Found:
        """The setting's prediction, the mean of the steps."""
        (works, peak), memory = self.planned(setting), self.memory(setting)
        times = [timed(w, memory, _choice(setting), self.hardware) for w in works]
        slowest = max(times, key=lambda t: t.seconds)  # phases of one step; totals of the mean
        mean = float(np.mean([t.seconds for t in times])) / slowest.seconds
        return Found(setting, replace(
            slowest, tokens=float(np.mean([t.tokens for t in times])) / mean), peak)

    def given(self) -> Found | None:
        """The recipe's own setting, with what `auto` chooses in it (everything recomputed where
        nothing fits); None if its shard groups do not divide the ranks, or its batch breaks a
        max_rank_tokens."""
        train, fsdp = self.recipe.train, self.recipe.fsdp
        size = resolve(self.recipe, self.num_ranks, 1).shard_size
        count = train.accumulation_steps
        if self.num_ranks % size or not self.drawn(train.batch_size, count, size):
            return None
        setting = Setting(train.batch_size, count, size,
                          tuple(fsdp.reshard(p) for p in PHASES),
                          tuple(fsdp.checkpointing(p).replace("auto", "full") for p in PHASES))
        try:
            choice = decide(self.recipe, self.memory(setting),
                            self.drawn(train.batch_size, count, size)[1], self.budget)
        except ValueError:
            return self.found(setting)
        return self.found(replace(setting, checkpointing=tuple(choice[p] for p in PHASES)))

    def ranked(self) -> Iterator[Setting]:
        """All settings, the fastest first, by phases timed apart."""
        rows, speed = [], []
        for (batch, count), group in product(self.batches(), self.groups()):
            if not self.drawn(batch, count, group):
                continue
            works, _ = self.drawn(batch, count, group)
            kinds = [k for k in KEEPS if k != "node" or 1 < self.hardware.ranks_per_node < group]
            choices = {p: list(product(kinds, CHOICES)) for p in PHASES}
            for phase in set(PHASES) - set(self.phases()):
                choices[phase] = choices[phase][:1]
            tables = []
            for phase in PHASES:
                tables.append(np.array([np.mean([phase_seconds(
                    w, phase, self.memory(Setting(batch, count, group, (k,) * 3, (c,) * 3)), c,
                    self.hardware) for w in works]) for k, c in choices[phase]]))
            exchange = sum(m.seconds(self.hardware) for w in works for m in w.moves) / len(works)
            memory = self.memory(Setting(batch, count, group, ("full",) * 3, ("full",) * 3))
            rest = update_seconds(memory, self.hardware) + count * exchange
            total = rest + count * (tables[0][:, None, None] + tables[1][:, None] + tables[2])
            tokens = count * float(np.mean([w.tokens for w in works]))
            for index in np.ndindex(total.shape):
                rows.append((batch, count, group, *index, choices))
            speed.append((tokens / total).ravel())
        for i in np.argsort(-np.concatenate([[], *speed]), kind="stable"):
            batch, count, group, *index, choices = rows[i]
            reshard, checkpointing = zip(*(
                choices[p][k] for p, k in zip(PHASES, index, strict=True)), strict=True)
            yield Setting(batch, count, group, reshard, checkpointing)

    def best(self) -> list[Found]:
        """The fastest settings that fit, best first. Raises ValueError if none does."""
        failed: dict[tuple, np.ndarray] = {}  # group -> (k, 6) savings that were not enough
        fitting: list[Setting] = []
        for setting in self.ranked():
            key = setting.batch_size, setting.microbatches, setting.shard_size
            saving = np.array([KEEPS.index(r) for r in setting.reshard] + [
                CHOICES.index(c) for c in setting.checkpointing])
            if key not in failed:  # nothing of this group fits if the most saving one does not
                least = replace(setting, reshard=("full",) * 3, checkpointing=("full",) * 3)
                failed[key] = np.full((1, 6), 2 if self.planned(least)[1] > self.budget else -1)
            if (saving <= failed[key]).all(axis=1).any():
                continue  # one that saves more did not fit
            if self.planned(setting)[1] > self.budget:
                failed[key] = np.concatenate([failed[key], [saving]])
                continue
            fitting.append(setting)
            if len(fitting) == EXACT:
                break
        if not fitting:
            raise ValueError(
                f"nothing fits {self.num_ranks} GPUs of {self.budget / 1e9:.3g} GB "
                f"({self.allowed_by}): give more GPUs, a smaller batch or model, or a "
                "larger balance.*.max_rank_tokens where the recipe sets one")
        found = sorted(map(self.found, fitting), key=lambda f: -f.tokens_per_s)
        each = {f.setting: f for f in (*found, *self._by_layer(found))}  # some are both
        return sorted(each.values(), key=lambda f: -f.tokens_per_s)

    def _by_layer(self, found: list[Found]) -> Iterator[Found]:
        """The first of them with other numbers of layers that recompute, as `auto` chooses them."""
        for setting in dict.fromkeys(replace(f.setting, checkpointing=()) for f in found[:LAYERED]):
            _, loads = self.drawn(setting.batch_size, setting.microbatches, setting.shard_size)
            with suppress(ValueError):  # nothing fits with what `auto` keeps free
                choice = choose_checkpointing(self.memory(replace(
                    setting, checkpointing=("full",) * 3)), loads, self.budget / MISSED)
                yield self.found(replace(setting, checkpointing=tuple(choice[p] for p in PHASES)))


def _choice(setting: Setting) -> Mapping[str, str]:
    return dict(zip(PHASES, setting.checkpointing, strict=True))


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
