"""Shapes of the three submodules as plain dataclasses (no torch: recipes are checked before it is
imported). Names follow Hugging Face's configurations where one exists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields

from orchmllm.config.schema import Conflict, key, section
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry

AUDIO_MODES = ("packed", "padded", "fixed")
WHISPER_FRAMES = 3000  # 30 s


def _layers(default: int) -> int:
    return key(default, "Transformer blocks.", at_least=1, aliases=("num_hidden_layers", "depth"))


def _width(default: int) -> int:
    return key(default, "Width of a position.", at_least=1,
               aliases=("d_model", "hidden_dim", "dim"))


def _mlp(default: int) -> int:
    return key(default, "Width of a block's MLP.", at_least=1,
               aliases=("ffn_dim", "ffn_hidden_size"))


def _heads(default: int) -> int:
    return key(default, "Attention heads.", at_least=1, aliases=("num_attention_heads", "n_heads"))


def _pretrained(model: str) -> str:
    return key("", f"Folder with {model}: config.json and safetensors, read shard by shard; empty: "
                   "start from run.seed. Implies fsdp.meta_init.",
               aliases=("model_name_or_path", "pretrained_model_name_or_path"))


@dataclass(frozen=True)
class VisionConfig:
    """Packed native-resolution ViT (pre-norm, 2-D rotary positions, attention within one image)
    and its connector: merge_size x merge_size patches -> LayerNorm -> 2-layer MLP -> LLM width."""

    num_layers: int = _layers(4)
    hidden_size: int = _width(192)
    intermediate_size: int = _mlp(768)
    num_heads: int = _heads(4)
    patch_size: int = key(14, "Side of a patch in pixels.", at_least=1)
    merge_size: int = key(2, "merge_size x merge_size patches become one LLM token.", at_least=1,
                          aliases=("spatial_merge_size",))
    max_side: int = key(448, "Longest side of an image in pixels; only larger images are resized.",
                        at_least=1, aliases=("image_size",))
    frozen: bool = key(False, "The encoder does not learn; its connector does, unless "
                       "model.connectors_frozen is true.")
    pretrained: str = _pretrained("an exported encoder of ours")

    def conflicts(self) -> Iterator[Conflict]:
        """hidden_size is a multiple of 4 * num_heads; max_side is at least one token's side,
        patch_size * merge_size."""
        if self.hidden_size % (4 * self.num_heads):
            yield Conflict(("hidden_size", "num_heads"),
                           f"must be a multiple of 4 * num_heads ({4 * self.num_heads}): two "
                           "axes, two values per rotation")
        unit = self.patch_size * self.merge_size
        if self.max_side < unit:
            yield Conflict(("max_side", "patch_size", "merge_size"),
                           f"must be at least patch_size * merge_size ({unit}), one LLM token")

    @property
    def geometry(self) -> VisionGeometry:
        return VisionGeometry(self.patch_size, self.merge_size, self.max_side)


@dataclass(frozen=True)
class AudioConfig:
    """Whisper-style encoder on log-mel frames (two convolutions, the second with stride 2, then a
    pre-norm transformer over one clip) and its connector: `stack` positions -> 2-layer MLP."""

    num_layers: int = _layers(4)
    hidden_size: int = _width(192)
    intermediate_size: int = _mlp(768)
    num_heads: int = _heads(4)
    num_mels: int = key(80, "Mel bands of a frame.", at_least=1, aliases=("num_mel_bins",))
    stack: int = key(2, "Encoder positions that become one LLM token.", at_least=1)
    frozen: bool = key(False, "The encoder does not learn; its connector does, unless "
                       "model.connectors_frozen is true.")
    pretrained: str = _pretrained("a Whisper model or its encoder")
    mode: str = key(
        "packed", "How clips of unequal length are computed: `packed`: one after the other, no "
        "padding; `padded`: padded to the longest clip of the rank and masked, the same results at "
        "the paper's cost; `fixed`: each filled with silence to 30 s and nothing masked, which is "
        "what a pretrained Whisper has seen; longer clips are then unusable.", choices=AUDIO_MODES)

    def conflicts(self) -> Iterator[Conflict]:
        """hidden_size is even, at least 4 and a multiple of num_heads."""
        if self.hidden_size % self.num_heads:
            yield Conflict(("hidden_size", "num_heads"),
                           f"must be a multiple of num_heads ({self.num_heads})")
        if self.hidden_size % 2 or self.hidden_size < 4:
            yield Conflict(("hidden_size",), "must be even and at least 4: sine and cosine "
                           "positions")

    @property
    def geometry(self) -> AudioGeometry:
        return AudioGeometry(num_mels=self.num_mels, stack=self.stack,
                             window_frames=WHISPER_FRAMES if self.mode == "fixed" else 0)


@dataclass(frozen=True)
class LLMConfig:
    """Qwen2 backbone, of this shape; nothing is downloaded."""

    vocab_size: int = key(512, "Tokens; at least as many as the tokenizer has.", at_least=1)
    num_layers: int = _layers(4)
    hidden_size: int = _width(256)
    intermediate_size: int = _mlp(704)
    num_heads: int = _heads(4)
    num_kv_heads: int = key(2, "Heads of keys and values (grouped-query attention).", at_least=1,
                            aliases=("num_key_value_heads",))
    rope_theta: float = key(1_000_000.0, "Base of the rotary positions.", above=0)
    rms_norm_eps: float = key(1e-6, "Epsilon of RMSNorm.", above=0)
    frozen: bool = key(False, "The backbone does not learn, its head and embeddings included.")
    pretrained: str = _pretrained("a Qwen2 model")

    def conflicts(self) -> Iterator[Conflict]:
        """hidden_size is a multiple of 2 * num_heads; num_kv_heads divides num_heads."""
        if self.hidden_size % (2 * self.num_heads):
            yield Conflict(("hidden_size", "num_heads"),
                           f"must be a multiple of 2 * num_heads ({2 * self.num_heads}): rotary "
                           "positions need heads of even size")
        if self.num_heads % self.num_kv_heads:
            yield Conflict(("num_kv_heads", "num_heads"),
                           f"must divide num_heads ({self.num_heads})")


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank (LoRA, by peft) on linear layers of model.pretrained: in the blocks of
    each part that is not frozen. They alone learn, all weights of the folder stay as they are."""

    rank: int = key(0, "Rank of the adapters; 0: there are none.", at_least=0,
                    aliases=("r", "lora_r", "lora_rank"))
    alpha: int = key(8, "What an adapter computes is multiplied by alpha / rank.", at_least=1,
                     aliases=("lora_alpha",))
    use_rslora: bool = key(False, "By alpha / sqrt(rank) instead.")
    target_modules: tuple[str, ...] = key(
        (), "Names of linear layers in a block, or how these end, such as `q_proj`; empty: all.",
        aliases=("lora_target", "lora_target_modules"))
    dropout: float = key(0.0, "Has to be 0: random masks depend on where an example is.",
                         at_least=0, aliases=("lora_dropout",))
    connector: bool = key(False, "The connector learns as well, all of it (peft's "
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
    """The whole model."""

    vision: VisionConfig = section(VisionConfig)
    audio: AudioConfig = section(AudioConfig)
    llm: LLMConfig = section(LLMConfig)
    connectors: str = key("", "connectors.safetensors of an export (docs/weights.md) to start the "
                          "connectors from; empty: start them from run.seed.")
    connectors_frozen: bool = key(False, "No connector learns. The features of an encoder that is "
                                  "frozen, too, then have no gradient, and nothing of it is "
                                  "gathered or exchanged in the backward pass.")
    pretrained: str = key("", "Folder with a whole multimodal model of transformers, in place of "
                          "these three parts, and with its processor: docs/models.md. Of the keys "
                          "of the parts only vision.frozen, audio.frozen and llm.frozen count "
                          "then.",
                          aliases=("model_name_or_path", "pretrained_model_name_or_path"))
    config: str = key("", "The same without weights: they start from run.seed.")
    lora: LoraConfig = section(LoraConfig)
    proof: bool = key(True, "Before the first step a small model like that of `pretrained` or "
                      "`config` is compared with transformers, example by example: losses and all "
                      "gradients (once; the result is kept). false: it is trained unproven.")

    @property
    def folder(self) -> str:
        """Of a whole model of transformers; empty: the model has the three parts."""
        return os.path.expanduser(self.pretrained or self.config)

    def learns(self, part: str) -> bool:
        """Whether anything in vision, audio, connector or llm does."""
        if part == "connector":
            return not self.connectors_frozen and (not self.lora.rank or self.lora.connector)
        return not getattr(self, part).frozen

    def features_learn(self, phase: str) -> bool:
        """Whether the features of an encoder have a gradient: something that makes them learns."""
        return self.learns(phase) or self.learns("connector")

    def require_parts(self, why: str = "this command knows only models of this project's own "
                      "parts: use orchmllm dry-run, plan job or compare") -> None:
        """Raises ValueError for a whole model of transformers, with why only the three parts are
        known."""
        if self.folder:
            raise ValueError(f"{self.folder} is a whole model of transformers, and {why}")

    def conflicts(self) -> Iterator[Conflict]:
        """pretrained and config exclude each other and what the parts say; some part learns; lora
        is for pretrained alone, where the LLM learns."""
        parts = ("vision", "audio", "llm")
        if not any(map(self.learns, ("connector", *parts))):
            yield Conflict(("connectors_frozen", *(f"{part}.frozen" for part in parts)),
                           "leaves nothing that would learn: set one of them to false")
        if self.lora.rank and not self.pretrained:
            yield Conflict(("lora.rank", "pretrained"), "adapters are for the weights of a whole "
                           "model of transformers: name it in model.pretrained (docs/models.md)")
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
            return
        named = "pretrained" if self.pretrained else "config"
        if self.connectors:
            yield Conflict(("connectors", named), f"has no effect with model.{named}: leave it out")
        for part in ("vision", "audio", "llm"):
            given = getattr(self, part)
            for f in fields(given):
                if f.name != "frozen" and getattr(given, f.name) != f.default:
                    yield Conflict((f"{part}.{f.name}", named), "has no effect with "
                                   f"model.{named}, whose config.json says it: leave it out")
