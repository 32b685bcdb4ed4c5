"""`orchmllm reproduce orchmllm`: a row for every value, errors that are those of the row, and
verdicts that need more than the spread."""

from __future__ import annotations

import re

import pytest

from orchmllm.papers import orchmllm as paper
from orchmllm.papers.ablations import verdict
from orchmllm.papers.reproduce import main


@pytest.mark.slow
def test_parameters_of_table_1(capsys):
    assert main(["orchmllm", "--table", "1"]) == 0
    text = capsys.readouterr().out
    assert text.count("Table 1 | ") == 9
    rows = re.findall(r"paper: ([\d.]+) B\n +ours: +([\d.]+) B; error ([+-][\d.]+)%", text)
    assert len(rows) == 9
    for theirs, ours, error in rows:  # shown with two digits
        assert 100 * (float(ours) / float(theirs) - 1) == pytest.approx(float(error), abs=1.0)


def test_a_large_error_says_what_would_have_to_be_true():
    small, large = (paper.value("T", "w", 10.0, ours, needs=lambda: "pigs would have to fly").ours
                    for ours in (11.0, 13.0))
    assert "pigs" not in small and "error +10.0%" in small
    assert "for the paper's value pigs would have to fly" in large


def test_a_verdict_needs_more_than_the_spread():
    assert verdict([3.0, 3.1, 2.9], [1.0, 1.1, 1.0]) == "agrees"
    assert verdict([1.0, 1.1, 1.0], [3.0, 3.1, 2.9]) == "differs"
    assert verdict([3.0, 1.0, 2.1], [2.0, 2.0, 2.0]) == "within the spread"
    assert verdict([3.0], [1.0]) == "within the spread"  # nothing is known of the spread


@pytest.mark.slow
def test_every_table_and_figure_has_rows():
    rows = list(paper.lines())
    assert {r.where for r in rows} == {"Table 1", "Table 2", *(
        f"Figure {n}" for n in (8, 9, 10, 11, 12, 13))}
    assert sum(r.where == "Table 2" for r in rows) == 2 * len(paper.PAPER_FORWARD_S)
    for choice in ("none", "selective", "full"):  # the paper does not say what it recomputes
        assert sum(f"recomputed: {choice}" in r.what for r in rows) == 5
    assert all("would have to" in r.ours for r in rows if "forward pass" in r.what)
