"""Every parameter by three things: its name here, its name in transformers, and its shape there.

The one table behind loading and exporting. Rows of a tensor are the same rows on both sides, so a
shard of ours is a slice of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.plan.assign import PHASES

PARTS = PHASES  # each has a folder
Shaped = tuple[str, tuple[int, ...]]  # name and shape of a parameter


class Named(NamedTuple):
    """name: of the parameter of MultimodalModel. hf: of the tensor in the part's own transformers
    class. shape: of that tensor."""

    name: str
    hf: str
    shape: tuple[int, ...]


def named(part: str, model: ModelConfig) -> list[Named]:
    """All parameters of a part that its Hugging Face folder has: `vision`, `audio`, `llm`; or
    `connectors`, the ones that no class of transformers has, under our names."""
    if part == "connectors":
        return [Named(name, name, shape) for name, shape in _connectors(model)]
    shapes = {"vision": _vision, "audio": _audio, "llm": _llm}[part](getattr(model, part))
    return [Named(f"{part}.{_ours(part, hf)}", hf, shape) for hf, shape in shapes]


def _ours(part: str, hf: str) -> str:
    """The name within our part of a tensor of the class of transformers."""
    if part == "llm":
        return f"hf.{hf}"
    return hf.replace("layers.", "blocks.").replace(".self_attn.", ".")


def _both(name: str, out: int, *sizes: int) -> Iterator[Shaped]:
    """Weight and bias; without sizes those of a norm."""
    yield f"{name}.weight", (out, *sizes)
    yield f"{name}.bias", (out,)


def _vision(config: VisionConfig) -> Iterator[Shaped]:
    size, ffn = config.hidden_size, config.intermediate_size
    yield from _both("patch_embed", size, config.geometry.row_size)
    for k in range(config.num_layers):
        for name, *shape in (("norm1", size), ("qkv", 3 * size, size), ("proj", size, size),
                             ("norm2", size), ("fc1", ffn, size), ("fc2", size, ffn)):
            yield from _both(f"blocks.{k}.{name}", *shape)
    yield from _both("norm", size)


def _audio(config: AudioConfig) -> Iterator[Shaped]:
    size, ffn = config.hidden_size, config.intermediate_size
    yield from _both("conv1", size, config.num_mels, 3)
    yield from _both("conv2", size, size, 3)
    for k in range(config.num_layers):
        at = f"layers.{k}"
        yield from _both(f"{at}.self_attn_layer_norm", size)
        for name in ("q_proj", "v_proj", "out_proj"):
            yield from _both(f"{at}.self_attn.{name}", size, size)
        yield f"{at}.self_attn.k_proj.weight", (size, size)
        yield from _both(f"{at}.final_layer_norm", size)
        yield from _both(f"{at}.fc1", ffn, size)
        yield from _both(f"{at}.fc2", size, ffn)
    yield from _both("layer_norm", size)


def _llm(config: LLMConfig) -> Iterator[Shaped]:
    size, ffn = config.hidden_size, config.intermediate_size
    kv = size // config.num_heads * config.num_kv_heads
    yield "model.embed_tokens.weight", (config.vocab_size, size)
    for k in range(config.num_layers):
        at = f"model.layers.{k}"
        for name, out in (("q_proj", size), ("k_proj", kv), ("v_proj", kv)):
            yield from _both(f"{at}.self_attn.{name}", out, size)
        yield f"{at}.self_attn.o_proj.weight", (size, size)
        yield f"{at}.mlp.gate_proj.weight", (ffn, size)
        yield f"{at}.mlp.up_proj.weight", (ffn, size)
        yield f"{at}.mlp.down_proj.weight", (size, ffn)
        yield f"{at}.input_layernorm.weight", (size,)
        yield f"{at}.post_attention_layernorm.weight", (size,)
    yield "model.norm.weight", (size,)
    yield "lm_head.weight", (config.vocab_size, size)


def _connectors(model: ModelConfig) -> Iterator[Shaped]:
    width = model.llm.hidden_size
    groups = {"audio": model.audio.hidden_size * model.audio.stack,
              "vision": model.vision.hidden_size * model.vision.merge_size**2}
    for part, size in groups.items():
        yield from _both(f"{part}.connector.norm", size)
        yield from _both(f"{part}.connector.fc1", width, size)
        yield from _both(f"{part}.connector.fc2", width, width)
