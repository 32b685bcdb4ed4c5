"""A run: fetches steps, trains them, logs, validates, saves, and stops where it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from orchmllm.batch import Step
from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import gather_scalars
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler, make_sampler
from orchmllm.models.whole_flops import step_flops
from orchmllm.runtime.measured import thread_times
from orchmllm.runtime.metrics import METRICS, SAMPLES, JsonLines, as_logged, has_row, open_log
from orchmllm.runtime.profile import IN_ANSWERS, IN_VALIDATION, memory_errors
from orchmllm.runtime.resumable import describe_end
from orchmllm.runtime.run_state import MediaCount
from orchmllm.runtime.stop import FOLDER_TAKEN, Stopped
from orchmllm.sharding.fsdp import evaluating
from orchmllm.trainer.step import StepTrainer


class Trainer(StepTrainer):
    """One rank of a run; constructing it is collective."""

    _metrics: JsonLines | None = None
    _rows: list[dict] | None = None

    def loader(self) -> StepLoader:
        """The recipe's training steps that are still to come."""
        train = self.recipe.train
        sampler = make_sampler(self.dataset, self.train_rows, self.progress.global_batch_size,
                               data=self.recipe.data, per_rank=train.batch_size,
                               seed=self.recipe.run.seed)
        self.timer.restart()
        return StepLoader(
            self.dataset, sampler, self.orchestrator, num_steps=train.num_steps,
            first_step=self.progress.step, accumulation_steps=train.accumulation_steps,
            prefetch=self.recipe.data.prefetch, num_workers=self.recipe.data.num_workers,
            pool=self._pool, feed=self._feed,
            flops_of=partial(step_flops, self.recipe.model) if self._peak_flops else None)

    def run(self, rows: list[dict] | None = None) -> None:
        """Trains to the last step. A run that was finished before does nothing, or makes up for a
        validation that was cut off. rows: takes every row of metrics, which nobody else keeps: a
        row grows with the number of ranks.

        Raises Stopped after a signal, when all ranks have saved; NonFiniteError and MediaLimitError
        as the recipe says."""
        num_steps = self.recipe.train.num_steps
        self._rows = rows
        self.progress = self.checkpointer.resume() or self.progress
        owed = self._owed()
        works = bool(owed) or self.progress.step < num_steps
        with self.checkpointer.attempt(trains=works) as end:
            if self.watch is not None:
                self.watch.record = end
            if works:
                self._train(num_steps, owed)
            self._finish()
            self.progress.media.check_modalities()  # also where a launcher has started it again

    def _owed(self) -> list[Callable[[], None]]:
        """The validation before the first step, or what the logs lack after the step of the
        checkpoint, because a signal or a kill ended the run first. The same on all ranks."""
        train, step = self.recipe.train, self.progress.step
        if step == 0:
            return [self._validate]

        def is_due(every: int) -> bool:
            return step == train.num_steps or self.progress.is_due(every, train.num_steps)

        due: list[tuple[Callable[[], None], str, str]] = []
        if self.validation_rows and is_due(train.validate_every_steps):
            due.append((self._validate, METRICS, "validation_loss"))
        if self.samples is not None and is_due(train.sample_every):
            due.append((self._sample, SAMPLES, "example"))
        missing = [self.world.rank == 0 and not has_row(self.recipe.run.folder / log, step, key)
                   for _, log, key in due]
        found = gather_scalars(missing, self.device)[0] if due else ()
        return [act for (act, *_), owed in zip(due, found, strict=True) if owed]

    def _train(self, num_steps: int, owed: list[Callable[[], None]]) -> None:
        """What is `owed`, then to the last step and its checkpoint."""
        if self.world.rank == 0:
            self._metrics = open_log(self.recipe, self._log, self.world.ledgers)
        if self.watch is not None:
            self.watch.clock = self.model.clock
        self._log(self.attention)
        self.display.start(num_steps, first_step=self.progress.step)
        for act in owed:
            act()
        if self.progress.step >= num_steps:
            return
        with self.stop:
            try:
                while self.progress.step < num_steps:  # again after a rollback
                    self._train_steps()
                self.checkpointer.save_run(self.progress)
                self.checkpointer.wait()  # an error of the validation ends the process
                self._validate()
                self._sample()
            except AgreedError as e:
                self.optimizer.zero_grad(set_to_none=True)
                try:
                    if self._unread is not None:  # it counts: its update was made
                        self._tell()
                except AgreedError as earlier:  # of that step, and so the cause
                    self.checkpointer.keep(self.progress, earlier)
                    raise
                self.checkpointer.keep(self.progress, e)
                raise
            if self.recipe.balance.enabled:
                self.display.check_gain()

    def _train_steps(self) -> None:
        """To the last step, or back to a checkpoint before a step that is not finite. Where
        reads_late, the device goes forward and backward before the step before is read, so that it
        never waits for the host; after a step that something is due after, it waits."""
        for step in self.loader():
            self.long.tell(step, self.memory.choice)
            with self.profiler.around(step, self.model.clock):
                since, loss_sum = self._compute(step)
            before = None
            if self._unread is not None:
                before = self._unread.reported
                if not self._end_step():
                    return
                since = thread_times()
            with self.profiler.around(step, self.model.clock):
                self._unread = self._update(step, since, loss_sum, before)
            self.profiler.stop(step)
            if not (self.reads_late and self._nothing_due(step)) and not self._end_step():
                return

    def _nothing_due(self, step: Step) -> bool:
        """Whether no other step than the next one follows a step."""
        train, after = self.recipe.train, replace(self.progress, step=step.index + 1)
        return after.step < train.num_steps and not any(
            after.is_due(every, train.num_steps) for every in (
                train.validate_every_steps, train.sample_every,
                self.recipe.checkpoint.every_steps))

    def _end_step(self) -> bool:
        """Tells of the step that is not read yet, and does what follows it; False after a rollback.
        """
        step, row = self._tell()
        if (row["nonfinite"] and self.recipe.train.nonfinite == "rollback"
                and step.index not in self.progress.skip):
            self.optimizer.zero_grad(set_to_none=True)  # of the next step
            self.progress = self.checkpointer.roll_back(self.progress, step.index)
            return False
        self._after_step(stop=row["stop_signal"], save=row["save_due"])
        return True

    def _tell(self) -> tuple[Step, dict]:
        """Reads the step that is not read yet, logs and shows it -> it and its row."""
        step, row = self._unread.step, self._read()
        self.model.clock.switch("logging")
        self.display.step(self._emit(row))
        self.model.clock.switch("data")
        if self.on_step is not None:
            self.on_step(step, row)
        return step, row

    def _validate(self) -> None:
        """Logs the loss of the weights as they are; nothing without data.num_validation. Leaves if
        any rank is told to stop meanwhile; the next start makes up for it."""
        if not self.validation_rows:
            return
        if losses := self.validate():
            self.display.validation(self._emit({"step": self.progress.step, **losses}))
        else:
            self._leave(int(self._gather([self._asked]).max()))

    def _sample(self) -> None:
        """Logs what the weights as they are answer; nothing without train.sample_every. Leaves as
        `_validate` does."""
        if self.samples is None:
            return
        with evaluating(self.model), memory_errors(lambda _: IN_ANSWERS):
            written = self.samples.write(self.model, self.progress.step)
        if not written:
            self._leave(int(self._gather([self._asked]).max()))

    def _after_step(self, stop: int, save: bool) -> None:
        """Leaves if any rank was told to stop; saves, validates and samples where it is due."""
        if stop:
            self._leave(stop)
        due = partial(self.progress.is_due, num_steps=self.recipe.train.num_steps)
        saves = due(self.recipe.checkpoint.every_steps)
        if save or saves:
            self.checkpointer.save_run(self.progress, optional=not saves)
        if due(self.recipe.train.validate_every_steps):
            self._validate()
        if due(self.recipe.train.sample_every):
            self._sample()

    def _leave(self, stop: int) -> NoReturn:
        """Saves and ends the run. stop: why, as StopSignal.asked; the same on all ranks."""
        self.optimizer.zero_grad(set_to_none=True)  # of the next step
        if stop == FOLDER_TAKEN:
            self.checkpointer.rescue(self.progress)
        self.checkpointer.save_run(self.progress)
        self.checkpointer.wait()
        stopped = Stopped(stop, self.progress.step)
        self._finish(stopped)
        raise stopped

    def _finish(self, stopped: Stopped | None = None) -> None:
        self.display.finish(str(stopped or "finished"), describe_end(
            self.checkpointer.saved, self.recipe.run.resume, finished=stopped is None))

    def validate(self) -> dict[str, float]:
        """Over the held-out rows the mean validation_loss per target, and of a model that makes
        images validation_generator_loss; nan without any. {} where a rank is told to stop."""
        data, count = self.recipe.data, self.recipe.train.batch_size * self.world.world_size
        sampler = GlobalSampler(self.validation_rows, count, shuffle=False)
        loader = StepLoader(self.dataset, sampler, self._validation, num_steps=len(sampler),
                            accumulation_steps=min(self.recipe.train.accumulation_steps, 1),
                            prefetch=data.prefetch, num_workers=data.num_workers,
                            pool=self._pool, feed=self._feed)
        media, asked = MediaCount(), None  # of this pass alone
        total = torch.zeros(2, self.model.num_losses, dtype=torch.float64, device=self.device)
        with evaluating(self.model), memory_errors(lambda _: IN_VALIDATION):
            for step in loader:
                if asked is not None and asked.read().any():  # sent a step ago
                    return {}
                asked = self._send([self._asked])
                self.incidents.media(step, media, self.dataset.describe)
                for micro in step.micro:
                    batch = self._validation.dispatch(micro)
                    total[0] += self.model(batch)
                    self.model.clock.switch("data")
                counts = step.num_global_targets, step.num_made_rows
                total[1] += torch.tensor(counts[:self.model.num_losses], dtype=total.dtype,
                                         device=self.device) / self.world.world_size
        dist.all_reduce(total)
        return dict(zip(("validation_loss", "validation_generator_loss"),
                        (total[0] / total[1]).tolist(), strict=False))

    def _emit(self, row: dict) -> dict:
        if self._metrics is not None:
            self._metrics.write(as_logged(row))
        if self._rows is not None:
            self._rows.append(row)
        return row

    def close(self) -> None:
        for part in (self.display, self.profiler, self.incidents, self._metrics):
            if part is not None:
                part.close()
