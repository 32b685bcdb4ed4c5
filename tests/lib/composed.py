"""Tiny folders of towers and LLMs, as transformers writes them, and models composed of them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from orchmllm.hf.folder import PARTS
from orchmllm.tools.compose.write import Parts, compose
from tests.lib.processors import tokenizer

_TEXT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             max_position_embeddings=4096, tie_word_embeddings=False)
_SIDES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
              image_size=28, patch_size=7)
# As Qwen2's: contents are texts.
TEMPLATE = ("{% for message in messages %}"
            "{{ '<turn>' + message['role'] + '\n' + message.content + '<end>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<turn>assistant\n' }}{% endif %}")
_GRID = dict(depth=2, patch_size=14, spatial_merge_size=2, temporal_patch_size=2, num_heads=2)


def _pair(kind: str) -> tuple:
    """Folders that hold a text model as well."""
    text = dict(_TEXT, vocab_size=64)
    images = getattr(transformers, f"{kind}ImageProcessorPil")
    size = {"size": {"height": 28, "width": 28}} if kind == "Siglip" else {
        "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=dict(_SIDES, projection_dim=32), text_config=text)
    return getattr(transformers, f"{kind}Model")(config), images(**size)


def _dinov2() -> tuple:
    sides = {k: v for k, v in _SIDES.items() if k != "intermediate_size"}
    sides["image_size"] = 56  # trained with larger images than it gets, as the published one was
    config = transformers.Dinov2Config(**sides, mlp_ratio=2)
    return transformers.Dinov2Model(config), transformers.BitImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def _internvit() -> tuple:
    config = transformers.InternVLVisionConfig(**{**_SIDES, "image_size": [28, 28],
                                                  "patch_size": [7, 7]})
    return transformers.InternVLVisionModel(config), transformers.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28})


def _qwen(kind: str, **vision) -> tuple:
    """A whole model, of which the tower is taken."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=dict(_TEXT, vocab_size=64, rope_parameters=rope), vision_config=_GRID | vision)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=14, size={"shortest_edge": 4 * 14**2, "longest_edge": 256 * 14**2})
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), images


VISION = {
    "siglip": lambda: _pair("Siglip"), "clip": lambda: _pair("CLIP"), "dinov2": _dinov2,
    "internvit": _internvit, "qwen2_vl": lambda: _qwen("Qwen2VL", embed_dim=32, hidden_size=24),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", hidden_size=32, intermediate_size=48,
                                out_hidden_size=24, window_size=56, fullatt_block_indexes=[1])}
LLMS = {
    "qwen2": lambda n: transformers.Qwen2Config(**{**_TEXT, "vocab_size": n,
                                                   "tie_word_embeddings": True}),
    "llama": lambda n: transformers.LlamaConfig(**_TEXT, vocab_size=n),
    "qwen3": lambda n: transformers.Qwen3Config(**_TEXT, vocab_size=n, head_dim=8),
    "qwen3_moe": lambda n: transformers.Qwen3MoeConfig(
        **_TEXT, vocab_size=n, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12)}
# name -> (tower, clips, which may be `packed`, LLM, tiles, tokens without a row in the LLM's table)
COMPOSED = {
    "siglip_whisper_qwen2": ("siglip", True, "qwen2", 0, True),
    "clip_tiled_qwen3_moe": ("clip", False, "qwen3_moe", 4, False),
    "qwen2_vl_whisper_llama": ("qwen2_vl", True, "llama", 0, False),
    "qwen2_5_vl_qwen3": ("qwen2_5_vl", False, "qwen3", 0, True),
    "internvit_tiled_llama": ("internvit", False, "llama", 4, True),
    "dinov2_qwen2": ("dinov2", False, "qwen2", 0, False),
    "qwen2_vl_packed_whisper_qwen2": ("qwen2_vl", "packed", "qwen2", 0, True),
    "whisper_qwen3": ("", True, "qwen3", 0, False)}


def _save(model: torch.nn.Module, folder: Path) -> None:
    model.double().save_pretrained(folder)


def write_generator(parts: Parts) -> None:
    """The configuration of one, and a VAE where there is to be one."""
    import diffusers

    channels = 3 * parts.side**2
    if parts.vae:
        diffusers.AutoencoderKL(
            block_out_channels=(4, 8), norm_num_groups=2, latent_channels=3, layers_per_block=1,
            shift_factor=0.3,
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        ).save_pretrained(parts.vae)
        channels = 3 * (parts.side // 2)**2
    diffusers.LTXVideoTransformer3DModel(
        in_channels=channels, out_channels=channels, num_attention_heads=2, attention_head_dim=12,
        cross_attention_dim=24, num_layers=2, caption_channels=20).save_config(parts.generator)


def write_parts(name: str, folder: Path, **makes) -> Parts:
    """The parts of a composition, each in a folder of its own with weights in float64. makes: those
    of a generator, see Parts."""
    torch.manual_seed(0)
    tower, hears, llm, tiles, added = COMPOSED[name]
    parts = Parts(folder / "llm", folder / "vision" if tower else None,
                  folder / "audio" if hears else None, tiles,
                  audio_packed=hears == "packed", **makes)
    if parts.generator:
        write_generator(parts)
    if tower:
        model, images = VISION[tower]()
        _save(model, parts.vision)
        images.save_pretrained(parts.vision)
    if hears:
        config = transformers.WhisperConfig(
            d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32,
            num_mel_bins=8, max_source_positions=50, decoder_layers=1, decoder_attention_heads=2,
            decoder_ffn_dim=16, vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1)
        _save(transformers.WhisperForConditionalGeneration(config), parts.audio)
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(
            parts.audio)
    words = tokenizer({}, ("<|endoftext|>",))  # which the class of Qwen2's would add
    words.chat_template = TEMPLATE
    words.save_pretrained(parts.llm)
    config = LLMS[llm](len(words) + (0 if added else 8))
    _save(transformers.AutoModelForCausalLM.from_config(config), parts.llm)
    return parts


def stock_whisper(tower) -> WhisperEncoder:
    """That of transformers, with the weights of a packed one."""
    stock = WhisperEncoder._from_config(copy.deepcopy(tower.config), attn_implementation="sdpa")
    stock.to(tower.dtype).load_state_dict(tower.state_dict())
    return stock


def alone(stock: WhisperEncoder, frames: torch.Tensor) -> torch.Tensor:
    """Positions (P, C) of one clip, frames (mel bands, n), by torch's convolutions and the layers
    of Whisper."""
    x = F.gelu(stock.conv2(F.gelu(stock.conv1(frames[None])))).transpose(1, 2)
    x = x + stock.embed_positions.weight[: x.shape[1]]
    for layer in stock.layers:
        x = layer(x, None)
    return stock.layer_norm(x)[0]


def write_composed(name: str, folder: Path, linked: bool = False, **makes) -> Parts:
    """Composes a model in `folder`, whose parts are in others beside it; its weights are its own,
    with connectors that are drawn here, unless they are linked. makes: see write_parts."""
    parts = write_parts(name, folder.with_name(f"{folder.name}_parts"), **makes)
    compose(parts, folder)
    if not linked:
        model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float64)
        (folder / PARTS).unlink()
        if parts.generator:  # it starts at zero
            torch.nn.init.normal_(model.generator.place.weight)
        model.save_pretrained(folder)
    return parts
