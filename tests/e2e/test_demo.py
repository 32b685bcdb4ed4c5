"""The comparison that `make demo` ends with: what it writes and, slow, what it must show."""

from __future__ import annotations

import json
import math

import pytest

from orchmllm.tools import compare as command
from orchmllm.tools.compare import largest_difference
from orchmllm.tools.init.demo import make_corpus
from orchmllm.tools.report.comparison import comparison_table, summarize
from tests.lib import launched
from tests.lib.commands import ROOT, TINY, demo_of, python
from tests.lib.synthetic import recipe

KEYS = {"loss_off", "loss_on", "critical_path_ratio", "predicted_ratio", "on_over_mean",
        "wall_ratio", "validation_loss_first", "validation_loss_last"}


@pytest.mark.dist
def test_comparison_of_a_tiny_run(tmp_path, demo_corpus, monkeypatch, capsys):
    """In this process and ranks that it forks; with the launcher where it is slow."""
    monkeypatch.setattr(command, "run_local", launched.run_local)
    monkeypatch.chdir(ROOT)
    assert command.main([
        "recipes/demo.yaml", *demo_of(demo_corpus), f"run.dir={tmp_path / 'run'}",
        *TINY, "data.num_validation=4",
        "train.num_steps=3", "train.warmup_steps=1"]) == 0
    result = json.loads((tmp_path / "run" / "comparison.json").read_text())
    stdout = capsys.readouterr().out
    assert result.keys() >= KEYS
    assert len(result["loss_off"]) == len(result["loss_on"]) == 3
    assert result["loss_on"] == pytest.approx(result["loss_off"], rel=1e-5)
    assert all(result[key] > 0 for key in KEYS - {"loss_off", "loss_on"})
    assert result["predicted_ratio"] > 1
    assert len(result["wall_s"]["on"]) == 3
    assert "critical path, off / on" in stdout


def test_ranks_that_cannot_be_are_refused_before_any_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_local", None)
    assert command.main([str(ROOT / "recipes" / "demo.yaml"),
                         f"run.dir={tmp_path / 'run'}", "fsdp.shard_size=3"]) == 2
    assert "fsdp.shard_size is 3, which does not divide the 4 ranks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_difference_of_losses_is_found():
    assert largest_difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert largest_difference([2.0, 1.0], [2.0, 1.1]) == pytest.approx(0.1 / 1.1)
    assert largest_difference([2.0, 1.0], [2.0, math.nan]) == math.inf
    with pytest.raises(ValueError):
        largest_difference([2.0], [2.0, 1.0])


def test_a_comparison_without_rows_to_validate_on_tells_of_none():
    phase = dict(imbalance_before=1.5, imbalance_after=1.0, mean_cost_kflop=1.0, moved_bytes=0)
    step = {"loss": 2.0, "phases": {"llm": phase}, "cpu_s": {"llm": [2.0, 1.0], "exchange": [0, 0]},
            "wall_s": 1.0}
    result = summarize({"off": [step], "on": [step]})
    json.dumps(result, allow_nan=False)
    said = comparison_table(result | {"loss_difference": 0.0, "vocab_size": 9}, recipe())
    assert "validation" not in said and "nan" not in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_the_demo_shows_what_it_promises(tmp_path):
    make_corpus(tmp_path / "data")
    out = python("-m", "orchmllm", "compare", "recipes/demo.yaml",
                 f"data.path={tmp_path / 'data'}", f"model.config={tmp_path / 'data' / 'model'}",
                 f"run.dir={tmp_path / 'run'}")
    print(out.stdout, out.stderr)
    assert out.returncode == 0, out.stderr
    result = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert result["validation_loss_first"] == pytest.approx(
        math.log(result["vocab_size"]), rel=0.05)
    assert result["validation_loss_last"] <= 0.8 * result["validation_loss_first"]
    assert len(result["loss_on"]) == result["num_steps"] == 20
    assert largest_difference(result["loss_off"], result["loss_on"]) <= 1e-5
    assert result["num_ranks"] == 4
    assert result["critical_path_ratio"] >= 1.2
    assert result["critical_path_ratio"] >= 0.9 * result["predicted_ratio"]
    assert result["on_over_mean"] <= 1.15
