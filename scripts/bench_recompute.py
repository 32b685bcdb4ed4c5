"""What a layer that recomputes saves and costs, beside what is predicted of it.

    python scripts/bench_recompute.py

For each phase a stack of blocks runs forward and backward on the CPU, on one thread and in float32,
with nothing, with what is no product, and with everything computed again. Bytes are those that are
still allocated after the forward pass, from the allocator's own events; times are CPU seconds of
the thread, the median of --repeats rounds in which the ways take turns.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from orchmllm.batch import SequenceLengths
from orchmllm.config.fsdp import CHOICES
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.activations import block_bytes
from orchmllm.sharding.blocks import recompute, stacks
from orchmllm.sharding.memory import SELECTIVE_SHARE


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


def seconds(stack: nn.ModuleList, phase: str, x: Tensor, seqlens: SequenceLengths
            ) -> tuple[float, float]:
    """Of the forward pass, and of both."""
    started = time.thread_time()
    out = forward(stack, phase, x, seqlens)
    between = time.thread_time()
    out.square().sum().backward()
    return between - started, time.thread_time() - started


def measured(config: ModelConfig, phase: str, lengths: list[int], repeats: int
             ) -> dict[str, tuple[float, float]]:
    """choice -> (bytes saved, seconds more) of a layer; none: (0, seconds of its forward pass)."""
    torch.manual_seed(0)
    model = MultimodalModel(config)
    stack, seqlens = stacks(model)[phase], SequenceLengths.from_lengths(lengths)
    x = torch.randn(seqlens.total, getattr(config, phase).hidden_size, requires_grad=True)
    kept, times = {}, {choice: [] for choice in CHOICES}
    for turn in range(repeats + 1):  # the first one warms up
        for choice in CHOICES:
            recompute(model, dict.fromkeys(PHASES, choice))
            if not turn:
                kept[choice] = kept_bytes(stack, phase, x, seqlens)
            times[choice].append(seconds(stack, phase, x, seqlens))
    table = {choice: np.array(found[1:]) for choice, found in times.items()}  # (repeats, 2)
    return {choice: ((kept["none"] - kept[choice]) / len(stack), float(np.median(
        table["none"][:, 0] if choice == "none" else table[choice][:, 1] - table["none"][:, 1]
        ) / len(stack))) for choice in CHOICES}


def predicted(config: ModelConfig, phase: str, positions: int, forward_s: float
              ) -> dict[str, tuple[float, float]]:
    """The same by orchmllm.sharding.memory. forward_s: of a layer's forward pass, as measured."""
    kept = block_bytes(phase, getattr(config, phase), 4, on_cpu=True).kept
    return {choice: ((kept["none"] - kept[choice]) * positions, share * forward_s)
            for choice, share in (("selective", SELECTIVE_SHARE), ("full", 1.0))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--lengths", type=int, nargs="+", default=[700, 250, 50, 400, 600])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = model_of(args.layers, args.width)
    print(f"{args.layers} layers x {args.width}, {sum(args.lengths):,} positions, float32, load "
          f"average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\nof a layer:")
    for phase in PHASES:
        found = measured(config, phase, args.lengths, args.repeats)
        wanted = predicted(config, phase, sum(args.lengths), found["none"][1])
        for choice, (size, time_s) in wanted.items():
            print(f"  {phase:6s} {choice:9s} saves {found[choice][0] / 1e6:7.2f} MB (predicted "
                  f"{size / 1e6:7.2f}), takes {1e3 * found[choice][1]:7.1f} ms more (predicted "
                  f"{1e3 * time_s:7.1f})", flush=True)


if __name__ == "__main__":
    main()
