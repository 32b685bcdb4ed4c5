"""Tiny model folders of multimodal families, with processor and tokenizer, made with transformers
and no weights; and what their processors make of conversations, by transformers alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

_PAD = ["<pad>", "<bos>", "<eos>", "<turn>", "<end>"]
# As published templates do it: a turn is its role, its parts and an end.
_TEMPLATE = ("{{% for m in messages %}}{{{{ '<turn>' + m['role'] + '\\n' }}}}"
             "{{% if m['content'] is string %}}{{{{ m['content'] }}}}{{% else %}}"
             "{{% for p in m['content'] %}}{{% if p['type'] == 'image' %}}{image}"
             "{{% elif p['type'] == 'audio' %}}{audio}{video}"
             "{{% else %}}{{{{ p['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
             "{{{{ '<end>\\n' }}}}{{% endfor %}}"
             "{{% if add_generation_prompt %}}{{{{ '<turn>assistant\\n' }}}}{{% endif %}}")


def tokenizer(named: dict[str, str], more: tuple[str, ...] = (), adds_bos: bool = False):
    """A byte-level tokenizer with these special tokens by name, and `more` of them. adds_bos:
    <bos> before texts."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in ("\u010a\u010a", "\u0120the", "\u0120red", "user", "assistant", "What", "row"):
        for end in range(2, len(word) + 1):
            if word[:end] not in symbols:
                merges.append((word[: end - 1], word[end - 1]))
                symbols.append(word[:end])
    made = Tokenizer(models.BPE({s: k for k, s in enumerate(symbols)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                                   r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in
                             dict.fromkeys([*_PAD, *named.values(), *more])])
    if adds_bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>",
                                   eos_token="<eos>", extra_special_tokens=named)


def _of_images(kind: type, *parts: Any, **options: Any):
    """A processor without the part for videos, which needs torchvision."""
    from orchmllm.data.text.model_folder import of_images

    return of_images(kind)(*parts, **options)


def _qwen(config: str, processor: str, patch: int) -> Callable:
    def make(t):
        named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
                 "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
        images = t.Qwen2VLImageProcessorPil(
            patch_size=patch, size={"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2})
        return (config, {"vision_config": {"patch_size": patch}}, named, (),
                lambda tok: _of_images(getattr(t, processor), images, tok),
                "<|vision_start|><|image_pad|><|vision_end|>")
    return make


def _glm4v(t, config="Glm4vConfig"):
    images = t.Glm4vImageProcessorPil(size={"shortest_edge": 28**2, "longest_edge": 256 * 14**2})
    return (config, {}, {"image_token": "<|image|>", "video_token": "<|video|>"},
            ("<|begin_of_image|>", "<|end_of_image|>"),
            lambda tok: _of_images(t.Glm4vProcessor, images, tok),
            "<|begin_of_image|><|image|><|end_of_image|>")


def _internvl(t):
    images = t.GotOcr2ImageProcessorPil(crop_to_patches=True, max_patches=6,
                                        size={"height": 28, "width": 28})
    named = {"start_image_token": "<img>", "end_image_token": "</img>",
             "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    return ("InternVLConfig", {"vision_config": {"patch_size": [7, 7], "image_size": [28, 28]}},
            named, (), lambda tok: _of_images(t.InternVLProcessor, images, tok,
                                              image_seq_length=4), "<IMG_CONTEXT>\n")


def _llava_onevision(t):
    grids = [[a * 28, b * 28] for a in range(1, 4) for b in range(1, 4)]
    images = t.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28},
                                               image_grid_pinpoints=grids)
    return ("LlavaOnevisionConfig",
            {"vision_config": {"model_type": "siglip_vision_model", "patch_size": 7}},
            {"image_token": "<image>", "video_token": "<video>"}, (),
            lambda tok: _of_images(t.LlavaOnevisionProcessor, images, tok, num_image_tokens=16,
                                   vision_feature_select_strategy="full"), "<image>\n")


def _llava_next(t):
    grids = [[a * 28, b * 28] for a in range(1, 4) for b in range(1, 4)]
    images = t.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=grids)
    return ("LlavaNextConfig", {"vision_config": {"model_type": "clip_vision_model",
                                                  "patch_size": 7}},
            {"image_token": "<image>"}, (), lambda tok: t.LlavaNextProcessor(
                images, tok, patch_size=7, vision_feature_select_strategy="default",
                num_additional_image_tokens=1), "<image>\n")


def _llava(t, config="LlavaConfig"):
    images = t.CLIPImageProcessorPil(size={"shortest_edge": 28},
                                     crop_size={"height": 28, "width": 28})
    return (config, {"vision_config": {"model_type": "clip_vision_model", "patch_size": 7}},
            {"image_token": "<image>"}, (), lambda tok: t.LlavaProcessor(
                images, tok, patch_size=7, vision_feature_select_strategy="default",
                num_additional_image_tokens=1), "<image>\n")


def _import_pixtral(transformers) -> None:
    """transformers imports PixtralProcessor with torchvision alone, of which it needs nothing."""
    if importlib.util.find_spec("torchvision"):
        return
    names = ["torchvision", *(f"torchvision.{n}" for n in (
        "transforms", "transforms.v2", "transforms.v2.functional"))]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in names}):
        module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    transformers.PixtralProcessor = module.PixtralProcessor


def _mistral3(t):
    _import_pixtral(t)
    images = t.PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=7)
    named = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]",
             "image_end_token": "[IMG_END]"}
    return ("Mistral3Config", {"vision_config": {"model_type": "pixtral", "patch_size": 7}}, named,
            (), lambda tok: t.PixtralProcessor(images, tok, patch_size=7, spatial_merge_size=2),
            "[IMG]")


def _gemma3(t):
    images = t.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>",
             "eoi_token": "<end_of_image>"}
    return ("Gemma3Config", {"vision_config": {"patch_size": 7}}, named, (),
            lambda tok: t.Gemma3Processor(images, tok, image_seq_length=4), "<start_of_image>")


def _idefics3(t):
    images = t.Idefics3ImageProcessorPil(size={"longest_edge": 112},
                                         max_image_size={"longest_edge": 28})
    named = {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
             "global_image_token": "<global-img>"}
    rows = tuple(f"<row_{a}_col_{b}>" for a in range(1, 7) for b in range(1, 7))
    return ("Idefics3Config", {"vision_config": {"patch_size": 7}}, named, rows,
            lambda tok: t.Idefics3Processor(images, tok, image_seq_len=4), "<image>")


def _smolvlm(t):
    from transformers.models.smolvlm import processing_smolvlm

    if not processing_smolvlm.num2words:  # a package that videos alone need
        processing_smolvlm.num2words = str
    images = t.SmolVLMImageProcessorPil(size={"longest_edge": 112},
                                        max_image_size={"longest_edge": 28})
    _, keys, named, rows, *_ = _idefics3(t)
    return ("SmolVLMConfig", keys, named, rows, lambda tok: _of_images(
        t.SmolVLMProcessor, images, tok, None, image_seq_len=4), "<image>")


def _aya_vision(t):
    images = t.GotOcr2ImageProcessorPil(crop_to_patches=True, max_patches=6,
                                        size={"height": 28, "width": 28})
    tiles = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL",
             *(f"TILE_{k}" for k in range(1, 8)))
    return ("AyaVisionConfig", {"vision_config": {"model_type": "siglip_vision_model",
                                                  "patch_size": 7}},
            {"image_token": "<image>"}, tiles,
            lambda tok: t.AyaVisionProcessor(images, tok, patch_size=14, img_size=28), "<image>")


_AUDIO = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>",
          "audio_eos_token": "<|audio_eos|>"}
_CLIP = "<|audio_bos|><|AUDIO|><|audio_eos|>"


def _hears(t, seconds: int):
    """A feature extractor with windows of so many seconds."""
    return t.WhisperFeatureExtractor(feature_size=8, chunk_length=seconds,
                                     return_attention_mask=True)


def _qwen2_audio(seconds: int) -> Callable:
    return lambda t: ("Qwen2AudioConfig", {}, _AUDIO, (), lambda tok: t.Qwen2AudioProcessor(
        _hears(t, seconds), tok, chat_template="x"), "", f"Audio: {_CLIP}\n")


def _audioflamingo3(seconds: int) -> Callable:
    return lambda t: ("AudioFlamingo3Config", {}, {"audio_token": "<sound>"}, (),
                      lambda tok: t.AudioFlamingo3Processor(
                          _hears(t, seconds), tok, max_audio_len=4 * seconds), "", "<sound>")


def _qwen2_5_omni(seconds: int) -> Callable:
    def make(t):
        named = {**_AUDIO, "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>",
                 "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"}
        images = t.Qwen2VLImageProcessorPil(
            patch_size=14, size={"shortest_edge": 4 * 14**2, "longest_edge": 256 * 14**2})
        return ("Qwen2_5OmniThinkerConfig", {"vision_config": {"patch_size": 14}}, named, (),
                lambda tok: _of_images(t.Qwen2_5OmniProcessor, images, _hears(t, seconds), tok),
                "<|vision_bos|><|IMAGE|><|vision_eos|>", _CLIP)
    return make


FAMILIES: dict[str, Callable] = {
    "audioflamingo3": _audioflamingo3(1), "qwen2_audio": _qwen2_audio(1),
    "qwen2_5_omni": _qwen2_5_omni(1),
    "audioflamingo3_30s": _audioflamingo3(30), "qwen2_audio_30s": _qwen2_audio(30),
    "qwen2_5_omni_300s": _qwen2_5_omni(300),
    "qwen2_vl": _qwen("Qwen2VLConfig", "Qwen2VLProcessor", 14),
    "qwen2_5_vl": _qwen("Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", 14),
    "qwen3_vl": _qwen("Qwen3VLConfig", "Qwen3VLProcessor", 16),
    "qwen3_vl_moe": _qwen("Qwen3VLMoeConfig", "Qwen3VLProcessor", 16),
    "qwen3_5": _qwen("Qwen3_5Config", "Qwen3VLProcessor", 16),
    "qwen3_5_moe": _qwen("Qwen3_5MoeConfig", "Qwen3VLProcessor", 16),
    "glm4v": _glm4v, "glm4v_moe": partial(_glm4v, config="Glm4vMoeConfig"),
    "vipllava": partial(_llava, config="VipLlavaConfig"), "smolvlm": _smolvlm,
    "internvl": _internvl, "llava_onevision": _llava_onevision,
    "llava_next": _llava_next, "llava": _llava, "mistral3": _mistral3, "gemma3": _gemma3,
    "gemma3_pan_and_scan": _gemma3, "idefics3": _idefics3, "aya_vision": _aya_vision,
}


_STARTS = {"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
           "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>"}
CLIPS = ("audioflamingo3", "qwen2_5_omni", "qwen2_audio")  # families that take them
# Whose tokenizer puts <bos> before texts, and whose template writes it, too.
ADD_BOS = ("gemma3", "gemma3_pan_and_scan", "llava", "mistral3", "llava_onevision")
WRITE_BOS = ("gemma3", "llava_onevision")
OPTIONS = {"gemma3_pan_and_scan": {
    "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2}}


def video_token(family: str) -> str:
    """What a family has for videos, if they are more to it than images."""
    return "<|video_pad|>" if family in (
        "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe") else ""


def write_video_settings(folder: Path, patch: int, **settings: Any) -> None:
    """As published folders have them. What of a video is kept is as small as the images."""
    (folder / "video_preprocessor_config.json").write_text(json.dumps({
        "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 8 * patch**2, "longest_edge": 2048 * patch**2}, **settings}))


def write_processor(family: str, folder: Path) -> Path:
    """Writes config.json, the processor and its tokenizer; returns the folder."""
    import transformers

    config, keys, named, more, build, image, *audio = FAMILIES[family](transformers)
    tok = tokenizer(named, more, adds_bos=family in ADD_BOS)
    processor = build(tok)
    begin = "{{ bos_token }}" if family in WRITE_BOS else ""
    video = video_token(family) and image.replace("image", "video")
    processor.chat_template = begin + _TEMPLATE.format(
        image=image, audio=(audio or [""])[0],
        video=video and "{% elif p['type'] == 'video' %}" + video)
    processor.save_pretrained(folder)
    feature = named.get("image_token", named.get("context_image_token"))
    if family == "aya_vision":
        feature = "<|IMG_PATCH|>"
    ids = {f"{name}_id": tok.convert_tokens_to_ids(token) for name, token in named.items()
           if name == "audio_token"}
    if video:
        write_video_settings(folder, processor.image_processor.patch_size)
        ids["video_token_id"] = tok.convert_tokens_to_ids(video_token(family))
    if feature:
        ids["image_token_id"] = tok.convert_tokens_to_ids(feature)
    for name, token in _STARTS.items() if family.startswith("qwen2_5_omni") else ():
        ids[name] = tok.convert_tokens_to_ids(token)
    getattr(transformers, config)(**keys, **ids).save_pretrained(folder)
    return folder
