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
from orchmllm.models.flops import padded_phases
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.choice import one_layer_more
from orchmllm.sharding.fits import (
    MISSED,
    budget_of,
    decide,
    joined,
    memory_of,
    with_real_batch,
)
from orchmllm.sharding.memory import Loads, MemoryModel, loads_of

WARM_UP = 3  # steps; the optimizer's state is there from the second one on


class RunMemory:
    """choice: phase -> checkpointing, the same on all ranks.

    dataset, rows: of the run. device_bytes: of this rank's GPU, 0 on a CPU. kept: examples a step
    of the checkpoint that the run goes on from, 0 without one. known: what the run knows of its
    memory, for its checkpoints: `measured`, what steps took of the prediction at most;
    `exhausted`, what they have to be taken for after memory ran out, and `next`, the choice that
    fits then; `choice`. gather: (n,) numbers of this rank -> (d, n) of all. log: shows a line.
    Raises ValueError if the recipe cannot fit."""

    def __init__(
        self, recipe: Recipe, dataset, rows: Sequence[int], spec: PlanSpec, num_ranks: int,
        device_bytes: float, kept: int = 0, *, known: dict | None = None,
        gather: Callable[[list[float]], np.ndarray] = np.atleast_2d,
        log: Callable[[str], None] = print,
    ) -> None:
        self._dataset, self._rows, self._per_rank = dataset, rows, recipe.train.batch_size
        self._recipe = with_real_batch(recipe, num_ranks, kept)
        # An integer program takes long here, and under a time limit not all ranks find the same.
        self._spec = replace(spec, balance=replace(spec.balance, nodewise_solver="search"))
        self._job = resolve(self._recipe, num_ranks, spec.ranks_per_node)
        self._on_cpu, self._kept, self._log = not device_bytes, kept, log
        self.known = {} if known is None else known
        self._steps, self._predicted = 0, []
        budget, self._why = budget_of(recipe, device_bytes)
        self.budget = float(gather([budget]).min())  # the smallest GPU decides
        self.choice = {p: recipe.fsdp.checkpointing(p) for p in PHASES}
        self._fixed = {p: c for p, c in self.choice.items() if c != "auto"}
        if len(self._fixed) < len(PHASES) or recipe.fsdp.memory_gb:
            self._choose()

    @cached_property
    def memory(self) -> MemoryModel:
        return memory_of(self._job, self._on_cpu)

    @cached_property
    def loads(self) -> Loads:
        """The run's own sampler draws two global batches of at most 32 ranks: enough for the load
        of the fullest rank."""
        dataset, recipe, loads = self._dataset, self._recipe, []
        ranks = min(self._job.num_ranks, 32)
        sampler = make_sampler(dataset, self._rows, ranks * recipe.train.batch_size,
                               seed=recipe.run.seed, data=recipe.data, per_rank=self._per_rank)
        for step in range(2):
            examples = sampler.batch(step)
            shares = [s.stop - s.start for s in sampler.shares(step, ranks)]
            layout = (dataset.layouts(examples, shares) if hasattr(dataset, "layouts") else
                      BatchLayout.concat([dataset.layout(i) for i in examples.tolist()], shares))
            loads.append(self._loads_of(plan_step(layout, self._spec)))
        return joined(loads)

    def _loads_of(self, plan: StepPlan) -> Loads:
        return loads_of(plan, padded_phases(self._recipe.model))

    @property
    def _taken(self) -> float:
        """What a rank needs of the prediction, as far as it is known."""
        return max(self.known.get("measured", 0.0), self.known.get("exhausted", 0.0)) or MISSED

    def _choose(self) -> None:
        """Sets the choice, and tells it where the recipe leaves it open."""
        before, taken = self.known.get("choice"), self._taken
        self.choice = decide(self._recipe, self.memory, self.loads, self.budget, self._why,
                             self._kept, taken)
        if "next" in self.known and self._fills(self.known["next"]):
            self.choice = self.known["next"]
        if len(self._fixed) == len(PHASES):
            return
        peak = taken * self.memory.peak(self.loads, self.choice)
        self._log(f"recomputation: {self._described(self.choice)} ({peak / 1e9:.3g} of "
                  f"{self.budget / 1e9:.3g} GB a rank, {taken:.3g} of the prediction)"
                  + (f"; before: {self._described(before)}" if before not in (None, self.choice)
                     else ""))
        self.known["choice"] = self.choice

    def _fills(self, choice: Mapping[str, str]) -> bool:
        """Whether a choice takes exactly what is there: then it is that of `exhausted`, and nothing
        has changed since."""
        try:
            needs = self._taken * self.memory.peak(self.loads, choice)
        except ValueError:  # of another model
            return False
        return choice.items() >= self._fixed.items() and math.isclose(needs, self.budget)

    def _described(self, choice: Mapping[str, str]) -> str:
        model = self.memory.model
        return ", ".join(f"{p} {choice[p]}" + (
            f" of {getattr(model, p).num_layers} layers" if ":" in choice[p] else "")
            for p in PHASES)

    def refuses(self, plan: StepPlan) -> str:
        """Why a microbatch does not fit the memory of a rank, by the prediction; "" if it does, or
        where no budget is known. The memory of a whole model is asked for only where the recipe
        has a budget for it."""
        recipe = self._recipe
        if not self.budget or recipe.model.folder and not recipe.fsdp.memory_gb:
            return ""
        peak = self.known.get("measured", 1.0) * self.memory.peak(self._loads_of(plan), self.choice)
        return "" if peak <= self.budget else (
            f"a rank is predicted to need {peak / 1e9:.3g} GB of {self.budget / 1e9:.3g}")

    def measure(self, step: Step, peak_bytes: np.ndarray, model: nn.Module) -> None:
        """After a step: once the first ones are done, decides by what they took, and tells the
        blocks of the model. peak_bytes: (d,) of all ranks so far, 0 where nothing counts."""
        if (len(self._fixed) == len(PHASES) or "measured" in self.known
                or not peak_bytes.all()):
            return
        self._predicted += [self.memory.peaks(self._loads_of(plan), self.choice)
                            for plan in step.plans]
        self._steps += 1
        if self._steps == WARM_UP:
            predicted = np.max([m for peaks in self._predicted for m in peaks.values()], axis=0)
            self.known["measured"] = float((peak_bytes / predicted).max())
            self._choose()
            recompute(model, self.choice)

    def exhausted(self, step: Step) -> tuple[str, dict]:
        """When memory has run out in a step: what to do, in words, and `exhausted` and `next` for
        the next start, {} where the recipe has to be changed."""
        more = len(self._fixed) < len(PHASES) and one_layer_more(
            self.memory, self.loads, self.choice, self._fixed)
        if more:
            return f"the next start recomputes one layer more: {self._described(more)}", {
                "exhausted": self.budget / self.memory.peak(self.loads, more), "next": more}
        more = one_layer_more(self.memory, joined([self._loads_of(p) for p in step.plans]),
                              self.choice)
        if more is None:
            return "everything is recomputed already", {}
        return "recompute more: " + " ".join(
            f"fsdp.{p}_checkpointing={more[p]}" for p in PHASES if more[p] != self.choice[p]), {}
