"""Readers of a Ray cluster in place of worker processes: the same steps whoever decodes, and
nothing is lost with a node, a reader or the room for objects. The clusters are real, of several
nodes on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from orchmllm.config.data import DataConfig
from orchmllm.config.recipe import load_recipe
from orchmllm.data.loading.ray_workers import MOST_LOST, Pool, RayWorkers, join_pool
from orchmllm.data.loading.workers import answer_to
from orchmllm.runtime.build import build_dataset
from tests.lib.commands import make_demo_data, python
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.ray_clusters import cluster, variables
from tests.lib.training import train
from tests.lib.whole_folders import write_model, write_rows

SMALL = """
data: {{path: {folder}/demo, index_dir: {folder}/index, num_workers: 1}}
model: {{config: {folder}/demo/model}}
train: {{num_steps: 12, batch_size: 2, warmup_steps: 2}}
balance: {{dispatch: load, ranks_per_node: 2}}
checkpoint: {{every_steps: -1}}
"""
HUNG_S = 20.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    make_demo_data(folder / "demo", 40)
    for path in sorted((folder / "demo").rglob("*.jpg"))[:2]:
        path.write_bytes(path.read_bytes()[:-200])
    path = folder / "r.yaml"
    path.write_text(SMALL.format(folder=folder))
    return path


def readers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if p.name().startswith("ray::Reader")]


def a_reader(raylet: int = 0) -> psutil.Process:
    """One that is not on the node of a raylet."""
    return next(p for p in readers() if p.ppid() != raylet)


def wait_for_readers(count: int) -> None:
    """Until so many work. One that still opens the data is given no calls, so that no rank would
    wait for it; Ray calls its process by its method then."""
    seen = 0
    while seen < 3:  # between two methods it is called by none
        at = [p.name() for p in readers()]
        works = len(at) >= count and not any("." in x and ".ans" not in x for x in at)
        seen = seen + 1 if works else 0
        time.sleep(0.5)


def said(logs: Path) -> str:
    """What the pool and its readers have logged."""
    return "".join(path.read_text() for path in logs.glob("worker-*.err"))


def stop_a_reader(raylet: int, logs: Path) -> None:
    """One of another node does nothing for HUNG_S, and until a rank has waited for it."""
    reader = a_reader(raylet)

    def go_on() -> None:
        deadline = time.monotonic() + 120
        while f", process {reader.pid}" not in said(logs) and time.monotonic() < deadline:
            time.sleep(1)
        reader.send_signal(signal.SIGCONT)

    reader.send_signal(signal.SIGSTOP)
    threading.Timer(HUNG_S, go_on).start()


def losses(world, recipe: Path, name: str, env: dict[str, str], *overrides: str,
           killed: int = 0, logs: Path = Path()) -> list:
    """killed: a node's process that is killed in step 5, while the reader of the other node is
    stopped, since step 2; that one is killed in step 9."""
    os.environ.update(env)

    def on_step(step, row: dict) -> None:
        if killed and world.rank == 0 and step.index == 2:
            wait_for_readers(2)
            stop_a_reader(killed, logs)
        if killed and world.rank == 0 and step.index == 5:
            lost = [p for p in psutil.process_iter() if p.ppid() == killed]
            os.kill(killed, signal.SIGKILL)
            psutil.wait_procs(lost, timeout=60)  # steps 9 to 11 are not asked for yet
        if killed and world.rank == 0 and step.index == 9:
            a_reader().kill()

    rows = train(world, load_recipe(recipe, [
        f"run.dir={recipe.parent}/{name}", "run.resume=never", *overrides]), on_step=on_step)
    return [(row["loss"], row["grad_norm"], row["num_failed_media"]) for row in rows]


def listed(recipe: Path, name: str) -> str:
    """What the run has put into quarantine."""
    return (recipe.parent / name / "quarantine.jsonl").read_text()


def read_here_alone(world, recipe: Path, env: dict[str, str]) -> None:
    """What a reader tells that it cannot read, and this rank can, did not fail."""
    import ray

    os.environ.update(env)
    ray.init(address="auto")
    rows, calls = build_dataset(load_recipe(recipe)), [((5,), {"segments": []})]
    answer, error, traceback = answer_to(rows, "load", calls)
    [(value, failed, seconds)] = answer
    assert not failed
    there = ray.put(([(value, [(0, "no such file", 1)], seconds)], error, traceback))
    workers = RayWorkers(rows, ray.remote(Pool).remote(0), 1, 0)
    [(_, failed, _)] = workers._come((0, 0, 0), "load", calls, ray.put([there]))
    assert not failed


@pytest.fixture(scope="module")
def without(recipe) -> list:
    return run_ranks(losses, 2, recipe, "without", {})[0]


@pytest.mark.slow
@pytest.mark.dist
def test_losses_and_quarantine_are_those_without_ray(recipe):
    """On one rank with one reader, as each of them imports torch; slow, on two."""
    batch = "train.batch_size=4"
    plain = run_ranks(losses, 1, recipe, "plain", {}, batch)
    with cluster(1):
        got = run_ranks(losses, 1, recipe, "ray", variables(), batch, "data.preprocess=ray")
        run_ranks(read_here_alone, 1, recipe, variables())
    assert got == plain and sum(row[2] for row in plain[0])
    assert listed(recipe, "ray") == listed(recipe, "plain")


class Together:
    """Two examples, each of which is loaded once the other one is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fingerprint(self) -> dict:
        return {}

    def name(self, i: int) -> str:
        return f"row {i}"

    def load(self, i: int, on_error) -> int:
        (self.folder / f"begun{i}").touch()
        end = time.monotonic() + 60.0
        while not (self.folder / f"begun{1 - i}").exists():
            assert time.monotonic() < end, "the other one was not loaded meanwhile"
            time.sleep(0.05)
        return i


class OfPool(NamedTuple):
    """What opens the data in one process, the pool's: readers cannot make it of what was sent, as
    where their node has another version of the code."""

    folder: Path

    def __call__(self) -> Together:
        return Together(self.folder)

    def __reduce__(self):
        return made_once, (self.folder,)


def made_once(folder: Path) -> OfPool:
    (folder / "made").mkdir()
    return OfPool(folder)


def loaded_by_two(world, folder: Path, env: dict[str, str]) -> tuple[list[int], str]:
    """By two loaders of one rank, of the same step; why readers that cannot be made have nothing.
    """
    os.environ.update(env)
    rows, replies = Together(folder), []
    for opens in (partial(Together, folder), OfPool(folder)):
        pool = join_pool(DataConfig(preprocess="ray", num_workers=2), opens, rows, 0, 1,
                         lambda numbers: np.array([numbers]))
        asked = [RayWorkers(rows, pool, 1, 0).request("load", [((k,), {})], 5) for k in (0, 1)]
        try:
            replies.append([reply()[0][0] for reply in asked])
        except RuntimeError as error:
            replies.append(str(error))
    return tuple(replies)


@pytest.mark.slow
@pytest.mark.dist
def test_two_loaders_ask_for_the_same_step_and_readers_cannot_be_made(tmp_path):
    with cluster(4):
        [(loaded, problem)] = run_ranks(loaded_by_two, 1, tmp_path, variables())
    assert loaded == [0, 1]
    assert problem.startswith("data.preprocess: a reader cannot be used: FileExistsError: ")


def test_calls_of_a_reader_that_is_lost_end_where_no_other_works():
    async def lost() -> None:
        pool, made = Pool(0), asyncio.get_running_loop().create_future()
        pool._reads[5, 0, 0] = "node"
        pool._refuse("node", "why")
        pool._again((5, 0, 0), "load", [], made, 0)
        with pytest.raises(RuntimeError, match="node cannot be used: why"):
            await asyncio.wait_for(made, 1.0)

    asyncio.run(lost())


def test_calls_that_end_their_readers_are_given_to_no_more_of_them():
    async def lost() -> int:
        pool, made = Pool(0), asyncio.get_running_loop().create_future()
        work, num_readers = ((5, 0, 0), "load", [((7,), {})], made, 0), 0
        while not made.done() and num_readers < 2 * MOST_LOST:
            pool._reads[5, 0, 0] = "node"
            pool._again(*work)
            num_readers += 1
            if not made.done():
                work = pool._waiting.get_nowait()
        with pytest.raises(RuntimeError, match=r"lost over the examples \[7\]"):
            await asyncio.wait_for(made, 1.0)
        return num_readers

    assert asyncio.run(lost()) == MOST_LOST


def test_calls_that_wait_for_readers_that_cannot_be_used_end():
    async def waited() -> None:
        pool = Pool(0)
        load = asyncio.create_task(pool.load((0, 0, 0), "load", []))
        await asyncio.sleep(0)
        pool._refuse("node a", "other files")
        await asyncio.wait_for(load, 60)

    with pytest.raises(RuntimeError, match="node a cannot be used: other files"):
        asyncio.run(waited())


@pytest.mark.slow
@pytest.mark.dist
def test_every_dispatch_and_a_reader_with_other_files(recipe, without):
    plain = {"load": without} | {
        dispatch: run_ranks(losses, 2, recipe, f"plain_{dispatch}", {},
                            f"balance.dispatch={dispatch}")[0] for dispatch in ("bytes", "tensors")}
    with cluster(2):
        for dispatch, wanted in plain.items():
            got = run_ranks(losses, 2, recipe, dispatch, variables(), "data.preprocess=ray",
                            f"balance.dispatch={dispatch}")[0]
            assert got == wanted, dispatch
            assert listed(recipe, dispatch) == listed(recipe, "without")
        with pytest.raises(RankFailure) as failure:
            run_ranks(other_files, 2, recipe, variables())
    texts = {text for _, text, _ in failure.value.errors.values()}
    assert len(texts) == 1
    assert "cannot be used: " in (text := texts.pop()) and "every node has to see" in text


def other_files(world, recipe: Path, env: dict[str, str]) -> None:
    """Ranks whose data are not those that the recipe names, which readers open."""
    os.environ.update(env)
    make_demo_data(recipe.parent / f"other{world.rank}", 30)
    other = load_recipe(recipe, [f"data.path={recipe.parent}/other{world.rank}"])
    train(world, load_recipe(recipe, [f"run.dir={recipe.parent}/other", "run.resume=never",
                                      "data.preprocess=ray"]), dataset=build_dataset(other))


@pytest.mark.slow
@pytest.mark.dist
def test_a_node_a_reader_and_room_are_lost(recipe, without):
    """Three nodes: one without cores for the ranks and two with a reader each, of which one is
    killed in step 5; a reader is stopped for 20 s in step 2, and the one that is left is killed in
    step 9; little room for objects."""
    with cluster(0, 1, 1, store_mib=80) as nodes:
        logs = Path(nodes.head_node.get_logs_dir_path())
        [raylet] = nodes.list_all_nodes()[-1].all_processes["raylet"]
        got = run_ranks(losses, 2, recipe, "lost", variables(), "data.preprocess=ray",
                        killed=raylet.process.pid, logs=logs)[0]
        told = said(logs)
    assert got == without
    assert listed(recipe, "lost") == listed(recipe, "without")
    assert "data.preprocess: lost: node " in told and "Ray starts another reader" in told
    assert re.search(r"step \d+, rank \d has waited 10 s for what it needs of \d+ examples, first "
                     r"\S+data.jsonl, row \d+: node \S+, process \d+", told)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.whole
def test_train_starts_a_cluster_of_its_own_for_a_model_of_transformers(tmp_path, monkeypatch):
    """No cluster is there. A processor of transformers runs in the readers."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a token for its cluster there
    write_model("qwen3_vl", tmp_path / "model")
    rows = write_rows(tmp_path)
    (tmp_path / "r.yaml").write_text(f"model: {{pretrained: model}}\ndata: {{path: {rows.name}, "
                                     "num_workers: 1}\ntrain: {num_steps: 6}\n")
    found = {}
    for name, overrides in (("without", []), ("ray", ["data.preprocess=ray"])):
        done = python("-m", "orchmllm", "train", "r.yaml", f"run.dir={name}", *overrides,
                      "launch.nproc_per_node=2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found[name] = [json.loads(line)["loss"] for line in
                      (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert found["ray"] == found["without"] and len(found["ray"]) == 6
