"""What is trained: the folder of a model of transformers, and which of its parts learn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields

from orchmllm.config.schema import Conflict, key, section


@dataclass(frozen=True)
class PartConfig:
    """A tower of the model, its LLM, or its generator."""

    frozen: bool = key(False, "This part does not learn. The LLM has the embeddings and the "
                       "head, and the generator has its connector; the connectors of towers are "
                       "no part of these (model.connectors_frozen).")


@dataclass(frozen=True)
class LoraConfig:
    """LoRA, by peft: adapters beside linear layers of model.pretrained, in the blocks of each part
    that is not frozen. They alone learn."""

    rank: int = key(0, "Rank of the adapters; 0: there are none.", at_least=0,
                    aliases=("r", "lora_r", "lora_rank"))
    alpha: int = key(8, "What an adapter computes is multiplied by alpha / rank.", at_least=1,
                     aliases=("lora_alpha",))
    use_rslora: bool = key(False, "By alpha / sqrt(rank) instead.")
    target_modules: tuple[str, ...] = key(
        (), "Names of linear layers in a block, or how these end, such as `q_proj`; empty: all.",
        aliases=("lora_target", "lora_target_modules"))
    dropout: float = key(0.0, "It has to be 0.",
                         at_least=0, aliases=("lora_dropout",))
    connector: bool = key(False, "The whole connector learns as well (peft's "
                          "modules_to_save).", aliases=("modules_to_save",))

    def conflicts(self) -> Iterator[Conflict]:
        """lora.dropout is 0; without a rank no other key counts."""
        if self.dropout:
            yield Conflict(("dropout",), "its random masks depend on where an example is: set it "
                           "to 0")
        for f in fields(self):
            if not self.rank and getattr(self, f.name) != f.default:
                yield Conflict((f.name, "rank"), "has no effect without a rank: set "
                               "model.lora.rank, or leave it out")


@dataclass(frozen=True)
class ModelConfig:
    """A multimodal model of transformers (docs/models.md). `orchmllm compose` writes one of towers
    and an LLM, `orchmllm init` a small one that starts from nothing."""

    vision: PartConfig = section(PartConfig)
    audio: PartConfig = section(PartConfig)
    llm: PartConfig = section(PartConfig)
    generator: PartConfig = section(PartConfig)
    connectors_frozen: bool = key(False, "No connector learns.")
    pretrained: str = key("", "Folder of a model, with its weights and its processor.",
                          aliases=("model_name_or_path", "pretrained_model_name_or_path"))
    config: str = key("", "The same without weights: they start from run.seed.")
    lora: LoraConfig = section(LoraConfig)
    proof: bool = key(True, "Before the first step, compare losses and gradients of a small "
                      "model like it with transformers (docs/models.md).")

    @property
    def folder(self) -> str:
        """Of the model."""
        return os.path.expanduser(self.pretrained or self.config)

    def learns(self, part: str) -> bool:
        """Whether anything in vision, audio, connector, llm or generator does."""
        if part == "connector":
            return not self.connectors_frozen and (not self.lora.rank or self.lora.connector)
        return not getattr(self, part).frozen

    @property
    def llm_weights_learn(self) -> bool:
        """Whether the LLM's own weights do, and not adapters alone."""
        return not (self.llm.frozen or self.lora.rank)

    def features_learn(self, phase: str) -> bool:
        """Whether the features of an encoder have a gradient: something that makes them learns."""
        return self.learns(phase) or self.learns("connector")

    def conflicts(self) -> Iterator[Conflict]:
        """One of pretrained and config names a folder; some part learns; lora is for pretrained
        alone, where the LLM learns."""
        parts = ("vision", "audio", "llm")
        if not any(map(self.learns, ("connector", *parts))):
            yield Conflict(("connectors_frozen", *(f"{part}.frozen" for part in parts)),
                           "leaves nothing that would learn: set one of them to false")
        if self.lora.rank and not self.pretrained:
            yield Conflict(("lora.rank", "pretrained"), "adapters are for weights that were "
                           "trained: name their folder in model.pretrained (docs/models.md)")
        if self.lora.rank and self.llm.frozen:
            yield Conflict(("llm.frozen", "lora.rank"), "the LLM learns by adapters alone where "
                           "model.lora has a rank: leave it out")
        if self.lora.connector and self.connectors_frozen:
            yield Conflict(("connectors_frozen", "lora.connector"), "lora.connector says that the "
                           "connector learns: leave one of them out")
        if self.pretrained and self.config:
            yield Conflict(("config", "pretrained"), "starts from run.seed, and model.pretrained "
                           "names weights: leave one of them out")
        if not self.folder:
            yield Conflict(("pretrained",), "name the folder of a model, or model.config without "
                           "its weights; `orchmllm init DATA` writes a recipe and a small model, "
                           "`orchmllm compose` a model of a vision tower, an audio tower and an "
                           "LLM")
