"""Kills a training run again and again in every way, starts the same command again, and checks that
nothing was lost:

    python scripts/chaos.py --kills 40 --steps 60

A tiny model is trained on local CPU ranks twice, once in peace and once while, at random moments
from its start on, a rank or the launcher gets SIGKILL, the launcher gets SIGTERM, or a rank is
stopped (SIGSTOP) and then killed. Every tensor of the two final checkpoints has to be bit-equal.
Exit code 0 only if all kills happened and the tensors are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from compare_versions import ROOT, tiny_demo
from safetensors.torch import load_file

SHORT = ["data.num_validation=0", "checkpoint.every_steps=1", "train.batch_size=2"]
WAYS = ("kill a rank", "kill the launcher", "terminate the launcher", "stop a rank, then kill it")
IN_USE = 2  # exit code while the ranks of a killed launcher are about to end


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=7200, help="of all together")
    return parser.parse_args()


class Run:
    """One run folder, and the command that trains in it, started as often as it takes."""

    def __init__(self, args: argparse.Namespace, recipe: list[str], folder: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        self._deadline = time.monotonic() + args.timeout_s
        self._command = [
            sys.executable, "-m", "orchmllm.train", *recipe, f"run.dir={folder}",
            f"train.num_steps={args.steps}",
            f"launch.nproc_per_node={args.ranks}", *SHORT]
        self.num_starts = 0

    def start(self) -> subprocess.Popen:
        self.num_starts += 1
        with self.log.open("a") as log:
            return subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                                    env=os.environ | {"OMP_NUM_THREADS": "1"})

    def rows(self) -> list[dict]:
        """Of the log so far, repeated steps included."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, launcher: subprocess.Popen, until=lambda: False) -> int | None:
        """The launcher's exit code, or None once until() holds."""
        while launcher.poll() is None:
            if until():
                return None
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"out of time; the end of the log:\n{self.log_end()}")
            time.sleep(0.01)
        return launcher.returncode

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def finish(self) -> int:
        """Starts it until it does not find the ranks of a killed launcher any more."""
        while (code := self.wait(self.start())) == IN_USE:
            time.sleep(1.0)
        return code

    def tensors(self) -> dict[str, bytes]:
        newest = self.folder / "checkpoints"
        newest = newest / (newest / "latest").read_text(encoding="utf-8")
        return {f"{path.name}/{name}": tensor.numpy().tobytes()
                for path in sorted(newest.glob("*.safetensors"))
                for name, tensor in load_file(path).items()}


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(launcher.pid).children()
    except psutil.NoSuchProcess:
        return []


def strike(way: str, launcher: subprocess.Popen, rng: random.Random) -> None:
    """Does it; where there are no ranks yet, to the launcher."""
    ranks = ranks_of(launcher)
    if "launcher" in way or not ranks:
        launcher.send_signal(signal.SIGTERM if "terminate" in way else signal.SIGKILL)
        return
    victim = rng.choice(ranks)
    if "stop" in way:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 3.0))
    victim.send_signal(signal.SIGKILL)


def torment(args: argparse.Namespace, run: Run, start_s: float) -> Counter:
    """Strikes args.kills times -> how often in which way. start_s: from a start to its first step.
    """
    rng, done = random.Random(args.seed), Counter()
    while done.total() < args.kills:
        way = WAYS[done.total() % len(WAYS)]
        steps = rng.randint(0, max(1, args.steps // args.kills))
        latest = time.monotonic() + (args.timeout_s if steps else rng.uniform(0, start_s))
        rows = len(run.rows()) + max(steps, 1)
        launcher = run.start()
        code = run.wait(launcher, lambda latest=latest, rows=rows: (
            len(run.rows()) >= rows or time.monotonic() >= latest))
        time.sleep(rng.uniform(0, 0.1) if steps else 0)  # anywhere inside a step or a save
        if code == 0:
            break
        if code is not None:
            if code != IN_USE:
                raise RuntimeError(f"it ended by itself with {code}:\n{run.log_end()}")
            time.sleep(1.0)
            continue
        try:
            strike(way, launcher, rng)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it was faster
            continue
        done[way] += 1
        run.wait(launcher)
        after = run.rows()[-1]["step"] + 1 if run.rows() else 0
        print(f"{done.total()}/{args.kills}: {way} after {after} steps: exit code "
              f"{launcher.returncode}", flush=True)
    return done


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        recipe = tiny_demo(Path(scratch, "data"))
        calm, wild = (Run(args, recipe, Path(scratch, name)) for name in ("calm", "wild"))
        started, launcher = time.monotonic(), calm.start()
        if calm.wait(launcher, lambda: bool(calm.rows())) is None:
            start_s = time.monotonic() - started
            calm.wait(launcher)
        if launcher.returncode:
            print(calm.log_end(), file=sys.stderr)
            return 1
        done = torment(args, wild, start_s)
        code = wild.finish()
        if code:
            print(wild.log_end(), file=sys.stderr)
        same = not code and calm.tensors() == wild.tensors()
        print(f"{done.total()} kills ({', '.join(f'{v} x {k}' for k, v in done.items())}), "
              f"{wild.num_starts} starts, {len(wild.rows())} steps for {args.steps}; final tensors "
              f"{'bit-equal to' if same else 'DIFFERENT from'} those of the undisturbed run")
    return 0 if same and done.total() == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
