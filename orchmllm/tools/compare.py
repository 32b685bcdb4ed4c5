"""Trains with balancing off and on, from the same seed, and shows that the losses are the same
while the waiting is gone.

    orchmllm compare recipes/demo.yaml [section.key=value ...]

Two models train in the same processes, one without and one with balancing, on the same batches and
step by step in turn, so that whatever else the machine does meets both alike.
launch.nproc_per_node ranks run on the CPU with one thread each. Where several ranks share a core,
wall time does not show what a rank waits for, so the CPU time of each rank's thread in each phase
is compared beside it.

Writes comparison.json into run.dir. Exit code 1 if the losses differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from orchmllm import launch
from orchmllm.cli.options import in_one_line, recipe_parser
from orchmllm.config.job import check_world, resolve
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.data.loading.ray_workers import own_cluster
from orchmllm.models.described import vocabulary
from orchmllm.runtime.build import look_at_data
from orchmllm.runtime.local_ranks import run_local
from orchmllm.train import run_rank

NUM_RANKS = 4  # where the recipe does not say how many
WARM_UP_STEPS = 2  # first calls allocate and choose kernels; they would be charged to one side
MAX_LOSS_DIFFERENCE = 1e-5  # relative, at any step: float32 sums in another order


def parse(argv: list[str]) -> argparse.Namespace:
    parser = recipe_parser("compare", __doc__)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_recipe(argv)


def variant(recipe: Recipe, enabled: bool) -> Recipe:
    """The recipe with balancing on or off in all steps, from scratch and without checkpoints."""
    return replace(
        recipe, run=replace(recipe.run, resume="never"),
        checkpoint=replace(recipe.checkpoint, every_steps=-1),
        balance=replace(recipe.balance, enabled=enabled, measure_every=0))


def train_in_turn(recipe: Recipe, world: launch.World) -> dict[str, list[dict]]:
    """Rows of metrics ("off", "on") of two runs whose steps alternate, the first of a pair too;
    wall_s in a row: seconds of the step, waiting for its data included. With rows to validate on, a
    row with validation_loss before and after."""
    import torch.distributed as dist

    from orchmllm.trainer import Trainer

    warm_up = Trainer(variant(recipe, True), world)
    for _, step in zip(range(WARM_UP_STEPS), warm_up.loader(), strict=False):
        warm_up.train_step(step)
    trainers = {name: Trainer(variant(recipe, name == "on"), world) for name in ("off", "on")}
    for trainer in trainers.values():
        trainer.checkpointer.resume()  # with the weights of run.init_from

    def validation() -> dict[str, list[dict]]:
        return {name: [{"step": t.progress.step, **t.validate()}]
                if recipe.data.num_validation else []
                for name, t in trainers.items()}

    rows = validation()
    steps = {name: iter(trainer.loader()) for name, trainer in trainers.items()}
    for i in range(recipe.train.num_steps):
        for name in ("off", "on") if i % 2 else ("on", "off"):
            dist.barrier()
            started = time.perf_counter()
            row = trainers[name].train_step(next(steps[name]))
            dist.barrier()
            rows[name].append({**row, "wall_s": time.perf_counter() - started})
        if world.rank == 0:
            print(describe(rows["off"][-1], rows["on"][-1], recipe.train.num_steps), flush=True)
    last = validation()
    return {name: rows[name] + last[name] for name in rows}


def describe(off: dict, on: dict, num_steps: int) -> str:
    """One line on a step, each figure without and with balancing."""
    phases = " | ".join(f"{p} {off['phases'][p]['imbalance_after']:.2f} "
                        f"{on['phases'][p]['imbalance_after']:.2f}" for p in on["phases"])
    return (f"step {on['step'] + 1:>2}/{num_steps} | loss {off['loss']:.4f} {on['loss']:.4f} | "
            f"{phases} | {off['wall_s']:.2f} s {on['wall_s']:.2f} s")


def run_ranks(recipe: Recipe, world: launch.World, out: Path) -> int:
    """What a rank does; rank 0 writes the rows to `out`."""
    def work(watch: object) -> None:
        if world.rank == 0:
            print(f"\n{world.world_size} ranks, balancing off and on in turn. Off, on: loss, "
                  "slowest rank / mean rank (predicted), wall time", flush=True)
        result = train_in_turn(recipe, world)
        if world.rank == 0:
            out.write_text(json.dumps(result), encoding="utf-8")

    return run_rank(recipe, world, work)


def largest_difference(a: list[float], b: list[float]) -> float:
    """Largest relative difference of two lists of losses, inf if one is not finite."""
    if not all(math.isfinite(x) for x in (*a, *b)):
        return math.inf
    return max((abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in zip(a, b, strict=True)),
               default=0.0)


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError under torchrun or srun: it starts its ranks itself."""
    args = parse(argv)
    recipe = load_recipe(args.recipe, args.overrides)
    if recipe.run.resume not in ("auto", "never"):
        raise ValueError(f"run.resume is {recipe.run.resume}: the comparison begins with step 0; "
                         "run.init_from takes the weights of a checkpoint")
    world = launch.current_world()
    if world is not None and args.out is None:
        raise ValueError("the comparison starts its ranks itself: run it without torchrun/srun")
    if world is not None:
        return run_ranks(recipe, world, args.out)
    return run_all(recipe, argv)


def run_all(recipe: Recipe, argv: list[str]) -> int:
    """Launches the ranks, then reports. Raises ValueError for a number of ranks that cannot be."""
    run_dir, started = recipe.run.folder, time.perf_counter()
    num_ranks = recipe.launch.nproc_per_node or NUM_RANKS
    check_world(resolve(recipe, num_ranks, num_ranks))  # before minutes of training
    run_dir.mkdir(parents=True, exist_ok=True)
    look_at_data(recipe, launch.say)
    with tempfile.TemporaryDirectory() as folder, own_cluster(recipe.data):
        out = Path(folder) / "rows.json"
        code = run_local("orchmllm", ["compare", *argv, "--out", str(out)], num_ranks,
                         cpu_only=True, num_threads=1)
        if code:
            return code
        rows = json.loads(out.read_text(encoding="utf-8"))
    from orchmllm.tools.report import comparison as report

    result = report.summarize(rows)
    result["training_s"] = time.perf_counter() - started
    result["vocab_size"] = vocabulary(recipe.model)[0]
    result["loss_difference"] = largest_difference(result["loss_off"], result["loss_on"])
    (run_dir / "comparison.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report.comparison_table(result, recipe))
    print(f"\nwritten: {run_dir / 'comparison.json'}")
    worst = result["loss_difference"]
    if worst > MAX_LOSS_DIFFERENCE:
        print(f"error: losses with and without balancing differ by {worst:.1e} relative, more than "
              f"{MAX_LOSS_DIFFERENCE:.0e}; balancing must not change the result", file=sys.stderr)
        return 1
    return 0
