"""What a layer that recomputes saves and costs, beside what is predicted of it.

    python scripts/bench_recompute.py

For each phase a stack of blocks runs forward and backward on the CPU, on one thread and in float32,
with nothing, with what is no product, and with everything computed again. Bytes are those that are
still allocated after the forward pass, from the allocator's own events; times are CPU seconds of
the thread inside of the blocks, where the backward pass calls them again: the median of --repeats
rounds in which the ways take turns.

The prediction of time is that of orchmllm.sharding.memory with what this machine takes: for the
forward pass of the same layer, for a byte that operators which are no products move (one rate for
all phases), and for the calls alone, from sequences of one position. Freed memory stays with the
process, as with the allocator of a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from orchmllm.models.mllm import MultimodalModel
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from orchmllm.batch import SequenceLengths
from orchmllm.config.fsdp import CHOICES, layer_counts
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.counts.counted import Counted
from orchmllm.models.flops import lengths_of, phase_work
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.activations import block_bytes
from orchmllm.sharding.blocks import keep_products, recompute, stacks
from orchmllm.sharding.memory import MemoryModel

CACHE_BYTES = 256 << 20  # more than is left of the blocks in a cache
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def model_of(layers: int, width: int) -> ModelConfig:
    """Shapes of the published kinds; every phase has so many layers."""
    heads = width // 64
    return ModelConfig(
        VisionConfig(layers, width, 4 * width, heads), AudioConfig(layers, width, 4 * width, heads),
        LLMConfig(1024, layers, width, 11 * width // 4, heads, heads))


def forward(stack: nn.ModuleList, phase: str, x: Tensor, seqlens: SequenceLengths) -> Tensor:
    """Through all blocks. x: (R, D)."""
    tables = torch.ones(2, 1, len(x), 64) / 2**0.5
    for block in stack:
        if phase == "llm":
            out = block(x[None] if x.dim() == 2 else x, attention_mask=None,
                        position_embeddings=tables.unbind(0), packed_seqlens=seqlens)
            x = out[0] if isinstance(out, tuple) else out
        elif phase == "vision":
            x = block(x, tables[:, 0, :, None].unbind(0), seqlens)
        else:
            x = block(x, seqlens)
    return x


def kept_bytes(stack: nn.ModuleList, phase: str, x: Tensor, seqlens: SequenceLengths) -> int:
    """What the blocks' forward pass leaves allocated for the backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        out = forward(stack, phase, x, seqlens)
    left = sum(e.nbytes() for e in measured.profiler.kineto_results.events()
               if e.name() == "[memory]")
    del out
    return left


@contextmanager
def timed(cls: type) -> Iterator[list[float]]:
    """Seconds of each call of a block's forward pass, also of one that is ended early."""
    forward, spent = cls.forward, []

    def timed_forward(*args, **kwargs):
        started = time.thread_time()
        try:
            return forward(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - started)

    cls.forward = timed_forward
    try:
        yield spent
    finally:
        cls.forward = forward


def seconds(stack: nn.ModuleList, cls: type, phase: str, x: Tensor, seqlens: SequenceLengths
            ) -> tuple[float, float]:
    """Of a block of this class: in the forward pass, and again in the backward pass."""
    with timed(cls) as spent:
        forward(stack, phase, x, seqlens).square().sum().backward()
    return sum(spent[:len(stack)]) / len(stack), sum(spent[len(stack):]) / len(stack)


class Others(TorchDispatchMode):
    """Adds up the CPU seconds of the operators that are no products. What a product made is in no
    cache of the core when they begin, as in a recomputation, where it was made long before."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.other = 0.0, torch.zeros(CACHE_BYTES // 4)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        started = time.thread_time()
        out = func(*args, **(kwargs or {}))
        spent = time.thread_time() - started
        if keep_products(None, func) == CheckpointPolicy.MUST_SAVE:
            self.other.add_(1)
        else:
            self.seconds += spent
        return out


def memory_rate(config: ModelConfig, lengths: list[int], repeats: int) -> float:
    """Bytes/s that operators which are no products read and write, in all phases together."""
    model, seqlens = MultimodalModel(config), SequenceLengths.from_lengths(lengths)
    moved = seconds = 0.0
    for phase, stack in stacks(model).items():
        x = torch.randn(seqlens.total, getattr(config, phase).hidden_size)
        with Counted({}) as counted:
            forward(stack, phase, x, seqlens)
        moved += counted.moved
        times = []
        for _ in range(repeats + 1):
            with Others() as others:
                forward(stack, phase, x, seqlens)
            times.append(others.seconds)
        seconds += float(np.median(times[1:]))
    return moved / seconds


def measured(config: ModelConfig, phase: str, lengths: list[int], repeats: int
             ) -> dict[str, tuple[float, float]]:
    """choice -> (bytes saved, seconds again) of a layer; none: (0, seconds of its forward pass)."""
    torch.manual_seed(0)
    model = MultimodalModel(config)
    stack, seqlens = stacks(model)[phase], SequenceLengths.from_lengths(lengths)
    x = torch.randn(seqlens.total, getattr(config, phase).hidden_size, requires_grad=True)
    kept, times, cls = {}, {choice: [] for choice in CHOICES}, type(stack[0])
    for turn in range(repeats + 1):  # the first one warms up
        for choice in CHOICES:
            recompute(model, dict.fromkeys(PHASES, choice))
            if not turn:
                kept[choice] = kept_bytes(stack, phase, x, seqlens)
            times[choice].append(seconds(stack, cls, phase, x, seqlens))
    return {choice: ((kept["none"] - kept[choice]) / len(stack), float(np.median(
        [s[choice != "none"] for s in times[choice][1:]]))) for choice in CHOICES}


def predicted(config: ModelConfig, phase: str, lengths: list[int], forward_s: float, rate: float
              ) -> dict[str, tuple[float, float]]:
    """The same by orchmllm.sharding.memory. forward_s: of a layer's forward pass, as measured;
    rate: see memory_rate."""
    kept = block_bytes(phase, getattr(config, phase), 4, on_cpu=True).kept
    memory = MemoryModel(config, FsdpConfig(), 1, on_cpu=True)
    work = phase_work(phase, config, lengths_of(
        phase, getattr(config, phase), np.array(lengths)), "full").recompute.sum(axis=1)
    moving = sum(lengths) / rate
    products, attention = forward_s * work / work.sum()
    products -= moving * memory.moved(phase)  # the forward pass is of all operators
    return {choice: ((kept["none"] - kept[choice]) * sum(lengths), memory.repeated(
        phase, layer_counts(choice, 1), products, attention, moving))
        for choice in ("selective", "full")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1400, 1200, 1000, 1400, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**30)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    config = model_of(args.layers, args.width)
    rate = memory_rate(config, args.lengths, args.repeats)
    print(f"{args.layers} layers x {args.width}, {sum(args.lengths):,} positions, float32, load "
          f"average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {rate / 1e9:.1f} GB/s\n"
          "of a layer:")
    for phase in PHASES:
        found = measured(config, phase, args.lengths, args.repeats)
        calls = measured(config, phase, [1] * len(args.lengths), args.repeats)
        wanted = predicted(config, phase, args.lengths, found["none"][1], rate)
        for choice, (size, time_s) in wanted.items():
            time_s += calls[choice][1]
            print(f"  {phase:6s} {choice:9s} saves {found[choice][0] / 1e6:7.2f} MB (predicted "
                  f"{size / 1e6:7.2f}), takes {1e3 * found[choice][1]:7.1f} ms (predicted "
                  f"{1e3 * time_s:7.1f}, of that {1e3 * calls[choice][1]:.1f} for the calls)",
                  flush=True)


if __name__ == "__main__":
    main()
