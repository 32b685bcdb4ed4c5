"""The attention and the masks of transformers while a model is counted: what a kernel keeps, and
how far back a position sees, asked of the model's own rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchmllm.counts.counted import Counted, running

NAME = "orchmllm_counted"  # for configurations of transformers
ROW = 2**17  # positions of the row in which masks are asked
PROBES = (0, 1, 5, 40, 300, 2000, 15_000)  # those that are asked, and the last but one


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
              attention_mask: Tensor | None, *_: Any, **options: Any) -> tuple[Tensor, None]:
    """What a kernel of a GPU keeps: its inputs, its output, and a number of each row and head.
    query: (B, H, R, D); key, value: (B, Hkv, R, D). Returns (B, R, H, D)."""
    if (counted := running.get()) is not None:
        counted.reach = getattr(attention_mask, "reach", None)
        counted.attended = sum(x.shape[1] * x.shape[3] for x in (key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return out.transpose(1, 2), None


def mask(batch_size: int, q_length: int, kv_length: int, mask_function: Callable, **_: Any
         ) -> Tensor:
    """What transformers hands to every layer: how far its rule lets a position see, as an
    attribute."""
    carrier = torch.empty(1, 1, q_length, 1, dtype=torch.bool)
    carrier.reach = running.get().reach_of_next(lambda: reach(mask_function, q_length))
    return carrier


def reach(rule: Callable, row: int) -> int | None:
    """How many positions one sees, of those before it and itself, by a rule of transformers; 0:
    all of them; None: it sees all of its sequence. row: positions for which it is asked. Raises
    ValueError for any other rule."""
    zero, found = torch.tensor(0), []
    probes = [*(q for q in PROBES if q + 2 < row), row - 2]
    for q in probes:
        sees = torch.as_tensor(rule(zero, zero, torch.tensor(q), torch.arange(q + 2)))
        places = sees.expand(q + 2).nonzero()[:, 0].tolist()
        if not places or places != list(range(places[0], places[-1] + 1)):
            raise ValueError("attention sees positions that do not follow each other")
        found.append((q - places[0] + 1, places[-1] - q))
    if all(ahead == 1 and back == q + 1 for q, (back, ahead) in zip(probes, found, strict=True)):
        return None
    most = found[-1][0]
    if any(ahead or back != min(q + 1, most) for q, (back, ahead) in zip(
            probes, found, strict=True)):
        raise ValueError("attention is neither causal, with one window or none, nor to all")
    return most if most <= probes[-1] else 0


def with_gradient(_: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """For the first block, as a hook with keywords: what comes before it may learn."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden.requires_grad_()


class _Enough(BaseException):
    """The masks are made."""


def reaches_of(block: nn.Module, run: Callable[[int], object], row: int = ROW
               ) -> list[int | None]:
    """What the masks of a model allow, see reach, in the order in which it makes them. block: the
    first one, before which masks are made. run: its forward pass for so many positions. row: the
    most that it takes, or ROW. Raises ValueError for a mask that is not known, or if
    the block does not run."""
    def stop(*_: Any) -> None:
        raise _Enough

    hook = block.register_forward_pre_hook(stop)
    try:
        with Counted({}) as counted:
            run(min(row, ROW))
    except _Enough:
        return counted.reaches
    finally:
        hook.remove()
    raise ValueError(f"{type(block).__name__} was not called")


try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError:  # models of other makers are counted, too
    pass
else:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
