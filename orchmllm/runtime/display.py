"""What a user sees of a run: one line that changes on a terminal, plain lines elsewhere,
trackers if asked, and a summary at the end. One rank shows.
"""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
from tqdm import tqdm

from orchmllm.config.recipe import RunConfig
from orchmllm.launch import drop_output, say
from orchmllm.plan.gain import Gain, describe, slowest_costs
from orchmllm.runtime.log_schema import METRICS, NUMBERS
from orchmllm.runtime.trackers import Trackers

MAX_LINES = 100  # plain lines of a run whose steps are fast ...
LINE_EVERY_S = 30.0  # ... and the longest silence of one whose steps are slow
DRAW_EVERY_S = 0.1  # on a terminal
GAIN_EVERY = 50  # steps
UNKNOWN_WIDTH = 80  # columns
# Clears from the cursor to the end of the screen. The cursor waits at the first column of the line
# that is drawn: where a terminal that became narrower has broken it, all of it is still cleared.
CLEAR = "\x1b[J"


class RunDisplay:
    """start, step after step, finish; close in any case. shows: false on all ranks but one, where
    every method does nothing. patience_s: that close may take."""

    def __init__(self, run: RunConfig, *, shows: bool = True, patience_s: float = math.inf) -> None:
        self._run, self._shows, self._patience_s = run, shows, patience_s
        self.stop_signal = 0
        self._totals = Totals()
        self._draws = False
        self._line = ""  # what is drawn, of any width
        self._trackers: Trackers | None = None
        self._total = self._done = 0
        self._step_s: float | None = None  # smoothed
        self._shown_at = self._stepped_at = self._started_at = time.perf_counter()
        self._drawn_at = 0.0

    def start(self, total: int, first_step: int = 0) -> None:
        """total: steps of the whole run; first_step: of them done before."""
        self._total, self._done = total, first_step
        self._started_at = self._stepped_at = time.perf_counter()
        if not self._shows:
            return
        self._trackers = Trackers(self._run, self.note, self._patience_s)
        self._draws = _width() > 0

    def step(self, row: dict) -> None:
        """row: of metrics, see docs/metrics.md. Its step may come again after a rollback."""
        if not self._shows:
            return
        now = time.perf_counter()
        seconds, self._stepped_at = now - self._stepped_at, now
        # The newest ten steps or so, for the time that is left.
        self._step_s = seconds if self._step_s is None else 0.9 * self._step_s + 0.1 * seconds
        self._done = row["step"] + 1
        self._totals.add(row)
        self._trackers.log(dict(scalars(row)), row["step"])
        if self._draws or self._line_is_due(now):
            left = tqdm.format_interval(self._step_s * (self._total - self._done))
            line = (f"step {self._done}/{self._total} "
                    + " | ".join(facts(row, left, self._totals.saved())))
            if not self._draws:
                self._shown_at = now
                self._print(line)
            elif now - self._drawn_at >= DRAW_EVERY_S or not self._line:
                self._drawn_at, self._line = now, line
                self._draw()
        if self._done % GAIN_EVERY == 0 and self._done < self._total:
            self._print(f"step {self._done}: {self._totals.gain()}")

    def _line_is_due(self, now: float) -> bool:
        every = -(-self._total // MAX_LINES)
        return (self._done % every == 0 or self._done == self._total
                or self._totals.num_steps == 1 or now - self._shown_at >= LINE_EVERY_S)

    def validation(self, row: dict) -> None:
        """row: of a validation."""
        self._stepped_at = time.perf_counter()
        if self._trackers is not None:
            self._trackers.log({k: v for k, v in row.items() if k != "step"}, row["step"])
        loss, images = row["validation_loss"], row.get("validation_generator_loss")
        shown = f"{loss:.4f}" if math.isfinite(loss) else f"{loss} (no targets, or not finite)"
        shown += "" if images is None else f", of images {images:.4f},"
        self.note(f"validation loss {shown} after {row['step']} steps")

    def note(self, text: str) -> None:
        """A line of its own, above the one that changes."""
        if self._shows:
            self._print(text)

    def check_gain(self) -> None:
        """At the end of a run with balancing on: a warning if balancing had no effect."""
        if warning := self._totals.warning():
            self.note(warning)

    def _print(self, text: str) -> None:
        try:
            if self._line:
                self._print_over(CLEAR, "")
            say(text)
            self._draw()
        except BrokenPipeError:
            drop_output()
            self.stop_signal = signal.SIGPIPE

    def _draw(self, end: str = "\r") -> None:
        """As many facts as fit; the last column stays empty, since the cursor would leave it."""
        if not self._line:
            return
        line, width = self._line, _width() or UNKNOWN_WIDTH
        while len(line) >= width and " | " in line:
            line = line.rpartition(" | ")[0]
        self._print_over(CLEAR + line[:width - 1], end)

    def _print_over(self, text: str, end: str) -> None:
        """On the terminal, which may be gone: then nothing is drawn any more."""
        try:
            print(text, end=end, file=sys.stderr, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            self._line, self._draws = "", False

    def finish(self, how: str = "finished", saved: str = "") -> None:
        """The summary. how: how the run ended. saved: its newest checkpoint."""
        self._end_line()
        if self._shows:
            seconds = time.perf_counter() - self._started_at
            self._print(f"{how}: {self._totals.summary(seconds)}\n  "
                        f"logs        {self._run.folder / 'metrics.jsonl'}"
                        + (f"\n  checkpoint  {saved}" if saved else ""))

    def close(self) -> None:
        """Leaves the terminal in order and ends the trackers."""
        self._end_line()
        if self._trackers is not None:
            self._trackers.close()

    def _end_line(self) -> None:
        """What was drawn last stays, and the cursor leaves it."""
        self._draw(end="\n")
        self._line, self._draws = "", False


def _width() -> int:
    """Columns of the terminal that stderr is; 0 where no line can be drawn over: no terminal, or
    one without a width (`docker run -t`)."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except io.UnsupportedOperation:  # not a file
        return UNKNOWN_WIDTH
    except OSError:
        return 0


class Totals:
    """Sums over the steps of a run, and every gain that was measured."""

    def __init__(self) -> None:
        self.num_steps = self.num_failed_media = self.skipped_steps = 0
        self.num_unbalanced = 0  # steps that were sampled so by over 5% in some phase
        self.step_s = self.wait_s = self.host_gb = 0.0
        self.first_loss: float | None = None  # of the first step with targets
        self.last_loss: float | None = None
        self.bytes = {"moved_bytes": 0, "internode_bytes": 0}
        # phase -> cost of the slowest rank before, after, and of the mean rank
        self.cost = defaultdict(partial(np.zeros, 3))
        self._balanced = np.zeros(2)  # cost before and after of the steps that are balanced
        self.gains: list[Gain] = []

    def add(self, row: dict) -> None:
        if row["num_global_targets"]:
            self.first_loss = row["loss"] if self.first_loss is None else self.first_loss
            self.last_loss = row["loss"]
        self.num_steps += 1
        self.step_s += row["step_s"]
        self.wait_s += row["data_wait_s"]
        self.host_gb = max(self.host_gb, row["host_memory_gb"] or 0.0)
        self.skipped_steps = row["skipped_steps"]
        self.num_failed_media += row["num_failed_media"]
        if gain := (row["measured"] or {}).get("gain"):
            self.gains.append(Gain(**gain))
        phases = row["phases"]
        if not row["as_sampled"]:  # for balance.measure_every
            self._balanced += slowest_costs(phases)
            self.num_unbalanced += any(p["imbalance_before"] > 1.05 for p in phases.values())
        for phase, stats in phases.items():
            self.cost[phase] += stats["mean_cost_kflop"] * np.array(
                [stats["imbalance_before"], stats["imbalance_after"], 1.0])
            for name in self.bytes:
                self.bytes[name] += stats[name]

    def saved(self) -> float:
        """Share of the phases' time that balancing saved, by the cost model; 0 without any cost."""
        before, after = self._balanced
        return float(1 - after / before) if before else 0.0

    def gain(self) -> str:
        """What balancing saved, and what waiting for data cost, in one line."""
        wait = f"data wait {100 * self.wait_s / max(self.step_s, 1e-9):.1f}%"
        if not self.saved():  # one rank, or balancing is off
            return f"balancing moved nothing; {wait}"
        if self.gains:
            return f"{describe(self.gains)}; {wait}"
        return f"balancing saved {100 * self.saved():.1f}% of the step (predicted); {wait}"

    def warning(self) -> str:
        """What to change where balancing is on and had no effect in any step; '' where it had, or
        where all steps were sampled balanced."""
        if not self.num_unbalanced or self.saved():
            return ""
        return ("warning: balancing had no effect: none of the "
                f"{self.num_unbalanced} steps that were sampled unbalanced became shorter. Lower "
                "balance.*.tolerance or balance.min_gain, set balance.whole_examples=false, raise "
                "train.batch_size, or set balance.enabled=false")

    def summary(self, seconds: float) -> str:
        """Lines about the run; `seconds` it took, validation and checkpoints included."""
        n = self.num_steps
        if not n:
            return ("no step was left to do: raise train.num_steps to go on,\n  or choose another "
                    "run.dir to start anew")
        imbalance = " | ".join(
            f"{phase} {before / mean:.2f} -> {after / mean:.2f}" if mean else f"{phase} -"
            for phase, (before, after, mean) in self.cost.items())
        moved, between = (x and tqdm.format_sizeof(x / n, "B") for x in self.bytes.values())
        lines = [
            f"{n} step{'s' if n > 1 else ''} in {tqdm.format_interval(seconds)} "
            f"({self.step_s / n:.3g} s a step)",
            "loss        no targets in any step" if self.first_loss is None else
            f"loss        {self.first_loss:.4f} -> {self.last_loss:.4f}",
            f"imbalance   {imbalance}",
            "            (slowest rank / mean, as sampled -> as processed)",
            f"moved       {moved or 'nothing'} a step"
            + (f", {between} of it between nodes" if between else ""),
            f"gain        {self.gain()}",
        ]
        if self.host_gb:
            lines.append(f"host memory {self.host_gb:.2f} GB of a rank at most")
        if self.skipped_steps or self.num_failed_media:
            lines.append(f"skipped     {self.skipped_steps} steps; {self.num_failed_media} rows or "
                         "media could not be used")
        return "\n  ".join(lines)


def facts(row: dict, left: str, saved: float) -> list[str]:
    """Of a step, the most important ones first: the METRICS that have a `line`, then those that
    follow from several. left: the time that the run still takes. saved: the share of a step that
    balancing saved so far, as predicted."""
    shown = {name: metric.line.format(row[name]) for name, metric in METRICS.items()
             if metric.line and row.get(name) is not None}
    if not row["num_global_targets"]:
        shown["loss"] = "no targets"
    return [*shown.values(), f"{left} left", f"saved {100 * saved:.0f}% (predicted)",
            *(f"{p} {s['imbalance_before']:.2f}->{s['imbalance_after']:.2f}"
              for p, s in row["phases"].items())]


def scalars(row: dict) -> Iterator[tuple[str, float]]:
    """(name in a tracker, value) of a step."""
    for name in NUMBERS:
        if row.get(name) is not None and (name != "loss" or row["num_global_targets"]):
            yield name, row[name]
    for part, norm in row["grad_norms"].items():
        yield f"{part}/grad_norm", norm
    for phase, value in (row["measured"] or {"imbalance": {}})["imbalance"].items():
        yield f"{phase}/imbalance_measured", value
    for phase, stats in row["phases"].items():
        for name, value in stats.items():
            yield f"{phase}/{name}", value
