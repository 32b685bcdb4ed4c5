"""Kills random ranks of a training run with SIGKILL and checks that it recovers every time:

    python scripts/chaos.py --kills 20

Runs the tiny recipe twice under torchrun on local CPU ranks, once in peace and once with
--max-restarts while a random rank is killed again and again, and compares the final checkpoints:
every tensor has to be bit-equal. Exit code 0 only if all kills were recovered from.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
TINY = [
    "model.vision.num_layers=2", "model.vision.hidden_size=32", "model.vision.intermediate_size=64",
    "model.audio.num_layers=2", "model.audio.hidden_size=32", "model.audio.intermediate_size=64",
    "model.llm.num_layers=2", "model.llm.hidden_size=48", "model.llm.intermediate_size=64",
    "data.num_validation=0", "checkpoint.every_steps=2", "train.batch_size=2",
]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps-per-kill", type=int, default=12)
    parser.add_argument("--data", default="demo_data", help="folder of scripts/make_demo_data.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=1800)
    return parser.parse_args()


def start(args: argparse.Namespace, folder: Path, log) -> subprocess.Popen:
    """torchrun of the whole run; every attempt resumes from the last checkpoint."""
    steps = args.kills * args.steps_per_kill
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks),
        "--max-restarts", str(args.kills + 2), "--monitor-interval", "0.1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "orchmllm.train",
        "--recipe", "recipes/demo.yaml", f"data.path={args.data}", f"run.dir={folder}",
        f"train.num_steps={steps}", *TINY]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    try:
        return [p for p in psutil.Process(launcher.pid).children()
                if "orchmllm.train" in p.cmdline()]
    except psutil.NoSuchProcess:
        return []


def steps_done(folder: Path) -> int:
    """Rows of the log so far, repeated steps included."""
    log = folder / "metrics.jsonl"
    return log.read_text(encoding="utf-8").count("\n") if log.exists() else 0


def torment(args: argparse.Namespace, launcher: subprocess.Popen, folder: Path) -> list[dict]:
    """Kills a random rank once the run has moved on a random number of steps since it restarted."""
    rng, kills = random.Random(args.seed), []
    deadline = time.monotonic() + args.timeout_s
    for number in range(args.kills):
        target = steps_done(folder) + rng.randint(1, args.steps_per_kill - 2)
        while steps_done(folder) < target and launcher.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no progress after kill {number}")
            time.sleep(0.02)
        time.sleep(rng.random() * 0.1)  # anywhere inside a step or a save
        ranks = ranks_of(launcher)
        if launcher.poll() is not None or not ranks:
            break
        victim = rng.choice(ranks)
        victim.send_signal(signal.SIGKILL)
        kills.append({"kill": number + 1, "after_rows": steps_done(folder), "pid": victim.pid})
        print(f"kill {number + 1}/{args.kills} after {steps_done(folder)} steps", flush=True)
        time.sleep(0.5)
    return kills


def final_tensors(folder: Path) -> dict[str, bytes]:
    root = folder / "checkpoints"
    newest = root / (root / "latest").read_text(encoding="utf-8")
    return {f"{path.name}/{name}": tensor.numpy().tobytes()
            for path in sorted(newest.glob("*.safetensors"))
            for name, tensor in load_file(path).items()}


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        calm, wild = Path(scratch, "calm"), Path(scratch, "wild")
        with Path(scratch, "calm.log").open("w") as log:
            if start(args, calm, log).wait(args.timeout_s):
                print(Path(scratch, "calm.log").read_text()[-3000:], file=sys.stderr)
                return 1
        with Path(scratch, "wild.log").open("w") as log:
            launcher = start(args, wild, log)
            try:
                kills = torment(args, launcher, wild)
                code = launcher.wait(args.timeout_s)
            finally:
                launcher.kill()
        if code or len(kills) < args.kills:
            print(Path(scratch, "wild.log").read_text()[-3000:], file=sys.stderr)
        same = not code and final_tensors(calm) == final_tensors(wild)
    print(f"{len(kills)} kills, exit code {code}, final tensors "
          f"{'bit-equal to' if same else 'DIFFERENT from'} the undisturbed run")
    return 0 if same and len(kills) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
