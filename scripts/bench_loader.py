"""What balancing costs a training loop's input side, on real gloo ranks of this machine.

    python scripts/bench_loader.py                 # all parts
    python scripts/bench_loader.py wait --ranks 8  # one part

Parts:
- wait: time that a step waits for its data and plan, prefetching and not; the step sleeps.
- model: the share of a step that 2 ranks wait, with a small model's forward and backward pass.
- microbatches: what ranks wait for each other, by lengths: the sum over microbatches of the most
  tokens of a rank, over that of the mean rank, with --microbatches and with one, balanced, under a
  cap of tokens (the longest example), and as sampled. Median length 1,100, the longest 32,000.
- plain: already balanced data: steps of BalancedDataLoader and torch's DataLoader in turn.
- dispatch: load, bytes and an all-gather (everyone receives everything): time, bytes, memory.
- media: the trainer's loader on JPEG and WAV files: load, bytes and tensors, without and with
  worker processes: time of a step's data alone, bytes, memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from orchmllm import BalancedDataLoader, CostModel
from orchmllm.comm import exchange as comm
from orchmllm.comm import value_bytes as wire
from orchmllm.comm.exchange import RowGather, gloo_group
from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.whole_flops import plan_spec
from orchmllm.orchestrator import Orchestrator
from orchmllm.runtime.build import build_dataset

ROOT = Path(__file__).parents[1]
COST = CostModel(linear=100_000, quadratic=100)


class Texts(Dataset):
    """Examples of `lengths[i]` tokens with `width` bytes of payload per token."""

    def __init__(self, lengths: np.ndarray, width: int = 8) -> None:
        self.lengths, self.width = lengths.tolist(), width

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        n = self.lengths[i]
        return {"input_ids": torch.full((n, self.width // 8), i), "labels": torch.ones(n)}

    @classmethod
    def uneven(cls, size: int, width: int = 8) -> Texts:
        rng = np.random.default_rng(0)
        return cls(np.clip(rng.lognormal(5, 0.8, size), 8, 2000).astype(int), width)


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    return {k: torch.cat([e[k] for e in examples]) for k in examples[0]}


def num_tokens(example: dict[str, torch.Tensor]) -> int:
    return len(example["labels"])


def wait(rank: int, args: argparse.Namespace) -> dict:
    """Milliseconds by prefetch: mean and p99 of the worst rank."""
    data, out = Texts.uneven(args.batch * args.ranks * (args.steps + 2)), {}
    for prefetch in (2, 0):
        loader = BalancedDataLoader(data, args.batch, shuffle=True, collate_fn=collate,
                                    length_fn=num_tokens, phases=COST, prefetch=prefetch)
        waits = []
        for _ in loader:
            waits.append(1e3 * loader.step.wait_s)
            time.sleep(args.sleep_ms / 1e3)
            dist.barrier()  # the step's collectives
        mine = torch.tensor([np.mean(waits[2:]), np.percentile(waits[2:], 99)])  # 2: warming up
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        out[f"prefetch {prefetch}"] = {"mean_ms": float(mine[0]), "p99_ms": float(mine[1])}
    return out


def model(rank: int, args: argparse.Namespace) -> dict:
    """Milliseconds of a step and of its wait, on the worst rank, and the share in percent."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(1 << 16, 256), *(
        torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(),
                            torch.nn.Linear(1024, 256)) for _ in range(4)))
    net = torch.nn.parallel.DistributedDataParallel(net)
    data = Texts.uneven(args.batch * args.ranks * (args.steps // 2 + 2))
    waits, started = [], []
    loader = BalancedDataLoader(data, args.batch, shuffle=True, collate_fn=collate,
                                lengths=data.lengths, phases=COST)
    for batch in loader:
        waits.append(1e3 * loader.step.wait_s)
        started.append(1e3 * time.perf_counter())
        net(batch["input_ids"][::4, 0]).square().sum().backward()
        net.zero_grad()
    mine = torch.tensor([np.mean(waits[2:]), np.mean(np.diff(started)[1:])])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return {"wait_ms": float(mine[0]), "step_ms": float(mine[1]),
            "percent": 100 * float(mine[0] / mine[1])}


def microbatches(rank: int, args: argparse.Namespace) -> dict:
    """By the loader: (slowest over mean rank, most tokens of a rank in a microbatch)."""
    size, out = args.batch * args.ranks * args.microbatches * 10, {}
    lengths = np.random.default_rng(0).lognormal(7, 1.2, size).astype(int).clip(8, 32_000).tolist()
    cap = max(lengths)
    for name, count, how in (("as sampled", args.microbatches, {"enabled": False}),
                             ("one microbatch", 1, {}), ("balanced", args.microbatches, {}),
                             ("capped", args.microbatches, {"max_tokens": cap})):
        loader = BalancedDataLoader(
            lengths, args.batch, shuffle=True, seed=1, collate_fn=sum, lengths=lengths,
            accumulation_steps=count, num_targets=int, check_loss=False, **how)
        mine = torch.tensor(list(loader), dtype=torch.float64)
        ranks = [torch.zeros_like(mine) for _ in range(args.ranks)]
        dist.all_gather(ranks, mine)
        held = torch.stack(ranks)
        out[name] = {"waiting": float(held.amax(0).sum() / held.mean(0).sum()),
                     "most tokens": float(held.max())}
    return out


def plain(rank: int, args: argparse.Namespace) -> dict:
    """Medians of a pass's time and their ratio; a step computes for --sleep-ms, without sleeping.

    Passes alternate, so that both see the same disturbances."""
    return {f"{n} workers": _plain(args, n) for n in (0, 1)}


def _plain(args: argparse.Namespace, num_workers: int) -> dict:
    data = Texts(np.full(args.batch * args.ranks * 20, 64))
    how = {"collate_fn": collate, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    balanced = BalancedDataLoader(data, args.batch, phases=COST, lengths=data.lengths,
                                  sampler=DistributedSampler(data), **how)
    usual = DataLoader(data, args.batch, sampler=DistributedSampler(data), **how)
    times: dict[str, list[float]] = {"plain": [], "balanced": []}
    x = torch.ones(256, 256)
    for i in range(args.pairs + 1):
        for name, loader in (("plain", usual), ("balanced", balanced))[:: 1 if i % 2 else -1]:
            dist.barrier()
            started = time.perf_counter()
            for _ in loader:
                until = time.thread_time() + args.compute_ms / 1e3
                while time.thread_time() < until:
                    x = torch.tanh(x @ x)
                dist.barrier()
            if i:
                times[name].append(time.perf_counter() - started)
    ratios = np.array(times["balanced"]) / np.array(times["plain"])
    return {"plain_s": float(np.median(times["plain"])),
            "balanced_s": float(np.median(times["balanced"])),
            "median_ratio": float(np.median(ratios)), "pairs": args.pairs}


def dispatch(rank: int, args: argparse.Namespace) -> dict:
    """Per way: seconds of a pass, MB that this rank received, and peak RSS in MB."""
    data, out = Texts.uneven(args.batch * args.ranks * 10, width=2048), {}
    for name in ("load", "bytes", "all-gather"):
        received = Received()
        dist.barrier()
        started = time.perf_counter()
        if name == "all-gather":
            everyone(data, args, received)
        else:
            with received:
                how = {"load": {"lengths": data.lengths}, "bytes": {"length_fn": num_tokens}}[name]
                for _ in BalancedDataLoader(data, args.batch, collate_fn=collate, phases=COST,
                                            **how):
                    pass
        dist.barrier()
        out[name] = {"pass_s": time.perf_counter() - started, "received_mb": received.bytes / 1e6,
                     "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}
    return out


def media(rank: int, args: argparse.Namespace) -> dict:
    """Per way: milliseconds of a step's data, MB that this rank received in all, peak RSS in MB."""
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml", [
        f"data.path={args.folder}", f"model.config={args.folder}/model"])
    dataset, ranks, out = build_dataset(recipe), range(args.ranks), {}
    sampler = GlobalSampler(range(len(dataset)), args.ranks * args.batch, seed=0)
    for name in ("load", "bytes", "tensors"):
        balance = replace(recipe.balance, dispatch=name)
        orchestrator = Orchestrator(
            plan_spec(resolve(replace(recipe, balance=balance), 1, 1)), RowGather(1, 120.0),
            group=gloo_group(ranks, 120.0) if name == "bytes" else None)
        for workers in (0, 2):
            loader = StepLoader(dataset, sampler, orchestrator, num_steps=args.steps // 2,
                                num_workers=workers)
            received = Received()
            with received:
                started = time.perf_counter()
                for step in loader:
                    if step.index == 1:  # warm from here
                        started = time.perf_counter()
                    for micro in step.micro:
                        orchestrator.dispatch(micro)
            took = 1e3 * (time.perf_counter() - started) / max(1, args.steps // 2 - 2)
            out[f"{name}, {workers} workers"] = {
                "step_ms": took, "received_mb": received.bytes / 1e6,
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}
    return out


class Received:
    """Bytes that all-to-alls within the block bring to this rank."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Received:
        self._original = comm.all_to_all

        def counted(*args):
            out = self._original(*args)
            self.bytes += out.numel() * out.element_size()
            return out

        comm.all_to_all = counted
        return self

    def __exit__(self, *exc: object) -> None:
        comm.all_to_all = self._original


def everyone(data: Texts, args: argparse.Namespace, received: Received) -> None:
    """The strawman: every rank receives every example and keeps its own."""
    world = dist.get_world_size()
    for batch in DataLoader(data, args.batch, sampler=DistributedSampler(data, shuffle=False),
                            collate_fn=wire.encode):
        mine = torch.from_numpy(batch)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]))
        longest = int(max(sizes))
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(rows, torch.cat([mine, mine.new_zeros(longest - len(mine))]))
        received.bytes += longest * (world - 1)
        collate([e for r, n in zip(rows, sizes, strict=True)
                 for e in wire.decode(r[: int(n)].numpy())][: args.batch])


PARTS = {"wait": wait, "model": model, "microbatches": microbatches, "plain": plain,
         "dispatch": dispatch, "media": media}


def run_rank(rank: int, part: str, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store_{part}", args.ranks), rank=rank,
        world_size=args.ranks, timeout=timedelta(seconds=120))
    try:
        result = PARTS[part](rank, args)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, part).write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all")
    parser.add_argument("--ranks", type=int, help="default: 8 for wait, 4 for microbatches, 2")
    parser.add_argument("--batch", type=int,
                        help="examples per rank (and microbatch); default: 4 for microbatches, 60")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="of wait; model and media: half")
    parser.add_argument("--sleep-ms", type=float, default=200, help="a step of part wait")
    parser.add_argument("--compute-ms", type=float, default=100, help="a step of part plain")
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen, batch = args.ranks, args.batch
    for part in [args.part] if args.part else PARTS:
        args.ranks = chosen or {"wait": 8, "microbatches": 4}.get(part, 2)
        args.batch = batch or (4 if part == "microbatches" else 60)
        with tempfile.TemporaryDirectory() as folder:
            if part == "media":
                args.folder = f"{folder}/corpus"
                subprocess.run([sys.executable, str(ROOT / "scripts" / "make_demo_data.py"),
                                "--out", args.folder, "--num-examples", "200"], check=True,
                               capture_output=True)
            multiprocessing.spawn(run_rank, (part, args, folder), nprocs=args.ranks)
            result = json.loads(Path(folder, part).read_text(encoding="utf-8"))
        print(f"{part}, {args.ranks} ranks, batch {args.batch}:")
        for name, value in result.items():
            shown = (", ".join(f"{k} {v:.3f}" for k, v in value.items())
                     if isinstance(value, dict) else f"{value:.4g}")
            print(f"  {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
