"""Attention of pieces of examples that ranks share (orchmllm.plan.shares): in every layer the ranks
of a node send each other the keys and values of these examples, and the rows of a piece attend to
those of the whole example.

It is the one exchange inside of blocks: where a block is computed again, all ranks of the node
exchange again, in the same order. Whether they do is a function of the plan: without shared
examples in a node there is no exchange. A rank that shares none while others of its node do takes
part with no rows, in the backward pass, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from orchmllm.batch import SequenceLengths
from orchmllm.comm.exchange import send_rows
from orchmllm.plan.shares import SharedRows


@dataclass(frozen=True)
class SharedExamples:
    """What a rank's attention needs of other ranks of its node. plan: of this rank; lengths: of the
    pieces in its row. send, recv (k,): indices of its exchange. group: of the ranks of the node."""

    plan: SharedRows
    lengths: tuple[int, ...]
    send: Tensor
    recv: Tensor
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, plan: SharedRows, lengths: tuple[int, ...], group: dist.ProcessGroup | None
           ) -> SharedExamples:
        """On the CPU."""
        return cls(plan, lengths, torch.from_numpy(plan.exchange.send_index),
                   torch.from_numpy(plan.exchange.recv_index), group)

    def moved(self, move: Callable[[Tensor], Tensor]) -> SharedExamples:
        """With `move` of every tensor, of any shape."""
        return replace(self, send=move(self.send), recv=move(self.recv))

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key (1, Hkv, R, D), value (1, Hkv, R, Dv) of this rank's row -> those of every example
        that it shares, one after the other, (1, Hkv, N, D) and (1, Hkv, N, Dv). Collective in the
        node; differentiable."""
        rows = [x.squeeze(0).transpose(0, 1) for x in (key, value)]
        row = torch.cat([x.flatten(1) for x in rows], 1)
        if torch.is_grad_enabled() and not row.requires_grad:
            row = row.detach().requires_grad_()  # the gradients of other ranks come here, too
        found = send_rows(row, self.send, self.recv, self.plan.exchange, self.group)
        keys, values = found.split([x[0].numel() for x in rows], 1)
        return tuple(part.unflatten(1, x.shape[1:]).transpose(0, 1)[None]
                     for part, x in zip((keys, values), rows, strict=True))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Of the row: whole examples that follow each other, or a piece of one that is shared."""
        return tuple(self._runs())

    def _runs(self) -> Iterator[Run]:
        device, k = self.send.device, 0
        for shared, some in groupby(self.plan.places, lambda place: place is not None):
            places = [*some]
            lengths, k = self.lengths[k: k + len(places)], k + len(places)
            for of, place in (zip(([n] for n in lengths), places, strict=True) if shared
                              else [(lengths, None)]):
                rows = SequenceLengths.from_lengths(of, device)
                if place is None:
                    yield Run(rows, None, slice(0))
                    continue
                first, start, _ = place
                end = start + rows.total
                yield Run(rows, SequenceLengths.from_lengths([end], device),
                          slice(first, first + end))


@dataclass(frozen=True)
class Run:
    """rows: lengths of sequences in the row. keys: of a piece, how many rows of its example it
    attends to, from the first one to its own last one; at: these rows of `keys_and_values`."""

    rows: SequenceLengths
    keys: SequenceLengths | None
    at: slice
