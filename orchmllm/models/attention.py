"""Attention within packed sequences: the rows of several sequences follow each other, no padding.

`attention_backend` makes the choice between the implementations once per (device type, dtype, head
size) and describes it for the log.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from orchmllm.batch import SequenceLengths
from orchmllm.models import attention_op


class AttentionBackend(NamedTuple):
    """description: one line for the log. run: (q, k, v, seqlens, causal, keys) -> (T, Hq, Dh), T
    >= 1, see packed_attention."""

    description: str
    run: Callable[[Tensor, Tensor, Tensor, SequenceLengths, bool, SequenceLengths | None], Tensor]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, seqlens: SequenceLengths, *, causal: bool,
    keys: SequenceLengths | None = None,
) -> Tensor:
    """Scaled dot-product attention of each sequence to itself alone.

    q: (T, Hq, Dh); k, v: (T, Hkv, Dh), Hq a multiple of Hkv. keys: lengths of the sequences in k
    and v where these are others: causal, q has the last rows of each; None: those of seqlens.
    Returns (T, Hq, Dh) in q's dtype, never a view of an input. With T = 0 the result is still
    attached to q, k and v: FSDP2 reduces only parameters that have a gradient, so a rank without
    rows must give all of them one. Raises ValueError if seqlens does not cover the T rows.
    """
    if is_compiling():  # the lengths would be compiled in, anew for every step
        return attention_op.packed(q, k, v, seqlens.cu_seqlens, seqlens.host, causal)[0]
    if not (seqlens.total == len(q) and (keys or seqlens).total == len(k) == len(v)):
        raise ValueError(
            f"seqlens covers {seqlens.total} rows, but q, k, v have {len(q)}, {len(k)}, {len(v)}"
        )
    if len(q) == 0:
        return q + (k.sum() + v.sum())
    backend = attention_backend(q.device.type, q.dtype, q.shape[-1])
    return backend.run(q, k, v, seqlens, causal, keys)


@functools.cache
def attention_backend(device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    """The implementation used for these tensors: torch's varlen_attn on CUDA in half precision,
    else one F.scaled_dot_product_attention per run of equal lengths; without memory what a GPU
    runs."""
    if device_type == "meta":
        return _varlen_backend()
    half = dtype in (torch.bfloat16, torch.float16)
    if device_type == "cuda" and half and head_dim % 8 == 0 and head_dim <= 256:
        backend, reason = _flash_backend(dtype, head_dim)
        if backend is not None:
            return backend
    elif device_type == "cuda":
        reason = f"flash kernels take half precision and head sizes 8..256, not {dtype}, {head_dim}"
    else:
        reason = f"device is {device_type}"
    return AttentionBackend(f"scaled_dot_product_attention per sequence ({reason})",
                            sdpa_per_sequence)


def _flash_backend(dtype: torch.dtype, head_dim: int) -> tuple[AttentionBackend | None, str]:
    """torch's flash kernel for packed sequences, or why it does not work on this GPU."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return None, f"flash kernels need sm_80, this GPU is sm_{capability[0]}{capability[1]}"
    try:  # a build of torch may have the function and not the kernel
        backend = _varlen_backend()
        # What records a block that will be computed again, where this is its first call, records
        # its own thread alone.
        with ThreadPoolExecutor(1) as beside:
            device = torch.device("cuda", torch.cuda.current_device())
            beside.submit(_try_out, backend, dtype, head_dim, device).result()
        return backend, ""
    except (RuntimeError, ImportError, TypeError) as error:
        return None, f"torch.nn.attention.varlen fails: {str(error).splitlines()[0][:100]}"


def _try_out(backend: AttentionBackend, dtype: torch.dtype, head_dim: int,
             device: torch.device) -> None:
    """Forward and backward of 3 rows, so that what cannot run is found before training. Raises
    RuntimeError where rows are not the last ones of the keys."""
    with torch.enable_grad():
        q, k, v = (torch.zeros(3, heads, head_dim, dtype=dtype, device=device, requires_grad=True)
                   for heads in (2, 1, 1))
        seqlens = SequenceLengths.from_lengths([1, 2], device)
        for causal in (True, False):
            backend.run(q, k, v, seqlens, causal, None).sum().backward()
        last = SequenceLengths.from_lengths([1], device)
        v = torch.arange(3, dtype=dtype, device=device)[:, None, None].expand_as(v).contiguous()
        out = backend.run(q[:1], k, v, last, True, SequenceLengths.from_lengths([3], device))
        if not bool((out == 1).all()):
            raise RuntimeError("a row that follows 2 keys does not attend to them")


def sdpa_per_sequence(
    q: Tensor, k: Tensor, v: Tensor, seqlens: SequenceLengths, causal: bool,
    keys: SequenceLengths | None = None,
) -> Tensor:
    """The implementation that runs anywhere; see AttentionBackend. q: (tokens, heads, head size);
    k, v: with as many or fewer heads."""
    if keys is not None:
        return torch.cat([_to_longer(*parts, causal) for parts in zip(
            q.split(seqlens.lengths), k.split(keys.lengths), v.split(keys.lengths), strict=True)])
    # Neighbours of equal length share a call: images of one size are common, and forward and
    # backward of short sequences cost mostly calls (4x at 16 rows each, 1.4x at 64).
    runs = [(n, len(list(same))) for n, same in groupby(filter(None, seqlens.lengths))]
    rows = [n * count for n, count in runs]
    outputs = []
    # split, not slices: its backward is one concatenation instead of a zero-filled (T, H, Dh)
    # gradient per sequence.
    for (n, count), *qkv in zip(runs, q.split(rows), k.split(rows), v.split(rows), strict=True):
        qr, kr, vr = [x.unflatten(0, (count, n)).transpose(1, 2) for x in qkv]
        out = F.scaled_dot_product_attention(
            qr, kr, vr, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _to_longer(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """q: the last rows of a sequence; k, v: all of them. is_causal would take q for the first."""
    n, whole = len(q), len(k)
    mask = None
    if causal:
        mask = torch.ones(n, whole, dtype=torch.bool, device=q.device).tril(whole - n)
    out = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _varlen_backend() -> AttentionBackend:
    from torch.nn.attention.varlen import varlen_attn

    options = inspect.signature(varlen_attn).parameters
    # torch 2.10 takes is_causal; later releases a window, of which (-1, 0) is causal, and GQA.
    by_window = "window_size" in options
    has_gqa = "enable_gqa" in options

    def run(q: Tensor, k: Tensor, v: Tensor, seqlens: SequenceLengths, causal: bool,
            keys: SequenceLengths | None = None) -> Tensor:
        kwargs = {"window_size": (-1, 0 if causal else -1)} if by_window else {"is_causal": causal}
        if has_gqa:
            kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
        elif q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        keys = keys or seqlens
        return varlen_attn(q, k, v, seqlens.cu_seqlens, keys.cu_seqlens, seqlens.max_seqlen,
                           keys.max_seqlen, **kwargs)

    return AttentionBackend("torch.nn.attention.varlen.varlen_attn", run)
