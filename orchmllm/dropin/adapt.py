"""A vision or audio tower rebalanced without editing its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.comm.exchange import exchange_rows


def at_least_one(
    encode: Callable[..., Tensor], num_rows: int, inputs: tuple, placeholder: tuple
) -> Tensor:
    """encode(*inputs), for an encoder that cannot take 0 rows: a rank without media runs it on
    `placeholder` (one small valid input), keeps none of its output rows, and so takes part in every
    collective with gradients that are exactly zero. (num_rows: rows of `inputs`.)"""
    if num_rows:
        return encode(*inputs)
    # index_select, not a slice: FSDP2 does not want views from what it wraps.
    out = encode(*placeholder)
    return out.index_select(0, torch.empty(0, dtype=torch.int64, device=out.device))


@contextmanager
def rebalance_encoder(
    encoder: nn.Module, batch: Any, phase: str, *, placeholder: tuple = (),
    output: str | None = None, group: dist.ProcessGroup | None = None,
) -> Iterator[None]:
    """Within the block, `encoder` ignores its positional arguments and `grid_thw`, encodes the
    media that the plan gave this rank (batch.inputs[phase], a tuple (rows, grid)) on the device of
    the argument that it replaces, and returns the features of this rank's examples: the model
    around it needs no change.

    batch: loader.step, or the batch as the loader yielded it. placeholder: (rows, grid) for an
    encoder that cannot take 0 rows. output: attribute of its result that holds the features (a
    Hugging Face model output), None if the result is a tensor. group: ranks of the plan (default:
    all).

    Only these features are exchanged. last_hidden_state and pooler_output, where they are not
    `output`, would be those of other media: they become None. Raises ValueError, on all ranks and
    before the exchange, if another attribute holds tensors (Qwen3-VL's deepstack_features)."""
    rows, grid = batch.inputs[phase]
    empty = not len(grid)
    if empty and placeholder:
        rows, grid = placeholder

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        device = args[0].device if args else rows.device
        return (rows.to(device),), {**kwargs, "grid_thw": grid.to(device)}

    def after(module: nn.Module, args: tuple, result: Any) -> Any:
        features = _features(module, result, output)
        if empty:
            features = features.index_select(
                0, torch.empty(0, dtype=torch.int64, device=features.device))
        features = exchange_rows(features, batch.plan.feature[phase], group)
        if output is None:
            return features
        for name in _UNREAD:
            if isinstance(result, dict) and name in result:  # sets the attribute, too
                result[name] = None
            elif hasattr(result, name):
                setattr(result, name, None)
        setattr(result, output, features)
        return result

    handles = [encoder.register_forward_pre_hook(before, with_kwargs=True),
               encoder.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_UNREAD = ("last_hidden_state", "pooler_output")  # every tower of transformers returns both


def _features(encoder: nn.Module, result: Any, output: str | None) -> Tensor:
    """The tensor to exchange. Raises ValueError if that is not all the encoder returns; decided by
    the attributes alone, because the ranks hold different numbers of rows."""
    kind, cure = type(encoder).__name__, (
        "rebalance_encoder exchanges one tensor, so the rest would belong to the media of other "
        "examples. Balance the LLM phase alone (leave this phase out of `phases` and do not use "
        "rebalance_encoder), or return everything as one tensor, joined on the last dimension")
    if output is None:
        if not isinstance(result, Tensor):
            raise ValueError(f"rebalance_encoder: {kind} returns a {type(result).__name__}, not a "
                             f"tensor: name the attribute that holds the features in `output`; "
                             f"{cure}")
        return result
    for name, value in vars(result).items():
        if name not in (output, *_UNREAD) and _holds_tensors(value):
            raise ValueError(f"rebalance_encoder: {kind} also returns tensors in {name!r}, beside "
                             f"output={output!r}: {cure}")
    return getattr(result, output)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(map(_holds_tensors, value)))
