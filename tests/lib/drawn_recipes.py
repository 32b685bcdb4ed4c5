"""Legal variants of recipes/demo.yaml, drawn at random from what the schema of a recipe allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from orchmllm.config.job import check_world, resolve
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.config.schema import leaves
from orchmllm.hf.sources import find_sources
from orchmllm.tools.data import command as data
from orchmllm.trainer import Trainer
from tests.lib.commands import TINY, demo_of

DEMO = "recipes/demo.yaml"
SECTIONS = ("balance.", "train.", "fsdp.", "checkpoint.", "data.", "model.")
# Keys with choices, true and false are drawn from the schema; numbers only where they stand here.
# Limits are those that 5 examples of the demo corpus on a rank keep.
NUMBERS = {
    "data.num_validation": (2,), "data.num_shards": (1, 3), "data.shuffle_window": (1, 5),
    "data.max_batch_images": (3,), "data.max_example_tokens": (900,),
    "data.prefetch": (1, 2, 3), "data.num_workers": (1, 2),
    "balance.min_gain": (0.02, 0.5), "balance.ranks_per_node": (1, 2, 3, 4),
    **{f"balance.{phase}.{key}": values for phase in ("vision", "audio", "llm") for key, values in (
        ("tolerance", (0.0, 0.05, 0.3, 1.0)), ("max_rank_tokens", (10_000,)))},
    "train.batch_size": (1, 2, 3, 4, 5), "train.accumulation_steps": (2, 3),
    "train.validate_every_steps": (1, 2), "train.vision_lr": (1e-4,), "train.llm_lr": (1e-4,),
    "train.warmup_steps": (0, 2), "train.decay_ratio": (1.0,), "train.max_grad_norm": (0.0,),
    "train.connector_weight_decay": (0.0, 0.1), "train.global_batch_size": (4, 7, 12),
    "fsdp.shard_size": (1, 2, 2, 2), "fsdp.loss_chunk_rows": (1, 64),
    "fsdp.prefetch": (1, 2), "checkpoint.every_steps": (1, 2), "checkpoint.keep_last": (1,),
}
WITH = {  # what a value needs beside it
    "balance.group": "fsdp.shard_size=2", "data.batching": "data.max_batch_tokens=800",
    "train.nonfinite": "checkpoint.every_steps=1",
    **{f"balance.{phase}.nodewise": f"balance.{phase}.policy=greedy"
       for phase in ("vision", "audio", "llm")}}
# Lists; takes minutes; needs a cluster.
LEFT_OUT = ("data.sources.", "data.remote.", "fsdp.compile", "data.preprocess")
VALUES = {leaf.path: drawn for leaf in leaves(Recipe) if leaf.path.startswith(SECTIONS)
          and not leaf.path.startswith(LEFT_OUT)
          and (drawn := NUMBERS.get(leaf.path) or [x for x in leaf.key.choices if x != leaf.default]
               or [not leaf.default] * (leaf.kind is bool))}


def draw(num_ranks: int, seed: int, corpus: Path, folder: Path, without: Sequence[str] = ()
         ) -> tuple[list[str], int, int]:
    """(overrides of a recipe that so many ranks can run, how many of the values that were drawn for
    it were taken and refused). corpus: demo examples; folder: of the run, beside which an index may
    be written; without: keys that keep the recipe's value."""
    rng, taken, refused = random.Random(100 * seed + num_ranks), 0, 0
    overrides = [*TINY, f"launch.nproc_per_node={num_ranks}", "train.num_steps=3",
                 "balance.ranks_per_node=0", "fsdp.memory_gb=8", *demo_of(corpus),
                 f"data.index_dir={folder.parent / 'index'}", f"run.dir={folder}"]
    drawn = sorted(item for item in VALUES.items() if item[0] not in without)
    for path, values in rng.sample(drawn, rng.choice((5, 15, 30))):
        tried = [*overrides, *WITH.get(path, "").split(), f"{path}={rng.choice(values)}"]
        try:
            recipe = load_recipe(DEMO, tried)
            check_world(resolve(recipe, num_ranks, num_ranks))
            find_sources(recipe.model)
            overrides, taken = tried, taken + 1
        except ValueError:  # by itself, or beside what was drawn before
            refused += 1
    return overrides, taken, refused


def run_all(world, drawn: list[list[str]]) -> None:
    """Trains each to its end. Raises AssertionError naming the overrides of one that fails, or
    leaves no checkpoint of its last step."""
    for overrides in drawn:
        shown = f"python -m orchmllm.train {DEMO} {' '.join(overrides)}"
        if world.rank == 0:
            print(shown, flush=True)  # in case that it hangs
        run = load_recipe(DEMO, overrides)
        if run.data.batching == "capped" and world.rank == 0:
            assert data.main(["index", DEMO, *overrides]) == 0
        dist.barrier()
        try:
            trainer = Trainer(run, world)
            try:
                trainer.run()
            finally:
                trainer.close()
        except Exception as e:
            raise AssertionError(shown) from e
        assert Path(run.run.dir, "checkpoints", "step_00000003", "manifest.json").is_file(), shown
