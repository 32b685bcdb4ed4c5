"""Attention within packed sequences as one operator, for torch.compile: the lengths of a batch are
read inside it, so that they are not compiled in, and its backward pass is written out.

On a CPU it is torch's own kernel for each run of equal lengths, as in
orchmllm.models.attention.sdpa_per_sequence; on a GPU torch's flash attention for packed sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

_aten = torch.ops.aten
num_calls = 0  # of causal ones, forward, in this process, so that who compiles it knows that it ran


def has_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cpu" or half and head_size % 8 == 0 and head_size <= 256


def _runs(host: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors (T, H, ...) cut into runs of neighbours of equal length, (count, H, n, ...)."""
    at = 0
    for n, same in groupby(x for x in host.diff().tolist() if x):
        count = len(list(same))
        yield tuple(x[at: at + n * count].unflatten(0, (count, n)).transpose(1, 2)
                    for x in tensors)
        at += n * count


@torch.library.custom_op("orchmllm::packed_attention", mutates_args=())
def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, host: Tensor, causal: bool
           ) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, Hq, Dh), k and v (T, Hkv, Dh), cu_seqlens and host (n + 1,) int32 on the device and on
    the host -> (out (T, Hq, Dh), what the backward pass needs besides: log-sum-exp and state).
    Raises ValueError if the sequences do not cover the T rows of all three."""
    global num_calls
    num_calls += causal  # not those of towers
    if not int(host[-1]) == len(q) == len(k):
        raise ValueError(f"seqlens covers {int(host[-1])} rows, but q has {len(q)}, k {len(k)}")
    if q.device.type != "cpu":
        longest = int(host.diff().max())
        out, lse, state, *_ = _aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, False)
        return out, lse, state
    out, lse = torch.empty_like(q), _lse(q)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    for qr, kr, vr, to, to_lse in _runs(host, q, k, v, out, lse):
        found, sums = _aten._scaled_dot_product_flash_attention_for_cpu(qr, kr, vr, 0.0, causal)
        to.copy_(found)
        to_lse.copy_(sums)
    return out, lse, q.new_empty(0)


def _lse(q: Tensor) -> Tensor:
    """(T, Hq) on a CPU, (Hq, T) on a GPU."""
    shape = q.shape[:2] if q.device.type == "cpu" else (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=torch.promote_types(torch.float32, q.dtype))


@packed.register_fake
def _(q, k, v, cu_seqlens, host, causal):
    state = (q.new_empty(0) if q.device.type == "cpu"
             else q.new_empty(2, dtype=torch.uint64))
    return torch.empty_like(q), _lse(q), state


@torch.library.custom_op("orchmllm::packed_attention_backward", mutates_args=())
def packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Tensor,
    cu_seqlens: Tensor, host: Tensor, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. All have the shapes of the forward pass: (tokens, heads, head size).
    """
    if q.device.type != "cpu":
        longest = int(host.diff().max())
        return _aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal, state,
            state.new_empty(0))
    share = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(share, dim=1) for x in (k, v)]
    grads = [torch.empty_like(q) for _ in range(3)]
    for g, qr, kr, vr, o, sums, *to in _runs(host, grad, q, *wide, out, lse, *grads):
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, qr, kr, vr, o, sums, 0.0, causal)
        for place, value in zip(to, found, strict=True):
            place.copy_(value)
    dq, *rest = grads  # with the strides of the inputs, as is told to who compiles
    return dq, *(torch.empty_like(x).copy_(grad.unflatten(1, (x.shape[1], share)).sum(2))
                 for x, grad in zip((k, v), rest, strict=True))


@packed_backward.register_fake
def _(grad, q, k, v, out, lse, state, cu_seqlens, host, causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens, host, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, host)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    q, k, v, out, lse, state, cu_seqlens, host = ctx.saved_tensors
    found = packed_backward(grad, q, k, v, out, lse, state, cu_seqlens, host, ctx.causal)
    return *found, None, None, None


packed.register_autograd(_backward, setup_context=_keep)
