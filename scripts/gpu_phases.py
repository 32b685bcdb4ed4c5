"""Measures phases on one device: the work of a simulated rank, forward and backward, without other
ranks. Used by scripts/bench_gpu.py.

Flow: StepPlan -> rank_work (lengths of what a rank processes) -> PhaseRunner.seconds (real modules
on random inputs of those lengths).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX, SequenceLengths, on_device
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.config import ModelConfig
from orchmllm.models.flops import Lengths, phase_work
from orchmllm.models.llm import PackedQwen2
from orchmllm.models.vision import VisionEncoder
from orchmllm.plan.assign import PHASES
from orchmllm.plan.step import StepPlan


def shortened(model: ModelConfig, layers: int) -> ModelConfig:
    """The same widths with at most `layers` layers in each submodule."""
    return replace(model, **{p: replace(getattr(model, p), num_layers=min(
        layers, getattr(model, p).num_layers)) for p in PHASES})


@dataclass(frozen=True)
class Work:
    """What one rank processes in one phase: n items in slot order. grid (n, 3): as in a layout;
    of the LLM's items, zeros."""

    phase: str
    lengths: Lengths
    grid: np.ndarray

    def useful_flop(self, model: ModelConfig) -> float:
        """Forward and backward, without padding and without recomputation."""
        return float(phase_work(self.phase, model, self.lengths).useful.sum())


def rank_work(plan: StepPlan, phase: str, rank: int) -> Work:
    """A rank's items of a phase."""
    layout, mine = plan.layout, plan.for_rank(rank)
    if phase == "llm":
        tokens = layout.tokens_per_example[mine.examples]
        return Work(phase, Lengths(tokens, tokens, tokens), np.zeros((len(tokens), 3), np.int64))
    example, segment = mine.media[phase].reshape(-1, 2).T
    at = layout.segment_start[example] + segment
    return Work(phase, Lengths(layout.rows[at], layout.attn_len[at], layout.num_tokens[at]),
                mine.grid[phase])


def no_work(phase: str) -> Work:
    """A rank without items of a phase."""
    none = np.zeros(0, np.int64)
    return Work(phase, Lengths(none, none, none), np.zeros((0, 3), np.int64))


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


def fit_times(lengths: Sequence[np.ndarray], seconds: np.ndarray) -> TimeModel:
    """The non-negative coefficients with the least squared relative error. lengths: (k,) arrays,
    seconds (k,), k >= 3; ValueError for fewer or a time that is not positive."""
    if len(seconds) < 3 or not (seconds > 0).all():
        raise ValueError(f"needs 3 or more positive times, got {seconds.tolist()}")
    design = _sums(lengths) / seconds[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    best, least = np.zeros(3), np.inf
    for active in (list(c) for k in (3, 2, 1) for c in combinations(range(3), k)):
        x = np.zeros(3)
        x[active] = np.linalg.lstsq(design[:, active] / scale[active], np.ones(len(seconds)),
                                    rcond=None)[0] / scale[active]
        error = float(np.sum((design @ x - 1.0) ** 2))
        if (x >= 0).all() and error < least:
            best, least = x, error
    return TimeModel(*best.tolist())


class Clock:
    """Seconds of a call: on CUDA between two events of the stream, on a CPU the calling thread's
    CPU time (backward runs in it), which other processes on the machine change little."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.unit = "seconds on the GPU" if self.on_gpu else "CPU seconds of one thread"

    def seconds(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            started = time.thread_time()
            call()
            return time.thread_time() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def best(self, call: Callable[[], object], repeat: int) -> float:
        """The shortest of `repeat` calls: what disturbs one only makes it longer."""
        return min(self.seconds(call) for _ in range(repeat))


class PhaseRunner:
    """The submodules of a model with random weights on a device, one after the other in memory:
    `phase` is the one that is there. chunk_rows: see LossHead."""

    def __init__(self, model: ModelConfig, phase: str, device: torch.device, dtype: torch.dtype,
                 seed: int, chunk_rows: int) -> None:
        self.phase, self.device, self.dtype = phase, device, dtype
        self.model, self.clock = model, Clock(device)
        self._generator = torch.Generator(device).manual_seed(seed)
        with torch.device("meta"):
            if phase == "llm":
                module = PackedQwen2(model.llm)
                module.loss_chunk_rows = chunk_rows
            else:
                kind = VisionEncoder if phase == "vision" else AudioEncoder
                module = kind(getattr(model, phase), model.llm.hidden_size)
        self.module = module.to(dtype).to_empty(device=device)
        self.module.init_weights(self._generator)

    def seconds(self, work: Work, repeat: int) -> float:
        """Forward and backward of a rank's items, the shortest of `repeat` runs."""
        run = self._prepared(work)
        return self.clock.best(run, repeat)

    def _prepared(self, work: Work) -> Callable[[], None]:
        """A call that runs the phase once; the inputs are on the device before."""
        step = self._llm(work) if self.phase == "llm" else self._encoder(work)

        def run() -> None:
            self.module.zero_grad(set_to_none=True)
            step()

        return run

    def _encoder(self, work: Work) -> Callable[[], None]:
        rows = work.lengths.rows
        lengths = SequenceLengths.from_lengths(rows, self.device)
        shape = int(rows.sum()), getattr(self.model, self.phase).geometry.row_size
        if self.phase == "vision":
            inputs = (torch.randint(0, 256, shape, generator=self._generator, dtype=torch.uint8,
                                    device=self.device), work.grid)
        else:
            inputs = (torch.randn(shape, generator=self._generator, device=self.device),)

        def step() -> None:
            out = self.module(*inputs, lengths)
            out.backward(torch.ones_like(out))

        return step

    def _llm(self, work: Work) -> Callable[[], None]:
        tokens = work.lengths.tokens
        lengths = SequenceLengths.from_lengths(tokens, self.device)
        ids, labels = (self._token_ids(lengths.total) for _ in range(2))
        labels[::2] = IGNORE_INDEX
        positions = on_device(np.concatenate(
            [np.zeros(0, np.int64), *map(np.arange, tokens)]), self.device)

        def step() -> None:
            self.module(self.module.embed(ids), positions, lengths, labels).backward()

        return step

    def _token_ids(self, count: int) -> Tensor:
        return torch.randint(0, self.model.llm.vocab_size, (count,), generator=self._generator,
                             device=self.device)


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
