"""The rows of `orchmllm papers reproduce`: the paper's values are those of its text, and every row
has a verdict by one rule; the tables of docs/schemes.md and docs/scale.md are what the commands
say."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

import pytest

from orchmllm.papers import disttrain, fact, omnibal, orchmllm
from orchmllm.papers.fact import CALIBRATED, MEASURED, Fact, Printed, counts
from orchmllm.papers.reproduce import main
from scripts.make_paper_tables import DOCS, TABLES, made
from scripts.make_paper_tables import main as make_tables
from tests.lib.commands import ROOT

PAPERS = ("orchmllm", "disttrain", "mmscale", "omnibal")
# A word of a quantity's name -> the words that stand beside its value in a sentence.
BESIDE = {"MFU": "MFU", "throughput": "throughput", "memory": "memory usage",
          "TP 4": "TP size is 4", "TP 8": "TP size is 8"}


def transcribed() -> Iterator[tuple[str, str, list[str]]]:
    """(paper, table or figure, its lines) of tests/papers/transcribed.md."""
    text = (ROOT / "tests/papers/transcribed.md").read_text(encoding="utf-8")
    for part in re.split(r"^# ", text, flags=re.M)[2:]:
        paper, *sections = part.split("\n## ")
        for section in sections:
            where, *lines = section.strip().split("\n")
            yield paper.strip(), where, [line for line in lines if line]


def printed_values(paper: str) -> dict[tuple[str, str, str], dict]:
    """(table or figure, quantity, case) -> row of values.csv, of those that have a value."""
    with (ROOT / "orchmllm/papers/values.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if paper in row["paper"].split()]
    keyed = {(row["where"], row["what"], row["case"]): row for row in rows}
    assert len(keyed) == len(rows)
    return {key: row for key, row in keyed.items() if row["value"]}


def cells(lines: list[str]) -> dict[tuple[str, str], tuple[str, str]]:
    """(quantity, case) -> (value, unit) of a table in Markdown."""
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    heads = [re.fullmatch(r"(.*?)(?: \((B|ms|s|ms\^2)\))?", h) for h in head[1:]]
    return {(h[1], line[0]): (value, h[2] or "") for line in body
            for h, value in zip(heads, line[1:], strict=True) if value}


def test_every_value_of_a_table_is_the_transcribed_one():
    for paper in PAPERS:
        tables = {where: cells(lines) for name, where, lines in transcribed()
                  if name == paper and lines[0].startswith("|")}
        theirs = {(where, *key): value for where, table in tables.items()
                  for key, value in table.items()}
        ours = {key: (row["value"], row["unit"] * (row["unit"] not in ("x", "%")))
                for key, row in printed_values(paper).items() if key[0].startswith("Table")}
        assert ours == theirs, paper


def test_every_value_of_a_figure_is_in_the_papers_sentence():
    compared = 0
    for paper in PAPERS:
        told = {where: lines for name, where, lines in transcribed() if name == paper}
        for (where, what, case), row in printed_values(paper).items():
            if where.startswith("Table"):
                continue
            model = case.split(" ")[0].removeprefix("MLLM-")
            others = {"9B", "15B", "72B"} - {model}
            lines = [s for s in told[where] if paper == "orchmllm" or model in s
                     or not any(other in s for other in others)]
            value, sentences = row["value"], "\n".join(lines)
            if "%" not in value:
                sentences = sentences.replace("%-", "-")
            beside = next((words for name, words in BESIDE.items()
                           if f"{name} " in f"{what} {case} "), "")
            number = re.escape(value).replace(r"0\.436\-0", r"0\.436 to 0")
            if not re.search(r"\d", value):  # a claim in words
                assert value in sentences, (paper, where, what, case)
            else:
                unit = r"(GB|x|%)?"
                assert re.search(
                    rf"(?<![\d.]){number}{unit} ?(the |on |higher |increased |MFU and |when the )*"
                    rf"(training )?{beside}|{beside} of {number}{unit}", sentences), (
                    paper, where, what, case, value)
            if row["means"] and "%" in value:  # a slip: the same numbers are meant as factors
                assert row["means"] == value.replace("%", "") and row["unit"] == "x"
            compared += 1
    assert compared > 100


def test_a_row_agrees_is_of_one_sign_or_off():
    def verdict(paper, ours, base=None, spread=0.0, **more):
        return Fact("T", "w", "", paper, "", base, ours=ours, spread=spread, **more).verdict

    assert [verdict("10", x) for x in (9, 11, 8.9, 11.1)] == ["agrees", "agrees", "off", "off"]
    assert verdict("0.02", 0.0158) == "agrees" and verdict("0.020", 0.0158) == "off"  # rounds to it
    assert verdict("51.8-54.7", 50) == "agrees" and verdict("51.8-54.7", 40) == "off"
    # Of a gain the gain counts, and not the ratio.
    assert [verdict("1.5-2.0", x, 1) for x in (1.46, 1.4, 1.06, 1.04, 0.9)] == [
        "agrees", "sign only", "sign only", "off", "off"]
    assert verdict("1.2", 1.1, 1, spread=0.2) == "off"  # seeds differ by more
    assert verdict("0.436-0.722", -0.02, 0) == "off"
    assert [verdict("[16,17]", x) for x in ([16, 18], [16, 20], [17, 10])] == [
        "agrees", "off", "off"]
    # Claims in words.
    assert [verdict("outperforms", x, 0, spread=1) for x in (30, 0.5, -3)] == [
        "sign only", "off", "off"]
    large = {"means": (10, float("inf"))}
    assert [verdict("significantly lower", x, 0, **large) for x in (12, 3, 0.2)] == [
        "agrees", "sign only", "off"]
    assert verdict("stabilized", 1.36, means=(1, 1)) == "off"
    # What is counted apart.
    assert verdict("5", None) == "not modelled"
    assert verdict("5", 5, kind=MEASURED) == "other machine"
    assert verdict("0.31", 0.31, kind=CALIBRATED) == "calibrated"


def test_a_row_shows_its_error_and_what_would_have_to_be_true():
    rows = [Fact("T", "w", "", "10", " GB", ours=x, needs="pigs would have to fly {up:.2f} times")
            for x in (11.0, 20.0)]
    assert "error +10.0% | agrees" in str(rows[0]) and "pigs" not in str(rows[0])
    assert "paper 10 GB | ours 20 GB | error +100.0% | off" in str(rows[1])
    assert "for the paper's value pigs would have to fly 0.50 times" in str(rows[1])
    assert counts(rows) == "1 agrees, 0 sign only, 1 off"
    nothing = Fact("T", "w", "", "0.436-0.722", base=0, ours=0.0, needs="few items")
    assert "error -100.0% | off\n    for the paper's value few items" in str(nothing)


def test_a_value_is_asked_for_once_and_what_nobody_asks_for_has_a_reason():
    printed = Printed("omnibal")
    row = printed.row("Table 3", "pad", "ISF", 0.0)
    assert (row.paper, row.verdict) == ("0", "agrees")
    with pytest.raises(KeyError):
        printed.row("Table 3", "pad", "ISF", 0.0)
    with pytest.raises(KeyError):
        printed.row("Table 99", "pad", "ISF", 0.0)


@pytest.fixture(scope="module")
def rows():
    """Paper -> its rows, on few samples and the smallest sizes of Table 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disttrain, "seconds", lambda call, repeat=1: 1.0)
        yield {"orchmllm": list(orchmllm.lines()), "disttrain": list(disttrain.lines("disttrain")),
               "mmscale": list(disttrain.lines("mmscale")), "omnibal": list(omnibal.lines(60_000))}


@pytest.mark.slow
@pytest.mark.parametrize("paper, tables, figures", [
    ("orchmllm", 2, 13), ("disttrain", 2, 22), ("mmscale", 3, 22), ("omnibal", 16, 4)])
def test_every_table_and_figure_has_rows_with_a_verdict(rows, paper, tables, figures):
    where = [row.where for row in rows[paper]]
    for kind, count in (("Table", tables), ("Figure", figures)):
        named = {n for w in where if w.startswith(kind) for n in w.split()[1:]}
        assert {str(k) for k in range(1, count + 1)} == named, kind
    for row in rows[paper]:
        assert row.verdict in ("agrees", "sign only", "off", "calibrated", "other machine",
                               "not modelled"), row
        assert row.ours is not None or row.note, row
        if row.verdict in ("agrees", "off"):
            assert row.error is not None or row.base is not None, row
    values = printed_values(paper)
    assert {(row.where, row.what, row.case) for row in rows[paper] if row.paper} == set(values)


@pytest.mark.slow
def test_what_is_said_of_single_rows(rows):
    said = {(row.where, row.what, row.case): row for paper in PAPERS for row in rows[paper]}
    # The paper: significantly lower. Of towers with GELU, over the three draws.
    for model, ours in (("MLLM-10B", 0.25), ("MLLM-18B", 0.88), ("MLLM-84B", 1.11)):
        padded = said["Figure 11", "MFU of all padded below OrchMLLM's by", model]
        assert padded.ours == pytest.approx(ours, abs=0.01) and padded.verdict != "agrees"
        assert said["Figure 8", "MFU over no balancing", model].paper == "1.5-2.0"
    assert said["Figure 17", "MFU over Megatron-like", "MLLM-72B"].verdict == "off"
    own = said["Figure 15", "MFU of recipes/disttrain_72b.yaml", "MLLM-72B"]
    assert own.verdict == "agrees" and "generator 1." in own.note
    assert said["Figure 15", "MFU", "MLLM-9B"].paper == "51.8-54.7"
    assert {row.verdict for (where, _, case), row in said.items()
            if (where, case) == ("Table 3", "baseline")} == {"calibrated"}
    assert "data.preprocess" in said[
        "Figure 21", "preprocessing a step, in the trainer and elsewhere", ""].note


def test_the_rule_and_the_counts_are_printed(capsys, monkeypatch):
    monkeypatch.setattr(omnibal, "lines", lambda n: Printed("omnibal").rest())
    assert main(["omnibal", "--table", "7"]) == 0
    out = capsys.readouterr().out
    assert fact.__doc__ in out and "3 rows: 0 agrees, 0 sign only, 0 off; apart: 3 not" in out
    assert out.count("Table 7 | ") == 3 and "Table 8" not in out


@pytest.mark.slow
def test_the_pages_are_what_the_commands_say(capsys):
    assert make_tables(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_made_anew_between_its_markers(monkeypatch):
    text = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8")
                     for name in ("schemes", "scale"))
    for name in TABLES:
        monkeypatch.setitem(TABLES, name, lambda name=name: f"| {name} |")
    new = made(text)
    for name in TABLES:
        assert new.count(f": {name} -->\n| {name} |\n<!-- End -->") == 1
    assert made(new) == new != text
