"""Whether a number of ranks suits a recipe: asked before anything is allocated or started."""

from __future__ import annotations

import math

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.units import units


def checkpoint_bytes(recipe: Recipe) -> int:
    """Size of a checkpoint: parameters, and two moments of those that learn."""
    state = sum(u.copies * (u.size + 2 * u.trained_size) for u in units(recipe.model))
    return state * DTYPE_BYTES[recipe.fsdp.param_dtype]


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def check_shards(shard_size: int, world_size: int) -> None:
    """Raises ValueError if a shard group of `shard_size` (0: all ranks) does not divide the world,
    naming the groups that do and the nearest worlds that would."""
    if shard_size == 0 or world_size % shard_size == 0:
        return
    nearest = sorted(divisors(world_size), key=lambda k: (abs(k - shard_size), k))[:4]
    raise ValueError(
        f"fsdp.shard_size is {shard_size}, which does not divide the {world_size} ranks: start "
        f"{_multiples(shard_size, world_size)} ranks, or set it to 0 (all ranks) or one of "
        f"{sorted(nearest)}")


def _multiples(unit: int, near: int) -> str:
    """Those of `unit` below and above a number."""
    below, above = near // unit * unit, -(-near // unit) * unit
    return f"{below} or {above}" if below else str(above)


def default_world(recipe: Recipe, ranks_per_node: int) -> tuple[int, str]:
    """(ranks that a recipe is tried on if nobody says how many, why as many): those that it starts;
    else one shard group, in whole nodes; else one node."""
    if recipe.launch.nproc_per_node:
        return recipe.launch.nproc_per_node, "launch.nproc_per_node"
    node, size = recipe.balance.ranks_per_node or ranks_per_node, recipe.fsdp.shard_size
    if size > node:
        return math.lcm(size, node), "one shard group of fsdp.shard_size, for want of a number"
    return math.lcm(size or 1, node), "one node, for want of a number"


def check_world(recipe: Recipe, world_size: int, ranks_per_node: int) -> None:
    """Raises ValueError if the recipe cannot run on this many ranks, with what would fit."""
    if world_size < 1:
        raise ValueError(f"world size {world_size}: at least one rank is needed")
    check_shards(recipe.fsdp.shard_size, world_size)
    per_node = recipe.balance.ranks_per_node or ranks_per_node
    if world_size % per_node and (world_size > per_node or recipe.balance.exchange == "two_hop"):
        raise ValueError(f"{world_size} ranks do not fill nodes of {per_node} ranks "
                         f"(balance.ranks_per_node): start {_multiples(per_node, world_size)}")
    size = recipe.fsdp.shard_size
    if recipe.balance.group == "shard" and size % per_node and per_node % size:
        raise ValueError(f"balance.group is shard, but fsdp.shard_size {size} and nodes of "
                         f"{per_node} ranks overlap: make one a multiple of the other")
    kept = [p for p in PHASES if recipe.fsdp.reshard(p) == "node"]
    group = size or world_size
    if kept and group > per_node and (group % per_node or per_node == 1):
        raise ValueError(f"fsdp.{kept[0]}_reshard is node, but shard groups of {group} ranks are "
                         f"not made of whole nodes of {per_node} ranks: use full or none")
    batch, steps = recipe.train.global_batch_size, recipe.train.accumulation_steps
    if 0 < batch < world_size * steps:
        raise ValueError(
            f"train.global_batch_size is {batch}, less than one example for each of {world_size} "
            f"ranks and {steps} microbatches: raise it to {world_size * steps} or start at most "
            f"{batch // steps} ranks")
