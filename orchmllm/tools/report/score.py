"""What was predicted of a run beside what it measured: by the cost model, and by the dry run."""

from __future__ import annotations

import argparse

import numpy as np

from orchmllm.config.recipe import read_recipe
from orchmllm.tools.predict.dry_run import dry_run
from orchmllm.tools.predict.examples import examples_of
from orchmllm.tools.predict.options import cluster_of
from orchmllm.tools.predict.text import gpu_text
from orchmllm.tools.report.log import RunLog
from orchmllm.tools.report.svg import number


def score(run: RunLog, args: argparse.Namespace) -> str:
    """A line for each prediction. args: of cluster_options. Raises ValueError for a run without
    steps, or whose recipe cannot be read or predicted."""
    if not run.num_steps:
        raise ValueError(f"{run.folder}: no step was logged, so nothing was measured")
    recipe, ranks = read_recipe(run.folder / "recipe.yaml").recipe, int(run["num_ranks"][-1])
    examples, hardware = examples_of(recipe, args.mix, args.lengths), cluster_of(args)
    tried = dry_run(recipe, ranks, hardware, examples=examples)
    expected = tried["predicted"]["balanced"]
    rows = [
        ("gain of balancing, cost model", "measured.gain.measured", "%",
         run.median("measured.gain.predicted")),
        ("gain of balancing, dry run", "measured.gain.measured", "%",
         1 - 1 / tried["ratio"]["none / balanced"])]
    if np.isfinite(run["mfu"]).any():  # predictions of time are for GPUs
        rows += [("seconds a step, dry run", "step_s", "s", expected["step_s"]),
                 ("tokens/s, dry run", "tokens_per_s", "", ranks * expected["tokens_per_gpu"])]
    lines = [f"{ranks} ranks; GPU assumed: {gpu_text(tried['hardware'])}",
             f"Lengths: {examples.what}", f"{'':30}{'measured':>10}{'predicted':>11}{'error':>14}"]
    for name, column, unit, predicted in rows:
        measured = run.median(column)
        error = (f"{100 * (predicted - measured):+.1f} points" if unit == "%"
                 else f"{100 * (predicted / measured - 1):+.1f}%")
        lines.append(f"{name:30}{number(measured, unit):>10}{number(predicted, unit):>11}"
                     + f"{error if np.isfinite(measured) else '':>14}")
    return "\n".join(lines)
