"""Media to the ranks that encode them, one run of the encoder, features back."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.comm.agree import PlanMismatchError, describe, raise_first
from orchmllm.comm.exchange import RowGather, exchange_rows, gather_texts
from orchmllm.encoders.assignment import Assignment
from orchmllm.encoders.results import Features, flatten
from orchmllm.encoders.spec import Encoder, resolve
from orchmllm.encoders.table import Gathered, Local

_PATIENCE_S = 5.0  # for ranks that an error keeps from the agreement


@dataclass(frozen=True)
class Encoded:
    """What this rank encoded of one encoder's items. result: as the encoder returned it; features:
    None if it raised `error`."""

    encoder: Encoder
    local: Local
    plan: Assignment
    result: Any
    features: Features | None
    error: Exception | None


def encode_share(
    encoder: Encoder, owner: nn.Module, local: Local, world: Gathered, plan: Assignment, rank: int,
    device: torch.device, group: dist.ProcessGroup | None,
) -> Encoded:
    """Moves the media and runs the encoder on this rank's share, or on a placeholder. Never raises
    for the encoder: the other ranks are waiting."""
    items = plan.move.items_on(rank)
    meta = world.meta[items]
    all_rows = encoder.layout.rows(world.meta)
    exchanges: dict[int, Any] = {}  # by the array of rows: most arguments share one
    values: list[Tensor | None] = []
    for value, spec, rows in zip(local.values, world.tensors, all_rows, strict=True):
        if spec is None:
            values.append(None)
            continue
        if id(rows) not in exchanges:
            exchanges[id(rows)] = plan.move.exchange(rows, rank)
        mine = value if value is not None else torch.empty((0, *spec[1]), dtype=spec[0])
        values.append(exchange_rows(mine.to(device), exchanges[id(rows)], group))
    empty = not len(meta)
    if empty:  # a placeholder like the cheapest item
        cheapest = int(plan.cost.argmin())
        meta = world.meta[[cheapest]]
        values = [None if spec is None else torch.ones(
            (int(rows[cheapest]), *spec[1]), dtype=spec[0], device=device)
            for spec, rows in zip(world.tensors, all_rows, strict=True)]
    result, features, error = None, None, None
    try:
        run = partial(encoder.run, owner) if encoder.run else (
            resolve(owner, next(iter(encoder.calls))))
        result = run(*encoder.layout.build(meta, tuple(values)), **encoder.keywords,
                     **local.options)
        features = flatten(encoder, owner, result, meta, empty)
    except Exception as e:
        error = e
    return Encoded(encoder, local, plan, result, features, error)


def return_features(
    gather: RowGather, group: dist.ProcessGroup | None, forward: int, rank: int,
    encoded: Sequence[Encoded],
) -> list[tuple[Tensor, np.ndarray]]:
    """(features (R, W), rows per item) of this rank's own items, by encoder. All ranks raise
    RemoteError if an encoder raised on one of them, PlanMismatchError if results do not fit."""
    error = next((share.error for share in encoded if share.error), None)
    sizes = [share.plan.move.target_sizes for share in encoded]
    row = np.zeros(1 + len(encoded) + int(sum(sizes).max()), np.int64)
    row[0] = len(describe(error).encode())
    if error is None:
        row[1: 1 + len(encoded)] = [
            zlib.crc32(share.features.describe().encode()) for share in encoded]
        counts = np.concatenate([share.features.counts for share in encoded])
        row[1 + len(encoded): 1 + len(encoded) + len(counts)] = counts
    rows = _agreed(gather, row, error)
    raise_first(forward, gather_texts(gather, describe(error), rows[:, 0]), error)
    starts = np.full(len(rows), 1 + len(encoded), np.int64)
    out = []
    for k, (share, size) in enumerate(zip(encoded, sizes, strict=True)):
        if len(np.unique(rows[:, 1 + k])) > 1:
            texts = gather_texts(gather, share.features.describe())
            raise PlanMismatchError(
                f"step {forward}: ranks disagree on what encoder {share.encoder.name!r} returns: "
                + ", ".join(f"rank {texts.index(t)} has {t}" for t in sorted(set(texts))[:4]))
        index = np.repeat(starts - np.cumsum(size) + size, size) + np.arange(int(size.sum()))
        counts = rows[share.plan.move.target_rank, index]
        back = share.plan.move.inverse().exchange(counts, rank)
        out.append((exchange_rows(share.features.rows, back, group), back.lengths))
        starts = starts + size
    return out


def agree_on_forward(gather: RowGather, forward: int, error: Exception | None) -> None:
    """At the end of a forward, on all ranks: RemoteError, with the same text, if it went wrong on
    one of them."""
    rows = _agreed(gather, np.array([len(describe(error).encode())], np.int64), error)
    raise_first(forward, gather_texts(gather, describe(error), rows[:, 0]), error)


def _agreed(gather: RowGather, row: np.ndarray, error: Exception | None) -> np.ndarray:
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
