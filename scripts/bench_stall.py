"""Seconds until the late rank of a large run is named, with a real TCPStore on this machine:

    python scripts/bench_stall.py --ranks 2560

Every simulated rank has a connection of its own and looks twice a second whether a report was asked
for, as orchmllm.runtime.health does; threads of a few processes stand for the ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import threading
import time
from datetime import timedelta

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns of every connection without a host name

import torch.distributed as dist  # noqa: E402

from orchmllm.runtime.stall_report import (  # noqa: E402
    Report,
    describe,
    post_report,
    read_reports,
)

POLL_S = 0.5


def rank(number: int, args: argparse.Namespace, port: int, ready, said: list) -> None:
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False,
                          timeout=timedelta(seconds=300))
    ready.put(number)
    root, late = args.ranks // 3, args.ranks // 2
    if number == root:
        store.wait(["start"])
    else:
        time.sleep(random.random() * POLL_S)
        while not store.check(["asked"]):
            time.sleep(POLL_S)
    if number in args.silent:
        return
    started = time.perf_counter()
    if number == root:
        store.set("asked", "")
    post_report(store, root, number, Report((7, int(number != late)), number != late, "step 7"))
    if number == root:
        text = describe(read_reports(store, root, args.ranks), args.ranks)
        said.append((time.perf_counter() - started, text))


def process(numbers: range, args: argparse.Namespace, port, ready, results) -> None:
    where, said = port.get(), []
    threads = [threading.Thread(target=rank, args=(n, args, where, ready, said))
               for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2560)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--silent", type=int, nargs="*", default=[], metavar="RANK",
                        help="ranks that do not answer")
    args = parser.parse_args()
    context = multiprocessing.get_context("fork")
    port, ready, results = (context.Queue() for _ in range(3))
    share = -(-args.ranks // args.processes)
    processes = [context.Process(target=process, args=(
        range(first, min(first + share, args.ranks)), args, port, ready, results))
        for first in range(0, args.ranks, share)]
    for one in processes:
        one.start()
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for _ in processes:
        port.put(server.port)
    connections = len([ready.get() for _ in range(args.ranks)])
    server.set("start", "")
    (seconds, text), = [said for _ in processes for said in results.get()]
    print(f"{connections} ranks: {seconds:.2f} s until it is said: {text}")


if __name__ == "__main__":
    main()
