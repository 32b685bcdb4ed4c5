"""Measures single parts on one device, each beside what it replaces, attention and the loss; also
the work of a simulated rank and a fit of its times. Used by scripts/bench_gpu.py and scripts/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.attention import attention_backend, sdpa_per_sequence
from orchmllm.models.flops import Lengths
from orchmllm.models.loss import LossHead
from orchmllm.models.whole_flops import part_counts, phase_work
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import MemoryModel
from scripts.whole_runner import Clock


@dataclass(frozen=True)
class Work:
    """What one rank processes in one phase: n items in slot order. Of the LLM's every other token
    is learnt."""

    phase: str
    lengths: Lengths

    def useful_flop(self, model: ModelConfig) -> float:
        """Forward and backward, without padding and without recomputation."""
        return float(phase_work(self.phase, model, self.lengths).useful.sum())


def rank_work(plan: StepPlan, phase: str, rank: int) -> Work:
    """A rank's items of a phase."""
    layout, mine = plan.layout, plan.for_rank(rank)
    if phase == "llm":
        tokens = layout.tokens_per_example[mine.examples]
        return Work(phase, Lengths(tokens // 2, tokens, tokens))
    example, segment = mine.media[phase].reshape(-1, 2).T
    at = layout.segment_start[example] + segment
    return Work(phase, Lengths(layout.rows[at], layout.attn_len[at], layout.num_tokens[at],
                               mine.grid[phase]))


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a rank's phase: constant + alpha * sum(l) + beta * sum(l^2) over its items."""

    constant: float
    alpha: float
    beta: float

    def seconds(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """(k,) of k batches of items."""
        return _sums(lengths) @ [self.constant, self.alpha, self.beta]


def _sums(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """(k, 3): 1, sum and sum of squares of each batch's lengths."""
    return np.array([[1.0, x.sum(), np.square(x.astype(float)).sum()] for x in lengths])


def fit(lengths: Sequence[np.ndarray], seconds: np.ndarray, terms: int = 3) -> TimeModel:
    """The coefficients with the least squared relative error of which none is negative and alpha is
    positive: where all items are about as long, any of the three would do. Those after the first
    `terms` are 0. lengths: (k,) arrays, seconds (k,); ValueError for fewer than 3 times, or one
    that is not positive."""
    if len(seconds) < 3 or not (seconds > 0).all():
        raise ValueError(f"needs 3 or more positive times, got {seconds.tolist()}")
    design = _sums(lengths)[:, :terms] / seconds[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    best, least = np.zeros(3), np.inf
    for active in (list(c) for k in range(terms, 0, -1) for c in combinations(range(terms), k)
                   if 1 in c):
        x = np.zeros(3)
        x[active] = np.linalg.lstsq(design[:, active] / scale[active], np.ones(len(seconds)),
                                    rcond=None)[0] / scale[active]
        error = float(np.sum((design @ x[:terms] - 1.0) ** 2))
        if (x >= 0).all() and error < least:
            best, least = x, error
    return TimeModel(*best.tolist())


class Peak:
    """bytes: how far tensors grew above what was there at the start; set at the end."""

    bytes: float = 0.0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the block: on CUDA the caching allocator's peak, on a CPU the allocator's events."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = float(torch.cuda.max_memory_allocated(device) - before)
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield peak
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events()
                    if e.name() == "[memory]")
    peak.bytes = float(np.cumsum([0, *(size for _, size in events)]).max())


def compare_attention(heads: int, kv_heads: int, head_dim: int, causal: bool, lengths: np.ndarray,
                      device: torch.device, dtype: torch.dtype, repeat: int) -> dict:
    """A layer's attention, forward and backward: the kernel that the models use and one call per
    run of equal lengths. lengths (n,): positions of the items."""
    backend = attention_backend(device.type, dtype, head_dim)
    seqlens, clock = SequenceLengths.from_lengths(lengths, device), Clock(device)
    q, k, v = (torch.randn(seqlens.total, h, head_dim, device=device, dtype=dtype,
                           requires_grad=True) for h in (heads, kv_heads, kv_heads))
    out = {"positions": seqlens.total, "sequences": len(lengths), "kernel": backend.description}
    for name, run in (("kernel_s", backend.run), ("per_sequence_s", sdpa_per_sequence)):
        def call(run=run) -> None:
            result = run(q, k, v, seqlens, causal)
            torch.autograd.grad(result, (q, k, v), torch.ones_like(result))

        call()  # compiles and allocates
        out[name] = clock.best(call, repeat)
    return out


def compare_loss(model: ModelConfig, chunk_rows: int, rows: int, device: torch.device,
                 dtype: torch.dtype, repeat: int) -> list[dict]:
    """The loss of `rows` positions with its gradients, plain and in chunks: time, measured and
    predicted peak bytes."""
    llm, clock, out = part_counts(model)["llm"], Clock(device), []
    head = LossHead(llm.width, llm.outputs).to(device, dtype)
    hidden = torch.randn(rows, llm.width, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, llm.outputs, (rows,), device=device)
    for chunk in (0, chunk_rows):
        def call(chunk=chunk) -> None:
            torch.autograd.grad(head(hidden, labels, chunk), (hidden, head.weight))

        call()
        with peak_memory(device) as peak:
            call()
        out.append({"chunk_rows": chunk, "rows": rows, "vocab_size": llm.outputs,
                    "seconds": clock.best(call, repeat), "peak_bytes": peak.bytes,
                    "predicted_bytes": predicted_loss_bytes(model, dtype, chunk, rows)})
    return out


def predicted_loss_bytes(model: ModelConfig, dtype: torch.dtype, chunk: int, rows: int) -> float:
    """What the memory model says of the loss alone: its own tensors, and the weight's gradient."""
    fsdp = FsdpConfig(param_dtype=str(dtype).removeprefix("torch."), loss_chunk_rows=chunk)
    none, learnt = np.zeros(1), np.array([float(rows)])
    loads = Loads({p: Lengths(learnt if p == "llm" else none, none, none) for p in PHASES},
                  {p: none for p in ENCODERS})
    return float(MemoryModel(model, fsdp, 1).loss_bytes(loads)[0])
