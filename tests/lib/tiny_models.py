"""A tiny model of a class of transformers, from its configuration with small sizes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

VOCAB, HIDDEN, LAYERS, HEADS = 128, 32, 2, 2
FIRST_ID = 100  # of tokens that mean something; text has smaller ones

# Patterns of names of integers in configurations, first match wins -> the small value.
_SIZES: list[tuple[str, int]] = [
    (r"num_key_value_heads|.*kv_heads|num_global_key_value_heads", HEADS),
    (r".*(attention|query|linear|swa|conf|index|mamba|enc).*_heads|num_heads|n_heads|num_attn.*"
     r"|attention_heads|resampler_heads|resampler_n_heads|index_n_heads|linear_num_.*_heads",
     HEADS),
    (r"num_hidden_layers|depth|encoder_layers|decoder_layers|num_layers|n_layers|layers"
     r"|num_decoder_layers|resampler_depth|conf_num_hidden_layers|num_blocks"
     r"|aligner_num_add_layers", LAYERS),
    (r".*experts_per_tok|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|num_shared_experts|n_shared_experts|moe_num_shared_experts|first_k.*"
     r"|num_global_layers|decoder_sparse_step", 1),
    (r"(num|n|moe_num)_.*experts|num_experts", 4),
    (r"qk_head_dim", 16), (r"q_lora_rank|kv_lora_rank|v_head_dim", 16),
    (r"qk_nope_head_dim|qk_rope_head_dim", 8),
    (r"index_topk|index_topk_blocks", 64),
    (r".*intermediate_size.*|.*ffn_dim|d_ff|mlp_dim|expert_dim|share_expert_dim", 48),
    (r"head_dim|global_head_dim|.*_head_dim|d_kv|dim_head|rotary_dim", HIDDEN // HEADS),
    (r"vocab_size_per_layer_input|vocab_size|unpadded_vocab_size", VOCAB),
    (r"max_position_embeddings|original_max_position_embeddings", 512),
    (r"image_size|resolution|scale|crop_size|canvas_length", 16),
    (r"patch_size", 4),
    (r"num_position_embeddings|num_patches|position_embedding_size|posemb_grid_size", 64),
    (r"pos_emb_height|pos_emb_width", 8),
    (r"num_mel_bins|n_mel_bins|input_feat_size|mel_dim|feature_size", 8),
    (r"max_source_positions|max_pos_emb", 16),
    (r"hidden_size_per_layer_input", 4),
    (r"sliding_window|sliding_window_size|attention_chunk_size|window_size|context_size", 16),
    (r"downsample_hidden_size|codebook_size|num_query_tokens|d_rel", 16),
    (r"num_nextn_predict_layers|num_kv_shared_layers|additional_vocab_size", 0),
    (r".*hidden_size|.*hidden_dim|d_model|embed_dim|n_embd|.*output_dim|projection_dim"
     r"|word_embed_proj_dim|projector_input_dim|image_token_embed_dim|adapter_.*_dim"
     r"|decoder_dim|input_dim|codebook_dim|adapter_input_size", HIDDEN),
    (r"n_window", 10), (r"n_window_infer", 20),
]
_SIZES_COMPILED = [(re.compile(pattern), value) for pattern, value in _SIZES]
_LISTS = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0], "depths": [1, 1, 1],
          "intermediate_layers_indices": [0], "cross_attention_layers": [1],
          "vision_feature_layer": [-1, -2], "full_attn_idxs": [0]}
_DROPOUT = re.compile(r".*(dropout|drop_path|layerdrop).*")
_TOKEN = re.compile(r".*_(token_id|token_index)")
_TEXT_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrink(config: Any, changed: dict[str, Any] | None = None) -> Any:
    """The configuration with small sizes, changed in place; its parts, too. changed: dotted name ->
    value, of what a class needs beside."""
    _shrink(config, {})
    for name, value in (changed or {}).items():
        *path, last = name.split(".")
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return config


def _shrink(config: Any, ids: dict[str, int]) -> None:
    """ids: of the tokens, by name: the parts of a configuration agree on them."""
    from transformers import PreTrainedConfig

    num_layers = None
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value, ids)
        elif name in _TEXT_TOKENS:
            setattr(config, name, _TEXT_TOKENS.index(name))
        elif _TOKEN.fullmatch(name) and isinstance(value, int):
            setattr(config, name, ids.setdefault(name, FIRST_ID + len(ids)))
        elif _DROPOUT.fullmatch(name) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif isinstance(value, int) and not isinstance(value, bool):
            small = next((v for p, v in _SIZES_COMPILED if p.fullmatch(name)), None)
            if small is not None and (value > small or small > 4):
                setattr(config, name, small)
    num_layers = next((v for n in ("num_hidden_layers", "depth", "num_layers")
                       if isinstance(v := getattr(config, n, None), int)), LAYERS)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and name in _LISTS:
            setattr(config, name, _LISTS[name])
        elif isinstance(value, list | tuple) and len(value) > num_layers and (
                name.endswith(("_types", "layers_block_type", "layer_rope_theta", "no_rope_layers"))
                or name.endswith("_pattern")):
            setattr(config, name, _some(list(value), num_layers))
        elif name == "moe_layers" or name.endswith("rope_scaling_layers"):
            setattr(config, name, [i for i in value if i < num_layers])
    _shrink_rope(config)


def _some(values: list, n: int) -> list:
    """n of the values, of as many kinds as there are."""
    kinds = list(dict.fromkeys(values))
    return (kinds + values)[:n] if len(kinds) > 1 else values[:n]


def _shrink_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None)
    for part in [rope, *(rope.values() if isinstance(rope, dict) else ())]:
        if isinstance(part, dict) and "mrope_section" in part:
            half = HIDDEN // HEADS // 2
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
            part["partial_rotary_factor"] = 1.0


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
          "partial_rotary_factor": 1.0}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_GLM = {"text_config.rope_parameters": _MROPE}
# Parts that a configuration leaves out by default.
_GIVEN: dict[str, dict[str, Any]] = {
    **{name: {"vision_config": {}} for name in ("gemma4", "gemma4_unified")},
}
# What a class needs beside the small sizes, by model type.
_CHANGED: dict[str, dict[str, Any]] = {
    **{name: _GLM for name in (
        "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "qwen2_vl", "qwen2_5_vl",
        "paddleocr_vl")},
    **{name: {"vision_start_token_id": 110, **_GLM} for name in (
        "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "qwen2_5_omni": {"thinker_config.vision_start_token_id": 110,
                     "thinker_config.text_config.rope_parameters": _MROPE},
    **{name: {"text_config.head_dim": 8} for name in ("kimi_k25", "mistral_large4")},
    **{name: {"audio_config.intermediate_size": 128, "audio_token_id": 110}
       for name in ("voxtral", "glmasr")},
    **{name: {"out_hidden_size": 128} for name in ("muse_glimmer", "muse_spark")},
    "hunyuan_vl": {"text_config.head_dim": 16, "text_config.rope_parameters": {
        **_ROPE, "xdrope_section": [2, 2, 2, 2], "mrope_section": [2, 2, 2, 2]}},
    "qwen3_asr": {"audio_config.n_window": 50, "audio_config.n_window_infer": 100},
    "llama4": {"vision_config.intermediate_size": 128},
    "minimax_m3_vl": {"merged_hidden_size": 128},
    "blip-2": {"image_token_index": 110}, "instructblip": {"image_token_index": 110},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "cohere_compass": {"text_config.rope_parameters": {
        "full_attention": _ROPE, "sliding_attention": _ROPE}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]},
                        "text_config.moe_intermediate_size": [48, 48]},
    "qwen4_exp": {f"text_config.indexer_{k}": v for k, v in dict(
        n_heads=2, kv_heads=1, head_dim=16, budget=64, compress_ratio=4).items()},
    "granite4_vision": {**_PINPOINTS, "downsample_rate": "1/2",
                        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    "janus": {"vq_config.base_channels": 32, "vq_config.channel_multiplier": [1, 1]},
    "chameleon": {"image_token_id": 110, "vq_config.base_channels": 32,
                  "vq_config.channel_multiplier": [1, 1], "vq_config.num_embeddings": 10,
                  "vocabulary_map": {"<image>": 110} | {
                      f"IMGIMG{letter}Z": 111 + i for i, letter in enumerate("ABCDEFGHIJ")}},
    "instructblipvideo": {"video_token_index": 110},
    "nemo_speechlm": {"text_config.n_groups": 1},
    "unlimited_ocr": {
        "vision_config.sam_config.output_channels": 32,
        "vision_config.sam_config.downsample_channels": [32, 32],
        "vision_config.sam_config.global_attn_indexes": [1],
        "vision_config.encoder_config.image_size": 1,
        "vision_config.encoder_config.patch_size": 1},
    "step3p7": {"text_config.sliding_window": 16},
    **{name: _PINPOINTS for name in (
        "llava_next", "llava_next_video", "llava_onevision")},
    "gemma3": {"mm_tokens_per_image": 4}, "shieldgemma2": {"mm_tokens_per_image": 4},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "internvl": {"vision_config.image_size": [16, 16], "vision_config.patch_size": [4, 4]},
    "qianfan_ocr": {"vision_config.image_size": [16, 16], "vision_config.patch_size": [4, 4]},
}


def build(model_type: str, class_name: str) -> nn.Module:
    """The model in float64 and train mode."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[model_type](**_GIVEN.get(model_type, {})),
                    _CHANGED.get(model_type))
    made = getattr(transformers, class_name)._from_config(config, attn_implementation="eager")
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the other one has no float64
    made = made.to(torch.float64).train()
    with torch.no_grad():  # zeros, such as queries, may make gradients as large as 1e18
        for parameter in made.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.02)
    return made
