"""Training on data of an object store and a web server: bit-equal to training on the same files
here, but for the order in which a stream adds its losses up, also when the server goes away in the
middle; and errors that reach all ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import DataConfig, RemoteRoot, RunConfig, SourceConfig
from orchmllm.runtime.build import build_dataset
from orchmllm.train import main
from tests.lib.drawn import drawn_model, with_processor
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media, write_tar
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.recipes import RECIPES
from tests.lib.servers import ObjectStore, object_store, remote, web_server
from tests.lib.synthetic import recipe
from tests.lib.training import watched

STEPS, BATCH, SAVED = 6, 6, 3  # 36 draws of 24 rows: into the second epoch


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Shards of 4 rows, and the same rows as JSONL with media beside it."""
    folder = tmp_path_factory.mktemp("files")
    write_media(folder)
    rows = [llava_row(*QUESTIONS[k % 12]) for k in range(24)]
    for k, row in enumerate(rows):
        row["conversations"][1]["value"] += f" {k}"
    write_jsonl(folder / "rows.jsonl", rows)
    for k in range(6):
        write_tar(folder / f"s-{k}.tar", rows[4 * k: 4 * k + 4], folder)
    return folder


@pytest.fixture
def store(files):
    with object_store() as store:
        store.upload(files)
        yield store


def run_recipe(run_dir: Path, data: DataConfig, dispatch: str):
    base = recipe(model=drawn_model(), balance=BalanceConfig(ranks_per_node=2, dispatch=dispatch),
                  data=replace(data, prefetch=2, index_dir=str(run_dir.parent / "index")),
                  run=RunConfig(dir=str(run_dir)))
    return replace(base, train=replace(base.train, num_steps=STEPS, global_batch_size=BATCH),
                   checkpoint=replace(base.checkpoint, every_steps=SAVED, asynchronous=False))


def losses(world, run, stop_after: int = -1) -> list[float]:
    return watched(world, run, lambda step, row: row["loss"], stop_after, build_dataset(run))


@contextlib.contextmanager
def restarts(store: ObjectStore, away_s: float, there_s: float):
    """The store is away for so long and there for so long, again and again."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            store.stop()
            time.sleep(away_s)
            store.start()
            ended.wait(there_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def data_of(where: str, name: str, **keys) -> DataConfig:
    return DataConfig(sources=(SourceConfig(path=f"{where}/{name}"),), **keys)


def declared(store: ObjectStore, cache: Path, **keys):
    """moto does not ask who reads; the fork server of the ranks has no credentials."""
    root = RemoteRoot("s3://bucket/data", endpoint=store.endpoint, anonymous=True)
    # A store that is away half of the time may be so at a dozen attempts in a row.
    return remote(cache, root, attempts=40, stall_s=1.0, deadline_s=250.0, **keys)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["load", "tensors", "bytes"])
@pytest.mark.parametrize("name, streaming", [
    ("s-{0..5}.tar", False), ("s-{0..5}.tar", True), ("rows.jsonl", False), ("rows.jsonl", True)])
def test_a_store_that_restarts_all_the_time(name, streaming, dispatch, files, store,
                                            tmp_path):
    """With a cache that is too small for all shards, so that they are fetched again and again. A
    stream of tars there is counted as it is read, and its rows are dealt to ranks in another order
    than those of files here."""
    keys = dict(streaming=streaming, num_shards=2)
    said = run_ranks(losses, 2, run_recipe(
        tmp_path / "here", data_of(str(files), name, **keys), dispatch))[0]
    sizes = sorted(p.stat().st_size for p in files.glob("s-*.tar"))

    def run_in(folder: Path):
        data = data_of("s3://bucket/data", name, num_workers=2, **keys, remote=declared(
            store, folder / "cache", cache_gib=(sum(sizes[-4:]) + 1000) / 2**30))
        return run_recipe(folder / "there", data, dispatch)

    if streaming:
        here, said = said, run_ranks(losses, 2, run_in(tmp_path / "quiet"))[0]
        assert said == pytest.approx(here, rel=1e-12)
    run = run_in(tmp_path)
    with restarts(store, 0.4, 0.4):
        first = run_ranks(losses, 2, run, SAVED)[0]
        then = run_ranks(losses, 3, run)[0]
    assert first[:SAVED] == said[:SAVED]
    assert then == pytest.approx(said[SAVED:], rel=1e-9)  # other ranks, another order of sums


def rows_read(world, run, stop_after: int = -1) -> list[tuple[int, str, int]]:
    """(example, file, row) of what the LLM of this rank took."""
    dataset = build_dataset(run)
    steps = watched(world, run, lambda step, row: [
        (i, dataset.describe(i, 0)) for i in step.example_ids_of_rank], stop_after, dataset)
    return [(i, Path(place["data_file"]).name, place["row"]) for i, place in sum(steps, [])]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["load", "tensors"])
def test_a_stream_gives_each_row_once_an_epoch_on_2_ranks_and_then_on_3(
        dispatch, web, tmp_path):
    """From shards that are counted as they are fetched; the 3 ranks are on another machine."""
    sizes = [10, 1, 0, 7]
    for k, count in enumerate(sizes):
        write_jsonl(web.folder / f"s-{k}.jsonl", [
            llava_row([("text", "?" * (1 + 50 * k))], f"{k} {i}") for i in range(count)])

    def run_on(machine: str):
        data = data_of(web.url, "s-{0..3}.jsonl", streaming=True, num_shards=2,
                       remote=remote(tmp_path / machine / "cache", web.url))
        data = replace(data, sources=(replace(data.sources[0], row_format="llava"),))
        run = run_recipe(tmp_path / "run", data, dispatch)
        return replace(run, data=replace(run.data, index_dir=str(tmp_path / machine / "index")))

    first = run_ranks(rows_read, 2, run_on("a"), SAVED)
    then = run_ranks(rows_read, 3, run_on("b"))
    assert [len(sum(seen, [])) for seen in (first, then)] == [
        (SAVED + 1) * BATCH, (STEPS - SAVED) * BATCH]  # the step after the save is done twice
    drawn = {i: place for seen in (*first, *then) for i, *place in seen}
    for start in (0, sum(sizes)):
        assert sorted(drawn[i] for i in range(start, start + sum(sizes))) == [
            [f"s-{k}.jsonl", row + 1] for k, count in enumerate(sizes) for row in range(count)]


@pytest.mark.dist
def test_an_error_of_one_rank_is_raised_on_all(files, tmp_path):
    """Only the rank that drew the row reads the medium."""
    with web_server(files) as web:
        web.always["/2.webp"] = 500
        data = data_of(web.url, "rows.jsonl", num_workers=1,
                       remote=remote(tmp_path / "cache", web.url, attempts=2))
        with pytest.raises(RankFailure) as failure:
            run_ranks(losses, 2, run_recipe(tmp_path / "run", data, "tensors"))
        said = {(kind, text) for kind, text, _ in failure.value.errors.values()}
        assert len(failure.value.errors) == 2 and len(said) == 1, failure.value
        [(kind, text)] = said
        assert kind == "RemoteError" and f"{web.url}/2.webp cannot be read: 2 attempts" in text


def test_a_bad_url_is_named_before_ranks_start(files, tmp_path, capsys):
    with web_server(files) as web:
        model = f"model.config={with_processor()}"
        root, demo = f"data.remote.roots=[{{url: {web.url}}}]", str(RECIPES / "demo.yaml")
        for path, text in ((f"{web.url}/rows.jsonl", ""),
                           (f"{web.url}/none.jsonl", f"no such file: '{web.url}/none.jsonl'"),
                           ("https://example.org/rows.jsonl", "is a URL that is not declared")):
            code = main([demo, "--validate", f"data.path={path}", model, root,
                         "data.num_validation=8",
                         f"run.dir={tmp_path}/run", f"data.remote.cache={tmp_path}/cache"])
            said = capsys.readouterr().err
            assert code == (2 if text else 0) and text in said, said
        assert main([demo, "--validate", f"data.path={files}/rows.jsonl", model,
                     "data.remote.roots=[{url: 's3://user:key@bucket'}]"]) == 2
        assert "write s3://bucket/folder" in capsys.readouterr().err
