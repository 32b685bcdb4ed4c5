"""scripts/bench_gpu.py at a tiny size: what its report has to satisfy whatever the machine."""

from __future__ import annotations

import json
import platform
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.whole_flops import part_counts, phase_work
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.step import plan_step
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.step_time import rank_seconds, work_of
from orchmllm.tools.predict.workload import sample_layout
from scripts import bench_gpu as script
from scripts.gpu_parts import fit
from tests.lib.commands import ROOT
from tests.lib.recipes import small_spec

PHASES = ("vision", "audio", "llm")
ARGS = ["--device", "cpu", "--ranks", "3", "--batch-size", "4", "--repeat", "1", "--chunk-rows",
        "32"]

pytestmark = pytest.mark.slow  # one run of the benchmark takes 30 s


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a run wrote."""
    path = tmp_path_factory.mktemp("bench") / "new"
    script.main([*ARGS, "--json", str(path / "out.json"), "--out", str(path / "measured.json")])
    return path


@pytest.fixture(scope="module")
def report(folder):
    return json.loads((folder / "out.json").read_text())


def test_figures_are_consistent(report):
    assert set(report["mixes"]) == {"natural", "omni"}
    for mix, found in report["mixes"].items():
        assert found["none_over_balanced"] == pytest.approx(
            found["step_s"]["none"] / found["step_s"]["balanced"])
        assert found["balanced_over_mean"] >= 1
        for phase, figures in found["phases"].items():
            none, balanced = figures["none"], figures["balanced"]
            assert balanced["predicted_max_cost"] <= none["predicted_max_cost"], (mix, phase)
            for scheme in (none, balanced):
                assert scheme["max_s"] >= scheme["mean_s"] > 0 and scheme["max_over_mean"] >= 1
            assert figures["flop_per_s"] > 0 and figures["mfu"] is None
        for scheme, step in found["step_s"].items():
            phases = sum(p[scheme]["max_s"] for p in found["phases"].values())
            assert step == pytest.approx(phases)
    assert sum(f["phases"]["vision"]["balanced"]["predicted_max_cost"]
               < f["phases"]["vision"]["none"]["predicted_max_cost"]
               for f in report["mixes"].values()), "balancing changed nothing"


def test_every_rank_was_measured(report, tmp_path):
    """That has something of a phase: the others take no time for it."""
    settings, args = report["settings"], script.parse(ARGS)
    plans = script.plans_of(args, script.opened(args.model, tmp_path))
    for phase in PHASES:
        runs = report["ranks"][phase]
        assert len(runs) == 2 * settings["batches"] * 2
        for (mix, batch, scheme), plan in plans.items():
            assert [seconds > 0 for seconds in runs[f"{mix}/{batch}/{scheme}"]] == [
                len(script.rank_work(plan, phase, rank).lengths.positions) > 0
                for rank in range(settings["ranks"])]
        fit = report["fit"][phase]
        assert 0 <= fit["error_p50"] <= fit["error_p95"] < np.inf
        assert fit["layer"]["alpha_ns"] > 0


def test_the_defaults_for_a_gpu_are_what_the_docs_say(monkeypatch):
    """Their FLOP, counted from the batches that are run: of all blocks one is."""
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    args = script.parse([])
    model, flop = MODELS[args.model], 0.0
    plans = script.plans_of(args, model).values()
    for phase in PHASES:
        layers = len(part_counts(model)[phase].blocks)
        for work in (script.rank_work(plan, phase, r) for plan in plans for r in range(args.ranks)):
            blocks = 3 * phase_work(phase, model, work.lengths, "full").recompute.sum()
            flop += args.repeat * (work.useful_flop(model) - (1 - 1 / layers) * blocks)
    assert f"{flop / 1e15:.0f} PFLOP" in (ROOT / "docs" / "gpu.md").read_text()
    assert f"{flop / 1e15:.0f} PFLOP, half a minute at 35%" in script.__doc__
    assert 20 < flop / (0.35 * 989e12) < 45  # seconds


def test_memory_is_what_the_model_says(report):
    plain, chunked = report["loss"]
    assert (plain["chunk_rows"], chunked["chunk_rows"]) == (0, 32)
    assert plain["peak_bytes"] >= 4 * chunked["peak_bytes"]
    for entry in report["loss"]:
        assert entry["predicted_bytes"] == pytest.approx(entry["peak_bytes"], rel=0.15)


def test_costs_are_found_from_times():
    rng = np.random.default_rng(0)
    batches = [rng.integers(10, 3000, rng.integers(5, 40)) for _ in range(20)]
    sums, squares = (np.array([(x.astype(float)**k).sum() for x in batches]) for k in (1, 2))
    layer = fit(batches, 1e-4 + 2e-6 * sums + 3e-10 * squares)
    rest = fit(batches, 4e-3 + 7e-6 * sums, terms=2)
    assert [layer.constant, layer.alpha, layer.beta] == pytest.approx([1e-4, 2e-6, 3e-10])
    assert [rest.constant, rest.alpha, rest.beta] == pytest.approx([4e-3, 7e-6, 0])
    assert layer.seconds(batches) == pytest.approx(1e-4 + 2e-6 * sums + 3e-10 * squares)
    with pytest.raises(ValueError, match="3 or more positive times"):
        fit(batches[:2], sums[:2])


def test_the_dry_run_reads_what_it_writes(folder):
    """Products that reach half of the measured share take twice as long."""
    hardware = cluster(measured=folder / "measured.json")
    assert hardware.name == "h100-sxm as slow as a CPU" and set(hardware.measured) == set(PHASES)
    for phase in PHASES:
        assert (hardware.rates(phase, "float32", np.ones(1)) > 0).all()
    layout = sample_layout(MODELS["10b"], num_ranks=1, batch_size=4, seed=0)
    work = work_of(plan_step(layout, small_spec(MODELS["10b"])), MODELS["10b"])
    memory = MemoryModel(MODELS["10b"], FsdpConfig(), 1)  # in float32
    seconds = rank_seconds(work, "llm", memory, hardware).sum()
    half = replace(hardware, measured={"llm": {k: v * (0.5 if k in ("products", "attention") else 1)
                                               for k, v in hardware.measured["llm"].items()}})
    fixed = hardware.fixed_s("llm", memory.num_layers("llm"))
    slower = rank_seconds(work, "llm", memory, half).sum()
    assert slower - fixed == pytest.approx(2 * (seconds - fixed))


def test_it_says_what_ran_and_nothing_of_the_machine(report):
    assert report["command"].startswith("python scripts/bench_gpu.py --device cpu --ranks 3")
    assert set(report["versions"]) == {"python", "torch", "cuda", "transformers"}
    text = json.dumps({k: v for k, v in report.items() if k != "command"})
    assert platform.node() not in text and str(ROOT) not in text


def test_the_kept_result_is_of_this_script(report):
    path = "benchmarks/gpu_cpu_fallback.json"
    kept = json.loads((ROOT / path).read_text())
    assert kept["command"] == f"python scripts/bench_gpu.py --json {path}"
    assert kept["command"] in (ROOT / "docs" / "results.md").read_text()
    assert kept.keys() == report.keys()
    assert kept["shapes"] == report["shapes"]
    for mix, found in kept["mixes"].items():
        for what in ("none_over_balanced", "balanced_over_mean"):
            digits = 2 if what.startswith("none") else 3
            assert f"{found[what]:.{digits}f}" in (ROOT / "docs" / "results.md").read_text(), mix


def test_a_cpu_is_told_on_the_first_line_and_wrong_arguments_at_once(capsys, monkeypatch):
    for args, said in ((["--mix", "natural,nature"], "nature: choose of natural, half, omni"),
                       (["--batches", "1"], "--batches 1: too few")):
        with pytest.raises(SystemExit) as stop:
            script.main(args)
        assert stop.value.code == 2 and said in capsys.readouterr().err
    monkeypatch.setattr(script, "plans_of", lambda *args: 1 / 0)  # ends it after the first line
    with pytest.raises(ZeroDivisionError):
        script.main(["--device", "cpu"])
    assert capsys.readouterr().out.startswith("no GPU used: small shapes on a CPU")
