"""The memory of the host that a save of a recipe takes, and what there is of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from orchmllm.config.job import Job, default_world, resolve
from orchmllm.config.recipe import Recipe
from orchmllm.launch import World
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.doctor.machine import Check

MEMINFO, LIMIT = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")  # of a container


def job_of(recipe: Recipe, world: World | None) -> Job:
    """The recipe on the ranks that are there, else on those that it is made for."""
    if world:
        return resolve(recipe, world.world_size, world.local_world_size)
    if recipe.fsdp.shard_size:  # of a cluster, which may be looked at from elsewhere
        return resolve(recipe, default_world(recipe, 8)[0], 8)
    here = recipe.launch.nproc_per_node or max(torch.cuda.device_count(), 1)  # a start here
    return resolve(recipe, here, here)


def host_memory(recipe: Recipe, world: World | None) -> Iterator[Check]:
    """Of this node, for the ranks on it that write a checkpoint."""
    job = job_of(recipe, world)
    each = MemoryModel.of(job).save_bytes(recipe.checkpoint)
    needed = each * min(job.ranks_per_node, job.shard_size)
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    limit = LIMIT.read_text().strip() if LIMIT.is_file() else "max"
    free = free if limit == "max" else min(free, int(limit))
    yield Check(
        "host memory", needed <= free, f"a save takes {needed / 1e9:.1f} GB of the "
        f"{free / 1e9:.1f} GB that are free, {each / 1e9:.2f} GB a rank",
        "checkpoint.asynchronous=false takes no copies; or more ranks, fewer of them a node")
