"""BalancedDataLoader: a drop-in for torch.utils.data.DataLoader that balances the ranks' work after
sampling. docs/loader.md shows it in a loop; orchmllm.data.loading.step_loader has the mechanism.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, default_collate

from orchmllm.data.loading.forks import loader_context
from orchmllm.data.loading.pipeline import Pipeline
from orchmllm.dropin.adapt import scale_loss
from orchmllm.dropin.draws import (
    ForeignStream,
    GlobalIndices,
    IndexedStream,
    MeasuredLists,
    SampledIndices,
    SharedIndices,
)
from orchmllm.dropin.examples import Phase, StepInfo, attach
from orchmllm.dropin.feeds import Collator, ExampleFeed, IndexFeed, PlannedIndices, measured
from orchmllm.dropin.setup import (
    check_arguments,
    connect,
    imbalances,
    log_step,
    make_spec,
    rank_list,
)
from orchmllm.orchestrator import Orchestrator, Step
from orchmllm.plan.assign import digest64
from orchmllm.plan.cost import CostModel

STATE_VERSION = 1


class BalancedDataLoader:
    """Iterates collated batches of this rank's examples, chosen so that ranks take equally long.

    Constructing it, iterating it and loading its state are collective over the ranks of `group`.
    The arguments up to in_order are those of torch's DataLoader (batch_size counts examples per
    rank and microbatch; without a sampler the loader shards the data itself). dataset may also be a
    DataLoader, or any iterable of lists of examples; then the rest of its arguments stays its own.

    lengths: length of every example by index, a sequence or a function; an integer, or Segments.
    length_fn: instead, length of a loaded example. phases: cost of an example by its length (a
    CostModel, default: its length), or phase -> CostModel or Phase. policy, tolerance: see
    orchmllm.plan.balance.balance; one for all phases, or by phase. group: data-parallel ranks that
    share the data (default: all). dispatch: `load` (each rank loads what it processes; needs
    lengths) or `bytes` (examples are sent between ranks in the prefetch thread); default: `load`
    with lengths, else `bytes`. max_rank_tokens: cap of a rank's tokens in a microbatch.
    accumulation_steps: batches per optimizer step. num_targets: collated batch -> its labels
    (default: entries of "labels" that are not -100). prefetch: steps prepared ahead. seed: of the
    shuffling, equal on all ranks. min_gain: steps that balancing is predicted to shorten by less
    (0.02: 2%) run as sampled. enabled: false runs every step as sampled, for comparisons.
    exchange: how exchange_rows sends features, `flat` or `two_hop` (between equal places of nodes,
    then inside the node). shard_size: balance within groups of so many consecutive ranks (0: all);
    pass `loader.exchange_group` to exchange_rows then. ranks_per_node: default from the launcher.
    timeout_s: of an agreement that a rank never joins. log_every: steps between lines of the logger
    orchmllm.loader on rank 0 (0: none).

    What a loop needs to know of the batch last yielded is `loader.step`, and `loader.scale_sum`
    scales its loss; both work whatever the loop did to the batch. As long as nobody moves or
    rebuilds it the batch has the same facts as attributes, if its class allows it. Errors of any
    rank's dataset, length_fn, collate_fn or worker are raised on all ranks as RemoteError with the
    same text; on the rank that failed its __cause__ is the exception itself.
    Raises ValueError for options that cannot be honoured.
    """

    def __init__(
        self, dataset: Any, batch_size: int | None = 1, shuffle: bool | None = None,
        sampler: Sampler | None = None, batch_sampler: Sampler | None = None, num_workers: int = 0,
        collate_fn: Callable | None = None, pin_memory: bool = False, drop_last: bool = False,
        timeout: float = 0, worker_init_fn: Callable | None = None,
        multiprocessing_context: Any = None, generator: torch.Generator | None = None, *,
        prefetch_factor: int | None = None, persistent_workers: bool = False,
        pin_memory_device: str = "", in_order: bool = True,
        lengths: Sequence | Callable[[int], Any] | None = None,
        length_fn: Callable[[Any], Any] | None = None,
        phases: CostModel | Mapping[str, CostModel | Phase] | None = None,
        policy: str | Mapping[str, str] = "least_move",
        tolerance: float | Mapping[str, float] | None = None,
        group: dist.ProcessGroup | None = None, dispatch: str | None = None,
        max_rank_tokens: int = 0, accumulation_steps: int = 1,
        num_targets: Callable[[Any], int] | None = None, prefetch: int = 2, seed: int = 0,
        min_gain: float = 0.0, enabled: bool = True, exchange: str = "flat", shard_size: int = 0,
        ranks_per_node: int = 0, timeout_s: float = 600.0, log_every: int = 100,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.accumulation_steps, self.prefetch, self.seed = accumulation_steps, prefetch, seed
        self.shuffle, self.sampler, self.batch_sampler = bool(shuffle), sampler, batch_sampler
        self._lengths = lengths.__getitem__ if hasattr(lengths, "__getitem__") else lengths
        self._torch = dict(
            num_workers=num_workers, timeout=timeout, worker_init_fn=worker_init_fn,
            multiprocessing_context=loader_context(multiprocessing_context, num_workers),
            generator=generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
            in_order=in_order)
        self._kind = self._kind_of(dataset, lengths, length_fn)
        self.dispatch = dispatch or ("load" if lengths is not None else "bytes")
        check_arguments(self, self._kind, lengths, length_fn)
        if sampler is not None and self.batch_sampler is None:
            self.batch_sampler = BatchSampler(sampler, self.batch_size, self.drop_last)
        ranks = rank_list(group)
        if shard_size and shard_size < len(ranks) and self._kind != "indices":
            raise ValueError("shard_size: only for a map-style dataset without a sampler, whose "
                             "shards end on the same step")
        self._links = links = connect(
            ranks, shard_size, ranks_per_node, exchange, timeout_s,
            cpu=self.dispatch == "bytes")
        spec, media = make_spec(phases, policy, tolerance, max_rank_tokens, links.per_node,
                                self.dispatch, enabled, min_gain, exchange)
        if media and self.dispatch == "load":
            raise ValueError("dispatch is 'load' with media phases: a dataset of whole examples "
                             "can do that for one phase only; give length_fn and dispatch='bytes'")
        self.rank, self.num_ranks = links.rank, len(ranks)
        self.exchange_group = links.device
        self._orchestrator = Orchestrator(
            spec, links.gather, group=links.cpu, commit_gather=links.everyone,
            hop_groups=links.hops)
        collate = self._collate_of(collate_fn)
        self._collator = Collator(collate, media, self.rank, num_targets,
                                  self._pin(pin_memory))
        self._log_every = log_every
        self._indices = PlannedIndices() if self.dispatch == "load" else SharedIndices()
        self._loader = self._make_loader(collate, length_fn)
        if batch_size is not None:
            self.global_batch_size = batch_size * accumulation_steps * self.num_ranks
        self.num_dropped = 0
        self._next_epoch, self._start = 0, (0, None)  # (step, state of a foreign loader)
        self._done = (0, 0, None)  # (epoch, steps yielded in it, state of a foreign loader)
        self._step: StepInfo | None = None  # of the batch last yielded

    # What the arguments mean.

    def _kind_of(self, dataset: Any, lengths: Any, length_fn: Any) -> str:
        """indices (sampled here), sampler (the user's, per rank) or stream."""
        if isinstance(dataset, DataLoader):
            if lengths is None or isinstance(dataset.dataset, IterableDataset):
                return "stream"
            if hasattr(dataset, "state_dict"):
                raise ValueError("a loader with a state of its own takes length_fn, not lengths")
            self._adopt(dataset)
            return "sampler"
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            return "stream"
        return "indices" if self.sampler is self.batch_sampler is None else "sampler"

    def _adopt(self, loader: DataLoader) -> None:
        """Takes over a plain DataLoader: its indices are planned, its functions used."""
        if loader.batch_sampler is None:
            raise ValueError("the wrapped DataLoader has batch_size=None: give it a batch size")
        self.dataset, self.batch_sampler = loader.dataset, loader.batch_sampler
        self.batch_size, self.num_workers = loader.batch_size, loader.num_workers
        self.pin_memory = loader.pin_memory
        for name in self._torch:
            self._torch[name] = getattr(loader, name)
        self._torch["multiprocessing_context"] = loader_context(
            loader.multiprocessing_context, loader.num_workers)
        self._adopted_collate = loader.collate_fn

    def _collate_of(self, collate_fn: Callable | None) -> Callable:
        if collate_fn is not None:
            return collate_fn
        if isinstance(self.dataset, DataLoader):
            return self.dataset.collate_fn
        return getattr(self, "_adopted_collate", None) or default_collate

    @staticmethod
    def _pin(pin_memory: bool) -> Callable[[Any], Any] | None:
        if not pin_memory or not torch.cuda.is_available():
            return None
        from torch.utils.data._utils.pin_memory import pin_memory as pin

        return pin

    def _make_loader(self, collate: Callable, length_fn: Any) -> Any:
        """What loads: torch's loader over planned indices, over sampled ones, or the user's."""
        if self.dispatch == "load":
            return DataLoader(self.dataset, batch_sampler=self._indices, collate_fn=collate,
                              pin_memory=self.pin_memory, **self._torch)
        with_lengths = list if length_fn is None else partial(measured, length_fn)
        if self._kind != "stream":
            return DataLoader(self.dataset, batch_sampler=self._indices, collate_fn=with_lengths,
                              **self._torch)
        if isinstance(self.dataset, DataLoader):
            inner = copy.copy(self.dataset)  # the user's keeps its collate_fn
            inner.collate_fn = with_lengths
            if inner.num_workers:
                inner.multiprocessing_context = loader_context(
                    inner.multiprocessing_context, inner.num_workers)
            return inner
        if isinstance(self.dataset, IterableDataset):
            return DataLoader(self.dataset, batch_size=self.batch_size, collate_fn=with_lengths,
                              **self._torch)
        return MeasuredLists(self.dataset, with_lengths)

    # Iterating.

    def __len__(self) -> int:
        """Batches of this rank in one pass (an estimate where other ranks hold other numbers).
        TypeError for a stream without a length."""
        k = self.accumulation_steps
        if self._kind == "indices":
            cut = math.floor if self.drop_last else math.ceil
            return cut(len(self.dataset) / self.global_batch_size) * k
        batches = len(self.batch_sampler if self._kind == "sampler" else self._loader)
        return math.ceil(batches / k) * k

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration runs (or goes on with, after load_state_dict)."""
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration; without it every iteration is the next epoch."""
        self._next_epoch = epoch
        for part in (self.sampler, self.batch_sampler, self.dataset):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        epoch, (first, state) = self._next_epoch, self._start
        self._next_epoch, self._start = epoch + 1, (0, None)
        self._done = (epoch, first, state)
        pipeline = Pipeline(
            self._feed(epoch, first, state), self._orchestrator, first_step=first,
            accumulation_steps=self.accumulation_steps, prefetch=self.prefetch)
        steps = iter(pipeline)
        try:
            for step in steps:
                if self._log_every and self.rank == 0 and not step.index % self._log_every:
                    log_step(step, epoch)
                for k, micro in enumerate(step.micro):
                    if k == self.accumulation_steps - 1:
                        self._done = (epoch, step.index + 1, step.state)
                    self._step = self._info(step, k, epoch)
                    yield attach(micro.content, self._step)
        finally:
            steps.close()
        self.num_dropped += pipeline.num_dropped

    def _feed(self, epoch: int, first: int, state: Any) -> IndexFeed | ExampleFeed:
        k = self.accumulation_steps
        config_digest = digest64(repr((
            self._kind, self.dispatch, epoch, first, k, self.num_workers, self.prefetch,
            self._torch["prefetch_factor"], self.drop_last,
            (self.seed, self.shuffle, self.global_batch_size, len(self.dataset))
            if self._kind == "indices" else None)).encode())
        if self._kind == "stream":
            if state is not None:
                self._loader.load_state_dict(state)
            stream = ForeignStream(
                self._loader, k, batch_size=self.batch_size, drop_last=self.drop_last,
                rank=self.rank, skip=0 if state is not None else first)
            return ExampleFeed(stream, self._collator, self._orchestrator.rank, self._links.cpu,
                           config_digest)
        if self._kind == "indices":
            source: Any = GlobalIndices(
                len(self.dataset), self.global_batch_size, self.rank, self.num_ranks,
                shuffle=self.shuffle, seed=self.seed, epoch=epoch, drop_last=self.drop_last,
                first_step=first, shard=self._links.shard)
        else:
            source = SampledIndices(self.batch_sampler, k, first)
        if self.dispatch == "load":
            fetched = self._loader.num_workers * (self._loader.prefetch_factor or 0)
            return IndexFeed(source, self._lengths, self._loader, self._indices, self._collator,
                             config_digest, lookahead=math.ceil(fetched / k))
        self._indices.source = source
        stream = IndexedStream(self._loader, self._indices, self._lengths)
        return ExampleFeed(stream, self._collator, self._orchestrator.rank, self._links.cpu,
                           config_digest)

    def _info(self, step: Step, k: int, epoch: int) -> StepInfo:
        micro, mine = step.micro[k], step.micro[k].rank_plan
        return StepInfo(
            plan=mine, inputs=micro.inputs, num_examples=len(mine.examples),
            example_ids=mine.example_ids.tolist(), step=step.index, epoch=epoch, microbatch=k,
            num_microbatches=self.accumulation_steps, imbalance=imbalances(micro.plan),
            wait_s=step.wait_s if k == 0 else 0.0, num_ranks=self.num_ranks,
            num_targets=step.num_global_targets)

    @property
    def step(self) -> StepInfo:
        """Facts of the batch last yielded (of the microbatch, with accumulation_steps), whatever
        was prefetched since. A loop that fetches several batches before it trains on the first
        reads it after each fetch. Raises RuntimeError before the first batch."""
        if self._step is None:
            raise RuntimeError("loader.step: no batch was yielded yet; read it inside the loop")
        return self._step

    def scale_sum(
        self, loss_sum: torch.Tensor, *, gradients: str = "mean", num_ranks: int | None = None
    ) -> torch.Tensor:
        """The loss to call backward on, for the batch last yielded: loss_sum * num_ranks /
        loader.step.num_global_targets.

        loss_sum: (), the sum of the loss over this rank's targets in the batch. FSDP and DDP
        average gradients over their ranks: the factor num_ranks undoes that, so the gradient is
        that of the mean over the targets of all ranks. gradients="sum" leaves the factor out, for
        a reduction that sums (FSDP2's set_gradient_divide_factor(1.0)). num_ranks: over which
        gradients are averaged (default: the ranks of the loader's group). With accumulation_steps
        the denominator is that of all microbatches of the step: do not divide by their number.
        Raises RuntimeError before the first batch, ValueError if the number of targets is not
        known or `gradients` is neither."""
        return scale_loss(loss_sum, self.step, gradients=gradients,
                          num_ranks=num_ranks or self.num_ranks)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is: after the last step whose batches were all yielded. JSON-able and the
        same on all ranks for a map-style dataset without a sampler (under 4 kB); else of this rank,
        with the wrapped loader's own state if it has one."""
        epoch, step, inner = self._done
        if self._start != (0, None):  # loaded and not yet iterated
            epoch, (step, inner) = self._next_epoch, self._start
        state = {"version": STATE_VERSION, "kind": self._kind, "epoch": epoch, "step": step,
                 "accumulation_steps": self.accumulation_steps}
        if self._kind == "indices":
            return {**state, "global_batch_size": self.global_batch_size, "seed": self.seed,
                    "shuffle": self.shuffle, "num_examples": len(self.dataset)}
        return {**state, "rank": self.rank, "num_ranks": self.num_ranks, "inner": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, on any number of ranks and workers for a map-style
        dataset without a sampler: the global batches stay what they were. Raises ValueError for
        another version, kind, dataset, order or accumulation, and for a per-rank state of another
        rank or number of ranks."""
        mine = self.state_dict()
        fixed = ["version", "kind", "accumulation_steps"]
        fixed += (["seed", "shuffle", "num_examples"] if self._kind == "indices"
                  else ["num_ranks", "rank"])
        for name in fixed:
            if state.get(name) != mine[name]:
                why = ("; the state of a sampler or a foreign loader is per rank: use as many "
                       "ranks as before, or a map-style dataset without a sampler"
                       if name in ("num_ranks", "rank") else "")
                raise ValueError(f"loader state: {name} was {state.get(name)!r}, now it is "
                                 f"{mine[name]!r}{why}")
        if self._kind == "indices":
            self.global_batch_size = state["global_batch_size"]
        self._next_epoch, self._start = state["epoch"], (state["step"], state.get("inner"))
