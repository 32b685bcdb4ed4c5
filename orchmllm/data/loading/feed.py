"""The feed of the trainer's loader: what each rank reads, by dispatch, and in whose process.

- `load`: the media that this rank encodes and the text that its LLM takes.
- `tensors`: whole examples that it sampled; rows move later, on the device's group.
- `bytes`: encoded media and text of examples that it sampled move here, and are decoded after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import Example
from orchmllm.comm.exchange import exchange_bytes
from orchmllm.data.loading.pipeline import Drawn, Loaded, PlannedStep, Postponed
from orchmllm.data.loading.workers import Call, Result, Workers, told
from orchmllm.data.sampler import GlobalSampler
from orchmllm.orchestrator import FailedSegment, Orchestrator
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import RankPlan, StepPlan

_ROW_DTYPE = {"vision": torch.uint8, "audio": torch.float32}


class SegmentFeed:
    """Examples of a dataset (orchmllm.data.loading.step_loader.Dataset) that knows lengths before
    it decodes, and decodes single segments. With worker processes the next step is planned before
    one is taken, so that they have work meanwhile."""

    def __init__(self, dataset: Any, sampler: GlobalSampler, orchestrator: Orchestrator,
                 num_steps: int, num_workers: int = 0) -> None:
        self.dataset, self.sampler, self.orchestrator = dataset, sampler, orchestrator
        self.num_steps, self.config_digest = num_steps, min(num_workers, 1)
        self.lookahead = min(num_workers, 1)
        self.dispatch = orchestrator.spec.balance.dispatch
        if self.dispatch == "bytes" and not (
                hasattr(dataset, "read") and hasattr(dataset, "decode")):
            raise ValueError("balance.dispatch is 'bytes', but the dataset cannot read encoded "
                             "media (no methods read and decode): use 'load' or 'tensors'")
        self._workers = Workers(dataset, num_workers)
        self._requested: deque[list[_Request]] = deque()

    def draw(self, index: int) -> Drawn:
        """The global layout where every rank can probe every example (dispatch `load`), else this
        rank's part."""
        if index >= self.num_steps:
            return Drawn(exhausted=True)
        orch, sampled = self.orchestrator, self.sampler.batch(index)
        shares = [self.sampler.share(len(sampled), r, orch.world_size)
                  for r in range(orch.world_size)]
        probed = sampled if orch.loads_directly else sampled[shares[orch.rank]]
        layouts = [self.dataset.layout(int(i)) for i in probed]
        if not orch.loads_directly:
            return Drawn(part=BatchLayout.from_examples(layouts))
        sizes = [s.stop - s.start for s in shares]
        return Drawn(everything=BatchLayout.from_examples(layouts, sizes))

    def announce(self, planned: PlannedStep) -> None:
        """Starts what needs nobody else."""
        for mine in planned.rank_plans:
            mine.pack()
        if self.dispatch == "load":
            self._requested.append([
                self._planned(positions, plan.layout.example_id, mine)
                for (positions, plan), mine in zip(planned.plans, planned.rank_plans, strict=True)])
        elif self.dispatch == "tensors":
            self._requested.append([self._sampled(*plan) for plan in planned.plans])

    def load(self, planned: PlannedStep) -> Loaded:
        failed: list[FailedSegment] = []
        if self.dispatch == "bytes":
            postponed = Postponed()
            requests = [self._moved(*p, failed, postponed) for p in planned.plans]
            if not postponed.everything_came():
                return Loaded([], failed)
        else:
            requests = self._requested.popleft()
        joined = [self._join(*request.results(failed)) for request in requests]
        return Loaded([self.orchestrator.pinned(*content) for content in joined], failed)

    def close(self) -> None:
        self._requested.clear()
        self._workers.close()

    def _planned(self, positions: np.ndarray, ids: np.ndarray, mine: RankPlan) -> _Request:
        """Everything that this rank processes. ids: dataset index of each example of the plan."""
        request = _Request()
        for phase, media in mine.media.items():
            for example, segment in media.tolist():
                request.medium(phase, positions[example], _load_medium(ids[example], segment),
                               segment)
        for example in mine.examples.tolist():
            request.text(positions[example], _load_text(ids[example]))
        return request.start(self._workers)

    def _sampled(self, positions: np.ndarray, plan: StepPlan) -> _Request:
        """Everything that this rank sampled, an example at a time."""
        request, layout = _Request(), plan.layout
        start = layout.segment_start
        for example in np.flatnonzero(layout.rank_of_example == self.orchestrator.rank).tolist():
            modality = layout.modality[start[example]: start[example + 1]]
            segments = {phase: np.flatnonzero(modality == code).tolist()
                        for phase, code in ENCODERS.items()}
            request.whole(positions[example], _load(layout.example_id[example]), segments)
        return request.start(self._workers)

    def _moved(self, positions: np.ndarray, plan: StepPlan, failed: list[FailedSegment],
               postponed: Postponed) -> _Request:
        """Encoded media and text to the ranks that process them, to be decoded there."""
        orch, layout = self.orchestrator, plan.layout
        request, ids = _Request(), layout.example_id
        for phase, move in plan.encode.items():
            seg = layout.segments_of(ENCODERS[phase])
            example = layout.example_of_segment[seg]
            at = list(zip(example.tolist(), (seg - layout.segment_start[example]).tolist(),
                          strict=True))  # (example, segment) of each source item
            own = np.flatnonzero(layout.rank_of_example[example] == orch.rank)
            readers = [self._reader(ids[at[i][0]], at[i][1], positions[at[i][0]], failed)
                       for i in own]
            came = exchange_bytes([lambda r=r: postponed.call(r) for r in readers], move,
                                  orch.rank, orch.group)
            postponed.incomplete |= any(c is None for c in came)
            for item, data in zip(move.order[move.target_rank == orch.rank].tolist(), came,
                                  strict=True):
                example, segment = at[item]
                rows = int(layout.rows[seg[item]])
                if isinstance(data, int):
                    call = _load_medium(ids[example], segment)
                elif data is not None and len(data):
                    call = Call("decode", (ENCODERS[phase], data.tobytes(), rows),
                                {"segment": segment})
                else:  # its sender reported it
                    request.ready(phase, self._zeros(phase, rows))
                    continue
                request.medium(phase, positions[example], call, segment)
        request.texts = self._moved_text(plan, positions, failed, postponed)
        postponed.call(request.start, self._workers)
        return request

    def _moved_text(self, plan: StepPlan, positions: np.ndarray, failed: list[FailedSegment],
                    postponed: Postponed) -> list[Tensor]:
        own = np.flatnonzero(plan.layout.rank_of_example == self.orchestrator.rank).tolist()
        text = postponed.call(self._own_text, plan, positions, own, failed) or [None] * len(own)
        came = exchange_bytes(
            [lambda t=t: None if t is None else t.numpy().reshape(-1).view(np.uint8) for t in text],
            plan.llm, self.orchestrator.rank, self.orchestrator.group)
        postponed.incomplete |= any(c is None for c in came)
        return [text[c] if isinstance(c, int)
                else torch.from_numpy(c.copy().view(np.int32)).reshape(-1, 2)
                for c in came if c is not None]

    def _own_text(self, plan: StepPlan, positions: np.ndarray, own: list[int],
                  failed: list[FailedSegment]) -> list[Tensor]:
        """(L, 2) int32 of each example that this rank sampled."""
        results = self._workers.request([_load_text(plan.layout.example_id[i]) for i in own])()
        for i, result in zip(own, results, strict=True):
            failed += _failures(positions[i], result)
        return [_text(r.value) for r in results]

    def _reader(self, index: int, segment: int, position: int, failed: list[FailedSegment]
                ) -> Callable[[], np.ndarray]:
        """() -> the medium's encoded bytes; none of them where it cannot be read."""
        def on_error(segment: int, error: Exception) -> None:
            failed.append(FailedSegment(int(position), segment, *told(error)))

        def read() -> np.ndarray:
            return np.frombuffer(self.dataset.read(int(index), segment, on_error=on_error),
                                 np.uint8)

        return read

    def _zeros(self, phase: str, rows: int) -> Tensor:
        return torch.zeros(rows, getattr(self.dataset, phase).row_size, dtype=_ROW_DTYPE[phase])

    def _join(self, media: dict[str, list[Tensor]], texts: Sequence[Tensor]
              ) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs (R, row_size) per phase, and (T, 2) int32 [token id, label]."""
        inputs = {phase: torch.cat([self._zeros(phase, 0), *media[phase]]) for phase in ENCODERS}
        return inputs, torch.cat([torch.empty(0, 2, dtype=torch.int32), *texts])


class _Request:
    """Calls of one microbatch, and where their results go: rows in slot order per phase, texts in
    order. texts: those that are there already."""

    def __init__(self) -> None:
        self.texts: list[Tensor] = []
        self._media: dict[str, list[Tensor | tuple[int, int]]] = {p: [] for p in ENCODERS}
        self._calls: list[Call] = []
        self._position: list[int] = []  # of each call's example in the step's batch
        self._text_of: list[int] = []  # calls that return a text
        self._results: Callable[[], list[Result]] = list

    def _call(self, position: int, call: Call) -> int:
        self._calls.append(call)
        self._position.append(int(position))
        return len(self._calls) - 1

    def medium(self, phase: str, position: int, call: Call, segment: int) -> None:
        self._media[phase].append((self._call(position, call), segment))

    def ready(self, phase: str, rows: Tensor) -> None:
        self._media[phase].append(rows)

    def text(self, position: int, call: Call) -> None:
        self._text_of.append(self._call(position, call))

    def whole(self, position: int, call: Call, segments: dict[str, list[int]]) -> None:
        number = self._call(position, call)
        self._text_of.append(number)
        for phase, of_phase in segments.items():
            self._media[phase] += [(number, segment) for segment in of_phase]

    def start(self, workers: Workers) -> _Request:
        self._results = workers.request(self._calls)
        return self

    def results(self, failed: list[FailedSegment]) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Waits. Appends to `failed` what could not be decoded."""
        results = self._results()
        for position, result in zip(self._position, results, strict=True):
            failed += _failures(position, result)

        def rows(entry: Tensor | tuple[int, int]) -> Tensor:
            if isinstance(entry, Tensor):
                return entry
            value = results[entry[0]].value
            return value.media[entry[1]] if isinstance(value, Example) else value

        media = {phase: [rows(e) for e in entries] for phase, entries in self._media.items()}
        return media, [*self.texts, *(_text(results[c].value) for c in self._text_of)]


def _load(index: int) -> Call:
    return Call("load", (int(index),), {})


def _load_medium(index: int, segment: int) -> Call:
    return Call("load", (int(index),), {"text": False, "segments": [segment]})


def _load_text(index: int) -> Call:
    return Call("load", (int(index),), {"segments": []})


def _failures(position: int, result: Result) -> list[FailedSegment]:
    return [FailedSegment(int(position), *failure) for failure in result.failed]


def _text(example: Example) -> Tensor:
    """(L, 2) int32: [token id, label]."""
    return torch.stack([example.token_ids, example.labels], dim=1)
