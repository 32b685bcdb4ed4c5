"""A recipe on a number of ranks: every value that follows from both, derived once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import EVERY_PHASE

MOST_RANKS = 10**6  # what a plan needs of them still fits the memory of one machine


@dataclass(frozen=True)
class Job:
    """What a run is, on the ranks that it has.

    num_ranks: of the whole run. ranks_per_node: those that share a node. shard_size: ranks over
    which a parameter is cut. global_batch_size: examples of a step over all ranks and microbatches
    (with data.batching=capped, train.batch_size of them stand for one mini-batch)."""

    recipe: Recipe
    num_ranks: int
    ranks_per_node: int
    shard_size: int
    global_batch_size: int


def resolve(recipe: Recipe, num_ranks: int, ranks_per_node: int, *, kept: int = 0) -> Job:
    """The recipe on `num_ranks` ranks. ranks_per_node: of the launcher or the cluster; what
    balance.ranks_per_node says comes first. kept: examples a step of the checkpoint that the run
    goes on from, 0 without one. check_world says whether such a job can run."""
    train = recipe.train
    return Job(recipe, num_ranks,
               ranks_per_node=recipe.balance.ranks_per_node or ranks_per_node,
               shard_size=recipe.fsdp.shard_size or num_ranks,
               global_batch_size=train.global_batch_size or kept or (
                   train.batch_size * train.least_microbatches * num_ranks))


def default_world(recipe: Recipe, ranks_per_node: int) -> tuple[int, str]:
    """(ranks that a recipe is tried on if nobody says how many, why as many): those that it starts;
    else one shard group, in whole nodes; else one node."""
    if recipe.launch.nproc_per_node:
        return recipe.launch.nproc_per_node, "launch.nproc_per_node"
    job = resolve(recipe, 1, ranks_per_node)
    what = ("one shard group of fsdp.shard_size" if job.shard_size > job.ranks_per_node
            else "one node")
    return math.lcm(job.shard_size, job.ranks_per_node), f"{what}, for want of a number"


def _multiples(unit: int, near: int) -> str:
    """Those of `unit` below and above a number."""
    below, above = near // unit * unit, -(-near // unit) * unit
    return f"{below} or {above}" if below else str(above)


def check_world(job: Job) -> None:
    """Raises ValueError if the recipe cannot run on its ranks, with what would fit."""
    recipe, ranks, per_node, size = job.recipe, job.num_ranks, job.ranks_per_node, job.shard_size
    if ranks < 1:
        raise ValueError(f"world size {ranks}: at least one rank is needed")
    if ranks > MOST_RANKS:
        raise ValueError(f"world size {ranks}: ask for {MOST_RANKS:,} ranks at most")
    if ranks % size:
        raise ValueError(f"fsdp.shard_size is {size}, which does not divide the {ranks} ranks: "
                         f"start {_multiples(size, ranks)} ranks, or set it to 0 (all ranks) or a "
                         "number that divides them")
    if ranks > per_node and ranks % per_node:
        raise ValueError(f"{ranks} ranks do not fill nodes of {per_node} ranks "
                         f"(balance.ranks_per_node): start {_multiples(per_node, ranks)}")
    if recipe.balance.group == "shard" and size % per_node and per_node % size:
        raise ValueError(f"balance.group is shard, but fsdp.shard_size {size} and nodes of "
                         f"{per_node} ranks overlap: make one a multiple of the other")
    kept = [p for p in EVERY_PHASE if recipe.fsdp.reshard(p) == "node"]
    if kept and size > per_node and (size % per_node or per_node == 1):
        raise ValueError(f"fsdp.{kept[0]}_reshard is node, but shard groups of {size} ranks are "
                         f"not made of whole nodes of {per_node} ranks: use full or none")
    batch, steps = recipe.train.global_batch_size, recipe.train.least_microbatches
    if 0 < batch < ranks * steps:
        raise ValueError(
            f"train.global_batch_size is {batch}, less than one example for each of {ranks} "
            f"ranks and {steps} microbatches: raise it to {ranks * steps}, or lower "
            "train.accumulation_steps or the number of ranks")
