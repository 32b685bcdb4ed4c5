"""What the layers of a run recompute: decided from planned batches of its own data, once more from
what its first steps took, and with one layer more for the start after memory ran out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import nn

from orchmllm.batch import Step
from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.data.sampler import make_sampler
from orchmllm.plan.assign import PlanSpec
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.room import Limit
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.caps import chosen, described, planned_loads, room_of
from orchmllm.sharding.choice import one_layer_more
from orchmllm.sharding.fits import (
    MISSED,
    budget_of,
    joined,
    smaller_state,
    with_real_batch,
)
from orchmllm.sharding.loads import Loads, loads_of
from orchmllm.sharding.memory import MemoryModel

WARM_UP = 3  # steps; the optimizer's state is there from the second one on


class RunMemory:
    """choice: phase -> checkpointing, the same on all ranks.

    dataset, rows: of the run. device_bytes: of this rank's GPU, 0 on a CPU. kept: examples a step
    of the checkpoint that the run goes on from, 0 without one. known: what the run knows of its
    memory, for its checkpoints: `measured`, what steps took of the prediction at most; `choice`;
    `ran_out`, what `exhausted` left to this start. gather: (n,) numbers of this rank -> (d, n) of
    all. log: shows a line. Raises ValueError if the recipe cannot fit."""

    def __init__(
        self, recipe: Recipe, dataset, rows: Sequence[int], spec: PlanSpec, num_ranks: int,
        device_bytes: float, kept: int = 0, *, known: dict | None = None,
        gather: Callable[[list[float]], np.ndarray] = np.atleast_2d,
        log: Callable[[str], None] = print,
    ) -> None:
        self._dataset, self._rows, self._per_rank = dataset, rows, recipe.train.batch_size
        self._recipe = with_real_batch(recipe, num_ranks, kept)
        self._spec = spec
        self._job = resolve(self._recipe, num_ranks, spec.ranks_per_node)
        self.memory = MemoryModel.of(self._job)
        self._kept, self._log = kept, log
        self.known = {} if known is None else known
        self._predicted: list[np.ndarray] = []  # (d,) bytes of each step
        budget, self._why = budget_of(recipe, device_bytes)
        self.budget = float(gather([budget]).min())  # the smallest GPU decides
        self.choice = {p: recipe.fsdp.checkpointing(p) for p in spec.phases}
        self._fixed = {p: c for p, c in self.choice.items() if c != "auto"}
        self._ran_out = self.known.get("ran_out", {})
        if self._ran_out != {} and not self._applies(self._ran_out):
            self._ran_out = {}
            log("warning: recompute.json in the run folder is not used: it is damaged, or memory "
                "ran out with another recipe, with other data or on other ranks")
        #: By which the run's steps are planned.
        self.spec = spec
        auto = not recipe.train.accumulation_steps
        if len(self._fixed) < len(self.choice) or recipe.fsdp.memory_gb or auto and self.budget:
            self._choose()
            self._cap()
        elif auto and not spec.hard_caps:
            raise ValueError("train.accumulation_steps=auto needs to know what a rank can hold: "
                             "set fsdp.memory_gb, or balance.llm.max_rank_tokens")

    @cached_property
    def layouts(self) -> list[BatchLayout]:
        """The run's own sampler draws two steps of at most 32 ranks: enough for the load of the
        fullest rank."""
        dataset, recipe, layouts = self._dataset, self._recipe, []
        ranks, count = min(self._job.num_ranks, 32), recipe.train.least_microbatches
        sampler = make_sampler(dataset, self._rows, ranks * recipe.train.batch_size * count,
                               seed=recipe.run.seed, data=recipe.data, per_rank=self._per_rank)
        for step in range(2):
            examples = sampler.batch(step)
            shares = [s.stop - s.start for s in sampler.shares(step, ranks)]
            layouts.append(
                dataset.layouts(examples, shares) if hasattr(dataset, "layouts") else
                BatchLayout.concat([dataset.layout(i) for i in examples.tolist()], shares))
        return layouts

    @cached_property
    def loads(self) -> Loads:
        """Of all microbatches of these steps."""
        return planned_loads(self._recipe, self.layouts, self._spec)

    @property
    def _taken(self) -> float:
        """What a rank needs of the prediction, 0 as long as that is not known."""
        return max(self.known.get("measured", 0.0), self._ran_out.get("exhausted", 0.0))

    def _choose(self) -> None:
        """Sets the choice, and tells it where the recipe leaves it open."""
        before, taken = self.known.get("choice"), self._taken or MISSED
        self.choice = chosen(self._recipe, self.layouts, self._spec, self.memory, self.loads,
                             self.budget, taken, allowed_by=self._why, kept=self._kept)
        if ran_out := taken == self._ran_out.get("exhausted"):
            self.choice = self._ran_out["next"]
        if len(self._fixed) == len(self.choice):
            return
        # Where these loads do not fit, what a rank holds of a microbatch is limited.
        peak = min(taken * self.memory.peak(self.loads, self.choice), self.budget)
        self._log(f"recomputation: {self._described(self.choice)} ({peak / 1e9:.3g} of "
                  f"{self.budget / 1e9:.3g} GB a rank, {taken:.3g} of the prediction"
                  + (", since memory ran out before: recompute.json)" if ran_out else ")")
                  + (f"; before: {self._described(before)}" if before not in (None, self.choice)
                     else ""))
        self.known["choice"] = self.choice

    def _cap(self) -> None:
        """Sets the room of a rank, and tells it. A run that goes on keeps what it had, so that its
        steps are planned as before, but not after memory ran out."""
        known = {"num_ranks": self._job.num_ranks, "budget": self.budget,
                 "exhausted": self._ran_out.get("exhausted", 0.0)}
        if self.known.get("limits", {}).items() >= known.items():
            room = tuple(Limit(*limit) for limit in self.known["limits"]["of"])
        else:
            room = room_of(self.memory, self.loads, self.choice,
                           self.budget / (self._taken or MISSED))
            self.known["limits"] = {**known, "of": [[one.most, one.each] for one in room]}
        self.spec = replace(self.spec, room=room)
        if room and self.spec.balance.enabled:
            self._log(described(self.layouts, replace(self._spec, room=room),
                                self._recipe.train.accumulation_steps))

    def _applies(self, ran_out: dict) -> bool:
        """Whether memory ran out in a run like this: then `next` takes exactly what is there."""
        try:
            needs = ran_out["exhausted"] * self.memory.peak(self.loads, ran_out["next"])
            return (ran_out["next"].items() >= self._fixed.items()
                    and math.isclose(needs, self.budget))
        except (ValueError, KeyError, TypeError):  # of another model, or not what `exhausted` left
            return False

    def _described(self, choice: Mapping[str, str]) -> str:
        return ", ".join(f"{p} {choice[p]}" + (
            f" of {self.memory.num_layers(p)} layers" if ":" in choice[p] else "")
            for p in choice)

    def refuses(self, plan: StepPlan) -> str:
        """Why a microbatch does not fit the memory of a rank, by the prediction; "" if it does, or
        where no budget is known."""
        if not self.budget:
            return ""
        peak = (self._taken or 1.0) * self.memory.peak(loads_of(plan), self.choice)
        return "" if peak <= self.budget else (
            f"a rank is predicted to need {peak / 1e9:.3g} GB of {self.budget / 1e9:.3g}")

    def measure(self, step: Step, peak_bytes: np.ndarray, model: nn.Module) -> None:
        """After a step: once the first ones are done, decides by what they took, and tells the
        blocks of the model. peak_bytes: (d,) of all ranks so far, 0 where nothing counts."""
        if (len(self._fixed) == len(self.choice) or "measured" in self.known
                or not peak_bytes.all()):
            return
        peaks = [self.memory.peaks(loads_of(plan), self.choice) for plan in step.plans]
        self._predicted.append(np.max([m for p in peaks for m in p.values()], axis=0))
        if len(self._predicted) == WARM_UP:
            self.known["measured"] = taken = float(
                (peak_bytes / np.max(self._predicted, axis=0)).max())
            try:
                self._choose()
            except ValueError as error:  # but the steps did fit
                self.known["measured"] = 0.0  # or no later start would try
                self._log(f"warning: steps take {taken:.3g} of the memory that was predicted, by "
                          f"which {error}; what is recomputed stays as it is")
            recompute(model, self.choice)

    def exhausted(self, step: Step, phase: str | None) -> tuple[str, dict]:
        """When memory has run out in a step: what helps, in words, and what the next start has to
        know, `ran_out`: the choice that fits (`next`), and what steps have to be taken for; {} if
        nothing that a start decides by itself helps. phase: of the model's clock at the error."""
        state = smaller_state(self._recipe, self.memory.shards)
        if phase in ("gather", "update"):
            return f"it was the update, which needs no activations; what helps: {state}", {}
        loads = joined([loads_of(plan) for plan in step.plans])
        if self.budget and step.as_sampled and self.memory.peak(loads, self.choice) > (
                peak := self.memory.peak(self.loads, self.choice)):
            return "the step ran as it was sampled; the next start leaves such steps balanced", {
                "exhausted": self.budget / peak, "next": self.choice}
        smaller = "; or lower train.batch_size (with fsdp.memory_gb a recipe is checked before)"
        if len(self._fixed) < len(self.choice) and (more := one_layer_more(
                self.memory, self.loads, self.choice, self._fixed)):
            return f"the next start recomputes one layer more: {self._described(more)}{smaller}", {
                "exhausted": self.budget / self.memory.peak(self.loads, more), "next": more}
        if more := one_layer_more(self.memory, loads, self.choice):
            return "recompute more: " + " ".join(
                f"fsdp.{p}_checkpointing={more[p]}" for p in more if more[p] != self.choice[p]
            ) + smaller, {}
        peaks = self.memory.peaks(loads, self.choice)
        highest = max(peaks, key=lambda moment: peaks[moment].max())
        return (f"recomputing more saves nothing at the highest moment ({highest}, by the "
                f"prediction); what helps: {state}{smaller * (highest != 'last gradients')}"), {}
