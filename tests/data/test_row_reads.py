"""A row is read once for each load, whatever it is kept in and whoever decodes its media."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing import Array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import SourceConfig
from orchmllm.data import dataset
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.loading.long_calls import Calls
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.loading.workers import Workers
from orchmllm.data.media.medium import Medium
from orchmllm.data.sampler import GlobalSampler
from orchmllm.plan.layout import VISION, BatchLayout
from orchmllm.tools.data.build_index import build_index
from orchmllm.trainer import Trainer
from tests.lib.drawn import drawn_model
from tests.lib.formats import FORMATS, QUESTIONS, write_media
from tests.lib.ranks import run_ranks
from tests.lib.sources import same_example
from tests.lib.synthetic import recipe

KINDS = ("llava.jsonl", "openai embedded", "parquet", "webdataset")


WAYS = (("load", 0), ("tensors", 0), ("load", 1), ("bytes", 1))


def opened(path: str, reader, index_dir) -> ConversationDataset:
    return ConversationDataset([SourceConfig(path=path)], reader=reader, index_dir=index_dir)


def count_reads(store, num_rows: int) -> Array:
    """How often each row is read from now on, in this process and those that it forks."""
    counts, read = Array("i", num_rows), store.row

    def counted(i: int) -> dict:
        with counts.get_lock():
            counts[i] += 1
        return read(i)

    store.row = counted
    return counts


def reads(world, paths: list[str], reader, index_dir: str, model: ModelConfig
          ) -> dict[tuple, list[int]]:
    """(path, dispatch, number of workers) -> how often each row was read in a pass."""
    out = {}
    for dispatch, num_workers in WAYS:
        opened_paths = [opened(path, reader, index_dir) for path in paths]
        trainer = Trainer(recipe(model=model, balance=BalanceConfig(dispatch=dispatch)), world,
                          dataset=opened_paths[0])
        for path, data in zip(paths, opened_paths, strict=True):
            counts = count_reads(data.sources[0].store, len(data))
            steps = StepLoader(data, GlobalSampler(range(len(data)), 6, shuffle=False),
                               trainer.orchestrator, num_steps=2, num_workers=num_workers,
                               feed=trainer._feed)
            assert [len(step.failed) for step in steps] == [0, 0]
            out[Path(path).name, dispatch, num_workers] = list(counts)
    return out


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("reads")
    write_media(folder)
    return [str(FORMATS[kind][0](folder)) for kind in KINDS]


@pytest.mark.parametrize("indexed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_row_is_read_once(paths, reader, indexed, tmp_path):
    for path in paths if indexed else ():
        plain = opened(path, reader, tmp_path)
        build_index(plain.sources[0], plain.reader, tmp_path, num_workers=1)
    [counts] = run_ranks(reads, 1, paths, reader, str(tmp_path), drawn_model())
    assert counts == {(Path(path).name, *way): [1] * len(QUESTIONS)
                      for path in paths for way in WAYS}


def test_a_row_that_is_not_as_it_was_indexed_is_not_learnt(paths, reader, tmp_path):
    plain = opened(paths[1], reader, tmp_path)
    build_index(plain.sources[0], plain.reader, tmp_path, num_workers=1)
    indexed = opened(paths[1], reader, tmp_path)
    read, failures = indexed.sources[0].store.row, []
    indexed.sources[0].store.row = lambda i: read(i + 1)
    example = indexed.load(0, on_error=lambda *failure: failures.append(failure))
    layout = indexed.layout(0)
    assert len(example.labels) == layout.num_tokens.sum() and (example.labels < 0).all()
    assert len(example.media["pixel_values"]) == layout.rows.sum() > 0
    assert failures[-1][0] == 0 and str(failures[-1][1]).endswith(
        "cannot be used as it was planned: the processor makes other lengths of it")


def test_more_rows_than_are_kept_are_measured_once(paths, reader, tmp_path, monkeypatch):
    one, many = (opened(paths[1], reader, tmp_path) for _ in range(2))
    counts, rows = count_reads(many.sources[0].store, len(many)), list(range(len(many)))
    monkeypatch.setattr(dataset, "CACHED_BYTES", 1)
    monkeypatch.setattr(dataset, "MEASURED_AT_ONCE", 5)
    found = many.layouts(np.array([*rows, 0]), [len(rows) + 1])
    assert list(counts) == [2] + [1] * (len(rows) - 1) and len(many._cache) == 1
    expected = BatchLayout.concat([one.layout(i) for i in [*rows, 0]], [len(rows) + 1])
    assert repr(found) == repr(expected) and found.num_ranks == 1


def test_what_planning_keeps_is_bounded_in_bytes(paths, reader, tmp_path, monkeypatch):
    whole, bounded = (opened(paths[1], reader, tmp_path) for _ in range(2))
    monkeypatch.setattr(dataset, "CACHED_BYTES", 1)
    for i in range(len(QUESTIONS)):
        bounded.layout(i)
        assert bounded.kept(i) is not None and (i == 0 or bounded.kept(i - 1) is None)
    monkeypatch.undo()
    for i in range(len(QUESTIONS)):
        assert same_example(whole.load(i), bounded.load(i))
        assert whole.kept(i) is not None


def test_what_steps_keep_is_bounded_in_bytes(paths, reader, tmp_path):
    """What does not fit in is read by the workers."""
    rows = opened(paths[1], reader, tmp_path)
    calls = [((i,), {"text": True, "segments": [at for at, *_ in rows.media_of(i)]})
             for i in range(len(rows))]
    sizes = [rows.kept(i).num_bytes for i in range(len(rows))]
    with closing(Workers(rows, 1)) as workers:
        none, some, every = (Calls(workers, rows, calls, 0, room)
                             for room in (0, max(sizes), sum(sizes)))
        assert none.num_bytes == 0 < some.num_bytes <= max(sizes) < every.num_bytes == sum(sizes)
        for found in zip(none.results(), some.results(), every.results(), strict=True):
            (want, *_), *others = found
            assert all(same_example(want, got) for got, *_ in others)


def test_frames_of_a_video_are_one_file():
    frames = [Medium(VISION, "v.mp4", data=b"12345678")] * 3
    assert MeasuredExample(None, None, None, frames, None).num_bytes == 8


class Planned:
    """A row as the planner gives it, of 3 bytes."""

    layout = None

    @property
    def num_bytes(self) -> int:
        return sum([1, 1, 1])


def test_a_validation_plans_beside_training(paths, reader, tmp_path):
    """Two threads change what is kept, and take turns as often as they can."""
    one = opened(paths[1], reader, tmp_path)
    one.cached_examples = 4
    one.bounds = np.array([0, 200_000])
    one.reader = SimpleNamespace(plan=lambda read, rows: [Planned() for _ in rows])
    every = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rows: [one.layout(i) for i in rows],
                          (range(100_000), range(100_000, 200_000))))
    finally:
        sys.setswitchinterval(every)
    assert 1 <= len(one._cache) <= 5 and one._cached_bytes == 3 * len(one._cache)
