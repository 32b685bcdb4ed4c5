"""Seconds that FSDP2's gathers and reductions of a unit occupy the link and the GPU's memory, and
how much of them computing hides."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, log2

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.units import Unit
from orchmllm.tools.predict.hardware import Hardware


def gather_bandwidth(shards: int, hardware: Hardware, num_ranks: int) -> float:
    """Bytes of parameters that every rank of a shard group receives per second: a node receives
    each once, through the links of the group's ranks there; inside it they are spread by NVLink.
    One shard: inf."""
    # The fewest ranks of a group in one node: groups need not begin where a node does.
    together = gcd(min(hardware.ranks_per_node, num_ranks), shards)
    if shards == 1:
        return float("inf")
    if shards == together:
        return hardware.sheet.node * hardware.network_efficiency
    return min(hardware.network_bandwidth * together * hardware.network_efficiency,
               hardware.sheet.node)


def ring_seconds(ranks: int, hardware: Hardware) -> float:
    """Latency of a ring through all ranks."""
    nodes = -(-ranks // hardware.ranks_per_node)
    return (nodes > 1) * nodes * hardware.network_hop_s + (ranks - nodes) * hardware.node_hop_s


@dataclass(frozen=True)
class Traffic:
    """Seconds on the link for one unit: gathered for the forward pass, for the backward pass (0
    where it stays or is not read), and its gradients reduced. copies: forward and backward, seconds
    of the GPU's memory in which FSDP2 copies what it gathered and what it will reduce."""

    forward: float
    backward: float
    reduce: float
    copies: tuple[float, float] = (0.0, 0.0)


def unit_traffic(unit: Unit, memory: MemoryModel, hardware: Hardware, num_ranks: int) -> Traffic:
    """How long one unit occupies the link. Hybrid sharding all-reduces the shards between groups;
    with CPU offload shards come from the host before they are gathered, and gradients go there."""
    if not unit.size:
        return Traffic(0.0, 0.0, 0.0)
    shards, reshard = memory.shards, memory.fsdp.reshard(unit.phase)
    param = DTYPE_BYTES[memory.fsdp.param_dtype]
    host = memory.fsdp.cpu_offload * param / shards / hardware.sheet.host

    def gather(over: int) -> float:
        return unit.size * (
            memory.element / gather_bandwidth(over, hardware, num_ranks) + host) + (
            ring_seconds(over, hardware))

    over = shards if reshard == "full" else min(hardware.ranks_per_node, shards)
    twice = unit.gathers(reshard) > 1
    again = gather(over) if twice else 0.0
    # A shard is cast into the buffer of the gather, and what arrived copied out of it; gradients
    # are cast into the buffer of the reduction, which is two more copies on one rank.
    sums = DTYPE_BYTES[memory.fsdp.sum_dtype]
    gathered = unit.size * ((param + memory.element) / shards + 2 * memory.element)
    reduced = unit.trained_size * (memory.element + sums + 4 * sums * (shards == 1))
    copies = tuple(x / hardware.memory_rate for x in (gathered, twice * gathered + reduced))
    reduce, size = 0.0, unit.trained_size * DTYPE_BYTES[memory.fsdp.sum_dtype]
    if size:
        reduce = size / gather_bandwidth(shards, hardware, num_ranks) + ring_seconds(
            shards, hardware) + unit.trained_size * host
        replicas = num_ranks // shards
        if replicas > 1:
            between = num_ranks > hardware.ranks_per_node
            link = hardware.network_bandwidth if between else hardware.sheet.node
            hop = hardware.network_hop_s if between else hardware.node_hop_s
            reduce += (2 * (replicas - 1) / replicas * size / shards
                       / (link * hardware.network_efficiency) + 2 * log2(replicas) * hop)
    return Traffic(gather(shards), again, reduce, copies)


def pass_seconds(steps: list[tuple[float, float, float]], ahead: int) -> float:
    """A pass over units, each (gather, compute, reduce) seconds. A unit computes once it is
    gathered; when it starts, the `ahead` next ones are asked for. Gathers and reductions follow
    each other on one link. Gradients of a unit wait for those of the one before."""
    link = now = reduced = 0.0
    ready, asked = [0.0] * len(steps), 0
    for index, (_, compute, reduce) in enumerate(steps):
        for last in (index, index + ahead):
            while asked <= min(last, len(steps) - 1):
                if steps[asked][0]:
                    link = max(link, now) + steps[asked][0]
                    ready[asked] = link
                asked += 1
            now = max(now, ready[index])
        now += compute
        if reduce:
            now = max(now, reduced)
            reduced = link = max(link, now) + reduce
    return max(now, reduced)
