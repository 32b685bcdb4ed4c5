"""Every parameter of a model by its shape, grouped as FSDP2 shards it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.config.train import OPTIMIZER_STATE
from orchmllm.models.shapes import placed
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.layout import ENCODERS, GENERATOR

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together; `copies` units are alike (a stack of blocks).

    phase: one of EVERY_PHASE. role: `block`, `root`, `embed` or `head`. trained, frozen: shapes
    of the parameters with and without a gradient. stays: gathered for the whole step."""

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
        return self.role == "block" if self.phase not in ENCODERS else self.trained_size > 0

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
                             if u.phase == phase) for only in (False, True))
            for phase in EVERY_PHASE}


@lru_cache(maxsize=8)
def units(model: ModelConfig) -> list[Unit]:
    """Those of orchmllm.sharding.load_whole.ordered, in the order of the forward pass. What the
    model has not, audio or a head of its own, has no parameters."""
    learnt, stacks = _adapters(model), {}
    places: dict[str, str] = {}
    for p in placed(model.folder):
        places[p.name] = "" if p.role == "block" else p.role
        if p.role == "block":
            stacks.setdefault(p.part, {}).setdefault(p.block, []).append(p)
    runs: dict[str, list[tuple[str, int]]] = {phase: [] for phase in stacks}
    for phase, stack in stacks.items():  # some layers have experts
        for _, group in groupby(stack.values(), lambda block: [p.shape for p in block]):
            alike = list(group)
            place = f"{phase} {len(runs[phase])}"
            places |= {p.name: place for p in alike[0]}
            runs[phase].append((place, len(alike)))
    found: dict[str, tuple[list[Shape], list[Shape]]] = {}
    for p in placed(model.folder):
        frozen = p.name not in learnt if learnt else not (p.learns and model.learns(p.part))
        found.setdefault(places[p.name], ([], []))[frozen].append(p.shape)
    for name, shape in learnt.items():
        beside, adapter, _ = name.partition(".lora_")
        if adapter and (place := places[f"{beside}.weight"]):
            found[place][0].append(shape)

    def unit(phase: str, role: str, copies: int = 1, place: str = "none", **options) -> Unit:
        return Unit(phase, role, copies, *map(tuple, found.get(place, ((), ()))), **options)

    blocks = {part: [unit(part, "block", copies, place) for place, copies in runs.get(
        part, [("none", 1)])] for part in EVERY_PHASE}
    return [unit("vision", "root", place="root", stays=True), *blocks["vision"],
            unit("audio", "root"), *blocks["audio"], unit("llm", "embed", place="embed"),
            *blocks["llm"], unit("llm", "head", place="head"), *blocks[GENERATOR]]


def _adapters(model: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of all that learns where adapters do, else nothing."""
    if not model.lora.rank:
        return {}
    from orchmllm.models import adapters  # with torch
    from orchmllm.models.whole_model import meta_model

    return dict(adapters.learnt(meta_model(model.folder), model))


@lru_cache(maxsize=64)
def by_role(model: ModelConfig, phase: str) -> dict[str, Unit]:
    """The units of a phase by role: of blocks that are not alike the largest, as if all were."""
    found: dict[str, Unit] = {}
    for unit in units(model):
        if unit.phase == phase:
            other = found.get(unit.role, replace(unit, copies=0))
            largest = max(other, unit, key=lambda u: u.size)
            found[unit.role] = replace(largest, copies=other.copies + unit.copies)
    return found


def checkpoint_bytes(recipe: Recipe) -> int:
    """Size of a checkpoint: parameters, and the optimizer's state of those that learn; with
    adapters, nothing of the rest."""
    alone = bool(recipe.model.lora.rank)
    state = sum(u.copies * ((u.trained_size if alone else u.size)
                            + len(OPTIMIZER_STATE) * u.trained_size)
                for u in units(recipe.model))
    return state * DTYPE_BYTES[recipe.fsdp.param_dtype]
