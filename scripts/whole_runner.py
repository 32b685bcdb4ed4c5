"""Measures the phases of a model of transformers on one device: forward and backward, without
other ranks and with random weights.

The model's own code runs, with blocks that pass on what they are given. What a block is given says
which blocks are alike: those with parameters of the same shapes that are called with the same
masks, windows and angles. One of them is measured by itself and counts for all. So there are the
weights of a block of each shape, and what one block keeps for its backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchmllm.batch import IGNORE_INDEX, PackedExamples, ProcessedExample
from orchmllm.config.recipe import Recipe
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import Medium
from orchmllm.data.media.shapes import Size
from orchmllm.data.text.processor import Processor
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.layout import NO_EXAMPLES, VISION
from orchmllm.sharding.load_whole import experts_by

POSITIONS_PER_S = 50  # of a clip in its encoder
CYCLES_PER_S = 2e9  # of a GPU's clock, at most
MOST_LAUNCH_S = 0.2  # that a GPU is kept busy before a call


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


@dataclass
class Alike:
    """Blocks that compute the same. forward, x, rest: of the first of them, and what it was called
    with. count: how many they are."""

    forward: Callable
    x: Tensor
    rest: tuple[tuple, dict[str, Any]]
    count: int = 0

    def run(self) -> Any:
        """What the block returns."""
        args, options = self.rest
        return self.forward(self.x.detach().requires_grad_(), *args, **options)


class Blocks:
    """The transformer blocks of a model, which pass on what they are given from now on."""

    def __init__(self, whole: WholeModel) -> None:
        self._found: dict[tuple, Alike] | None = None
        self._tuples: dict[tuple, bool] = {}  # whether blocks of a shape return one
        for stack in whole.blocks().values():
            for block in stack:
                block.forward = partial(self._passed, block.forward, shapes(block))

    def called_in(self, step: Callable[[], object]) -> list[Alike]:
        """How they are called while `step` runs."""
        self._found = {}
        with torch.no_grad():
            step()
        found, self._found = self._found, None
        return [*found.values()]

    def _passed(self, forward: Callable, shape: tuple, x: Tensor, *args: Any, **options: Any
                ) -> Any:
        if self._found is not None:
            key = shape, *(id(t) for t in tree_leaves((args, options)) if isinstance(t, Tensor))
            one = self._found.setdefault(key, Alike(forward, x, (args, options)))
            one.count += 1
            if shape not in self._tuples:  # in a context where no row counts its layers
                self._tuples[shape] = isinstance(Context().run(one.run), tuple)
        return (x,) if self._tuples[shape] else x


def shapes(block: nn.Module) -> tuple:
    """The names and shapes of its parameters."""
    return tuple((name, p.shape) for name, p in block.named_parameters())


def built(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> WholeModel:
    """The model of a recipe with random weights, which blocks of the same shapes share."""
    config = read_config(Path(recipe.model.folder))
    config._experts_implementation = experts_by(dtype)
    with torch.device("meta"):
        whole = WholeModel(model_class(config)._from_config(config, dtype=dtype), dtype).train()
    first: dict[tuple, nn.Module] = {}
    blocks = [block for stack in whole.blocks().values() for block in stack]
    others = [block for block in blocks if first.setdefault(shapes(block), block) is not block]
    without = {m for block in others for m in block.modules()}
    for module in whole.modules():
        if module not in without:
            module.to_empty(device=device, recurse=False)
    torch.manual_seed(recipe.run.seed)
    whole.hf.init_weights()
    for block in others:
        same = first[shapes(block)]
        for name, value in (*same.named_parameters(), *same.named_buffers()):
            owner, _, own = name.rpartition(".")
            setattr(block.get_submodule(owner), own, value)
    return whole


class WholeRunner:
    """A recipe's model on a device; its blocks do nothing unless `seconds` measures them.
    chunk_rows: see orchmllm.models.loss.LossHead."""

    def __init__(self, recipe: Recipe, device: torch.device, dtype: torch.dtype, chunk_rows: int
                 ) -> None:
        self.whole = whole = built(recipe, device, dtype)
        self._device, self._dtype, self._clock = device, dtype, Clock(device)
        self._rng = np.random.default_rng(recipe.run.seed)
        self.encoders, self.blocks = PlannedEncoders(whole.hf), Blocks(whole)
        whole.loss_chunk_rows, whole.num_layers = chunk_rows, 0  # none of them attends to the row

    def seconds(self, step: Callable[[], Tensor], repeat: int) -> tuple[float, float]:
        """Forward and backward of what `step` returns, a loss () or features (rows, width): of what
        is around the blocks, and of all blocks; the shortest of `repeat` runs of the one and of
        each kind of block."""
        def best(forward: Callable[[], Any]) -> float:
            def run() -> None:
                self.whole.zero_grad(set_to_none=True)
                out = forward()
                out = out[0] if isinstance(out, tuple) else out
                out.backward(torch.ones_like(out))

            return self._clock.best(run, repeat)

        alike = self.blocks.called_in(step)
        return best(step), sum(one.count * best(one.run) for one in alike)

    def text(self, lengths: Sequence[int]) -> PackedExamples:
        """Examples of text, of which every other token is learnt."""
        config, examples = self.whole.hf.config, []
        size = config.get_text_config(decoder=True).vocab_size
        marks = [v for k, v in vars(config).items() if k.endswith(("_token_id", "_token_index"))]
        plain = np.setdiff1d(np.arange(size), [mark for mark in marks if isinstance(mark, int)])
        for i, length in enumerate(lengths):
            ids = torch.from_numpy(self._rng.choice(plain, length))
            labels = ids.clone()
            labels[::2] = IGNORE_INDEX
            examples.append(ProcessedExample(i, ids, labels, {}, NO_EXAMPLES))
        return self.whole.join(examples).to(self._device)

    def medium(self, processor: Processor, kind: int, length: int) -> tuple[int, dict[str, Tensor]]:
        """(Positions, tensors) of a square image or a clip of noise of about so many positions."""
        if kind == VISION:
            side = max(round(length**0.5), 1) * processor.patch
            size = Size(side, side)
            content = Image.fromarray(self._rng.integers(0, 256, (side, side, 3), np.uint8))
        else:
            size = Size(0, length * processor.audio.sample_rate // POSITIONS_PER_S)
            content = self._rng.standard_normal(size.width).astype(np.float32)
        spans = processor.rendered([Turn("user", (Medium(kind, ""),), False)])
        (lengths,) = (found for of, found in processor.tokens(spans, [size]).segments if of == kind)
        (tensors,) = processor.parts([content])
        return lengths.attn_len, {
            name: value.to(self._device, self._dtype if value.is_floating_point() else None)
            for name, value in tensors.items()}
