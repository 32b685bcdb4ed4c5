"""`orchmllm data stats`: what balancing would give for the data of a recipe, for a data file alone,
or for a mix drawn from published length statistics."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from textwrap import wrap

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe, TrainConfig
from orchmllm.data.formats.open import DataSource
from orchmllm.data.index import LengthIndex
from orchmllm.launch import gpu_of
from orchmllm.models.whole_flops import plan_spec
from orchmllm.sharding.caps import with_count
from orchmllm.sharding.fits import with_real_batch
from orchmllm.sharding.longest import Room, heaviest, table
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.data.composition import (
    MAX_SAMPLED,
    NUM_BATCHES,
    lengths_table,
    predict,
    read_lengths,
)
from orchmllm.tools.predict.examples import of_indexes
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.workload import sample_layout


def of_data(path: str, model: str, batch_size: int) -> Recipe:
    """A recipe for a data file or folder, and a model's folder: default balancing."""
    return replace(Recipe(), model=ModelConfig(config=model), data=DataConfig(path=path),
                   train=TrainConfig(batch_size=batch_size))


def show(recipe: Recipe, args: argparse.Namespace, sources: Sequence[DataSource],
         indexes: Sequence[LengthIndex]) -> None:
    """Prints lengths and what balancing gives."""
    import torch

    lengths = read_lengths([s.name for s in sources], indexes)
    print("\nLLM tokens per example that has the modality (share: of the tokens of a source)")
    if recipe.data.num_validation:
        print("(with the rows that are held out, which nothing below looks at)")
    print(lengths_table(lengths))
    ranks = args.ranks or recipe.launch.nproc_per_node or 8
    real = with_real_batch(recipe, ranks)
    size, microbatches = real.train.batch_size, recipe.train.least_microbatches
    own, count = of_indexes(recipe, sources, indexes), ranks * size * microbatches
    steps = [own.draw(ranks, size * microbatches, step)
             for step in range(max(1, min(NUM_BATCHES, MAX_SAMPLED // count)))]
    count = size // recipe.train.batch_size  # with capped mini-batches
    _gain(*predict(steps, recipe), ranks, f"{size} examples" if recipe.data.batching == "sample"
          else f"{count} mini-batches" if count > 1 else "1 mini-batch")
    if microbatches > 1:
        print(f"({microbatches} microbatches a step, each of which waits for its slowest rank)")
    job, _ = cluster().job(recipe, ranks)
    memory = MemoryModel.of(job)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room = Room.of(job, gpu_of(device)[1], memory)
    batches = [own.draw(ranks, size, step) for step in range(len(steps))]
    found = heaviest(batches, plan_spec(job).costs, own.rows(), room.fits)
    caps = ""
    if room.budget:
        caps = with_count(real, steps[:1], plan_spec(job), memory, room.budget)[-1]
    print("", *wrap(caps, 79, subsequent_indent="  "), *table(found, room, own.place),
          *room.misfits(own.rows(), own.place), sep="\n")


def drawn(recipe: Recipe, args: argparse.Namespace) -> int:
    """What balancing gives for the paper's mix; returns the exit code."""
    ranks = args.ranks or 64
    print("No data are named: lengths are drawn from published statistics of LLaVA-1.5's mix,\n"
          f"LibriSpeech and others. Model: {args.model}.")
    layouts = (sample_layout(recipe.model, num_ranks=ranks, batch_size=args.batch_size, seed=seed)
               for seed in range(NUM_BATCHES))
    _gain(*predict(layouts, recipe), ranks, f"{args.batch_size} examples")
    return 0


def _gain(phases: dict[str, tuple[float, float]], gain: float, ranks: int, share: str) -> None:
    print(f"\nslowest rank / mean rank, {ranks} ranks x {share}, predicted from FLOPs")
    print(f"{'phase':<8} {'sampled':>8} {'balanced':>9}")
    for phase, (before, after) in phases.items():
        print(f"{phase:<8} {before:>8.2f} {after:>9.2f}")
    print(f"Without balancing, a step takes {gain:.2f}x as long (communication is not counted).")
