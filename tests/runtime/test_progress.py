"""What is shown and logged of a run: lines, bar, summary, and rows that keep to their
schema."""

from __future__ import annotations

import copy
import fcntl
import gc
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from jsonschema import Draft202012Validator

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import RunConfig
from orchmllm.runtime import display as progress
from orchmllm.runtime.display import RunDisplay
from orchmllm.runtime.log_schema import ROW_SCHEMA
from orchmllm.runtime.metrics import JsonLines, has_row, metrics_log, read_rows, set_logs_aside
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.rows import a_row, row_problems, scalars
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.training import train


@pytest.fixture
def now(monkeypatch):
    """[seconds on the clock], which stands still unless a test moves it."""
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: seconds[0])
    return seconds


@pytest.fixture
def display(tmp_path, now):
    made = RunDisplay(RunConfig(dir=str(tmp_path)))
    yield made
    made.close()


def test_plain_lines(display, capsys):
    display.start(4, first_step=1)
    for step in (1, 2, 3):
        display.step(a_row(step))
    out = capsys.readouterr()
    assert out.err == ""
    lines = out.out.splitlines()
    assert lines[0] == ("step 2/4 loss 2.0000 | 1234 tok/s | wait 0.005 s | 00:00 left | saved 55% "
                        "(predicted) | vision 1.50->1.00 | audio 2.50->1.12 | llm 3.50->1.25")
    assert [x.split()[1] for x in lines] == ["2/4", "3/4", "4/4"]


def test_long_runs_are_not_a_line_a_step(display, capsys):
    display.start(10_000)
    for step in range(10_000):
        display.step(a_row(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == progress.MAX_LINES + 1 + 199  # and the first step, and the gain
    assert lines[-1].startswith("step 10000/10000 ")


def test_slow_steps_are_not_silent(display, capsys, now):
    display.start(10_000)
    for step in range(20):
        now[0] += 20.0
        display.step(a_row(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 20 // 2 - 1
    assert "| 55:27:00 left |" in lines[-1]  # 9981 steps of 20 s


class Screen:
    """A terminal that breaks lines again when its width changes, as most do: a pseudo-terminal of
    the kernel, and what a user would see of what is written to it."""

    def __init__(self, columns: int) -> None:
        self.master, self.slave = pty.openpty()
        self.lines, self.line, self.column = [""], 0, 0  # lines as written, however wide
        self.resize(columns)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.columns = columns

    def rows(self) -> list[str]:
        """What is seen; a line that is too wide takes several rows. What was written before a bell
        has come once that has."""
        os.write(self.slave, b"\a")
        text = ""
        while not text.endswith("\a"):
            text += os.read(self.master, 1 << 16).decode()
        for part in re.findall(r"\x1b\[J|\r|\n|[^\x1b\r\n]+", text[:-1]):
            self._take(part)
        return [line[i: i + self.columns] for line in self.lines
                for i in range(0, max(len(line), 1), self.columns)]

    def _take(self, part: str) -> None:
        if part == "\r":  # to the first column of the row, which may be within a line
            self.column -= self.column % self.columns
        elif part == "\n":
            self.line, self.column = self.line + 1, self.column % self.columns
            self.lines += [""] * (self.line == len(self.lines))
        elif part == "\x1b[J":
            self.lines[self.line:] = [self.lines[self.line][:self.column]]
        else:
            line = self.lines[self.line].ljust(self.column)
            self.column += len(part)
            self.lines[self.line] = line[:self.column - len(part)] + part + line[self.column:]


@contextmanager
def a_screen(monkeypatch) -> Iterator[Screen]:
    """Of the test that enters it; in a fixture pytest would take its output."""
    screen = Screen(80)
    with os.fdopen(screen.slave, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        patch.setattr(sys, "stdout", file)
        patch.setattr(progress, "DRAW_EVERY_S", 0.0)
        patch.setenv("TERM", "xterm")
        yield screen
    os.close(screen.master)


def test_the_line_of_a_terminal_fits_and_resizing_leaves_nothing_behind(display, monkeypatch):
    with a_screen(monkeypatch) as screen:
        check_resizing(display, screen)


def check_resizing(display: RunDisplay, screen: Screen) -> None:
    facts = ["step 51/1000 loss 2.0000", "1234 tok/s", "wait 0.005 s", "saved 55% (predicted)",
             "vision 1.50->1.00", "audio 2.50->1.12", "llm 3.50->1.25"]
    display.start(1000, first_step=48)
    display.step(a_row(48))
    for columns, shown in ((80, 3), (200, 7), (120, 5), (30, 1), (80, 3), (12, 0), (80, 3)):
        os.kill(os.getpid(), signal.SIGWINCH)
        screen.resize(columns)
        display.step(a_row(50))
        *above, line = [row for row in screen.rows() if row]
        assert above == [] and len(line) < columns, (columns, above, line)
        assert [f in line for f in facts] == [True] * shown + [False] * (7 - shown), line
        assert (" left" in line) == (shown > 1)
    screen.resize(200)
    display.note("validation")
    display.step({**a_row(49), "measured": None})  # a rollback; the fiftieth step
    display.finish("stopped", "none")
    rows = screen.rows()
    assert rows[0] == "validation"
    assert rows[1].startswith("step 50: balancing saved 55.0% of the step (predicted); data")
    assert rows[2].startswith("step 50/1000 loss 2.0000 | 1234 tok/s | ")
    assert rows[3].startswith("stopped: 9 steps in") and "gain  " in "".join(rows[4:])
    assert screen.line == len(screen.lines) - 1 and screen.lines[-1] == ""


def test_a_terminal_that_is_closed_ends_nothing(display):
    """The run of a shell that has given it up. In a process of its own, whose output it is."""
    screen = Screen(80)
    child, code = os.fork(), 1
    if not child:
        try:
            for descriptor in (1, 2):
                os.dup2(screen.slave, descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            display.start(3)
            display.step(a_row(0))
            shown = bool(display._line)
            os.close(screen.slave)
            os.close(screen.master)
            display.step(a_row(1))
            display.note("validation")
            display.finish()
            code = 42 if shown and not display.stop_signal else 3
        finally:
            os._exit(code)
    os.close(screen.slave)
    os.close(screen.master)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_a_terminal_that_cannot_clear_gets_lines(display, monkeypatch):
    with a_screen(monkeypatch) as screen:
        monkeypatch.setenv("TERM", "dumb")
        display.start(2)
        display.step(a_row(0))
        display.step(a_row(1))
        rows = screen.rows()
    assert [row[:8] for row in rows if row.startswith("step")] == ["step 1/2", "step 2/2"]


def test_other_ranks_are_silent(tmp_path, capsys):
    display = RunDisplay(RunConfig(dir=str(tmp_path / "no")), shows=False)
    display.start(2)
    display.step(a_row(0))
    display.note("x")
    display.validation({"step": 0, "validation_loss": 1.0})
    display.finish()
    display.close()
    assert capsys.readouterr() == ("", "") and not (tmp_path / "no").exists()


@pytest.mark.parametrize("moved, between, said", [
    (1500, 500, "4.50kB a step, 1.50kB of it between nodes"), (1500, 0, "4.50kB a step"),
    (0, 0, "nothing a step")])
def test_summary(display, capsys, now, moved, between, said):
    display.start(2)
    light = a_row(1, loss=1.5)
    for stats in light["phases"].values():  # a step of little work counts little
        stats.update(mean_cost_kflop=0.0, imbalance_before=1.0, imbalance_after=1.0)
    heavy = a_row(0)
    for stats in (*heavy["phases"].values(), *light["phases"].values()):
        stats.update(moved_bytes=moved, internode_bytes=between)
    display.step(heavy)
    display.step({**light, "skipped_steps": 1, "num_failed_media": 3})
    now[0] = 65.0
    capsys.readouterr()
    display.finish("stopped by SIGTERM")
    assert capsys.readouterr().out == f"""\
stopped by SIGTERM: 2 steps in 01:05 (0.5 s a step)
  loss        2.0000 -> 1.5000
  imbalance   vision 1.50 -> 1.00 | audio 2.50 -> 1.12 | llm 3.50 -> 1.25
              (slowest rank / mean, as sampled -> as processed)
  moved       {said}
  gain        balancing saved 55.0% of the step (predicted); data wait 1.0%
  host memory 1.25 GB of a rank at most
  skipped     1 steps; 3 rows or media could not be used
  logs        {Path(display._run.dir) / 'metrics.jsonl'}
"""


def test_summary_of_nothing(display, capsys):
    display.start(5, first_step=5)
    display.finish()
    assert capsys.readouterr().out.startswith(
        "finished: no step was left to do: raise train.num_steps to go on,\n  or choose ")


@pytest.mark.dist
def test_real_rows_keep_to_the_schema(tmp_path):
    base = recipe(balance=BalanceConfig(ranks_per_node=1))
    run = replace(base, run=RunConfig(dir=str(tmp_path)),
                  data=replace(base.data, num_validation=4),
                  train=replace(base.train, num_steps=3))
    run_ranks(train, 2, run, SyntheticDataset())
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [sum(k in r for r in rows) for k in ("loss", "validation_loss")] == [3, 2]
    assert [row_problems(r) for r in rows] == [[]] * 5
    (alone,) = run_ranks(train, 1, replace(run, run=RunConfig(
        dir=str(tmp_path / "alone"), trackers=("tensorboard",))), SyntheticDataset())
    if find_spec("tensorboard"):
        assert [e.step for e in scalars(tmp_path / "alone", "validation_loss")] == [0, 3]
    assert rows[0]["validation_loss"] == pytest.approx(alone[0]["validation_loss"], rel=1e-5)


def test_rows_that_do_not_keep_to_the_schema():
    good = {"schema": 1, **a_row(0)}
    Draft202012Validator.check_schema(ROW_SCHEMA)
    assert row_problems(good) == []
    for change, text in (
        (lambda r: r.pop("loss"), "$: 'loss' is a required property"),
        (lambda r: r.update(extra=1),
         "$: Additional properties are not allowed ('extra' was unexpected)"),
        (lambda r: r["phases"].pop("llm"), "$.phases: 'llm' is a required property"),
        (lambda r: r["phases"]["llm"].update(moved_bytes=0.5),
         "$.phases.llm.moved_bytes: 0.5 is not of type 'integer'"),
        (lambda r: r["cpu_s"].update(llm=[0.1, "x"]),
         "$.cpu_s.llm[1]: 'x' is not of type 'number'"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert row_problems(bad) == [text]


def test_a_row_of_steps_that_were_given_up_counts_no_more(tmp_path):
    log = tmp_path / "metrics.jsonl"
    rows = [{"step": 2, "loss": 1.0}, {"step": 3, "validation_loss": 1.0}]
    for written, found in ((rows, True), (rows + rows[:1], False), (rows * 2, True)):
        log.write_text("".join(json.dumps(row) + "\n" for row in written))
        assert has_row(log, 3, "validation_loss") == found


def test_log_is_json_and_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = metrics_log(path.parent)
    log.write(a_row(0, loss=float("nan")))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])  # what kill -9 leaves
    log = metrics_log(path.parent)
    log.write(a_row(1))
    log.close()
    rows = read_rows(path)
    assert [(r["step"], r["loss"]) for r in rows] == [(0, None), (1, 2.0)]
    assert [row_problems(r) for r in rows] == [[], []]
    assert "NaN" not in path.read_text()


def test_logs_of_earlier_runs_are_never_replaced(tmp_path):
    def set_aside(text: str) -> str:
        (tmp_path / "metrics.jsonl").write_text(text)
        (line,) = set_logs_aside(tmp_path)
        return line.rpartition("/")[2]

    assert [set_aside(x) for x in "ab"] == ["aside_1_metrics.jsonl", "aside_2_metrics.jsonl"]
    (tmp_path / "aside_1_metrics.jsonl").unlink()
    set_aside("c")
    assert sorted(p.read_text() for p in tmp_path.iterdir()) == ["b", "c"]


@pytest.mark.parametrize("truncates", [True, False])
def test_a_full_disk_costs_rows_and_not_the_run(tmp_path, capsys, truncates):
    log = metrics_log(tmp_path)
    log.write(a_row(0))
    if not truncates:
        log._file = Mock(wraps=log._file, truncate=Mock(side_effect=OSError(5, "no disk")))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        log.write(a_row(1))
        log.write(a_row(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(a_row(3))
    log.close()
    assert [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").open()] == [0, 3]
    assert log.lost == 2 and capsys.readouterr().err.count("rows are lost") == 1


def test_a_log_that_is_begun_late_costs_rows_and_not_the_run(tmp_path, capsys):
    taken = tmp_path / "run"
    taken.write_text("no folder")
    with pytest.raises(ValueError, match="cannot be written"):
        JsonLines(taken / "quarantine.jsonl")
    log = JsonLines(taken / "quarantine.jsonl", late=True)
    log.write({"row": 0})
    taken.unlink()
    log.write({"row": 1})
    log.close()
    assert read_rows(taken / "quarantine.jsonl") == [{"row": 1}] and log.lost == 1
    told = capsys.readouterr().err
    assert told.count("rows are lost") == 1 and "was deleted" not in told


def test_a_log_that_was_deleted_is_begun_again(tmp_path, capsys):
    path = tmp_path / "run" / "metrics.jsonl"
    log = metrics_log(path.parent)
    for step in range(3):
        if step == 1:
            shutil.rmtree(path.parent)
        log.write(a_row(step))
    log.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2] and not log.lost
    assert capsys.readouterr().err.count("was deleted: its rows so far are lost") == 1


def rows_in_memory(world, run) -> int:
    """How many rows of metrics there are at the end of a run's last step."""
    def count(step, row: dict) -> None:
        dicts = [x for x in gc.get_objects() if type(x) is dict]
        found.append(sum(isinstance(x.get("tokens_per_s"), float) for x in dicts))

    found: list[int] = []
    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=count)
    trainer.run()
    trainer.close()
    return found[-1]


@pytest.mark.dist
def test_a_long_run_keeps_no_rows(tmp_path):
    """With 2,560 ranks a row takes 330 kB on each of them."""
    base = recipe(model=SHALLOW)
    run = replace(base, run=replace(base.run, dir=str(tmp_path)),
                  train=replace(base.train, num_steps=6))
    assert run_ranks(rows_in_memory, 1, run)[0] <= 2
