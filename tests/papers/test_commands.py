"""The rows of `orchmllm papers reproduce`, and what they rest on."""

from __future__ import annotations

from itertools import islice

import pytest

from orchmllm.papers import disttrain, omnibal
from orchmllm.papers.advice import ratio, rows
from orchmllm.papers.fact import Printed
from orchmllm.papers.reproduce import main as reproduce
from orchmllm.papers.schemes import SCHEMES, Result, scheme_table
from tests.papers.modules import plan_bytes


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


def test_a_phase_with_nothing_to_do_is_not_balanced():
    name = next(iter(SCHEMES))
    imbalance = {"vision": 0.0, "audio": 0.0, "llm": 1.25}
    table = scheme_table({name: Result(imbalance, 1.1, 0.0, 0.0, 0.0, 0.5, 2)})
    assert table.splitlines()[1].split()[:5] == [name, "-", "-", "1.250", "1.100"]


def test_verdict_follows_the_link():
    profiles = disttrain.disttrain_profiles("72B")
    found = [ratio(rows(profiles, num_gpus=1296, global_batch=2592, gpu_bytes=disttrain.ROOM,
                        hardware=disttrain.replace(disttrain.A800, network_bandwidth=b)))
             for b in (0.5e9, 5e9, 50e9)]
    assert found[0] < 1 < found[2]  # slow links: units; fast ones: colocated


def test_reordering_beside_figure_18():
    found = disttrain.reordering(128, 8, 3, seeds=2)
    assert found["random"] > found["descending, equal counts"] > found["+ Algorithm 3 repaired"]
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
