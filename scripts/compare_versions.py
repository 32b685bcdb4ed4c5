"""Trains the demo with two versions of this code and compares them bit by bit: a restructuring must
not change a loss, a plan or a checkpoint.

    python scripts/compare_versions.py BASE [--steps 4] [--ranks 1,4] [--dispatches load,bytes,...]

BASE is a git revision that has compositions (orchmllm/composition); it is checked out and built in
a temporary folder, and this working tree is compared with it. For each number of ranks and each
dispatch both versions train by this tree's recipes/demo.yaml, with a tiny model that this tree
writes, from the same seed on the same files. Compared are, for each step, the loss, the gradient
norm and every phase's imbalance and moved bytes, and the tensors of the checkpoint. Then this
version resumes BASE's checkpoint and has to reach what BASE itself reaches. Exit code 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.lib.drawn import write_model  # noqa: E402

TINY = ["train.batch_size=3", "data.num_validation=4", "checkpoint.keep_last=9"]
FACTS = ("loss", "grad_norm", "num_targets", "validation_loss")


def tiny_demo(data: Path, num_examples: int = 60) -> list[str]:
    """Writes the demo corpus with a tiny model to `data`; the recipe that trains it, with its
    overrides."""
    subprocess.run([sys.executable, "scripts/make_demo_data.py", "--out", str(data),
                    "--num-examples", str(num_examples), "--seed", "0"], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    model = write_model(data / "tiny_model", data / "tokenizer.json")
    return [str(ROOT / "recipes" / "demo.yaml"), f"model.config={model}",
            f"data.path={data / 'data.jsonl'}"]


def checked_out(revision: str, folder: Path) -> Path:
    """The revision with its core built, in a worktree below `folder`."""
    tree = folder / "base"
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), revision],
                   cwd=ROOT, check=True)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree,
                   check=True)
    return tree


def train(tree: Path, recipe: list[str], run_dir: Path, ranks: int, dispatch: str,
          *options: str) -> None:
    """A run of the code in `tree`. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "orchmllm.train", *recipe, *TINY, f"run.dir={run_dir}",
         f"launch.nproc_per_node={ranks}", f"balance.dispatch={dispatch}", *options],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree}: exit {done.returncode}\n{done.stdout[-2000:]}"
                           f"\n{done.stderr[-4000:]}")


def facts(run_dir: Path) -> dict[str, object]:
    """What has to be equal: "row N" -> facts of a row of the log; a tensor of a checkpoint -> its
    hash."""
    found: dict[str, object] = {}
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for k, row in enumerate(map(json.loads, lines)):
        phases = {phase: {key: value for key, value in figures.items()
                          if "imbalance" in key or "bytes" in key}
                  for phase, figures in row.get("phases", {}).items()}
        found[f"row {k}"] = {f: row[f] for f in FACTS if f in row} | {"phases": phases}
    for step in sorted((run_dir / "checkpoints").glob("step_*")):
        for file in sorted(step.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                found[f"{step.name}/{file.name}/{name}"] = hashlib.sha256(
                    tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
    return found


def differences(base: dict[str, object], now: dict[str, object]) -> Iterator[str]:
    """A line for each fact that differs."""
    for name in sorted(base.keys() | now.keys()):
        if base.get(name) != now.get(name):
            yield f"{name}: {base.get(name)} -> {now.get(name)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", default="1,4")
    parser.add_argument("--dispatches", default="load,bytes,tensors")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = tiny_demo(folder / "data")
        base = checked_out(args.base, folder)
        try:
            for ranks in map(int, args.ranks.split(",")):
                for dispatch in args.dispatches.split(","):
                    found = list(compare(base, recipe, folder / f"{ranks}_{dispatch}", ranks,
                                         dispatch, args.steps))
                    bad += len(found)
                    print(f"{ranks} rank(s), {dispatch}: "
                          f"{'equal' if not found else 'DIFFERENT'}", *found, sep="\n  ",
                          flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(base)], cwd=ROOT)
    return int(bad > 0)


def compare(
    base: Path, recipe: list[str], folder: Path, ranks: int, dispatch: str, steps: int
) -> Iterator[str]:
    """Both versions from scratch, then both from BASE's checkpoint; yields the differences."""
    half, first, second = f"train.num_steps={steps}", folder / "base", folder / "now"
    for tree, run_dir in ((base, first), (ROOT, second)):
        train(tree, recipe, run_dir, ranks, dispatch, half)
    yield from differences(facts(first), facts(second))
    shutil.copytree(first, folder / "resumed")
    for tree, run_dir in ((base, first), (ROOT, folder / "resumed")):
        train(tree, recipe, run_dir, ranks, dispatch, f"train.num_steps={steps + 2}")
    yield from (f"resumed: {d}" for d in differences(facts(first), facts(folder / "resumed")))


if __name__ == "__main__":
    sys.exit(main())
