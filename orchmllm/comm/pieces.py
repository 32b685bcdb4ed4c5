"""Media on their way to the encoder that a plan names: one buffer of bytes on each rank, whatever
tensors a processor makes. What a rank has to know of a medium to read it there (`Piece`) is small
and travels before, in the prefetch thread.

Bytes have one dtype and no shape, so that ranks with other media, or none, agree on the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchmllm.comm.exchange import all_to_all
from orchmllm.plan.rearrange import Rearrangement, sums_of

_ALIGNED = 16  # bytes: every tensor begins at a multiple of its element's size


class Form(NamedTuple):
    """Of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """In a buffer."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Piece:
    """A medium as its encoder takes it. argument: of the model, that holds such media. meta (k,
    columns), values: see orchmllm.encoders.items.Items. forms: of the values that are in a buffer:
    None where an optional one was not given, and for those that every host gets, such as masks.
    """

    argument: str
    meta: np.ndarray
    forms: tuple[Form | None, ...]
    values: tuple[Tensor | None, ...] = ()

    @property
    def described(self) -> Piece:
        """Without the values that are in a buffer."""
        return replace(self, values=tuple(
            None if form else value for form, value in zip(self.forms, self.values, strict=True)))

    @property
    def num_bytes(self) -> int:
        return sum(form.num_bytes for form in self.forms if form)

    def views(self, data: Tensor, start: int) -> list[Tensor | None]:
        """The values, in a buffer (B,) uint8 where they begin at `start`."""
        out: list[Tensor | None] = []
        for form in self.forms:
            size = form.num_bytes if form else 0
            used = math.prod(form.shape) * form.dtype.itemsize if form else 0
            out.append(data[start: start + used].view(form.dtype).view(form.shape)
                       if form else None)
            start += size
        return out


@dataclass(frozen=True)
class Media:
    """What a rank encodes in one phase of a microbatch. pieces: in the order of their slots,
    without values; starts (n,): where each is in `data` (B,) uint8, once that has been moved.
    splits: bytes from and to each rank, where media change rank on any; fallback: `data` of a rank
    to which nothing comes."""

    pieces: Sequence[Piece]
    starts: np.ndarray
    data: Tensor
    splits: tuple[list[int], list[int]] | None = None
    fallback: Tensor | None = None

    @classmethod
    def here(cls, pieces: Sequence[Piece]) -> Media:
        """Of media whose values are on this rank."""
        return cls([piece.described for piece in pieces], _starts(pieces), _filled(pieces))

    @classmethod
    def elsewhere(cls, pieces: Sequence[Piece], sent: Sequence[Piece], move: Rearrangement,
                  rank: int, blank: Callable[[], Piece]) -> Media:
        """Of media that `move` still brings. sent: those that this rank has, with values; blank: a
        medium for a rank that encodes none."""
        exchange = move.exchange(np.ones(len(move.order), np.int64), rank)
        if not exchange.moves:
            return cls.here([sent[i] for i in exchange.send_index[exchange.recv_index]]
                            or [blank()])
        leaving = [sent[i] for i in exchange.send_index]
        arriving = [pieces[slot] for slot in np.argsort(exchange.recv_index)]
        came, went = (sums_of(_sizes(ones), splits).tolist() for ones, splits in (
            (arriving, exchange.output_splits), (leaving, exchange.input_splits)))
        starts, fallback = _starts(arriving)[exchange.recv_index], None
        if not pieces:
            pieces, starts = [blank()], np.zeros(1, np.int64)
            fallback = _filled(pieces)
        return cls([piece.described for piece in pieces], starts, _filled(leaving), (came, went),
                   fallback)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Media:
        """With `move` of every tensor."""
        return replace(self, data=move(self.data),
                       fallback=None if self.fallback is None else move(self.fallback))

    def exchanged(self, group: dist.ProcessGroup | None) -> Media:
        """On the ranks that encode them. Collective where a medium changes rank on any."""
        if self.splits is None:
            return self
        data = all_to_all(self.data, *self.splits, group)
        return replace(self, data=data if self.fallback is None else self.fallback, splits=None,
                       fallback=None)


def _sizes(pieces: Sequence[Piece]) -> np.ndarray:
    return np.array([piece.num_bytes for piece in pieces], np.int64)


def _starts(pieces: Sequence[Piece]) -> np.ndarray:
    sizes = _sizes(pieces)
    return np.cumsum(sizes) - sizes


def _filled(pieces: Sequence[Piece]) -> Tensor:
    """The values of media, one after the other, as (B,) uint8."""
    data = torch.zeros(int(_sizes(pieces).sum()), dtype=torch.uint8)
    for piece, start in zip(pieces, _starts(pieces).tolist(), strict=True):
        for view, value in zip(piece.views(data, start), piece.values, strict=True):
            if view is not None:
                view.copy_(value)
    return data
