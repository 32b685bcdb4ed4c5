"""What programs around a loop tell the loader of epochs, hand on of its state, and do within a
step."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from orchmllm import BalancedDataLoader
from orchmllm.comm.agree import RemoteError
from tests.lib.clients import as_torchrun
from tests.lib.dropin import Stream, Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
STEPS = 6  # an epoch of Texts(24)


def told(world) -> None:
    def make(**how) -> BalancedDataLoader:
        return loader_of(Texts(24), 4, shuffle=True, collate_fn=collate, lengths=length_of, **how)

    loader = make()
    for k, _ in enumerate(loader):
        if k + 1 == STEPS:  # as trainers that count batches do, and save
            state = loader.state_dict()
    middle = {**state, "step": 2}
    for at, epoch, goes_on in ((state, 1, 1), (state, 0, 0), (middle, 3, 0), (None, 2, 2)):
        loader = make()
        if at is not None:
            loader.load_state_dict(at)
        loader.sampler.set_epoch(epoch)
        assert loader.epoch == goes_on, (at, epoch)
    heard = Listening()
    next(iter(loader_of(Stream(0, 8), 4, collate_fn=collate, length_fn=token_count)))
    heard.check("drew examples of the same lengths", False)  # there is one rank
    first = [b["ids"].tolist() for b in loader]
    loader.sampler.set_epoch(0)  # as a trainer that counts from 0 after a resume
    assert loader.epoch == 3
    assert first != [b["ids"].tolist() for b in make()]


def test_an_epoch_that_is_told_to_the_sampler_is_the_loaders_where_one_begins():
    run_ranks(told, 1)


def state_of_rank_0(world) -> list[int]:
    """As Lightning's checkpoints hold: of a sampler it is the same on all ranks."""
    data = Texts(24)
    def make() -> BalancedDataLoader:
        return loader_of(data, 4, sampler=DistributedSampler(data, shuffle=False),
                         collate_fn=collate, lengths=length_of)

    loader = make()
    next(iter(loader))
    states = [None] * world.world_size
    torch.distributed.all_gather_object(states, loader.state_dict())
    loader = make()
    loader.load_state_dict(states[0])
    return [i for batch in loader for i in batch["ids"].tolist()]


def test_the_state_of_a_sampler_is_that_of_every_rank():
    assert sorted(sum(run_ranks(state_of_rank_0, 2), [])) == list(range(8, 24))


class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("orchmllm.loader").addHandler(self)

    def emit(self, record) -> None:
        self.said.append(record.getMessage())

    def check(self, text: str, is_said: bool) -> None:
        """Whether it was said, once, since the check before."""
        assert sum(text in x for x in self.said) == is_said, self.said
        self.said.clear()


def left_and_copied(world) -> None:
    from accelerate import Accelerator

    heard, accelerator = Listening(), Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(loader_of(
        Texts(24), 2, collate_fn=collate, lengths=length_of, accumulation_steps=2))
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="goes on accumulating after the last batch of step 0"):
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(torch.ones(1, 1)).sum()
                    loader.scale_mean(loss, batch["labels"], shifted=False, divided_by=2)
                if loader.step.step == 1:
                    break
    heard.check("left epoch 0 after batch 1 of the 2 of step 1", world.rank == 0)
    for first, copies in ((0, True), (8 * world.rank, False)):
        next(iter(loader_of(Stream(first, 8), 4, collate_fn=collate, length_fn=token_count)))
        heard.check("drew examples of the same lengths", copies and world.rank == 0)
    with pytest.raises(RemoteError, match="yielded a dict: .* single examples needs a batch_size"):
        next(iter(loader_of(Stream(0, 8), None, collate_fn=collate, length_fn=token_count)))
    loader = loader_of(Texts(24), 2, collate_fn=collate, lengths=length_of,
                       num_targets=lambda batch: batch["labels"])
    with pytest.raises(RemoteError, match="returned a Tensor of shape .*: return how many"):
        next(iter(loader))
    loader = loader_of(Texts(24), 2, collate_fn=collate, lengths=length_of,
                       num_targets=lambda batch: (batch["labels"] != -100).sum().reshape(1))
    next(iter(loader))  # which is one number, too
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"keep loader.state_dict\(\)"):
            make(loader)


def test_what_a_loop_or_a_stream_does_with_steps_is_told():
    run_ranks(left_and_copied, 2)


def lightnings(world, folder: Path) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(L.LightningModule):
        def __init__(self, accumulation_steps: int) -> None:
            super().__init__()
            self.part, self.epochs = torch.nn.Linear(1, 1), {}
            self.accumulation_steps = accumulation_steps

        def train_dataloader(self) -> BalancedDataLoader:
            self.loader = loader_of(
                Texts(24), 4, shuffle=True, collate_fn=collate, lengths=length_of,
                accumulation_steps=self.accumulation_steps)
            return self.loader

        def training_step(self, batch: dict, index: int) -> torch.Tensor:
            self.epochs.setdefault(self.current_epoch, []).append(
                sorted(self.loader.step.example_ids))
            return self.part(torch.ones(1, 1)).sum()

        def validation_step(self, batch: dict, index: int) -> None:
            self.epochs.setdefault("validation", []).append(index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer_of(**how) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu", devices=1, logger=False, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False,
            plugins=[TorchElasticEnvironment()], **how)

    def fitted(epochs: int, resumed: Path | None = None, reload: int = 0, planned: int = 1,
               **saves) -> dict:
        module = Module(planned)
        trainer = trainer_of(
            max_epochs=epochs, enable_checkpointing=bool(saves),
            reload_dataloaders_every_n_epochs=reload,
            callbacks=[ModelCheckpoint(folder, **saves)] if saves else [])
        trainer.fit(module, ckpt_path=resumed, weights_only=False)
        return module.epochs

    with as_torchrun(world):
        whole = fitted(3)
        assert whole == fitted(3, reload=1) and whole[0] != whole[1]
        for name, saves in (("epoch", {}), ("step", {"every_n_train_steps": STEPS})):
            start = fitted(1, filename=name, **saves)
            assert start | fitted(3, folder / f"{name}.ckpt") == whole, name
        with pytest.raises(ValueError, match=r"accumulate_grad_batches=1\), but the loader plans "
                                             "steps of 2 batches"):
            fitted(1, planned=2)
        module = Module(2)  # a validation makes no steps
        trainer_of(enable_checkpointing=False).validate(module, module.train_dataloader())
        assert len(module.epochs["validation"]) == STEPS


@pytest.mark.slow
def test_lightning_resumes_at_the_end_of_an_epoch_with_the_next_one(tmp_path):
    run_ranks(lightnings, 1, tmp_path)
