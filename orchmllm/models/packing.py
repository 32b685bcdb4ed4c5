"""Several examples in one row of a model of transformers, each of which attends to itself alone.

transformers looks up two functions by a name in the configuration: one that makes a mask from a
rule, and one that computes attention. The pair here evaluates the model's own rule (causal, a
sliding window, images that see themselves in both directions) inside each example, and nowhere
else. Nothing is padded, and no mask has an entry for a pair of positions of two examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orchmllm.batch import SequenceLengths
from orchmllm.models import attention_op
from orchmllm.models.attention import packed_attention
from orchmllm.models.shared import SharedExamples

NAME = "orchmllm_packed"


@dataclass
class _Row:
    """The row of the forward that runs. num_calls: of attention to it, so far, without those of
    attention_op, of which what there were before are taken off."""

    seqlens: SequenceLengths
    num_calls: int
    shared: SharedExamples | None


@dataclass(frozen=True)
class _Masks:
    """What every layer gets. of_examples: (1, 1, n, n) bool for each example, True where a position
    attends, or (1, 1, n, N) for a piece of an example of N positions; None: all are causal."""

    seqlens: SequenceLengths
    of_examples: list[Tensor] | None
    shared: SharedExamples | None


_running: ContextVar[_Row | None] = ContextVar("row", default=None)


@contextmanager
def packed(seqlens: SequenceLengths, num_layers: int, shared: SharedExamples | None = None
           ) -> Iterator[None]:
    """Within it a forward of the model has one row, of the examples of these lengths, or of pieces
    of those that are shared. num_layers: of the text model.

    Raises RuntimeError if not every layer computed its attention by the functions here: the
    examples would have seen each other."""
    row = _Row(seqlens, -attention_op.num_calls, shared)
    token = _running.set(row)
    try:
        yield
    finally:
        _running.reset(token)
    num_calls = row.num_calls + attention_op.num_calls
    if num_calls != num_layers:
        raise RuntimeError(
            f"{num_calls} of {num_layers} layers kept the examples of the row apart: another "
            "attention was chosen for the text model while it trained (its configuration has to "
            f"keep _attn_implementation = {NAME!r})")


@contextmanager
def positions(head: nn.Module, kept: Tensor) -> Iterator[None]:
    """Within it the head of a model whose forward takes no logits_to_keep computes logits of the
    positions `kept` (k,) of the row alone."""
    hook = head.register_forward_pre_hook(lambda head, args: (args[0][:, kept],))
    try:
        yield
    finally:
        hook.remove()


def mask_of_row(
    batch_size: int, q_length: int, kv_length: int,
    mask_function: Callable = causal_mask_function, use_vmap: bool = False,
    device: torch.device | str = "cpu", **_: Any,
) -> Tensor:
    """What transformers hands to every layer: a tensor, because models look at its shape, with the
    masks of the examples as its attribute. Raises RuntimeError outside of `packed`, or for another
    row than its own."""
    row = _running.get()
    if row is None or not (batch_size == 1 and q_length == kv_length == row.seqlens.total):
        raise RuntimeError(f"a mask of {batch_size} x {q_length} x {kv_length} positions was asked "
                           "for, which is not that of the packed row")
    masks = None
    if mask_function is not causal_mask_function:
        masks, first = [], 0
        for n, place in zip(row.seqlens.lengths, places(row), strict=True):
            example, start, whole = first, 0, n
            if place is not None:  # what the rule looks up of the examples stands after the row
                example, start, whole = place
                example += row.seqlens.total
            masks.append(sdpa_mask(
                batch_size=1, q_length=n, kv_length=whole, q_offset=example + start,
                kv_offset=example, mask_function=mask_function, allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device))
            first += n
    # Of booleans: FSDP2 casts, and so copies, floating tensors.
    carrier = torch.ones(1, 1, q_length, 1, dtype=torch.bool, device=device)
    carrier.masks = _Masks(row.seqlens, masks, row.shared)
    return carrier


def places(row: _Row | _Masks) -> Sequence[tuple[int, int, int] | None]:
    """Of each sequence of the row, see orchmllm.plan.shares.SharedRows."""
    return row.shared.plan.places if row.shared else [None] * len(row.seqlens.lengths)


def attention_of_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, H, R, D); key, value: (1, Hkv, R, D). Returns (1, R, H, D). Raises RuntimeError
    for a mask that `mask_of_row` did not make, and for what it cannot compute exactly."""
    masks = getattr(attention_mask, "masks", None)
    if masks is None:
        raise RuntimeError(f"{type(module).__name__} was given another mask than that of the "
                           "packed row: its examples would see each other")
    given = [k for k in ("softcap", "s_aux", "sinks", "position_bias") if kwargs.get(k) is not None]
    if dropout or given or getattr(module, "sinks", None) is not None:
        raise RuntimeError(f"{type(module).__name__} computes attention with "
                           f"{', '.join(given) or 'dropout or sinks'}, which packing does not know")
    if masks.of_examples is None and masks.shared is None and is_compiling():
        return attend(query, key, value, masks.seqlens, scaling, causal=True), None
    return _counted(module, query, key, value, masks, scaling), None


def attend(query: Tensor, key: Tensor, value: Tensor, seqlens: SequenceLengths,
           scaling: float | None, *, causal: bool, keys: SequenceLengths | None = None) -> Tensor:
    """packed_attention of query (1, H, R, D) to key and value (1, Hkv, R, D): (1, R, H, D)."""
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return packed_attention(q, k, v, seqlens, causal=causal, keys=keys)[None]


@torch.compiler.disable
def _counted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, masks: _Masks,
             scaling: float | None) -> Tensor:
    """Example by example where they have masks, whose number and sizes would be compiled in."""
    if (row := _running.get()) is not None:  # not where a block is computed again
        row.num_calls += 1
    if masks.of_examples is None and masks.shared is None:
        return attend(query, key, value, masks.seqlens, scaling, causal=True)
    keys, values, out = key, value, []
    if masks.shared is not None:
        keys, values = masks.shared.keys_and_values(key, value)
    if masks.of_examples is None:
        runs = masks.shared.runs
        sizes = [run.rows.total for run in runs]
        for q, k, v, run in zip(*(x.split(sizes, 2) for x in (query, key, value)), runs,
                                strict=True):
            if run.keys is not None:
                k, v = keys[:, :, run.at], values[:, :, run.at]
            out.append(attend(q, k, v, run.rows, scaling, causal=True, keys=run.keys))
    else:
        for q, k, v, mask, place in zip(
                *(x.split(masks.seqlens.lengths, 2) for x in (query, key, value)),
                masks.of_examples, places(masks), strict=True):
            if place is not None:
                at = slice(place[0], place[0] + place[2])
                k, v = keys[:, :, at], values[:, :, at]
            out.append(ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, scaling=scaling)[0])
    found = torch.cat(out, 1)
    # A rank without a piece still takes part in the exchange of the gradients.
    return found if keys.shape[2] else found + (keys.sum() + values.sum())


class _Apart:
    """What stands between a linear attention layer's class and its forward."""

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, *, seqlens: SequenceLengths | None = None,
                **kwargs: Any) -> Tensor:
        """hidden_states (1, R, D). Each example begins with an empty state. Without seqlens, where
        one example is answered, it is as transformers has it. Raises RuntimeError where a packed
        row lacks them."""
        row = _running.get()
        if seqlens is None:
            if row is not None:
                raise RuntimeError(f"{type(self).__name__} was not told the examples of the packed "
                                   "row: its state would run from one to the next")
            return super().forward(hidden_states, **kwargs)
        if row is not None:
            row.num_calls += 1
        kwargs["attention_mask"] = None  # nothing is padded
        return torch.cat([super(_Apart, self).forward(part, **kwargs)
                          for part in hidden_states.split(seqlens.lengths, 1)], 1)


def keep_apart(mixer: nn.Module) -> None:
    """Makes a linear attention layer, whose state goes from position to position, compute one
    example after the other, by `seqlens`."""
    family = type(mixer)
    mixer.__class__ = type(family.__name__, (_Apart, family), {})


AttentionInterface.register(NAME, attention_of_row)
AttentionMaskInterface.register(NAME, mask_of_row)
