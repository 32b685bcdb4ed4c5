"""Checks this machine, and under torchrun or srun all machines of a job and their network.

    orchmllm doctor recipes/demo.yaml
    torchrun --nproc-per-node 8 -m orchmllm doctor recipes/demo.yaml
    torchrun --nproc-per-node 8 -m orchmllm doctor --self-test

Every check says what was found and, if it failed, what to do. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING

from orchmllm import launch
from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.runtime.local_ranks import run_local

if TYPE_CHECKING:
    from orchmllm.tools.doctor.network import Meeting

LATE_CURE = "look at that node: its disk or its network hangs"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("doctor", __doc__, (
        ("--self-test", False, "exchange, train, balance, save and resume with a tiny model on the "
         "ranks that are there"),
        ("--network", 1.0, "what a link between nodes has to reach each way, in Gbit/s"),
        ("--timeout", 30.0, "seconds after which a rank counts as late or dead"),
        ("--json", False, "print JSON instead of a table")))
    parser.add_recipe("check also that it can run here")
    args = parser.parse_recipe(argv, optional=True)
    if args.self_test and any(getattr(args, name) != parser.get_default(name)
                              for name in ("recipe", "network", "timeout", "json")):
        parser.error("--self-test takes neither a recipe nor another option: the model is its own")
    if not (args.timeout > 0 and args.network >= 0):
        parser.error(f"--timeout {args.timeout:g} must be above 0, and --network {args.network:g} "
                     "at least 0")
    return args


@in_one_line
def main(argv: list[str]) -> int:
    args = parse(argv)
    world = launch.current_world()
    if args.self_test:
        if world is None:
            return run_local("orchmllm", ["doctor", *argv], 0)
        from orchmllm.tools.doctor.self_test import run

        return run(world)
    started = time.perf_counter()
    if world is None:
        from orchmllm.tools.doctor.machine import examine
        from orchmllm.tools.doctor.table import merged

        return show(merged({0: examine(args.recipe, args.overrides, None)}), args, started)
    return together(world, args, started)


def together(world: launch.World, args: argparse.Namespace, started: float) -> int:
    """What each rank of a job does; rank 0 shows the table."""
    from orchmllm.tools.doctor import network

    try:
        meeting = network.meet(world, args.timeout)
    except RuntimeError as e:
        print(f"FAIL  rank {world.rank} does not reach the others at {world.master_addr}:"
              f"{world.master_port}: {str(e).splitlines()[0]}\n      cure: open that port on the "
              "node of rank 0, and start all ranks at about the same time", file=sys.stderr)
        return 1
    try:
        code = examine_together(meeting, args, started)
    except RuntimeError as e:  # the store went away with rank 0
        print(f"FAIL  rank {world.rank} was too late: {str(e).splitlines()[0]}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    if network.is_left_behind():
        os._exit(code)
    return code


def examine_together(meeting: Meeting, args: argparse.Namespace, started: float) -> int:
    import torch

    from orchmllm.tools.doctor import network, table
    from orchmllm.tools.doctor.machine import Check, bounded, examine

    world, code = meeting.world, 0
    missing = sorted(set(range(world.world_size)) - meeting.present.keys())
    try:
        checks = bounded(partial(examine, args.recipe, args.overrides, world), args.timeout)
    except futures.TimeoutError:
        checks = [Check("answers", False, "late at its own checks", LATE_CURE)]
    meeting.report(checks, [], "the network")
    pairs = network.meet_in_pairs(meeting)
    if torch.cuda.is_available() and not missing and world.world_size > 1:
        meeting.report(checks, pairs, "NCCL")
        checks += network.nccl(meeting, launch.device_of(world), pairs)
    meeting.report(checks, pairs, "")
    if world.rank == 0:
        found, pairs, late = meeting.gather()
        rows = table.merged(found)
        if len(meeting.present) > 1:
            nodes = {r for p in pairs for r in p["ranks"]}
            rows += table.network(pairs, len(nodes), args.network)
        rows.append(Check(
            "ranks there", not missing, f"{len(meeting.present)} of {world.world_size}" + (
                f": {table.ranks(missing)} did not come in {args.timeout:g} s" if missing else ""),
            "look at what these ranks print, and whether their nodes reach "
            f"{world.master_addr}:{world.master_port}"))
        rows += [Check("answers", False, f"rank {r} on {meeting.present[r][0]}: late at {at}",
                       LATE_CURE)
                 for r, at in late.items()]
        code = show(rows, args, started)
    return code


def show(checks: list, args: argparse.Namespace, started: float) -> int:
    from orchmllm.tools.doctor.table import text

    seconds = time.perf_counter() - started
    ok = all(c.ok for c in checks)
    print(json.dumps({"ok": ok, "seconds": seconds, "checks": [
        {k: v for k, v in c._asdict().items() if k in ("name", "ok", "what", "cure")}
        for c in checks]}, indent=1) if args.json else text(checks, seconds), flush=True)
    return 0 if ok else 1
