"""Tiny models of transformers, whole examples for them, and stock transformers as the reference:
one example after the other, without packing."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX, Microbatch, PackedExamples, ProcessedExample
from orchmllm.comm.pieces import Media
from orchmllm.data.media_tensors import KINDS, is_content
from orchmllm.models import structure
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import BalancePolicy, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO as AUDIO_SEGMENT
from orchmllm.plan.layout import TEXT as TEXT_SEGMENT
from orchmllm.plan.layout import VISION, BatchLayout
from orchmllm.plan.step import plan_step
from tests.lib.encoder_models import AUDIO, FAMILIES, IMAGE, WINDOW, Family, Item, batch

# Those that are compared from files and on several ranks; scripts/check_models.py compares all.
ADMITTED = ("audioflamingo3", "aya_vision", "gemma3", "glm4v", "glm4v_moe", "idefics3", "internvl",
            "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_5_omni", "qwen2_5_vl",
            "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
            "smolvlm", "vipllava")
TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
SPEC = PlanSpec(
    costs=dict.fromkeys(("vision", "audio", "llm"), CostModel(1, 0)), row_bytes={}, feature_bytes=1,
    ranks_per_node=1, balance=BalancePolicy(dispatch="load"), fills=True)
EXACT = 1e-12  # of the largest gradient; float64
# Stock code that computes a part in float32.
LOOSE = dict.fromkeys(
    ("aya_vision", "clip_tiled_qwen3_moe", "gemma3", "glm4v", "glm4v_moe", "qwen3_5",
     "qwen3_5_moe"), 1e-7) | {"dinov2_qwen2": 1e-9}


def family_of(name: str) -> Family:
    return FAMILIES[name]


def kinds_of(name: str) -> list[str]:
    """What media the tests give to a family: images, clips or both."""
    return [kind for kind in FAMILIES[name].make if kind != "video"]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name].build()


def stock_of(folder: Path) -> nn.Module:
    """The model of a folder in one process; what its class fixes does not learn, as
    from_pretrained would have it."""
    config = read_config(folder)
    kind = model_class(config)
    config._experts_implementation = "eager"  # the product of all experts has no float64
    model = kind.from_pretrained(folder, config=config, dtype=torch.float64).train()
    learns = {name: p.requires_grad for name, p in kind._from_config(config).named_parameters()}
    for name, p in model.named_parameters():
        p.requires_grad_(learns[name])
    return model


def sample(name: str, model: nn.Module, items: Sequence[Item], seed: int) -> dict[str, Any]:
    """Arguments of stock forward for one example."""
    return batch(FAMILIES[name], model, list(items), seed)


def as_example(i: int, inputs: dict[str, Any]) -> ProcessedExample:
    """The same for the trainer. Each run of tokens of an image or a clip is one."""
    ids = inputs["input_ids"][0]
    media = {k: v for k, v in inputs.items() if k not in TEXT}
    kinds = ids.where((ids == IMAGE) | (ids == AUDIO), 0)
    runs = ids.tensor_split((kinds[1:] != kinds[:-1]).nonzero()[:, 0] + 1)
    shapes = {IMAGE: iter(grids(media, sum(int(run[0]) == IMAGE for run in runs))),
              AUDIO: iter(frames(media))}
    segments = []
    for run in runs:
        kind = int(run[0])
        if kind not in shapes:
            segments.append((TEXT_SEGMENT, text_lengths(len(run))))
            continue
        t, h, w = grid = next(shapes[kind])
        rows = t * h * w
        positions, modality = (rows, VISION) if kind == IMAGE else ((rows + 1) // 2, AUDIO_SEGMENT)
        segments.append((modality, SegmentLengths(rows, positions, len(run), grid)))
    lengths = BatchLayout.from_segments(
        i, int((shifted(inputs) != IGNORE_INDEX).sum()), segments)
    return ProcessedExample(i, ids, inputs["labels"][0], media, lengths)


def frames(media: dict[str, Tensor]) -> list[tuple[int, int, int]]:
    """1, 1 and the frames of each clip that are encoded."""
    if "input_features" not in media:
        return []
    if "feature_attention_mask" in media and media["input_features"].shape[-1] != WINDOW:
        return [(1, 1, int(n)) for n in media["feature_attention_mask"].sum(-1)]
    return [(1, 1, WINDOW)] * len(media["input_features"])


def grids(media: dict[str, Tensor], count: int) -> list[tuple[int, int, int]]:
    """(t, h, w) of each image: t tiles of h x w patches of 4 x 4 pixels."""
    if not count:
        return []
    if "image_grid_thw" in media:
        return [tuple(grid) for grid in media["image_grid_thw"].tolist()]
    pixels = media["pixel_values"]
    if pixels.dim() == 5 and "image_sizes" in media:  # tiles of zeros fill it up
        return [(int(one.flatten(1).any(1).sum()), 4, 4) for one in pixels]
    if "image_sizes" in media:
        return [(1, h // 4, w // 4) for h, w in media["image_sizes"].tolist()]
    return [(1, 4, 4)] * count


def parts_of(example: ProcessedExample, segments: Sequence[int]) -> ProcessedExample:
    """What ProcessedReader.load returns for these segments."""
    cut, arguments = {}, {}
    for modality, kind in KINDS.items():
        media = np.flatnonzero(example.lengths.modality == modality).tolist()
        tensors = {name: value[:, : len(media)] if "pixel_attention_mask" in example.media else
                   value for name, value in example.media.items()}  # a slot may be empty
        cut |= zip(media, kind.parts(tensors, example.lengths.grid[media]), strict=True)
        arguments |= dict.fromkeys(media, kind.content)
    return replace(example, media={n: v for n, v in example.media.items() if not is_content(n)},
                   parts={s: cut[s] for s in segments}, arguments=arguments)


def planned_row(whole: WholeModel, examples: Sequence[ProcessedExample], layout: BatchLayout
                ) -> PackedExamples:
    """The batch of the first rank of `layout`, whose encoders are planned. examples: of all ranks,
    with the parts of their media."""
    plan = plan_step(layout, SPEC)
    micro = Microbatch(plan, plan.for_rank(0), positions=np.arange(len(examples)))
    media = {phase: Media.here([
        whole.encoders.described(phase, examples[e].parts[s])
        for e, s in micro.rank_plan.media[phase].tolist()])
        for phase, moves in plan.encode.items() if len(moves.order)}
    return whole.join([replace(examples[e], parts={}) for e in micro.rank_plan.examples], media,
                      micro)


def shifted(inputs: dict[str, Any]) -> Tensor:
    return F.pad(inputs["labels"][0, 1:], (0, 1), value=IGNORE_INDEX)


def stock_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Sum of the loss of one example, in the attention that the model was built with."""
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits[0]
    return F.cross_entropy(logits, shifted(inputs), ignore_index=IGNORE_INDEX, reduction="sum")


def stock(model: nn.Module, examples: Sequence[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """Sum of the loss, and its gradient by parameter."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss = sum(stock_loss(plain, inputs) for inputs in examples)
    loss.backward()
    return float(loss.detach()), gradients(plain)


def named_parts(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The part of each of the parameters of these names. model: without wrappers."""
    places = structure.places(model)
    return [structure.part_of(places, name) for name in names]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Zeros where a parameter has none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest, over the largest gradient."""
    assert found.keys() == wanted.keys()
    size = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted) / size




class WholeDataset:
    """Example i of a family, with media or without."""

    def __init__(self, name: str, model: nn.Module, size: int) -> None:
        kinds = kinds_of(name)
        g = torch.Generator().manual_seed(1)
        self.inputs = []
        for i in range(size):
            count = int(torch.randint(0, 4, (), generator=g)) if i % 4 else 0
            items = [Item(kinds[k % len(kinds)], int(n)) for k, n in enumerate(
                torch.randint(0, 6, (count,), generator=g))]
            self.inputs.append(sample(name, model, items, 50 + i))

    def __len__(self) -> int:
        return len(self.inputs)

    def split(self, num_validation: int) -> tuple[range, range]:
        kept = len(self) - num_validation
        return range(kept), range(kept, len(self))

    def fingerprint(self) -> dict:
        return {"rows": len(self)}

    def describe(self, i: int, segment: int) -> dict:
        return {"source": "made", "row": i + 1, "data_file": "made", "file": f"{i}"}

    def name(self, i: int) -> str:
        return f"made, row {i + 1}"

    def layout(self, i: int) -> BatchLayout:
        return self.load(i).lengths

    @property
    def reader(self) -> WholeDataset:
        return self

    processor = reader

    def arithmetic(self) -> dict:
        return {}  # its tensors are made without a processor

    def image_row_bytes(self, raw) -> int:
        return 3 * 4 * 4 * 8  # of a patch, in float64

    def blank(self, modality: int) -> dict[str, Tensor]:
        i, segment = next((i, s) for i in range(len(self)) for s, kind in enumerate(
            self.layout(i).modality.tolist()) if kind == modality)
        return self.load(i, segments=[segment]).parts[segment]

    def load(self, i: int, text: bool = True, segments=None, encoded=(), raw=None, on_error=None
             ) -> ProcessedExample:
        assert not encoded and not raw
        example = as_example(i, self.inputs[i])
        return example if segments is None else parts_of(example, segments)
