"""Real gloo ranks for tests: `run_ranks(fn, d, ...)` runs fn(world, ...) in d processes and returns
their results. Processes come from a fork server that has torch imported, so a world starts in
tenths of a second; a world that hangs is killed and fails the test."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

from orchmllm.launch import World

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.lib.preload"])


class RankFailure(AssertionError):
    """Some ranks raised; `errors` maps rank -> (exception class name, text, traceback)."""

    def __init__(self, errors: dict[int, tuple[str, str, str]]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {r}: {e[2]}" for r, e in sorted(errors.items())))


def _rank_main(fn, world: World, store: str, timeout_s: float, pipe, args, kwargs) -> None:
    import torch
    import torch.distributed as dist

    # As in a user's process; this one would start a fork server of its own for its workers.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    try:
        # A rank that destroys the group while others still connect would make them fail.
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world.world_size), rank=world.rank,
            world_size=world.world_size, timeout=timedelta(seconds=timeout_s))
        del os.environ["TORCH_DIST_INIT_BARRIER"]
        try:
            pipe.send((True, fn(world, *args, **kwargs)))
        finally:
            dist.destroy_process_group()
    except BaseException as e:
        pipe.send((False, (type(e).__name__, str(e), traceback.format_exc())))


def run_ranks(fn, num_ranks: int, *args, timeout_s: float = 500.0, context=_context, **kwargs
              ) -> list:
    """Results of fn(world, *args, **kwargs) by rank; fn must be importable (module level). context:
    of multiprocessing, for ranks in which nothing was computed before.

    Raises RankFailure if ranks raised, AssertionError naming the ranks that were still running
    after timeout_s (it is generous, as the machine may be busy; pytest's limit is above it) and
    what the others had raised."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = World(rank, num_ranks, rank, num_ranks, "", 0)
            # Not daemonic: ranks start worker processes of their own.
            process = context.Process(target=_rank_main, args=(
                fn, world, str(Path(folder) / "store"), timeout_s, theirs, args, kwargs))
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        try:
            return _collect(ranks, pipes, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.join(5.0 if not process.is_alive() else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def each_in_one_world(num_ranks: int, functions: Iterable[Callable]) -> dict[str, list]:
    """By name, the results of several functions by rank, of one world of ranks: for a fixture of a
    module whose tests would else start a world each."""
    functions = tuple(functions)
    found = run_ranks(_each, num_ranks, functions)
    return {function.__name__: [rank[i] for rank in found] for i, function in enumerate(functions)}


def _each(world: World, functions: tuple[Callable, ...]) -> list:
    return [function(world) for function in functions]


def _collect(ranks, pipes, deadline: float) -> list:
    results, errors = {}, {}
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(waiting.values())} hang\n{RankFailure(errors)}")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                fine, value = pipe.recv()
            except EOFError:
                fine, value = False, ("Died", f"exit code {ranks[rank].exitcode}", "died")
            (results if fine else errors)[rank] = value
    for process in ranks:
        process.join(5.0)
    if errors:
        raise RankFailure(errors)
    return [results[r] for r in range(len(ranks))]
