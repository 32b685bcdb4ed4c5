"""BalancedDataLoader: a drop-in for torch.utils.data.DataLoader that balances the ranks' work after
sampling. docs/loader.md shows it in a loop; orchmllm.data.loading.step_loader has the mechanism.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

from orchmllm.comm.exchange import node_size
from orchmllm.data.loading.pipeline import Pipeline
from orchmllm.loader.callers import PlannedSampler, follow, refusal, refuse
from orchmllm.loader.collator import Collator
from orchmllm.loader.groups import data_ranks
from orchmllm.loader.indices import Pass
from orchmllm.loader.loss import LossWatch, StepInfo, warn_of_rest
from orchmllm.loader.process_groups import agree, connect
from orchmllm.loader.setup import (
    Planning,
    check_arguments,
    check_state,
    log,
    log_step,
    plan_batch,
    warn_of_copies,
)
from orchmllm.loader.source import Reader, drawn_batches, open_source
from orchmllm.loader.versions import require
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.cost import CostModel

STATE_VERSION = 1


class BalancedDataLoader(DataLoader):
    """Iterates collated batches of this rank's examples, chosen so that ranks take equally long.

    Constructing it, iterating it and loading its state are collective over the ranks of `group`.
    The arguments up to drop_last, and `workers`, its other ones by keyword (timeout, generator,
    prefetch_factor, ...), are those of torch's DataLoader (batch_size counts examples per rank and
    microbatch; without a sampler the loader shards the data itself). dataset may also be a
    DataLoader (see `balance`), which decides what it draws and how: these arguments are refused
    then; or any iterable of lists of examples.

    lengths: length of every example by index, a sequence (a list is copied) or a function, which is
    asked for the examples that the rank draws; an integer; each rank loads what it processes.
    length_fn: instead, length of a loaded example; examples are loaded where they are sampled and
    sent between ranks in the prefetch thread. phases: cost of an example by its length (default:
    its length); the encoders of a model are balanced by balance_encoders.
    policy, tolerance: see orchmllm.plan.balance.balance. `auto` plans by what all ranks saw of
    collated batches: `padded` where collate_fn pads, else `least_move` (always with a tolerance or
    max_tokens, which `padded` has not); the steps before that, the first one and those that workers
    load ahead of it, stay as sampled. group: ranks that share the data, one per replica, or a
    device mesh that names its dimensions (default: accelerate's mesh, else all ranks). max_tokens:
    no rank gets more tokens in a microbatch (0: no limit). accumulation_steps: batches per
    optimizer step; "auto": as few in each step as max_tokens allows, of batch_size examples per
    rank and step. num_targets: collated batch -> the number of its targets (default: of entries of
    "labels" that are not -100). prefetch: steps prepared ahead. seed: of the shuffling, equal on
    all ranks. min_gain: steps predicted to gain less (0.02: 2%) run as sampled. measure_every:
    every Nth step does, to measure the gain (docs/loader.md). enabled: false runs every step as
    sampled, for comparisons. shard_size: balance within groups of so many consecutive ranks (0:
    all). ranks_per_node: default from the launcher. timeout_s: of an agreement that a rank never
    joins. log_every: steps between lines of the logger orchmllm.loader on rank 0 (0: none).
    check_loss: warn if the loop never asks how to scale its loss.

    The user's batch is passed on untouched: what a loop needs to know of the batch last yielded is
    `loader.step`, and `loader.scale_sum` or `loader.scale_mean` scales its loss. Errors of any
    rank's dataset, length_fn, collate_fn or worker are raised on all ranks as RemoteError with the
    same text; on the rank that failed its `__cause__` is the exception itself.
    Raises ValueError for options that cannot be honoured.
    """

    use_stateful_dataloader = True  # for accelerate: save_state and load_state use its state

    def __init__(
        self, dataset: Any, batch_size: int | None = 1, shuffle: bool | None = None,
        sampler: Sampler | None = None, batch_sampler: Sampler | None = None, num_workers: int = 0,
        collate_fn: Callable | None = None, pin_memory: bool = False, drop_last: bool = False, *,
        lengths: Sequence | Callable[[int], Any] | None = None,
        length_fn: Callable[[Any], Any] | None = None,
        phases: CostModel | None = None, policy: str = "auto",
        tolerance: float | None = None, group: dist.ProcessGroup | dist.DeviceMesh | None = None,
        max_tokens: int = 0, prefetch: int = 2,
        num_targets: Callable[[Any], int] | None = None, accumulation_steps: int | str = 1,
        seed: int = 0,
        min_gain: float = 0.0, measure_every: int = 0, enabled: bool = True, shard_size: int = 0,
        ranks_per_node: int = 0, timeout_s: float = 600.0, log_every: int = 100,
        check_loss: bool = True, **workers: Any,
    ) -> None:
        self._source = source = open_source(
            dataset, dict(batch_size=batch_size, shuffle=bool(shuffle), sampler=sampler,
                          batch_sampler=batch_sampler, drop_last=drop_last),
            {"num_workers": num_workers, **workers}, collate_fn, pin_memory, lengths)
        self.accumulation_steps, self.prefetch, self.seed = accumulation_steps, prefetch, seed
        self.enabled = enabled  # whether steps are balanced, from the next pass on
        ranks = data_ranks(group)
        check_arguments(source, lengths, length_fn, shard_size, len(ranks), accumulation_steps,
                        max_tokens, prefetch, seed)
        dispatch = "bytes" if lengths is None else "load"
        self.num_ranks = len(ranks)
        batches = self.num_ranks * drawn_batches(accumulation_steps)  # of a step
        if source.kind == "indices":
            self.global_batch_size = source.batch_size * batches
        agree(ranks, {
            **self._order(), "drop_last": source.drop_last,
            "num_workers": source.workers["num_workers"], "prefetch": prefetch, "policy": policy,
            "tolerance": tolerance, "max_tokens": max_tokens, "min_gain": min_gain,
            "measure_every": measure_every, "shard_size": shard_size, "timeout_s": timeout_s,
            "ranks_per_node": node_size(ranks, ranks_per_node),
            "whether lengths are given": lengths is not None,
            "whether num_targets is given": num_targets is not None}, timeout_s)
        links = connect(self, ranks, shard_size, ranks_per_node, timeout_s, cpu=lengths is None)
        self.rank = links.rank
        self._planning = Planning(
            policy, tolerance, max_tokens, cost=phases, dispatch=dispatch, min_gain=min_gain,
            measure_every=measure_every, ranks_per_node=links.gather.per_node, says=self.rank == 0)
        self._orchestrator = Orchestrator(
            self._planning.spec, links.gather, group=links.cpu, commit_gather=links.everyone)
        self._orchestrator.planner = plan_batch
        collator = Collator(source.collate, self.rank, num_targets, source.pin_memory)
        self._reader = Reader(source, lengths, length_fn, collator, links, max_tokens)
        self.num_targets = num_targets
        self._log_every = log_every if self.rank == 0 else 0
        self._watch = LossWatch(done=not check_loss or self.rank != 0)
        self.num_dropped = 0
        # (epoch, steps done in it, state of a foreign loader): where the next pass begins, and
        # where the loop is.
        self._next = self._done = (0, 0, None)
        self._known = self._planning.known  # at that place: ranks prefetch at another pace
        self._epoch_of_source: int | None = None  # that the user's sampler or stream was told
        self._own_key = f"inner_{self.rank}"  # in the state of a sampler or a stream
        self._step: StepInfo | None = None  # of the batch last yielded
        self._ahead: deque[tuple] | None = None  # the same of batches that a wrapper holds back
        self._original = weakref.ref(self)  # which an object with these attributes has, too
        self._live = False  # whether an iterator has begun and not ended
        self._show()

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by Accelerator.prepare, which then leaves the loader alone, and sets it. Raises
        RuntimeError for an older accelerate than was tested."""
        require("accelerate")
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        pass

    def _show(self) -> None:
        """Sets the attributes of a DataLoader, for code that reads them."""
        source = self._source
        steps = 0 if source.kind == "stream" else self._num_steps() or 0
        shown = None if isinstance(source.seen_dataset, IterableDataset) else PlannedSampler(
            source, steps * drawn_batches(self.accumulation_steps) * (source.batch_size or 1),
            self.rank, self.num_ranks, weakref.WeakMethod(self._reach))
        super().__init__(
            source.seen_dataset, source.batch_size, sampler=shown, pin_memory=source.pin_memory,
            collate_fn=refuse if source.kind == "stream" else source.collate,
            drop_last=source.drop_last and source.batch_size is not None, **source.workers)

    # Iterating.

    def __len__(self) -> int:
        """Batches of this rank in one pass (an estimate where other ranks hold other numbers).
        TypeError for a stream or a batch sampler without a length, and with accumulation_steps
        "auto"."""
        if self.accumulation_steps == "auto":
            raise TypeError('with accumulation_steps="auto" the batches of a pass are not known')
        if (steps := self._num_steps()) is None:
            raise TypeError(f"the loader's data, a {self._source.kind}, has no len()")
        return steps * self.accumulation_steps

    def _num_steps(self) -> int | None:
        """Of one pass (see __len__), None where it is not known."""
        source = self._source
        if source.kind == "indices":
            cut = math.floor if source.drop_last else math.ceil
            return cut(len(source.dataset) / self.global_batch_size)
        try:
            batches = len(source.batch_sampler if source.kind == "sampler" else self._reader.loader)
        except TypeError:
            return None
        return math.ceil(batches / drawn_batches(self.accumulation_steps))

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration runs (or goes on with, after load_state_dict)."""
        return self._next[0]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration; without it every iteration is the next epoch.
        Raises ValueError if a loaded state stands within another epoch, which is not known of the
        one before where the data has no length: the log says what is left out."""
        next_epoch, step, state = self._next
        if step and epoch != next_epoch:
            if epoch != next_epoch + 1 or step < (num_steps := self._num_steps() or 0):
                raise ValueError(
                    f"set_epoch({epoch}): the state that was loaded is at step {step} of epoch "
                    f"{next_epoch}; go on in that epoch, or load no state")
            if not num_steps and self.rank == 0:
                log.warning("set_epoch(%d) begins that epoch: the state that was loaded is at step "
                            "%d of epoch %d, and what was left of it, if anything, is not drawn",
                            epoch, step, next_epoch)
            step, state = 0, None  # the end of that epoch
        self._next = epoch, step, state
        self._epoch_of_source = epoch
        self._source.set_epoch(epoch)

    def _reach(self, epoch: int) -> None:
        """What a trainer tells the sampler of a loader. Where the next pass begins an epoch, or a
        state was loaded of the end of one, it leads on to that epoch and never back: a trainer
        may count from 0 after a resume."""
        at, step, _ = self._next
        if epoch > at and (not step or step >= (self._num_steps() or math.inf)):
            self._next = epoch, 0, None
        self._source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """One pass. An iterator that is dropped after its first batch has cost no epoch, unless
        that was the last batch of the pass: a loop that counts its batches asks for no more. Raises
        RuntimeError, at its first batch, while another one is live."""
        frame = sys._getframe(1)  # a generator that kept this frame would be kept alive by it
        return Pass(self._pass(deque() if follow(frame, self) else None), refusal(frame, self))

    def _pass(self, ahead: deque[tuple] | None) -> Iterator[Any]:
        if self._live:
            raise RuntimeError(
                "a second iterator of this BalancedDataLoader begins while another one is live; "
                "they would share plans: end the first (exhaust it, or `del iterator`), or make a "
                "second loader")
        self._ahead = ahead
        before = self._done = self._next
        epoch, first, state = before
        orch = self._orchestrator
        orch.settle()  # a thread of the pass before may be at work
        self._planning.enabled = self.enabled
        orch.spec = self._planning.spec
        pipeline = Pipeline(
            self._reader.feed(self._order(), self.prefetch, epoch, first, state), orch,
            first_step=first, prefetch=self.prefetch, accumulation_steps=(
                0 if self.accumulation_steps == "auto" else self.accumulation_steps),
            committed=partial(self._planning.look, orch))
        # The log begins with the first step that is planned by what was seen.
        late = 0 if self._planning.knows else pipeline.feed.lookahead + 1
        steps, yielded = iter(pipeline), 0  # batches
        self._live, self._next = True, (after := (epoch + 1, 0, None))
        try:
            for step in steps:
                if self._source.kind == "stream" and not step.index and self.rank == 0:
                    warn_of_copies(step)
                for k, micro in enumerate(step.micro):
                    if k == len(step.micro) - 1:
                        self._done, self._known = (epoch, step.index + 1, step.state), step.known
                    self._step = info = StepInfo.of(
                        step, k, epoch, self.num_ranks, self.num_targets is None, self._watch)
                    if self._ahead is not None:
                        self._ahead.append((info, self._done))
                    if k == 0 and self._log_every and not (step.index - late) % self._log_every:
                        log_step(step, info, self._planning.loop)
                    yielded += 1
                    yield micro.content
                    self._watch.fetched(info)
            self.num_dropped += pipeline.num_dropped
            self._done = epoch + 1, 0, None
        except GeneratorExit:
            looked = yielded <= 1 and self._done[1] < (self._num_steps() or math.inf)
            if looked and self._next is after:  # no state or epoch was set meanwhile
                self._next = before
            elif not looked and self.rank == 0:
                warn_of_rest(info)
            raise
        finally:
            steps.close()
            self._live = False

    def _order(self) -> dict[str, Any]:
        """What decides which examples a step has, the same on all ranks."""
        source = self._source
        order = {"kind": source.kind, "accumulation_steps": self.accumulation_steps}
        if source.kind == "indices":
            order |= {"global_batch_size": self.global_batch_size, "seed": self.seed,
                      "shuffle": source.shuffle, "num_examples": len(source.dataset)}
        return order

    # What a loop needs to know.

    @property
    def step(self) -> StepInfo:
        """Facts of the batch last yielded (of the microbatch, with accumulation_steps), whatever
        was prefetched since. A loop that fetches several batches before it trains on the first
        reads it after each fetch. Raises RuntimeError before the first batch."""
        if self._step is None:
            raise RuntimeError("loader.step: no batch was yielded yet; read it inside the loop")
        return self._step

    @property
    def scale_sum(self) -> Callable[..., torch.Tensor]:
        """StepInfo.scale_sum of the batch last yielded. Raises RuntimeError before the first."""
        return self.step.scale_sum

    @property
    def scale_mean(self) -> Callable[..., torch.Tensor]:
        """StepInfo.scale_mean of the batch last yielded. Raises RuntimeError before the first."""
        return self.step.scale_mean

    # State.

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a BalancedDataLoader has connections to other ranks and cannot be copied "
                        "or pickled: keep loader.state_dict(), and make another loader, on all "
                        "ranks")

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: after the last step whose batches were all yielded. JSON-able and the
        same on all ranks (under 4 kB); a stream that has a state of its own adds that of this rank,
        in a tuple under a name that no other rank uses: torch's distributed checkpoints take it as
        one value, and keep that of each rank.
        """
        epoch, step, inner = self._done
        state = {"version": STATE_VERSION, **self._order(), **self._known, "epoch": epoch,
                 "step": step}
        if self._source.kind == "indices":
            return {**state, "batch_size": self._source.batch_size}
        own = {self._own_key: (inner,)} if self._reader.has_state else {}
        return {**state, **self._source.counted(), "num_ranks": self.num_ranks,
                "epoch_of_source": self._epoch_of_source, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, on any number of ranks and workers for a map-style
        dataset without a sampler: the global batches stay what they were, and batch_size becomes a
        rank's share of them, rounded up. Raises ValueError for another version, kind, dataset,
        order or accumulation, within an epoch for another batch_size argument (unless the global
        batches are equal), and for a per-rank state of another rank or number of ranks."""
        check_state(state, self.state_dict(), self._own_key)
        self._planning.load(state)
        self._known = self._planning.known
        if self._source.kind == "indices" and (
                state["step"] or state["batch_size"] == self._source.batch_size):
            self.global_batch_size = state["global_batch_size"]
            batches = self.num_ranks * drawn_batches(self.accumulation_steps)
            # torch's DataLoader refuses it from an ordinary assignment.
            object.__setattr__(self, "batch_size", math.ceil(self.global_batch_size / batches))
        if (told := state.get("epoch_of_source")) is not None:
            self._epoch_of_source = told
            self._source.set_epoch(told)
        [inner] = state.get(self._own_key, (None,))
        self._next = self._done = state["epoch"], state["step"], inner
