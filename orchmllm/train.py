"""Trains from a recipe: `orchmllm train RECIPE [section.key=value ...]`, also as
`python -m orchmllm.train`.

Started plainly it launches local ranks (launch.nproc_per_node; all GPUs by default); under torchrun
or srun it joins the ranks that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from orchmllm import launch

if __name__ == "__main__":
    launch.interrupt_quietly()

from orchmllm.cli.options import in_one_line, recipe_parser
from orchmllm.comm.errors import AgreedError
from orchmllm.config.recipe import Recipe, explain, read_recipe
from orchmllm.runtime import preflight
from orchmllm.runtime.local_ranks import run_local
from orchmllm.runtime.run_lock import STALE_S, FolderInUse, check_folder, lock_folder

if TYPE_CHECKING:
    import torch.distributed as dist

    from orchmllm.runtime.health import HangWatchdog

PREVIOUS_S = 30.0  # that the ranks of the attempt before get to end, after an elastic restart

EPILOG = """\
examples:
  orchmllm train recipes/demo.yaml
  orchmllm train recipes/demo.yaml train.num_steps=50 balance.enabled=false
  orchmllm train recipes/demo.yaml --print-config

exit codes: 0 done; 1 an error, told once; 2 a recipe or command line that cannot be used, or a run
folder that another run writes; 128 + n stopped by signal n, after saving.
"""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = recipe_parser("train", __doc__, (
        ("--ranks", 0, "ranks that start here, in place of launch.nproc_per_node; under a "
         "launcher, and with --validate, those that it has to start; 0: what the recipe says"),))
    parser.epilog = EPILOG
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--validate", action="store_true",
                      help="check the recipe and what it needs of this machine (data, tokenizer, "
                      "packages, run folder, disk), list every problem, start nothing")
    what.add_argument("--print-config", action="store_true",
                      help="print every key, its value and where it comes from, start nothing")
    return parser.parse_recipe(argv)


def run_rank(recipe: Recipe, world: launch.World, work: Callable[[HangWatchdog], None],
             folder: Path | None = None) -> int:
    """Runs `work` in the default process group of all ranks; returns this rank's exit code. A
    rank's error is reported by all ranks with the same text. folder: is written by these ranks
    alone, or nothing is run."""
    from orchmllm.runtime.health import CURABLE, HangWatchdog
    from orchmllm.runtime.stop import Stopped

    # At once: a rank that waits in a collective would not get to see a KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdin = Path(os.devnull).open()  # a package that asks would wait, and all ranks with it
    with ExitStack() as stack:
        try:
            store = stack.enter_context(launch.process_group(world, recipe.launch.timeout_s))
        except ValueError as e:
            launch.report_failure(f"error: {e}")
            return 2
        unlock, problem = _take_folder(store, world, folder,
                                       taken=lambda: watch.folder_taken.set())
        if problem:
            launch.report_failure(f"error: {problem}")
            return 2
        watch = HangWatchdog(
            store, world.rank, world.world_size, folder=recipe.run.folder / "hang",
            stall_timeout_s=recipe.launch.stall_timeout_s, exit_now=launch.exit_now)
        try:
            work(watch)
        except Stopped as e:
            return e.exit_code
        except Exception as e:
            text = f"error: {watch.settle(e)}"
            if not isinstance(e, (*CURABLE, AgreedError)) and "failed at step" in text:
                text += "\n" + traceback.format_exc()
            launch.exit_now(1, text)  # threads may hang in collectives of the dead
        finally:
            watch.close()
            unlock()
    return 0


def _take_folder(store: dist.Store, world: launch.World, folder: Path | None,
                 taken: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """(what unlocks the run folder, why it cannot be written), the second on all ranks. taken: is
    called on rank 0 if another run takes the folder over."""
    import torch.distributed as dist

    unlock, problem = (lambda: None), ""
    if folder is None:
        return unlock, problem
    if world.rank == 0:
        try:
            unlock = lock_folder(folder, PREVIOUS_S if world.attempt else 0.0, taken=taken)
        except FolderInUse as e:
            problem = str(e)
        store.set("folder", json.dumps(problem))
    store.wait(["folder"], timedelta(seconds=2 * STALE_S))
    if problem := json.loads(store.get("folder")):
        dist.barrier()  # the store may live in a rank that would leave
    return unlock, problem


def _start_problems(
    recipe: Recipe, world: launch.World | None, expected: int, *, machine: bool
) -> list[str]:
    """Why the recipe cannot run on the ranks that are there, or will be (`expected`), or from its
    pretrained weights. machine: also what this machine lacks for it."""
    from orchmllm.hf.sources import find_sources
    from orchmllm.sharding.choice import check_layers
    from orchmllm.sharding.units import checkpoint_bytes

    if wrong := preflight.problems([lambda: find_sources(recipe.model)]):
        return wrong  # the other checks read the folder, too
    checks = [lambda: _check_ranks(recipe, world, expected), lambda: check_layers(recipe)]
    if machine:
        checks += [check for _, check in preflight.checks(recipe, checkpoint_bytes(recipe))]
    if machine and world is None:
        checks.insert(0, lambda: check_folder(recipe.run.folder, elsewhere=False))
    return preflight.problems(checks)


def _check_ranks(recipe: Recipe, world: launch.World | None, expected: int) -> None:
    """Raises ValueError if the recipe cannot run on so many ranks."""
    from orchmllm.config.job import check_world, resolve

    ranks = world.world_size if world else expected or recipe.launch.nproc_per_node
    if expected and expected != ranks:
        raise ValueError(f"--ranks {expected}, but the launcher has started {ranks} ranks, and no "
                         f"flag changes that: make it start {expected}, or drop the flag")
    if ranks:
        check_world(resolve(recipe, ranks, world.local_world_size if world else 1))


def _announcement(recipe: Recipe, num: int) -> str:
    """The first line of a run, before torch is imported. num: of ranks, 0 for one per GPU."""
    ranks = f"{num} rank{'s' if num > 1 else ''}" if num else "one rank per GPU"
    data = ", ".join(source.path for source in preflight.sources_of(recipe.data))
    return f"{ranks}; data {data}; run folder {recipe.run.dir}"


@in_one_line
def main(argv: list[str]) -> int:
    args = parse(argv)
    loaded, world = read_recipe(args.recipe, args.overrides), launch.current_world()
    recipe = loaded.recipe
    ranks = world.world_size if world else args.ranks or recipe.launch.nproc_per_node
    starts = not (args.validate or args.print_config) and (
        world is None or world.rank == 0 and not world.checked)
    if starts:
        launch.say(_announcement(recipe, ranks))
        if not world and args.ranks and recipe.launch.nproc_per_node not in (0, args.ranks):
            launch.say(f"--ranks {args.ranks} is what starts, not launch.nproc_per_node="
                       f"{recipe.launch.nproc_per_node} of the recipe")
    problems = _start_problems(recipe, world, args.ranks, machine=not (
        args.print_config or (world is not None and (world.checked or world.local_rank > 0))))
    if problems:
        launch.report_failure("\n".join(f"error: {p}" for p in problems))
        return 2
    if args.validate or args.print_config:
        if args.validate:
            from orchmllm.runtime.build import open_data

            open_data(recipe)
        print(explain(loaded) if args.print_config else f"recipe {args.recipe}: no problems\n",
              end="")
        return 0
    if starts:
        from orchmllm.data.loading.ray_workers import own_cluster
        from orchmllm.runtime.build import look_at_data

        ledgers = look_at_data(recipe, launch.say)
        world = world and replace(world, ledgers=ledgers)
    elif world.rank and not world.ledgers:
        world = replace(world, ledgers="[]")  # rank 0 looks for all
    if world is None:
        with own_cluster(recipe.data):
            return run_local("orchmllm.train", argv, ranks, log=launch.say)

    def work(watch: HangWatchdog) -> None:
        from orchmllm.trainer import Trainer

        if world.rank == 0 and not world.checked:
            launch.say(launch.describe_devices())

        trainer = Trainer(recipe, world, watch=watch)
        try:
            trainer.run()
        finally:
            trainer.close()

    return run_rank(recipe, world, work, recipe.run.folder)


if __name__ == "__main__":
    launch.exit_with(main)
