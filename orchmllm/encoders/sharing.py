"""Media to the ranks that encode them, one run of each encoder, features back."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.comm.agree import PlanMismatchError, describe, raise_first
from orchmllm.comm.exchange import RowGather, exchange_rows, gather_texts
from orchmllm.encoders.assignment import Assignment
from orchmllm.encoders.results import Features, flatten
from orchmllm.encoders.spec import Encoder, resolve
from orchmllm.encoders.table import GatheredItems, LocalItems
from orchmllm.plan.rearrange import ranges

_PATIENCE_S = 5.0  # for ranks that an error keeps from the agreement


@dataclass(frozen=True)
class Share:
    """One encoder in one forward: the items of this rank, those of all, and who encodes which."""

    encoder: Encoder
    local: LocalItems
    world: GatheredItems
    plan: Assignment


def encode_all(
    shares: Sequence[Share], owner: nn.Module, rank: int, device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[list[Features], Exception | None]:
    """(features of what this rank encodes, by encoder; the first error of an encoder). It does not
    raise that error, because the other ranks are waiting: all of them raise it in
    `agree_on_features`."""
    features, error = [], None
    for share in shares:
        values = _move_media(share, rank, device, group)
        try:
            features.append(_encode(share, owner, rank, device, values))
        except Exception as e:
            error = error or e
    return features, error


def _move_media(
    share: Share, rank: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[Tensor | None]:
    """The packed tensors of the items that this rank encodes."""
    values: list[Tensor | None] = []
    for value, tensor, rows in zip(share.local.values, share.world.tensors,
                                   share.encoder.layout.rows(share.world.meta), strict=True):
        if tensor is None:
            values.append(None)
            continue
        dtype, shape = tensor
        held = torch.empty((0, *shape), dtype=dtype) if value is None else value
        values.append(exchange_rows(held.to(device), share.plan.move.exchange(rows, rank), group))
    return values


def _encode(
    share: Share, owner: nn.Module, rank: int, device: torch.device, values: list[Tensor | None]
) -> Features:
    """Runs the encoder on this rank's items, or on a placeholder like the cheapest item."""
    encoder, world = share.encoder, share.world
    meta = world.meta[share.plan.move.items_on(rank)]
    is_placeholder = not len(meta)
    if is_placeholder:
        meta = world.meta[[int(share.plan.cost.argmin())]]
        values = [None if tensor is None else torch.ones(
            (int(rows[0]), *tensor[1]), dtype=tensor[0], device=device)
            for tensor, rows in zip(world.tensors, encoder.layout.rows(meta), strict=True)]
    run = partial(encoder.run, owner) if encoder.run else resolve(owner, next(iter(encoder.calls)))
    result = run(*encoder.layout.build(meta, tuple(values)), **encoder.keywords,
                 **share.local.options)
    return flatten(encoder, owner, result, meta, is_placeholder)


def agree_on_features(
    gather: RowGather, forward: int, shares: Sequence[Share], features: Sequence[Features],
    error: Exception | None,
) -> list[np.ndarray]:
    """(n,) rows of features of each item, in the order of the ranks that encoded them, by encoder.
    All ranks raise RemoteError if an encoder raised on one of them (`error`), PlanMismatchError if
    its results differ in kind."""
    first = 1 + len(shares)  # size of the error's text, a digest of each encoder's result, counts
    sizes = [share.plan.move.target_sizes for share in shares]
    row = np.zeros(first + int(sum(sizes).max()), np.int64)
    row[0] = len(describe(error).encode())
    if error is None:
        row[1:first] = [zlib.crc32(encoded.describe().encode()) for encoded in features]
        counts = np.concatenate([encoded.counts for encoded in features])
        row[first: first + len(counts)] = counts
    rows = _gather_or_raise(gather, row, error)
    raise_first(forward, gather_texts(gather, describe(error), rows[:, 0]), error)
    start, out = np.arange(len(rows)) * rows.shape[1] + first, []
    for k, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        if len(np.unique(rows[:, 1 + k])) > 1:
            texts = gather_texts(gather, features[k].describe())
            raise PlanMismatchError(
                f"step {forward}: ranks disagree on what encoder {share.encoder.name!r} returns: "
                + ", ".join(f"rank {texts.index(t)} has {t}" for t in sorted(set(texts))[:4]))
        out.append(rows.ravel()[ranges(start, size)])
        start = start + size
    return out


def return_features(
    share: Share, features: Features, counts: np.ndarray, rank: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, np.ndarray]:
    """(features (R, W), rows of each item (n,)) of the items that this rank holds. counts: what
    agree_on_features returned."""
    back = share.plan.move.inverse.exchange(counts, rank)
    return exchange_rows(features.rows, back, group), back.lengths


def agree_on_forward(gather: RowGather, forward: int, error: Exception | None) -> None:
    """At the end of a forward, on all ranks: RemoteError, with the same text, if it went wrong on
    one of them."""
    row = np.array([len(describe(error).encode())], np.int64)
    rows = _gather_or_raise(gather, row, error)
    raise_first(forward, gather_texts(gather, describe(error), rows[:, 0]), error)


def _gather_or_raise(gather: RowGather, row: np.ndarray, error: Exception | None) -> np.ndarray:
    """The rows of all ranks. A rank with an error does not wait for ever: the others may be inside
    a collective of the encoder, which only this rank's end will end."""
    if error is None:
        return gather(row)
    out: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: out.append(gather(row)), daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if not out:
        raise error
    return out[0]
