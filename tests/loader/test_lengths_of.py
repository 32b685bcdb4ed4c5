"""lengths_of: the tokens of a row as the model's processor makes them of the real images."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm import lengths_of
from orchmllm.loader.lengths import CollatedLengths
from tests.lib.tokenizers import write_merged_tokenizer

TRL = importlib.util.find_spec("trl")
TEMPLATES = Path(TRL.origin).parent / "chat_templates" if TRL else Path()
QWEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
        "<|video_pad|>")
IDEFICS = ("<|im_start|>", "<|begin_of_text|>", "<fake_token_around_image>", "<global-img>",
           "<image>", "<end_of_utterance>")
MODELS = {  # template -> its special tokens
    "qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "smolvlm": IDEFICS, "idefics3": IDEFICS,
    "gemma3": ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
               "<image_soft_token>"), "llava_next": ("<image>", "</s>")}
SPLITS = ("smolvlm", "idefics3")


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
        return hf.Idefics3Processor(hf.Idefics3ImageProcessor(), image_seq_len=4, **keys)
    if name == "smolvlm":
        return hf.SmolVLMProcessor(hf.SmolVLMImageProcessor(), video_processor=videos,
                                   image_seq_len=4, **keys)
    if name == "llava_next":
        return hf.LlavaNextProcessor(hf.LlavaNextImageProcessor(), patch_size=14,
                                     vision_feature_select_strategy="default", **keys)
    made = {"qwen2_5_vl": hf.Qwen2_5_VLProcessor, "qwen3_vl": hf.Qwen3VLProcessor}[name]
    return made(hf.Qwen2VLImageProcessor(), video_processor=videos, **keys)


def image(generator: np.random.Generator) -> Image.Image:
    """Of any shape, with any colours."""
    sides = generator.integers(30, 500, 2)
    return Image.fromarray(generator.integers(0, 255, (*sides, 3), dtype=np.uint8))


def rows() -> list[dict]:
    """With none to three images, between texts."""
    generator, out = np.random.default_rng(0), []
    for k in range(8):
        images = [image(generator) for _ in range(k % 4)]
        content = [{"type": "text", "text": "See "}]
        for _ in images:
            content += [{"type": "image"}, {"type": "text", "text": "\n and"}]
        out.append({"images": images, "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": "the red one"}]}]})
    return out


def internvl(tokenizer, template: str, monkeypatch):
    import transformers as hf

    built = processor("qwen2_5_vl", tokenizer, template, monkeypatch)  # lifts the check of videos
    return hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(crop_to_patches=True, max_patches=6,
                                 size={"height": 112, "width": 112}),
        tokenizer=tokenizer, video_processor=built.video_processor, image_seq_length=16,
        chat_template=template.replace("<|vision_start|><|image_pad|><|vision_end|>",
                                       "<IMG_CONTEXT>\n"))


@pytest.mark.slow  # the processors take seconds to import
@pytest.mark.skipif(TRL is None, reason="TRL ships the templates, and needs Python 3.11")
@pytest.mark.parametrize("name", [*MODELS, "internvl"])
def test_equals_the_processor_on_real_images(name, tmp_path, monkeypatch):
    import transformers as hf

    special = (*MODELS.get(name, QWEN), "<img>", "</img>", "<IMG_CONTEXT>")
    named = {"gemma3": dict(boi_token="<start_of_image>", eoi_token="<end_of_image>",
                            image_token="<image_soft_token>"),
             "internvl": dict(start_image_token="<img>", end_image_token="</img>",
                              context_image_token="<IMG_CONTEXT>", video_token="<|video_pad|>")}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_file=str(write_merged_tokenizer(tmp_path, special)),
        extra_special_tokens=named.get(name, {}))
    template = (TEMPLATES / f"{'qwen2_5_vl' if name == 'internvl' else name}.jinja").read_text()
    made = internvl(tokenizer, template, monkeypatch) if name == "internvl" else processor(
        name, tokenizer, template, monkeypatch)
    if name in SPLITS:
        made.image_processor.do_image_splitting = True
    data = rows()
    want = [len(made(text=[made.apply_chat_template(row["messages"], tokenize=False)],
                     images=row["images"] or None, add_special_tokens=False)["input_ids"][0])
            for row in data]
    assert lengths_of(made, data) == want
    assert name == "gemma3" or len(set(want)) > 4  # whose images have one length


class Patches:
    """An image processor: one token for 10 x 10 pixels, and one a line. It records what it gets."""

    def __init__(self, reads: bool = False) -> None:
        self.seen, self.reads = [], reads

    def __call__(self, images):
        for shape, device in [(i.shape, getattr(i, "device", "cpu")) for i in images]:
            self.seen.append((tuple(shape), str(device)))
        if self.reads:
            images = [torch.from_numpy(np.ascontiguousarray(i)) for i in images]
        return {"pixel_values": torch.zeros(1000, 10),
                "tokens": [i.shape[1] // 10 * (i.shape[2] // 10 + 1) for i in images]}


class Processor:
    def __init__(self, reads: bool = False) -> None:
        self.image_processor = Patches(reads)

    def apply_chat_template(self, messages, tokenize):
        return "".join("I" if part["type"] == "image" else part["text"]
                       for m in messages for part in m["content"])

    def __call__(self, text, images=None, **how):
        tokens = iter(self.image_processor(images)["tokens"] if images else ())
        return {"input_ids": [[0 for c in text[0] for _ in range(next(tokens) if c == "I" else 1)]]}


def encoded(**how) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (60, 30)).save(file, "JPEG", **how)
    return file.getvalue()


def test_images_have_a_size_alone_and_each_size_is_computed_once(tmp_path):
    (tmp_path / "a.jpg").write_bytes(encoded())
    turned = Image.Exif()
    turned[0x0112] = 6
    user = [{"role": "user", "content": "hi"}]
    shown = [{"type": "image", "image": Image.new("RGB", (60, 30))}, {"type": "text", "text": "hi"}]
    kinds = [
        {"text": "hi", "image": None}, {"text": "Ihi", "image": Image.new("RGB", (60, 30))},
        {"messages": user, "images": [np.zeros((30, 60, 3)), torch.zeros(3, 30, 60)]},
        {"messages": user, "images": [str(tmp_path / "a.jpg")]},
        {"messages": user, "images": [{"bytes": encoded(exif=turned.tobytes()), "path": None}]},
        {"messages": [{"role": "user", "content": shown}]}]
    for reads in (False, True):
        made = Processor(reads)
        assert lengths_of(made, kinds) == [2, 23, 44, 23, 26, 23]
        known, where = made.image_processor.seen, "cpu" if reads else "meta"
        assert [shape for shape, at in known if at == where] == [
            (3, 30, 60), (3, 30, 60), (3, 30, 60), (3, 60, 30)]  # alone, twice, turned
    rendered = lengths_of(Processor(), [("x", 3)], render=lambda row: (row[0] * row[1], []))
    assert rendered == [3]


def test_a_row_that_cannot_be_known_is_named():
    good = {"text": "hi"}
    with pytest.raises(ValueError, match="row 1: its length is not known: KeyError"):
        lengths_of(Processor(), [good, {"words": "hi"}])
    with pytest.raises(ValueError, match="row 1.*no decoder knows its format"):
        lengths_of(Processor(), [good, {"text": "I", "image": {"bytes": b"nothing"}}])


def test_lengths_by_what_collate_fn_makes_of_a_row_alone():
    def lengths_by(collate) -> CollatedLengths:
        rows = [{"n": 3}, {"n": 5}]
        return CollatedLengths(torch.utils.data.DataLoader(rows, collate_fn=collate))

    def padded(rows: list[dict]) -> dict:
        sizes = torch.tensor([[row["n"]] for row in rows])
        return {"input_ids": torch.ones(len(rows), 8), "attention_mask": torch.arange(8) < sizes}

    def in_pairs(rows: list[dict]) -> dict:  # as for DPO
        return padded([row for one in rows for row in (one, {"n": one["n"] - 2})])

    for collate in (padded, in_pairs):
        assert [lengths_by(collate)(i) for i in (0, 1)] == [3, 5]
    with pytest.raises(ValueError, match="row 0.*neither input_ids nor an attention_mask"):
        lengths_by(lambda rows: {"pixels": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="draws random numbers"):
        lengths_by(lambda rows: {"input_ids": torch.randint(0, 9, (len(rows), 4))})


def test_an_example_stays_as_it_is_when_its_length_is_found_out():
    """As TRL's collate functions put what stands for images into the messages that they get."""
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    def collate(rows: list[dict]) -> dict:
        for row in rows:
            row["messages"][0]["content"] += " and so on"
        return {"input_ids": torch.ones(1, len(rows[0]["messages"][0]["content"]))}

    example = {"messages": [{"content": "a b"}]}
    lengths = CollatedLengths(torch.utils.data.DataLoader(Stream(), collate_fn=collate))
    assert [lengths.of(example) for _ in range(2)] == [13, 13]
    assert example == {"messages": [{"content": "a b"}]}
