"""Step time and MFU from what a plan computes: FLOP of products and attention, and bytes of all
other kernels, each at a stated or measured share of what the GPU can do.

Every phase waits for its slowest rank, because FSDP gathers parameters block by block (OrchMLLM
section 3). Units are gathered `fsdp.prefetch` ahead, one after the other over one link, and their
gradients reduced behind them; what of it no computation hides is `traffic`, with the copies that
FSDP2 makes around its collectives. Exchanges of rows and the optimizer are added, since nothing
hides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from orchmllm.config.model import ModelConfig
from orchmllm.models.flops import item_rank, phase_lengths, planned_lengths
from orchmllm.models.whole_flops import (
    moved_by,
    moved_by_head,
    pair_flop,
    part_counts,
    phase_work,
)
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.loads import gathered_positions
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.recomputed import moved_bytes, recomputed
from orchmllm.sharding.units import by_role
from orchmllm.tools.predict.collectives import pass_seconds, unit_traffic
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.transfers import Move, moves_of

UPDATE_PASSES = 10  # reads and writes of a parameter's size: norm, clipping and AdamW's kernel


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, its microbatches together. phases: phase -> computing of the slowest rank
    (forward, backward); waiting: phase -> how much of it the mean rank waits; traffic: gathers and
    reductions that no computing hides; exchange: rows between ranks; update: the optimizer.
    useful: FLOP of all ranks; tokens: LLM tokens of all ranks; peak: FLOP/s."""

    phases: Mapping[str, tuple[float, float]]
    waiting: Mapping[str, float]
    traffic: float
    exchange: float
    update: float
    useful: float
    tokens: float
    num_ranks: int
    peak: float

    @property
    def seconds(self) -> float:
        return (sum(map(sum, self.phases.values())) + self.traffic + self.exchange + self.update)

    @property
    def mfu(self) -> float:
        return self.useful / (self.seconds * self.num_ranks * self.peak)

    @property
    def tokens_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.num_ranks


@dataclass(frozen=True)
class PlanWork:
    """FLOP of the ranks in one microbatch. forward, backward, again: phase -> (2, d), products and
    attention, `again` what full checkpointing repeats; rows, positions: phase -> (d,); attended:
    phase -> (d,) positions to which one attends, on average; gathered: (d,) of the examples that
    a rank shares; moves: of rows between ranks."""

    forward: Mapping[str, np.ndarray]
    backward: Mapping[str, np.ndarray]
    again: Mapping[str, np.ndarray]
    rows: Mapping[str, np.ndarray]
    positions: Mapping[str, np.ndarray]
    attended: Mapping[str, np.ndarray]
    gathered: np.ndarray
    useful: float
    tokens: float
    num_ranks: int
    moves: tuple[Move, ...]


def work_of(plan: StepPlan, model: ModelConfig, all_gather: bool = False) -> PlanWork:
    """What the ranks do in a planned microbatch. all_gather: rows travel by it."""
    parts: dict[str, dict[str, np.ndarray]] = {"forward": {}, "backward": {}, "recompute": {}}
    useful, rows, positions, attended, d = 0.0, {}, {}, {}, plan.layout.num_ranks
    for phase in plan.spec.phases:
        rank, lengths = item_rank(plan, phase), planned_lengths(plan, phase)
        work = phase_work(phase, model, lengths, "full")
        for name, into in parts.items():
            into[phase] = np.stack([np.bincount(rank, x, d) for x in getattr(work, name)])
        rows[phase] = np.bincount(rank, lengths.rows, d)
        positions[phase] = np.bincount(rank, lengths.positions, d)
        alone = pair_flop(phase, model) * positions[phase]  # if each attended to itself alone
        attended[phase] = np.maximum(parts["forward"][phase][1], 1) / np.maximum(alone, 1)
        if lengths.before is not None:  # a piece has fewer targets than it may have
            work = phase_work(phase, model, phase_lengths(plan.layout, phase))
        useful += float(work.useful.sum())
    return PlanWork(
        parts["forward"], parts["backward"], parts["recompute"], rows, positions, attended,
        gathered_positions(plan),
        useful=useful, tokens=float(positions["llm"].sum()), num_ranks=d,
        moves=tuple(moves_of(plan, all_gather, [
            phase for phase in ENCODERS if model.features_learn(phase)])))


def head_bytes(work: PlanWork, memory: MemoryModel) -> np.ndarray:
    """(2, d) bytes that the loss moves forward and backward beside the head's product."""
    once, row = moved_by_head(memory.model, memory.fsdp.forward_dtype,
                              memory.fsdp.loss_chunk_rows).T[..., None]
    logits = work.rows["llm"]  # one for each target
    return once * (logits > 0) + row * logits


def rank_seconds(work: PlanWork, phase: str, memory: MemoryModel, hardware: Hardware) -> np.ndarray:
    """(2, d) seconds of computing, forward and backward, where nothing is recomputed."""
    dtype = memory.fsdp.forward_dtype
    flop = np.stack([work.forward[phase], work.backward[phase]])  # (2, 2, d)
    out = (flop / hardware.rates(phase, dtype, work.attended[phase])).sum(axis=1)
    if phase in hardware.measured:  # with all other kernels in the shares
        fixed = hardware.fixed_s(phase, memory.num_layers(phase))
        return out + fixed * np.array([[1 / 3], [2 / 3]])
    if (moved := moved_by(memory.model, dtype).get(phase)) is None:
        return out
    once, row, position = moved.T[..., None]
    rows, positions = work.rows[phase], work.positions[phase]
    out += (once * (positions > 0) + row * rows + position * positions) / hardware.memory_rate
    if phase == "llm":  # whose FLOP are among those of the phase
        out += head_bytes(work, memory) / hardware.memory_rate
    return out


def repeated_seconds(work: PlanWork, phase: str, hardware: Hardware, choice: str,
                     memory: MemoryModel) -> np.ndarray:
    """(d,) seconds of what the layers of a phase compute again. choice: see
    orchmllm.config.fsdp.layer_counts."""
    products, attention = work.again[phase] / memory.num_layers(phase) / hardware.rates(
        phase, memory.fsdp.forward_dtype, work.attended[phase])
    moving = work.positions[phase] / hardware.memory_rate
    if phase in hardware.measured:  # with all other kernels in the shares
        products = products - moving * moved_bytes(memory, phase)
    return recomputed(memory, phase, memory.counts(phase, choice), products, attention, moving)


Compute = tuple[tuple[float, float], tuple[float, float]]


def slowest_compute(work: PlanWork, phase: str, memory: MemoryModel, choice: str,
                    hardware: Hardware) -> tuple[Compute, float]:
    """(((forward, backward) seconds of the phase's slowest rank, of that the LLM's head), seconds
    that the mean rank waits for it)."""
    forward, backward = rank_seconds(work, phase, memory, hardware)
    backward = backward + repeated_seconds(work, phase, hardware, choice, memory)
    total = forward + backward
    slowest, head = int(total.argmax()), (0.0, 0.0)
    if phase == "llm":
        model, dtype = memory.model, memory.fsdp.forward_dtype
        llm, rate = part_counts(model, dtype)["llm"], hardware.rates(
            phase, dtype, work.attended[phase])[0, 0]
        passes = np.array([1, 1 + model.llm_weights_learn])
        seconds = passes * 2.0 * llm.width * llm.outputs * work.rows["llm"][slowest] / rate
        if phase not in hardware.measured:
            seconds += head_bytes(work, memory)[:, slowest] / hardware.memory_rate
        head = tuple(map(float, seconds))
    return ((float(forward[slowest]), float(backward[slowest])), head), float(
        total[slowest] - total.mean())


def _passes(phase: str, memory: MemoryModel, hardware: Hardware, num_ranks: int,
            compute: Compute) -> tuple[list, list]:
    """The units of a phase in its forward and in its backward pass, each (gather, compute,
    reduce) seconds."""
    own = by_role(memory.model, phase)
    link = {role: unit_traffic(u, memory, hardware, num_ranks) for role, u in own.items()}
    block = own["block"]
    (forward, backward), head = compute
    ahead, behind = forward - head[0], backward - head[1]
    def forward_of(role: str, compute: float = 0.0) -> tuple[float, float, float]:
        return link[role].forward, compute + link[role].copies[0], 0.0

    def backward_of(role: str, gather: float, compute: float = 0.0) -> tuple[float, float, float]:
        return gather, compute + link[role].copies[1], link[role].reduce

    blocks = [forward_of("block", ahead / block.copies)] * block.copies
    learnt = block.trained_size > 0 or phase not in ENCODERS
    back = [backward_of("block", link["block"].backward, behind / block.copies)
            ] * block.copies if learnt else [(0.0, behind, 0.0)]
    if phase == "llm":
        return ([forward_of("embed"), *blocks, forward_of("head", head[0])],
                [backward_of("head", 0.0, head[1]), *back, backward_of("embed", 0.0)])
    around = [role for role in link if role != "block"]  # a generator has none
    return ([*(forward_of(role) for role in around), *blocks],
            [*((link[role].backward, 0.0, 0.0) for role in around), *back,
             *(backward_of(role, 0.0) for role in around)])


def phase_seconds(work: PlanWork, phase: str, memory: MemoryModel, choice: str,
                  hardware: Hardware) -> float:
    """Seconds of a phase as if it were alone: nothing is gathered before it begins."""
    compute, _ = slowest_compute(work, phase, memory, choice, hardware)
    ahead = max(memory.fsdp.prefetch, 1)
    return sum(pass_seconds(p, ahead) for p in _passes(
        phase, memory, hardware, work.num_ranks, compute))


def update_seconds(memory: MemoryModel, hardware: Hardware) -> float:
    """Norm, clipping and AdamW over the shards of a rank: as fast as memory is read, the host's
    with CPU offload."""
    bandwidth = (hardware.host_memory_bandwidth if memory.fsdp.cpu_offload
                 else hardware.memory_rate)
    return UPDATE_PASSES * memory.state_bytes()["gradients"] / bandwidth


def shared_seconds(work: PlanWork, memory: MemoryModel, choice: str, hardware: Hardware) -> float:
    """Of the exchanges of keys and values inside nodes, forward, backward, and where a layer is
    computed again, which nothing hides."""
    if not work.gathered.any():
        return 0.0
    counts = memory.counts("llm", choice)
    times = 2 * memory.num_layers("llm") + counts["full"] + counts["selective"]
    size = float(work.gathered.max()) * memory.position_bytes
    return times * (size / (hardware.sheet.node * hardware.network_efficiency)
                    + hardware.node_hop_s)


def timed(work: PlanWork, memory: MemoryModel, choice: Mapping[str, str],
          hardware: Hardware) -> StepTime:
    """The step of memory.microbatches microbatches of this work."""
    computed, waiting, forward, backward, microbatches = {}, {}, [], [], memory.microbatches
    for phase in memory.phases:
        compute, waited = slowest_compute(work, phase, memory, choice[phase], hardware)
        computed[phase], waiting[phase] = compute[0], microbatches * waited
        ahead, behind = _passes(phase, memory, hardware, work.num_ranks, compute)
        forward, backward = forward + ahead, behind + backward
    units_ahead = max(memory.fsdp.prefetch, 1)  # FSDP2's own choice is one
    total = sum(pass_seconds(p, units_ahead) for p in (forward, backward))
    busy = sum(map(sum, computed.values()))
    return StepTime(
        {p: tuple(microbatches * x for x in c) for p, c in computed.items()}, waiting,
        microbatches * max(total - busy, 0.0),
        microbatches * (sum(m.seconds(hardware) for m in work.moves)
                        + shared_seconds(work, memory, choice["llm"], hardware)),
        update_seconds(memory, hardware), microbatches * work.useful, microbatches * work.tokens,
        work.num_ranks, hardware.peak(memory.fsdp.forward_dtype))
