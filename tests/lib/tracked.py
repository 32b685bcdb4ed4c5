"""Peak memory of the real model's forward and backward pass without memory: fake tensors, a fake
process group of any size, and torch's tracker of what FSDP2 holds, with the kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchmllm.batch import IGNORE_INDEX, PackedExamples, SequenceLengths
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.counts.on_a_gpu import fused
from orchmllm.data.made import Made
from orchmllm.models import attention
from orchmllm.models.families import model_class, read_config
from orchmllm.models.flops import Lengths
from orchmllm.models.whole_flops import part_counts, plan_spec
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.plan.layout import AUDIO, ENCODERS, MADE, VISION, BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.fsdp import shard_all
from orchmllm.sharding.load_whole import ordered
from orchmllm.sharding.loads import Loads, loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.dry_run import NONE
from orchmllm.tools.predict.examples import of_mix
from tests.lib.simulated import microbatch, on_meta
from tests.lib.synthetic import SyntheticDataset


def tracked(recipe: Recipe, num_ranks: int) -> tuple[float, dict[str, float]]:
    """(tracked peak, predicted bytes by moment) of rank 0 in a drawn step without balancing:
    parameters, gradients, activations and exchanges, without the optimizer's moments."""
    memory, plan = planned(recipe, num_ranks)
    choice = {p: recipe.fsdp.checkpointing(p) for p in EVERY_PHASE}
    moments = memory.peaks(loads_of(plan), choice)
    moments.pop("optimizer")
    moves = memory.state_bytes()["optimizer"]
    return (tracked_peak(recipe, plan),
            {name: float(values[0]) - moves for name, values in moments.items()})


def planned(recipe: Recipe, num_ranks: int) -> tuple[MemoryModel, StepPlan]:
    """The memory model of the step that is tracked, and its plan."""
    job = resolve(recipe, num_ranks, 8)
    layout = of_mix(recipe).draw(num_ranks, recipe.train.batch_size, 0)
    return MemoryModel.of(job), plan_step(layout, replace(plan_spec(job), balance=NONE))


class Drawn(SyntheticDataset):
    """Examples of a layout, of any tokens and without what media show."""

    def __init__(self, layout: BatchLayout, model: ModelConfig) -> None:
        config, counts = read_config(Path(model.folder)), part_counts(model)
        audio, made = (getattr(config, name, None) for name in ("audio_config", "generator_config"))
        super().__init__(size=layout.num_examples, num_mels=audio.num_mel_bins if audio else 1)
        self._all, self._width = layout, counts["vision"].row_values
        self._tokens = {VISION: config.image_token_id, AUDIO: config.audio_token_id}
        if made:
            self._tokens[MADE] = made["token_id"]
            self._made = Made("", made["token_id"], made["side"], made["max_pixels"])
        self._first = np.append(0, np.cumsum(layout.segments_per_example))
        self._place = {e: k for k, e in enumerate(layout.example_id.tolist())}

    def _segments(self, i: int) -> Iterator[tuple[int, SegmentLengths]]:
        one, k = self._all, self._place[i]
        for s in range(self._first[k], self._first[k + 1]):
            yield int(one.modality[s]), SegmentLengths(
                int(one.rows[s]), int(one.attn_len[s]), int(one.num_tokens[s]),
                tuple(one.grid[s].tolist()))

    def _text(self, i: int) -> tuple[Tensor, Tensor]:
        """The last tokens are learnt, as many as are planned."""
        ids = torch.cat([torch.full((n.num_tokens,), self._tokens.get(modality, 0))
                         for modality, n in self._segments(i)])
        labels = torch.full_like(ids, IGNORE_INDEX)
        targets = int(self._all.num_targets[self._place[i]])
        labels[len(ids) - targets:] = 0
        return ids, labels

    def _medium(self, i: int, k: int, layout: BatchLayout) -> dict[str, Tensor]:
        rows = int(layout.rows[k])
        if layout.modality[k] == MADE:
            return self._made.blank(rows)
        if layout.modality[k] == VISION:
            return {"pixel_values": torch.zeros(rows, self._width),
                    "image_grid_thw": torch.from_numpy(layout.grid[k: k + 1])}
        return {"input_features": torch.zeros(1, self.num_mels, rows),
                "feature_attention_mask": torch.ones(1, rows, dtype=torch.int32)}

    def blank(self, modality: int) -> dict[str, Tensor]:
        """A small image or clip."""
        if modality == MADE:
            return self._made.blank()
        if modality == VISION:
            return {"pixel_values": torch.zeros(16, self._width),
                    "image_grid_thw": torch.tensor([[1, 4, 4]])}
        return {"input_features": torch.zeros(1, self.num_mels, 8),
                "feature_attention_mask": torch.ones(1, 8, dtype=torch.int32)}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Fake tensors of a CPU run what is one operator on a GPU: RMSNorm, and attention of a row."""
    with fused(), fused("CPU"), patch.object(attention, "is_compiling", lambda: True):
        yield


class Tracker(FSDPMemTracker):
    """Also where a step leaves some units alone."""

    def _fsdp_param_group_post_backward(self, module, original):
        watched = super()._fsdp_param_group_post_backward(module, original)

        def inner(*args) -> None:
            params = module._get_fsdp_state()._fsdp_param_group.fsdp_params
            gathered = all(hasattr(param, "_unsharded_param") for param in params)
            (watched if gathered else original)(*args)

        return inner


def tracked_peak(recipe: Recipe, plan: StepPlan, data: SyntheticDataset | None = None,
                 rank: int = 0, kernels: Callable[[], AbstractContextManager] = as_on_a_gpu
                 ) -> float:
    """Bytes of a rank in a forward and backward pass of its part of a plan, without the optimizer's
    moments. data: of the plan; default: examples that are like its layout."""
    device, layout = torch.device("cpu"), plan.layout
    data = data or Drawn(layout, recipe.model)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_ranks)
    try:
        whole = on_meta(recipe.model, recipe.fsdp, None)
        micro = microbatch(whole, data, plan, rank, "load")
        shard_all(whole, ordered(whole, recipe.fsdp), recipe.fsdp, device, 8)
        with kernels(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            whole.to_empty(device=device)
            content = micro.content
            batch = content.moved(mode.from_tensor)
            batch = replace(batch, inputs=batch.inputs | content.read)
            tracker = Tracker(whole)
            tracker.track_inputs((batch,))
            with tracker:
                for _ in range(recipe.train.accumulation_steps):
                    tracker.reset_mod_stats()
                    whole(batch).sum().backward()
        return float(tracker.get_tracker_snapshot("peak")[device]["Total"])
    finally:
        dist.destroy_process_group()


def tracked_text(folder: Path, choice: Mapping[str, str], num_tokens: int, **fsdp: Any
                 ) -> tuple[float, float]:
    """(tracked, predicted) peak of one example of text in a model of transformers, in bfloat16 and
    one process, without the optimizer's moments. fsdp: more of the recipe's section."""
    sizes = np.full(1, num_tokens)
    lengths = {**dict.fromkeys(ENCODERS, Lengths(*np.zeros((3, 1)))), "llm": Lengths(*[sizes] * 3)}
    recipe = Recipe(model=ModelConfig(config=str(folder)),
                    fsdp=FsdpConfig(param_dtype="bfloat16", **fsdp))
    memory = MemoryModel.of(resolve(recipe, 1, 1))
    moments = memory.peaks(Loads(lengths, dict.fromkeys(ENCODERS, np.zeros(1))), choice)
    moments.pop("optimizer")
    config = read_config(folder)
    with torch.device("meta"):
        model = WholeModel(model_class(config)._from_config(config).bfloat16(), torch.bfloat16)
    model.loss_chunk_rows = recipe.fsdp.loss_chunk_rows
    recompute(model, choice)
    ids = torch.zeros(1, num_tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": torch.arange(num_tokens).repeat(4, 1, 1)}
    with as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            model(PackedExamples(inputs, torch.arange(num_tokens), ids[0],
                                 SequenceLengths.from_lengths([num_tokens]), {})).backward()
    return (float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]),
            max(float(m[0]) for m in moments.values()) - memory.state_bytes()["optimizer"])
