"""Libraries that are older than those that were tested are refused where they meet the loader."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import pytest

from orchmllm import BalancedDataLoader
from orchmllm.dropin.source import refuse_ahead
from orchmllm.dropin.trainers import balance_trainer
from orchmllm.dropin.versions import FLOORS, require


@pytest.fixture
def older(monkeypatch):
    from transformers import Trainer

    assert Trainer  # what it needs itself is checked while it is imported
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.1")


def test_the_installed_versions_are_fine():
    require(*(f"{name}.part" for name in FLOORS if find_spec(name)), "torch", "builtins")


def test_accelerate_lightning_and_torchdata(older):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with pytest.raises(RuntimeError, match="accelerate 1.15 and newer, this is 0.9.1"):
        BalancedDataLoader.__new__(BalancedDataLoader)._is_accelerate_prepared  # noqa: B018
    with pytest.raises(RuntimeError, match="lightning 2.6 and newer"):
        refuse_ahead("lightning.pytorch.loops.fetchers", [])
    with pytest.raises(RuntimeError, match="torchdata 0.11 and newer"):
        BalancedDataLoader(StatefulDataLoader([1, 2], batch_size=1), length_fn=int)


def test_transformers(older):
    from transformers import Trainer

    with pytest.raises(RuntimeError, match="transformers 5.17 and newer"):
        balance_trainer(Trainer.__new__(Trainer))
