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


class Named(NamedTuple):
    """name: of the parameter of MultimodalModel. hf: of the tensor in the part's own transformers
    class. shape: of that tensor."""

    name: str
    hf: str
    shape: tuple[int, ...]


def named(part: str, model: ModelConfig) -> list[Named]:
    """All parameters of a part that its Hugging Face folder has: `vision`, `audio`, `llm`; or
    `connectors`, the ones that no class of transformers has, under our names."""
    if part == "vision":
        found = _vision(model.vision)
    elif part == "audio":
        found = _audio(model.audio)
    elif part == "llm":
        found = _llm(model.llm)
    else:
        return list(_connectors(model))
    return [Named(f"{part}.{name}", hf, shape) for name, hf, shape in found]


def _both(name: str, hf: str, out: int, *sizes: int) -> Iterator[Named]:
    """Weight and bias; without sizes those of a norm."""
    yield Named(f"{name}.weight", f"{hf}.weight", (out, *sizes))
    yield Named(f"{name}.bias", f"{hf}.bias", (out,))


def _vision(config: VisionConfig) -> Iterator[Named]:
    size, ffn = config.hidden_size, config.intermediate_size
    yield from _both("patch_embed", "patch_embed", size, config.geometry.row_size)
    for k in range(config.num_layers):
        for name, *shape in (("norm1", size), ("qkv", 3 * size, size), ("proj", size, size),
                             ("norm2", size), ("fc1", ffn, size), ("fc2", size, ffn)):
            yield from _both(f"blocks.{k}.{name}", f"blocks.{k}.{name}", *shape)
    yield from _both("norm", "norm", size)


def _audio(config: AudioConfig) -> Iterator[Named]:
    size, ffn = config.hidden_size, config.intermediate_size
    yield from _both("conv1", "conv1", size, config.num_mels, 3)
    yield from _both("conv2", "conv2", size, size, 3)
    for k in range(config.num_layers):
        ours, theirs = f"blocks.{k}", f"layers.{k}"
        yield from _both(f"{ours}.self_attn_layer_norm", f"{theirs}.self_attn_layer_norm", size)
        for name in ("q_proj", "v_proj", "out_proj"):
            yield from _both(f"{ours}.{name}", f"{theirs}.self_attn.{name}", size, size)
        yield Named(f"{ours}.k_proj.weight", f"{theirs}.self_attn.k_proj.weight", (size, size))
        yield from _both(f"{ours}.final_layer_norm", f"{theirs}.final_layer_norm", size)
        yield from _both(f"{ours}.fc1", f"{theirs}.fc1", ffn, size)
        yield from _both(f"{ours}.fc2", f"{theirs}.fc2", size, ffn)
    yield from _both("layer_norm", "layer_norm", size)


def _llm(config: LLMConfig) -> Iterator[Named]:
    size, ffn = config.hidden_size, config.intermediate_size
    kv = size // config.num_heads * config.num_kv_heads
    table = (config.vocab_size, size)
    shapes = {"model.embed_tokens.weight": table}
    for k in range(config.num_layers):
        at = f"model.layers.{k}"
        for name, out in (("q_proj", size), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{at}.self_attn.{name}.weight"] = (out, size)
            shapes[f"{at}.self_attn.{name}.bias"] = (out,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (size, size)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (ffn, size)
        shapes[f"{at}.mlp.down_proj.weight"] = (size, ffn)
        shapes[f"{at}.input_layernorm.weight"] = (size,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (size,)
    shapes |= {"model.norm.weight": (size,), "lm_head.weight": table}
    for name, shape in shapes.items():
        yield Named(f"hf.{name}", name, shape)


def _connectors(model: ModelConfig) -> Iterator[Named]:
    width = model.llm.hidden_size
    groups = {"audio": model.audio.hidden_size * model.audio.stack,
              "vision": model.vision.hidden_size * model.vision.merge_size**2}
    for part, size in groups.items():
        at = f"{part}.connector"
        yield from _both(f"{at}.norm", f"{at}.norm", size)
        yield from _both(f"{at}.fc1", f"{at}.fc1", width, size)
        yield from _both(f"{at}.fc2", f"{at}.fc2", width, width)
