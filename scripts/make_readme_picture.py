"""Draws the picture of the README: one step of 64 ranks as it was sampled, and balanced.

    python scripts/make_readme_picture.py [--ranks 64] [--seed 0] [--out docs/step.png]

Lengths are those of `orchmllm data stats`: drawn from published statistics. Times are predicted
from the FLOPs of each rank in each phase of the 10B model of OrchMLLM's Table 1; every phase begins
when all ranks have ended the one before. Communication is not counted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES
from orchmllm.plan.step import plan_step
from orchmllm.tools.predict.workload import sample_layout

MODEL = MODELS["10b"]
NAMES = {"vision": "images", "audio": "audio clips", "llm": "LLM"}
SHADES = {"vision": "#dd8452", "audio": "#55a868", "llm": "#4c72b0"}
WAITING = "#d9d9d9"


def costs_of_step(num_ranks: int, seed: int) -> dict[str, np.ndarray]:
    """Phase -> (2, num_ranks) cost of each rank: as sampled, as balanced."""
    layout = sample_layout(MODEL, num_ranks=num_ranks, batch_size=30, seed=seed)
    plan = plan_step(layout, plan_spec(resolve(Recipe(model=MODEL), num_ranks, 8)))
    return {phase: np.stack(plan.phase_cost(phase)) for phase in PHASES}


def ends_of_phases(costs: dict[str, np.ndarray], side: int) -> np.ndarray:
    """(phases + 1,) when each phase begins and the last one ends. All ranks wait for the
    slowest."""
    return np.cumsum([0, *(costs[phase][side].max() for phase in PHASES)])


def draw(costs: dict[str, np.ndarray], out: Path) -> None:
    from matplotlib.figure import Figure

    whole = [ends_of_phases(costs, side)[-1] for side in (0, 1)]
    unit = whole[1] / 100  # a balanced step takes 100
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for side, (axes, title) in enumerate(zip(figure.subplots(1, 2, sharex=True, sharey=True), (
            f"As sampled: the step takes {whole[0] / whole[1]:.2f}x as long", "Balanced"),
            strict=True)):
        ends = ends_of_phases(costs, side) / unit
        for phase, begin, end in zip(PHASES, ends, ends[1:], strict=False):
            own = costs[phase][side] / unit
            ranks = np.arange(len(own))
            axes.barh(ranks, end - begin, left=begin, color=WAITING, height=0.8,
                      label="waiting" if phase == PHASES[-1] else None)
            axes.barh(ranks, own, left=begin, color=SHADES[phase], height=0.8, label=NAMES[phase])
        axes.axvline(ends[-1], color="#333333", linewidth=1, linestyle=":")
        axes.set(title=title, xlabel="time (a balanced step: 100)", yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].set_ylabel(f"{len(costs['llm'][0])} ranks")
    figure.axes[0].invert_yaxis()
    handles, names = figure.axes[0].get_legend_handles_labels()
    order = [names.index(name) for name in (*NAMES.values(), "waiting")]
    figure.legend([handles[k] for k in order], [names[k] for k in order], ncols=4, frameon=False,
                  loc="outside lower center")
    figure.savefig(out, dpi=130)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/step.png"))
    args = parser.parse_args(argv)
    costs = costs_of_step(args.ranks, args.seed)
    draw(costs, args.out)
    sampled, balanced = (ends_of_phases(costs, side)[-1] for side in (0, 1))
    print(f"{args.out}: {args.ranks} ranks, as sampled {sampled / balanced:.2f}x a balanced step")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
