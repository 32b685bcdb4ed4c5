"""A tiny model of every family that balance_encoders knows, in float64, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, IMAGE, VIDEO, AUDIO, START = 64, 61, 62, 63, 60
AUDIO_START = 58
WINDOW = 32  # frames that models encode which fill clips up
_TEXT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
             eos_token_id=2, max_position_embeddings=512, tie_word_embeddings=False)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GRID = dict(depth=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, num_heads=2)
_CLIP = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
             image_size=16, patch_size=4, projection_dim=32)
_SIGLIP = dict(_CLIP, model_type="siglip_vision_model", vision_use_head=False)
_LLAMA = dict(_TEXT, model_type="llama")
_QWEN2 = dict(_TEXT, model_type="qwen2")


def _mrope(sections: list[int]) -> dict:
    return dict(_TEXT, rope_parameters=dict(_ROPE, mrope_section=sections))


@dataclass(frozen=True)
class Item:
    """kind: image, video or audio; size: any small integer, from which the maker takes a shape."""

    kind: str
    size: int


@dataclass(frozen=True)
class Family:
    """build() -> the model. make: kind -> (items' sizes, generator) -> arguments of forward; count:
    kind -> the method that says how many tokens an item becomes. tower: path of what encodes, in
    the inner model."""

    name: str
    build: Callable[[], nn.Module]
    make: dict[str, Callable[[list[int], torch.Generator], dict[str, Any]]]
    tower: str


def _model(config: str, model: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**arguments))
        if "Moe" in model:
            made.set_experts_implementation("eager")  # the other one has no float64
        return made.double().train()
    return build


def _grid(value: str, grid: str, frames: int, dim: int = 96):
    def make(sizes: list[int], g: torch.Generator) -> dict[str, Any]:
        grids = torch.tensor([[frames * (1 + s % 2) if frames > 1 else 1, 2 + 2 * (s % 3),
                               2 + 2 * (s // 3 % 3)] for s in sizes])
        return {value: _noise(g, int(grids.prod(1).sum()), dim), grid: grids}
    return make


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _image(*shape: int, name: str = "pixel_values"):
    return lambda sizes, g: {name: _noise(g, len(sizes), *shape)}


def _tiled(sizes: list[int], g: torch.Generator) -> dict[str, Any]:
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    shapes = [[12 + 5 * (s % 4), 12 + 7 * (s // 2 % 3)] for s in sizes]
    counts = [image_size_to_num_patches(s, _PINPOINTS, 16) for s in shapes]
    pixels = torch.zeros(len(sizes), max(counts), 3, 16, 16, dtype=torch.float64)
    for out, n in zip(pixels, counts, strict=True):
        out[:n] = _noise(g, n, 3, 16, 16)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(shapes)}


_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _slots(sizes: list[int], g: torch.Generator) -> dict[str, Any]:
    # The last slot is empty: the batch's longest example has one image more.
    pixels = torch.cat([_noise(g, 1, len(sizes), 3, 16, 16),
                        torch.zeros(1, 1, 3, 16, 16, dtype=torch.float64)], 1)
    mask = torch.ones(1, len(sizes) + 1, 16, 16, dtype=torch.bool)
    mask[0, 0, 8:] = False
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _cropped(sizes: list[int], g: torch.Generator) -> dict[str, Any]:
    # One token alone breaks Mistral3Model.get_image_features, balanced or not.
    shapes = [[8 + 8 * (s % 3), 16 + 8 * (s // 2 % 3)] for s in sizes]
    height, width = (max(n) for n in zip(*shapes, strict=True))
    pixels = torch.zeros(len(sizes), 3, height, width, dtype=torch.float64)
    for out, (h, w) in zip(pixels, shapes, strict=True):
        out[:, :h, :w] = _noise(g, 3, h, w)
    return {"pixel_values": pixels, "image_sizes": torch.tensor(shapes)}


def _padded_audio(mask_name: str, longest: int | None):
    def make(sizes: list[int], g: torch.Generator) -> dict[str, Any]:
        lengths = torch.tensor([12 + 4 * (s % 5) for s in sizes])
        total = longest or int(lengths.max())
        mask = (torch.arange(total) < lengths[:, None]).long()
        return {"input_features": _noise(g, len(sizes), 8, total) * mask[:, None].double(),
                mask_name: mask}
    return make


_AUDIO_TOWER = dict(num_mel_bins=8, d_model=32, encoder_layers=2, encoder_attention_heads=2,
                    encoder_ffn_dim=48, max_source_positions=16, dropout=0.0)
_QWEN_MAKE = {"image": _grid("pixel_values", "image_grid_thw", 1),
              "video": _grid("pixel_values_videos", "video_grid_thw", 2)}
_IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
            vision_end_token_id=59, tie_word_embeddings=False)
_QWEN3_VISION = dict(_GRID, hidden_size=32, intermediate_size=48, out_hidden_size=32,
                     num_position_embeddings=64, deepstack_visual_indexes=[0, 1])
_LINEAR = dict(_mrope([1, 1, 2]), head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
               linear_num_key_heads=2, linear_num_value_heads=4,
               layer_types=["linear_attention", "full_attention"])
_LINEAR["rope_parameters"]["partial_rotary_factor"] = 1.0
_QWEN3_5_VISION = {k: v for k, v in _QWEN3_VISION.items() if k != "deepstack_visual_indexes"}
_INDEX = dict(image_token_index=IMAGE, image_token_id=IMAGE, video_token_index=VIDEO,
              video_token_id=VIDEO, tie_word_embeddings=False)


def _llava(name: str, config: str, tower: str = "vision_tower", **arguments: Any) -> Family:
    return Family(name, _model(f"{config}Config", f"{config}ForConditionalGeneration", **{
        **_INDEX, "text_config": _LLAMA,
        "vision_config": dict(_CLIP, model_type="clip_vision_model"), **arguments}),
        {"image": _image(3, 16, 16)}, tower)


ALL = [
    Family("qwen2_vl", _model("Qwen2VLConfig", "Qwen2VLForConditionalGeneration", **_IDS,
           text_config=_mrope([1, 1, 2]),
           vision_config=dict(_GRID, embed_dim=32, hidden_size=32)), _QWEN_MAKE, "visual"),
    Family("qwen2_5_vl", _model("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", **_IDS,
           text_config=_mrope([1, 1, 2]), vision_config=dict(
               _GRID, hidden_size=32, intermediate_size=48, out_hidden_size=32, window_size=16,
               fullatt_block_indexes=[1])), _QWEN_MAKE, "visual"),
    Family("qwen3_vl", _model("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", **_IDS,
           text_config=dict(_mrope([2, 1, 1]), head_dim=8), vision_config=_QWEN3_VISION),
           _QWEN_MAKE, "visual"),
    Family("qwen3_vl_moe", _model("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", **_IDS,
           text_config=dict(_mrope([2, 1, 1]), head_dim=8, num_experts=4, num_experts_per_tok=2,
                            moe_intermediate_size=12, decoder_sparse_step=1),
           vision_config=_QWEN3_VISION), _QWEN_MAKE, "visual"),
    Family("qwen3_5", _model("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", **_IDS,
           text_config=_LINEAR, vision_config=_QWEN3_5_VISION), _QWEN_MAKE, "visual"),
    Family("qwen3_5_moe", _model("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", **_IDS,
           text_config=dict(_LINEAR, num_experts=4, num_experts_per_tok=2,
                            moe_intermediate_size=12, shared_expert_intermediate_size=20),
           vision_config=_QWEN3_5_VISION), _QWEN_MAKE, "visual"),
    Family("glm4v", _model("Glm4vConfig", "Glm4vForConditionalGeneration", **_IDS,
           image_start_token_id=57, image_end_token_id=58, video_start_token_id=55,
           video_end_token_id=56, text_config=dict(_mrope([1, 1, 2]), partial_rotary_factor=1.0),
           vision_config=dict(_GRID, hidden_size=32, out_hidden_size=32, intermediate_size=48,
                              image_size=16)), _QWEN_MAKE, "visual"),
    Family("glm4v_moe", _model("Glm4vMoeConfig", "Glm4vMoeForConditionalGeneration", **_IDS,
           image_start_token_id=57, image_end_token_id=58, video_start_token_id=55,
           video_end_token_id=56, text_config=dict(
               _mrope([1, 1, 2]), partial_rotary_factor=1.0, head_dim=8, n_routed_experts=4,
               num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1, n_group=1,
               topk_group=1, first_k_dense_replace=1),
           vision_config=dict(_GRID, hidden_size=32, out_hidden_size=32, intermediate_size=48,
                              image_size=16)), _QWEN_MAKE, "visual"),
    Family("qwen2_5_omni", _model(
        "Qwen2_5OmniThinkerConfig", "Qwen2_5OmniThinkerForConditionalGeneration",
        audio_token_id=AUDIO, audio_token_index=AUDIO, image_token_index=IMAGE,
        video_token_index=VIDEO, audio_start_token_id=AUDIO_START, audio_end_token_id=57,
        text_config=_mrope([1, 1, 2]), **_IDS, vision_config=dict(
            _GRID, hidden_size=32, intermediate_size=48, out_hidden_size=32, window_size=16,
            fullatt_block_indexes=[1]),
        audio_config=dict(_AUDIO_TOWER, output_dim=32, n_window=10)),
        {**_QWEN_MAKE, "audio": _padded_audio("feature_attention_mask", None)}, "visual"),
    _llava("llava", "Llava"),
    _llava("vipllava", "VipLlava", vision_feature_layers=[-1, -2]),
    Family("gemma3", _model("Gemma3Config", "Gemma3ForConditionalGeneration", **_INDEX,
           text_config=dict(_TEXT, head_dim=8), vision_config=_SIGLIP, mm_tokens_per_image=4),
           {"image": _image(3, 16, 16)}, "vision_tower"),
    Family("paligemma", _model("PaliGemmaConfig", "PaliGemmaForConditionalGeneration", **_INDEX,
           text_config=dict(_TEXT, model_type="gemma", head_dim=8), vision_config=_SIGLIP,
           projection_dim=32, hidden_size=32), {"image": _image(3, 16, 16)}, "vision_tower"),
    _llava("internvl", "InternVL", text_config=_QWEN2, vision_config=dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        image_size=[16, 16], patch_size=[4, 4])),
    _llava("aya_vision", "AyaVision", text_config=dict(_TEXT, model_type="cohere2"),
           vision_config=_SIGLIP, vision_feature_select_strategy="full", downsample_factor=2),
    _llava("cohere2_vision", "Cohere2Vision", text_config=dict(_TEXT, model_type="cohere2"),
           vision_config=_SIGLIP, downsample_factor=2),
    Family("llava_next", _model(
        "LlavaNextConfig", "LlavaNextForConditionalGeneration", **_INDEX, text_config=_LLAMA,
        vision_config=dict(_CLIP, model_type="clip_vision_model"),
        image_grid_pinpoints=_PINPOINTS), {"image": _tiled}, "vision_tower"),
    Family("llava_onevision", _model(
        "LlavaOnevisionConfig", "LlavaOnevisionForConditionalGeneration", **_INDEX,
        text_config=_QWEN2, vision_config=_SIGLIP, image_grid_pinpoints=_PINPOINTS,
        vision_feature_select_strategy="full"),
        {"image": _tiled, "video": _image(2, 3, 16, 16, name="pixel_values_videos")},
        "vision_tower"),
    Family("idefics3", _model("Idefics3Config", "Idefics3ForConditionalGeneration",
           image_token_id=IMAGE, scale_factor=2, text_config=_LLAMA, pad_token_id=0,
           vision_config=_SIGLIP, tie_word_embeddings=False), {"image": _slots}, "vision_model"),
    Family("smolvlm", _model("SmolVLMConfig", "SmolVLMForConditionalGeneration",
           image_token_id=IMAGE, scale_factor=2, text_config=_LLAMA, pad_token_id=0,
           vision_config=_SIGLIP, tie_word_embeddings=False), {"image": _slots}, "vision_model"),
    Family("mistral3", _model("Mistral3Config", "Mistral3ForConditionalGeneration", **_INDEX,
           text_config=dict(_TEXT, model_type="mistral"), spatial_merge_size=2, vision_config=dict(
               hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
               image_size=32, patch_size=4, model_type="pixtral")),
           {"image": _cropped}, "vision_tower"),
    Family("voxtral", _model("VoxtralConfig", "VoxtralForConditionalGeneration",
           audio_token_id=AUDIO, text_config=_LLAMA, audio_config=dict(
               hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
               num_mel_bins=8, max_source_positions=16)),
           {"audio": _image(8, 32, name="input_features")}, "audio_tower"),
    Family("audioflamingo3", _model("AudioFlamingo3Config",
           "AudioFlamingo3ForConditionalGeneration", audio_token_id=AUDIO, text_config=_QWEN2,
           audio_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                             num_attention_heads=2, num_mel_bins=8, max_source_positions=16)),
           {"audio": _padded_audio("input_features_mask", WINDOW)}, "audio_tower"),
    Family("qwen2_audio", _model("Qwen2AudioConfig", "Qwen2AudioForConditionalGeneration",
           audio_token_index=AUDIO, audio_token_id=AUDIO, text_config=_QWEN2,
           audio_config=_AUDIO_TOWER), {"audio": _padded_audio("feature_attention_mask", WINDOW)},
           "audio_tower"),
]
FAMILIES = {family.name: family for family in ALL}

_TOKENS = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}
_TYPES = {"image": 1.0, "video": 2.0, "audio": 0.0}
_COUNTED = {"image": "get_image_features", "video": "get_video_features",
            "audio": "get_audio_features"}


@torch.no_grad()
def _num_tokens(family: Family, model: nn.Module, kind: str, inputs: dict[str, Any]) -> int:
    """Tokens that these items become, as the model itself says."""
    if family.name == "qwen2_audio":
        lengths = inputs["feature_attention_mask"].sum(-1)
        return int(model.model.audio_tower._get_feat_extract_output_lengths(lengths)[1].sum())
    out = getattr(model.model, _COUNTED[kind])(**inputs, return_dict=True)
    if family.name == "qwen2_5_omni" and kind == "audio":
        return len(out.last_hidden_state)
    value = out.pooler_output
    if isinstance(value, Tensor):
        return value[..., 0].numel()
    return sum(len(v) for v in value)


def batch(family: Family, model: nn.Module, items: list[Item], seed: int) -> dict[str, Any]:
    """Arguments of forward for one sequence with these items between pieces of text. model: an
    unsharded one, which counts tokens."""
    g = torch.Generator().manual_seed(seed)

    def text(n: int) -> Tensor:
        return torch.randint(3, 50, (n,), generator=g)

    ids, types, inputs = [text(5)], [torch.zeros(5)], {}
    for kind in ("image", "video", "audio"):
        sizes = [item.size for item in items if item.kind == kind]
        if not sizes:
            continue
        made = family.make[kind](sizes, g)
        inputs |= made
        for i in range(len(sizes)):
            one = {k: v[i: i + 1] for k, v in made.items()}
            if "grid_thw" in " ".join(made):
                grid = next(k for k in made if k.endswith("grid_thw"))
                value = next(k for k in made if k != grid)
                counts = made[grid].prod(1).tolist()
                one[value] = made[value][sum(counts[:i]): sum(counts[: i + 1])]
            elif family.make[kind] is _slots:
                one = {k: v[:, i: i + 1] for k, v in made.items()}
            n = _num_tokens(family, model, kind, one)
            # Qwen3-VL and GLM-4V write the frames of a video apart; GLM-4V as images.
            apart = kind == "video" and family.name.startswith(("qwen3", "glm4v"))
            frames = int(one["video_grid_thw"][0, 0]) if apart else 1
            token = torch.tensor([IMAGE if family.name.startswith("glm4v") else _TOKENS[kind]])
            start = AUDIO_START if kind == "audio" else START
            part = [torch.tensor([start]), token.repeat(n // frames), text(3)]
            ids += part * frames
            types += [torch.zeros(1), torch.full((n // frames,), _TYPES[kind]),
                      torch.zeros(3)] * frames
    ids = torch.cat(ids)[None]
    labels = ids.masked_fill(ids > 50, -100)
    out = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **inputs}
    types = torch.cat(types)[None].int()
    if family.name.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3", "glm4v")):
        out["mm_token_type_ids"] = types
    if family.name == "qwen2_5_omni" and "video_grid_thw" in out:
        out["video_second_per_grid"] = torch.ones(len(out["video_grid_thw"]))
    if family.name in ("gemma3", "paligemma"):
        out["token_type_ids"] = types
    return out
