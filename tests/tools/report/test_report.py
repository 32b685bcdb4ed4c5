"""`orchmllm report`: what a page shows of a log, also of one that is still written, is long, or
is no log at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.cli import dispatch
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import RunConfig
from orchmllm.plan.assign import PHASES
from orchmllm.runtime import metrics, run_lock
from orchmllm.runtime.display import Totals
from orchmllm.tools.report.log import read_run
from orchmllm.tools.report.svg import MAX_POINTS, number, thin
from orchmllm.tools.report.verdict import figures
from tests.lib.ranks import run_ranks
from tests.lib.report_pages import measured_row, report, write
from tests.lib.rows import a_row, row_problems
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.training import train


def test_a_run_that_was_killed_and_is_still_written(tmp_path):
    rows = [measured_row(s) for s in (0, 1, 2, 3, 2, 3, 4)]
    rows[2]["loss"], rows[4]["loss"] = 9.0, 1.0  # of step 2 the later row counts
    rows.insert(4, {"schema": 1, "step": 2, "validation_loss": 1.5})
    folder = write(tmp_path / "<b>run", rows, tail=json.dumps(measured_row(5))[:77])
    (folder / "attempts.jsonl").write_text(
        '{"attempt": 1, "settings": {"train.num_steps": 10}, "ended": "finished"}\n')
    quarantine = [{"step": 1, "example_id": 4, "segment": 0, "source": s, "row": 5,
                   "data_file": "d.jsonl", "file": f, "reason": "truncated <i>"}
                  for s, f in (("web", "a.png"), ("web", "b.png"), ("asr", "c.wav"))]
    (folder / "quarantine.jsonl").write_text(
        "".join(json.dumps(q) + "\n" for q in quarantine) + '{"step"')
    run = read_run(folder)
    assert run["loss"].tolist() == [2, 2, 1, 2, 2] and run.restarts == [(2, 2)] and run.cut
    html, page = report(folder)
    assert "<i>run" not in html and "&lt;b&gt;run" in html and "truncated &lt;i&gt;" in html
    assert "5 of 10 steps are done" in page.text and "2 ranks; last written" in page.text
    assert "still being written" in page.text
    assert ["2", "2"] in page.rows
    assert [["web", "2", "truncated <i> (2)", "a.png (row 5, step 1)"]] == [
        r for r in page.rows if r[0] == "web"]
    # Step 4 took longest: a fifth of 0.5 s is what the mean rank waited.
    worst = next(r for r in page.rows if r[-1] == "1005 (50), 8 (3)")
    assert worst == ["4", "vision", "0", "100 ms", "1.25", "94", "1005 (50), 8 (3)"]
    assert "Validation is not logged" not in page.text


def test_figures_are_those_of_the_rows(tmp_path):
    rows = [measured_row(s) for s in range(4)]
    rows.append(measured_row(4, as_sampled=True))  # which is no step that balancing made shorter
    for stats in rows[-1]["phases"].values():
        stats["imbalance_after"] = stats["imbalance_before"]
    totals = Totals()
    for row in rows:
        totals.add(row)
    # Imbalance 1.5, 2.5, 3.5 -> 1, 1.125, 1.25 of equal means.
    assert totals.saved() == pytest.approx(1 - 3.375 / 7.5)
    assert totals.gain() == "balancing saved 55.0% of the step (predicted); data wait 1.0%"
    for row in rows:  # of 0.5 s, in which the phases take 0.3 s and more
        row["measured"]["slowest_s"] |= dict.fromkeys(PHASES, 0.05)
        row.update(update_s=0.02, waiting_s=0.3, core_wait_s=0.25, logging_s=0.001)
    page = report(write(tmp_path / "run", rows))[1]
    assert "Not measured: set balance.measure_every." in page.text
    assert page.text.count("5 steps are done, and the loss went from 2 to 2; the log shows no "
                           "problem; balancing saved an estimated 55.0% of the phases' time; the "
                           "largest part of a step is waiting for a core, 49.9%.") == 1
    for part in ("vision 50 ms", "exchange 10 ms", "data wait 5 ms", "update 20 ms",
                 "waiting for a core 250 ms", "waiting for ranks 50 ms", "rest 15 ms",
                 "logging 1 ms"):
        assert part in page.text
    assert "55.0%saved by balancing, predicted" in page.text and "1.0%data wait" in page.text
    assert "4.5 kBbytes moved a step" in page.text
    for step, measured in ((1, 0.4), (3, 0.5)):
        rows[step]["measured"]["gain"] = {"predicted": 0.25, "measured": measured}
        totals.add(rows[step])
    assert totals.gain() == (
        "balancing saved 25.0% (25.0 to 25.0%) as predicted, 45.0% (42.5 to 47.5%) as measured "
        "(medians and quartiles; compared with steps as sampled: 2); data wait 1.0%")
    page = report(write(tmp_path / "run", rows))[1]
    for name, *shares in (("predicted", "25.0%", "25.0%", "25.0%"),
                          ("measured", "42.5%", "45.0%", "47.5%")):
        assert [name, *shares, "2"] in page.rows
    assert "balancing saved 45.0% of the phases' time, measured (estimated: 25.0%);" in page.text


def test_what_is_said_where_nothing_is_balanced(tmp_path):
    totals, row = Totals(), measured_row(0)
    for stats in row["phases"].values():
        stats["imbalance_after"] = stats["imbalance_before"]
    totals.add(row)
    assert totals.gain() == "balancing moved nothing; data wait 1.0%"
    assert totals.warning().startswith("warning: balancing had no effect: none of the 1 steps")
    page = report(write(tmp_path / "run", [{**row, "step": s} for s in range(2)]))[1]
    assert "0.0%saved by balancing, predicted" in page.text


def test_times_of_the_step_before_are_put_there(tmp_path):
    rows = [measured_row(s, of=s - 1) for s in range(4)]
    rows[0]["measured"] = None
    run = read_run(write(tmp_path / "run", rows))
    np.testing.assert_allclose(run["llm.measured.slowest_s"], [0.1, 0.2, 0.3, np.nan])
    page = report(tmp_path / "run")[1]
    assert ["2", "vision", "0", "60 ms", "1.25", "92", "1003 (50), 8 (3)"] in page.rows


def test_nothing_is_shown_that_was_not_logged(tmp_path):
    page = report(write(tmp_path / "run", [{"schema": 1, **a_row(s)} for s in range(3)]))[1]
    assert "No step was measured yet." in page.text
    assert "Validation is not logged: set data.num_validation." in page.text
    assert "no step was measured yet" in page.text
    empty = report(write(tmp_path / "empty", []))[1]
    assert "nothing logged yet" in empty.text and "No step is logged yet." in empty.text
    diverged = report(write(tmp_path / "nan", [measured_row(s, loss=None) for s in range(3)]))[1]
    assert "None of the 3 steps has a loss that is a finite number." in diverged.text


def test_what_a_branch_or_rollback_gave_up_is_not_the_state_of_the_run(tmp_path):
    """100 steps, bad from step 50 on; it went back there and has done 11 of them again."""
    rows = [measured_row(s, loss=2.0 if s < 50 else 900.0) for s in range(100)]
    rows += [{"schema": 1, "step": 40, "validation_loss": 1.9},
             {"schema": 1, "step": 100, "validation_loss": 800.0}]
    rows += [measured_row(s, loss=1.0) for s in range(50, 61)]
    folder = write(tmp_path / "run", rows)
    (folder / "attempts.jsonl").write_text(
        '{"attempt": 1, "settings": {"train.num_steps": 100}, "ended": "finished"}\n')
    run = read_run(folder)
    assert run["step"].tolist() == list(range(61)) and run["loss"].max() == 2.0
    assert run.validations.tolist() == [[40, 1.9]] and run.restarts == [(50, 50)]
    text = report(folder)[1].text
    assert "61 of 100 steps" in text and "900" not in text


def test_a_changed_setting_is_marked_on_the_loss(tmp_path, capsys):
    """Not one that was given up when the run went back behind it, nor one beyond the log."""
    def start(number: int, step: int, lr: float) -> dict:
        return {"attempt": number, "settings": {}, "resumed_from": {
            "step": step, "changed": {"train.lr": [0.1, lr]}}}

    starts = [{"attempt": 1, "settings": {}, "resumed_from": None}, start(2, 2, 0.2),
              start(3, 7, 0.3), start(4, 5, 0.4), start(5, 99, 0.5)]
    folder = write(tmp_path / "run", [measured_row(s, loss=1.0 + s) for s in range(9)])
    (folder / "attempts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in starts) + '{"a')
    html, page = report(folder)
    marks = re.findall(r"<line class=mark x1=([\d.]+) .*?<title>(.*?)</title>", html)
    assert [text for _, text in marks] == [f"train.lr 0.1 -&gt; {lr}" for lr in (0.2, 0.4)]
    assert [float(x) for x, _ in marks] == pytest.approx([46 + 306 * s / 8 for s in (2, 5)], abs=1)
    assert [r for r in page.rows if "train.lr" in r[-1]] == [
        [step, f"train.lr 0.1 -> {lr}"] for step, lr in (("2", 0.2), ("5", 0.4), ("99", 0.5))]
    (folder / "attempts.jsonl").write_text('{"attempt": 1\n{}\n')
    assert dispatch(["report", str(folder)]) == 2
    assert "attempts.jsonl: line 1 is damaged" in capsys.readouterr().err


def test_a_run_that_was_killed_right_after_a_checkpoint(tmp_path):
    """No step comes again. What went on from a finished run is no restart."""
    folder = write(tmp_path / "run", [measured_row(s) for s in range(9)])
    steps = {1: None, 2: {"step": 3, "changed": {}}, 3: {"step": 6, "changed": {}}}
    lines = [{"attempt": i, "settings": {}, "resumed_from": at} for i, at in steps.items()]
    lines.append({"attempt": 2, "ended": "finished"})
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(folder).restarts == [(3, 0)]


def test_lost_rows_are_no_restart(tmp_path):
    """As where the disk was full for some steps."""
    folder = write(tmp_path / "run", [measured_row(s) for s in (0, 1, 5, 6, 6, 7)])
    assert read_run(folder).restarts == [(6, 1)]
    assert "1restarts" in report(folder)[1].text


def test_a_run_that_an_older_version_began(tmp_path):
    """It did not log which rank was the slowest."""
    rows = [measured_row(s) for s in range(4)]
    del rows[3]["measured"]["slowest"]  # of the step with the longest wait
    page = report(write(tmp_path / "run", rows))[1]
    assert [r[0] for r in page.rows if len(r) == 7] == ["step"] + ["2"] * 3 + ["1"] * 3 + ["0"] * 3


def test_the_file_that_cannot_be_read_is_named(tmp_path, capsys):
    folder = write(tmp_path / "run", [measured_row(0)])
    (folder / "quarantine.jsonl").write_text("{}\n{\n")
    assert dispatch(["report", str(folder)]) == 2
    assert f"{folder / 'quarantine.jsonl'}: line 2 is damaged" in capsys.readouterr().err
    (folder / "quarantine.jsonl").unlink()
    (folder / "ledgers.json").write_text("[{")
    assert dispatch(["report", str(folder)]) == 2
    assert f"{folder / 'ledgers.json'} is damaged" in capsys.readouterr().err
    (folder / "ledgers.json").unlink()
    assert dispatch(["report", str(tmp_path / ("x" * 300))]) == 2
    error = capsys.readouterr().err
    assert "File name too long" in error and "report.html" not in error


@pytest.mark.parametrize("steps", [4, 0])
@pytest.mark.parametrize("ended, told", [
    ("NonFiniteError: step 1: loss nan", "it ended with an error (NonFiniteError: step 1: loss"),
    ("Stopped: stopped on request", "the log shows no problem"),
    ("finished", "the log shows no problem"), ("", "it was started, and no end is recorded")])
def test_an_error_that_ended_a_run_is_told(ended, told, steps, tmp_path, monkeypatch):
    """Also one before the first step."""
    folder = write(tmp_path / "run", [measured_row(s) for s in range(steps)])
    lines = [{"attempt": 1, "settings": {}, "resumed_from": None, "changed": {}}]
    lines += [{"attempt": 1, "ended": ended}] if ended else []
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (told if steps or "ended" in told else "No step is logged yet") in (
        report(folder)[1].text)
    monkeypatch.setattr(run_lock, "_lock", lambda *_: False)  # another process has it
    (folder / "run.lock").write_text("")
    assert ended or "no end is recorded" not in report(folder)[1].text
    lines += [{**lines[0], "attempt": 2}, {"attempt": 2, "ended": "finished"}]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = report(folder)[1].text
    assert "it ended with an error" not in text and "no end is recorded" not in text


def test_steps_without_an_update_are_counted_once(tmp_path):
    """The log has how many there were so far."""
    rows = [{**measured_row(s), "skipped_steps": int(s > 0)} for s in range(4)]
    found = figures(read_run(write(tmp_path / "run", rows)))
    assert found["steps without an update"][0] == 1


def test_what_is_no_log_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "no_log").mkdir()
    write(tmp_path / "other", [], tail='{"epoch": 1}\n')
    write(tmp_path / "text", [measured_row(0)], tail="hello\n")
    write(tmp_path / "newer", [measured_row(0, schema=9)])
    good = write(tmp_path / "good", [measured_row(0)])
    for name, said in (("nowhere", "no such folder; give the run.dir of a run"),
                       ("file", "a file; give the run.dir"),
                       ("no_log", "no metrics.jsonl in it; give the run.dir"),
                       ("other", "what begins at byte 0 is no line of a run's log"),
                       ("text", "is no line of a run's log (ValueError"),
                       ("newer", "schema 9, this version reads 1; use the version")):
        assert dispatch(["report", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err, name
        assert dispatch(["report", str(good), "--compare", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err, name
    assert dispatch(["report", str(good), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "choose another file with --out" in capsys.readouterr().err
    mine = tmp_path / "mine"
    mine.write_text("a thesis")
    assert dispatch(["report", str(good), "--out", str(mine)]) == 2
    assert "mine exists and is no report" in capsys.readouterr().err
    assert mine.read_text() == "a thesis"
    mine.write_text("")
    for _ in range(2):  # the second time it is a report
        assert dispatch(["report", str(good), "--out", str(mine)]) == 0


def test_a_validation_without_a_number(tmp_path):
    run = read_run(write(tmp_path / "run", [
        measured_row(0), {"schema": 1, "step": 1, "validation_loss": None}]))
    assert run.num_steps == 1 and np.isnan(run.validations[0, 1])


def test_many_points_become_few_with_their_range():
    y = np.zeros(10_000)
    y[[3, 7000]] = 5.0, -1.0
    x, mean, low, high = thin(np.arange(10_000.0), y)
    assert len(x) == MAX_POINTS and high.max() == 5 and low.min() == -1
    assert [number(v, u) for v, u in ((1234, ""), (0.0123, "s"), (90, "s"), (2.5e6, "B"),
                                      (0.125, "%"), (np.nan, ""))] == [
        "1.234k", "12.3 ms", "90 s", "2.5 MB", "12.5%", "-"]


@pytest.mark.slow
def test_100_000_steps_are_a_small_page(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as f:
        for step in range(100_000):
            f.write(json.dumps(measured_row(step)) + "\n")
    html, page = report(folder)
    assert len(html) < 5e6 and "100000 steps" in page.text


def train_as_one_of_many(world, *arguments):
    """Two ranks whose log is that of a run of more than metrics.jsonl lists in every row."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metrics, "ALL_RANKS_UP_TO", 1)
        patched.setattr(metrics, "ALL_RANKS_EVERY", 2)
        return train(world, *arguments)


@pytest.mark.dist
def test_the_log_of_a_real_run(tmp_path):
    base = recipe(balance=BalanceConfig(ranks_per_node=1))
    run = replace(base, run=RunConfig(dir=str(tmp_path)),
                  data=replace(base.data, num_validation=4),
                  train=replace(base.train, num_steps=4))
    run_ranks(train_as_one_of_many, 2, run, SyntheticDataset())
    found = read_run(tmp_path)
    assert found["num_ranks"].tolist() == [2] * 4 and len(found.validations) == 2
    rows = [found.row(i) for i in range(4)]
    assert [row_problems(row) for row in rows] == [[]] * 4
    assert ["cpu_s" in row for row in rows] == [True, False, True, False]
    slow, cpu_s = rows[2]["measured"]["slowest"], rows[2]["cpu_s"]
    for phase, slowest in rows[2]["measured"]["slow_ranks"].items():
        assert slowest["s"] == sorted(cpu_s[phase], reverse=True)
        assert [cpu_s[phase][rank] for rank in slowest["ranks"]] == slowest["s"]
    for phase in PHASES:
        assert slow[phase]["rank"] == int(np.argmax(cpu_s[phase]))
        assert len(slow[phase]["example_ids"]) == len(slow[phase]["lengths"]) <= 3
        assert sum(slow[phase]["lengths"]) <= slow[phase]["positions"]
        assert slow[phase]["lengths"] == sorted(slow[phase]["lengths"], reverse=True)
    page = report(tmp_path)[1]
    assert "4 of" in page.text or "4 steps" in page.text
    shown = [r for r in page.rows if len(r) == 7 and r[0] != "step"]  # the slowest steps
    assert shown
    for step, phase, rank, *_, examples in shown:
        slow = found.row(int(step))["measured"]["slowest"][phase]
        assert rank == str(slow["rank"])
        assert re.findall(r"(\d+) \(", examples) == [
            str(i + 1) for i in slow["example_ids"]]
