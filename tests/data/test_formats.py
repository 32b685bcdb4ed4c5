"""Every format gives the same examples; the detector says what it chose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.open import check_source, open_source
from orchmllm.data.formats.row_formats import FORMATS as ROW_FORMATS
from orchmllm.data.formats.scanned import Scans
from orchmllm.data.media.medium import RowError, reading
from orchmllm.plan.layout import AUDIO, TEXT, VISION
from tests.lib.formats import FORMATS, QUESTIONS, llava_row, write_jsonl
from tests.lib.sources import opened, same_example


def content(medium) -> bytes:
    with reading(medium) as file:
        return Path(file).read_bytes() if isinstance(file, str) else file.read()


def canonical(dataset, i):
    return [(t.role, t.supervised,
             [p if isinstance(p, str) else (p.modality, content(p)) for p in t.parts if p])
            for t in dataset.conversation(i)]


@pytest.fixture(scope="module")
def reference(folder, reader):
    path = write_jsonl(folder / "reference.jsonl", [llava_row(*q) for q in QUESTIONS])
    return opened(path, reader, folder)


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_give_the_same_examples(name, folder, reader, reference):
    write, said = FORMATS[name]
    dataset = opened(write(folder), reader, folder)
    assert said in str(dataset.sources[0])
    assert len(dataset) == len(QUESTIONS) == 12
    same_examples(dataset, reference)


def same_examples(dataset, reference) -> None:
    """The same tokens, spans, lengths and media. A webdataset row has its media after the text:
    same order per modality."""
    for i in range(len(reference)):
        assert canonical(dataset, i) == canonical(reference, i)
        a, b = dataset.layout(i), reference.layout(i)
        for field in ("modality", "rows", "attn_len", "num_tokens", "grid"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        assert a.num_targets == b.num_targets > 0
        assert same_example(dataset.load(i), reference.load(i))


def test_the_reference_is_what_was_written(reference):
    for i, (parts, answer) in enumerate(QUESTIONS):
        user, assistant = reference.conversation(i)
        kinds = [{VISION: "image", AUDIO: "audio"}[p.modality] if not isinstance(p, str) else "text"
                 for p in user.parts]
        assert kinds == [kind for kind, value in parts if value]
        assert assistant.parts == (answer,) and assistant.supervised and not user.supervised
        assert [m for m in reference.layout(i).modality if m != TEXT] == [
            {"image": VISION, "audio": AUDIO}[k] for k in kinds if k != "text"]


def test_an_unknown_layout_is_refused_in_a_line_with_its_keys(tmp_path, reader):
    """Which line reads such rows: tests/data/test_presets.py."""
    write_jsonl(tmp_path / "a.jsonl", [{"picture": "a.png", "words": 7}])
    with pytest.raises(ValueError, match="keys picture, words.*docs/formats.md") as error:
        opened(tmp_path / "a.jsonl", reader, tmp_path)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name, text", [
    ("none.jsonl", "no such file or folder"), ("a.csv", "the last line has no end"),
    ("a.tar.gz", "set data.streaming, or decompress it"), ("a.csv.gz", "gzip is not read"),
    ("clip.mp4", ".mp4 is not read"), ("bad.parquet", "not parquet that can be read"),
    ("bad.arrow", "not arrow that can be read"), ("bad.tar", "not an uncompressed tar"),
    ("cut.json", "element 2 .*not JSON"), ("empty", "nothing to read; looked for"),
    ("inside", r"inside/x/a.json is further inside: .* such as .*/inside/\*/\*\.json$"),
    ("two", "no row that can be read"), ("s-{0..2}.tar", "s-0.tar is missing")])
def test_places_that_cannot_be_read(name, text, tmp_path, reader):
    for file in ("a.csv", "a.tar.gz", "a.csv.gz", "clip.mp4", "bad.parquet", "bad.arrow",
                 "bad.tar"):
        (tmp_path / file).write_bytes(b"junk" * 200)
    (tmp_path / "cut.json").write_text('[{"conversations": []}, {"conv')
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "inside" / "x").mkdir(parents=True)
    for file in ("two/a.json", "two/b.json", "inside/x/a.json"):
        (tmp_path / file).write_text("[]")
    with pytest.raises(ValueError, match=text):
        opened(tmp_path / name, reader, tmp_path)


def test_json_array_spans_blocks(tmp_path, monkeypatch):
    from orchmllm.data.formats import rows, scans

    monkeypatch.setattr(scans, "_BLOCK", 50)
    items = [{"k": "ü" * n, "n": [n, {"x": "]},{"}]} for n in range(40)]
    for indent, bom in ((None, ""), (2, "\ufeff")):
        path = tmp_path / "a.json"
        path.write_text(bom + json.dumps(items, ensure_ascii=False, indent=indent),
                        encoding="utf-8")
        store = rows.JsonRows(path, 1 << 20, Scans(tmp_path))
        assert [store.row(i) for i in range(len(store))] == items


def test_videos_may_be_lists_of_frames(folder, reader):
    rows = [
        {"messages": [{"role": "user", "content": "<video>What moves?"},
                      {"role": "assistant", "content": "x"}], "videos": [["0.png", "3.png"]]},
        {"messages": [{"role": "user", "content": [
            {"type": "video", "video": ["0.png", "3.png"]}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": "<video>What moves?"},
                      {"role": "assistant", "content": "x"}], "videos": ["clip.avi"]},
    ]
    dataset = opened(write_jsonl(folder / "video.jsonl", rows), reader, folder)
    assert [int((dataset.layout(i).modality == VISION).sum()) for i in range(3)] == [2, 2, 0]
    assert "AVI is not read; convert it to MP4" in str(dataset.problem(2))


def test_named_format_is_taken(folder, reader):
    rows = [{"image": "0.png", "audio": "0.wav", "text": "words"}]
    path = write_jsonl(folder / "both.jsonl", rows)
    assert opened(path, reader, folder).sources[0].layout == "asr"
    dataset = opened(path, reader, folder, row_format="caption", prompt="Say it.")
    assert dataset.sources[0].layout == "caption"
    question, answer = dataset.conversation(0)
    assert question.parts[1] == "\nSay it." and answer.parts == ("words",)
    path = write_jsonl(folder / "words.jsonl", [{"image": "0.png", "text": "words"}])
    said = opened(path, reader, folder, row_format="asr").problem(0)
    # and not read as a caption
    assert "there is nothing in 'audios, audio, sound | file' (audios) of image, text" in str(said)


@pytest.mark.parametrize("check", [check_source, lambda c: open_source(c, Path(c.path).parent)])
def test_a_format_that_is_not_there_is_refused_with_those_that_are(folder, check):
    path = write_jsonl(folder / "any.jsonl", [llava_row(*QUESTIONS[0])])
    with pytest.raises(ValueError) as error:
        check(SourceConfig(path=str(path), row_format="llva"))
    assert str(error.value) == (f"{path}: row_format is 'llva': did you mean 'llava'? choose one "
                                f"of auto, {', '.join(ROW_FORMATS)}")


def test_media_root(folder, reader, tmp_path):
    (tmp_path / "lists").mkdir()
    rows = [llava_row([("image", name), ("text", "?")], "x")
            for name in ("0.png", str(folder / "0.png"), f"file://{folder}/0.png", "/etc/hosts")]
    path = write_jsonl(tmp_path / "lists" / "a.jsonl", rows)
    dataset = opened(path, reader, tmp_path, media_root=str(folder))
    assert [dataset.problem(i) is None for i in range(4)] == [True, True, True, False]
    undeclared = opened(path, reader, tmp_path)
    assert all(undeclared.problem(i) is not None for i in range(4))
    with pytest.raises(RowError, match="is absolute and no media_root is declared"):
        undeclared.conversation(1)
    with pytest.raises(ValueError, match="is not a folder"):
        open_source(SourceConfig(path=str(path), media_root=str(tmp_path / "no")), tmp_path)


def test_rows_of_several_layouts_are_each_read_by_their_own(reader, folder):
    """Also those after the first rows, which are looked at."""
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
    path = write_jsonl(folder / "mixed.jsonl", [
        *[llava_row(*q) for q in QUESTIONS] * 3, {"messages": turns},
        {"instruction": "What?", "output": "red"}, {"image": "0.png", "caption": "red"},
        {"nothing": "known"}])
    dataset = opened(path, reader, folder)
    assert str(dataset.sources[0]).endswith(f"40 rows of llava in JSONL ({path})")
    assert canonical(dataset, 36) == canonical(dataset, 37)
    assert dataset.conversation(38)[0].parts[1] == "\nDescribe the image."
    assert [i for i in range(40) if dataset.problem(i)] == [39]
    write_jsonl(path, [{"messages": turns}] * 2)
    alone = opened(path, reader, folder, row_format="llava")
    assert alone.problem(0)  # one that was named is the only one
