"""What a model is, in one record: all that differs between a model of this project's own parts and
a whole model of transformers. The trainer, the loaders and the tools ask the record of the
recipe's model section, and never which kind of model it is.

A member names a function of each kind by its module, which is imported when the member is asked
for: so the record imports nothing, no torch either, and can be asked by subpackages that may not
import what answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from orchmllm.config.model import ModelConfig


class Member:
    """A function, or where in this package it is, `module:name`, for own parts and whole models."""

    def __init__(self, own: str | Callable, whole: str | Callable) -> None:
        self.kinds = own, whole

    def __get__(self, spec: ModelSpec, owner: type) -> Any:
        found = self.kinds[spec.is_folder]
        return resolve_name(f"orchmllm.{found}") if isinstance(found, str) else found


@dataclass(frozen=True)
class ModelSpec:
    """One kind of model. what: in words. is_folder: a folder says what it is, and nothing else can
    be checked while that cannot be used. logits: of an item of the LLM, `tokens` or `rows`
    (targets), for which there are logits."""

    what: str
    is_folder: bool
    logits: str

    # Before anything is built: (model) -> the WeightSources that it starts from; (recipe), which
    # raises ValueError for keys of parts that it has not; (data, model); (model) -> tokens of its
    # text, and the key that says so; (model) -> what a run is compared by beside its recipe.
    weights = Member("hf.sources:of_parts", "hf.whole_model:weights")
    check = Member(lambda recipe: None, "hf.whole_model:check")
    tokenizer = Member(
        lambda data, model: resolve_name("orchmllm.data.formats.open:open_tokenizer")(data),
        "hf.whole_model:tokenizer")
    vocabulary = Member(lambda model: (model.llm.vocab_size, "model.llm.vocab_size"),
                        "hf.whole_model:vocabulary")
    identity = Member(lambda model: {}, "hf.whole_model:identity")
    # What planning knows: (job); (phase, model, lengths, checkpointing); (model, dtype), see
    # orchmllm.models.moved; (model); (job, on_cpu); (model, device type, dtype), which says what
    # computes attention.
    plan_spec = Member("models.flops:plan_parts", "models.whole_flops:plan_whole")
    work = Member("models.flops:work_of_parts", "models.whole_flops:whole_work")
    moved = Member("models.moved:moved_by_parts", "models.whole_flops:moved_by_whole")
    units = Member("sharding.units:units_of_parts", "sharding.units:units_of_whole")
    memory = Member("sharding.memory:MemoryModel.of", "sharding.whole_memory:WholeMemory.of")
    attention = Member("models.attention:describe_attention", "models.hf:describe_attention")
    # To train: (data, model, seed=); (recipe, dataset, gather of all ranks, log), which raises on
    # all ranks for a model that would not be trained exactly; (what build returned, dataset, gather
    # of all ranks, log); for build see orchmllm.sharding.build, for asked, who answers held-out
    # examples, orchmllm.runtime.samples.
    dataset = Member("data.stream:open_dataset", "hf.whole_model:open_dataset")
    prove = Member(lambda recipe, dataset, gather, log: None, "proof.prove:prove_on_first_rank")
    feed = Member("data.loading.step_loader:feed_of", "data.loading.whole_examples:feed_of")
    build = Member("sharding.build:build_parts", "sharding.build:build_whole")
    asked = Member("runtime.samples:AskedParts", "runtime.whole_samples:AskedWhole")
    # For tools: (recipe) -> its sources, and what measures their rows; (model) -> encoder phases
    # that it has not; (model, encoder phase, sizes of media) -> their lengths, see
    # orchmllm.tools.predict.whole.geometry; (model) -> parameters by part; for timed see
    # orchmllm.tools.predict.profile_command, for export orchmllm.tools.export.export.write_parts;
    # (arguments of the command, log) -> an answer.
    lengths = Member("tools.predict.examples:open_parts", "tools.predict.examples:open_whole")
    absent = Member(lambda model: frozenset(), "tools.predict.whole:absent")
    geometry = Member("tools.predict.workload:geometry_of_parts", "tools.predict.whole:geometry")
    parameters = Member("tools.predict.dry_run:parameters", "tools.predict.whole:parameters")
    timed = Member("tools.predict.phase_runner:timed_parts",
                   "tools.predict.whole_runner:timed_whole")
    export = Member("tools.export.export:write_parts", "tools.export.adapters:write_model")
    answer = Member("tools.generate.own:answer_own", "tools.generate.whole:answer_whole")


OWN_PARTS = ModelSpec("a model of this project's own parts", False, "tokens")
WHOLE = ModelSpec("a whole model of transformers", True, "rows")


def spec_of(model: ModelConfig) -> ModelSpec:
    """The record of a recipe's model section: the only choice between kinds of models."""
    return WHOLE if model.folder else OWN_PARTS
