"""Trains some steps of drawn sizes on one rank and measures them, beside what is predicted.

    python -m scripts.gpu.steps --result FILE --work FOLDER --tokens 16384 --steps 14
        [--model 7b] [--tiny] [--trace FILE.json.gz] [--log FILE] [--at-once] section.key=value ...

The recipe is recipes/mllm_1gpu.yaml with the overrides; model and rows are written to the folder
(see drawn.py), of small sizes with --tiny. train.batch_size is chosen so that every step has
--tokens LLM tokens. The file of figures grows with the run. --trace: of the last two steps, since
the GPU has nothing to do while recording begins. --log: a line a step, as soon as it is done.
--at-once: each step is read before the next one begins.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import torch

from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.launch import device_of, process_group
from orchmllm.tools.predict.examples import dataset_of
from orchmllm.trainer import Trainer
from scripts.gpu import trace
from scripts.gpu.drawn import MODELS, layouts_of, one_rank, predicted, sized, write
from scripts.gpu.setup import ROOT

WARM_UP = 3  # steps, in which kernels are loaded and graphs are made


def recipe_of(overrides: list[str], steps: int, traced: bool, model: Path, rows: Path) -> Recipe:
    return load_recipe(ROOT / "recipes" / "mllm_1gpu.yaml", [
        f"model.config={model}", f"data.path={rows}", f"data.index_dir={rows.parent / 'index'}",
        f"train.num_steps={steps}", "train.warmup_steps=2",
        *[f"profile.steps={steps - 2}-{steps - 1}"] * traced, *overrides])


def reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_of(device: torch.device) -> dict:
    """The peak of tensors since reset_peak; on a CPU that of the process since it started."""
    if device.type == "cpu":
        return {"peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                "peak_of": "the process"}
    return {"peak_bytes": float(torch.get_device_module(device).max_memory_allocated(device)),
            "peak_of": "tensors"}


def train(recipe: Recipe, dataset: ConversationDataset, args: argparse.Namespace,
          figures: dict) -> None:
    """Runs the steps; what they took is added to the figures."""
    world, rows = one_rank(), []
    device = device_of(world)

    def told(step, row: dict) -> None:
        rows.append(row)
        timed = [r for r in rows[WARM_UP:] if r["step"] not in recipe.profile.window]
        if timed:
            shares = [r["mfu"] for r in timed if r["mfu"] is not None]  # none on a CPU
            figures.update(
                steps=len(timed), first_step_s=rows[0]["step_s"],
                mfu=median(shares) if shares else None,
                step_s=median(r["step_s"] for r in timed),
                tokens_per_s=median(r["tokens_per_s"] for r in timed), **peak_of(device))
        args.result.write_text(json.dumps(figures), encoding="utf-8")
        if args.log:
            with args.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": row["step"], "loss": row["loss"],
                                       "step_s": row["step_s"], "at": time.monotonic()}) + "\n")

    with process_group(world, recipe.launch.timeout_s):
        trainer = Trainer(recipe, world, dataset=dataset, on_step=told)
        trainer.reads_late &= not args.at_once
        try:
            reset_peak(device)
            trainer.run()
        finally:
            trainer.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--tokens", type=int, required=True, help="LLM tokens of a step, at least")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    recipe = recipe_of(args.overrides, args.steps, bool(args.trace),
                       *write(args.work, args.model, args.tiny))
    dataset = dataset_of(recipe)
    recipe = sized(recipe, dataset, args.tokens)
    layouts = layouts_of(recipe, dataset)
    tokens = [int(layout.tokens_per_example.sum()) for layout in layouts]
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    figures = {"tokens_min": min(tokens), "tokens_mean": sum(tokens) / len(tokens), "trace": None,
               "idle_share": None, "longest": [], **predicted(recipe, layouts[WARM_UP:], name)}
    train(recipe, dataset, args, figures)
    if args.trace:
        (path,) = (recipe.run.folder / "profile").glob("*.json")
        with path.open("rb") as source, gzip.open(args.trace, "wb") as target:
            shutil.copyfileobj(source, target)
        figures |= {"trace": args.trace.name, **trace.read(args.trace)}
    args.result.write_text(json.dumps(figures), encoding="utf-8")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
