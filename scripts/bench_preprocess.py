"""What a step waits for its data, and what decoding costs the rank, with and without a server.

    python scripts/bench_preprocess.py [--images 20] [--side 1024] [--steps 12] [--compute-s 0.5]

One rank takes steps of `images` JPEGs; between two of them it sleeps, as a rank whose GPU computes.
The server is a process on the same machine, so its decoding takes cores from nobody only where
there are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.data.loading.preprocess_handshake import servers_of
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import make_sampler
from orchmllm.models.flops import plan_spec
from orchmllm.runtime.build import build_dataset, build_orchestrator

RECIPE = """
data: {{path: {folder}/data.jsonl, index_dir: {folder}/index}}
model: {{vision: {{max_side: {side}}}}}
balance: {{dispatch: load}}
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
    (folder / "r.yaml").write_text(RECIPE.format(folder=folder, side=args.side))


def measure(recipe, args: argparse.Namespace, prefetch: int) -> tuple[list[float], float, list]:
    """(seconds waited by step, CPU seconds of this process a step, examples by where)."""
    dataset = build_dataset(recipe)
    rows, _ = dataset.split(0)
    orchestrator = build_orchestrator(recipe, plan_spec(resolve(recipe, 1, 1)), 1,
                                      torch.device("cpu"))
    sampler = make_sampler(dataset, rows, args.images, seed=0)
    loader = StepLoader(dataset, sampler, orchestrator, num_steps=args.steps, prefetch=prefetch,
                        servers=servers_of(recipe.data))
    waits, where, start = [], [0, 0], time.process_time()
    for step in loader:
        waits.append(step.wait_s)
        where[0] += step.preprocessed.remote
        where[1] += step.preprocessed.local
        time.sleep(args.compute_s)
    return waits, (time.process_time() - start) / len(waits), where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compute-s", type=float, default=0.5)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, args)
        server = subprocess.Popen(
            [sys.executable, "-m", "orchmllm", "preprocess", str(folder / "r.yaml"), "--listen",
             "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, env=os.environ)
        try:
            address = next(m[1] for line in server.stdout
                           if (m := re.search(r"listening on (\S+),", line)))
            print(f"{args.images} images of {args.side} x {args.side} a step, {os.cpu_count()} "
                  "cores")
            print("                     wait of a step, ms   CPU of the rank")
            print("                       median      most         ms a step")
            for title, prefetch, more in (("in the trainer", 0, []), ("in its thread", 2, []),
                                          ("by a server", 2, [f'data.preprocess=["{address}"]'])):
                waits, cpu, where = measure(load_recipe(folder / "r.yaml", more), args, prefetch)
                assert not more or where == [args.images * len(waits), 0]
                later = sorted(waits[1:])  # the first one waits for whatever is first
                print(f"{title:<20} {1e3 * later[len(later) // 2]:8.2f} {1e3 * later[-1]:9.2f} "
                      f"{1e3 * cpu:17.1f}")
        finally:
            server.terminate()
            server.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
