"""The recipe of `orchmllm init`: what the data are, and a size that fits this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe, SourceConfig, load_recipe
from orchmllm.data.formats.open import DataSource, beside, index_path, open_source
from orchmllm.data.lengths import LengthReader
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.models.flops import padded_phases, plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS, MODALITIES, BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.fits import DEVICE_SHARE
from orchmllm.sharding.memory import MemoryModel, loads_of
from orchmllm.tools.init.tokenizer import train_tokenizer

NUM_ROWS = 500  # that are looked at
VOCAB_SIZE = 8192  # of a tokenizer that is trained here, at most
BATCHES = (32, 16, 8, 4, 2, 1)
# Of parts that start from random weights, on a CPU and on a GPU; of one that the data do not need.
SMALL = {"num_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
SHAPES = {
    "cpu": {"encoder": {"num_layers": 2, "hidden_size": 128, "intermediate_size": 512,
                        "num_heads": 4},
            "llm": {"num_layers": 4, "hidden_size": 256, "intermediate_size": 704, "num_heads": 4,
                    "num_kv_heads": 2}},
    "cuda": {"encoder": {"num_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
                         "num_heads": 12},
             "llm": {"num_layers": 12, "hidden_size": 1024, "intermediate_size": 2816,
                     "num_heads": 16, "num_kv_heads": 4}}}
TEXT = """\
# Written by `orchmllm init` for {source}.
# {lengths}
# docs/recipe.md has all keys; any of them can be given to a command: train.lr=1e-4
run:
  dir: {run}
launch:
  nproc_per_node: {ranks}  # {machine}
data:
  path: {path}
  tokenizer: {tokenizer}  # {tokens} tokens
  num_validation: {held_out}  # rows at the end that are not learnt
model:  # `pretrained` starts from a folder, anything else from random weights
  vision: {vision}
  audio: {audio}
  llm: {llm}
train:
  num_steps: {steps}  # about {epochs:g} times over the data
  batch_size: {batch}  # examples of a rank; {why}
  lr: {lr}
  sample_every: {sample}  # steps after which held-out examples are answered
fsdp:
  compute_dtype: {dtype}
  activation_checkpointing: {checkpointing}
checkpoint:
  every_steps: {save}
"""


class Machine(NamedTuple):
    """device: cpu or cuda. budget: bytes that a rank may take. most_tokens: of the LLM in a
    microbatch of a rank, so that a step takes seconds."""

    device: str
    num_ranks: int
    budget: float
    most_tokens: int
    text: str


def this_machine() -> Machine:
    import torch

    if torch.cuda.is_available():
        gpu, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        return Machine("cuda", count, DEVICE_SHARE * gpu.total_memory, 16384,
                       f"{count} x {gpu.name} of {gpu.total_memory / 1e9:.0f} GB")
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks = min(2, cores)
    return Machine("cpu", ranks, memory / 2 / ranks, 2048,
                   f"no GPU, {cores} cores, {memory / 1e9:.0f} GB of memory")


def write_recipe(path: str, models: Mapping[str, Path], out: Path) -> None:
    """Writes the recipe for data at `path`, and says what it is made from. models: part -> folder
    that it starts from. Raises ValueError if the data cannot be read; nothing is left then."""
    source, machine = open_source(SourceConfig(path=path), index_path(None)), this_machine()
    print(source, flush=True)
    tokenizer, told = _tokenizer(source, models, out)
    print(told, flush=True)
    rows = len(source)
    values = {
        "source": source, "run": json.dumps(f"runs/{source.name}"),
        "ranks": machine.num_ranks,
        "machine": machine.text, "path": json.dumps(path),
        "tokenizer": json.dumps(str(tokenizer.path)), "tokens": tokenizer.vocab_size,
        "held_out": min(64, -(-rows // 20)) if rows > 1 else 0,
        "lr": "1e-5" if models else "1e-3",
        "dtype": "bfloat16" if machine.device == "cuda" else "float32",
        "checkpointing": "auto" if machine.device == "cuda" else "none",
        **_parts(models, machine, tokenizer, set(PHASES))}
    later = {"lengths": "", "batch": 1, "why": "", "steps": 1, "epochs": 1, "sample": 0, "save": 0}
    try:
        out.write_text(TEXT.format(**values, **later), encoding="utf-8")
        recipe = load_recipe(out)  # with the shapes of the models
        layouts = list(_layouts(source, recipe, tokenizer))
        every = BatchLayout.concat(layouts, [len(layouts)])
        present = {part for part, code in ENCODERS.items() if (every.modality == code).any()}
        values |= _parts(models, machine, tokenizer, {*present, "llm"})
        lengths, total = _described(every), every.tokens_per_example
        out.write_text(TEXT.format(**values, **later), encoding="utf-8")
        batch, why = _batch_size(load_recipe(out), layouts, machine)
        steps = max(20, -(-3 * rows // (batch * machine.num_ranks)))
        out.write_text(TEXT.format(**values | later | {
            "lengths": lengths, "batch": batch, "why": why, "steps": steps,
            "epochs": round(steps * batch * machine.num_ranks / rows, 1),
            "sample": max(1, steps // 4) if values["held_out"] else 0,
            "save": max(10, steps // 4)}), encoding="utf-8")
        load_recipe(out)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    print(f"{lengths}\n{machine.text}: {machine.num_ranks} ranks x {batch} examples, {why}; "
          f"the longest example has {total.max()} positions")


def _tokenizer(source: DataSource, models: Mapping[str, Path], out: Path
               ) -> tuple[ChatTokenizer, str]:
    """That of the LLM or beside the data, else one that is trained; and where it is from."""
    found = [models["llm"]] if "llm" in models else []
    try:
        found.append(beside(source.config.path))
    except ValueError:  # none lies there
        pass
    for folder in found:
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if file.is_file():
            return ChatTokenizer(file), f"tokenizer {file}"
    if "llm" in models:
        raise ValueError(f"--model {models['llm']} has no tokenizer.json, and none lies beside the "
                         "data: copy the model's there")
    path = out.with_name(f"{out.stem}.tokenizer.json")
    texts = []
    for row in _some(source):
        try:
            texts += [p for turn in source.conversation(row) for p in turn.parts
                      if isinstance(p, str)]
        except ValueError:  # the lengths say what is wrong with it
            continue
    size = train_tokenizer(texts, path, VOCAB_SIZE)
    return ChatTokenizer(path), (f"no tokenizer lies beside the data: {path} was trained on their "
                                 f"texts ({size} tokens)")


def _some(source: DataSource) -> list[int]:
    """Rows at equal distances."""
    return sorted(set(np.linspace(0, len(source) - 1, NUM_ROWS).astype(int).tolist()))


def _layouts(source: DataSource, recipe: Recipe, tokenizer: ChatTokenizer
             ) -> Iterator[BatchLayout]:
    """Of some usable rows; says how many are not. Raises ValueError if none is."""
    reader = LengthReader(tokenizer, recipe.model.vision.geometry, recipe.model.audio.geometry)
    measured = reader.plan(source.conversation, _some(source))
    problems = [row.problem for row in measured if row.problem is not None]
    if problems:
        print(f"{len(problems)} of {len(measured)} rows that were looked at cannot be used; the "
              f"first: {problems[0]}", flush=True)
    if len(problems) == len(measured):
        raise ValueError(f"{source.config.path}: no row of it can be used")
    yield from (row.layout for row in measured if row.problem is None)


def _described(every: BatchLayout) -> str:
    tokens = every.tokens_per_example
    p50, p90 = np.percentile(tokens, [50, 90])
    shares = ", ".join(
        f"{every.num_tokens[every.modality == code].sum() / tokens.sum():.0%} {name}"
        for name, code in MODALITIES.items() if (every.modality == code).any())
    return (f"Of {len(tokens)} rows an example has {p50:.0f} positions (median), 9 of 10 at most "
            f"{p90:.0f}: {shares}.")


def _parts(models: Mapping[str, Path], machine: Machine, tokenizer: ChatTokenizer,
           needed: set[str]) -> dict[str, str]:
    """The sections of the model, as YAML. needed: parts that the data have something for."""
    out = {}
    for part in PHASES:
        shapes = SHAPES[machine.device]["llm" if part == "llm" else "encoder"]
        if part in models:
            section: dict = {"pretrained": str(models[part])}
        else:
            section = dict(shapes if part in needed else SMALL)
            if part == "llm":
                section["vocab_size"] = -(-tokenizer.vocab_size // 64) * 64
        if part == "vision":
            section["max_side"] = 448 if machine.device == "cuda" else 224
        out[part] = "{" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in section.items()) + "}"
        out[part] += "" if part in needed else "  # the data have none: as small as can be"
    return out


def _batch_size(recipe: Recipe, layouts: Sequence[BatchLayout], machine: Machine
                ) -> tuple[int, str]:
    """The largest of BATCHES that fits by the prediction, and why it is the largest."""
    why = f"more than {machine.most_tokens} positions of a rank would take long"
    choice = dict.fromkeys(PHASES, "full" if machine.device == "cuda" else "none")
    for batch in BATCHES:
        job = resolve(replace(recipe, train=replace(recipe.train, batch_size=batch)),
                      machine.num_ranks, machine.num_ranks)
        drawn = np.random.default_rng(0).integers(0, len(layouts), batch * machine.num_ranks)
        plan = plan_step(BatchLayout.concat([layouts[i] for i in drawn],
                                            [batch] * machine.num_ranks), plan_spec(job))
        peak = MemoryModel.of(job, on_cpu=machine.device == "cpu").peak(
            loads_of(plan, padded_phases(recipe.model)), choice)
        if peak > machine.budget:
            why = (f"predicted {peak / 1e9:.3g} GB for {batch}, and a rank has "
                   f"{machine.budget / 1e9:.3g}")
        elif plan.positions("llm").max() <= machine.most_tokens or batch == 1:
            return batch, why if batch < BATCHES[0] else "more are seldom of use"
    return 1, f"{why}: it does not fit; see orchmllm plan job"
