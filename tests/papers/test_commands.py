"""`orchmllm papers plan`, `orchmllm profile` and the rows of `orchmllm papers reproduce`."""

from __future__ import annotations

import json
import re
import time
from argparse import Namespace
from functools import partial
from itertools import islice

import pytest
import torch

from orchmllm.config.recipe import load_recipe
from orchmllm.papers import disttrain, omnibal
from orchmllm.papers.advice import ratio, rows
from orchmllm.papers.fact import Printed
from orchmllm.papers.plan import main as plan
from orchmllm.papers.reproduce import main as reproduce
from orchmllm.tools.predict import whole_runner
from orchmllm.tools.predict.profile_command import main as profile
from orchmllm.tools.predict.profile_command import measure
from tests.lib.drawn import with_processor
from tests.papers.modules import plan_bytes


@pytest.fixture
def recipe(tmp_path) -> list[str]:
    path = tmp_path / "r.yaml"
    path.write_text(f"model: {{config: {with_processor()}}}\ndata: {{path: none}}\n"
                    "train: {batch_size: 4}\n", encoding="utf-8")
    return [str(path), "--mix", "natural"]


def test_plan_units_split_and_recompute(recipe, capsys):
    assert plan(["units", *recipe, "--ranks", "16", "--network", "100"]) == 0
    out = capsys.readouterr().out
    assert "16 GPUs, 64 samples" in out and re.search(r"advice: (colocated|units)", out)
    assert len(re.findall(r"^ +[\d.]+x +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)) == 4  # the sweep
    assert plan(["units", *recipe, "--ranks", "16", "train.global_batch_size=32"]) == 0
    assert "16 GPUs, 32 samples" in capsys.readouterr().out
    assert plan(["split", *recipe, "--stages", "3"]) == 0
    out = capsys.readouterr().out
    times = {m: float(t) for m, t in re.findall(r"^(\w+).*iteration ([\d.]+)", out, re.M)}
    assert set(times) == {"even", "parameters", "profile", "exact", "search"}
    assert times["search"] == min(times.values())
    assert plan(["recompute", *recipe, "--free-gb", "1000"]) == 0
    assert "llm        2 of 2 layers" in capsys.readouterr().out
    assert plan(["recompute", *recipe, "--free-gb", "0"]) == 0
    assert "llm        0 of 2 layers" in capsys.readouterr().out


def test_plan_errors(recipe, capsys):
    for command, message in (
            (["split", *recipe, "--stages", "99"], "num_stages 99 must be 1 to 6"),
            (["units", *recipe, "--gpu-gb", "1e-5"], "neither placement fits"),
            (["units", *recipe, "--gpu-gb", "inf"], "--gpu-gb inf: must be a number of GB"),
            (["recompute", *recipe, "--free-gb", "nan"], "--free-gb nan: must be a number of GB"),
            (["recompute", *recipe, "--free-gb", "-5"], "--free-gb -5: must be a number of GB")):
        assert plan(command) == 2
        assert message in capsys.readouterr().err
    for command, message in (
            (["units", *recipe, "--ranks", "0"], "--ranks: 0: must be at least 1"),
            (["units", *recipe, "--global-batch", "-1"], "--global-batch: -1"),
            (["split", *recipe, "--ranks", "8"], "unrecognized option --ranks"),
            (["layers", *recipe], "invalid choice: 'layers'")):
        with pytest.raises(SystemExit) as stop:
            plan(command)
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_profile_measures_and_plan_reads_it(recipe, tmp_path, capsys):
    out = tmp_path / "p.json"
    assert profile([recipe[0], "--out", str(out), "--rows", "16", "--repeat", "2"]) == 0
    table = json.loads(out.read_text(encoding="utf-8"))
    assert set(table) == {"vision", "audio", "llm"}
    if not torch.cuda.is_available():
        assert profile([recipe[0], "--device", "cuda:3"]) == 2
        assert "--device cuda:3: torch" in capsys.readouterr().err
    for t in table.values():
        assert t["rows"] == [16, 32, 64, 128] and all(ms > 0 for ms in t["ms"])
    capsys.readouterr()
    table["llm"]["ms"] = [1e3 * ms for ms in table["llm"]["ms"]]  # an LLM that takes all the time
    out.write_text(json.dumps(table), encoding="utf-8")
    assert plan(["units", *recipe, "--profile", str(out), "--ranks", "8"]) == 0
    gpus = dict(re.findall(r"^    (\w+) +(\d+) GPUs", capsys.readouterr().out, re.M))
    assert int(gpus["llm"]) >= 4
    for wrong in ("[]", '{"lm": {"rows": [1, 2], "ms": [1, 2]}}'):
        out.write_text(wrong, encoding="utf-8")
        assert plan(["units", *recipe, "--profile", str(out)]) == 2
        assert f"--profile {out}: not what `orchmllm profile` writes" in capsys.readouterr().err


def test_profile_on_a_gpu_measures_what_training_has(recipe, monkeypatch):
    """Sizes of a rank's batch, timed behind work that fills the queue: torch.cuda is a stand-in."""
    did, measured = [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record, self.synchronize = (partial(did.append, n) for n in ("record", "wait"))

        def elapsed_time(self, end: object) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append(cycles))
    clock = whole_runner.Clock(torch.device("cuda", 0))
    assert clock.best(lambda: time.sleep(0.01), 2) == 1e-3
    first, *fills = did[::4]
    assert first == 0 and len(fills) == 2 and all(n >= 0.01 * 1.5e9 for n in fills)
    assert [did[k:k + 3] for k in (1, 5, 9)] == [["record", "record", "wait"]] * 3

    def timed_phases(recipe, length, device, dtype, chunk_rows):
        assert chunk_rows and dtype == torch.bfloat16
        yield "llm", length, lambda count, repeat: measured.append(length * count) or 1.0

    monkeypatch.setattr(whole_runner, "timed_phases", timed_phases)
    [(phase, found)] = measure(load_recipe(recipe[0]), Namespace(
        device="cuda", rows=None, repeat=1))
    assert found["rows"] == measured == [4096, 8192, 16384, 32768, 65536]


@pytest.mark.parametrize("gpus, batch", [(1296, 1920), (112, 240)])
def test_paper_sized_plans_fit_and_beat_the_baselines(gpus, batch):
    profiles = disttrain.disttrain_profiles("72B")
    made = disttrain.plan("72B", gpus, batch)
    choice = [(u.tp, u.dp, u.pp) for u in made.units.values()]
    held = plan_bytes(profiles, made.units["llm"].dp, batch, choice)
    assert max(held) <= disttrain.ROOM and made.gpus <= gpus
    for method in ("ratio", "megatron"):
        other = disttrain.plan("72B", gpus, batch, method=method, llm_pp=10)
        assert other.iteration_ms > made.iteration_ms
    assert made.simulated_ms <= made.iteration_ms


def test_few_combinations_are_tried_at_1296_gpus(monkeypatch):
    """The operation count behind the planning time: DPs that are opened at all, of 32."""
    from orchmllm.papers.units import Problem

    opened, original = [], Problem._of_dp
    monkeypatch.setattr(Problem, "_of_dp", lambda self, dp, *a: opened.append(dp) or original(
        self, dp, *a))
    disttrain.plan("72B", 1296, 1920)
    assert len(opened) <= 16


def test_verdict_follows_the_link():
    profiles = disttrain.disttrain_profiles("72B")
    found = [ratio(rows(profiles, num_gpus=1296, global_batch=2592, gpu_bytes=disttrain.ROOM,
                        hardware=disttrain.replace(disttrain.A800, network_bandwidth=b)))
             for b in (0.5e9, 5e9, 50e9)]
    assert found[0] < 1 < found[2]  # slow links: units; fast ones: colocated


def test_reordering_beside_figure_18():
    found = disttrain.reordering(128, 8, 3, seeds=2)
    assert found["random"] > found["descending, equal counts"] > found["+ Algorithm 3 repaired"]
    assert found["+ Algorithm 3 repaired"] >= found["+ search"]
    assert found["pooled slots, longest first"] < min(1.05, found["pooled slots, random"])


def test_table_8_unfitted_and_fitted():
    table = omnibal.table_8(Printed("omnibal")).items()
    off = [omnibal.deviation(*names, paper, 1.0)[0] for names, paper in table]
    assert off == [1, 4, 9, 11, 24, 4, 2, 6]  # what one ratio a row, fitted, would hide
    fitted = [min(omnibal.deviation(*names, paper, r / 50)[0] for r in range(30, 140))
              for names, paper in table]
    assert max(fitted) <= 2 and fitted[5:] == [0, 0, 0]


def test_table_3_on_the_synthetic_mix():
    rows = islice(omnibal.grouping_lines(Printed("omnibal"), 60_000), 13)
    found = {(row.what, row.case): row.ours for row in rows}
    assert [found[what, "baseline"] for what in omnibal.RATIOS] == pytest.approx(
        (.31, .34, .30), abs=.03)
    assert found["pad", "ISF"] == 0 and found["dist ViT", "ISF"] <= .07
    assert found["dist LLM", "ISF"] <= .22


def test_reproduce_one_table(capsys):
    assert reproduce(["omnibal", "--samples", "3000", "--table", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("Table 8 |") == 10 and "Table 3 |" not in out and "fitted to this row" in out
    assert reproduce(["omnibal", "--samples", "3000", "--table", "99"]) == 2
    assert "no such table" in capsys.readouterr().err
    for command, message in (
            (["omnibal", "--table", "3", "--figure", "4"], "not allowed with argument --table"),
            (["mmscale", "--ranks", "8"], "unrecognized option --ranks"),
            (["compare", "--table", "3"], "unrecognized option --table"),
            (["compare", "--ranks", "0"], "--ranks: 0: must be at least 1")):
        with pytest.raises(SystemExit) as stop:
            reproduce(command)
        assert stop.value.code == 2 and message in capsys.readouterr().err
