"""Compressed JSON lines and tars are streams with the rows of the files that they were made of."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats import find
from orchmllm.data.formats.conversation import media_of
from orchmllm.data.formats.open import DataSource, open_source
from orchmllm.data.formats.scanned import Scans
from orchmllm.data.media.medium import RowError, reading
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.stream import StreamDataset
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media, write_tar

KINDS = ("jsonl.gz", "jsonl.zst", "tar.gz", "tar.zst")


def pack(path: Path, suffix: str) -> Path:
    """In two parts one after the other, as tools that work in parallel write them."""
    data, out = path.read_bytes(), path.with_name(path.name + suffix)
    halves = data[: len(data) // 2], data[len(data) // 2:]
    pressed = [gzip.compress(half) if suffix == ".gz" else
               pa.Codec("zstd").compress(half, asbytes=True) for half in halves]
    out.write_bytes(b"".join(pressed))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    write_media(folder)
    for k in range(3):
        rows = [{**llava_row(*QUESTIONS[n]), "id": f"{k} {n}"} for n in range(12)]
        for row in rows:
            row["conversations"][1]["value"] += f" {row['id']}"
        write_jsonl(folder / f"{k}.jsonl", rows)
        write_tar(folder / f"{k}.tar", rows, folder)
        for path in (folder / f"{k}.jsonl", folder / f"{k}.tar"):
            for suffix in find.CURES:
                pack(path, suffix)
    return folder


def opened(path: Path, **keys) -> DataSource:
    return open_source(SourceConfig(path=str(path)), path.parent / "index", **keys)


def content(turns) -> list:
    """Of a conversation, media as their bytes."""
    out = [part for turn in turns for part in turn.parts if isinstance(part, str)]
    for medium in media_of(turns):
        with reading(medium) as file:
            out.append(file.read())
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_file_that_was_compressed(folder, kind):
    source, plain = opened(folder / f"0.{kind}", streaming=True), opened(
        folder / f"0.{kind}".rpartition(".")[0])
    [unit] = source.store.units(4)
    for start in (0, 7):
        found = list(unit.rows(start))
        assert [row.number for row in found] == [
            plain.store.place(i)[1] for i in range(start, len(plain))]
        assert [content(source.parse(row.read(), row.file)) for row in found] == [
            content(plain.conversation(i)) for i in range(start, len(plain))]
    with pytest.raises(ValueError, match=r"data.streaming, or decompress it \((gunzip|unzstd)\)"):
        opened(folder / f"0.{kind}")


@pytest.mark.parametrize("kind", ["jsonl.zst", "tar.gz"])
def test_an_epoch_has_every_row_once_and_goes_on_anywhere(folder, reader, kind):
    def stream() -> StreamDataset:
        return StreamDataset(
            [SourceConfig(path=str(folder / f"*.{kind}"))], num_shards=2, seed=0, window=5,
            index_dir=folder / "index", reader=reader)

    def answers(rows: StreamDataset, draws: range) -> list[str]:
        return [rows.conversation(i)[1].parts[0] for i in draws]

    every = answers(stream(), range(36))
    assert Counter(every).most_common(1)[0][1] == 1 and len(every) == 36
    assert answers(stream(), range(20, 36)) == every[20:]
    assert stream().fingerprint()["sources"][0]["rows"] == -1


def test_a_file_that_is_damaged_or_changes_ends_the_stream(folder, tmp_path):
    whole = (folder / "0.tar").read_bytes()
    members = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for name, data, text in (
            ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 50)[:-20], "damaged or truncated"),
            ("cut.tar.gz", gzip.compress(whole[:members]), "mark at the end of a tar is missing"),
            ("two.tar.gz", gzip.compress(whole + whole), "byte .*, and more follows"),
            ("bad.jsonl.zst", b"junk" * 50, "damaged or truncated")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"{name}: .*{text}") as error:
            [*find.CompressedRows(path, 1 << 20, Scans(tmp_path)).rows(0)]
        assert not isinstance(error.value, RowError)  # which would cost one row alone
    store = find.CompressedRows(path, 1 << 20, Scans(tmp_path))
    path.write_bytes(b"other")
    with pytest.raises(StorageError, match="has changed"):
        next(store.rows(0))


def test_a_line_that_is_too_long_costs_itself(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(
        b'{"text": "a"}\n\n{"text": "%s"}\n{"text": "b"}' % (b"x" * 300)))
    one, long, last = find.CompressedRows(path, 40, Scans(tmp_path)).rows(0)
    assert (one.number, long.number, last.number) == (1, 3, 4)
    assert (one.read(), last.read()) == ({"text": "a"}, {"text": "b"})
    with pytest.raises(RowError, match="more than max_row_bytes=40"):
        long.read()


def test_zstandard_needs_pyarrow(folder, monkeypatch):
    monkeypatch.setattr(find, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install '.\[parquet\]'"):
        opened(folder / "0.jsonl.zst", streaming=True)
