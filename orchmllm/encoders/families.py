"""The architectures of transformers whose encoders are known, each admitted by its test: the same
signature is not the same meaning. docs/encoders.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor, nn

from orchmllm.encoders.items import Cropped, Masked, Packed, Rows, Slots, Tiles
from orchmllm.encoders.spec import EQUAL, Encoder
from orchmllm.plan.cost import CostModel

# An encoder of transformers: it returns a ModelOutput and casts its media to its own dtype.
_encoder = partial(Encoder, outputs=("pooler_output",), keywords={"return_dict": True}, cast=True)


@dataclass(frozen=True)
class Family:
    """owner: the class whose forward calls the encoders. captures: it reads recorded hidden
    states. since: the oldest version of transformers that was tested; older ones are refused."""

    owner: str
    encoders: tuple[Encoder, ...]
    captures: bool = False
    since: str = "5.17"


def tower_cost(tower: str, per_row: int = 1) -> Callable[[nn.Module], CostModel]:
    """The cost of an item from the configuration of its tower: FLOP of the linear layers per
    position and of attention per pair. per_row: positions of a row; below 0: rows of a position
    (a convolution with a stride)."""
    def cost(owner: nn.Module) -> CostModel:
        config = owner.get_submodule(tower).config
        hidden, inner, layers = (next((int(v) for n in names if (v := getattr(config, n, 0))), d)
                                 for names, d in _SIZES)
        linear, quadratic = 6 * layers * (4 * hidden**2 + 2 * hidden * inner), 12 * layers * hidden
        if per_row < 0:
            return CostModel(linear // -per_row, max(1, quadratic // per_row**2))
        return CostModel(linear * per_row, quadratic * per_row**2)
    return cost


_SIZES = ((("embed_dim", "hidden_size", "d_model"), 1024),
          (("intermediate_size", "encoder_ffn_dim", "mlp_ratio"), 4096),
          (("depth", "num_hidden_layers", "encoder_layers"), 24))

_QWEN = _encoder(
    "vision", {"get_image_features": Packed("pixel_values", "image_grid_thw", frames=True),
               "get_video_features": Packed("pixel_values_videos", "video_grid_thw", frames=True)},
    towers=("visual",), cost=tower_cost("visual"))
_DEEPSTACK = replace(_QWEN, outputs=("pooler_output", "deepstack_features"),
                     layers=("deepstack_features",))
_IMAGE = _encoder("image", {"get_image_features": Rows("pixel_values")},
                  towers=("vision_tower",), cost=tower_cost("vision_tower"))
_LAYER = ("vision_feature_layer", "vision_feature_select_strategy")
_OF_LAYER = replace(_IMAGE, options=_LAYER)


def _tiles(model: str) -> Callable[[nn.Module, list[int]], int]:
    def count(owner: nn.Module, size: list[int]) -> int:
        module = import_module(f"transformers.models.{model}.modeling_{model}")
        return module.image_size_to_num_patches(
            size, owner.config.image_grid_pinpoints, owner.config.vision_config.image_size)
    return count


def _audio_rows(owner: nn.Module, meta: np.ndarray) -> np.ndarray:
    lengths = torch.tensor(meta[:, 0])
    return owner.audio_tower._get_feat_extract_output_lengths(lengths)[1].numpy()


def _qwen2_audio(owner: nn.Module, features: Tensor, mask: Tensor) -> Any:
    """What the forward of Qwen2AudioModel computes between its inputs and its features."""
    from transformers.masking_utils import create_bidirectional_mask

    tower = owner.audio_tower
    lengths, _ = tower._get_feat_extract_output_lengths(mask.sum(-1))
    positions = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device)
    inside = (positions < lengths[:, None]).long()
    embeds = torch.zeros((*inside.shape, 1), dtype=owner.get_input_embeddings().weight.dtype,
                         device=features.device)
    attention = create_bidirectional_mask(
        config=tower.config, inputs_embeds=embeds, attention_mask=inside)
    states = tower(features, attention_mask=attention).last_hidden_state
    return SimpleNamespace(last_hidden_state=owner.multi_modal_projector(states))


_OMNI_AUDIO = _encoder(
    "audio", {"get_audio_features": Masked("input_features", "feature_attention_mask")},
    outputs=("last_hidden_state",), rows=_audio_rows, towers=("audio_tower",),
    cost=tower_cost("audio_tower", -2))
_GLM = tuple(
    _encoder(name, {f"get_{name}_features": Packed(value, grid, frames=True)},
             towers=("visual",), cost=tower_cost("visual"))
    for name, value, grid in (("image", "pixel_values", "image_grid_thw"),
                              ("video", "pixel_values_videos", "video_grid_thw")))
_SLOTTED = _encoder(
    "image", {"get_image_features": Slots("pixel_values", "pixel_attention_mask")},
    towers=("vision_model",), cost=tower_cost("vision_model"))

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family("Qwen2VLModel", (_QWEN,)),
    "qwen2_5_vl": Family("Qwen2_5_VLModel", (_QWEN,)),
    "qwen3_vl": Family("Qwen3VLModel", (_DEEPSTACK,), since="5.20"),
    "qwen3_vl_moe": Family("Qwen3VLMoeModel", (_DEEPSTACK,), since="5.20"),
    "glm4v": Family("Glm4vModel", _GLM),
    "qwen2_5_omni": Family("Qwen2_5OmniThinkerModel", (_QWEN, _OMNI_AUDIO), since="5.23"),
    "llava": Family("LlavaModel", (_OF_LAYER,), captures=True),
    "vipllava": Family("VipLlavaModel", (replace(_IMAGE, options=_LAYER[:1]),), captures=True,
                       since="5.23"),
    "gemma3": Family("Gemma3Model", (_IMAGE,)),
    "paligemma": Family("PaliGemmaModel", (_IMAGE,)),
    "internvl": Family("InternVLModel", (_OF_LAYER,)),
    "aya_vision": Family("AyaVisionModel", (_OF_LAYER,), captures=True),
    "cohere2_vision": Family("Cohere2VisionModel", (_IMAGE,)),
    "llava_next": Family("LlavaNextModel", (replace(
        _OF_LAYER, calls={"get_image_features": Tiles(
            "pixel_values", "image_sizes", _tiles("llava_next"))}),), captures=True),
    "llava_onevision": Family("LlavaOnevisionModel", (
        replace(_OF_LAYER, calls={"get_image_features": Tiles(
            "pixel_values", "image_sizes", _tiles("llava_onevision"))}),
        replace(_OF_LAYER, name="video", calls={
            "get_video_features": Rows("pixel_values_videos")})), captures=True, since="5.20"),
    "idefics3": Family("Idefics3Model", (_SLOTTED,), since="5.20"),
    "smolvlm": Family("SmolVLMModel", (_SLOTTED,), since="5.20"),
    "mistral3": Family("Mistral3Model", (replace(
        _IMAGE, options=_LAYER[:1], calls={"get_image_features": Cropped(
            "pixel_values", "image_sizes", lambda owner: owner.vision_tower.patch_size)}),),
        captures=True, since="5.20"),
    "voxtral": Family("VoxtralModel", (_encoder(
        "audio", {"get_audio_features": Rows("input_features")}, rows=EQUAL,
        towers=("audio_tower",)),)),
    "audioflamingo3": Family("AudioFlamingo3Model", (_encoder(
        "audio", {"get_audio_features": Rows(
            "input_features", ("input_features_mask",), length="input_features_mask")},
        rows=_audio_rows, towers=("audio_tower",)),)),
    "qwen2_audio": Family("Qwen2AudioModel", (Encoder(
        "audio", {"audio_tower": Rows("input_features", ("feature_attention_mask",))},
        outputs=("last_hidden_state",), towers=("audio_tower",), run=_qwen2_audio,
        passes=("multi_modal_projector",), cast=True),)),
}

def find_family(model: nn.Module) -> tuple[nn.Module, Family]:
    """The inner model whose forward calls the encoders, and its family. Raises ValueError if there
    is none, or more than one."""
    names = {family.owner: name for name, family in FAMILIES.items()}
    found = [(module, names[kind.__name__])
             for module in model.modules() for kind in type(module).__mro__  # fully_shard adds one
             if kind.__module__.startswith(
                 f"transformers.models.{names.get(kind.__name__)}.")]
    if len(found) == 1:
        owner, name = found[0]
        have, since = import_module("transformers").__version__, FAMILIES[name].since
        if Version(have).release[:2] < Version(since).release:
            raise ValueError(f"{name} of transformers {have}: balance_encoders was tested with "
                             f"{since} and newer; upgrade transformers")
        return owner, FAMILIES[name]
    kind = type(model).__name__
    if not found:
        raise ValueError(
            f"balance_encoders does not know {kind}; it knows {', '.join(FAMILIES)}. Describe its "
            "encoders with orchmllm.Encoder (docs/encoders.md)")
    raise ValueError(f"{kind} holds {len(found)} models with encoders "
                     f"({', '.join(type(m).__name__ for m, _ in found)}): call balance_encoders "
                     "for one of them")
