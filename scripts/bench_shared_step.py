"""CPU time of the slowest rank where one example is most of a step, not shared and shared.

    python scripts/bench_shared_step.py [--ranks 4] [--words 2500] [--turns 3]

The Qwen3-VL of bench_planned.py trains texts on gloo ranks through the trainer: in every step one
of `--words` words and 11 short ones. Two ways take turns in one run, with the same steps: no
example is shared, and all ranks may share one. Shown are, of the CPU time of training threads for
forward and backward of a step: the share of the heaviest example by the cost model, the slowest
rank in both ways (median), their ratio, and the slowest over the mean rank where it is shared; then
the same without the long example, where sharing finds nothing to share and should cost nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_planned import write_wide

from orchmllm.config.balance import PhaseConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe, RunConfig, TrainConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks

BATCH, STEPS = 12, 4


def write_texts(path: Path, words: int) -> None:
    """One long text in each batch, read in order."""
    rng, rows = np.random.default_rng(0), []
    for i in range(BATCH * (STEPS + 1)):
        n = words if words and i % BATCH == 5 else int(rng.integers(20, 60))
        rows.append({"messages": [{"role": "user", "content": "what is it? " * (n // 3)},
                                  {"role": "assistant", "content": "the red row " * 4}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trained(world, folder: Path, data: str, turns: int) -> dict[int, list]:
    """By shares, (seconds, share of the long example) of each step."""
    out: dict[int, list] = {1: [], world.world_size: []}
    for turn in range(turns):
        for most in [*out] if turn % 2 else [*out][::-1]:
            run = Recipe(
                run=RunConfig(dir=str(folder / f"run_{data}_{most}_{turn}")),
                data=DataConfig(path=str(folder / f"{data}.jsonl"),
                                index_dir=str(folder / "index")),
                model=ModelConfig(pretrained=str(folder / "model")),
                train=TrainConfig(num_steps=STEPS + 1, global_batch_size=BATCH, lr=1e-4))
            trainer = Trainer(replace(run, balance=replace(
                run.balance, dispatch="load", llm=PhaseConfig(max_shares=most))), world)
            try:
                sampler = GlobalSampler(range(len(trainer.dataset)), BATCH, shuffle=False)
                for step in StepLoader(trainer.dataset, sampler, trainer.orchestrator,
                                       num_steps=len(sampler), feed=trainer._feed):
                    started = time.thread_time()
                    trainer._accumulate(step)
                    seconds = time.thread_time() - started
                    trainer.optimizer.zero_grad(set_to_none=True)
                    cost = trainer.orchestrator.spec.costs["llm"](step.layout.tokens_per_example)
                    assert (step.plans[0].pieces is not None) == (data == "long" and most > 1)
                    if step.index:
                        out[most].append((seconds, cost.max() / cost.sum()))
            finally:
                trainer.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--words", type=int, default=2500)
    parser.add_argument("--turns", type=int, default=3, help="of each way")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_wide(folder / "model")
        for data, words in (("long", args.words), ("short", 0)):
            write_texts(folder / f"{data}.jsonl", words)
            found = run_ranks(trained, args.ranks, folder, data, args.turns, timeout_s=3600)
            seconds = {most: np.array([rank[most] for rank in found])[..., 0]
                       for most in (1, args.ranks)}  # (ranks, steps)
            slow = {most: np.median(s.max(0)) for most, s in seconds.items()}
            both = seconds[args.ranks]
            share = np.mean([part for _, part in found[0][1]])
            print(f"{data}: the heaviest example is {share:.0%} of a step; slowest of {args.ranks} "
                  f"ranks {slow[1]:.2f} s alone, {slow[args.ranks]:.2f} s shared: "
                  f"{slow[1] / slow[args.ranks]:.2f} times; shared, the slowest takes "
                  f"{np.median(both.max(0) / both.mean(0)):.3f} of the mean", flush=True)


if __name__ == "__main__":
    main()
