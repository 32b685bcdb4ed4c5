"""The encoders of a model of transformers, where a plan says which rank encodes which medium.

In the prefetch thread `described` says what an encoder takes of the tensors of one medium, and
`packed` puts those of a rank's media together; Orchestrator.dispatch moves them where the recipe
says so. In the forward `answering` makes the arguments of each encoder, runs it once, moves its
features to the ranks that the plan names in one exchange, and lets the model's own calls of its
encoders return them. Nothing is gathered: what a rank has to know of the others is in the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.batch import Microbatch, ProcessedExample, joined, on_device
from orchmllm.comm.exchange import exchange_rows
from orchmllm.comm.pieces import Form, Media, Piece
from orchmllm.encoders.answers import Answers
from orchmllm.encoders.blank import BlankMedia
from orchmllm.encoders.infer import infer_encoders
from orchmllm.encoders.items import Items, Layout, Place, Tiles, Values, form_of, table_of
from orchmllm.encoders.mirrored import Mirrored, mirrored, on_host
from orchmllm.encoders.pixels import Pixels, proven
from orchmllm.encoders.results import Features, flatten
from orchmllm.encoders.sharing import run_encoder
from orchmllm.encoders.spec import Encoder, check_encoder
from orchmllm.encoders.table import LocalItems
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.rearrange import Exchange, ranges, sums_of

_NUMBERS = "batch_num_images"


class Clock(Protocol):
    """See orchmllm.models.phase_clock.PhaseClock."""

    def switch(self, phase: str) -> None: ...

    def mark(self, x: Tensor, *, before: str, after: str) -> Tensor: ...


@dataclass(frozen=True)
class EncodedItems:
    """What a rank encodes of one phase of a microbatch, and which features its LLM takes.

    media: in the order of the encoder; is_placeholder: they are made for a rank that encodes
    nothing while others do. items_per_segment, num_tokens (s,): items and planned features of each
    segment that it encodes. exchange: of features, from encoder ranks to LLM ranks. num_segments:
    of each call of the model here; num_rows (n,): features of each of these, those of the first
    call, then of the next; order (R,): where their rows are among those that arrive (None: in this
    order).
    """

    media: Media
    is_placeholder: bool
    items_per_segment: np.ndarray
    num_tokens: np.ndarray
    exchange: Exchange
    num_segments: list[int]
    num_rows: np.ndarray
    order: Tensor | None

    @property
    def meta(self) -> np.ndarray:
        """(k, columns) of each item, see orchmllm.encoders.items."""
        return np.concatenate([piece.meta for piece in self.media.pieces])

    def moved(self, move: Callable[[Tensor], Tensor]) -> EncodedItems:
        """With `move` of every tensor."""
        return replace(self, media=self.media.moved(move),
                       order=None if self.order is None else move(self.order))

    def exchanged(self, group: dist.ProcessGroup | None) -> EncodedItems:
        """With the media that come from other ranks, see Media."""
        return replace(self, media=self.media.exchanged(group))


class PlannedEncoders:
    """The encoders that are inferred for `model`, one for each phase. group: ranks among which
    features are exchanged (default: all). Raises ValueError for a model whose encoders cannot be
    balanced exactly, see balance_encoders."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._owner, found = infer_encoders(model)
        self._group = group
        self._encoders: dict[str, Encoder] = {}
        self.pixels: dict[str, Pixels] = {}  # by argument, of those that are given as bytes
        for encoder in found:  # images come before video, where these are encoded apart
            check_encoder(self._owner, encoder)
            encoder = replace(encoder, calls={
                call: _numbered(layout, attrgetter(call)(self._owner))
                for call, layout in encoder.calls.items()})
            self._encoders.setdefault("audio" if encoder.name == "audio" else "vision", encoder)

    def blank(self, phase: str) -> BlankMedia:
        """Media without content for the encoder of a phase."""
        return BlankMedia(phase, self._owner, self._encoders[phase])

    @property
    def cut_media(self) -> tuple[str, ...]:
        """Phases of whose media a rank's LLM may get a part: their features are rows that the model
        reads one after the other, whichever medium they are of."""
        return tuple(phase for phase, encoder in self._encoders.items()
                     if callable(encoder.rows) and not encoder.padded)

    @property
    def raw(self) -> dict[str, int]:
        """Arguments that are given as bytes -> the copies of a frame that do not travel."""
        return {name: pixels.copies for name, pixels in self.pixels.items()}

    def prove(self, table: Tensor, copies: int, samples: Iterable[tuple[Mapping, Mapping]]
              ) -> Pixels:
        """What images need that travel as bytes, see `proven`. table: (3, 256). Raises
        ValueError."""
        return proven(table, copies, samples, lambda tensors: _items(
            self._encoders["vision"], self._owner, tensors))

    def described(self, phase: str, tensors: Mapping[str, Tensor]) -> Piece:
        """What the encoder takes of the tensors of one medium, of any shapes. Integers beside its
        content, such as masks, are for the hosts: models read them. Raises ValueError for tensors
        that it does not understand."""
        encoder = self._encoders[phase]
        items = _items(encoder, self._owner, tensors)
        return Piece(_layout_of(encoder, tensors).value, items.meta, tuple(
            Form(v.dtype, tuple(v.shape)) if k == 0 or v is not None and v.is_floating_point()
            else None for k, v in enumerate(items.values)), items.values)

    def features(self, phase: str, media: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """(R, W) features of media, which are encoded here without a plan. media: the tensors of
        each, on the training device and in the dtype of the encoder."""
        encoder, pieces = self._encoders[phase], [self.described(phase, one) for one in media]
        meta = np.concatenate([piece.meta for piece in pieces])
        columns = zip(*(piece.values for piece in pieces), strict=True)
        arguments = encoder.layout.build(meta, tuple(
            None if column[0] is None else joined(column, 0) for column in columns))
        result = run_encoder(encoder, self._owner, next(iter(encoder.calls)), arguments)
        return flatten(encoder, self._owner, result, meta, placeholder=False).rows

    def packed(self, examples: Sequence[ProcessedExample], media: Mapping[str, Media],
               micro: Microbatch) -> dict[str, EncodedItems]:
        """The phases of which any rank has media. examples: those of this rank's LLM; media[phase]:
        what this rank encodes, or any one medium if it encodes none. On the CPU."""
        return {phase: self._packed(phase, examples, media[phase], micro)
                for phase in ENCODERS if len(micro.plan.encode[phase].order)}

    def _packed(
        self, phase: str, examples: Sequence[ProcessedExample], media: Media, micro: Microbatch,
    ) -> EncodedItems:
        """n media are encoded here, m segments of media are taken by the LLM here. Three orders
        meet: that of the plan's slots (n,), that in which the encoder gets the media (n,), and that
        in which the model's calls return features (m,)."""
        encoder, plan, layout = self._encoders[phase], micro.rank_plan, micro.plan.layout
        mine = plan.media[phase]  # (n, 2)
        num_tokens = layout.num_tokens[layout.segment_start[mine[:, 0]] + mine[:, 1]]  # (n,)
        exchange = plan.feature[phase]
        slot_at = _uncut_last(encoder.layout, media.pieces)  # (n,), or of the one placeholder
        media = replace(media, pieces=[media.pieces[slot] for slot in slot_at],
                        starts=media.starts[slot_at])
        if len(mine):  # what the plan sends as row r of its slots is row_at[r] of what is encoded
            row_at = np.argsort(_rows_of(slot_at, num_tokens))
            exchange = replace(exchange, send_index=row_at[exchange.send_index])
            num_tokens = num_tokens[slot_at]
        here = dict(zip(plan.examples.tolist(), examples, strict=False))
        names = [here[e].arguments[s] for e, s in plan.taken[phase].tolist()]  # m of them
        taken = [layout.value for layout in encoder.calls.values()]
        call_of = np.array([taken.index(name) for name in names], np.int64)  # (m,)
        by_call = np.argsort(call_of, kind="stable")
        stays = np.array_equal(by_call, np.arange(len(by_call)))
        return EncodedItems(
            media, is_placeholder=not len(mine), items_per_segment=np.array(
                [len(piece.meta) for piece in media.pieces[: len(mine)]], np.int64),
            num_tokens=num_tokens, exchange=exchange,
            num_segments=np.bincount(call_of, minlength=len(taken)).tolist(),
            num_rows=exchange.lengths[by_call],
            order=None if stays else torch.from_numpy(_rows_of(by_call, exchange.lengths)))

    @contextmanager
    def answering(
        self, phases: Mapping[str, EncodedItems], inputs: dict[str, Any], clock: Clock,
        dtype: torch.dtype,
    ) -> Iterator[None]:
        """Within it the model's forward, called with `inputs`, gets the features of this rank's
        media. phases: on the training device; inputs: gets stand-ins for the content of media,
        which is elsewhere. dtype: of what the encoders get. Collective.

        Raises RuntimeError where an encoder made other rows than planned, or the forward did not
        use its features."""
        answers = Answers(self._owner, join="")
        try:
            for phase, items in phases.items():
                encoder = self._encoders[phase]
                clock.switch(phase)
                arguments = self._arguments(encoder, items, dtype)
                features = self._encoded(encoder, items, arguments)
                rows = clock.mark(features.rows, before=phase, after="exchange")
                rows = exchange_rows(rows, items.exchange, self._group)
                rows = clock.mark(rows, before="exchange", after="llm")
                if items.order is not None:
                    rows = rows.index_select(0, items.order)
                for layout, count in zip(encoder.calls.values(), items.num_segments, strict=True):
                    if count:
                        inputs[layout.value] = arguments[0][:1].expand(
                            count, *arguments[0].shape[1:])
                local = LocalItems(items.meta, (), counts=items.num_segments, inputs=inputs,
                                   options={})
                answers.add(encoder, local, features, rows, items.num_rows)
            answers.join_zero((), {}, inputs, [])
            yield
        finally:
            error = answers.close()
        if error is not None:
            raise error

    def _arguments(self, encoder: Encoder, items: EncodedItems, dtype: torch.dtype
                   ) -> tuple[Tensor | None, ...]:
        """Of the encoder, in the order of its layout. dtype: of those that are no integers."""
        media = items.media
        names = [piece.argument for piece in media.pieces]
        columns = zip(*(piece.views(media.data, start) for piece, start in zip(
            media.pieces, media.starts.tolist(), strict=True)), strict=True)
        known = zip(*(piece.values for piece in media.pieces), strict=True)
        values: list[Tensor | None] = []
        for k, (column, told) in enumerate(zip(columns, known, strict=True)):
            if column[0] is not None:  # pixels are the first
                values.append(joined([*self._restored(names if k == 0 else [""] * len(names),
                                                      column, dtype)], 0))
            else:
                values.append(None if told[0] is None else Mirrored(
                    on_host(joined, told, 0), media.data.device))
        return encoder.layout.build(items.meta, tuple(values), mirrored)

    def _restored(self, names: Sequence[str], column: Sequence[Tensor], dtype: torch.dtype
                  ) -> Iterator[Tensor]:
        """The tensors of media; those of one shape that follow each other are joined. names: of the
        argument that holds each medium, where these are its pixels."""
        def kind(at: int) -> tuple:
            return names[at], column[at].dtype, column[at].shape[1:]

        for (name, there, _), run in groupby(range(len(names)), kind):
            value = torch.cat([column[at] for at in run])
            if there == torch.uint8 and name in self.pixels:  # else the processor makes bytes
                value = self.pixels[name].restored(value, dtype)
            yield value.to(dtype) if value.is_floating_point() else value

    def _encoded(
        self, encoder: Encoder, items: EncodedItems, arguments: Sequence[Tensor | None]
    ) -> Features:
        """Raises RuntimeError for other rows than planned."""
        result = run_encoder(encoder, self._owner, next(iter(encoder.calls)), arguments)
        features = flatten(encoder, self._owner, result, items.meta, items.is_placeholder)
        found = sums_of(features.counts, items.items_per_segment)
        if not np.array_equal(found, items.num_tokens):
            raise RuntimeError(
                f"encoder {encoder.name!r} made {found.tolist()} rows of features of its media, "
                f"where {items.num_tokens.tolist()} were planned")
        return features


@dataclass(frozen=True)
class _Numbered(Tiles):
    """Tiles of a model that cuts an image only where its example has no other. It is told by the
    number of images of each example; a larger last number than there are images does no harm."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*super().arguments, _NUMBERS)

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        """Of one image."""
        if int(inputs.get(_NUMBERS, 1)) == 1:  # as the model takes it where nobody says
            return super().describe(module, inputs)
        meta = np.append(table_of(self.sizes, inputs[self.sizes]), [[1]], axis=1)
        return Items(meta, (inputs[self.value][:, 0], form_of(inputs[self.sizes])))

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        """Images with one tile have to be the last ones."""
        uncut = int((meta[:, 2] == 1).sum())
        numbers = [1] * (len(meta) - uncut) + [max(2, uncut)] * (uncut > 0)
        return *super().build(meta, values, place), place(np.array(numbers), values[0].device)


def _uncut_last(layout: Layout, pieces: Sequence[Piece]) -> np.ndarray:
    """(n,) pieces in the order in which they are encoded, see _Numbered."""
    return np.argsort([isinstance(layout, _Numbered) and piece.forms[0].shape[0] == 1
                       for piece in pieces], kind="stable")


def _rows_of(items: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(R,) numbers of the rows of `items` (n,), one after the other, where item i has lengths[i] of
    them."""
    first = np.cumsum(lengths) - lengths
    return ranges(first[items], lengths[items])


def _numbered(layout: Layout, call: Callable) -> Layout:
    if isinstance(layout, Tiles) and _NUMBERS in inspect.signature(call).parameters:
        return _Numbered(layout.value, layout.sizes, layout.count)
    return layout


def _items(encoder: Encoder, owner: nn.Module, tensors: Mapping[str, Tensor]) -> Items:
    return _layout_of(encoder, tensors).describe(owner, tensors)


def _layout_of(encoder: Encoder, tensors: Mapping[str, Tensor]) -> Layout:
    """That of the call which takes a medium. Raises ValueError if none does."""
    for layout in encoder.calls.values():
        if layout.value in tensors:
            return layout
    raise ValueError(f"encoder {encoder.name!r} takes none of {', '.join(tensors)}")
