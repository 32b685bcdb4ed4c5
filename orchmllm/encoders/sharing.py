"""Who encodes which item, the media on their way there, one run of each encoder, features back."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.comm.agree import PlanMismatchError, describe, raise_first
from orchmllm.comm.exchange import RowGather, exchange_rows, gather_texts
from orchmllm.encoders.results import Features, flatten
from orchmllm.encoders.spec import Encoder
from orchmllm.encoders.table import GatheredItems, LocalItems
from orchmllm.plan.balance import balance
from orchmllm.plan.cost import CostModel
from orchmllm.plan.rearrange import Rearrangement, ranges
from orchmllm.plan.step import imbalance

MOVED_BOTH_WAYS = 2  # the media there, the features back
PATIENCE_S = 5.0  # for ranks that an error keeps from the agreement


@dataclass(frozen=True)
class EncoderStep:
    """One encoder in the forward last balanced. num_items: in the world; imbalance: cost of the
    slowest rank / mean, as sampled and as planned; moved: items that changed rank; gain: share by
    which the slowest rank's encoder time falls, by the plan."""

    num_items: int
    imbalance: tuple[float, float]
    moved: int
    gain: float


@dataclass(frozen=True)
class Share:
    """One encoder in one forward: the items of this rank, those of all, and who encodes which.
    move: n items from the ranks that hold them to those that encode them; cost (n,) of each; rows
    (n,): of each in each packed tensor."""

    encoder: Encoder
    local: LocalItems
    world: GatheredItems
    move: Rearrangement
    cost: np.ndarray
    rows: list[np.ndarray]
    step: EncoderStep


def assign(
    encoder: Encoder, local: LocalItems, world: GatheredItems, cost_model: CostModel, *,
    min_gain: float, ranks_per_node: int,
) -> Share:
    """Which rank encodes which item: a pure function of what was gathered, equal on all ranks.
    min_gain: all stay where they are unless the cost of the slowest rank falls, and by this
    share."""
    num_ranks = len(world.sizes)
    home = np.repeat(np.arange(num_ranks), world.sizes)
    cost = cost_model(*encoder.layout.lengths(world.meta))
    num_bytes = np.zeros(len(home), np.int64)
    rows = encoder.layout.rows(world.meta)
    for tensor, of_each in zip(world.tensors, rows, strict=True):
        if tensor is not None:
            dtype, shape = tensor
            num_bytes += dtype.itemsize * math.prod(shape) * of_each
    rank_of = balance(cost, num_ranks=num_ranks, policy="least_move", home=home, cost=cost,
                      move_cost=num_bytes * MOVED_BOTH_WAYS,
                      ranks_per_node=min(ranks_per_node, num_ranks))
    before, after = (np.bincount(rank, weights=cost, minlength=num_ranks).astype(np.int64)
                     for rank in (home, rank_of))
    gain = 1 - int(after.max()) / max(int(before.max()), 1)
    if gain <= 0 or gain < min_gain:
        rank_of, after, gain = home, before, 0.0
    step = EncoderStep(len(cost), (imbalance(before), imbalance(after)),
                       int((rank_of != home).sum()), gain)
    move = Rearrangement.from_rank_of(rank_of, world.sizes)
    return Share(encoder, local, world, move, cost, rows, step)


def encode_all(
    shares: Sequence[Share], owner: nn.Module, rank: int, device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[list[Features], Exception | None]:
    """(features of what this rank encodes, by encoder; the first error of an encoder). It does not
    raise that error, because the other ranks are waiting: all of them raise it in
    `return_features`."""
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
    for k, (tensor, rows) in enumerate(zip(share.world.tensors, share.rows, strict=True)):
        if tensor is None:
            values.append(None)
            continue
        dtype, shape = tensor
        # A rank without items may hold an empty tensor of another dtype.
        held = (share.local.values[k] if len(share.local.meta)
                else torch.empty((0, *shape), dtype=dtype))
        held = held.to(device)
        values.append(exchange_rows(held, share.move.exchange(rows, rank), group)
                      if rows.any() else held)
    return values


def _encode(
    share: Share, owner: nn.Module, rank: int, device: torch.device, values: list[Tensor | None]
) -> Features:
    """Runs the encoder on this rank's items, or on a placeholder like the cheapest item."""
    encoder, world = share.encoder, share.world
    meta = world.meta[share.move.items_on(rank)]
    is_placeholder = not len(meta)
    if is_placeholder:
        meta, values = placeholder(share, device)
    arguments = encoder.layout.build(meta, tuple(values))
    result = run_encoder(encoder, owner, next(iter(encoder.calls)), arguments,
                         share.local.options)
    return flatten(encoder, owner, result, meta, is_placeholder)


def placeholder(
    share: Share, device: torch.device
) -> tuple[np.ndarray, list[Tensor | None]]:
    """meta and packed tensors of one item like the cheapest, for a rank that has none."""
    cheapest = int(share.cost.argmin())
    return share.world.meta[[cheapest]], drawn([None if tensor is None else torch.ones(
        (int(rows[cheapest]), *tensor[1]), dtype=tensor[0], device=device)
        for tensor, rows in zip(share.world.tensors, share.rows, strict=True)])


def drawn(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The packed tensors of an item, of any shapes, with other numbers: the first has numbers
    between 0 and 1, of bytes 1 and 2, the same on every call. They differ, as an encoder may divide
    by their deviation, and none is 0, as it may take their logarithm. The other tensors, such as
    masks, and wider integers stay. Made on the device: nothing waits for a copy."""
    first, *others = values
    if first is not None and (first.is_floating_point() or first.dtype == torch.uint8):
        # Of a prime number of values: rows that follow each other differ.
        places = torch.arange(first.numel(), device=first.device) % 1009 + 1
        numbers = places * 0.618034 % 1 if first.is_floating_point() else 1 + places % 2
        first = numbers.to(first.dtype).reshape(first.shape)
    return [first, *others]


def run_encoder(
    encoder: Encoder, owner: nn.Module, call: str, arguments: Sequence[Any],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """What a call of an encoder returns for these arguments, in the order of its layout. options:
    further ones by name."""
    run = partial(encoder.run, owner) if encoder.run else attrgetter(call)(owner)
    options = {**encoder.keywords, **options}
    if encoder.named:
        return run(**dict(zip(encoder.calls[call].arguments, arguments, strict=True)), **options)
    return run(*arguments, **options)


def return_features(
    gather: RowGather, forward: int, shares: Sequence[Share], features: Sequence[Features],
    error: Exception | None, group: dist.ProcessGroup | None, patience_s: float | None,
) -> list[tuple[Tensor, np.ndarray]]:
    """(features (R, W), rows of each item (n,)) of the items that this rank holds, by encoder. All
    ranks raise RemoteError if an encoder raised on one of them (`error`), PlanMismatchError if its
    results differ in kind."""
    first = 1 + len(shares)  # size of the error's text, a digest of each encoder's result, counts
    sizes = [share.move.target_sizes for share in shares]
    row = np.zeros(first + int(sum(sizes).max()), np.int64)
    if error is None:
        row[1:first] = [zlib.crc32(encoded.kind.encode()) for encoded in features]
        counts = np.concatenate([encoded.counts for encoded in features])
        row[first: first + len(counts)] = counts
    rows = agree(gather, forward, row, error, patience_s)
    for k, share in enumerate(shares):
        if len(np.unique(rows[:, 1 + k])) > 1:
            texts = gather_texts(gather, features[k].kind)
            raise PlanMismatchError(
                f"step {forward}: ranks disagree on what encoder {share.encoder.name!r} returns: "
                + ", ".join(f"rank {texts.index(t)} has {t}" for t in sorted(set(texts))[:4]))
    start, out = np.arange(len(rows)) * rows.shape[1] + first, []
    for share, encoded, size in zip(shares, features, sizes, strict=True):
        back = share.move.inverse.exchange(rows.ravel()[ranges(start, size)], gather.rank)
        out.append((exchange_rows(encoded.rows, back, group), back.lengths))
        start = start + size
    return out


def agree(
    gather: RowGather, forward: int, row: np.ndarray, error: Exception | None,
    patience_s: float | None,
) -> np.ndarray:
    """The rows (L,) of all ranks; if one of them has an error, all raise RemoteError with the same
    text. row[0]: of the size of that text.

    patience_s: where the encoder has collectives of its own, a rank with an error waits no longer:
    the others may be inside one, which only this rank's end will end."""
    text = describe(error)
    row[0] = len(text.encode())
    if error is None or patience_s is None:
        rows = gather(row)
    else:
        out: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: out.append(gather(row)), daemon=True)
        thread.start()
        thread.join(patience_s)
        if not out:
            raise error
        rows = out[0]
    raise_first(forward, gather_texts(gather, text, rows[:, 0]), error)
    return rows
