"""Measures phases on one device: the work of a rank, forward and backward, without other ranks:
real modules on random inputs of given lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX, SequenceLengths, on_device
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.flops import Lengths, lengths_of, phase_work
from orchmllm.models.llm import PackedQwen2
from orchmllm.models.parts import init_parameters
from orchmllm.models.vision import VisionEncoder
from orchmllm.plan.assign import PHASES

CYCLES_PER_S = 2e9  # of a GPU's clock, at most
MOST_LAUNCH_S = 0.2  # that a GPU is kept busy before a call


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


class Clock:
    """Seconds of a call: on CUDA between two events of the stream, on a CPU the calling thread's
    CPU time (backward runs in it), which other processes on the machine change little.

    A GPU is kept busy until the call's kernels are in its queue, as the step before does it in
    training: else kernels that are shorter than their launch would be timed by their launch."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self._launch_s = device.type == "cuda", 0.0
        self.unit = "seconds on the GPU" if self.on_gpu else "CPU seconds of one thread"

    def seconds(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            started = time.thread_time()
            call()
            return time.thread_time() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CYCLES_PER_S * self._launch_s))
        start.record()
        started = time.perf_counter()
        call()
        self._launch_s = min(time.perf_counter() - started, MOST_LAUNCH_S)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def best(self, call: Callable[[], object], repeat: int) -> float:
        """The shortest of `repeat` calls: what disturbs one only makes it longer. On a GPU after
        one that does not count, in which memory is allocated and the time of the launch is found.
        """
        if self.on_gpu:
            self.seconds(call)
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
        init_parameters(self.module, lambda name, weight: torch.nn.init.normal_(
            weight, std=0.02, generator=self._generator))

    def seconds(self, work: Work, repeat: int) -> float:
        """Forward and backward of a rank's items, whose inputs are on the device before; the
        shortest of `repeat` runs."""
        step = self._llm(work) if self.phase == "llm" else self._encoder(work)

        def run() -> None:
            self.module.zero_grad(set_to_none=True)
            step()

        return self.clock.best(run, repeat)

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
            self.module(self.module.embed_tokens(ids), positions, lengths, labels).backward()

        return step

    def _token_ids(self, count: int) -> Tensor:
        return torch.randint(0, self.model.llm.vocab_size, (count,), generator=self._generator,
                             device=self.device)


def timed_parts(recipe: Recipe, length: int, device: torch.device, dtype: torch.dtype,
                chunk_rows: int) -> Iterator[tuple[str, int, Callable[[int, int], float]]]:
    """Phase by phase (its name, positions of an item, seconds of the forward and backward pass of
    all layers by the number of such items, the shortest of so many runs). length: positions of an
    item, as near as the model allows it. Models of one and of two layers are measured, and the
    difference counts for each of the recipe's layers."""
    for phase in PHASES:
        config = getattr(recipe.model, phase)
        side = config.merge_size if phase == "vision" else 1  # an image is a strip of whole tokens
        group = side**2 if phase != "audio" else config.stack
        of_item = max(length // group, 1) * group
        grid = [1, side, (2 if phase == "audio" else 1) * of_item // side]
        model = replace(recipe.model, **{phase: replace(config, pretrained="")})
        runners = [PhaseRunner(shortened(model, depth), phase, device, dtype, recipe.run.seed,
                               chunk_rows) for depth in (1, 2)]
        item = Work(phase, lengths_of(phase, config, np.array([of_item])), np.array([grid]))
        yield phase, of_item, partial(_of_all_layers, runners, config.num_layers, item)


def _of_all_layers(runners: Sequence[PhaseRunner], num_layers: int, item: Work, count: int,
                   repeat: int) -> float:
    """Seconds of so many items, from runners of one and of two layers."""
    lengths = Lengths(*(x.repeat(count) for x in (
        item.lengths.rows, item.lengths.positions, item.lengths.tokens)))
    work = Work(item.phase, lengths, item.grid.repeat(count, 0))
    first, second = (runner.seconds(work, repeat) for runner in runners)
    return first + max(num_layers - 1, 0) * max(second - first, 1e-9)
