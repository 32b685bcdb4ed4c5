"""What a plain install lacks is named before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from orchmllm.data.formats import find
from orchmllm.train import main as train
from tests.lib.drawn import with_processor

OPTIONAL = ("datasets", "pyarrow")


@pytest.fixture
def plain(monkeypatch):
    """No package of an extra can be found."""
    there = importlib.util.find_spec
    monkeypatch.setattr(find, "find_spec", lambda name: None if name in OPTIONAL else there(name))


@pytest.mark.parametrize("name, missing", [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow")])
def test_data_that_need_an_extra_are_refused_before_ranks_start(plain, tmp_path, capsys, name,
                                                                missing):
    (tmp_path / name).write_bytes(b"PAR1")
    assert train(["recipes/demo.yaml", f"data.path={tmp_path / name}",
                  f"model.config={with_processor()}",
                  f"run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert f"{name}: reading it needs {missing}: pip install '.[parquet]'" in said
    assert not (tmp_path / "run").exists()
