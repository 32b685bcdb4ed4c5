"""A data file that changes during a run ends it: rows are read where they were when it began."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from orchmllm.config.data import ColumnsConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats import rows, tables, tars
from orchmllm.data.formats.arrow import ParquetRows
from orchmllm.data.formats.conversation import media_of
from orchmllm.data.formats.open import index_path, open_source
from orchmllm.data.formats.scanned import Scans
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.media.headers import image_header
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import Storage
from orchmllm.tools.data.build_index import build_index
from orchmllm.trainer import Trainer
from tests.lib.drawn import drawn_model
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_tar
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.sources import opened
from tests.lib.synthetic import recipe

ROWS = [llava_row(*question) for question in QUESTIONS]


def replaced(path: Path) -> None:
    """The same rows in another order, in a file of the same size."""
    write_jsonl(path.with_name("new"), ROWS[::-1]).replace(path)


def overwritten(path: Path) -> None:
    write_jsonl(path, ROWS[::-1])


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


WAYS = {"replaced": replaced, "overwritten": overwritten, "appended": appended,
        "removed": Path.unlink}


@pytest.mark.parametrize("how", WAYS)
def test_a_row_of_a_changed_file_is_not_read(how, folder, reader, tmp_path):
    path = write_jsonl(folder / f"{how}.jsonl", ROWS)
    os.utime(path, (1, 1))
    dataset = opened(path, reader, tmp_path)
    assert dataset.layout(0).num_targets
    WAYS[how](path)
    said = ("it is no longer there" if how == "removed" else
            "its bytes and its time in ns were .* and 1000000000, and are ")
    with pytest.raises(StorageError, match=f"{path} has changed since this run opened it .{said}"):
        dataset.layout(1)
    # Of a medium that failed as the data went away: what is known without the row.
    assert dataset.describe(1, 0) == {
        "source": dataset.sources[0].name, "row": 2, "data_file": str(path), "file": str(path)}


def test_a_user_without_a_home_is_told_the_key(monkeypatch):
    """As in a container of any user id."""
    monkeypatch.setattr(Path, "expanduser", Mock(side_effect=RuntimeError("no home")))
    with pytest.raises(ValueError, match="data.index_dir: this user has no home folder, where ~"):
        index_path(None)
    with pytest.raises(ValueError, match="data.remote.cache: this user has no home folder"):
        Storage().cache  # noqa: B018


def test_a_table_that_changes_is_no_damaged_row(tmp_path):
    path, table = tmp_path / "a.parquet", pa.table({"n": list(range(2000))})
    pq.write_table(table, path, row_group_size=1000)
    os.utime(path, (1, 1))
    store = ParquetRows(path, 0, Scans(tmp_path / "cache"))
    assert store.row(0) == {"n": 0}
    pq.write_table(table, tmp_path / "new", row_group_size=1000)
    (tmp_path / "new").replace(path)
    with pytest.raises(StorageError, match="has changed since this run opened it"):
        store.row(1500)


def test_nor_is_a_medium_in_a_changed_tar(folder, reader, tmp_path):
    path, newer = (write_tar(tmp_path / name, rows, folder)
                   for name, rows in (("a.tar", ROWS), ("b.tar", ROWS[::-1])))
    dataset = opened(path, reader, tmp_path)
    image = next(m for m in media_of(dataset.conversation(0)) if m.path)
    assert image_header(image)
    newer.replace(path)
    for read in (lambda: image_header(image), lambda: dataset.conversation(1)):
        with pytest.raises(StorageError, match="a.tar has changed since this run opened it"):
            read()


def write_shard(path: Path, k: int, count: int) -> None:
    """Rows whose text says where they are."""
    texts = [f"{k} {i} größe" for i in range(count)]
    match path.suffix:
        case ".jsonl":
            write_jsonl(path, [{"text": text, "part": "b"} for text in texts])
        case ".csv":
            path.write_text("".join(f"{text}\n" for text in ["text", *texts]))
        case ".parquet":
            pq.write_table(pa.table({"text": texts}), path, row_group_size=2)
        case ".tar":
            with tarfile.open(path, "w") as tar:
                for i, text in enumerate(texts):
                    info = tarfile.TarInfo(f"ö{k}{i}.txt")
                    info.size = len(text.encode())
                    tar.addfile(info, io.BytesIO(text.encode()))


@pytest.mark.parametrize("kind, columns", [("jsonl", {}), ("jsonl", {"split": "part"}), ("csv", {}),
                                           ("parquet", {}), ("tar", {})])
def test_who_opens_many_files_again_scans_none(kind, columns, tmp_path, monkeypatch):
    """Until one of them is another, also while they are opened."""
    paths = [tmp_path / f"{k:02}.{kind}" for k in range(20)]
    for k, path in enumerate(paths):
        write_shard(path, k, k % 4 if kind == "jsonl" else 1 + k % 4)

    def texts(cache: str = "cache") -> list[str]:
        config = SourceConfig(path=f"{tmp_path}/*.{kind}", row_format="text", split=(
            "b" if columns else ""), columns=ColumnsConfig(**columns))
        store = open_source(config, tmp_path / cache).store
        assert [store.place(i)[1] for i in range(len(store))]
        return [store.row(i)["text"] for i in range(len(store))]

    first = texts()
    assert first == texts("other") and len(first) in (30, 50)
    scans = ((rows, "scan_lines"), (tables, "scan_lines"), (tars, "scan_tar"),
             (ParquetRows, "_groups"), (tables.PickedRows, "_scan"))
    with monkeypatch.context() as patch:
        for owner, name in scans:
            patch.setattr(owner, name, Mock(side_effect=AssertionError("scanned")))
        assert texts() == first
        write_shard(paths[7], 7, 9)
        with pytest.raises((AssertionError, ValueError), match="scanned"):
            texts()
    begin, end = (9, 12) if kind == "jsonl" else (16, 20)
    assert texts() == first[:begin] + [f"7 {i} größe" for i in range(9)] + first[end:]
    for part in (tmp_path / "cache").glob("all-*.0.npy"):  # as who removes old files does
        part.unlink()
    assert len(texts()) == len(first) - (end - begin) + 9
    found = Scans(tmp_path / "cache", paths)
    found("any", paths[1], lambda: [np.zeros(1)] * 2)
    write_shard(paths[0], 0, 8)
    data, *_ = found("any", paths[0], lambda: [np.zeros(1)] * 2)
    with pytest.raises(StorageError, match=f"00.{kind} has changed since"):
        data.open()


def test_what_cannot_be_kept_is_found_again(tmp_path):
    """On a disk without room, or in a folder of another user."""
    paths = [tmp_path / f"{k}.jsonl" for k in range(20)]
    for k, path in enumerate(paths):
        write_shard(path, k, 2)
    (tmp_path / "full").write_text("no folder")
    with pytest.warns(UserWarning, match="cannot be kept in .*full, so it is looked for at each"):
        source = open_source(SourceConfig(path=f"{tmp_path}/*.jsonl", row_format="text"),
                             tmp_path / "full")
    assert len(source) == 40


def run(world, path: str, reader: ProcessedReader, num_workers: int, model: ModelConfig) -> None:
    def dataset() -> ConversationDataset:
        return ConversationDataset(
            [SourceConfig(path=path)], reader=reader,
            index_dir=f"{path}-index{world.rank}")

    first = dataset()
    if num_workers:  # with an index they are the only ones that read rows
        build_index(first.sources[0], first.reader, Path(f"{path}-index{world.rank}"),
                    num_workers=1)
    trainer = Trainer(recipe(model=model), world, dataset=dataset())
    steps = StepLoader(trainer.dataset, GlobalSampler(range(len(first)), 4), trainer.orchestrator,
                       num_steps=9, prefetch=1, num_workers=num_workers, feed=trainer._feed)
    for step in steps:
        if step.index == 0 and world.rank == 1:
            appended(Path(path))


@pytest.mark.dist
@pytest.mark.parametrize("num_workers", [0, 1])
def test_all_ranks_end_with_the_same_error(folder, reader, num_workers):
    path = write_jsonl(folder / f"grows-{num_workers}.jsonl", ROWS)
    with pytest.raises(RankFailure) as failure:
        run_ranks(run, 2, str(path), reader, num_workers, drawn_model())
    (kind, text, _), other = failure.value.errors.values()
    assert kind == "RemoteError" and text == other[1]
    assert "has changed since this run opened it" in text and "start a new run" in text
