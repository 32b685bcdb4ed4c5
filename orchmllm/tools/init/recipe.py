"""The recipe of `orchmllm init`: what the data are, and a size that fits this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import DataConfig, Recipe, SourceConfig, load_recipe
from orchmllm.config.strict_yaml import quoted
from orchmllm.data.formats.conversation import media_of
from orchmllm.data.formats.open import DataSource, index_path, open_source
from orchmllm.data.lengths import LengthReader
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.survey import survey
from orchmllm.data.text.processor import Processor
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.folder import PARTS
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import AUDIO, MODALITIES, VISION, BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.fits import DEVICE_SHARE
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.compose.drawn import shapes, write_drawn
from orchmllm.tools.compose.write import Parts, compose
from orchmllm.tools.init.tokenizer import train_tokenizer

NUM_ROWS = 500  # that are looked at
VOCAB_SIZE = 8192  # of a tokenizer that is trained here, at most
BATCHES = (32, 16, 8, 4, 2, 1)
# Layers, width, width of the MLP and heads of a tower that the data have nothing for.
UNUSED = (1, 64, 64, 4)
TEXT = """\
# Written by `orchmllm init` for {source}.
# {lengths}
# {shares}
# docs/recipe.md has all keys; any of them can be given to a command: train.lr=1e-4
run:
  dir: {run}
launch:
  nproc_per_node: {machine.num_ranks}  # {machine.text}
data:
  path: {path}
  num_validation: {held_out}  # rows at the end that are not learnt
model:
  {model}
train:
  num_steps: {steps}  # of {examples} examples; the data have {rows}
  batch_size: {batch}  # examples of a rank; {why}
  lr: {lr}
  sample_every: {sample}  # steps after which held-out examples are answered
fsdp:
  compute_dtype: {machine.dtype}
  activation_checkpointing: {machine.checkpointing}
checkpoint:
  every_steps: {save}
"""


# Of what `model` is in the recipe.
WHOLE = "pretrained: {folder}  # a whole model of transformers, with its own processor"
COMPOSED = "{key}: {folder}  # composed of {parts}"
DRAWN = "config: {folder}  # towers and an LLM that start from random weights (docs/models.md)"


class Machine(NamedTuple):
    """budget: bytes that a rank may take. most_tokens: of the LLM in a microbatch of a rank, so
    that a step takes seconds. max_side, encoder, llm: sizes of a model that starts from nothing."""

    num_ranks: int
    budget: float
    text: str
    dtype: str = "float32"
    checkpointing: str = "none"
    most_tokens: int = 2048
    max_side: int = 224
    encoder: tuple[int, ...] = (2, 128, 512, 4)
    llm: tuple[int, ...] = (4, 256, 704, 4)


def this_machine() -> Machine:
    import torch

    if torch.cuda.is_available():
        gpu, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        return Machine(count, DEVICE_SHARE * gpu.total_memory,
                       f"{count} x {gpu.name} of {gpu.total_memory / 1e9:.0f} GB", "bfloat16",
                       "auto", 16384, 448, (12, 768, 3072, 12), (12, 1024, 2816, 16))
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks = min(2, cores)
    return Machine(ranks, memory / 2 / ranks,
                   f"no GPU, {cores} cores, {memory / 1e9:.0f} GB of memory")


def write_recipe(path: str, models: Mapping[str, Path], out: Path, trained: Path, made: Path
                 ) -> None:
    """Writes the recipe for data at `path`, and says what it is made from. models: part -> folder
    that it starts from, "" -> that of a whole model. trained, made: where a tokenizer is written if
    none is there, and the folder of a model that is composed. Raises ValueError if the data cannot
    be read, or the models do not fit together."""
    source, machine = open_source(SourceConfig(path=path), index_path(None)), this_machine()
    rows = len(source)
    some = sorted(set(np.linspace(0, rows - 1, NUM_ROWS).astype(int).tolist()))
    folder, told, model = _model(source, some, models, machine, trained, made)
    reader = ProcessedReader(Processor(folder))
    print(f"{source}\n{told}", flush=True)
    layouts = _layouts(source, some, reader)
    every = BatchLayout.concat(layouts, [len(layouts)])
    p50, p90 = np.percentile(every.tokens_per_example, [50, 90])
    lengths = f"An example has {p50:.0f} positions (median), 9 of 10 have at most {p90:.0f}."
    shares = "Of all positions " + ", ".join(
        f"{share:.0%} are {name}" for name, code in MODALITIES.items()
        if (share := every.num_tokens[every.modality == code].sum() / every.num_tokens.sum())) + "."
    values = {
        "source": quoted(str(source)), "lengths": lengths, "shares": shares, "machine": machine,
        "run": quoted(f"runs/{Path(source.name).stem}"), "path": quoted(path),
        "rows": rows, "model": model, "held_out": min(64, rows // 10),
        "lr": "1e-5" if model.startswith("pretrained") else "1e-3"}
    out.write_text(TEXT.format(**values, batch=1, why="", steps=1, examples=1, sample=0, save=0),
                   encoding="utf-8")
    batch, why = _batch_size(load_recipe(out), layouts, machine)
    examples = batch * machine.num_ranks
    steps = max(20, -(-3 * rows // examples))
    quarter = -(-steps // 4)
    out.write_text(TEXT.format(
        **values, batch=batch, why=why, steps=steps, examples=examples, save=quarter,
        sample=quarter if values["held_out"] else 0), encoding="utf-8")
    print(f"{lengths}\n{shares}\n{machine.text}: {machine.num_ranks} ranks x {batch} examples\n"
          f"  {why}")


def _model(source: DataSource, some: Sequence[int], models: Mapping[str, Path], machine: Machine,
           trained: Path, made: Path) -> tuple[Path, str, str]:
    """(The folder of the model, where its tokenizer is from, what the recipe says of it). Raises
    ValueError."""
    if whole := models.get(""):
        return whole, f"processor of {whole}", WHOLE.format(folder=quoted(str(whole)))
    if "llm" in models:
        parts = Parts(models["llm"], models.get("vision"), models.get("audio"))
        compose(parts, made)
        return made, f"tokenizer of {models['llm']}, parts composed in {made}", COMPOSED.format(
            key="pretrained" if (made / PARTS).is_file() else "config",
            folder=quoted(str(made)), parts=", ".join(quoted(str(p)) for p in models.values()))
    texts, kinds = [], set()
    for row in some:
        try:
            turns = source.conversation(row)
        except ValueError:  # _layouts says what is wrong with it
            continue
        texts += [p for turn in turns for p in turn.parts if isinstance(p, str)]
        kinds |= {medium.modality for medium in media_of(turns)}
    tokenizer, told = _tokenizer(source, texts, trained)
    size = -(-(tokenizer.vocab_size + len(kinds)) // 64) * 64
    vision = machine.encoder if VISION in kinds else () if kinds else UNUSED
    write_drawn(shapes(machine.llm, vision, machine.encoder if AUDIO in kinds else (),
                       vocab_size=size), tokenizer.path, made, machine.max_side)
    return made, f"{told}\nmodel {made}", DRAWN.format(folder=quoted(str(made)))


def _tokenizer(source: DataSource, texts: Sequence[str], path: Path
               ) -> tuple[ChatTokenizer, str]:
    """The one beside the data, else one that is trained on texts; and where it is from."""
    data = Path(source.config.path)
    file = (data if data.is_dir() else data.parent) / "tokenizer.json"
    if file.is_file():
        return ChatTokenizer(file), f"tokenizer {file}"
    size = train_tokenizer(texts, path, VOCAB_SIZE)
    return ChatTokenizer(path), ("no tokenizer lies beside the data, so this was trained on "
                                 f"their texts ({size} tokens):\n  {path}")


def _layouts(source: DataSource, some: Sequence[int], reader: LengthReader) -> list[BatchLayout]:
    """Of some rows; says where they go. Raises ValueError if a run would be refused for it."""
    survey([source], reader, DataConfig(), print, len(some))
    measured = reader.plan(source.conversation, some)
    return [row.layout for row in measured if row.problem is None]


def _batch_size(recipe: Recipe, layouts: Sequence[BatchLayout], machine: Machine
                ) -> tuple[int, str]:
    """The largest of BATCHES that fits by the prediction, and why it is the largest."""
    why = f"more would process over {machine.most_tokens} positions a step"
    on_cpu = machine.checkpointing == "none"
    choice = dict.fromkeys(PHASES, "none" if on_cpu else "full")
    for batch in BATCHES:
        job = resolve(replace(recipe, train=replace(recipe.train, batch_size=batch)),
                      machine.num_ranks, machine.num_ranks)
        drawn = np.random.default_rng(0).integers(0, len(layouts), batch * machine.num_ranks)
        plan = plan_step(BatchLayout.concat([layouts[i] for i in drawn],
                                            [batch] * machine.num_ranks), plan_spec(job))
        peak = MemoryModel.of(job).peak(loads_of(plan), choice)
        if peak > machine.budget:
            why = (f"predicted {peak / 1e9:.3g} GB for {batch}, and a rank has "
                   f"{machine.budget / 1e9:.3g}")
        elif plan.positions("llm").max() <= machine.most_tokens or batch == 1:
            return batch, why if batch < BATCHES[0] else "more are seldom of use"
    return 1, f"{why}: it does not fit; see orchmllm plan job"
