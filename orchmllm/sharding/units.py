"""Every parameter of a model by its shape, grouped as FSDP2 shards it: asked of the model without
memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.config.train import OPTIMIZER_STATE
from orchmllm.plan.assign import PHASES

Shape = tuple[int, ...]
ROLES = ("root", "connector", "embed", "head")  # of units that are no block


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together; `copies` units are alike (a stack of blocks).

    phase: vision, audio or llm. role: `block`, `root` (gathered for the whole phase), `connector`
    (one that learns behind a frozen encoder; others are in the root), `embed` or `head`. trained,
    frozen: shapes of the parameters with and without a gradient. stays: gathered for the whole
    step."""

    phase: str
    role: str
    copies: int
    trained: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()
    stays: bool = False

    @cached_property
    def size(self) -> int:
        """Parameters of one copy."""
        return sum(map(math.prod, self.trained + self.frozen))

    @cached_property
    def trained_size(self) -> int:
        return sum(map(math.prod, self.trained))

    def gathers(self, reshard: str) -> int:
        """How often a microbatch gathers it (orchmllm.sharding.gathers). reshard: what is freed
        between forward and backward, `full`, `node` or `none`."""
        return 1 + (reshard != "none" and self.read_in_backward)

    @property
    def read_in_backward(self) -> bool:
        """And freed before: the head and the LLM's norm come last and first, so they stay."""
        if self.stays:
            return False
        return self.role == "block" if self.phase == "llm" else self.trained_size > 0

    def shard_size(self, shards: int, trained_only: bool = False) -> int:
        """Parameters that the fullest rank holds of one copy: FSDP2 cuts dimension 0, rounded up
        for each parameter."""
        shapes = self.trained if trained_only else self.trained + self.frozen
        return sum(-(-s[0] // shards) * math.prod(s[1:]) for s in shapes)


@lru_cache(maxsize=64)
def shard_sizes(model: ModelConfig, shards: int) -> dict[str, tuple[int, int]]:
    """phase -> parameters that the fullest of `shards` ranks holds, and those of them that
    learn."""
    return {phase: tuple(sum(u.copies * u.shard_size(shards, only) for u in units(model)
                             if u.phase == phase) for only in (False, True)) for phase in PHASES}


@lru_cache(maxsize=8)
def units(model: ModelConfig) -> list[Unit]:
    """Those of orchmllm.sharding.hf.ordered, in the order of the forward pass. What the model has
    not, audio or a head of its own, has no parameters."""
    from orchmllm.models import adapters  # with torch
    from orchmllm.models.families import part_of
    from orchmllm.models.hf import meta_model

    whole = meta_model(model.folder)
    stacks, places = whole.blocks(), {}
    table, head = whole.hf.get_input_embeddings().weight, whole.hf.get_output_embeddings().weight
    if table is not head:
        places |= {id(table): "embed", id(head): "head"}
    runs: dict[str, list[tuple[str, int]]] = {phase: [] for phase in stacks}
    for phase, stack in stacks.items():  # some layers have experts
        for _, group in groupby(stack, lambda block: [p.shape for p in block.parameters()]):
            alike = list(group)
            place = f"{phase} {len(runs[phase])}"
            places |= {id(p): "" for block in alike for p in block.parameters()}
            places |= {id(p): place for p in alike[0].parameters()}
            runs[phase].append((place, len(alike)))
    found: dict[str, tuple[list[Shape], list[Shape]]] = {}
    parameters = dict(whole.hf.named_parameters())
    learnt = dict(adapters.learnt(whole, model)) if model.lora.rank else {}
    for name, p in parameters.items():
        part = part_of(name)
        frozen = name not in learnt if learnt else not model.learns(part)
        place = places.get(id(p), "root")
        found.setdefault(place, ([], []))[frozen].append(tuple(p.shape))
    for name, shape in learnt.items():
        beside, adapter, _ = name.partition(".lora_")
        if adapter and (place := places[id(parameters[f"{beside}.weight"])]):
            found[place][0].append(shape)

    def unit(phase: str, role: str, copies: int = 1, place: str = "none", **options) -> Unit:
        return Unit(phase, role, copies, *map(tuple, found.get(place, ((), ()))), **options)

    blocks = {part: [unit(part, "block", copies, place) for place, copies in runs.get(
        part, [("none", 1)])] for part in PHASES}
    return [unit("vision", "root", place="root", stays=True), *blocks["vision"],
            unit("audio", "root"), *blocks["audio"], unit("llm", "embed", place="embed"),
            *blocks["llm"], unit("llm", "head", place="head")]


def by_role(model: ModelConfig, phase: str) -> dict[str, Unit]:
    """The units of a phase by role: of blocks that are not alike the largest, as if all were."""
    found: dict[str, Unit] = {}
    for unit in units(model):
        if unit.phase != phase:
            continue
        if other := found.get(unit.role):
            copies = other.copies + unit.copies
            unit = replace(max(other, unit, key=lambda u: u.size), copies=copies)
        found[unit.role] = unit
    return found


def checkpoint_bytes(recipe: Recipe) -> int:
    """Size of a checkpoint: parameters, and the optimizer's state of those that learn; with
    adapters, nothing of the rest."""
    alone = bool(recipe.model.lora.rank)
    state = sum(u.copies * ((u.trained_size if alone else u.size)
                            + len(OPTIMIZER_STATE) * u.trained_size)
                for u in units(recipe.model))
    return state * DTYPE_BYTES[recipe.fsdp.param_dtype]
