"""Peak memory of a rank, predicted from shapes and lengths: no allocation, no torch.

    peak = parameters, gradients and optimizer of the rank's shards + gathered units
           + activations by checkpointing choice + batch + buffers of the exchange and of the loss

taken at the moments of a step that can be the highest: the end of each phase's forward pass, the
loss, the head's gradients, the start of each phase's backward pass, the last gradients, and the
optimizer step. Excluded are the CUDA context, NCCL's buffers and the allocator's fragments:
fsdp.memory_gb has to leave room for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np

from orchmllm.config.fsdp import COPIED_ROWS, DTYPE_BYTES, phase_counts
from orchmllm.config.job import Job
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import CheckpointConfig, FsdpConfig
from orchmllm.config.train import OPTIMIZER_STATE
from orchmllm.models.counted_parts import BlockCounts, PartCounts
from orchmllm.models.whole_flops import feature_width, part_counts
from orchmllm.plan.assign import EVERY_PHASE, PHASES
from orchmllm.plan.layout import ENCODERS, GENERATOR, OF_MEDIA
from orchmllm.sharding.activations import Stack, stack
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.units import Unit, by_role, shard_sizes, units

# Of the keys and values of shared examples: as they arrive and in their order; and in the backward
# pass those, their gradients by piece, and in sending order.
FORWARD_COPIES, BACKWARD_COPIES = 2, 4
NO_PART = PartCounts(  # of a part that a model has not: it computes and keeps nothing
    *[np.zeros(3)] * 3, {}, np.zeros((2, 3)), [BlockCounts(*[0.0] * 6)], *[0.0] * 3, 0, 0)
Choice = Mapping[str, str]  # phase -> one of CHOICES, or numbers of layers


@dataclass(frozen=True)
class MemoryModel:
    """Of the units that are really sharded, and of what autograd was counted to keep of the parts
    on tensors without memory. shards: ranks a parameter is cut over. all_gather: ranks whose rows
    everybody receives, if rows travel by all-gather instead of all-to-all (OrchMLLM section 8.3),
    else 0; what a rank keeps of the gathered rows is a view, so all of them stay: inputs for the
    step, features for the forward pass. ranks_per_node: for what fsdp.*_reshard keeps over a
    node's ranks. microbatches: of a step, with `auto` as if it had several; from the second on the
    gradients are there from the start."""

    model: ModelConfig
    fsdp: FsdpConfig
    shards: int
    all_gather: int = 0
    ranks_per_node: int = 8
    microbatches: int = 1

    @classmethod
    def of(cls, job: Job) -> MemoryModel:
        """Of a rank of a job."""
        return cls(job.recipe.model, job.recipe.fsdp, job.shard_size,
                   ranks_per_node=job.ranks_per_node,
                   microbatches=job.recipe.train.accumulation_steps or 2)

    @cached_property
    def _counts(self) -> dict[str, PartCounts]:
        return dict.fromkeys(PHASES, NO_PART) | part_counts(self.model, self.fsdp.forward_dtype)

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that plans of the model have."""
        return EVERY_PHASE if GENERATOR in self._counts else PHASES

    def num_layers(self, phase: str) -> int:
        """Of a phase; 1 where the model has not got it."""
        return len(self.blocks(phase))

    @property
    def element(self) -> int:
        """Bytes of a number in forward and backward."""
        return DTYPE_BYTES[self.fsdp.forward_dtype]

    @property
    def position_bytes(self) -> float:
        """Of the keys and values of a position in a layer of the LLM."""
        return float(self.element * self._counts["llm"].attended)

    def state_bytes(self) -> dict[str, int]:
        """Parameters, gradients and the optimizer's state on the fullest rank."""
        size = DTYPE_BYTES[self.fsdp.param_dtype]
        held, trained = map(sum, zip(*shard_sizes(self.model, self.shards).values(), strict=True))
        return {"parameters": size * held, "gradients": size * trained,
                "optimizer": len(OPTIMIZER_STATE) * size * trained}

    def save_bytes(self, config: CheckpointConfig) -> int:
        """Of the host's memory that a save takes for a rank that writes: copies of its shards, or
        one of the largest where training waits for the save."""
        if config.every_steps < 0:
            return 0
        if config.asynchronous:
            state = self.state_bytes()
            return state["parameters"] + state["optimizer"]
        return DTYPE_BYTES[self.fsdp.param_dtype] * max(
            -(-shape[0] // self.shards) * math.prod(shape[1:])
            for unit in units(self.model) for shape in unit.trained + unit.frozen)

    def counts(self, phase: str, choice: str) -> dict[str, int]:
        """Layers of a phase by CHOICES. Raises ValueError for more than it has."""
        return phase_counts(phase, choice, self.num_layers(phase))

    def peaks(self, loads: Loads, choice: Choice) -> dict[str, np.ndarray]:
        """moment -> (d,) bytes, or (n, d) for n cases of loads."""
        return self.moments(loads, {p: _stack(self.model, self.fsdp.forward_dtype, p, choice[p])
                                    for p in self.phases})

    def moments(self, loads: Loads, stacks: Mapping[str, Stack]) -> dict[str, np.ndarray]:
        """moment -> (d,) bytes, or (n, d) for n cases of loads or of the stack of a phase. A sum
        over phases at each."""
        state, size = self.state_bytes(), DTYPE_BYTES[self.fsdp.param_dtype]
        grads = {p: size * n for p, (_, n) in shard_sizes(self.model, self.shards).items()}
        if self.fsdp.cpu_offload:
            state, grads = dict.fromkeys(state, 0), dict.fromkeys(grads, 0)
        static = state["parameters"] + state["optimizer"] + self._batch(loads)
        again = state["gradients"] * (self.microbatches > 1)
        kept = {p: stacks[p].kept * loads.phases[p].positions + self._around(p, loads)
                for p in self.phases}
        features = sum(self._features(p, loads) for p in ENCODERS)
        shared = self._shared(loads)
        got = loads.phases["llm"].tokens * float(self.element * feature_width(self.model))
        kept["llm"] = kept["llm"] + got + stacks["llm"].whole * shared  # got by the layers
        done = static + float(again)
        out = {}
        for phase in ENCODERS:
            done = done + kept[phase]
            out[f"{phase} forward"] = done + self._gather(phase, False) + np.maximum(
                stacks[phase].forward * loads.phases[phase].positions, self._exchange(phase, loads))
        done = done + features + kept["llm"]
        out["llm forward"] = done + self._gather("llm", False) + (
            stacks["llm"].forward * loads.phases["llm"].positions) + FORWARD_COPIES * shared
        head = 2.0 * self._units("llm")["head"].size * self.element + self._stays("llm")
        out["loss"] = done + self.loss_bytes(loads) + head
        done, beside = done - features, dict.fromkeys(self.phases, 0.0)
        beside["llm"] = BACKWARD_COPIES * shared
        if GENERATOR in beside:  # while the head waits for its backward pass
            beside[GENERATOR] = self._loss_kept(loads)
            done = done + kept[GENERATOR]
            out["generator forward"] = done + beside[GENERATOR] + self._gather(
                GENERATOR, False) + np.maximum(
                    stacks[GENERATOR].forward * loads.phases[GENERATOR].positions,
                    self._exchange(GENERATOR, loads))
        out["head backward"] = done + self._head_backward()
        made = 0.0
        for phase in reversed(self.phases):
            behind = self._behind(phase, loads)  # is used up before blocks go backward
            done = done - behind
            out[f"{phase} backward"] = done + made + self._waiting(phase) + self._gather(
                phase, True) + self._backward_work(phase, loads, stacks[phase]) + beside[phase]
            made += grads[phase] * (not again)
            done = done - (kept[phase] - behind)
        late = self._late()
        out["last gradients"] = done + made + max(
            self.element * sum(u.trained_size for u in late[i:])
            + self._reduced * late[i].trained_size * (1 + 1 / self.shards)
            for i in range(len(late)))
        out["optimizer"] = static + state["gradients"]  # AdamW's fused kernel needs no more
        return out

    def highest(self, loads: Loads, choice: Choice) -> np.ndarray:
        """(d,) bytes, or (n, d) for n cases of loads, at the highest moment of each rank."""
        return reduce(np.maximum, self.peaks(loads, choice).values())

    def peak(self, loads: Loads, choice: Choice) -> float:
        """Bytes on the fullest rank at the highest moment."""
        return float(self.highest(loads, choice).max())

    def _batch(self, loads: Loads) -> np.ndarray:
        """Pixels and frames in float32, and as the forward pass casts them; all that were gathered,
        as they travel."""
        out = loads.phases["llm"].tokens * 32.0
        for phase in self._counts.keys() & OF_MEDIA.keys():
            own, lengths = self._counts[phase], loads.phases[phase]
            rows = lengths.positions if phase == GENERATOR else lengths.rows
            out = out + rows * float(own.row_values * (4 + self.element))
            if self.all_gather:
                out = out + self.all_gather * own.row_bytes * rows.max(axis=-1, keepdims=True)
        return out

    def _features(self, phase: str, loads: Loads) -> np.ndarray | float:
        """Encoded rows as the LLM phase receives them."""
        rows = (self.all_gather * loads.phases[phase].tokens.max(axis=-1, keepdims=True)
                if self.all_gather else loads.received.get(phase, 0.0))
        return rows * float(self.element * feature_width(self.model))

    def _shared(self, loads: Loads) -> np.ndarray:
        """Keys and values of the examples that ranks share, of one layer."""
        return np.asarray(loads.gathered) * self.position_bytes

    def blocks(self, phase: str) -> Sequence[BlockCounts]:
        """Of a phase; one that keeps nothing where the model has not got it."""
        return self._counts.get(phase, NO_PART).blocks

    def _around(self, phase: str, loads: Loads) -> np.ndarray:
        """What is kept around the blocks."""
        lengths, found = loads.phases[phase], self._counts[phase]
        return found.kept_row * lengths.rows + found.kept_position * lengths.positions

    def _behind(self, phase: str, loads: Loads) -> np.ndarray:
        """What is kept behind the blocks, the LLM's head included."""
        lengths, found = loads.phases[phase], self._counts[phase]
        return found.kept_behind * lengths.positions + lengths.rows * (
            found.kept_row if phase == "llm" else 0.0)

    def _backward_work(self, phase: str, loads: Loads, stack: Stack) -> np.ndarray:
        """A block's recomputed activations and its gradients: as the weights' gradients are made,
        its activations go, kept or recomputed, so that half of one is there with all of the other.
        """
        block, positions = self._units(phase)["block"], loads.phases[phase].positions
        weights = float(self.element * block.trained_size)
        return stack.backward * positions + weights - np.minimum(
            stack.going * positions, weights) / 2

    def _exchange(self, phase: str, loads: Loads) -> np.ndarray:
        """Features as encoded, in sending order, as received, and in their own order."""
        sent = loads.phases[phase].tokens * float(self.element * feature_width(self.model))
        return (1 if self.all_gather else 2) * (sent + self._features(phase, loads))

    def loss_bytes(self, loads: Loads) -> np.ndarray:
        """(d,) bytes of the loss at its worst: logits, their log-softmax and gradient, or a chunk's
        logits with its rows of the input and the gradients that are made at once."""
        e, llm, tokens = self.element, self._counts["llm"], loads.phases["llm"].rows
        f, chunk, kept = max(4, e), self.fsdp.loss_chunk_rows, self._loss_kept(loads)
        learnt = llm.width * self.model.llm_weights_learn  # columns of the weight's gradient
        rounded = e * (e < f)
        # A chunk's logits as computed and in float32, their gradient and rows of its product, or
        # the weight's gradient as it is rounded.
        moment = max((f + rounded) * chunk * llm.outputs,
                     e * chunk * llm.outputs + rounded * COPIED_ROWS * learnt,
                     rounded * learnt * llm.outputs)
        return np.where(self._in_chunks(tokens), kept + e * llm.width * chunk + moment, 3 * kept)

    def _loss_kept(self, loads: Loads) -> np.ndarray:
        """(d,) bytes that the loss keeps for its backward pass: the log-softmax of logits, or, by
        chunks, the gradients that were made at once."""
        llm, f, tokens = self._counts["llm"], max(4, self.element), loads.phases["llm"].rows
        weights = f * llm.outputs * self.model.llm_weights_learn
        chunked = float(llm.width) * (self.element * tokens + weights)
        return np.where(self._in_chunks(tokens), chunked, float(f * llm.outputs) * tokens)

    def _in_chunks(self, tokens: np.ndarray) -> np.ndarray:
        return (tokens > self.fsdp.loss_chunk_rows) & (self.fsdp.loss_chunk_rows > 0)

    def _units(self, phase: str) -> dict[str, Unit]:
        return by_role(self.model, phase)

    def _gather(self, phase: str, backward: bool) -> float:
        """Gathered parameters, at their worst: the current unit and the buffer of the next one; in
        the backward pass also the last unit's gradients (at first the head's) on their way to their
        owners. What fsdp.*_reshard keeps stays until its backward pass, which then gathers none."""
        e, own = self.element, self._units(phase)
        block = own["block"]
        ahead = min(max(self.fsdp.prefetch, 1), max(block.copies - 1, 1))
        current = e * block.size * (1 + ahead)
        if backward and not block.read_in_backward:
            current = 0
        elif self.fsdp.reshard(phase) == "none" and block.read_in_backward:
            current = 0 if backward else block.size * e * ahead
        if backward:
            current += self._reduced * max(
                own[role].trained_size for role in ("block", "head") if role in own)
        return float(self._stays(phase) + current)

    def _head_backward(self) -> float:
        """The head's gradients, as they were computed and as they are added up between ranks, while
        the last blocks are gathered."""
        own = self._units("llm")
        block, ahead = own["block"], 0
        if self.fsdp.reshard("llm") != "none" and block.read_in_backward:
            ahead = min(max(self.fsdp.prefetch, 1), block.copies)
        return self._stays("llm") + float(self.element * block.size * ahead + (
            self.element + self._reduced) * own["head"].trained_size)

    @property
    def _reduced(self) -> int:
        """Bytes of a number as gradients are added up between ranks."""
        return DTYPE_BYTES[self.fsdp.sum_dtype]

    def _late(self) -> list[Unit]:
        """Units whose input has no gradient: FSDP2 reduces theirs at the end of the backward
        pass."""
        return [u for u in units(self.model) if u.role in ("embed", "root")]

    def _waiting(self, phase: str) -> float:
        """Gradients of late units that were made before the blocks of a phase begin their backward
        pass, as they were computed."""
        done = EVERY_PHASE[EVERY_PHASE.index(phase) + 1:]
        return float(self.element * sum(u.trained_size for u in self._late() if u.phase in done))

    def _stays(self, phase: str) -> float:
        """Bytes of the units that stay gathered, whole or over the ranks of a node, at the end of a
        phase's forward pass or at the start of its backward pass."""
        share = {"full": 0.0, "node": 1.0 / min(self.ranks_per_node, self.shards), "none": 1.0}
        return self.element * sum(
            (1.0 if u.stays else share[self.fsdp.reshard(u.phase)]) * u.copies * u.size
            for u in units(self.model) if u.phase in EVERY_PHASE[:EVERY_PHASE.index(phase) + 1]
            and (u.stays or u.read_in_backward))


@lru_cache(maxsize=1024)
def _stack(model: ModelConfig, dtype: str, phase: str, choice: str) -> Stack:
    """Of the blocks of a phase, which a search asks for thousands of times."""
    blocks = part_counts(model, dtype).get(phase, NO_PART).blocks
    return stack(blocks, phase_counts(phase, choice, len(blocks)))
