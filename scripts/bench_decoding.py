"""How long steps wait for decoding where one video of 400 costs 300 times the others.

    python scripts/bench_decoding.py [--videos 400] [--times 300] [--ranks 4] [--batch 4]
        [--workers 2] [--compute-s 0.1 0.25 0.5] [--dispatch tensors load] [--slow 10]
        [--set data.KEY=VALUE ...]

Videos are made by PyAV. All ranks take the steps of one epoch through the trainer's loader; after
each of them they meet, as they do in training, and sleep for the time that a GPU would compute. The
work of decoding is the CPU time of one process for all videos; the mean work of a step is that
divided by the steps and all workers. A step waits as long as its slowest rank does. The first step,
which starts the workers, is left out. Every batch is compared, byte by byte, with that of ranks
without workers.

Where there are fewer free cores than workers, `--slow` shows the same in slow motion: after each
load a worker sleeps until so many times its CPU time have passed, and ranks sleep so many times
longer; what is printed is divided by it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import psutil
import torch.distributed as dist

from orchmllm.config.recipe import load_recipe
from orchmllm.data.media import av_process
from orchmllm.runtime.build import build_dataset
from orchmllm.tools.compose.drawn import shapes, write_drawn
from orchmllm.tools.init.demo import LLM, TOWER
from orchmllm.trainer import Trainer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from scripts.bench_index import write_tokenizer  # noqa: E402
from tests.lib.ranks import run_ranks  # noqa: E402

LIGHT, HEAVY = (96, 72), (1280, 720)  # pixels of a frame
FRAMES, KINDS = 24, 16  # of a light video; different ones
FPS, GROUP = 24, 250  # frames from one key frame to the next, which is x264's default
RECIPE = """
data: {{index_dir: {folder}/index, sources: [{{path: {folder}/data.jsonl, video_frames: 8}}]}}
model: {{config: {folder}/model, proof: false}}
train: {{batch_size: {batch}, num_steps: {steps}}}
balance: {{dispatch: {dispatch}}}
run: {{dir: {folder}/run, seed: {seed}}}
"""


def write_video(path: Path, size: tuple[int, int], num_frames: int, seed: int) -> None:
    """Squares that move."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 255, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    picture = squares.repeat(8, 0).repeat(8, 1)
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=FPS,
                                options={"preset": "ultrafast", "g": str(GROUP)})
        stream.width, stream.height = size
        stream.pix_fmt, stream.thread_count = "yuv420p", 1
        for k in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, (k, 2 * k), (0, 1)), "rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def cpu_s() -> float:
    """CPU time of this process and of the one that decodes for it."""
    child = 0.0
    if av_process._child is not None:
        child = sum(psutil.Process(av_process._child.process.pid).cpu_times()[:2])
    return time.process_time() + child


def seconds_of(dataset, row: int, turns: int) -> float:
    """CPU time of one load of a row. The child's is known to 10 ms."""
    dataset.load(row)
    started = cpu_s()
    for _ in range(turns):
        dataset.load(row)
    return (cpu_s() - started) / turns


class Slowed:
    """The load of a dataset in slow motion."""

    def __init__(self, load: Callable, times: float) -> None:
        self._load, self._times = load, times

    def __call__(self, *args, **keys):
        started, cpu = time.perf_counter(), cpu_s()
        loaded = self._load(*args, **keys)
        time.sleep(max(0.0, self._times * (cpu_s() - cpu) - (time.perf_counter() - started)))
        return loaded


def write_data(folder: Path, args: argparse.Namespace) -> float:
    """The corpus, in which the middle row has the heavy video; seconds to decode all of it."""
    write_tokenizer(folder / "tokenizer.json")
    write_drawn(shapes(LLM, TOWER, vocab_size=512), folder / "tokenizer.json", folder / "model",
                LIGHT[0])
    for k in range(KINDS):
        write_video(folder / f"{k}.mp4", LIGHT, FRAMES, k)
    heavy = args.videos // 2
    with (folder / "data.jsonl").open("w") as f:
        for k in range(args.videos):
            name = "heavy" if k == heavy else k % KINDS
            f.write(json.dumps({"video": f"{name}.mp4", "caption": f"video {k}"}) + "\n")
    frames = GROUP
    for _ in range(3):  # the last time it is as long as it should be
        write_video(folder / "heavy.mp4", HEAVY, frames, KINDS)
        dataset = build_dataset(recipe_of(folder, args, "load", []), seen=True)
        light = np.mean([seconds_of(dataset, k, 10) for k in range(KINDS)])
        slow = seconds_of(dataset, heavy, 1)
        used, frames = frames, round(frames * args.times * light / slow)
    work = light * (args.videos - 1) + slow
    print(f"{args.videos} videos of {FRAMES} frames, {1e3 * light:.1f} ms each; one of {used} "
          f"frames, {slow:.2f} s: {slow / light:.0f} times as long")
    return work


def recipe_of(folder: Path, args: argparse.Namespace, dispatch: str, more: list[str]):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(
        folder=folder, batch=args.batch, steps=args.videos // (args.batch * args.ranks),
        dispatch=dispatch, seed=args.seed))
    return load_recipe(path, more)


def run(world, recipe, compute_s: float, slow: float = 0.0) -> tuple[list[float], list[str], int]:
    """By step, seconds that this rank waited, and a digest of what it got; the heavy one's step."""
    trainer = Trainer(recipe, world)
    if slow:
        trainer.dataset.load = Slowed(trainer.dataset.load, slow)
    waits, digests, at = [], [], -1
    for step in trainer.loader():
        waits.append(step.wait_s)
        at = step.index if len(trainer.dataset) // 2 in step.example_ids else at
        digest = hashlib.sha256()
        for micro in step.micro:
            trainer.orchestrator.dispatch(micro).moved(
                lambda x, d=digest: d.update(x.contiguous().numpy().tobytes()) or x)
        digests.append(digest.hexdigest())
        dist.barrier()
        time.sleep(compute_s)
    trainer.close()
    return waits, digests, at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=400)
    parser.add_argument("--times", type=float, default=300.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="videos of a rank in a step")
    parser.add_argument("--workers", type=int, default=2, help="of a rank")
    parser.add_argument("--compute-s", type=float, nargs="+", default=[0.1, 0.25, 0.5])
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--dispatch", nargs="+", default=["tensors", "load"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = write_data(folder, args)
        steps = args.videos // (args.batch * args.ranks)
        mean = work / steps / (args.ranks * args.workers)
        print(f"mean work of a step: {1e3 * work / steps:.0f} ms of one process, {1e3 * mean:.1f} "
              f"ms of {args.ranks * args.workers} workers; {os.cpu_count()} cores, load "
              f"{os.getloadavg()[0]:.1f}")
        print("dispatch  computes, s   waits a step, ms: mean   longest   mean / mean work   bytes"
              "   heavy in step")
        for dispatch in args.dispatch:
            want = [found[1] for found in run_ranks(
                run, args.ranks, recipe_of(folder, args, dispatch, []), 0.0, timeout_s=3600)]
            for compute_s in args.compute_s:
                more = [f"data.num_workers={args.workers}", *args.set]
                found = run_ranks(run, args.ranks, recipe_of(folder, args, dispatch, more),
                                  compute_s * (args.slow or 1.0), args.slow, timeout_s=3600)
                waits = np.array([waits for waits, *_ in found]).max(0)[1:] / (args.slow or 1.0)
                same = "equal" if [rank[1] for rank in found] == want else "DIFFER"
                print(f"{dispatch:9} {compute_s:11.2f} {1e3 * waits.mean():24.1f} "
                      f"{1e3 * waits.max():9.0f} {waits.mean() / mean:18.2f}   {same}"
                      f"{found[0][2]:8}", flush=True)


if __name__ == "__main__":
    main()
