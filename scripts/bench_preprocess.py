"""What a step waits for its data, and what decoding costs the rank, with and without Ray.

    python scripts/bench_preprocess.py [--images 20] [--side 1024] [--steps 12] [--compute-s 0.5]
        [--workers 2]

One rank takes steps of `images` JPEGs; between two of them it sleeps, as a rank whose GPU computes.
The actors are processes on the same machine, so their decoding takes cores from nobody only where
there are enough. Throughput is measured without sleep: what the loader gives in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from orchmllm.config.recipe import load_recipe
from orchmllm.data.loading.ray_workers import own_cluster
from orchmllm.launch import World
from orchmllm.tools.compose.drawn import shapes, write_drawn
from orchmllm.tools.init.demo import LLM, TOWER
from orchmllm.trainer import Trainer

RECIPE = """
data: {{path: {folder}/data.jsonl, index_dir: {folder}/index}}
model: {{config: {folder}/model, proof: false}}
train: {{batch_size: {images}, num_steps: {steps}}}
balance: {{dispatch: load}}
run: {{dir: {folder}/run}}
"""


def write_data(folder: Path, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((args.side, args.side), Image.Resampling.BICUBIC)
    with (folder / "data.jsonl").open("w") as f:
        for k in range(args.images * 4):
            picture.save(folder / f"{k}.jpg", quality=90)
            f.write(json.dumps({"image": f"{k}.jpg", "caption": "a picture"}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["a picture"], trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_drawn(shapes(LLM, TOWER, vocab_size=512), folder / "tokenizer.json", folder / "model",
                args.side)
    (folder / "r.yaml").write_text(RECIPE.format(
        folder=folder, images=args.images, steps=args.steps))


def measure(recipe, args: argparse.Namespace, compute_s: float
            ) -> tuple[list[float], float, float]:
    """(seconds waited by step, CPU seconds of this process a step, images a second)."""
    trainer = Trainer(recipe, World(0, 1, 0, 1, "", 0))
    waits = []
    for step in trainer.loader():
        if not waits:  # the first one waits for whatever is first
            cpu_s, wall_s = time.process_time(), time.perf_counter()
        waits.append(step.wait_s)
        time.sleep(compute_s)
    cpu_s, wall_s, later = time.process_time() - cpu_s, time.perf_counter() - wall_s, len(waits) - 1
    trainer.close()
    return waits[1:], cpu_s / later, args.images * later / wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compute-s", type=float, default=0.5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, args)
        print(f"{args.images} images of {args.side} x {args.side} a step, {os.cpu_count()} cores")
        print("                     wait of a step, ms   CPU of the rank   images a second")
        print("                       median      most         ms a step   without compute")
        workers = f"data.num_workers={args.workers}"
        for title, prefetch, more in (
                ("in the trainer", 0, []), ("in its thread", 2, []),
                (f"by {args.workers} workers", 2, [workers]),
                (f"by {args.workers} actors", 2, [workers, "data.preprocess=ray"])):
            recipe = load_recipe(folder / "r.yaml", [f"data.prefetch={prefetch}", *more])
            with own_cluster(recipe.data):
                waits, cpu, _ = measure(recipe, args, args.compute_s)
                rate = measure(recipe, args, 0.0)[2]
            print(f"{title:<20} {1e3 * np.median(waits):8.2f} {1e3 * max(waits):9.2f} "
                  f"{1e3 * cpu:17.1f} {rate:17.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
