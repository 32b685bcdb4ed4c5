"""The one place where the parts meet: build, then forward, backward, clip, update, read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from orchmllm.batch import Step
from orchmllm.comm.exchange import RowGather, exchange_group, gather_scalars, send_scalars
from orchmllm.config.job import Job, resolve
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.loading.ray_workers import join_pool
from orchmllm.data.loading.whole_examples import feed_of
from orchmllm.hf.sources import WeightSource, find_sources
from orchmllm.launch import World, device_of, gpu_of, machine
from orchmllm.models.flops import mfu, peak_flops
from orchmllm.models.whole_flops import plan_spec
from orchmllm.models.whole_model import describe_attention
from orchmllm.plan.assign import PlanSpec, digest64
from orchmllm.proof.prove import prove_on_first_rank
from orchmllm.runtime.build import build_dataset, build_orchestrator
from orchmllm.runtime.display import RunDisplay
from orchmllm.runtime.health import HangWatchdog
from orchmllm.runtime.host_memory import trim
from orchmllm.runtime.measured import Reported, StepTimer, thread_times
from orchmllm.runtime.profile import StepProfiler
from orchmllm.runtime.run_checkpoints import RunCheckpoints
from orchmllm.runtime.run_state import Incidents, Progress
from orchmllm.runtime.samples import Samples
from orchmllm.runtime.stop import StopSignal
from orchmllm.sharding.build import agreed_fingerprint, build_model, share_in_nodes
from orchmllm.sharding.fsdp import compute_dtype, state_tensors
from orchmllm.sharding.longest import LongExamples
from orchmllm.sharding.optimizer import (
    clip_gradients,
    learning_parts,
    make_optimizer,
    set_learning_rate,
    takes_flags,
)
from orchmllm.sharding.run_memory import RunMemory


class Unread(NamedTuple):
    """A step whose update is on its way to the device. since: thread_times where its time begins;
    before: of the step before, where the device went on with this one without a pause.
    logging_s: what the log took before it."""

    step: Step
    lr: float
    since: np.ndarray
    before: Reported | None
    logging_s: float
    reported: Reported


class StepTrainer:
    """Trains single steps on one rank; constructing it is collective. dataset: used instead of the
    recipe's. watch: is told where this rank is. on_step: a run calls it on every rank with each
    step and its row of metrics, before that step is saved; what it raises ends the run."""

    _unread: Unread | None = None  # the last step
    _logging_s = 0.0

    def __init__(
        self, recipe: Recipe, world: World, *, dataset: ConversationDataset | None = None,
        watch: HangWatchdog | None = None, on_step: Callable[[Step, dict], None] | None = None,
    ) -> None:
        self.recipe, self.world, self.watch, self.on_step = recipe, world, watch, on_step
        self.display = RunDisplay(recipe.run, shows=world.rank == 0,
                                  patience_s=recipe.launch.stall_timeout_s / 2)
        self._log = self.display.note
        self.device = device_of(world)
        self._gather, self._send = (partial(f, device=self.device) for f in (
            gather_scalars, send_scalars))
        job = resolve(recipe, world.world_size, world.local_world_size)
        sources = find_sources(recipe.model)  # its errors come before any collective
        self._open_data(dataset)
        weights = agreed_fingerprint(sources, self._gather)
        spec = plan_spec(job)
        self._on_cpu = RowGather(spec.ranks_per_node, recipe.launch.timeout_s)
        self._look_at_machines(spec)
        # Before the model is built: it says whether the run can go on where the recipe says.
        self.checkpointer = RunCheckpoints(
            job, self._on_cpu, self.dataset, lambda: self.optimizer, lambda: state_tensors(
                self.model, self.optimizer, fixed=not recipe.model.lora.rank), self._log, weights)
        self._group = exchange_group(self.device, recipe.launch.timeout_s)
        spec = self._fit(job, spec)
        self._build(sources, spec)
        spec = self._plan_by(spec)
        self.timer = StepTimer(self.model.clock, self.device)
        self.parts = learning_parts(self.model)
        self.optimizer = make_optimizer(self.model, recipe.train)
        self.reads_late = takes_flags(self.optimizer)  # so that a GPU has work while a step is read
        self.progress = Progress(global_batch_size=job.global_batch_size)
        self._watch_over(spec)

    def _look_at_machines(self, spec: PlanSpec) -> None:
        """Warns where the ranks of one do not follow each other, as those of a node have to."""
        found = self._on_cpu(np.array([digest64(machine().encode())]))[:, 0]
        starts = np.flatnonzero(found[1:] != found[:-1]) + 1  # each on another one than before
        back = [rank for rank in starts.tolist() if found[rank] in found[:rank]]
        if back and spec.ranks_per_node > 1:
            self._log(f"warning: the ranks of a machine do not follow each other (rank {back[0]} "
                      f"is on that of an earlier rank, and rank {back[0] - 1} is not), so what the "
                      "ranks of a node exchange crosses machines: with srun, use "
                      "--distribution=block")

    def _open_data(self, dataset: ConversationDataset | None) -> None:
        """The data set that is given, or that of the recipe, and its rows that are trained on."""
        self.dataset = dataset if dataset is not None else build_dataset(
            self.recipe, self._log, seen=bool(self.world.ledgers))
        self.train_rows, self.validation_rows = self.dataset.split(self.recipe.data.num_validation)

    def _fit(self, job: Job, spec: PlanSpec) -> PlanSpec:
        """Decides what is recomputed, by the memory of a rank -> the spec with its limits."""
        world = self.world
        gpu, device_bytes = gpu_of(self.device)
        self._peak_flops = peak_flops(gpu)
        self.long = LongExamples(job, spec, self.dataset, self.train_rows, device_bytes, self._log,
                                 world.rank == 0)
        self.memory = RunMemory(
            self.recipe, self.dataset, self.train_rows, spec, world.world_size, device_bytes,
            self.checkpointer.kept_batch, gather=self._gather, known=self.checkpointer.memory,
            log=self._log)
        return self.memory.spec

    def _build(self, sources: Sequence[WeightSource], spec: PlanSpec) -> None:
        """The sharded model, once a small one like it was proven. sources: of its weights."""
        recipe = self.recipe
        self.attention = describe_attention(recipe.model, self.device.type, compute_dtype(
            recipe.fsdp))  # chosen before the first step; a kernel that fails is found here
        for source in sources:
            self._log(source.describe())
        prove_on_first_rank(recipe, self.dataset, self._on_cpu, self._log)
        self.model = build_model(recipe, self.device, self.memory.choice, self._on_cpu,
                                 spec.ranks_per_node, self._group, self._log)
        share_in_nodes(self.model, recipe, spec, self.world.world_size, self.device, self._log)

    def _plan_by(self, spec: PlanSpec) -> PlanSpec:
        """What plans and loads steps, of training and of validation -> the spec that they have."""
        recipe, world = self.recipe, self.world
        self._feed, spec = feed_of(self.model, self.dataset, spec, self._on_cpu, self._log)
        self.orchestrator, self._validation = (
            build_orchestrator(recipe, one, world.world_size, self.device, self._group)
            for one in (spec, replace(spec, balance=replace(spec.balance, measure_every=0))))
        self.orchestrator.refuses = self.memory.refuses
        self._pool = join_pool(recipe.data, partial(build_dataset, recipe, seen=True), self.dataset,
                               world.rank, world.world_size, self._gather)
        return spec

    def _watch_over(self, spec: PlanSpec) -> None:
        """What looks at steps: signals, the profiler, what goes wrong, answers while it trains."""
        recipe = self.recipe
        self.stop = StopSignal(self.watch and self.watch.folder_taken)
        self.profiler = StepProfiler(recipe, self.world.rank, self._log, self.memory.exhausted)
        self.incidents = Incidents(recipe, writes=self.world.rank == 0, log=self._log)
        self.samples = Samples(
            recipe, self.dataset, self.validation_rows, spec, self.device, self._group, self._log,
            lambda: self._asked > 0) if recipe.train.sample_every else None

    def train_step(self, step: Step) -> dict:
        """One optimizer step (all ranks) -> its row of metrics."""
        since, loss_sum = self._compute(step)
        self._unread = self._update(step, since, loss_sum)
        return self._read()

    @property
    def _asked(self) -> int:
        """Why this rank is to stop, or 0."""
        return self.stop.asked or self.display.stop_signal

    def _enter(self, step: Step) -> None:
        """Says which step this rank works on, or waits for."""
        if self.watch is not None:
            self.watch.enter_step(step.index, step.example_ids_of_rank)

    def _compute(self, step: Step) -> tuple[np.ndarray, torch.Tensor]:
        """Forward and backward -> (thread_times when it began to wait for the step's data, this
        rank's sums of losses)."""
        since = thread_times() - [step.wait_s, 0.0, 0.0]
        self._enter(step)
        if step.kept_balanced:
            self._log(f"step {step.index} is not measured as sampled: {step.kept_balanced}")
        self._logging_s = self.model.clock.wall_s["logging"]  # of the step before
        self.model.clock.reset()
        return since, self._accumulate(step)

    def _update(self, step: Step, since: np.ndarray, loss_sum: torch.Tensor,
                before: Reported | None = None) -> Unread:
        """Of the weights, on all ranks alike: loss, norm and targets are global."""
        clock, train = self.model.clock, self.recipe.train
        self._enter(step)
        self.incidents.media(step, self.progress.media, self.dataset.describe)
        lr = set_learning_rate(self.optimizer, step.index, train)
        clock.switch("update")
        norms = clip_gradients(self.parts, train.max_grad_norm, self.device)
        clock.switch("gather")
        reported = self.timer.send(self._send, step, loss_sum, norms, signal=self._asked,
                                   save=self.checkpointer.is_due())
        clock.switch("update")
        if step.num_global_targets and step.index not in self.progress.skip:
            if self.reads_late:
                self.optimizer.found_inf = reported.bad
                self.optimizer.step()
            elif reported.facts().finite:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.switch("data")
        return Unread(step, lr, since, before, self._logging_s, reported)

    def _read(self) -> dict:
        """What the last step was, once it is known -> its row of metrics."""
        (step, lr, since, before, logging_s, reported), self._unread = self._unread, None
        self._enter(step)
        self.model.clock.switch("gather")
        facts = reported.facts()
        measured = self.timer.measured(step, facts.measured_s, reported.marks)
        if not facts.finite:
            self.incidents.nonfinite(step, facts.losses(step)[0], float(facts.norms[0, 0]),
                                     self.progress)
        if not (facts.finite and step.num_global_targets) or step.index in self.progress.skip:
            self.progress.skipped_steps += 1
        elif step.index > max(self.progress.skip, default=-1):
            self.progress.nonfinite_in_a_row = 0
        self.progress.step = step.index + 1
        self.memory.measure(step, facts.peak_bytes[:, 0], self.model)
        trim(step.index, self.device)
        step_s, cpu_s, core_wait_s = (thread_times() - since).tolist()
        if before is not None:
            step_s = before.sent.seconds_until(reported.sent)
        self.incidents.waited(step, step_s, facts.wait_s, facts.slowest, self.dataset.name)
        return {
            "lr": lr, "step_s": step_s, "nonfinite": not facts.finite,
            "mfu": mfu(step.useful_flop, step_s, self.world.world_size, self._peak_flops),
            "waiting_s": max(step_s - step.wait_s - cpu_s, 0.0), "core_wait_s": core_wait_s,
            "logging_s": logging_s, "skipped_steps": self.progress.skipped_steps,
            **facts.row(step, step_s, list(self.parts)), "measured": measured}

    def _accumulate(self, step: Step) -> torch.Tensor:
        """Forward and backward of all microbatches -> this rank's sums of losses, (losses,)."""
        clock, weight = self.model.clock, self.recipe.train.generator_loss_weight
        counts = max(step.num_global_targets, 1), max(step.num_made_rows, 1) / weight
        loss_sum = torch.zeros(self.model.num_losses, dtype=torch.float64, device=self.device)
        clock.switch("exchange")
        for micro in step.micro:
            batch = self.orchestrator.dispatch(micro)
            clock.switch("forward")
            out = self.model(batch).reshape(-1)
            sum(one / count for one, count in zip(out, counts, strict=False)).backward()
            clock.switch("exchange")
            loss_sum += out.detach()
        return loss_sum
