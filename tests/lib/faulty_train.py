"""A training run on synthetic data with one fault, on real launched ranks; run by test_errors.py:
python -m tests.lib.faulty_train FOLDER FAULT [NUM_RANKS] [MAX_RESTARTS]."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from orchmllm import launch, train
from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import CheckpointConfig, FsdpConfig, LaunchConfig
from orchmllm.data.lengths import MeasuredExample
from orchmllm.runtime.local_ranks import run_local
from orchmllm.runtime.run_lock import lock_folder
from orchmllm.tools.doctor.synthetic import VOCAB
from tests.lib.synthetic import SyntheticDataset, recipe

ODD, AT, BATCH = 1, 3, 2  # the rank and the step of the fault; examples a rank


class Broken(SyntheticDataset):
    """fault(i) is called when example data is loaded, from the prefetch thread."""

    fault = None
    tokenizer = SimpleNamespace(end_id=1, decode=str)

    @property
    def reader(self):
        """With what answers ask of it: the row of an example, learnt behind its last medium."""
        found = super().reader
        found.plan = lambda _, rows: [self._row(i) for i in rows]
        return found

    def _row(self, i: int) -> MeasuredExample:
        ids, labels = (x.numpy() for x in self._text(i))
        inside = np.cumsum((ids >= VOCAB)[::-1])[::-1] > 0
        return MeasuredExample(self.layout(i), ids, (labels != IGNORE_INDEX) & ~inside, [], None)

    def load(self, i, **how):
        if self.fault is not None and how.get("segments") != ():  # that is what its layout asks for
            self.fault()
        return super().load(i, **how)


def run_recipe(folder: str, fault: str):
    memory = FsdpConfig(activation_checkpointing="auto", memory_gb=0.002)
    base = recipe(balance=BalanceConfig(ranks_per_node=2),
                  fsdp=memory if "memory" in fault else FsdpConfig())
    return replace(
        base, run=replace(base.run, dir=folder), data=replace(
            base.data, prefetch=1, num_validation=4 * ("held out" in fault)),
        launch=LaunchConfig(timeout_s=600, stall_timeout_s=500),
        checkpoint=CheckpointConfig(
            every_steps={"folder": 0, "memory": 1}.get(fault.partition(" ")[0], -1),
            asynchronous="answers" not in fault),  # else the rank may end before the save does
        train=replace(base.train, num_steps=8, batch_size=BATCH,
                      validate_every_steps="validation" in fault,
                      sample_every="answers" in fault))


def after_step(fault: str, odd: bool, step) -> None:
    """Makes the odd rank fail after step AT."""
    if "stall" in fault:
        time.sleep(0.3)  # so that the run lasts until the fault
    if odd and step.index == AT and fault == "raise":
        raise KeyError("user hook broke")
    if odd and step.index == AT and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def lose_folder(fault: str, folder: Path, taken: threading.Event) -> None:
    """Returns when the thread that renews the lock has noticed."""
    lock = folder / "run.lock"
    if fault == "folder deleted":
        shutil.rmtree(folder)
        while not lock.exists():
            time.sleep(0.01)
    else:
        # In one step: where the file is gone for a moment, the thread makes it again.
        other = folder / "other.lock"
        other.write_text('{"host": "another", "pid": 7}')
        other.replace(lock)
        assert taken.wait(60)


def install(trainer, fault: str) -> None:
    """Makes this rank fail in the model at step AT."""
    if fault in ("raise in backward", "stall in vision"):
        def late(block, args, out) -> None:
            if trainer.progress.step == AT:
                if fault == "stall in vision":
                    time.sleep(600)
                out.register_hook(fail)

        trainer.model.blocks()["vision"][1].register_forward_hook(late)

    if fault == "memory in the update":
        trainer.optimizer.register_step_pre_hook(lambda *_: exhaust(trainer))
    if "held out" in fault:
        trainer.model.blocks()["llm"][1].register_forward_pre_hook(
            lambda *_: None if torch.is_grad_enabled() else exhaust(trainer))
    if fault == "memory":
        trainer.model.blocks()["llm"][1].register_forward_pre_hook(lambda *_: exhaust(trainer))
    if fault == "stall after the forward":
        trainer.model.register_forward_hook(
            lambda *_: time.sleep(600 if trainer.progress.step == AT else 0))


def exhaust(trainer) -> None:
    if trainer.progress.step == AT:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def fail(_grad):
    raise ArithmeticError("hook broke in backward")


def main(folder: str, fault: str, num_ranks: int = 3) -> int:
    world = launch.current_world()
    if world is None:
        return run_local("tests.lib.faulty_train", [folder, fault], num_ranks, cpu_only=True,
                         num_threads=1)
    dataset = Broken()
    if world.rank == ODD and fault in ("raise in data", "stall in data"):
        calls = []

        def strike() -> None:
            calls.append(1)
            if fault == "stall in data" and len(calls) > AT * BATCH:
                time.sleep(600)
            elif fault == "raise in data":
                raise LookupError("no such thing")

        dataset.fault = strike

    def work(watch) -> None:
        from orchmllm.trainer import Trainer

        def on_step(step, row: dict) -> None:
            after_step(fault, odd, step)
            if "stall" in fault and step.index == AT - 2:  # a slow start of a rank is no stall
                watch._stall_timeout_s = 5
            if "folder" in fault and step.index == AT and world.rank == 0:
                lose_folder(fault, Path(folder), watch.folder_taken)

        odd = world.rank == ODD
        trainer = Trainer(run_recipe(folder, fault), world, dataset=dataset, watch=watch,
                          on_step=on_step)
        if odd:
            install(trainer, fault)
        try:
            trainer.run()
        finally:
            Path(folder, f"ended_rank{world.rank}").write_text(str(time.time()))
            trainer.close()

    train.lock_folder = partial(lock_folder, renew_s=0.05)
    return train.run_rank(run_recipe(folder, fault), world, work,
                          Path(folder) if "folder" in fault else None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
