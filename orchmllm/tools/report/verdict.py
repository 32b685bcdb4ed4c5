"""A run in figures and in one sentence, where its steps' time went, and what two runs differ in."""

from __future__ import annotations

import numpy as np

from orchmllm.config.parse import show
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.gain import slowest_costs
from orchmllm.runtime.log_schema import PHASE_METRICS
from orchmllm.runtime.resumable import differences
from orchmllm.tools.report.log import RunLog
from orchmllm.tools.report.svg import latest, number

# Of a step, with the colours of their chart.
PARTS = {**{p: p for p in EVERY_PHASE}, "exchange": "exchange", "data wait": "wait",
         "update": "update", "waiting for a core": "core", "waiting for ranks": "ranks",
         "rest": "rest", "logging": "logging"}
PROBLEMS = ("steps without an update", "rows and media not used", "restarts")  # of the figures


def step_parts(run: RunLog) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(n,) the steps that were measured, and (n,) seconds of each of PARTS in them. Waiting is of
    rank 0; the time in which it waited for the slowest rank's work counts as that work."""
    places = np.flatnonzero(np.isfinite(run["exchange.slowest_s"]))

    def logged(column: str) -> np.ndarray:
        return np.nan_to_num(run[column][places])

    parts = {p: logged(f"{p}.measured.slowest_s") for p in EVERY_PHASE} | {
        "exchange": logged("exchange.slowest_s"), "data wait": logged("data_wait_s"),
        "update": logged("update_s")}
    left = np.maximum(logged("step_s") - sum(parts.values()), 0.0)
    for_core = np.minimum(logged("core_wait_s"), left)
    for_ranks = np.clip(logged("waiting_s") - for_core, 0.0, left - for_core)
    return run["step"][places], parts | {
        "waiting for a core": for_core, "waiting for ranks": for_ranks,
        "rest": left - for_core - for_ranks, "logging": logged("logging_s")}


def figures(run: RunLog) -> dict[str, tuple[float, str]]:
    """What is compared: name -> (value, unit)."""
    before, after = costs(run)
    steps = run.num_steps
    waited, total = run["data_wait_s"].sum(), run["step_s"].sum()
    moved, between = moved_bytes(run)
    return {
        "loss, mean of the last 5% of the steps": (latest(run["loss"]), ""),
        "validation loss, last": (
            float(run.validations[-1, 1]) if len(run.validations) else np.nan, ""),
        "tokens/s, median": (run.median("tokens_per_s"), ""),
        "seconds a step, median": (run.median("step_s"), "s"),
        "saved by balancing, predicted": (
            float(1 - after.sum() / before.sum()) if before.sum() else 0.0, "%"),
        "data wait": (float(waited / total) if total else np.nan, "%"),
        "bytes moved a step": (float(moved.mean()) if steps else np.nan, "B"),
        "of them between nodes": (float(between.mean()) if steps else np.nan, "B"),
        "steps without an update": (float(run["skipped_steps"][-1]) if steps else 0.0, ""),
        "rows and media not used": (float(run["num_failed_media"].sum()), ""),
        "restarts": (float(len(run.restarts)), ""),
    }


def costs(run: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Of every step: cost of the slowest ranks as sampled and as processed; 0 where a step ran as
    sampled for balance.measure_every."""
    both = slowest_costs({p: {name: np.nan_to_num(run[f"{p}.{name}"]) for name in PHASE_METRICS}
                          for p in EVERY_PHASE})
    return tuple(np.where(run["as_sampled"] == 1, 0.0, cost) for cost in both)


def moved_bytes(run: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Of every step, all phases: moved, and of them between nodes."""
    moved, between = (sum(np.nan_to_num(run[f"{p}.{name}"]) for p in EVERY_PHASE)
                      for name in ("moved_bytes", "internode_bytes"))
    return moved, between


def verdict(run: RunLog) -> str:
    """What the run did, whether the log shows a problem, what balancing gave, what costs most."""
    known, failed = run["loss"][np.isfinite(run["loss"])], [run.failed] * bool(run.failed)
    if not len(known):
        none = (f"None of the {run.num_steps} steps has a loss that is a finite number"
                if run.num_steps else "No step is logged yet")
        return "; ".join([none, *failed]) + "."
    first, last = latest(known[::-1]), latest(known)
    found, num_steps = figures(run), run.settings.get("train.num_steps")
    total = f" of {num_steps}" if num_steps else ""
    problems = failed + ["the loss rose"] * bool(last > first) + [
        f"{name}: {found[name][0]:g}" for name in PROBLEMS if found[name][0]]
    measured, estimated = (number(run.median(f"measured.gain.{name}"), "%")
                           for name in ("measured", "predicted"))
    saved = f"{measured} of the phases' time, measured (estimated: {estimated})"
    if not np.isfinite(run["measured.gain.measured"]).any():
        estimated = number(found["saved by balancing, predicted"][0], "%")
        saved = f"an estimated {estimated} of the phases' time"
    seconds = {name: part.sum() for name, part in step_parts(run)[1].items()}
    most = max(seconds, key=seconds.get)
    share = seconds[most] / (sum(seconds.values()) or 1.0)
    return "; ".join((
        f"{int(run['step'][-1]) + 1}{total} steps are done, and the loss went from {number(first)} "
        f"to {number(last)}",
        ", ".join(problems) or "the log shows no problem",
        f"balancing saved {saved}",
        f"the largest part of a step is {most}, {number(share, '%')}."
        if seconds[most] else "no step was measured yet."))


def shared_losses(run: RunLog, other: RunLog) -> tuple[np.ndarray, np.ndarray, float]:
    """(n,) the steps that both did, (2, n) their losses, and the largest relative difference of
    two."""
    both = np.intersect1d(run["step"], other["step"])
    losses = np.array([r["loss"][np.searchsorted(r["step"], both)] for r in (run, other)])
    difference = np.abs(losses[0] - losses[1]) / np.maximum(np.abs(losses[1]), 1e-12)
    known = difference[np.isfinite(difference)]
    return both, losses, float(known.max()) if len(known) else np.nan


def side_by_side(run: RunLog, other: RunLog) -> str:
    """The figures of two runs, and the settings, versions and facts of the machine that differ."""
    rows = [("", run.name, other.name, "difference")]
    for (name, (x, unit)), (y, _) in zip(figures(run).items(), figures(other).values(),
                                         strict=True):
        change = number(x / y - 1, "%") if unit != "%" and y and np.isfinite(x / y) else ""
        rows.append((name, number(x, unit), number(y, unit), change))
    both, losses, _ = shared_losses(run, other)
    if len(both):
        a, b = losses[:, -1]
        rows.append((f"loss of step {int(both[-1])}, the last of both", number(a), number(b),
                     number(a / b - 1, "%")))
    wide = 1 + max(11, len(run.name), len(other.name))
    lines = [f"{name:<40}{a:>{wide}}{b:>{wide}}{change:>12}" for name, a, b, change in rows]
    settings = [f"  {key}: {show(a)} and {show(b)}"
                for key, (a, b) in different_settings(run, other).items()]
    return "\n".join(lines + ["", "Settings, versions and host that differ:"] * bool(settings)
                     + settings)


def compared(run: RunLog, other: RunLog) -> str:
    """How two runs compare, and in how much of what they are they differ."""
    both, losses, worst = shared_losses(run, other)
    alone = int(np.logical_xor(*np.isfinite(losses)).sum()) if len(both) else 0
    odd = f", and in {alone} of them only one has a loss" if alone else ""
    if not len(both):
        return f"{run.name} and {other.name} have no step in common."
    a, b = (r.median("step_s") for r in (run, other))
    keys = different_settings(run, other)
    machine = sum(key.startswith(("versions.", "world.")) for key in keys)
    settings = "settings are not recorded: attempts.jsonl is missing"
    if run.settings and other.settings:
        settings = (f"settings that differ: {len(keys) - machine}, versions and facts of the "
                    f"machine: {machine}")
    return (f"A step of {run.name} takes {number(a / b, '%')} of the time of one of {other.name} "
            f"(medians {number(a, 's')} and {number(b, 's')}); in {len(both)} steps that both did "
            f"their losses differ by at most {worst:.1e} relative{odd}; {settings}.")


def different_settings(run: RunLog, other: RunLog) -> dict[str, list]:
    """key -> [value in one run, value in the other] of the settings that differ, but for the
    folders of the runs."""
    found = differences(run.settings, other.settings)
    return {key: values for key, values in found.items() if key != "run.dir"}
