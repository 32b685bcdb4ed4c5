"""Examples of a model of transformers: a medium's tensors are those of the whole example, and what
is not asked for is not read; text is encoded once, and what is learnt of it, or refused, is told by
where its tokens are."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import TokenizersBackend

from orchmllm.data.media.shapes import Size
from orchmllm.data.media_tensors import parts
from orchmllm.data.text.encoded import Encoded
from orchmllm.data.text.processor import Processor
from orchmllm.data.text.templates import ChatTemplate
from orchmllm.data.text.tokenizer import ChatTokenizer
from tests.data.test_processed import drawn, edited, indexed, opened, talk, write_rows
from tests.lib.processors import write_processor
from tests.lib.sources import same_tensors

OF_IMAGES = (
    "aya_vision", "gemma3", "gemma3_pan_and_scan", "glm4v", "idefics3", "internvl", "llava",
    "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
FAST = ("llava_onevision", "idefics3")


def cut(example) -> dict[int, dict]:
    """By segment, from the tensors of the whole example."""
    at = np.flatnonzero(example.lengths.modality == 1)
    return dict(zip(at.tolist(), parts(example.media, example.lengths.grid[at]), strict=True))


@pytest.mark.parametrize("family", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OF_IMAGES])
def test_a_medium_s_tensors_are_bit_equal_to_its_part_of_the_whole_example(tmp_path, family):
    """Also where the files of the other images are gone."""
    sizes = [*drawn(4, 3, 5), [(40, 60)], [], [(33, 90), (120, 40), (64, 64)]]
    write_rows(tmp_path, family, sizes)
    rows = opened(tmp_path, family)
    whole = [rows.load(i) for i in range(len(sizes))]
    files = {path: path.read_bytes() for path in tmp_path.glob("*.png")}
    for path in files:
        path.unlink()
    for i, example in enumerate(whole):
        wanted = cut(example)
        assert len(wanted) == len(sizes[i])
        text = rows.load(i, segments=[])
        assert text.parts == {} and list(text.arguments) == list(wanted)
        assert torch.equal(text.input_ids, example.input_ids)
        assert torch.equal(text.labels, example.labels)
        assert same_tensors(text.media, {n: v for n, v in example.media.items()
                                         if not n.startswith("pixel_")})
        for m, (segment, tensors) in enumerate(wanted.items()):
            path = tmp_path / f"{i}_{m}.png"
            path.write_bytes(files[path])
            part = rows.load(i, text=False, segments=[segment])
            assert part.input_ids is None and part.labels is None
            assert list(part.parts) == [segment] and same_tensors(part.parts[segment], tensors)
            path.unlink()


def test_lengths_of_a_large_image_take_no_memory_for_its_patches(tmp_path):
    """Which would have 6 values for each pixel."""
    processor = Processor(write_processor("qwen2_5_vl", tmp_path), {
        "size": {"shortest_edge": 1 << 12, "longest_edge": 1 << 24}})
    image = Size(2800, 1400)
    tracemalloc.start()
    try:
        [[(t, h, w)]] = processor.calls.expanded((image,)).grids
        assert (t, h * processor.patch, w * processor.patch) == (1, *image[:2])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("family", [
    "qwen3_vl", pytest.param("idefics3", marks=pytest.mark.slow)])
def test_a_row_is_rendered_and_encoded_once(tmp_path, monkeypatch, family):
    """Loading what was measured here does neither; the parts of idefics3's processor need its
    tokenizer."""
    write_rows(tmp_path, family, [[(40, 60)], [(90, 30), (50, 50)], []])
    rows, known = opened(tmp_path), indexed(tmp_path)
    calls: Counter = Counter()

    def count(where: type, name: str) -> None:
        was = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, **keys: (
            calls.update([name]), was(*args, **keys))[1])

    count(Encoded, "of")
    count(ChatTemplate, "spans")

    def asked(call) -> tuple[int, int]:
        calls.clear()
        for i in range(3):
            call(i)
        return calls["spans"], calls["of"]

    assert asked(rows.layout) == (3, 3)
    assert asked(rows.load) == ((0, 0) if family == "qwen3_vl" else (0, 3))
    assert asked(known.load) == (3, 3)
    for i in range(3):
        assert torch.equal(rows.load(i).input_ids, known.load(i).input_ids)
        assert torch.equal(rows.load(i).labels, known.load(i).labels)


def test_a_special_token_that_data_and_template_write_together_is_refused(tmp_path):
    write_rows(tmp_path, "llava", [[], []])
    path = tmp_path / "chat_template.jinja"
    text = path.read_text()
    for written in ("p['text']", "m['content']"):
        text = text.replace(f"{{{{ {written} }}}}", f"{{{{ '<' + {written} }}}}")
    path.write_text(text)
    edited(tmp_path, 0, messages=talk([{"type": "text", "text": "end> it"}], "a"))
    rows = opened(tmp_path)
    assert "special token <end>" in str(rows.problem(0)) and rows.problem(1) is None


def test_space_that_a_tokenizer_leaves_out_of_its_tokens_is_learnt(tmp_path):
    """Its post-processor cuts space off the characters of tokens, and not off the ids."""
    write_rows(tmp_path, "llava", [[], []])
    edited(tmp_path, 0, messages=talk([{"type": "text", "text": "a"}], "  the\n red  "))
    wanted = opened(tmp_path).load(0)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True), tokenizer.post_processor])
    tokenizer.save(str(path))
    found = opened(tmp_path).load(0)
    assert torch.equal(found.input_ids, wanted.input_ids)
    assert torch.equal(found.labels, wanted.labels)


def test_a_tokenizer_that_is_not_that_of_its_file_is_told_of(tmp_path, monkeypatch):
    """Its ids, or that it does not read a text to the end."""
    write_rows(tmp_path, "llava", [[]])
    was = TokenizersBackend._encode_plus
    with monkeypatch.context() as patch:
        patch.setattr(TokenizersBackend, "_encode_plus", lambda self, text, *args, **keys: was(
            self, text, *args, **{**keys, "truncation_strategy": keys["truncation_strategy"].
                                  __class__("longest_first"), "max_length": 26}))
        with pytest.raises(ValueError, match="leaves out the end"):
            opened(tmp_path)
    wanted = ChatTokenizer.encode_spans
    monkeypatch.setattr(ChatTokenizer, "encode_spans", lambda self, spans: tuple(
        value[::-1] for value in wanted(self, spans)))
    with pytest.raises(ValueError, match="other ids for it than tokenizer.json"):
        opened(tmp_path)
