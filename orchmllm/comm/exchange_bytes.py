"""Byte strings of any sizes between ranks: media and examples as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from orchmllm.comm import exchange as comm
from orchmllm.plan.rearrange import Rearrangement, sums_of

T = TypeVar("T")


def exchange_bytes(
    items: Sequence[Callable[[], np.ndarray | None]], move: Rearrangement, rank: int,
    group: dist.ProcessGroupGloo,
) -> list[int | np.ndarray | None]:
    """Moves byte strings of any sizes between the ranks of a gloo_group.

    items: this rank's part of `move`'s source items; each is called for its bytes, (n,) uint8, only
    if it leaves the rank, and must not raise, because the other ranks are waiting: it returns None
    if there are none (see Postponed). Returns this rank's target items in slot order: the position
    in `items` of one that stayed, the bytes of one that came, None if its sender had none. A `move`
    that keeps all items where they are issues no collective; else there are two, sizes and bytes.
    """
    d = len(move.source_sizes)
    exchange = move.exchange(np.ones(len(move.order), np.int64), rank)
    local_of = exchange.send_index  # local item at each place of the send buffer
    sent_to = np.repeat(np.arange(d), exchange.input_splits)
    came_from = np.repeat(np.arange(d), exchange.output_splits)
    out: list[int | np.ndarray | None] = [0] * len(came_from)
    slots = np.empty(len(came_from), np.int64)  # target slot of each place of the receive buffer
    slots[exchange.recv_index] = np.arange(len(slots))
    for slot, item in zip(slots[came_from == rank], local_of[sent_to == rank], strict=True):
        out[slot] = int(item)
    if not exchange.moves:
        return out
    leaving = [items[i]() for i in local_of[sent_to != rank]]
    sizes = torch.tensor([-1 if b is None else len(b) for b in leaving], dtype=torch.int64)
    to, came = (np.where(np.arange(d) == rank, 0, splits)  # what stays is not sent
                for splits in (exchange.input_splits, exchange.output_splits))
    incoming = comm.all_to_all(sizes, came.tolist(), to.tolist(), group)
    there = [b for b in leaving if b is not None]
    blob = torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *there]))
    received = comm.all_to_all(blob, _sums(incoming, came), _sums(sizes, to), group).numpy()
    ends = np.cumsum(incoming.numpy().clip(min=0))
    for slot, size, end in zip(slots[came_from != rank], incoming.tolist(), ends, strict=True):
        out[slot] = received[end - size: end] if size >= 0 else None
    return out


def _sums(sizes: Tensor, splits: np.ndarray) -> list[int]:
    """Bytes per rank of consecutive items."""
    return sums_of(sizes.clamp(min=0).numpy(), splits).tolist()


class Postponed:
    """What failed on this rank between exchanges of one step, until all of them are done: the other
    ranks are waiting in them, and learn of it in COMMIT.

    incomplete: whether another rank had nothing to send in place of an item."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self.incomplete = False

    def call(self, function: Callable[..., T], *args: Any) -> T | None:
        """function(*args); None if it raises."""
        try:
            return function(*args)
        except Exception as e:
            self._error = self._error or e
            return None

    def everything_came(self) -> bool:
        """After the last exchange: raises this rank's first error; False if that of another rank
        leaves nothing to do but to go to COMMIT, where it is raised."""
        if self._error is not None:
            raise self._error
        return not self.incomplete
