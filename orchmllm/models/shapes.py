"""Every parameter of a model by its shape, grouped as FSDP2 shards it: pure arithmetic on the
configuration, so that a model of any size is counted in no time and without torch.

The order of units is that of the forward pass; tests compare them with the built model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchmllm.models.config import AudioConfig, LLMConfig, ModelConfig, VisionConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together; `copies` units are alike (a stack of blocks).

    phase: vision, audio or llm. role: `block`, `root` (gathered for the whole phase), `embed` or
    `head`. trained, frozen: shapes of the parameters with and without a gradient."""

    phase: str
    role: str
    copies: int
    trained: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()

    @property
    def size(self) -> int:
        """Parameters of one copy."""
        return sum(map(math.prod, self.trained + self.frozen))

    @property
    def trained_size(self) -> int:
        return sum(map(math.prod, self.trained))

    def shard_size(self, shards: int, trained_only: bool = False) -> int:
        """Parameters that the fullest rank holds of one copy: FSDP2 cuts dimension 0, rounded up
        for each parameter."""
        shapes = self.trained if trained_only else self.trained + self.frozen
        return sum(-(-s[0] // shards) * math.prod(s[1:]) for s in shapes)


def units(model: ModelConfig) -> list[Unit]:
    """All units in the order of the forward pass."""
    width = model.llm.hidden_size
    return [*_encoder_units("vision", model.vision, _vision_root(model.vision), _vision_block(
                model.vision), _vision_connector(model.vision, width)),
            *_encoder_units("audio", model.audio, _audio_root(model.audio), _audio_block(
                model.audio), _connector(model.audio.hidden_size * model.audio.stack, width)),
            *_llm_units(model.llm)]


def num_parameters(model: ModelConfig) -> dict[str, dict[str, int]]:
    """phase -> role -> parameters, connectors apart from the rest of their encoder's root."""
    counts: dict[str, dict[str, int]] = {}
    for unit in units(model):
        roles = counts.setdefault(unit.phase, {})
        roles[unit.role] = roles.get(unit.role, 0) + unit.copies * unit.size
    width = model.llm.hidden_size
    for phase, shapes in (
            ("vision", _vision_connector(model.vision, width)),
            ("audio", _connector(model.audio.hidden_size * model.audio.stack, width))):
        counts[phase]["connector"] = sum(map(math.prod, shapes))
        counts[phase]["root"] -= counts[phase]["connector"]
    return counts


def _encoder_units(
    phase: str, config: VisionConfig | AudioConfig, root: tuple[Shape, ...],
    block: tuple[Shape, ...], connector: tuple[Shape, ...],
) -> list[Unit]:
    if config.frozen:
        return [Unit(phase, "root", 1, connector, root),
                Unit(phase, "block", config.num_layers, (), block)]
    return [Unit(phase, "root", 1, root + connector), Unit(phase, "block", config.num_layers,
                                                           block)]


def _connector(in_features: int, width: int) -> tuple[Shape, ...]:
    return ((in_features,),) * 2 + _linear(in_features, width) + _linear(width, width)


def _vision_connector(config: VisionConfig, width: int) -> tuple[Shape, ...]:
    in_features = config.hidden_size * config.merge_size**2
    if config.family == "vit":
        return _connector(in_features, width)
    return _linear(in_features, in_features) + _linear(in_features, width)


def _linear(size: int, out: int, bias: bool = True) -> tuple[Shape, ...]:
    return ((out, size), (out,)) if bias else ((out, size),)


def _vision_root(config: VisionConfig) -> tuple[Shape, ...]:
    size = config.hidden_size
    patch = config.geometry.row_size * config.temporal_patch_size
    return _linear(patch, size, bias=config.family == "vit") + ((size,),) * 2


def _vision_block(config: VisionConfig) -> tuple[Shape, ...]:
    size, ffn = config.hidden_size, config.intermediate_size
    return (((size,),) * 4 + _linear(size, 3 * size) + _linear(size, size) + _linear(size, ffn)
            + _linear(ffn, size))


def _audio_root(config: AudioConfig) -> tuple[Shape, ...]:
    size = config.hidden_size
    return ((size, config.num_mels, 3), (size,), (size, size, 3), (size,)) + ((size,),) * 2


def _audio_block(config: AudioConfig) -> tuple[Shape, ...]:
    size, ffn = config.hidden_size, config.intermediate_size
    # Whisper's keys have no bias.
    return (((size,),) * 4 + _linear(size, size) * 3 + _linear(size, size, bias=False)
            + _linear(size, ffn) + _linear(ffn, size))


def _llm_units(config: LLMConfig) -> list[Unit]:
    size, ffn = config.hidden_size, config.intermediate_size
    kv = size // config.num_heads * config.num_kv_heads
    layer = (((size,),) * 2 + _linear(size, size) + _linear(size, kv) * 2
             + _linear(size, size, bias=False) + _linear(size, ffn, bias=False) * 2
             + _linear(ffn, size, bias=False))
    table = ((config.vocab_size, size),)
    parts = [("embed", 1, table), ("block", config.num_layers, layer), ("root", 1, ((size,),)),
             ("head", 1, table)]
    return [Unit("llm", role, n, () if config.frozen else shapes,
                 shapes if config.frozen else ()) for role, n, shapes in parts]
