"""Rows with images are what the model's processor makes of them: the chat template writes a
placeholder for an image, and the features stand where the processor puts its image tokens."""

from __future__ import annotations

import importlib.util
import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from orchmllm.data.formats.conversation import chat
from orchmllm.data.media.medium import RowError
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.layout import AUDIO, TEXT, VISION
from tests.lib.sources import read_row
from tests.lib.tokenizers import write_merged_tokenizer

TRL = importlib.util.find_spec("trl")
TEMPLATES = Path(TRL.origin).parent / "chat_templates" if TRL else None
IMAGE = Image.fromarray(np.zeros((56, 56, 3), np.uint8))
CHATML = ("<|im_start|>", "<|im_end|>")
QWEN = (*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
         "<image_soft_token>")
IDEFICS = ("<|im_start|>", "<|begin_of_text|>", "<fake_token_around_image>", "<global-img>",
           "<image>", "<end_of_utterance>")
# template -> (its special tokens, the token that stands for a feature)
MODELS = {
    "qwen2_5_vl": (QWEN, "<|image_pad|>"), "qwen3_vl": (QWEN, "<|image_pad|>"),
    "gemma3": (GEMMA, "<image_soft_token>"), "smolvlm": (IDEFICS, "<image>"),
    "idefics3": (IDEFICS, "<image>"), "llava_next": (("<image>", "</s>"), "<image>")}


def processor(name: str, tokenizer, template: str, monkeypatch):
    """transformers' processor of a model, without what it needs for videos alone."""
    import transformers as hf
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.processing_utils import ProcessorMixin

    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    check = ProcessorMixin.check_argument_for_proper_class
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class",
                        lambda self, key, value: key == "video_processor" or check(
                            self, key, value))
    keys = dict(tokenizer=tokenizer, chat_template=template)
    videos = SimpleNamespace(num_frames=0, fps=0, size={}, max_image_size={}, do_sample_frames=0)
    if name == "gemma3":
        return hf.Gemma3Processor(hf.Gemma3ImageProcessor(), image_seq_length=4, **keys)
    if name == "idefics3":
        return hf.Idefics3Processor(hf.Idefics3ImageProcessor(do_image_splitting=False),
                                    image_seq_len=4, **keys)
    if name == "smolvlm":
        return hf.SmolVLMProcessor(hf.SmolVLMImageProcessor(do_image_splitting=False),
                                   video_processor=videos, image_seq_len=4, **keys)
    if name == "llava_next":
        return hf.LlavaNextProcessor(hf.LlavaNextImageProcessor(), patch_size=14,
                                     vision_feature_select_strategy="default", **keys)
    made = {"qwen2_5_vl": hf.Qwen2_5_VLProcessor, "qwen3_vl": hf.Qwen3VLProcessor}[name]
    return made(hf.Qwen2VLImageProcessor(), video_processor=videos, **keys)


def text(value: str) -> dict:
    return {"type": "text", "text": value}


ROWS = {
    "first": [{"type": "image"}, text("What?\n")],
    "between": [text("Look: "), {"type": "image"}, text(" What?")],
    "two": [{"type": "image"}, text("\n\nor"), {"type": "image"}, text(".\n")],
    "none": [text("What?")],
}


@pytest.mark.slow  # the processors take seconds to import
@pytest.mark.skipif(TRL is None, reason="TRL ships the templates, and needs Python 3.11")
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_the_processor(tmp_path, monkeypatch, name):
    from transformers import PreTrainedTokenizerFast

    special, feature = MODELS[name]
    template = (TEMPLATES / f"{name}.jinja").read_text()
    path = write_merged_tokenizer(tmp_path, ("<bos>", "<eos>", *special))
    (tmp_path / "chat_template.jinja").write_text(template)
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    ours = ChatTokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(path), chat_template=template, **tokens,
        **({"extra_special_tokens": dict(zip(("boi_token", "eoi_token", "image_token"), GEMMA[2:],
                                             strict=True))} if name == "gemma3" else {}))
    made = processor(name, theirs, template, monkeypatch)
    for what, parts in ROWS.items():
        num_images = sum(part["type"] == "image" for part in parts)
        messages = [{"role": "user", "content": parts},
                    {"role": "assistant", "content": [text("red")]}]
        row = {"messages": messages, "images": ["a.png", "b.png"][:num_images]}
        token_ids, learnt, segments = ours.tokenize(chat(row, MediaRoot("")))
        assert ours.decode(token_ids[learnt]).strip().startswith("red"), what
        asked = made.apply_chat_template(messages, tokenize=False)
        expected = made(text=[asked], images=[[IMAGE] * num_images] if num_images else None,
                        add_special_tokens=False)["input_ids"][0]
        feature_id = theirs.convert_tokens_to_ids(feature)
        found, ids = [], iter(token_ids.tolist())
        for modality, count in segments:
            found += [next(ids) for _ in range(count)] if modality == TEXT else [feature_id]
        assert found == _once(expected, feature_id, num_images), what


def _once(token_ids: list[int], feature: int, num_images: int) -> list[int]:
    """The ids with one in place of all features of an image; images have equally many."""
    each = token_ids.count(feature) // max(num_images, 1)
    out: list[int] = []
    for token, same in groupby(token_ids):
        count = len(list(same))
        out += [token] * (count // each if token == feature else count)
    return out


PARTS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
         "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
         "{% elif p.type == 'image' %}IMAGE{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
         "{% endfor %}")


@pytest.mark.parametrize("written, config, segments", [
    ("<|image_pad|>", {}, [TEXT, VISION, TEXT, AUDIO, TEXT]),  # it does not know clips
    ("", {}, [TEXT, VISION, TEXT, AUDIO, TEXT]),  # nor images: they stand where the row says
    ("<eos>", {}, None), ("<eos>", {"image_token": "<eos>"}, [TEXT, VISION, TEXT, AUDIO, TEXT])])
def test_placeholders_are_known_or_named(tmp_path, written, config, segments):
    write_merged_tokenizer(tmp_path, ("<bos>", "<eos>", *QWEN))
    (tmp_path / "chat_template.jinja").write_text(PARTS.replace("IMAGE", written))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ChatTokenizer(tmp_path)
    turns = read_row({"conversations": [{"from": "human", "value": "<image>a<audio>b"},
                                        {"from": "gpt", "value": "<|image_pad|> <eos>"}],
                      "image": "a.png", "audio": "a.wav"})
    if segments is None:
        with pytest.raises(RowError, match='name it as "image_token" in tokenizer_config.json'):
            tokenizer.tokenize(turns)
        return
    token_ids, learnt, found = tokenizer.tokenize(turns)
    assert [modality for modality, _ in found] == segments
    assert tokenizer.decode(token_ids) == ("<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
                                           "<|image_pad|> <eos><|im_end|>\n")
    for token in ("<|image_pad|>", "<eos>"):
        assert tokenizer.tokenizer.token_to_id(token) not in token_ids
    assert tokenizer.decode(token_ids[learnt]) == "<|image_pad|> <eos><|im_end|>"
