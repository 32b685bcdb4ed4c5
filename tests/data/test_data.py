"""Tokenization, the conversation dataset and the demo corpus that they read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from orchmllm.batch import IGNORE_INDEX
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.layout import AUDIO, TEXT, VISION
from tests.lib.commands import make_demo_data
from tests.lib.drawn import reader_of
from tests.lib.sources import same_example


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_demo_data(tmp_path_factory.mktemp("demo"), 40)


@pytest.fixture(scope="module")
def dataset(corpus):
    return ConversationDataset(corpus, reader=reader_of(corpus / "model"),
                               index_dir=corpus / "index")


@pytest.fixture(scope="module")
def tokenizer(dataset):
    return dataset.tokenizer


@pytest.fixture
def write_rows(tmp_path, reader):
    """Writes a JSONL file of rows with one image, one clip and the given changes; opens it."""
    Image.new("RGB", (60, 40), "red").save(tmp_path / "a.png")
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(4000) / 9), 8000)

    def write(**changes):
        row = {"id": "0", "images": ["a.png"], "audios": ["a.wav"], "conversations": [
            {"from": "human", "value": "<image>\nred? <audio>"}, {"from": "gpt", "value": "yes."}]}
        (tmp_path / "data.jsonl").write_text("\n" + json.dumps(row | changes) + "\n")
        return ConversationDataset(tmp_path, reader=reader, index_dir=tmp_path / "index")

    return write


# Demo corpus


def test_same_seed_gives_same_bytes(corpus, tmp_path):
    def content(folder):
        return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    first = content(corpus)
    assert content(make_demo_data(tmp_path / "again", 40)) == first
    assert content(make_demo_data(tmp_path / "other", 40, seed=1)) != first


def test_corpus_holds_every_kind(corpus, dataset, tokenizer):
    kinds = {tuple(sorted({m for _, m, _ in dataset.media_of(i)})) for i in range(len(dataset))}
    assert kinds == {(), (VISION,), (AUDIO,), (VISION, AUDIO)}
    media = [dataset.media_of(i) for i in range(len(dataset))]
    assert any(sum(m == VISION for _, m, _ in found) > 1 for found in media)
    suffixes = {Path(m.path).suffix for found in media for _, _, m in found}
    assert suffixes == {".jpg", ".png", ".wav", ".flac"}
    assert tokenizer.vocab_size <= 512
    rates = {soundfile.info(p).samplerate for p in (corpus / "audio").iterdir()}
    assert 16000 in rates and len(rates) > 1


# Text


def test_labels_are_answers(dataset, tokenizer):
    for i in range(len(dataset)):
        layout, example = dataset.layout(i), dataset.load(i, segments=())
        tokens, labels = example.input_ids, example.labels
        assert example.parts == {} and tokens.dtype == labels.dtype == torch.int64
        assert len(tokens) == len(labels) == layout.num_tokens.sum()
        learnt = labels != IGNORE_INDEX
        assert learnt.sum() == layout.num_targets and not learnt[0]
        assert torch.equal(labels[learnt], tokens[learnt])
        answers = [t.parts[0] for t in dataset.conversation(i) if t.role == "assistant"]
        expected = "".join(answer + "<|im_end|>" for answer in answers)
        assert tokenizer.decode(labels[learnt]) == expected
        modality = np.repeat(layout.modality, layout.num_tokens)
        for kind, token in dataset.reader.processor.token_ids.items():
            assert np.array_equal(tokens == token, modality == kind)


def test_chatml(tokenizer):
    image, clip = Medium(VISION, "a.png"), Medium(AUDIO, "a.wav")
    turns = [Turn("user", (image, "\nWhich colour?", clip, image), False),
             Turn("assistant", ("red.",), True)]

    def written(turns: list[Turn]) -> str:
        return "".join(f"({span.name})" if isinstance(span, Medium) else span.text
                       for span in tokenizer.spans(turns))

    text = ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            "(a.png)\nWhich colour?(a.wav)(a.png)<|im_end|>\n<|im_start|>assistant\nred."
            "<|im_end|>\n")
    assert written(turns) == text
    assert written([Turn("system", ("Be brief.",), False), *turns]) == text.replace(
        "You are a helpful assistant.", "Be brief.")


def test_tokenizer_file_is_checked(tmp_path, corpus):
    with pytest.raises(ValueError, match="no such tokenizer file"):
        ChatTokenizer(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="t.json: not a tokenizer.json"):
        ChatTokenizer(tmp_path / "t.json")
    content = (corpus / "tokenizer.json").read_text().replace("<|im_end|>", "<|over|>")
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=r"t.json: the special token <\|im_end\|> is missing; use"):
        ChatTokenizer(tmp_path / "t.json")


# Dataset


def test_parts_of_an_example(write_rows):
    dataset = write_rows()
    assert len(dataset) == 1
    assert [m for _, m, _ in dataset.media_of(0)] == [VISION, AUDIO]
    assert list(dataset.layout(0).modality) == [TEXT, VISION, TEXT, AUDIO, TEXT]
    part = dataset.load(0, text=False, segments=[3])
    assert part.input_ids is None and part.labels is None and list(part.parts) == [3]
    assert torch.equal(part.parts[3]["input_features"], dataset.load(0).media["input_features"])


def test_layout_decodes_nothing(write_rows, monkeypatch):
    dataset = write_rows()
    monkeypatch.setattr(Image.Image, "convert", None)
    monkeypatch.setattr(soundfile, "read", None)
    assert dataset.layout(0) is dataset.layout(0)


@pytest.mark.parametrize("changes, message", [
    ({"audios": ["a.wav"] * 2}, '1 <audio> placeholders but 2 paths in "audios"; write'),
    ({"images": ["b/../../a.png"]}, "leaves the folder"),
    ({"images": ["a.avi"]}, "convert it to MP4"),
])
def test_malformed_rows_are_stand_ins(write_rows, changes, message):
    """They are planned as one token that is not learnt, and reported once, with the text."""
    dataset = write_rows(**changes)
    layout = dataset.layout(0)
    assert layout.num_tokens.tolist() == [1] and layout.num_targets == 0
    with pytest.raises(MediaError, match=message):
        dataset.load(0)
    errors = []
    example = dataset.load(0, on_error=lambda *args: errors.append(args))
    assert [k for k, _ in errors] == [0] and message in str(errors[0][1])
    assert example.labels.tolist() == [IGNORE_INDEX]
    assert dataset.load(0, text=False, segments=()).parts == {}
    line = dataset.describe(0, 0)
    assert line["row"] == 2 and line["source"] and line["file"]


def test_symbolic_links_may_stay_in_the_folder(write_rows, tmp_path):
    (tmp_path / "near.png").symlink_to(tmp_path / "a.png")
    write_rows(images=["near.png"]).load(0)


def test_failed_medium(write_rows, tmp_path):
    dataset = write_rows()
    whole = dataset.load(0)
    (tmp_path / "a.png").write_bytes(b"junk")
    with pytest.raises(MediaError) as caught:
        dataset.load(0)
    assert caught.value.segment == 1 and "a.png (segment 1)" in str(caught.value)
    errors = []
    example = dataset.load(0, on_error=lambda *args: errors.append(args))
    assert [segment for segment, _ in errors] == [1]
    assert dataset.describe(0, 1)["file"] == "a.png"
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    assert same_example(replace(dataset.load(0), labels=example.labels), example)  # black
    assert (example.labels == IGNORE_INDEX).all()
    assert torch.equal(example.media["input_features"], whole.media["input_features"])
    Image.new("RGB", (200, 40)).save(tmp_path / "a.png")
    with pytest.raises(MediaError, match="the file has changed"):
        dataset.load(0)
    (tmp_path / "a.png").unlink()
    with pytest.raises(MediaError, match="missing"):
        write_rows(images=["gone.png"]).load(0)


def test_split(dataset):
    assert dataset.split(8) == (range(32), range(32, 40))
    assert dataset.split(0) == (range(40), range(40, 40))
    for count in (-1, 40):
        with pytest.raises(ValueError, match=f"data.num_validation = {count}: the data have 40"):
            dataset.split(count)
