"""transformers' Trainer is killed within an epoch and goes on: the same losses, bit by bit. What it
cannot do right is refused before the first step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler, IterableDataset

from orchmllm import BalancedDataLoader, balance_trainer
from tests.lib.clients import (
    Examples,
    as_torchrun,
    collate,
    forget_accelerate,
    stop_at,
    tiny,
)
from tests.lib.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.dist


def arguments(folder: str, **how):
    from transformers import TrainingArguments

    return TrainingArguments(**{**dict(
        output_dir=folder, max_steps=9, per_device_train_batch_size=2, logging_steps=1,
        save_strategy="steps", save_steps=1, learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True), **how})


def losses(world, folder: str, how: str, workers: int, kill_at: int | None) -> list[float]:
    """how: sampler or indices, a loader of the user's; or shards, the Trainer's own."""
    from transformers import Trainer, TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    data = Examples(24)  # 6 steps an epoch

    class Mine(Trainer):
        def get_train_dataloader(self) -> BalancedDataLoader:
            sampler = DistributedSampler(data, seed=3) if how == "sampler" else None
            return BalancedDataLoader(
                data, 2, shuffle=sampler is None, sampler=sampler, collate_fn=collate,
                lengths=data.lengths, num_workers=workers, policy="greedy")

    with as_torchrun(world):
        resume = any(Path(folder).glob("checkpoint-*"))
        trainer = balance_trainer((Trainer if how == "shards" else Mine)(
            model=tiny(), train_dataset=data, data_collator=collate, callbacks=[Kill()],
            args=arguments(folder, dataloader_num_workers=workers)),
            lengths=data.lengths, policy="greedy")
        trainer.train(resume_from_checkpoint=resume)
    forget_accelerate()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def resumed_and_whole(world, folder: str, *how) -> list[list[float]]:
    return [losses(world, f"{folder}/{name}", *how, None) for name in ("killed", "whole")]


RUNS = [("shards", 0), ("sampler", 2), ("indices", 0), ("shards", 2), ("sampler", 0),
        ("indices", 2)]


@pytest.mark.parametrize("how, workers", [
    pytest.param(*run, marks=[pytest.mark.slow] * (i > 0)) for i, run in enumerate(RUNS)])
def test_a_killed_trainer_goes_on_bit_equal(tmp_path, how, workers):
    """Killed in the second epoch, a step after its last checkpoint."""
    with pytest.raises(RankFailure):
        run_ranks(losses, 2, str(tmp_path / "killed"), how, workers, 8)
    steps = [int(path.name.split("-")[1]) for path in (tmp_path / "killed").iterdir()]
    assert max(steps) == 7
    resumed, whole = run_ranks(resumed_and_whole, 2, str(tmp_path), how, workers)[0]
    assert len(whole) == 9 and len(set(whole)) == 9
    assert resumed == whole


def refusals(world, folder: str) -> list[str]:
    from transformers import Trainer

    class Unbalanced(Trainer):
        """As people hand the Trainer a loader, without balance_trainer."""

        def get_train_dataloader(self) -> BalancedDataLoader:
            return BalancedDataLoader(
                self.train_dataset, self.args.per_device_train_batch_size, collate_fn=collate,
                shuffle=True, lengths=self.train_dataset.lengths, policy="greedy")

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    data, out = Examples(16), []

    def make(kind=Trainer, train_dataset=data, **how):
        return kind(model=tiny(), train_dataset=train_dataset, data_collator=collate,
                    args=arguments(folder, **how))

    with as_torchrun(world):
        for trainer, options in (
                (make(average_tokens_across_devices=False), {}),
                (make(train_dataset=Stream()), {}), (make(), dict(loss="sum"))):
            try:
                balance_trainer(trainer, **options).train()
            except ValueError as error:
                out.append(str(error))
        trainer = make(Unbalanced)
        stop_at(trainer, 1)
        trainer.train()
        try:
            make(Unbalanced).train(resume_from_checkpoint=True)
        except RuntimeError as error:
            out.append(str(error))
        trainer = balance_trainer(make(Unbalanced))
        trainer.train(resume_from_checkpoint=True)  # a checkpoint from before
        out.append(str(trainer.state.global_step))
        try:
            balance_trainer(make(Unbalanced, per_device_train_batch_size=4)).train(
                resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
        except ValueError as error:
            out.append(str(error))
    return out


def test_what_would_be_wrong_is_refused(tmp_path):
    ranks = run_ranks(refusals, 2, str(tmp_path))
    for text, part in zip(ranks[0], (
            "set it to True", '"dispatch_batches": False', "loss is 'sum'",
            "balance_trainer", "9", "batch_size was 2"),
            strict=True):
        assert part in text, (text, part)
