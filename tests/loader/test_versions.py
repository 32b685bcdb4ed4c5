"""Libraries that are older than those that were tested are refused where they meet the loader."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import pytest
import torch.distributed as dist

from orchmllm import BalancedDataLoader
from orchmllm.loader.trainers import balance_trainer
from orchmllm.loader.versions import FLOORS, require


@pytest.fixture
def older(monkeypatch):
    from transformers import Trainer

    assert Trainer  # what it needs itself is checked while it is imported
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.1")


def test_the_installed_versions_are_fine():
    require(*(f"{name}.part" for name in FLOORS if find_spec(name)), "torch", "builtins")


@pytest.fixture
def loader():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield BalancedDataLoader(["a", "bb"], batch_size=1, length_fn=len)
    dist.destroy_process_group()


def test_accelerate_takes_the_loader_as_it_is(loader):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    for _ in range(2):  # prepare marks what it returns, and knows the mark
        assert accelerator.prepare(loader) is loader
    assert len(list(loader)) == 2


def test_an_older_accelerate_is_refused(loader, older):
    from accelerate import Accelerator

    with pytest.raises(RuntimeError, match="accelerate 1.15 and newer, this is 0.9.1"):
        Accelerator(cpu=True).prepare(loader)


@pytest.mark.parametrize("module", ["lightning.pytorch.loops.fetchers", "lightning.fabric.wrappers",
                                    "pytorch_lightning.loops", "torchdata.nodes"])
def test_an_older_library_that_iterates_is_refused(loader, older, module):
    """The module that asks for the first batch counts, so the loop runs under its name."""
    names = {"__name__": module, "loader": loader}
    with pytest.raises(RuntimeError, match=f"{module.split('.')[0]} .* and newer, this is 0.9.1"):
        exec("for batch in loader: pass", names)


def test_an_older_torchdata_loader_is_refused(older):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with pytest.raises(RuntimeError, match="torchdata 0.11 and newer"):
        BalancedDataLoader(StatefulDataLoader([1, 2], batch_size=1), length_fn=int)


def test_transformers(older):
    from transformers import Trainer

    with pytest.raises(RuntimeError, match="transformers 5.17 and newer"):
        balance_trainer(Trainer.__new__(Trainer))
