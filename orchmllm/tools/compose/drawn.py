"""Folders of composed models whose weights are drawn: a packed vision tower for images of any size
(Qwen2-VL's), Whisper's encoder without silence, and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    WhisperFeatureExtractor,
)

from orchmllm.composition.configuration import ComposedConfig
from orchmllm.data.text.templates import read_template
from orchmllm.data.text.tokenizer import (
    DEFAULT_SYSTEM,
    END_OF_TEXT,
    IM_END,
    IM_START,
    ChatTokenizer,
)
from orchmllm.tools.compose.write import DROPOUT, MADE, TOKENS, template_of, write_folder

POSITIONS_PER_S = 50  # of a clip
CHATML = ("{% if messages[0]['role'] != 'system' %}{{ '" + IM_START + "system\\n" + DEFAULT_SYSTEM
          + IM_END + "\\n' }}{% endif %}{% for message in messages %}{{ '" + IM_START
          + "' + message['role'] + '\\n' + message['content'] + '" + IM_END + "\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '" + IM_START + "assistant\\n' }}{% endif %}")


def shapes(llm: Sequence[int], vision: Sequence[int] = (), audio: Sequence[int] = (), *,
           vocab_size: int, num_mels: int = 80, longest_s: int = 60, audio_stack: int = 2
           ) -> dict[str, Any]:
    """A configuration. llm, vision, audio: layers, width, width of the MLP and heads; empty: there
    is no such tower. longest_s: of a clip, in seconds. vocab_size: of the table of embeddings.
    Raises ValueError."""
    def named(values: Sequence[int], *names: str) -> dict[str, int]:
        return dict(zip(names, values, strict=True))

    text = named(llm, "num_hidden_layers", "hidden_size", "intermediate_size",
                 "num_attention_heads")
    text["num_key_value_heads"] = max(1, text["num_attention_heads"] // 2)
    out = {"text_config": {"model_type": "qwen2", **text, "vocab_size": vocab_size,
                           "tie_word_embeddings": False}, "tie_word_embeddings": False}
    if vision:
        layers, width, mlp, heads = vision
        if mlp % width:
            raise ValueError(f"the MLP of a vision tower has {mlp} values, which is no multiple of "
                             f"its width, {width}")
        out["vision_config"] = {
            "model_type": "qwen2_vl_vision", "depth": layers, "embed_dim": width,
            "mlp_ratio": mlp // width, "num_heads": heads, "hidden_size": width,
            "hidden_act": "gelu",  # one kernel, as InternViT has it
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 1}
    if audio:
        out |= {"audio_packed": True, "audio_stack": audio_stack, "audio_config": {
            "model_type": "whisper", "num_mel_bins": num_mels,
            "max_source_positions": POSITIONS_PER_S * longest_s,
            **named(audio, "encoder_layers", "d_model", "encoder_ffn_dim",
                    "encoder_attention_heads")}}
    return out


def generator_shapes(generator: Sequence[int], width: int, side: int, max_pixels: int
                     ) -> dict[str, Any]:
    """A generator_config for pixels, see ComposedConfig, without its token. generator: layers,
    width and heads; width: of the LLM."""
    layers, inner, heads = generator
    return {"side": side, "max_pixels": max_pixels, "condition_dropout": DROPOUT, "transformer": {
        "_class_name": "LTXVideoTransformer3DModel", "in_channels": 3 * side**2,
        "out_channels": 3 * side**2, "num_layers": layers, "num_attention_heads": heads,
        "attention_head_dim": inner // heads, "cross_attention_dim": inner,
        "caption_channels": width}}


def write_drawn(config: Mapping[str, Any], tokenizer: Path, out: Path, max_side: int = 448
                ) -> ComposedConfig:
    """Writes a folder for model.config, which must not exist. config: of a composition of the
    towers above; its token ids are those that the tokenizer gets for media. tokenizer: a
    tokenizer.json, or a folder that has one, with ChatML's tokens or a chat template beside it.
    max_side: images have at most max_side**2 pixels, larger ones are resized. Raises ValueError for
    parts that do not fit together."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    named = read_template(file.parent, "")
    special = named[1] if named else {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    words = PreTrainedTokenizerFast(tokenizer_file=str(file), **special)
    words.chat_template = named[0] if named else CHATML
    size, generator = config["text_config"]["vocab_size"], config.get("generator_config")
    if generator:
        words.add_tokens([MADE], special_tokens=True)
        config = {**config, "generator_config": {
            **generator, "token_id": words.convert_tokens_to_ids(MADE)}}
    if len(words) > size:
        raise ValueError(f"{file} has {len(words)} tokens, and the configuration a vocab_size of "
                         f"{size}: raise it")
    tokens = {kind: token for kind, token in TOKENS.items()
              if ("vision_config" if kind == "image" else "audio_config") in config}
    words.add_tokens([*tokens.values()], special_tokens=True)
    ids = {f"{kind}_token_id": words.convert_tokens_to_ids(t) for kind, t in tokens.items()}
    made = ComposedConfig.from_dict({**config, **ids})
    made.architectures = ["ComposedForConditionalGeneration"]
    parts: dict[str, Any] = {"tokenizer": words}
    if "vision_config" in config:
        vision = made.vision_config
        side = vision.patch_size * vision.spatial_merge_size
        parts |= {"patch_size": vision.patch_size, "image_processor": Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size, merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            size={"shortest_edge": side**2, "longest_edge": max_side**2})}
    if "audio_config" in config:
        audio = made.audio_config
        parts |= {"audio_stack": made.audio_stack, "audio_packed": made.audio_packed,
                  "feature_extractor": WhisperFeatureExtractor(
                      feature_size=audio.num_mel_bins,
                      chunk_length=audio.max_source_positions // POSITIONS_PER_S)}
    write_folder(out, made, parts, template_of(words, tokenizer, tokens), tokens)
    end = ChatTokenizer(out).end_id
    GenerationConfig(eos_token_id=end, pad_token_id=end).save_pretrained(out)
    return made
