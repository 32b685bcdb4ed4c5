"""An epoch of a stream gives each row once, whatever the files, ranks and shards are, and before
and after a resume on another number of ranks."""

from __future__ import annotations

import shutil
import threading
import time
import weakref
from collections import Counter

import datasets
import pytest

from orchmllm.config.recipe import DataConfig, SourceConfig
from orchmllm.data import stream
from orchmllm.data.formats.arrow import ParquetRows
from orchmllm.data.formats.rows import JsonRows
from orchmllm.data.sampler import StreamSampler, make_sampler
from orchmllm.data.stream import StreamDataset
from orchmllm.runtime.resumable import check_resumable
from tests.lib.formats import llava_row, write_jsonl, write_tar
from tests.lib.resume import settings
from tests.lib.servers import storage
from tests.lib.synthetic import recipe

EPOCHS = 3


def write_rows(folder, kind: str, sizes: list[int], name: str) -> SourceConfig:
    """Files of so many rows, whose answers are "name file row"; longer texts in later files."""
    for k, count in enumerate(sizes):
        rows = [llava_row([("text", "?" * (1 + 50 * k))], f"{name} {k} {i}") for i in range(count)]
        path = folder / f"{name}-{k:03d}.{'jsonl' if kind == 'hf' else kind}"
        if kind == "tar":
            write_tar(path, rows, folder)
        elif kind == "parquet":
            table = datasets.Dataset.from_list(rows or [llava_row([("text", "?")], "")])
            table.select(range(count)).to_parquet(str(path), batch_size=7)
        else:
            write_jsonl(path, rows)
    return f"{name}-{{000..{len(sizes) - 1:03d}}}.{kind}"


def opened(configs, reader, folder, web=None, **keys) -> StreamDataset:
    where = storage(folder / "cache", web.url) if web else storage(folder / "cache")
    return StreamDataset(configs, seed=0, reader=reader, index_dir=folder / "index",
                         storage=where, **keys)


def answer(dataset, i: int) -> str:
    return dataset.conversation(i)[1].parts[0]


@pytest.mark.parametrize("kind, sizes, num_shards, window, batch, ranks, then", [
    ("jsonl", [5, 0, 1, 9], 2, 4, 4, 2, 3),
    ("jsonl", [1], 4, 256, 5, 3, 2),
    ("jsonl", [40] + [3] * 7, 4, 256, 6, 2, 3),
    ("jsonl", [1300, 1, 900], 3, 256, 50, 3, 2),
    ("tar", [1, 30], 16, 2, 5, 5, 2),
    ("parquet", [20, 0, 1, 8], 2, 256, 9, 2, 3),
    ("https jsonl", [30, 1, 5, 9], 4, 4, 4, 2, 3),
    ("https jsonl", [40, 0, 0, 3], 2, 256, 5, 1, 3),
    ("https jsonl", [300, 25, 280], 1, 256, 60, 2, 5),
    ("https tar", [22, 3, 0, 30, 1], 5, 256, 6, 2, 3),
    ("hf", [7, 1, 12], 64, 4, 4, 2, 3),
    ("hf", [130, 0, 2], 2, 32, 20, 3, 2),
])
def test_every_row_once_an_epoch(kind, sizes, num_shards, window, batch, ranks, then, reader,
                                 web, tmp_path):
    """Each rank knows what it has read alone. The second rank count starts with nothing on disk."""
    name = write_rows(web.folder, kind.split()[-1], sizes, "a")
    path = f"{web.url}/{name}" if kind.startswith("https") else str(web.folder / name)
    source = SourceConfig(path=f"hf:{web.folder}" if kind == "hf" else path)
    num_steps = -(-EPOCHS * sum(sizes) // batch)
    drawn = {}
    for num_ranks, steps in ((ranks, range(num_steps // 2)),
                             (then, range(num_steps // 2, num_steps))):
        for rank in range(num_ranks):
            folder = tmp_path / f"{num_ranks} {rank}"
            dataset = opened([source], reader, folder, web, num_shards=num_shards, window=window)
            sampler = StreamSampler(batch, dataset.near)
            for step in steps:
                for i in sampler.batch(step)[sampler.shares(step, num_ranks)[rank]].tolist():
                    assert i not in drawn
                    drawn[i] = answer(dataset, i)
    rows = [f"a {k} {i}" for k, count in enumerate(sizes) for i in range(count)]
    for epoch in range(EPOCHS):
        draws = range(epoch * len(rows), (epoch + 1) * len(rows))
        assert Counter(drawn[i] for i in draws) == Counter(rows)


def test_a_rank_reads_few_files(reader, tmp_path, monkeypatch):
    """Of two sources, and as much of each as of one in a single file, on four ranks, whose steps
    are the same as on one."""
    sizes = {"a": [20, 30] * 8, "b": [16] * 8, "c": [200]}
    configs = [SourceConfig(path=str(tmp_path / write_rows(
        tmp_path, "jsonl" if name == "c" else "parquet", sizes[name], name))) for name in sizes]
    decoded, batches, steps = Counter(), ParquetRows.batches, range(32)
    monkeypatch.setattr(ParquetRows, "batches", lambda self, group: (
        decoded.update([rank]) or batch for batch in batches(self, group)))
    for rank, num_ranks in ((0, 1), *((rank, 4) for rank in range(4))):
        decoded[rank], seen = 0, []
        dataset = opened(configs, reader, tmp_path, num_shards=16, window=8)
        sampler = make_sampler(dataset, range(0), 24, seed=0)
        for step in steps:
            [*draws] = sampler.batch(step)[sampler.shares(step, num_ranks)[rank]].tolist()
            seen += [answer(dataset, i)[0] for i in draws]
            assert num_ranks > 1 or sorted(draws) == [*range(24 * step, 24 * step + 24)]
        if num_ranks == 1:
            alone = decoded[rank]
        else:  # it is 0.9 and more where ranks take draws as they come
            assert decoded[rank] < 0.6 * alone, (rank, decoded[rank], alone)
            assert 0.2 < min(Counter(seen).values()) / len(seen) < 0.4, Counter(seen)


def test_sources_have_epochs_of_their_own(reader, web, tmp_path):
    """A source that is counted while it is read beside one that is counted before."""
    sizes = {"a": [25, 0, 4], "b": [3, 8]}
    names = {name: write_rows(web.folder, "jsonl", sizes[name], name) for name in sizes}
    dataset = opened([SourceConfig(path=f"{web.url}/{names['a']}", weight=3.0),
                      SourceConfig(path=str(web.folder / names["b"]), weight=1.0)],
                     reader, tmp_path, web, num_shards=2, window=4)
    said = [answer(dataset, i) for i in range(200)]
    for name, counts in sizes.items():
        mine = [one for one in said if one[0] == name]
        rows = [f"{name} {k} {i}" for k, count in enumerate(counts) for i in range(count)]
        assert len(mine) > 3 * len(rows)
        for start in range(0, len(mine) - len(rows), len(rows)):
            assert Counter(mine[start: start + len(rows)]) == Counter(rows)
    with pytest.raises(ValueError, match="c-000.jsonl: it is empty, without a row"):
        empty = write_rows(web.folder, "jsonl", [0], "c").replace("{000..000}", "000")
        answer(opened([SourceConfig(path=str(web.folder / empty), row_format="llava")], reader,
                      tmp_path, num_shards=2), 0)


def test_shards_that_were_counted_are_not_fetched_again(reader, web, tmp_path, monkeypatch):
    """Where the rows are is kept in the index folder, so a resumed run fetches what it reads."""
    name = write_rows(web.folder, "jsonl", [22, *[5] * 11], "a")
    source = SourceConfig(path=f"{web.url}/{name}", row_format="llava")
    keys = dict(num_shards=3, window=4)
    monkeypatch.setattr(stream, "fetch_ahead", list)  # its threads would go on meanwhile
    first = opened([source], reader, tmp_path, web, **keys)
    said = [answer(first, i) for i in range(2 * 77)]
    shutil.rmtree(tmp_path / "cache")
    web.counts.clear()
    dataset = opened([source], reader, tmp_path, web, **keys)
    assert [answer(dataset, i) for i in (77 + 30, 77 + 31)] == said[77 + 30: 77 + 32]
    # The first, which tells the kind, and those of 2 rows.
    assert sum(count > 0 for count in web.counts.values()) <= 3


def test_what_is_kept_in_memory(reader, web, tmp_path, monkeypatch):
    """Of shards behind URLs, where the rows of those are that are read at the time."""
    name = write_rows(web.folder, "jsonl", [5] * 40, "a")
    there, start, most = weakref.WeakSet(), JsonRows.__init__, 0
    monkeypatch.setattr(JsonRows, "__init__", lambda self, *args, **keys: [
        start(self, *args, **keys), there.add(self)] and None)
    dataset = opened([SourceConfig(path=f"{web.url}/{name}", row_format="llava")], reader,
                     tmp_path, web, num_shards=2, window=4)
    for i in range(2 * 200):
        answer(dataset, i)
        most = max(most, len(there))
    assert 2 <= most <= 2 * 2 + 1


def test_threads_that_ask_at_the_same_time(reader, web, tmp_path, monkeypatch):
    """The training thread asks for the places of media that failed on other ranks."""
    path = str(web.folder / write_rows(web.folder, "jsonl", [60, 70], "a"))
    alone, together = (opened([SourceConfig(path=path)], reader, tmp_path, num_shards=2,
                              window=8) for _ in range(2))
    said, found, place = {i: answer(alone, i) for i in range(130)}, {}, JsonRows.place
    monkeypatch.setattr(JsonRows, "place", lambda *args: [time.sleep(1e-3), place(*args)][1])

    def read(draws) -> None:
        for i in draws:
            found[i] = answer(together, i)

    threads = [threading.Thread(target=read, args=(range(k, 130, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == said


def test_a_run_on_a_stream_goes_on_where_its_shards_give_the_same_order(reader, web, tmp_path):
    """25 rows are 25 shards for any larger number of them."""
    name = write_rows(web.folder, "jsonl", [22, 3], "a")

    def of(num_shards: int) -> dict:
        data = opened([SourceConfig(path=f"{web.url}/{name}", row_format="llava")], reader,
                      tmp_path, web, num_shards=num_shards)
        return settings(recipe(data=DataConfig(num_shards=num_shards)), data)

    assert check_resumable(of(64), of(70), 2) == {"data.num_shards": [64, 70]}
    with pytest.raises(ValueError, match="^content.shards is .*set run.allow_data_change=true"):
        check_resumable(of(64), of(1), 2)
