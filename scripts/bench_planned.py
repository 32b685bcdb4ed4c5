"""Planned phases of a model of transformers beside balance_encoders in its forward.

    python scripts/bench_planned.py --ranks 2 4

A Qwen3-VL of a few layers and width 256 trains on the images of the demo corpus, through the
trainer, on gloo ranks. Two ways take turns in one run, with the same steps and the same ranks for
every example: `planned` (the prefetch thread plans, media are decoded where they are encoded, and
features move) and `hook` (a rank decodes the media of its examples, and balance_encoders gathers,
moves pixels and returns features in the training thread).

Counted are bytes between ranks apart from those of FSDP: agreements, media and features, forward
and backward. The critical path is CPU time of training threads: what the slowest rank takes up to
the text model's first layer, from there to the loss, and for the backward pass, summed; shown are
the median step and the median of the ratios of the same step in both ways. Waiting is the share of
the steps that the training thread waits for data.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from compare_versions import ROOT  # noqa: F401  (puts the repository on the path)

import orchmllm.comm.exchange as communication
from orchmllm import balance_encoders
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe, RunConfig, TrainConfig
from orchmllm.data.loading.whole_examples import WholeFeed
from orchmllm.trainer import Trainer
from tests.lib.commands import make_demo_data
from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import write_model

WAYS = ("planned", "hook")


class WholeExamples(WholeFeed):
    """Each rank decodes whole examples of its own, which it gives to the model's forward."""

    def load(self, step):
        for micro in self._requested.popleft():
            calls = [((i,), {}) for i in micro.rank_plan.example_ids.tolist()]
            micro.content = self._model.join([
                example for example, *_ in self._workers.request("load", calls)()])
        return -1, -1

    def announce(self, step):
        self._requested.append(step.micro)


class Traffic:
    """Bytes that this rank sends to others, by what they are, while it is entered."""

    def __enter__(self) -> Counter:
        found = Counter()
        self._kept = communication.all_to_all, communication.RowGather.__call__

        def moved(rows, output_splits, input_splits, group):
            others = sum(input_splits) - input_splits[dist.get_rank()]
            found["rows"] += others * rows[:1].numel() * rows.element_size() if len(rows) else 0
            return self._kept[0](rows, output_splits, input_splits, group)

        def gathered(gather, row):
            found["agreements"] += 8 * len(row) * (gather.world_size - 1)
            return self._kept[1](gather, row)

        communication.all_to_all, communication.RowGather.__call__ = moved, gathered
        return found

    def __exit__(self, *_) -> None:
        communication.all_to_all, communication.RowGather.__call__ = self._kept


def write_wide(folder: Path) -> None:
    """A model wide enough that computing takes the time of a phase."""
    model = write_model("qwen3_vl", folder)
    config = model.config
    for name, value in dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                            num_attention_heads=4, num_key_value_heads=2, head_dim=64).items():
        setattr(config.text_config, name, value)
    config.text_config.rope_parameters["mrope_section"] = [12, 10, 10]
    for name, value in dict(hidden_size=256, intermediate_size=1024, depth=3, num_heads=4,
                            out_hidden_size=256, deepstack_visual_indexes=[0, 1]).items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    type(model)(config).save_pretrained(folder)


def folder_of(folder: Path) -> None:
    """The model, and the demo's rows."""
    write_wide(folder / "model")
    demo = make_demo_data(folder / "demo", 400)
    rows = [json.loads(line) for line in (demo / "data.jsonl").read_text().splitlines()]
    (demo / "images.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows if not row["audios"]))


def trained(world, folder: Path, steps: int, turns: int, workers: int) -> dict[str, dict]:
    """By way, of all steps: bytes, seconds of the parts of the critical path (steps, 3), of steps
    and of waiting."""
    out = {way: {"rows": 0, "agreements": 0, "parts": [], "step_s": 0.0, "wait_s": 0.0}
           for way in WAYS}
    for turn in range(turns):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            run = Recipe(
                run=RunConfig(dir=str(folder / f"{way}{turn}"), seed=turn),
                data=DataConfig(path=str(folder / "demo/images.jsonl"), num_workers=workers,
                                index_dir=str(folder / "index")),
                model=ModelConfig(pretrained=str(folder / "model")),
                train=TrainConfig(num_steps=steps + 2, batch_size=5, lr=1e-4))
            trainer = Trainer(replace(run, balance=replace(run.balance, dispatch="load")), world)
            if way == "hook":
                trainer._feed = partial(WholeExamples, model=trainer.model)
                balance_encoders(trainer.model.hf, when="always")
            try:
                measured(trainer, out[way])
            finally:
                trainer.close()
    return out


def measured(trainer: Trainer, out: dict) -> None:
    marks = []
    trainer.model.hf.model.get_decoder().register_forward_pre_hook(
        lambda *_: marks.append(time.thread_time()))
    trainer.model.register_forward_hook(lambda *_: marks.append(time.thread_time()))
    with Traffic() as found:
        started = time.perf_counter()
        for number, step in enumerate(trainer.loader()):
            marks[:] = [time.thread_time()]
            trainer._accumulate(step)
            marks.append(time.thread_time())
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
            if number < 2:  # the proof of balance_encoders, and first calls
                found.clear()
            else:
                out["parts"].append(np.diff(marks).tolist())
                out["wait_s"] += step.wait_s
                out["step_s"] += time.perf_counter() - started
            started = time.perf_counter()
    out["rows"] += found["rows"]
    out["agreements"] += found["agreements"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=2, help="of each way")
    parser.add_argument("--workers", type=int, default=0, help="processes that decode, a rank")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder_of(Path(name))
        for ranks in args.ranks:
            found = run_ranks(trained, ranks, Path(name), args.steps, args.turns, args.workers,
                              timeout_s=3600)
            report(ranks, found, args.steps * args.turns)


def report(ranks: int, found: list[dict[str, dict]], steps: int) -> None:
    table = {}
    for way in WAYS:
        mine = [rank[way] for rank in found]
        slowest = 1e3 * np.array([rank["parts"] for rank in mine]).max(0)  # (steps, parts)
        table[way] = {
            "KB moved": sum(rank["rows"] for rank in mine) / steps / 1e3,
            "KB of agreements": sum(rank["agreements"] for rank in mine) / steps / 1e3,
            "critical path, ms": slowest.sum(1),
            "of it before the text model": slowest[:, 0],
            "step, ms": 1e3 * max(rank["step_s"] for rank in mine) / steps,
            "waiting, %": 100 * max(r["wait_s"] / r["step_s"] for r in mine)}
    print(f"{ranks} ranks, {steps} steps of each way, a step:")
    for name, planned in table["planned"].items():
        hook = table["hook"][name]
        ratio = np.median(planned / np.maximum(hook, 1e-9))
        print(f"  {name:28} planned {np.median(planned):9.2f}   hook {np.median(hook):9.2f}"
              f"   ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
