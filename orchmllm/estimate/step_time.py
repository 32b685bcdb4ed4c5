"""Step time and MFU from the FLOPs of a plan: a roofline with stated efficiencies.

Every phase waits for its slowest rank, forward and backward apart, because FSDP gathers parameters
block by block (OrchMLLM section 3). A phase takes the longer of its computation and of its
parameter traffic, which overlap; exchanges of rows are added, since nothing hides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orchmllm.estimate.memory import MemoryModel
from orchmllm.models.config import ModelConfig
from orchmllm.models.flops import item_rank, padded_lengths, phase_lengths, phase_work
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.units import units


@dataclass(frozen=True)
class Hardware:
    """A GPU of a cluster. Bandwidths in bytes/s per GPU and direction; the efficiencies are
    assumptions, taken from what large dense models reach, and change no ratio between variants
    that compute equally much."""

    name: str = "H100 SXM, 8 a node, 400 Gbit/s per GPU"
    peak_flops: float = 989e12
    memory_bytes: float = 85e9
    ranks_per_node: int = 8
    network_bandwidth: float = 50e9
    node_bandwidth: float = 450e9
    product_efficiency: float = 0.60
    attention_efficiency: float = 0.40
    network_efficiency: float = 0.70


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. phases: phase -> (forward, backward); exchange: rows between ranks;
    useful: FLOP of all ranks without padding; tokens: LLM tokens of all ranks."""

    phases: Mapping[str, tuple[float, float]]
    exchange: float
    useful: float
    tokens: float
    num_ranks: int

    @property
    def seconds(self) -> float:
        return sum(map(sum, self.phases.values())) + self.exchange

    def mfu(self, hardware: Hardware) -> float:
        return self.useful / (self.seconds * self.num_ranks * hardware.peak_flops)

    @property
    def tokens_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.num_ranks


def rank_seconds(plan: StepPlan, phase: str, model: ModelConfig, hardware: Hardware,
                 checkpointing: str, pad: bool) -> tuple[np.ndarray, np.ndarray]:
    """(d,) seconds of computing, forward and backward (with what is recomputed)."""
    lengths = padded_lengths(plan, phase) if pad else phase_lengths(plan.layout, phase)
    work = phase_work(phase, model, lengths, checkpointing)
    rate = np.array([hardware.product_efficiency, hardware.attention_efficiency])
    rank = item_rank(plan, phase)
    forward, backward = (
        np.bincount(rank, weights=(flop / (hardware.peak_flops * rate[:, None])).sum(axis=0),
                    minlength=plan.layout.num_ranks)
        for flop in (work.forward, work.backward + work.recompute))
    return forward, backward


def traffic_seconds(phase: str, memory: MemoryModel, hardware: Hardware) -> tuple[float, float]:
    """(forward, backward) seconds to gather the phase's parameters (in the backward pass those that
    it reads and that were freed), and to reduce its gradients. Hybrid sharding adds an all-reduce
    of the shards between the groups, which is small."""
    own = [u for u in units(memory.model) if u.phase == phase]
    size = memory.element * sum(u.copies * u.size for u in own)
    reduce = 4 * sum(u.copies * u.trained_size for u in own)
    bandwidth = gather_bandwidth(memory.shards, hardware)
    reshard = memory.fsdp.reshard(phase)
    again = memory.element * sum(u.copies * u.size for u in own if u.gathers(reshard) > 1)
    over = memory.shards if reshard == "full" else min(hardware.ranks_per_node, memory.shards)
    return size / bandwidth, again / gather_bandwidth(over, hardware) + reduce / bandwidth


def gather_bandwidth(shards: int, hardware: Hardware) -> float:
    """Bytes of parameters that every rank of a shard group receives per second: a node receives
    each once, through all its links; inside it they are spread by NVLink. One shard: inf."""
    per_node = min(hardware.ranks_per_node, shards)
    if shards == 1:
        return float("inf")
    if shards == per_node:
        return hardware.node_bandwidth * hardware.network_efficiency
    return min(hardware.network_bandwidth * per_node * hardware.network_efficiency,
               hardware.node_bandwidth)


def exchange_seconds(plan: StepPlan, hardware: Hardware, all_gather: bool = False) -> float:
    """Seconds of moving rows in the training thread: forward, and features' gradients backward.
    An all-to-all takes as long as its busiest sender or receiver between nodes."""
    bandwidth = hardware.network_bandwidth * hardware.network_efficiency
    d, node, total = plan.layout.num_ranks, plan.spec.ranks_per_node, 0.0
    for phase in PHASES:
        for index, (move, volume) in enumerate(plan.transfers(phase)):
            if all_gather:  # every rank receives all ranks' padded shares
                held = np.bincount(move.source_rank, weights=volume, minlength=d)
                seconds = float(held.max()) * (d - node) / node / bandwidth
            else:
                source, target, moved = move.volume(volume)
                between = source // node != target // node
                loads = [np.bincount(at[between], moved[between], d) for at in (source, target)]
                seconds = max(float(x.max()) for x in loads) / bandwidth
            total += seconds * (2 if phase in ENCODERS and index == 0 else 1)
    return total


def predict(plan: StepPlan, memory: MemoryModel, choice: Mapping[str, str], hardware: Hardware,
            pad: frozenset[str] = frozenset(), all_gather: bool = False) -> StepTime:
    """The step of a plan. pad: phases whose batches are padded."""
    phases, useful = {}, 0.0
    for phase in PHASES:
        compute = rank_seconds(plan, phase, memory.model, hardware, choice[phase], phase in pad)
        traffic = traffic_seconds(phase, memory, hardware)
        phases[phase] = tuple(max(float(c.max()), t)
                              for c, t in zip(compute, traffic, strict=True))
        useful += float(phase_work(phase, memory.model, phase_lengths(
            plan.layout, phase)).useful.sum())
    return StepTime(phases, exchange_seconds(plan, hardware, all_gather), useful,
                    float(plan.layout.num_tokens.sum()), plan.layout.num_ranks)
