"""The feed of a model of transformers: what its processor makes of media and of the examples that
hold them, joined to one packed row and the media that its encoders take. By dispatch:

- `load`: each rank reads the media that it encodes and the text that its LLM takes.
- `tensors`: whole examples that it sampled. Text, and what ranks have to know of media, move here;
  the tensors of media move later, on the device's group.
- `bytes`: text of examples that it sampled, made there without decoding the media that leave; these
  move here as they are stored, and are decoded and processed after.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from orchmllm.batch import UNCOUNTED, FailedSegment, Microbatch, ProcessedExample, Step
from orchmllm.comm.exchange import RowGather
from orchmllm.comm.exchange_bytes import Postponed, exchange_bytes
from orchmllm.comm.pieces import Media, Piece
from orchmllm.data.dataset import CACHED_BYTES
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.loading.long_calls import LONG_S, LONGER, NEXT, STEPS_PLANNED, Calls
from orchmllm.data.loading.rank_messages import packed, unpacked
from orchmllm.data.loading.ray_workers import RayWorkers
from orchmllm.data.loading.workers import Workers
from orchmllm.data.made import described
from orchmllm.data.sampler import GlobalSampler
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PlanSpec
from orchmllm.plan.layout import ENCODERS, OF_MEDIA, BatchLayout
from orchmllm.plan.rearrange import Rearrangement

SEGMENTS_PLANNED = 1 << 20  # of all ranks, in the steps that a rank holds: some 200 bytes each
# Of a microbatch and a rank: media by phase (tensors by argument, for `tensors` a Piece, for
# `bytes` also the row that a medium is loaded from), and examples without their media.
Content = tuple[dict[str, list], list[ProcessedExample]]


class Request:
    """What this rank reads of a microbatch, one call for each example: for `load` what it
    processes, in slot order, else what it sampled, in source order. media[phase]: (example,
    segment); texts: examples. options: further keywords of each call. room: see Calls."""

    def __init__(self, micro: Microbatch, rank: int, dispatch: str, dataset: Any,
                 workers: Workers | RayWorkers, options: Mapping[str, Any], step: int,
                 room: int) -> None:
        plan, layout, mine = micro.plan, micro.plan.layout, micro.rank_plan
        self.micro, self.media = micro, {}
        sampled = np.arange(layout.num_examples)[plan.texts.items_of(rank)]
        self.texts = (mine.examples if dispatch == "load" else sampled).tolist()
        wanted: dict[int, dict] = {
            e: {"text": True, "segments": [], **options} for e in self.texts}
        for phase, code in plan.spec.of_media.items():
            self.media[phase] = here = list(map(tuple, mine.media[phase].tolist()))
            if dispatch != "load":
                at = layout.places(layout.segments[code][plan.encode[phase].items_of(rank)])
                self.media[phase] = list(map(tuple, at.tolist()))
            leaving = set(self.media[phase]).difference(here) if dispatch == "bytes" else ()
            for example, segment in self.media[phase]:
                keys = wanted.setdefault(
                    example, {"text": False, "segments": [], **options})
                keys["segments"].append(segment)
                if (example, segment) in leaving:
                    keys.setdefault("encoded", []).append(segment)
        self._ids = {e: int(layout.example_id[e]) for e in wanted}
        self.calls = Calls(workers, dataset, [((self._ids[example],), keys)
                                              for example, keys in wanted.items()], step, room)

    def loaded(self, step: Step) -> dict[int, Any]:
        """Waits. What the dataset loaded of each example; what could not be decoded is added to
        step.failed."""
        out = {}
        for (example, index), (value, failures, seconds) in zip(
                self._ids.items(), self.calls.results(), strict=True):
            out[example] = value
            step.slowest = max(step.slowest, (seconds, index))
            position = int(self.micro.positions[example])
            step.failed += [FailedSegment(position, *failure) for failure in failures]
        return out


class WholeFeed:
    """Examples of a dataset that knows lengths before it decodes, and decodes single segments. With
    worker processes the next steps are planned before one is taken (see long_calls), so that they
    have work meanwhile. An example is one call of the dataset on each rank that needs something of
    it. A rank for which a step has too few examples gets a row of one token, of which it learns
    nothing: the model needs a row; one that encodes nothing where others do encodes a blank medium.

    dataset: has reader (an orchmllm.data.processed.ProcessedReader), layout, load and describe of
    orchmllm.data.dataset.ConversationDataset. If it has them, kept, layouts and prepare_loads are
    used, too: to give a worker what planning read, and to read several examples at once. So is
    cached_examples, of how many it keeps what planning read. pool: of a Ray cluster, reads and
    decodes instead (orchmllm.data.loading.ray_workers). model: an
    orchmllm.models.whole_model.WholeModel with encoders."""

    num_dropped = 0

    def __init__(self, dataset: Any, sampler: GlobalSampler, orchestrator: Orchestrator,
                 num_steps: int, num_workers: int = 0, pool: Any = None, *, model: Any) -> None:
        self.dataset, self.sampler, self.orchestrator = dataset, sampler, orchestrator
        self.num_steps = num_steps
        self.config_digest = int(num_workers > 0)
        self.dispatch = orchestrator.spec.balance.dispatch
        self.knows_all = self.dispatch == "load"  # every rank can probe every example
        self._workers = (Workers(dataset, num_workers) if pool is None else
                         RayWorkers(dataset, pool, num_workers, orchestrator.rank))
        self._requested: deque[list[Request]] = deque()
        self._num_loaded, self._steps_kept, self._num_segments = 0, STEPS_PLANNED, 1
        self._model, self.options = model, {"raw": model.encoders.raw}  # of every load
        self._blank = cache(lambda phase: self._described(
            phase, self.dataset.reader.blank(OF_MEDIA[phase])))

    @property
    def lookahead(self) -> int:
        """It grows with the steps that were loaded, so that the first one comes soon, and ends
        where the dataset would forget what was planned, or the plans would take much memory."""
        most = min(STEPS_PLANNED, NEXT - 1 + 3 * self._num_loaded, self._steps_kept,
                   SEGMENTS_PLANNED // self._num_segments)
        return self.config_digest * max(NEXT - 1, most)

    def draw(self, index: int) -> BatchLayout | None:
        if index >= self.num_steps:
            return None
        self._workers.start()  # before this process has threads that fetch
        sampled, rank = self.sampler.batch(index), self.orchestrator.rank
        shares = self.sampler.shares(index, self.orchestrator.world_size)
        probed = sampled if self.knows_all else sampled[shares[rank]]
        sizes = [s.stop - s.start for s in shares]
        planned = sum(sizes) if self.knows_all else max(sizes)
        self._steps_kept = getattr(self.dataset, "cached_examples", 1 << 30) // max(planned, 1) - 1
        sizes = sizes if self.knows_all else [len(probed)]
        if hasattr(self.dataset, "layouts"):
            return self.dataset.layouts(probed, sizes)
        return BatchLayout.concat([self.dataset.layout(int(i)) for i in probed], sizes)

    def announce(self, step: Step) -> None:
        self._requested.append([])
        self._num_segments = len(step.layout.modality)
        for micro in step.micro:
            kept = sum(r.calls.num_bytes for requests in self._requested for r in requests)
            self._requested[-1].append(Request(
                micro, self.orchestrator.rank, self.dispatch, self.dataset, self._workers,
                self.options, step.index, CACHED_BYTES - kept))
        self._ask()

    def _ask(self) -> None:
        """Asks workers for what the next steps need, and for what of later ones takes longest."""
        steps_s = [sum(sum(r.calls.takes_s) for r in requests) for requests in self._requested]
        early_s = max(LONG_S, LONGER * sum(steps_s) / max(len(steps_s), 1))
        for k, requests in enumerate(self._requested):
            for request in requests:
                request.calls.ask(early_s if k >= NEXT else 0.0)

    def load(self, step: Step) -> tuple[int, int]:
        self._ask()  # also once no step is announced any more
        self._num_loaded += 1
        requests, postponed = self._requested.popleft(), Postponed()
        contents = [postponed.call(self._read, request, step) for request in requests]
        sent = [content and content[0] for content in contents]
        if self.dispatch != "load":
            contents = [self._moved(content, request, postponed)
                        for content, request in zip(contents, requests, strict=True)]
        if not postponed.everything_came():
            return UNCOUNTED
        if self.dispatch == "bytes":
            self._decode(contents, step)
        for micro, (media, examples), own in zip(step.micro, contents, sent, strict=True):
            there = {phase: self._media(phase, media[phase], own[phase], micro)
                     for phase, move in micro.plan.encode.items() if len(move.order)}
            micro.content = self._model.join(examples, there, micro, step.index)
            if self.orchestrator.device.type == "cuda":
                # The copy into pinned memory is paid here, in the prefetch thread; that to the
                # device is then one that the training thread does not wait for.
                micro.content = micro.content.moved(Tensor.pin_memory)
        return UNCOUNTED  # the lengths tell it

    def close(self) -> None:
        self._requested.clear()
        self._workers.close()

    def _read(self, request: Request, step: Step) -> Content:
        """What this rank reads of a microbatch."""
        loaded = request.loaded(step)
        media = {p: [loaded[e].parts[s] for e, s in at] for p, at in request.media.items()}
        if self.dispatch == "tensors":
            media = {p: [self._described(p, tensors) for tensors in some]
                     for p, some in media.items()}
        return media, [replace(loaded[e], parts={}) for e in request.texts]

    def _moved(self, content: Content | None, request: Request, postponed: Postponed) -> Content:
        """The same on the ranks that process it, in slot order; of media whose tensors move later
        what has to be known before. content: None where this rank has nothing to send."""
        plan = request.micro.plan
        media, examples = content or ({}, None)
        there = {p: self._exchanged(media.get(p), len(at), plan.encode[p], postponed)
                 for p, at in request.media.items()}
        return there, self._exchanged(examples, len(request.texts), plan.texts, postponed)

    def _exchanged(self, items: Sequence[Any] | None, count: int, move: Rearrangement,
                   postponed: Postponed) -> list[Any]:
        """items: `count` of them, or None where this rank has none to send."""
        def data(at: int) -> np.ndarray | None:
            if items is None:
                return None
            item = items[at].described if isinstance(items[at], Piece) else items[at]
            return postponed.call(packed, item)

        came = exchange_bytes([partial(data, k) for k in range(count)], move,
                              self.orchestrator.rank, self.orchestrator.group)
        postponed.incomplete |= any(item is None for item in came)
        return [items and items[item] if isinstance(item, int) else
                item is not None and postponed.call(unpacked, item) for item in came]

    def _decode(self, contents: Sequence[Content], step: Step) -> None:
        """Tensors in place of the media that came as they are stored."""
        calls, places = [], []
        for micro, (media, _) in zip(step.micro, contents, strict=True):
            for phase, came in media.items():
                for slot, (example, segment) in enumerate(micro.rank_plan.media[phase].tolist()):
                    if isinstance(came[slot], MeasuredExample):
                        calls.append(((int(micro.plan.layout.example_id[example]),), {
                            "text": False, "segments": [segment], "row": came[slot],
                            **self.options}))
                        places.append((came, slot, segment, int(micro.positions[example])))
        results = self._workers.request("load", calls, step.index)()
        for (came, slot, segment, position), (loaded, failures, _) in zip(
                places, results, strict=True):
            came[slot] = loaded.parts[segment]
            step.failed += [FailedSegment(position, *failure) for failure in failures]

    def _media(self, phase: str, media: list, sent: list[Piece], micro: Microbatch) -> Media:
        """What this rank encodes, or a blank medium."""
        if self.dispatch == "tensors":
            return Media.elsewhere(media, sent, micro.plan.encode[phase], self.orchestrator.rank,
                                   partial(self._blank, phase))
        return Media.here([self._described(phase, tensors) for tensors in media]
                          or [self._blank(phase)])

    def _described(self, phase: str, tensors: Mapping[str, Tensor]) -> Piece:
        """A medium as the part of its phase takes it."""
        if phase in ENCODERS:
            return self._model.encoders.described(phase, tensors)
        return described(tensors)


def feed_of(model: Any, dataset: Any, spec: PlanSpec, gather: RowGather, log: Callable[[str], None]
            ) -> tuple[Callable[..., WholeFeed], PlanSpec]:
    """(The feed of a model, in which images are bytes until they are encoded where that is exact on
    all ranks; `spec` with the bytes that move then, and with the media that may be cut). Says of
    what it is not exact. Collective; gather: of all ranks."""
    for name, find in dataset.reader.processor.arithmetic().items():
        why, pixels = "another rank cannot make them of bytes", None
        try:
            pixels = model.encoders.prove(*find())
        except Exception as error:  # whatever it is, float32 is right
            why = f"{type(error).__name__}: {error}"
        if gather(np.array([pixels is not None], np.int64)).all():
            model.encoders.pixels[name] = pixels
        else:
            log(f"{name} travel as float32, which is four times the bytes: {why}")
    if spec.row_bytes.get("vision"):
        there = dataset.reader.image_row_bytes(model.encoders.raw)
        spec = replace(spec, row_bytes={**spec.row_bytes, "vision": there})
    spec = replace(spec, cut_media=model.encoders.cut_media)
    return partial(WholeFeed, model=model), spec
