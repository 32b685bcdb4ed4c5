"""What one rank's CPU does for a step beside reading, decoding, moving and training, timed by part:
the trainer's loader, orchestrator and timer, over gathers that answer at once. Used by
bench_overhead.py, which says what the parts are.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from orchmllm.batch import UNCOUNTED, Microbatch, Step
from orchmllm.comm.exchange import Sent
from orchmllm.config.model import ModelConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.loading.whole_examples import WholeFeed
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.models.whole_flops import step_flops
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PHASES, PlanSpec, assign_phases
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import build_plan
from orchmllm.runtime.measured import StepTimer
from orchmllm.runtime.metrics import as_logged

PARTS = ("lengths", "planning", "node-wise", "composition", "agreement", "row")


class AnsweringGather:
    """In place of the CPU groups: the answer is there at once. rows: what each of all ranks sends
    in LAYOUT, of any length; without, all send what this one does."""

    rank = 0

    def __init__(self, num_ranks: int, rows: Sequence[np.ndarray] = ()) -> None:
        self.world_size, self.rows, self.sent = num_ranks, rows, np.zeros(0, np.int64)
        self._padded: dict[int, np.ndarray] = {}

    def __call__(self, row: np.ndarray) -> np.ndarray:
        self.sent = row
        if not len(self.rows):
            return np.tile(row, (self.world_size, 1))
        if len(row) not in self._padded:
            answer = self._padded[len(row)] = np.zeros((self.world_size, len(row)), np.int64)
            for out, sent in zip(answer, self.rows, strict=True):
                out[0] = len(sent)
                out[1: 1 + len(sent)] = sent[: len(row) - 1]
        return self._padded[len(row)]


def layout_rows(layout: BatchLayout, spec: PlanSpec) -> list[np.ndarray]:
    """What each rank sends in LAYOUT."""
    alone, rows = AnsweringGather(1), []
    orchestrator = Orchestrator(spec, alone, group=alone)
    for part in layout.split_ranks(1):
        orchestrator.gather_layout(0, part)
        rows.append(alone.sent[1: 1 + alone.sent[0]])
    return rows


def sent(rows: np.ndarray) -> Sent:
    """Numbers that nobody has to send."""
    return Sent(torch.from_numpy(rows), torch.from_numpy(rows), None, 0.0)


class Rank:
    """Rank 0 of a job whose global batch is `layout`."""

    def __init__(self, layout: BatchLayout, spec: PlanSpec, model: ModelConfig) -> None:
        self.spec, self.part = spec, next(layout.split_ranks(1))
        rows = layout_rows(layout, spec)
        layouts, outcomes = AnsweringGather(len(rows), rows), AnsweringGather(len(rows))
        self.orchestrator = Orchestrator(spec, layouts, commit_gather=outcomes, group=layouts)
        encodes = SimpleNamespace(encoders=SimpleNamespace(raw=()))  # nothing is read for it
        self.loader = StepLoader(None, None, self.orchestrator, num_steps=1,
                                 feed=partial(WholeFeed, model=encodes),
                                 flops_of=partial(step_flops, model))
        self.loader.feed.load = lambda step: UNCOUNTED  # reading and decoding are not counted
        self.clock = PhaseClock()
        self.timer = StepTimer(self.clock, torch.device("cpu"))

    def lengths(self) -> BatchLayout:
        return self.orchestrator.gather_layout(0, self.part)[0]

    def composed(self, layout: BatchLayout, assigned: tuple) -> Step:
        plan = build_plan(layout, *assigned, self.spec)
        step = Step(1, layout, [Microbatch(plan, plan.for_rank(0),
                                           positions=np.arange(layout.num_examples))])
        self.loader.feed.announce(step)
        return step

    def agreed(self, step: Step) -> Step:
        return self.loader._load(step)

    def row(self, step: Step) -> str:
        """The step's line of metrics.jsonl."""
        self.clock.cpu_s["update"] = 0.0
        reported = self.timer.send(
            lambda numbers: sent(np.tile(np.array(numbers, float), (step.layout.num_ranks, 1))),
            step, torch.zeros(()), torch.zeros(1), signal=0, save=False)
        facts = reported.facts()
        measured = self.timer.measured(step, facts.measured_s, reported.marks)
        return json.dumps(as_logged({**facts.row(step, 1.0, []), "measured": measured}))


class Timed:
    """Calls whose CPU time in this thread is kept: part -> [(ms, ms of it with the GIL)].
    released_s: see gil_clock."""

    def __init__(self, released_s: Callable[[], float]) -> None:
        self.taken: dict[str, list[np.ndarray]] = defaultdict(list)
        self._released_s = released_s

    def __call__(self, part: str, call: Callable):
        start, released = time.thread_time(), self._released_s()
        result = call()
        free = self._released_s() - released
        taken = time.thread_time() - start
        self.taken[part].append(1e3 * np.array([taken, taken - free]))
        return result


def measure_time(
    layout: BatchLayout, spec: PlanSpec, model: ModelConfig, repeats: int,
    released_s: Callable[[], float],
) -> tuple[Mapping[str, dict[str, float]], Step, int]:
    """(Median, least and p99 in ms of each part, of their sum and of what of it holds the GIL; the
    step; bytes of its row). Every repeat starts from what was gathered."""
    without = replace(spec, balance=replace(spec.balance, **{
        phase: replace(getattr(spec.balance, phase), nodewise=False) for phase in PHASES}))
    rank, timed = Rank(layout, spec, model), Timed(released_s)
    for _ in range(repeats):
        fresh = timed("lengths", rank.lengths)
        assigned = timed("planning", partial(assign_phases, fresh, without))
        if without != spec:
            assigned = timed("node-wise", partial(assign_phases, replace(fresh), spec))
            timed.taken["node-wise"][-1] -= timed.taken["planning"][-1]
        step = timed("composition", partial(rank.composed, fresh, assigned))
        timed("agreement", partial(rank.agreed, step))
        row = timed("row", partial(rank.row, step))
    timed.taken.setdefault("node-wise", [np.zeros(2)] * repeats)
    total, held = sum(np.array(timed.taken[part]) for part in PARTS).T
    parts = {part: np.array(timed.taken[part])[:, 0] for part in PARTS}
    return ({name: {"median_ms": float(np.median(t)), "least_ms": float(t.min()),
                    "p99_ms": float(np.percentile(t, 99))}
             for name, t in {**parts, "total": total, "GIL": held}.items()}, step, len(row))
