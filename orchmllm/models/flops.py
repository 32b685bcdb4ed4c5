"""FLOPs of every phase without padding, and what follows: MFU, tokens per second and GPU.

OrchMLLM section 8: "we universally calculate effective GPU FLOPs without paddings". Counted are
matrix products and attention (causal: half of the square, what a kernel that skips masked blocks
computes), forward and backward; recomputation is work but never counts as useful. The backward
pass of a product is one towards its weights, if they learn, and one towards its input, if something
before it learns: a frozen encoder has none, its connector that of its weights, and a frozen LLM
still passes gradients on to what is before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.job import Job
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.models.gpus import GPUS, kind_of
from orchmllm.models.spec import spec_of
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import StepPlan


@dataclass(frozen=True)
class Lengths:
    """A phase's items, (n,) int64 each: rows that arrive (patches, mel frames) or, in the LLM, its
    targets; positions that attention sees (patches, frames after the convolutions, tokens); LLM
    tokens they become. grid: (n, 3) tiles, rows and columns of patches, which windows are cut
    from; None: unknown."""

    rows: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    grid: np.ndarray | None = None


@dataclass(frozen=True)
class Work:
    """FLOP per item, (2, n) float64 each: matrix products and attention. recompute: what
    activation checkpointing repeats."""

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray

    @property
    def useful(self) -> np.ndarray:
        """(n,) forward and backward."""
        return (self.forward + self.backward).sum(axis=0)


def phase_lengths(layout: BatchLayout, phase: str) -> Lengths:
    """The items of a phase in source order."""
    if phase == "llm":
        tokens = layout.tokens_per_example
        return Lengths(layout.num_targets, tokens, tokens)
    seg = layout.segments[ENCODERS[phase]]
    # That of a clip has its frames, of which two make a position.
    grid = layout.grid[seg] if phase == "vision" else None
    return Lengths(layout.rows[seg], layout.attn_len[seg], layout.num_tokens[seg], grid)


def padded_lengths(plan: StepPlan, phase: str) -> Lengths:
    """A phase's items in source order as they are computed if every rank pads its batch to its
    longest item (the paper's audio)."""
    lengths = phase_lengths(plan.layout, phase)
    rank = item_rank(plan, phase)
    longest = np.zeros(plan.layout.num_ranks, np.int64)
    rows = longest.copy()
    np.maximum.at(longest, rank, lengths.positions)
    np.maximum.at(rows, rank, lengths.rows)
    return Lengths(rows[rank], longest[rank], lengths.tokens)


def padded_phases(model: ModelConfig) -> frozenset[str]:
    """Phases that the model pads to a rank's longest item."""
    return frozenset({"audio"} if model.audio.mode == "padded" else ())


def item_rank(plan: StepPlan, phase: str) -> np.ndarray:
    """(n,) rank that processes each item, items in source order."""
    move = plan.rearrangement(phase)
    return move.target_rank[move.inverse.order]


def lengths_of(phase: str, config: VisionConfig | AudioConfig | LLMConfig,
                 positions: np.ndarray) -> Lengths:
    """Items of so many positions, (n,)."""
    if phase == "llm":
        return Lengths(positions, positions, positions)
    rows = 2 * positions if phase == "audio" else positions  # two mel frames make a position
    return Lengths(rows, positions, positions / _group(phase, config))


def phase_work(phase: str, model: ModelConfig, lengths: Lengths,
               checkpointing: str = "none") -> Work:
    """Work of each item. checkpointing: none, selective (no product is repeated) or full."""
    return spec_of(model).work(phase, model, lengths, checkpointing)


def pair_flop(phase: str, model: ModelConfig) -> float:
    """FLOP of the forward pass for a position that attends to one, in all layers."""
    one = np.ones(1, np.int64)
    return float(phase_work(phase, model, Lengths(one, one, one)).forward[1, 0])


def work_of_parts(phase: str, model: ModelConfig, lengths: Lengths, checkpointing: str) -> Work:
    """See phase_work."""
    if phase == "llm":
        return _llm_work(model.llm, lengths.tokens, checkpointing)
    config = getattr(model, phase)
    if phase == "vision":
        front = _patch_flops(config) * lengths.rows
    else:
        size = config.hidden_size
        front = 6.0 * size * (config.num_mels * lengths.rows + size * lengths.positions)
    connector = _connector_flops(phase, model) * lengths.tokens
    passes = model.learns("connector") + model.features_learn(phase)
    return _encoder_work(config, lengths, front, _front_backward(phase, config, lengths),
                         connector, passes * connector, checkpointing)


def _group(phase: str, config: VisionConfig | AudioConfig) -> int:
    """Encoder positions that the connector joins to one LLM token."""
    return config.merge_size**2 if phase == "vision" else config.stack


def _connector_flops(phase: str, model: ModelConfig) -> float:
    """Forward FLOP of the connector for one LLM token."""
    config, width = getattr(model, phase), model.llm.hidden_size
    return 2.0 * width * (_group(phase, config) * config.hidden_size + width)


def _patch_flops(config: VisionConfig) -> float:
    """Forward FLOP of one patch's embedding."""
    return 2.0 * config.geometry.row_size * config.hidden_size


def _front_backward(phase: str, config: VisionConfig | AudioConfig, lengths: Lengths):
    """What precedes the blocks needs no gradient of its input, which is data."""
    if config.frozen:
        return 0.0
    if phase == "vision":
        return _patch_flops(config) * lengths.rows
    size = config.hidden_size
    return 6.0 * size * (config.num_mels * lengths.rows + 2 * size * lengths.positions)


def _encoder_work(config, lengths: Lengths, front, front_backward, connector,
                  connector_backward, checkpointing: str) -> Work:
    size = config.hidden_size
    blocks = config.num_layers * 4.0 * size * (2 * size + config.intermediate_size)
    blocks = blocks * lengths.positions
    attention = config.num_layers * 4.0 * size * lengths.positions.astype(float)**2
    learns = 0.0 if config.frozen else 1.0
    again = learns if checkpointing == "full" else 0.0
    return Work(
        forward=np.stack([front + blocks + connector, attention]),
        backward=np.stack([front_backward + 2 * learns * blocks + connector_backward,
                           2 * learns * attention]),
        recompute=again * np.stack([blocks, attention]))


def _llm_work(config: LLMConfig, tokens: np.ndarray, checkpointing: str) -> Work:
    size = config.hidden_size
    kv = size // config.num_heads * config.num_kv_heads
    layer = 2.0 * (2 * size * size + 2 * size * kv + 3 * size * config.intermediate_size)
    blocks = config.num_layers * layer * tokens
    head = 2.0 * size * config.vocab_size * tokens
    attention = config.num_layers * 2.0 * size * tokens.astype(float) * (tokens + 1)
    passes = 1 if config.frozen else 2  # towards the input; towards the weights
    again = 1.0 if checkpointing == "full" else 0.0
    return Work(
        forward=np.stack([blocks + head, attention]),
        backward=np.stack([passes * (blocks + head), 2 * attention]),
        recompute=again * np.stack([blocks, attention]))


def step_flops(model: ModelConfig, layout: BatchLayout) -> dict[str, float]:
    """phase -> useful FLOP of a global batch."""
    return {phase: float(phase_work(phase, model, phase_lengths(layout, phase)).useful.sum())
            for phase in PHASES}


def cost_model(phase: str, model: ModelConfig) -> CostModel:
    """The cost by which a phase is balanced, of an item by its positions (tokens in the LLM): the
    FLOP of its forward and backward pass. Raises ValueError for an unknown phase."""
    if phase not in PHASES:
        raise ValueError(f"unknown phase {phase!r}; choose one of {', '.join(PHASES)}")
    config = getattr(model, phase)
    linear, quadratic = terms(phase, model, lengths_of(phase, config, np.array([1, 2])))
    return CostModel(linear, quadratic,
                     padded=phase == "audio" and config.mode == "padded")


def terms(phase: str, model: ModelConfig, lengths: Lengths) -> tuple[int, int]:
    """FLOP of a position and of two that attend to each other, forward and backward: the line
    through those that a position costs in two items of the given lengths."""
    each = phase_work(phase, model, lengths).useful / lengths.positions
    square = float(np.diff(each)[0] / np.diff(lengths.positions)[0])
    return round(each[0] - square * lengths.positions[0]), round(square)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None if unknown (a CPU)."""
    kind = kind_of(device_name)
    return GPUS[kind].bfloat16 if kind else None


def mfu(flops: float, seconds: float, num_ranks: int, peak: float | None) -> float | None:
    """Share of the ranks' peak that was useful; None where the peak is not known. flops: of all
    ranks (step_flops, summed)."""
    return flops / (seconds * num_ranks * peak) if peak else None


def plan_spec(job: Job) -> PlanSpec:
    """What the planner has to know of the recipe and the cluster."""
    return spec_of(job.recipe.model).plan_spec(job)


def plan_parts(job: Job) -> PlanSpec:
    """See plan_spec."""
    recipe, model = job.recipe, job.recipe.model
    return PlanSpec(
        costs={phase: cost_model(phase, model) for phase in PHASES},
        row_bytes={phase: getattr(model, phase).geometry.row_bytes for phase in ENCODERS},
        feature_bytes=model.llm.hidden_size * DTYPE_BYTES[recipe.fsdp.forward_dtype],
        ranks_per_node=job.ranks_per_node, balance=recipe.balance,
        group_size=job.shard_size if recipe.balance.group == "shard" else 0)
