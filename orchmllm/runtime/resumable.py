"""Whether a run may go on from a checkpoint: decided from the settings of the attempt that wrote it
and those of the attempt that starts (orchmllm.runtime.attempts), and from nothing else.

A setting that differs is refused where it would change the order of examples or what they hold, or
make the checkpoint's tensors those of another model. Any other one is said, in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path

from orchmllm.config.parse import show
from orchmllm.config.recipe import Recipe
from orchmllm.config.schema import leaves

# What a difference in a setting means, or in any setting of a section: it is refused for one of
# CURES, or nothing is said (`start`), because it is of this start alone or another line says it. A
# setting that is not named here is said.
CLASSES = {
    "run.dir": "start", "run.resume": "start", "run.allow_data_change": "start",
    "launch.nproc_per_node": "start", "world.ranks": "start", "world.host": "start",
    "run.init_from": "init",
    "run.seed": "order", "data.num_validation": "order", "data.streaming": "order",
    "data.shuffle_window": "order", "data.batching": "order", "data.max_batch_tokens": "order",
    "data.max_batch_images": "order", "data.sources.repeats": "order", "content": "content",
    "train.batch_size": "batch", "train.accumulation_steps": "batch",
    "train.global_batch_size": "batch",
    "model": "model", "fsdp.param_dtype": "model",
    "model.proof": "said", "model.pretrained": "said", "model.config": "said",
}
CURES = {
    "init": "a run reads the weights that it starts from once, at its start: use the checkpoint's "
            "value, or start another run with another run.dir",
    "model": "the checkpoint's tensors are those of another model: use its values (recipe.yaml in "
             "run.dir has them), or start anew with another run.dir or run.resume=never",
    "order": "the order of all examples would change: use the checkpoint's values, or set "
             "run.allow_data_change=true to go on at the same step of the new order",
    "content": "what is trained on is not what the checkpoint saw (the files or weights of "
               "data.sources; the tokenizer or its chat template, so that the same text would mean "
               "something else; the model's processor, of which the versions of transformers, "
               "tokenizers and Pillow are a part; or capped_*, what data.batching=capped forms "
               "mini-batches by): "
               "restore it, or set run.allow_data_change=true to go on at the same step of the "
               "new data",
    "batch": "a resumed run keeps its {kept} examples a step, or examples would repeat or be left "
             "out: restore it, set train.global_batch_size={kept}, or choose another run.dir",
}
DEFAULTS = {leaf.path: list(leaf.default) if leaf.kind is tuple else leaf.default
            for leaf in leaves(Recipe) if leaf.default is not MISSING}


def class_of(key: str) -> str:
    """The class of a setting, that of its section where it has none of its own."""
    path = _in_any_list(key)
    while path and path not in CLASSES:
        path = path.rpartition(".")[0]
    return CLASSES.get(path, "said")


def differences(was: Mapping, now: Mapping) -> dict[str, list]:
    """key -> [value in `was`, value in `now`] of the settings that differ. A key that one of them
    lacks, because it came later or is of one more source, has its default there, else null."""
    pairs = {key: [settings.get(key, DEFAULTS.get(_in_any_list(key))) for settings in (was, now)]
             for key in {**was, **now}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def check_resumable(was: Mapping, now: Mapping, kept: int) -> dict[str, list]:
    """The differences that have to be said. was, now: settings of the attempt that wrote the
    checkpoint, and of this one. kept: examples a step of the checkpoint. Raises ValueError naming
    every setting because of which the run cannot go on, and what allows it."""
    changed = differences(was, now)
    passing = {"said", "start"}
    if now["run.allow_data_change"]:
        passing |= {"order", "content"}
    if _examples_a_step(now) in (_examples_a_step(was), (kept, 0)):
        passing.add("batch")
    refused = [key for key in changed if class_of(key) not in passing]
    if refused:
        values = "; ".join(f"{key} is {show(changed[key][1])}, the checkpoint has "
                           f"{show(changed[key][0])}" for key in refused)
        cures = dict.fromkeys(CURES[class_of(key)].format(kept=kept) for key in refused)
        raise ValueError(f"{values}: {'; '.join(cures)}")
    return {key: pair for key, pair in changed.items() if class_of(key) != "start"}


def _in_any_list(key: str) -> str:
    """data.sources[0].path -> data.sources.path"""
    return re.sub(r"\[\d+\]", "", key)


def _examples_a_step(settings: Mapping) -> tuple[int, int]:
    """(those of all ranks, those of each rank) that a recipe asks for; one of them is 0."""
    whole = settings["train.global_batch_size"]
    per_rank = settings["train.batch_size"] * (settings["train.accumulation_steps"] or 1)
    return (whole, 0) if whole else (0, per_rank)


def describe_changes(changed: Mapping[str, list]) -> str:
    """`train.lr 0.001 -> 0.0005, train.num_steps 10 -> 20`"""
    return ", ".join(f"{key} {show(was)} -> {show(now)}" for key, (was, now) in changed.items())


def describe_end(saved: Path | None, resume: str, finished: bool = False) -> str:
    """Where the newest checkpoint of a run is, and what a next start does. resume: run.resume.
    finished: all steps were done."""
    if saved is None:
        return "none was saved (checkpoint.every_steps=-1): the same command starts anew"
    return f"{saved}; " + (
        "run.resume=auto goes on from it, the same command starts anew" if resume == "never"
        else "a larger train.num_steps goes on from it" if finished
        else "the same command goes on from it")
