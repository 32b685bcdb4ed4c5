"""Rows with a single medium from webdataset tars and columns, and JSON rows of every odd kind: each
is an example, or an unusable row that is named; none ends a command or fills the memory."""

from __future__ import annotations

import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats import conversation
from orchmllm.data.formats.conversation import media_of
from orchmllm.data.formats.open import open_source
from orchmllm.data.formats.rows import parse_json
from orchmllm.data.media.medium import RowError
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.media_tensors import KINDS
from orchmllm.plan.layout import AUDIO, TEXT, VISION
from orchmllm.tools.data.command import main
from tests.lib import sources
from tests.lib.drawn import shared_reader, write_recipe
from tests.lib.formats import as_dataset, write_jsonl
from tests.lib.process import grown_kb
from tests.lib.ranks import run_ranks


def opened(path, folder) -> ConversationDataset:
    return sources.opened(path, shared_reader(), folder)


def chat(mark: str) -> list[dict]:
    return [{"from": "human", "value": f"{mark}What?"}, {"from": "gpt", "value": "low"}]


# members of a sample beside its key -> the modality of its one medium
SAMPLES = {
    "image + txt": ({"png": "0.png", "txt": "a red square."}, VISION),
    "image + caption": ({"jpg": "1.jpg", "caption": "blue"}, VISION),
    "image + json": ({"webp": "2.webp", "json": {"caption": "two"}}, VISION),
    "image + json text": ({"png": "3.png", "json": {"image": "3.png", "text": "one"}}, VISION),
    "named image + txt": ({"image.png": "0.png", "txt": "a red square."}, VISION),
    "wav + txt": ({"wav": "0.wav", "txt": "low"}, AUDIO),
    "flac + transcript": ({"flac": "1.flac", "transcript": "high"}, AUDIO),
    "wav + json": ({"wav": "0.wav", "json": {"text": "low"}}, AUDIO),
    "named audio + json": ({"audio.wav": "0.wav", "json": {"audio": "x", "text": "low"}}, AUDIO),
    "chat with an image": ({"png": "0.png", "json": {
        "image": "0.png", "conversations": chat("<image>")}}, VISION),
    "chat with images": ({"0.png": "0.png", "json": {
        "images": ["0.png"], "conversations": chat("<image>")}}, VISION),
    "chat with audio": ({"wav": "0.wav", "json": {
        "audio": "0.wav", "conversations": chat("<audio>")}}, AUDIO),
    "chat with sound": ({"wav": "0.wav", "json": {
        "sound": "0.wav", "conversations": chat("<audio>")}}, AUDIO),
    "chat that lists none": ({"wav": "0.wav", "json": {"messages": [
        {"role": "user", "content": "<audio>What?"}, {"role": "assistant", "content": "low"}]}},
        AUDIO),
}


def check_single(dataset: ConversationDataset, modality: int, content: bytes) -> None:
    for i in range(len(dataset)):
        assert dataset.problem(i) is None, dataset.problem(i)
        layout, example = dataset.layout(i), dataset.load(i)
        [segment] = np.flatnonzero(layout.modality != TEXT)
        assert layout.modality[segment] == modality and layout.num_targets > 0
        assert example.arguments == {segment: KINDS[modality].content}
        [(_, _, medium)] = dataset.media_of(i)
        if medium.data is None:
            with open(medium.path, "rb") as f:
                f.seek(medium.offset)
                assert f.read(medium.size) == content
        else:
            assert medium.data == content


@pytest.mark.parametrize("name", SAMPLES)
def test_a_tar_with_one_medium_a_row(folder, tmp_path, name):
    import webdataset

    members, modality = SAMPLES[name]
    names = {key: value for key, value in members.items() if (folder / str(value)).is_file()}
    sample = members | {key: (folder / value).read_bytes() for key, value in names.items()}
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        for k in range(3):
            tar.write({"__key__": f"{k:06d}", **sample})
    dataset = opened(tmp_path / "a.tar", folder)
    assert len(dataset) == 3
    [file] = names.values()
    check_single(dataset, modality, (folder / file).read_bytes())


@pytest.mark.parametrize("column, file, text", [
    ("image", "0.png", "caption"), ("image", "0.png", "text"), ("audio", "0.wav", "text")])
@pytest.mark.parametrize("kind", ["path", "list", "embedded", "values", "parquet"])
def test_a_column_with_one_medium_a_row(folder, column, file, text, kind):
    data = (folder / file).read_bytes()
    value = {"path": file, "list": [file], "embedded": {"bytes": data, "path": file},
             "values": {"bytes": list(data)}, "parquet": {"bytes": data, "path": file}}[kind]
    row = {column: value, text: "low"}
    if kind in ("embedded", "parquet"):
        path = folder / f"{column}-{text}.parquet"
        as_dataset([row], {column: column}).to_parquet(str(path))
    else:
        path = write_jsonl(folder / "column.jsonl", [row])
    dataset = opened(path, folder)
    assert dataset.problem(0) is None, dataset.problem(0)
    layout = dataset.layout(0)
    assert (layout.modality == (VISION if column == "image" else AUDIO)).sum() == 1
    assert len(dataset.load(0).arguments) == 1


ODD = {  # the value of "image" in a row -> what is said
    '{"bytes": [300]}': '"bytes" is a list', '{"bytes": [1.5]}': '"bytes" is a list',
    '{"bytes": [-1]}': '"bytes" is a list', '{"bytes": [[1], [2]]}': '"bytes" is a list',
    '{"bytes": ["a"]}': '"bytes" is a list', '{"bytes": [true]}': '"bytes" is a list',
    '{"bytes": 1000000000}': '"bytes" is 1000000000', '{"bytes": -1}': '"bytes" is -1',
    '{"bytes": 1000000000000000000}': '"bytes" is 1000000000000000000',
    '{"bytes": 100000000000000000000}': '"bytes" is 100000000000000000000',
    '{"bytes": 1.5}': '"bytes" is 1.5', '{"bytes": true}': '"bytes" is True',
    '{"bytes": "abc"}': '"bytes" is a str', '{"bytes": {"a": 1}}': '"bytes" is a dict',
    '{"bytes": []}': "the file is empty", '{"bytes": [1, 2, 3]}': "UnidentifiedImageError",
    '{"path": 7}': "a medium is 7", '{"path": "a\\ud800.png"}': "lone surrogates",
    "{}": "a medium is None", "7": "a medium is 7", "-1.5": "a medium is -1.5",
    "true": "a medium is True", "[[]]": "a medium is []", '[["0.png"]]': "a medium is ['0.png']",
    '"a\\ud800.png"': "lone surrogates", '"\\udc80.png"': "lone surrogates",
    '"a\\u0000.png"': "NUL", '"data:image/png;base64,\\ud800"': "not base64",
    '"' + "a/" * 3000 + '.png"': "", "[" * 900 + "]" * 900: "",
    "1" + "0" * 5000: "not JSON",
}


def test_odd_rows_are_named_by_lint_and_by_loading(folder, tmp_path, capsys):
    lines = [f'{{"image": {value}, "caption": "one"}}' for value in ODD]
    lines += ['{"image": "0.png", "caption": "one"}'] * 3
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines[-1:] + lines) + "\n")
    for k in range(5):
        (tmp_path / f"{k}.png").write_bytes((folder / "0.png").read_bytes())
    recipe = write_recipe(tmp_path, f"path: {path}")
    tracemalloc.start()
    code = main(["lint", recipe, "--workers", "1"])
    dataset = opened(path, folder)
    for i in range(len(dataset)):
        failures: list = []
        dataset.load(i, on_error=lambda *failure, found=failures: found.append(failure))
        assert bool(failures) == (1 <= i <= len(ODD)), i
        json.dumps(dataset.describe(i, 0), ensure_ascii=False).encode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == 1 and peak < 100 << 20
    said = capsys.readouterr().out
    said.encode()
    for k, (value, reason) in enumerate(ODD.items(), 2):
        [line] = [s for s in said.splitlines() if s.startswith(f"{path}, row {k}:")]
        assert reason in line and len(line) < 20_000, (value, line)
        assert "bytes" not in reason or ": image: " in line
    assert f"{len(ODD)} problem(s) in {len(ODD) + 4} rows" in said


@pytest.mark.parametrize("row", [
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
     "image": 10**20},
    {"instruction": 5, "output": "x"}, {"instruction": "a", "output": "b", "history": 7},
    {"instruction": "a", "output": "b", "history": [["a", {}]]},
    {"messages": [{"role": [], "content": "a"}]}, {"messages": [{"role": "user", "content": {}}]},
    {"messages": [{"role": "user", "content": [{"type": ["x"]}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 3}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {
        "data": 10**20}}]}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "\ud800", "content": "a"}]},
])
def test_odd_turns_are_unusable_rows(folder, tmp_path, row):
    fine = {"conversations": chat(""), "messages": [{"role": "user", "content": "a"}, {
        "role": "assistant", "content": "b"}], "instruction": "a", "output": "b"}
    first = {key: fine[key] for key in row if key in fine}
    write_jsonl(tmp_path / "a.jsonl", [first])
    with (tmp_path / "a.jsonl").open("a") as f:
        f.write(json.dumps(row) + "\n")
    dataset = opened(tmp_path / "a.jsonl", folder)
    assert dataset.problem(0) is None and dataset.problem(1) is not None
    str(dataset.problem(1)).encode()


@pytest.mark.parametrize("answer", [
    {"content": "\ud800"}, {"content": "b", "tool_calls": [{"function": {"name": "\ud800"}}]}])
def test_text_that_cannot_be_tokenized_is_an_unusable_row(folder, tmp_path, answer):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(RowError, match="cannot be written as UTF-8 .* remove the lone surrogate"):
        opened(tmp_path / "a.jsonl", folder).conversation(0)


def test_many_keys_are_checked_in_linear_time(monkeypatch):
    """200,000 keys: the quadratic check compares 2 * 10^10 of them, which takes many minutes."""
    keys = [f"k{k}" for k in range(200_000)]
    twice = "{" + ", ".join(f'"{key}": 1' for key in [*keys, keys[-1]]) + "}"
    with pytest.raises(ValueError, match="key 'k199999' is there twice"):
        parse_json(twice.encode())


def _tiff() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (60, 40)).save(file, "TIFF")
    return file.getvalue()


def _ogg() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(4000, 0.1), 16000, format="OGG", subtype="VORBIS")
    return file.getvalue()


MEMBERS = {  # suffix -> content, whether it is an image or a clip, what lint says of it
    "tif": (_tiff, "caption", ""), "oga": (_ogg, "asr", ""),
    "m4a": (lambda: b"\0\0\0\x20ftypM4A " + bytes(50), "asr",
            "truncated: its index (moov) is missing"),
    "mkv": (lambda: b"\x1a\x45\xdf\xa3" + bytes(50), "caption", "it cannot be read: "),
    "avi": (lambda: b"RIFF\0\0\0\0AVI LIST", "caption", "AVI is not read; convert it to MP4"),
    "heic": (lambda: b"\0\0\0\x18ftypheic" + bytes(50), "caption", "HEIC is not read; convert"),
    "png": (lambda: b"<!DOCTYPE html>", "caption", "a download has most likely failed"),
}


@pytest.mark.parametrize("suffix", MEMBERS)
def test_members_of_a_tar_are_read_or_named(tmp_path, capsys, suffix):
    """Some were once skipped in silence."""
    make, layout, reason = MEMBERS[suffix]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in ((f"a.{suffix}", make()), ("a.txt", b"one two")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    recipe = write_recipe(
        tmp_path, f"sources: [{{path: {tmp_path}/a.tar, row_format: {layout}}}]")
    assert main(["lint", recipe, "--workers", "1", "--decode"]) == bool(reason)
    out = capsys.readouterr().out
    assert ("row 1:" in out) == bool(reason) and reason in out
    assert not reason or f"a.{suffix}" in out


@pytest.mark.parametrize("part, path, data", [
    ({"type": "input_audio", "input_audio": {"url": "0.wav"}}, "0.wav", None),
    ({"type": "image", "source": {"type": "url", "url": "a.png"}}, "a.png", None),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAEC"}},
     "", b"\0\1\2")])
def test_a_part_is_the_file_or_the_content_that_it_has(folder, part, path, data):
    row = {"messages": [{"role": "user", "content": [part]},
                        {"role": "assistant", "content": "low"}]}
    [medium] = media_of(conversation.chat(row, MediaRoot(str(folder))))
    assert (medium.path, medium.data) == (str(folder / path) if path else "", data)


def kib_to_open(world, path: Path) -> int:
    def scan() -> None:
        source = open_source(SourceConfig(path=str(path)), path.parent / "index")
        assert len(source) == 250_000 and source.store.place(249_999)[1] == 3 * 249_999 + 1

    return grown_kb(scan)


def test_a_large_file_costs_little_memory(tmp_path):
    """Opening it reads every byte, of which none stays in memory."""
    line = json.dumps({"messages": [{"role": "user", "content": "x" * 300},
                                    {"role": "assistant", "content": "y"}]})
    (tmp_path / "a.jsonl").write_text(f"{line}\n\n  \n" * 250_000)
    [grown] = run_ranks(kib_to_open, 1, tmp_path / "a.jsonl")
    assert grown < 90 << 10, f"memory grew by {grown} kB"
