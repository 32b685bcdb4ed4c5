"""What a model is, in one record: all that differs between a model of this project's own parts and
a whole model of transformers. The trainer, the loaders and the tools ask the record of the
recipe's model section, and never which kind of model it is.

A member names a function by its module, which is imported when it is called: so the record imports
nothing, no torch either, and can be asked by subpackages that may not import what answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from orchmllm.config.model import ModelConfig


@dataclass(frozen=True)
class Later:
    """A function of this package, `module:name`, that is imported when it is called."""

    path: str

    @property
    def function(self) -> Callable:
        return resolve_name(f"orchmllm.{self.path}")

    def __call__(self, *args: Any, **keys: Any) -> Any:
        return self.function(*args, **keys)


@dataclass(frozen=True)
class ModelSpec:
    """One kind of model.

    what: in words. To train: dataset(data, model, seed=), feed(built model), build(...), see
    orchmllm.sharding.build. Before anything is built, of the recipe alone: weights(model), the
    WeightSources it starts from; check(recipe) raises ValueError for keys of parts that it has not;
    tokenizer(data, model); vocabulary(model), the tokens of its text and the key that says so;
    identity(model), what a run is compared by beside its recipe. What planning knows:
    plan_spec(job), work(phase, model, lengths, checkpointing), units(model), memory(job, on_cpu),
    attention(model, device type, dtype). For tools: lengths(recipe), its sources and what measures
    their rows; geometry(model, encoder phase), which says what a medium of some size becomes;
    parameters(model), by part; export(...), see orchmllm.tools.export.export.write_parts;
    answer(arguments of the command, log).

    logits: of an item of the LLM, `tokens` or `rows` (targets), for which there are logits.
    undrawn: encoder phases whose media no mix draws for it. is_folder: nothing else can be checked
    while its folder cannot be used."""

    what: str
    logits: str
    dataset: Callable
    feed: Callable
    build: Callable
    weights: Callable
    check: Callable
    tokenizer: Callable
    vocabulary: Callable
    identity: Callable
    plan_spec: Callable
    work: Callable
    units: Callable
    memory: Callable
    attention: Callable
    lengths: Callable
    geometry: Callable
    parameters: Callable
    export: Callable
    answer: Callable
    undrawn: frozenset[str] = frozenset()
    is_folder: bool = False


OWN_PARTS = ModelSpec(
    what="a model of this project's own parts",
    logits="tokens",
    dataset=Later("data.stream:open_dataset"),
    feed=lambda model: Later("data.loading.step_loader:SegmentFeed"),
    build=Later("sharding.build:build_parts"),
    weights=Later("hf.sources:of_parts"),
    check=lambda recipe: None,
    tokenizer=lambda data, model: Later("data.formats.open:open_tokenizer")(data),
    vocabulary=lambda model: (model.llm.vocab_size, "model.llm.vocab_size"),
    identity=lambda model: {},
    plan_spec=Later("models.flops:plan_parts"),
    work=Later("models.flops:work_of_parts"),
    units=Later("sharding.units:units_of_parts"),
    memory=Later("sharding.memory:MemoryModel.of"),
    attention=Later("models.attention:describe_attention"),
    lengths=Later("tools.predict.examples:open_parts"),
    geometry=lambda model, phase: getattr(model, phase).geometry,
    parameters=Later("tools.predict.dry_run:parameters"),
    export=Later("tools.export.export:write_parts"),
    answer=Later("tools.generate.own:answer_own"))

WHOLE = ModelSpec(
    what="a whole model of transformers",
    logits="rows",
    dataset=Later("hf.whole_model:open_dataset"),
    feed=Later("data.loading.whole_examples:feed_of"),
    build=Later("sharding.build:build_whole"),
    weights=Later("hf.whole_model:weights"),
    check=Later("hf.whole_model:check"),
    tokenizer=Later("hf.whole_model:tokenizer"),
    vocabulary=Later("hf.whole_model:vocabulary"),
    identity=Later("hf.whole_model:identity"),
    plan_spec=Later("models.whole_flops:plan_whole"),
    work=Later("models.whole_flops:whole_work"),
    units=Later("sharding.units:units_of_whole"),
    memory=Later("sharding.whole_memory:WholeMemory.of"),
    attention=Later("models.hf:describe_attention"),
    lengths=Later("tools.predict.examples:open_whole"),
    geometry=Later("tools.predict.whole:geometry"),
    parameters=Later("tools.predict.whole:parameters"),
    export=Later("tools.export.adapters:write_model"),
    answer=Later("tools.generate.whole:answer_whole"),
    undrawn=frozenset({"audio"}),
    is_folder=True)


def spec_of(model: ModelConfig) -> ModelSpec:
    """The record of a recipe's model section: the only choice between kinds of models."""
    return WHOLE if model.folder else OWN_PARTS
