"""What a model of transformers computes: the FLOP of its parts, counted on the model without
memory, and the costs that the planner gets from them."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.job import Job
from orchmllm.config.model import ModelConfig
from orchmllm.models.block_flops import multiplied, state_flop
from orchmllm.models.families import part_of
from orchmllm.models.flops import Lengths, Work, terms
from orchmllm.models.hf import WholeModel, meta_model
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS

# Images are cut into tiles of one size, each of which is encoded alone.
TILED = ("aya_vision", "gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision",
         "smolvlm", "vipllava")
CONNECTOR = re.compile(r".*?(?:merger|projector|connector|audio_tower\.proj)[^.]*(?:\.\d+)?\.")


class PartFlops(NamedTuple):
    """FLOP of the forward pass of a part. position, pair: of its blocks, of a position and of two
    that attend to each other (of half a pair in the LLM, where one sees the other); row: of a patch
    or frame before the blocks, or of a target's logits; token: of what is behind the blocks; tower,
    first: of that what belongs to the tower, and what of the connectors has none of their weights
    before it; read: the share of the blocks whose output is read, which alone have a backward pass;
    second: of row what has weights before it; near: like pair, in blocks that attend within
    windows; window: positions of one, in the LLM as far back as a position sees; tile: attention of
    a position, where each tile of an image is encoded alone."""

    position: int
    pair: int
    row: int
    token: int = 0
    tower: int = 0
    first: int = 0
    read: float = 1.0
    second: int = 0
    near: int = 0
    window: int = 1
    tile: int = 0


@lru_cache(maxsize=4)
def part_flops(folder: str) -> dict[str, PartFlops]:
    """vision, audio, llm -> their FLOP, of those that the model has."""
    whole = meta_model(folder)
    stacks, config = whole.blocks(), whole.hf.config
    text = config.get_text_config(decoder=True)
    width = text.num_attention_heads * (getattr(text, "head_dim", None)
                                        or text.hidden_size // text.num_attention_heads)
    sizes = {part: multiplied(stack, getattr(text, "num_experts_per_tok", 0))
             for part, stack in stacks.items()}
    near, window = sliding(text)
    out = {"llm": PartFlops(2 * sizes["llm"] + sum(map(state_flop, whole.mixers)),
                            2 * (len(stacks["llm"]) - len(whole.mixers) - near) * width,
                            2 * whole.hf.get_output_embeddings().weight.numel(),
                            near=2 * near * width, window=window)}
    names, begins = {id(p): name for name, p in whole.hf.named_parameters()}, {}
    for i, name in names.items():
        if (found := CONNECTOR.match(name)) and part_of(name) == "connector":
            begins.setdefault(found[0], i)
    for part in [part for part in ENCODERS if part in stacks]:
        tower, num_layers = getattr(config, f"{part}_config"), len(stacks[part])
        near, window, tile = 0, 1, 0
        # A pair of positions: 2 products of 2 FLOP; half of the pairs where it is causal.
        each = 4 * width_of(tower)
        if part == "audio":  # a position attends to those of its window
            near, window = num_layers, getattr(tower, "n_window", tower.max_source_positions)
        elif hasattr(tower, "fullatt_block_indexes"):  # or, in the other blocks, of its square
            near = num_layers - len(tower.fullatt_block_indexes)
            side = tower.spatial_merge_size
            window = (tower.window_size // side // tower.patch_size * side)**2
        pair = each * (num_layers - near)
        if config.model_type in TILED:  # or of its tile
            first = any(n.endswith(("cls_token", "class_embedding")) for n, _ in
                        whole.named_parameters())
            inside = (int(np.max(tower.image_size)) // int(np.max(tower.patch_size)))**2 + first
            tile, pair = pair * inside, 0
        front, behind = around(whole, part)
        of_tower = [m for m in behind if part_of(names[id(m.weight)]) == part]
        firsts = [m for m in behind if id(m.weight) in begins.values()]
        token, tower, first = (2 * sum(m.weight.numel() for m in found)
                               for found in (behind, of_tower, firsts))
        layer = getattr(config, f"{part}_feature_layer", -1)  # of LLaVA the last but one
        read = 1 + (layer + 1) / len(stacks[part]) if isinstance(layer, int) and layer < 0 else 1.0
        out[part] = PartFlops(2 * sizes[part], pair, sum(map(_row_flops, front)), token, tower,
                              first, read, sum(map(_row_flops, front[1:])) if part == "audio" else
                              0, near * each, window, tile)
    return out


def width_of(config: Any) -> int:
    """Of what the blocks of a tower or a text model pass on."""
    return getattr(config, "embed_dim", None) or config.hidden_size


def sliding(text: Any) -> tuple[int, int]:
    """(Layers of the text model of a configuration whose positions see only some before them, how
    many with their own); 0 and 1 if none does."""
    window = getattr(text, "sliding_window", None)
    if not (window and hasattr(type(text), "sliding_window")):  # a folder may name what none reads
        return 0, 1
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    return kinds.count("sliding_attention"), window


def _attention(phase: str, flops: PartFlops, lengths: Lengths) -> np.ndarray:
    """(n,) FLOP of the attention of items, forward."""
    n, size = lengths.positions.astype(float), flops.window
    if phase == "llm":
        seen = np.minimum(n, size)
        return flops.pair * n * (n + 1) + flops.near * seen * (2 * n - seen + 1)
    near = _pairs(n, size)
    if phase == "vision" and lengths.grid is not None:
        t, h, w = lengths.grid.T.astype(float)
        side = math.isqrt(size)
        near = t * _pairs(h, side) * _pairs(w, side)
    return (flops.pair * n + flops.tile) * n + flops.near * near


def _pairs(n: np.ndarray, size: int) -> np.ndarray:
    """Pairs inside of pieces of so many positions, of which the last one may be shorter."""
    return n // size * size**2 + (n % size)**2


def _row_flops(module: nn.Module) -> int:
    """Of what is before the blocks, for a patch or a frame."""
    flop = 2 * module.weight.numel()
    return flop // module.stride[0] if isinstance(module, nn.Conv1d) else flop


@lru_cache(maxsize=8)  # a bisection asks a hundred times
def around(whole: WholeModel, part: str = "vision") -> tuple[list[nn.Module], list[nn.Module]]:
    """(What makes positions of pixels or frames, the linear layers behind the blocks) of an
    encoder. A connector outside of the towers belongs to the only one."""
    stacks = whole.blocks()
    inside = {id(m) for stack in stacks.values() for m in stack.modules()}
    inside.add(id(whole.hf.get_output_embeddings()))
    found = [m for name, m in whole.hf.named_modules() if id(m) not in inside
             and isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
             and ("audio" if "audio_tower" in name or "vision" not in stacks else "vision") == part]
    front = [m for m in found if isinstance(m, nn.Conv1d)
             or m.weight.dim() > 2 and m.weight.shape[1] == 3]
    return front, [m for m in found if m not in front]


def patches_of_token(config: Any) -> float:
    """How many patches of an image become one token."""
    tower = config.vision_config
    if tokens := getattr(config, "mm_tokens_per_image", None):
        return (int(np.max(tower.image_size)) // int(np.max(tower.patch_size)))**2 / tokens
    sides = (getattr(owner, name, None) for owner in (tower, config) for name in (
        "spatial_merge_size", "scale_factor", "downsample_factor", "downsample_ratio"))
    side = next(filter(None, sides), 1)
    return max(side, 1 / side)**2


def feature_width(folder: str) -> int:
    """Numbers that the LLM gets for a token of a medium, an image's deepstack, too."""
    config = meta_model(folder).hf.config
    vision = getattr(config, "vision_config", None)
    deep = getattr(vision, "deepstack_visual_indexes", None) or ()
    return config.get_text_config(decoder=True).hidden_size * (1 + len(deep))


def whole_work(phase: str, model: ModelConfig, lengths: Lengths, checkpointing: str) -> Work:
    """See orchmllm.models.flops.phase_work."""
    flops = part_flops(model.folder).get(phase, PartFlops(0, 0, 0))
    learns, causal = model.learns(phase), phase == "llm"
    # Towards the input, towards the weights; what adapters compute themselves is not counted.
    passes = learns + (learns and not model.lora.rank) or int(causal)
    connectors = int(model.learns("connector"))
    behind = flops.first * (connectors + learns) + flops.tower * passes + (
        flops.token - flops.first - flops.tower) * (connectors + model.features_learn(phase))
    blocks, front = flops.position * lengths.positions, flops.row * lengths.rows
    attention, connector = _attention(phase, flops, lengths), flops.token * lengths.tokens
    again = flops.read * (checkpointing == "full" and passes > 0)
    return Work(
        forward=np.stack([front + blocks + connector, attention]),
        # Pixels and frames need no gradient, what a convolution before another makes does.
        backward=np.stack([(passes if causal else max(passes - 1, 0)) * front
                           + max(passes - 1, 0) * flops.second * lengths.rows
                           + passes * flops.read * blocks + behind * lengths.tokens,
                           2 * min(passes, 1) * flops.read * attention]),
        recompute=again * np.stack([blocks, attention]))


def plan_whole(job: Job) -> PlanSpec:
    """What the planner has to know. Images move as bytes, which a run finds out to be so or not
    (orchmllm.data.loading.whole_examples), frames of clips in float32. A medium
    costs by its positions and an example by its tokens what they compute,
    without the logits of what is learnt: exactly, but for an LLM with sliding windows, whose cost
    is exact for examples of one and of four windows, and for the edges of windows of images."""
    recipe, model, parts = job.recipe, job.recipe.model, part_flops(job.recipe.model.folder)
    rows, tokens = {"llm": 0, "vision": 1, "audio": 2}, {"llm": 1.0, "audio": 0.5}  # of a position
    row_bytes, config = dict.fromkeys(ENCODERS, 0), meta_model(model.folder).hf.config
    if "vision" in parts:
        tokens["vision"] = 1 / patches_of_token(config)
        row_bytes["vision"] = 3 * int(np.max(config.vision_config.patch_size))**2
    if "audio" in parts:
        row_bytes["audio"] = 4 * config.audio_config.num_mel_bins
    costs = dict.fromkeys(PHASES, CostModel(1, 0))  # what the model has not has no items
    for part, flops in parts.items():
        n = flops.window * np.array([1, 4])
        costs[part] = CostModel(*terms(
            part, model, Lengths(rows[part] * n, n, tokens[part] * n)))
    return PlanSpec(
        costs=costs, row_bytes=row_bytes,
        feature_bytes=feature_width(model.folder) * DTYPE_BYTES[recipe.fsdp.forward_dtype],
        ranks_per_node=job.ranks_per_node, fills=True, balance=recipe.balance,
        group_size=job.shard_size if recipe.balance.group == "shard" else 0)
