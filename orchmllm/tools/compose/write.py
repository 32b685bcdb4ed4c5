"""Writes the folder of a composed model from those of its parts: configuration, processor,
tokenizer and chat template, and where its weights are."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    WhisperConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.utils import GENERATION_CONFIG_NAME

from orchmllm.composition.configuration import ComposedConfig
from orchmllm.composition.modeling import ComposedForConditionalGeneration, takes_grids
from orchmllm.composition.processing import ComposedProcessor
from orchmllm.data.text.processor import Processor
from orchmllm.data.text.template_engine import Environment
from orchmllm.hf.folder import PARTS, SINGLE, VAE, open_folder, read_json
from orchmllm.hf.tensors import refuse_unequal
from orchmllm.models.families import refusals

TOKENS = {"image": "<|image_pad|>", "audio": "<|audio_pad|>"}
MADE = "<|image_made|>"  # after it an image is made
DROPOUT = 0.1  # share of the images that are learnt without a condition
LOCAL = {"local_files_only": True, "trust_remote_code": False}
# A content that is a list of parts, as a template for texts can write it.
_MACRO = ("{%- macro with_media(content) %}{% if content is string %}{{ content }}"
          "{% elif content %}{% for part in content %}"
          "{% if part.type == 'image' %}IMAGE{% elif part.type == 'audio' %}AUDIO"
          "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro -%}")
_CONNECTORS = ("generator.norm.", "generator.connector.", "generator.place.")
_CONTENT = re.compile(r"""\b\w+(?:\[[^\]'"]*\])*(?:\.content\b|\[(['"])content\1\])"""
                      r"(?!\s+is\s+(?:not\s+)?(?:none|defined|undefined))")


class Parts(NamedTuple):
    """Folders of save_pretrained, of which vision or audio may be missing. That of a vision tower
    may be one of CLIP's kind, or of a whole model that has such a tower; that of Whisper has its
    decoder, which is left out. tiles: an image is cut into at most so many, and shown as a whole as
    well (0: it is not cut). audio_stack, audio_packed, side, max_pixels: see ComposedConfig.
    template: a chat template instead of that of the LLM. generator: of a transformer of diffusers;
    vae: of its AutoencoderKL."""

    llm: Path
    vision: Path | None = None
    audio: Path | None = None
    tiles: int = 0
    audio_stack: int = 2
    template: str = ""
    audio_packed: bool = False
    generator: Path | None = None
    vae: Path | None = None
    side: int = 16
    max_pixels: int = 512**2


def compose(parts: Parts, out: Path) -> ComposedConfig:
    """Writes `out`, which must not exist. Raises ValueError naming the folder that cannot be used,
    and OSError."""
    text, tokenizer = _text_config(parts.llm), read_part(AutoTokenizer, parts.llm)
    tokens = {kind: token for kind, token in TOKENS.items()
              if (parts.vision if kind == "image" else parts.audio)}
    if parts.generator:  # its token comes first: it needs a row in the table
        tokenizer.add_tokens([MADE], special_tokens=True)
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    named: dict[str, Any] = {"tokenizer": tokenizer}
    given: dict[str, Any] = {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(token)
                             for kind, token in tokens.items()}
    if parts.vision:
        given["vision_config"] = vision = _part_config(parts.vision, "vision_config")
        named["image_processor"], given["image_size"], given["spatial_merge_size"] = _images(
            parts, vision)
        named["patch_size"] = int(np.max(vision.patch_size))
        named["spatial_merge_size"] = given["spatial_merge_size"]
    if parts.audio:
        given["audio_config"] = _part_config(parts.audio, "audio_config")
        named["feature_extractor"] = read_part(AutoFeatureExtractor, parts.audio)
        named["audio_stack"] = given["audio_stack"] = parts.audio_stack
        named["audio_packed"] = given["audio_packed"] = parts.audio_packed
        if parts.audio_packed:
            _check_whisper(parts.audio, given["audio_config"], named["feature_extractor"])
    if parts.generator:
        given["generator_config"] = _generator_config(parts, text, tokenizer)
    config = ComposedConfig(text, **given, dtype=text.dtype,
                            architectures=[ComposedForConditionalGeneration.__name__])
    for why in refusals(config):
        raise ValueError(f"these parts cannot be trained exactly: {why}")
    with torch.device("meta"):
        model = ComposedForConditionalGeneration(config)
    if size := config.image_size:
        try:
            model.model.get_image_features(torch.empty(1, 3, *size, device="meta"))
        except ValueError as error:
            raise ValueError(f"{parts.vision}: its image processor makes images of {size[0]} x "
                             f"{size[1]} pixels, which its tower refuses: {error}") from error
    links = _links(model, parts, out)
    template = parts.template or template_of(tokenizer, parts.llm, tokens)
    write_folder(out, config, named, template, tokens)
    try:
        if (parts.llm / GENERATION_CONFIG_NAME).is_file():
            shutil.copyfile(parts.llm / GENERATION_CONFIG_NAME, out / GENERATION_CONFIG_NAME)
        if links:
            _write_links(links, out)
        if parts.generator:
            if parts.vae:
                shutil.copytree(parts.vae, out / VAE)
            model.generator.load_codec(out, torch.device("cpu"), torch.float32)
    except BaseException:
        shutil.rmtree(out)
        raise
    return config


def write_folder(out: Path, config: ComposedConfig, parts: Mapping[str, Any], template: str,
                 tokens: Mapping[str, str]) -> None:
    """The configuration and the processor of a model, in a folder that must not exist. parts: of
    the processor and its settings, see ComposedProcessor; tokens: that stand for media, by kind.
    Raises ValueError, and leaves no folder, where the processor cannot be used."""
    processor = ComposedProcessor(
        **parts, chat_template=template, **{f"{kind}_token": t for kind, t in tokens.items()})
    out.mkdir(parents=True)
    try:
        config.save_pretrained(out)
        processor.save_pretrained(out)
        Processor(out)  # as training opens it, with its proofs
    except BaseException:
        shutil.rmtree(out)
        raise


def save_parts(model: ComposedForConditionalGeneration, folder: Path, max_file_bytes: int) -> None:
    """Writes the weights to a folder that has the processor: each part as a folder that it can be
    read from alone, with its part of the processor, and the connectors."""
    processor = ComposedProcessor.from_pretrained(folder, backend="pil", **LOCAL)
    inner = model.model
    with torch.device("meta"):
        llm = AutoModelForCausalLM.from_config(model.config.text_config)
    state = {f"{llm.base_model_prefix}.{name}": value
             for name, value in inner.language_model.state_dict().items()}
    llm.load_state_dict(state | {"lm_head.weight": model.lm_head.weight}, assign=True)
    llm.tie_weights()
    parts = {"llm": (llm, processor.tokenizer)}
    if hasattr(inner, "vision_tower"):
        parts["vision"] = inner.vision_tower, processor.image_processor
    if hasattr(inner, "audio_tower"):
        parts["audio"] = inner.audio_tower, processor.feature_extractor
    for name, (part, its) in parts.items():
        part.save_pretrained(folder / name, max_shard_size=max_file_bytes)
        its.save_pretrained(folder / name)
    if hasattr(model, "generator"):
        parts["generator"] = model.generator.transformer, None
        model.generator.transformer.save_pretrained(
            folder / "generator", max_shard_size=max_file_bytes)
    (folder / "connectors").mkdir()
    save_file({name: value for name, value in model.state_dict().items()
               if name.startswith((*_CONNECTORS, *(f"model.{p}_projector." for p in parts)))},
              folder / "connectors" / SINGLE, metadata={"format": "pt"})
    model.config.architectures, model.config.dtype = [type(model).__name__], model.dtype
    model.config.save_pretrained(folder)
    links = _links(model, Parts(**{name: folder / name for name in parts}), folder)
    connectors = [*(f"model.{part}_projector." for part in ("vision", "audio") if part in parts),
                  *(_CONNECTORS if "generator" in parts else ())]
    _write_links(links | {name: ("connectors", name) for name in connectors}, folder)


def _write_links(links: Mapping[str, tuple[str, str]], folder: Path) -> None:
    (folder / PARTS).write_text(json.dumps(links, indent=1) + "\n", encoding="utf-8")


def read_part(kind: type, folder: Path, **options: Any) -> Any:
    """What a class of transformers reads of a folder. Raises ValueError naming the folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder (nothing is downloaded)")
    try:
        return kind.from_pretrained(folder, **LOCAL, **options)
    except Exception as error:  # transformers refuses configurations by errors of many kinds
        raise ValueError(f"{folder}: its {kind.__name__.removeprefix('Auto')} cannot be read: "
                         f"{' '.join(str(error).split())}") from error


def _part_config(folder: Path, name: str) -> PreTrainedConfig:
    config = read_part(AutoConfig, folder)
    return getattr(config, name, config)


def _check_whisper(folder: Path, config: PreTrainedConfig, extractor: Any) -> None:
    """Raises ValueError for a part whose clips cannot be encoded without silence after them."""
    if not isinstance(config, WhisperConfig):
        raise ValueError(f"{folder}: clips are packed in the encoder of Whisper alone, and this is "
                         f"a {config.model_type}: leave --audio-packed out")
    if extractor.nb_max_frames > 2 * config.max_source_positions:
        raise ValueError(f"{folder}: its feature extractor takes clips of "
                         f"{extractor.nb_max_frames} frames, of which its max_source_positions "
                         f"({config.max_source_positions}) are too few")


def _text_config(folder: Path) -> PreTrainedConfig:
    config = read_part(AutoConfig, folder)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"{folder} is a {config.model_type}, which is no causal LLM of "
                         "transformers: name one with --llm")
    try:
        with torch.device("meta"):
            llm = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of values that do not fit each other
        raise ValueError(f"{folder}: no model can be made of its config.json: {error}") from error
    base, has = llm.base_model, set(llm.state_dict())
    others = has ^ {"lm_head.weight", *(f"{llm.base_model_prefix}.{n}" for n in base.state_dict())}
    if others or not hasattr(base, "embed_tokens"):
        found = ", ".join(sorted(others & has)[:3])
        raise ValueError(f"{folder} is a {config.model_type}{f' with {found}' if found else ''}: a "
                         "composition needs an LLM with a table embed_tokens and a head that is "
                         "lm_head.weight alone")
    return config


def _generator_config(parts: Parts, text: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
                      ) -> dict[str, Any]:
    """See ComposedConfig. Raises ValueError where the LLM has no row for the token of an image."""
    token = tokenizer.convert_tokens_to_ids(MADE)
    if token >= text.vocab_size:
        if any(parts.llm.glob("*.safetensors")):
            raise ValueError(f"{parts.llm}: its table has {text.vocab_size} rows, and none for the "
                             f"token {MADE}: save it with one more (resize_token_embeddings)")
        text.vocab_size = token + 1
    return {"transformer": read_json(parts.generator / "config.json"), "side": parts.side,
            "max_pixels": parts.max_pixels, "condition_dropout": DROPOUT, "token_id": token}


def _images(parts: Parts, vision: PreTrainedConfig) -> tuple[Any, list[int] | None, int]:
    """(The image processor, the size that it makes, None for any, patches of a side that a
    connector merges): 2, or 3 where the patches of a side are odd, or 1. Raises ValueError."""
    images = read_part(AutoImageProcessor, parts.vision, backend="pil")
    if takes_grids(vision):
        if parts.tiles:
            raise ValueError(f"{parts.vision} takes images of any size: leave --tiles out")
        return images, None, 1
    made = images(Image.new("RGB", (640, 480)), return_tensors="np")["pixel_values"]
    if made.shape[:2] != (1, 3):
        raise ValueError(f"{parts.vision}: its image processor makes {made.shape} of an image, "
                         "where one tile (1, 3, H, W) was expected: choose another tower")
    sides = [side // int(np.max(vision.patch_size)) for side in made.shape[2:]]
    if parts.tiles:
        from transformers import GotOcr2ImageProcessorPil

        images = GotOcr2ImageProcessorPil(
            size=dict(zip(("height", "width"), made.shape[2:], strict=True)),
            crop_to_patches=True, max_patches=parts.tiles, **{
                name: getattr(images, name) for name in (
                    "image_mean", "image_std", "rescale_factor", "resample", "do_normalize",
                    "do_rescale")})
    size = list(made.shape[2:])
    return images, size, next(m for m in (2, 3, 1) if not any(side % m for side in sides))


def template_of(tokenizer: PreTrainedTokenizerBase, folder: Path, tokens: Mapping[str, str]
                 ) -> str:
    """The chat template of the LLM, which writes media as well. Raises ValueError where it does not
    write texts as before."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if not own:
        raise ValueError(f"{folder} has no chat template: give the folder of an instruct model, or "
                         "a template with --chat-template")
    macro = _MACRO.replace("IMAGE", tokens.get("image", "")).replace(
        "AUDIO", tokens.get("audio", ""))
    template = macro + _CONTENT.sub(lambda found: f"with_media({found[0]})", own)
    talk = [{"role": role, "content": f"It is {role}'s."} for role in (
        "user", "assistant", "user", "assistant")]
    named = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    for turns in (talk, [{"role": "system", "content": "Be brief."}, *talk], talk[:1]):
        try:
            wanted = Environment().from_string(own).render(
                messages=turns, add_generation_prompt=len(turns) == 1, **named)
        except Exception:  # it may refuse a system's turn
            continue
        found = Environment().from_string(template).render(
            messages=turns, add_generation_prompt=len(turns) == 1, **named)
        if found != wanted:
            raise ValueError(f"{folder}: its chat template cannot be made to write media: give "
                             "one that does with --chat-template")
    return template


def _links(model: ComposedForConditionalGeneration, parts: Parts, out: Path
           ) -> dict[str, tuple[str, str]]:
    """How names of the model's tensors begin -> (folder, how they begin there); empty where no part
    has weights. Raises ValueError where some have none, or not all of the model's."""
    places = {"model.vision_tower.": parts.vision, "model.audio_tower.": parts.audio,
              "model.language_model.": parts.llm}
    if parts.generator and any(parts.generator.glob("*.safetensors")):
        places["generator.transformer."] = parts.generator
    places = {name: folder for name, folder in places.items() if folder}
    empty = [f for f in places.values() if not any(f.glob("*.safetensors"))]
    if len(empty) == len(places) and not any(any(f.glob("*.bin")) for f in empty):
        return {}
    if empty:
        raise ValueError(f"{empty[0]} has no weights in safetensors: copy it completely, convert "
                         "pickles (save_pretrained), or give folders without any weights alone")
    begins = {name: _begin(model, name, folder) for name, folder in places.items()}
    if model.config.tie_word_embeddings:
        refuse_unequal(parts.llm, model._tied_weights_keys)
    else:
        head = "lm_head."
        places[head], begins[head] = parts.llm, head
        if f"{head}weight" not in open_folder(parts.llm):
            raise ValueError(f"{parts.llm} lacks {head}weight: give the folder of a causal LLM")
    return {name: (os.path.relpath(folder.resolve(), out.resolve()), begins[name])
            for name, folder in places.items()}


def _begin(model: ComposedForConditionalGeneration, name: str, folder: Path) -> str:
    """How the names of the weights begin in `folder` that are those of the model which begin with
    `name`, as from_pretrained converts them. Raises ValueError where some are not there."""
    wanted = {key: value for key, value in model.state_dict().items() if key.startswith(name)}
    tensors = open_folder(folder)
    conversions = get_model_conversion_mapping(model)
    convert = [c for c in conversions if isinstance(c, WeightConverter)]
    rename = [c for c in conversions if not isinstance(c, WeightConverter)]

    def fits(begin: str) -> tuple[set[str], int]:
        """(What is missing there, how much is there that the model has not.)"""
        found = set()
        for key, stored in tensors.items():
            if key.startswith(begin):
                to, merged = rename_source_key(name + key.removeprefix(begin), rename, convert,
                                               "model", wanted)
                same = to in wanted and tuple(wanted[to].shape) == stored.shape
                found.add(to if same or merged else f"{to} of another shape")
        return wanted.keys() - found, len(found - wanted.keys())

    begins = {key[:end] for key in tensors for end in (
        0, *(m.end() for m in re.finditer(r"[A-Za-z_]+\.", key)))}
    found = {begin: fits(begin) for begin in begins}
    best = min(found, key=lambda begin: (len(found[begin][0]), found[begin][1], -len(begin)))
    if missing := found[best][0]:
        raise ValueError(f"{folder} lacks weights of {name.rstrip('.')}, such as {min(missing)}: "
                         "give a complete copy of such a model")
    return best
