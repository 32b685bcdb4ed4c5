"""The features that a rank gets back, compared with those that it would have computed itself.

In the first forward that has items of an encoder, every rank also encodes its own items as they
were sampled, from slices of the arguments of its forward, without gradients. One item is encoded
once more, beside one of other numbers: how far its features differ then is the rounding of the
model's own dtypes, unless the encoder looks at the items beside one. All ranks make the same number
of calls, so that the gathers of FSDP2 meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.encoders.results import Features, fields_of, flatten
from orchmllm.encoders.sharing import Share, drawn, placeholder, run_encoder
from orchmllm.encoders.spec import Encoder

_TIMES = 4  # the difference that is allowed, in differences between two chunkings


class Proof:
    """Of the encoders in `shares`, in one forward. error: the first one of this rank, which all
    ranks have to learn of."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares, self.error = list(shares), None
        self._own: dict[str, tuple[list[Features], Features | None]] = {}
        self._varying: set[str] = set()  # what towers keep that differs for other items

    def encode(self, owner: nn.Module, rank: int, device: torch.device) -> None:
        """This rank's own items in chunks that cost no more than what the plan gives a rank, and
        its first item beside one of other numbers. The state of the random numbers is restored."""
        devices = [device] if device.type != "cpu" else []
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
            for share in self.shares:
                try:
                    own, beside, varying = _reference(share, owner, rank, device)
                    self._own[share.encoder.name] = own, beside
                    self._varying |= varying
                except Exception as error:
                    self.error = self.error or error

    def kept(self, owner: nn.Module) -> ValueError | None:
        """What is wrong with a tower that has encoded with gradients and keeps something beside its
        result: of the items that moved here, and not of those that this rank has."""
        now: dict[str, Tensor] = {}
        for share in self.shares if self._varying else ():
            now |= _kept(share.encoder, owner)
        for name in sorted(self._varying):
            path, _, last = name.rpartition(".")
            if _is_buffer(owner, name):
                return ValueError(f"the buffer {name} is computed of the items that a rank "
                                  "encodes: put its module in eval mode after each model.train()")
            if name in now and now[name].grad_fn is not None:
                return ValueError(f"{path} keeps a value with a gradient, {last}, of the items "
                                  "that a rank encodes: return it for each item with the "
                                  "features, or detach it")
        return None

    def compare(self, share: Share, rows: Tensor, counts: np.ndarray) -> None:
        """The features (R, W) that came back, counts (n,) of each item, with the own ones."""
        own, beside = self._own.get(share.encoder.name, ([], None))
        if self.error is None and beside is not None:
            try:
                self.error = _difference(share.encoder.name, own, beside, rows, counts)
            except Exception as error:  # of shapes that cannot be compared
                self.error = error


def _kept(encoder: Encoder, owner: nn.Module) -> dict[str, Tensor]:
    """What towers keep beside their result, by name: buffers, and tensors in attributes or in a
    list, tuple or dict that is one; not the views of parameters that FSDP1 makes."""
    held: dict[str, Tensor] = {}
    for path, tower in encoder.tower_modules(owner):
        held |= dict(tower.named_buffers(prefix=path))
        own = {p.untyped_storage().data_ptr() for p in tower.parameters() if type(p.data) is Tensor}
        for inner, module in tower.named_modules(prefix=path):
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                parts = value.values() if isinstance(value, dict) else (
                    value if isinstance(value, list | tuple) else [value])
                held |= {f"{inner}.{name}" + f"[{i}]" * (part is not value): part
                         for i, part in enumerate(parts) if type(part) is Tensor
                         and part.layout == torch.strided and part.untyped_storage().nbytes()
                         and part.untyped_storage().data_ptr() not in own}
    return {name: value for name, value in held.items()
            if value.is_floating_point() and value.dtype.itemsize > 1}


def _is_buffer(owner: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in owner.get_submodule(path)._buffers


def _varying(owner: nn.Module, now: dict[str, Tensor], before: dict[str, Tensor]) -> set[str]:
    """What was kept of other items before. Buffers of another size hold what the longest needs."""
    return {name for name, value in now.items() if name in before and (
        not value.nan_to_num().equal(before[name].nan_to_num())
        if value.shape == before[name].shape else not _is_buffer(owner, name))}


def _reference(
    share: Share, owner: nn.Module, rank: int, device: torch.device
) -> tuple[list[Features], Features | None, set[str]]:
    """(The features of the own items, those of the first one beside another, what the towers keep
    that is different then.)"""
    encoder, local = share.encoder, share.local
    sizes = share.move.target_sizes
    limit = int(np.bincount(np.repeat(np.arange(len(sizes)), sizes),
                            weights=share.cost[share.move.order]).max())
    cost_of = np.split(share.cost, np.cumsum(share.world.sizes)[:-1])
    # Chunks end with a call, which only this rank knows: each call but one may add a chunk.
    num_calls = max(len(_chunks(c, limit)) for c in cost_of) + len(encoder.calls) - 1
    start = [(b, b.clone()) for _, t in encoder.tower_modules(owner) for b in t.buffers()]
    alone: dict[str, Tensor] = {}  # kept after the first call
    results = []  # told apart below: an error there must not keep other ranks from a call
    run = partial(run_encoder, encoder, owner, options=local.options)

    def copied() -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in _kept(encoder, owner).items()}

    for call, layout, meta, cost in _own_items(share, cost_of[rank]):
        for items in _chunks(cost, limit):
            arguments = layout.part(local.inputs, meta, items)
            results.append((run(call, arguments), meta[items]))
            alone = alone or copied()
    first = next(iter(encoder.calls))
    meta, values = placeholder(share, device)
    for _ in range(num_calls + 1 - len(results)):  # once everywhere, as later ranks may have none
        blank = run(first, encoder.layout.build(meta, tuple(values)))
        alone = alone or copied()
    _put_back(start)
    if len(local.meta):
        meta = local.meta[:1]
        values = [None if v is None else v[: int(rows[0])].to(device) for v, rows in zip(
            local.values, encoder.layout.rows(local.meta), strict=True)]
    both = [None if v is None else torch.cat([v, w])
            for v, w in zip(values, drawn(values), strict=True)]
    meta = np.concatenate([meta, meta])
    result = run(first, encoder.layout.build(meta, tuple(both)))
    varying = _varying(owner, _kept(encoder, owner), alone)
    _put_back(start)
    learns = any(p.requires_grad for _, t in encoder.tower_modules(owner) for p in t.parameters())
    for name, _, _, value in fields_of(encoder, blank) if learns else ():
        for part in [value] if isinstance(value, Tensor) else value:
            if part.is_floating_point() and not bool(part.isfinite().all()):
                raise ValueError(
                    f"encoder {encoder.name!r}: {name} is not finite where a rank without media "
                    "encodes numbers between 0 and 1, so its gradients would not be, either: "
                    "do in the data set what needs others")
    held = [flatten(encoder, owner, out, of_items, False) for out, of_items in results]
    return held, flatten(encoder, owner, result, meta, False) if held else None, varying


def _put_back(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)


def _own_items(
    share: Share, cost: np.ndarray
) -> Iterator[tuple[str, Any, np.ndarray, np.ndarray]]:
    """(call, layout, meta, cost) of this rank's items of each call that has any."""
    start = 0
    for (call, layout), n in zip(share.encoder.calls.items(), share.local.counts, strict=True):
        if n:
            items = slice(start, start + n)
            yield call, layout, share.local.meta[items], cost[items]
        start += n


def _chunks(cost: np.ndarray, limit: int) -> list[slice]:
    """Items one after the other, in as few parts as cost at most `limit`."""
    ends, load = [], 0
    for i, c in enumerate(cost.tolist()):
        if load and load + c > limit:
            ends.append(i)
            load = 0
        load += c
    bounds = [0, *ends, len(cost)]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


def _difference(
    name: str, own: list[Features], beside: Features, rows: Tensor, counts: np.ndarray
) -> ValueError | None:
    """What is wrong with features (R, W), up to the rounding that the first item shows."""
    want_counts = np.concatenate([f.counts for f in own])
    if not np.array_equal(counts, want_counts):
        return ValueError(f"encoder {name!r}: its items have {want_counts.tolist()} rows of "
                          f"features where they were sampled, and {counts.tolist()} balanced")
    want = torch.cat([f.rows for f in own])
    first = int(counts[0])
    noise = float(_distances(beside.rows[:first], want[:first], [first]))
    allowed, most = _tolerance(want, noise)
    distances = _distances(rows.detach(), want, counts.tolist())
    worst = int(distances.argmax())
    if noise <= most and float(distances[worst]) <= allowed:
        return None
    return ValueError(
        f"encoder {name!r}: features of item {worst} differ by {float(distances[worst]):.1e} of "
        "their norm from those of the same item encoded where it was sampled, and those of item 0 "
        f"by {noise:.1e} with another beside it; {allowed:.1e} is allowed. The encoder's result "
        "depends on the items beside it, or was divided wrongly: describe it with orchmllm.Encoder "
        "(docs/encoders.md) or do not balance it; proof=False skips this comparison")


def _distances(got: Tensor, want: Tensor, counts: list[int]) -> Tensor:
    """(n,) norms of the differences by item, as shares of the items' norms."""
    difference, norm = ((torch.stack([part.double().norm() for part in value.split(counts)]))
                        for value in (got - want, want))
    return difference / norm.clamp(min=torch.finfo(torch.float32).tiny)


def _tolerance(rows: Tensor, noise: float) -> tuple[float, float]:
    """(allowed difference, the most that rounding can explain). The floor stands for a noise that
    the first item does not show by chance: parts of many models compute in float32 whatever
    their dtype, and autocast or TF32 in less. Integers do not round."""
    if not rows.is_floating_point():
        return 0.0, 0.0
    eps = max(torch.finfo(rows.dtype).eps, torch.finfo(torch.float32).eps)
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        eps = max(eps, torch.finfo(torch.float16).eps)  # TF32 has as many bits
    floor, most = max(4 * eps, eps**0.5 / 16), eps**0.5
    return min(_TIMES * noise + floor, most), most


