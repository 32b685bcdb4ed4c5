"""The global orchestrator (OrchMLLM section 6): from sampled examples to each phase's batches.

Planning runs in the loader's prefetch thread on CPU groups of its own; it makes two agreements a
step. LAYOUT gathers the lengths (or the error of a rank that has none). COMMIT, after decoding,
compares the plan's digest and shares the outcome, so that a disagreement or an error on one rank
raises on all of them before any collective of the model. `dispatch` moves the data and runs in the
training thread, on the device's group.

Flow: layout (of this rank) -> gather_layout -> plan -> load_inputs -> commit -> dispatch -> Batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.batch import (
    UNCOUNTED,
    UNKNOWN,
    FailedSegment,
    Microbatch,
    PackedExamples,
)
from orchmllm.comm.agree import RemoteError, describe, raise_first, require_agreement
from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import RaggedGather, RowGather, gather_texts
from orchmllm.plan.assign import PlanSpec, digest_of_arrays
from orchmllm.plan.balance import CapError
from orchmllm.plan.layout import NO_EXAMPLES, BatchLayout
from orchmllm.plan.microbatches import assert_invariants, plan_microbatches
from orchmllm.plan.step import StepPlan, plan_step

PROTOCOL_VERSION = 5
_LAYOUT_FIELDS = ("version", "step", "num_examples", "num_segments", "exhausted", "error_bytes",
                  "spec_digest")
_COMMIT_FIELDS = ("step", "digest", "detail_bytes", "geometry", "num_targets", "num_shifted",
                  "loop_us", "seen")


class Orchestrator:
    """Plans and dispatches for one rank.

    spec: what the planner knows; the same on all ranks. gather: CPU groups owned by the thread that
    calls gather_layout and commit. group: CPU group of the ranks, owned by the same thread as
    `gather`; dispatch `bytes` needs it, and whole examples whose media move.
    commit_gather: where the ranks of `gather` are one shard of those that share a step,
    all of these: they fail together and count targets together, but each shard has its own plans.
    device_group: of `dispatch`, on the device (default: the default group)."""

    def __init__(
        self,
        spec: PlanSpec,
        gather: RowGather,
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        commit_gather: RowGather | None = None,
        device_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        # Tests put arbitrary rearrangements in its place.
        self.planner: Callable[..., StepPlan] = plan_step
        self.refuses: Callable[[StepPlan], str] = lambda plan: ""  # why one as sampled cannot run
        self.group, self._device_group = group, device_group
        self.rank, self.world_size = gather.rank, gather.world_size
        self.gather = gather
        self._commit_gather = commit_gather or gather
        self._first = self._commit_gather.rank - self.rank  # rank of this shard among all
        self._gather_layouts = RaggedGather(gather, len(_LAYOUT_FIELDS))

    @property
    def is_shard(self) -> bool:
        """Whether other ranks share the step, which learn of an error in COMMIT alone."""
        return self._commit_gather is not self.gather

    def settle(self) -> None:
        """Waits for the thread of a loader that was closed while it loaded: until it has ended, no
        other may use the groups."""
        if self.gather.closed_thread is not None:
            self.gather.closed_thread.join()

    def gather_layout(
        self, step: int, layout: BatchLayout | None, *, error: Exception | None = None,
        exhausted: bool = False, num_dropped: int = 0, config_digest: int = 0,
    ) -> tuple[BatchLayout | None, int]:
        """LAYOUT: this rank's lengths (one rank's part) -> (those of the global batch, 0); after
        the last step of all ranks (None, examples that they left out). Where every rank knows all
        lengths pass None: only headers travel. exhausted: this rank has no more examples;
        num_dropped: how many it left out. config_digest: further configuration that has to be
        equal.

        Raises RemoteError if any rank passed an `error`, its cause on that rank, and
        PlanMismatchError if steps, versions or configurations differ."""
        part = NO_EXAMPLES if layout is None else layout
        text = describe(error)
        header = [PROTOCOL_VERSION, step, part.num_examples, len(part.modality),
                  int(exhausted) and 1 + num_dropped, len(text.encode()),
                  digest_of_arrays([np.array([self.spec.digest, config_digest])])]
        rows, lengths = self._gather_layouts(
            np.concatenate([np.array(header, np.int64), part.to_payload()]))
        head = dict(zip(_LAYOUT_FIELDS, rows.T, strict=False))  # the payload comes after them
        raise_first(step, gather_texts(self.gather, text, head["error_bytes"]), error, self._first)
        for name in ("version", "spec_digest", "step"):
            require_agreement(step, name, head[name], self._first)
        if head["exhausted"].all():
            return None, int(head["exhausted"].sum()) - self.world_size
        return BatchLayout.from_payloads(
            rows[:, len(header):], lengths - len(header), head["num_examples"],
            head["num_segments"]), 0

    def plan(self, layout: BatchLayout, num_microbatches: int = 1, spec: PlanSpec | None = None
             ) -> list[Microbatch]:
        """The step's microbatches, each planned as a global batch of its own; positions ascend.
        spec: in place of the orchestrator's."""
        spec = spec or self.spec
        plans = plan_microbatches(layout, spec, num_microbatches, self.planner)
        if __debug__:
            assert_invariants(layout, plans, spec)
        return [Microbatch(plan, plan.for_rank(self.rank), positions=at) for at, plan in plans]

    def plan_as_sampled(
        self, layout: BatchLayout, num_microbatches: int = 1
    ) -> tuple[list[Microbatch], str]:
        """The same step unbalanced: every example stays on the rank that drew it, the loss and the
        gradients are the same. And why it must not run so, "" if it may. Collective: what a rank
        knows of its memory may change at another moment than on the others."""
        micro, why, spec = [], "it cannot be planned", self.spec.as_sampled
        if not num_microbatches:  # which are as many as memory asks for
            spec = replace(spec, room=self.spec.room)
        try:
            micro = self.plan(layout, num_microbatches, spec)
            why = next(filter(None, (self._misfit(m.plan) for m in micro)), "")
        except CapError as error:
            why = str(error)
        finally:  # also where this rank alone has an error, which COMMIT shares
            refused = self.any_refuses(why != "")
        return micro, why or "another rank refuses it" * refused

    def any_refuses(self, own: bool) -> bool:
        """Whether a step as sampled is refused by any rank that shares it, all of which ask."""
        return bool(self._commit_gather(np.array([int(own)])).any())

    def _misfit(self, plan: StepPlan) -> str:
        """Why a plan as sampled must not run, "" if it may."""
        if not plan.is_within_caps:
            return "a rank would hold more than its max_rank_tokens or its memory allows"
        if self.spec.fills and not plan.llm.target_sizes.all():
            return "a rank would have no example"
        return self.refuses(plan)

    def commit(
        self, step: int, plans: Sequence[StepPlan], *, error: Exception | None = None,
        failed: Sequence[FailedSegment] = (), num_targets: tuple[int, int] = UNCOUNTED,
        geometry: int = 0, seen: tuple[int, int] = (0, 0), loop_us: int = UNKNOWN,
    ) -> tuple[list[FailedSegment], list[int | None], int, np.ndarray, int]:
        """COMMIT: agrees that this step is sound. num_targets: labels of this rank's batches, and
        those that a model which shifts labels itself predicts. geometry, seen: of them, see Step
        (not sent from 2^31 on). loop_us: of this rank for an earlier step, see Step.loop. Returns
        (what all ranks could not decode; both counts of all ranks, None if some rank could not
        count its own; the geometry and what was seen, of the step; loop_us of the slowest rank of
        this shard, UNKNOWN if it is of some rank).

        Raises RemoteError if any rank passed an `error`, its cause on that rank, and
        PlanMismatchError if plans differ."""
        digest = digest_of_arrays([np.array([p.digest for p in plans], np.int64)])
        detail, is_told = "", isinstance(error, AgreedError)  # by all ranks of a shard, in LAYOUT
        if error or failed:
            detail = json.dumps([str(error) if is_told else describe(error),
                                 [astuple(f) for f in failed], is_told])
        everyone = self._commit_gather
        rows = everyone(np.array(
            [step, digest, len(detail.encode()), geometry, *num_targets, loop_us,
             seen[0] << 32 | seen[1] if max(seen) < 2**31 else 0], np.int64))
        head = dict(zip(_COMMIT_FIELDS, rows.T, strict=True))
        details = [json.loads(t) if t else [None, [], False]
                   for t in gather_texts(everyone, detail, head["detail_bytes"])]
        if told := [text for text, _, was_told in details if was_told]:
            raise RemoteError(told[0]) from error.__cause__ if is_told else error
        raise_first(step, [d[0] for d in details], error)
        for first in range(0, everyone.world_size, self.world_size):  # of each shard
            require_agreement(step, "plan", head["digest"][first: first + self.world_size], first)
        loops = head["loop_us"][self._first: self._first + self.world_size]  # of this one
        # Two ranks may have read the same.
        return (list(dict.fromkeys(FailedSegment(*f) for _, items, _ in details for f in items)),
                [None if (head[name] == UNKNOWN).any() else int(head[name].sum())
                 for name in ("num_targets", "num_shifted")],
                int(head["geometry"].max()),
                np.stack([head["seen"] >> 32, head["seen"] & (2**32 - 1)], 1),
                UNKNOWN if (loops == UNKNOWN).any() else int(loops.max()))

    def dispatch(self, micro: Microbatch) -> PackedExamples:
        """Moves the media of one of the trainer's microbatches to the ranks that encode them
        (training thread). Collective: every rank dispatches all microbatches of a step, in their
        order. The text is there already."""
        packed = micro.content
        if len(micro.ignored):
            packed = packed.without_labels(np.isin(micro.rank_plan.row[:, 0], micro.ignored))
            if packed.made is not None:
                packed = replace(packed, made=packed.made.without_labels(micro.ignored))
        return packed.to(self.device).exchanged(self._device_group)
