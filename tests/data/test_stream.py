"""Streams: an example is a function of its number, whoever asks for it and in which order."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.rows import RowStore
from orchmllm.data.stream import LogicalShard, StoreUnit, StreamDataset
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media, write_tar
from tests.lib.sources import same_example

ROWS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same 60 rows in 5 tars, 5 parquet files and one JSONL file."""
    import datasets

    folder = tmp_path_factory.mktemp("stream")
    write_media(folder)
    rows = [{**llava_row(*QUESTIONS[k % 12]), "id": str(k)} for k in range(ROWS)]
    for row in rows:
        row["conversations"][1]["value"] += f" {row['id']}"
    write_jsonl(folder / "rows.jsonl", rows)
    for k in range(5):
        part = rows[12 * k: 12 * k + 12]
        write_tar(folder / f"s-{k}.tar", part, folder)
        datasets.Dataset.from_list(part).to_parquet(str(folder / f"s-{k}.parquet"))
    return folder


PATHS = {"tar": "s-{0..4}.tar", "parquet": "s-*.parquet", "jsonl": "rows.jsonl"}


def stream(reader, folder, *names, num_shards=4, seed=0, weights=(1.0, 2.0)) -> StreamDataset:
    sources = [SourceConfig(path=str(folder / PATHS[name]), weight=w)
               for name, w in zip(names, weights, strict=False)]
    return StreamDataset(sources, num_shards=num_shards, seed=seed,
                         reader=reader, index_dir=folder / "index")


def answer(dataset, i) -> str:
    return dataset.conversation(i)[1].parts[0]


@pytest.mark.parametrize("name", ["tar", "parquet"])
def test_a_dataset_that_is_dropped_closes_its_files(name, folder, reader):
    def open_files() -> int:
        gc.collect()
        return len([entry for entry in Path("/proc/self/fd").iterdir()
                    if os.path.realpath(entry).startswith(f"{folder}/")])

    answer(stream(reader, folder, name), 0)
    before = open_files()
    for _ in range(5):
        dataset = stream(reader, folder, name)
        answer(dataset, 0)
        del dataset
    assert open_files() <= before


@pytest.mark.parametrize("name", PATHS)
def test_order_does_not_depend_on_who_reads(name, folder, reader):
    """Ranks that read every third example, one that resumes in the middle, one that goes back."""
    one, other = stream(reader, folder, name), stream(reader, folder, name, seed=1)
    assert len(one.fingerprint()["shards"][0]) == 4
    whole = [answer(one, i) for i in range(150)]
    assert whole[:ROWS] != whole[ROWS: 2 * ROWS]  # epochs
    assert whole[:ROWS] != [answer(other, i) for i in range(ROWS)]
    for world in (2, 3):
        for rank in range(world):
            mine = range(rank, 150, world)
            dataset = stream(reader, folder, name)
            assert [answer(dataset, i) for i in mine] == [whole[i] for i in mine]
    resumed = stream(reader, folder, name)
    assert [answer(resumed, i) for i in range(101, 150)] == whole[101:]
    assert [answer(resumed, i) for i in (3, 140, 7)] == [whole[i] for i in (3, 140, 7)]


def test_stream_and_map_style_agree_on_an_example(folder, reader):
    dataset = stream(reader, folder, "parquet")
    plain = ConversationDataset(folder / "rows.jsonl", reader=reader,
                                index_dir=folder / "index")
    assert dataset.fingerprint()["processor"] == reader.processor.digest
    for i in range(20):
        k = int(answer(dataset, i).rsplit(" ", 1)[1])
        example = dataset.load(i)
        assert same_example(example, plain.load(k)) and example.example_id == i
        found, wanted = dataset.layout(i).to_payload(), plain.layout(k).to_payload()
        assert np.array_equal(found[1:], wanted[1:])
        assert dataset.describe(i, 0)["row"] == k % 12 + 1
        assert dataset.describe(i, 0)["data_file"].endswith(f"s-{k // 12}.parquet")


def test_weights(folder, reader):
    dataset = stream(reader, folder, "tar", "jsonl")
    source = Counter(dataset.where(i)[0] for i in range(1000))
    assert source == {0: 333, 1: 667}


@pytest.mark.parametrize("counts, num_shards", [([200] + [20] * 15, 16), ([3000, 1, 2998], 3)])
def test_the_rows_of_a_long_file_are_spread_over_the_epoch(counts, num_shards, reader,
                                                                  tmp_path):
    for k, count in enumerate(counts):
        write_jsonl(tmp_path / f"{k:03d}.jsonl", [llava_row([("text", "?")], f"{k}")] * count)
    dataset = StreamDataset([SourceConfig(path=str(tmp_path / "*.jsonl"))], num_shards=num_shards,
                            seed=0, reader=reader, index_dir=tmp_path)
    half = Counter(answer(dataset, i) for i in range(sum(counts) // 2))
    assert abs(half["0"] - counts[0] / 2) <= 1 + len(set(counts)) * num_shards


class Numbers(RowStore):
    is_open = True

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def row(self, i: int) -> dict:
        return {"i": i}

    def place(self, i: int) -> tuple[str, int]:
        return "x", i + 1


def test_windows_shuffle_within_themselves():
    shard = LogicalShard([StoreUnit(Numbers(1000))], [5])
    drawn = [shard.get(epoch, k).number - 1 for epoch in range(2) for k in range(1000)]
    for start in (0, 256, 512):
        window = drawn[start: start + 256]
        assert sorted(window) == list(range(start, start + 256)) and window != sorted(window)
    assert sorted(drawn[:1000]) == sorted(drawn[1000:]) == list(range(1000))
    parts = [StoreUnit(Numbers(10), k, 3) for k in range(3)]
    assert sorted(f.number for p in parts for f in p.rows(0)) == list(range(1, 11))
    assert LogicalShard([StoreUnit(Numbers(0))], [5]).find(0, 0)[0] == []
    assert np.array_equal([p.num_rows for p in parts], [4, 3, 3])
