"""Remote preprocessing with real servers: the same batches whoever decodes, and no server that is
dead, slow, foreign or hostile ends a run or changes it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import jsonschema
import psutil
import pytest

from orchmllm.config.recipe import RecipeError, load_recipe
from orchmllm.data.loading import preprocess_client as client
from orchmllm.data.loading.preprocess_client import RemoteWorkers
from orchmllm.data.loading.preprocess_handshake import Servers
from orchmllm.data.loading.workers import Workers
from orchmllm.runtime.log_schema import ROW_SCHEMA
from orchmllm.tools.preprocess.command import main
from tests.lib.commands import python
from tests.lib.preprocess import Process, asked, calls_of, opened, same
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.training import train


def test_what_comes_is_what_the_rank_would_have_read(recipe, running):
    dataset = opened(recipe)
    calls = calls_of(dataset, range(40))
    want = Workers(dataset, 0).request("load", calls)()
    for addresses, secret in (([running[0].address], ""),
                              ([running[1].address] * 2, str(recipe.parent / "secret"))):
        got, told = asked(dataset, addresses, calls, secret)
        assert (told.remote, told.local, told.notes) == (40, 0, [])
        assert sum(len(failed) for _, failed in want) == 2
        assert all(same(a, b) for a, b in zip(want, got, strict=True))


def losses_and_counts(world, recipe: Path, addresses: tuple[str, ...], pids: tuple[int, ...],
                      *overrides: str) -> list:
    """pids: servers of which one is killed after step 1 and one after step 5."""
    def on_step(step, row: dict) -> None:
        if world.rank == 0 and pids and step.index in (1, 5):
            os.kill(pids[step.index // 5], signal.SIGKILL)

    run = load_recipe(recipe, [f"run.dir={recipe.parent}/run{len(addresses)}", *overrides,
                               f"data.preprocess={json.dumps(addresses)}", "run.resume=never",
                               "data.preprocess_timeout_s=600"])
    rows = train(world, run, on_step=on_step)
    return [(r["loss"], r["grad_norm"], r.get("preprocessed"), r["data_wait_s"]) for r in rows]


@pytest.mark.slow
@pytest.mark.dist
def test_losses_when_one_server_is_killed_and_then_the_other(recipe):
    servers = [Process(recipe), Process(recipe)]
    try:
        local = run_ranks(losses_and_counts, 2, recipe, (), ())[0]
        remote = run_ranks(losses_and_counts, 2, recipe, tuple(s.address for s in servers),
                           tuple(s.popen.pid for s in servers))[0]
    finally:
        for server in servers:
            server.popen.kill()
    with (recipe.parent / "run2" / "metrics.jsonl").open() as f:
        for line in f:
            jsonschema.validate(json.loads(line), ROW_SCHEMA)
    assert [r[:2] for r in local] == [r[:2] for r in remote] and local[0][2] is None
    counts = [(r[2]["remote"], r[2]["local"]) for r in remote]
    assert len(counts) == 12 and counts[0][0] > 0
    assert counts[5][1] == 0, "the second server does the work of the first"
    assert counts[-1][0] == 0 and counts[-1][1] > 0, "and then the ranks do"
    assert all(r[3] >= 0 for r in remote)


def text_of_failure(recipe: Path, address: str, *overrides: str) -> str:
    with pytest.raises(RankFailure) as failure:
        run_ranks(losses_and_counts, 2, recipe, (address,), (), *overrides)
    texts = {e[1] for e in failure.value.errors.values()}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.dist
def test_a_server_of_another_recipe_ends_the_run_on_all_ranks(recipe, running):
    text = text_of_failure(recipe, running[0].address, "model.vision.max_side=224")
    assert "refuses this run: the server and the run differ in model.vision (patches)" in text


@pytest.mark.parametrize("override, what", [
    ("model.audio.num_mels=128", "model.audio (frames)"),
    ("data.max_example_tokens=500", "data.max_example_tokens"),
    ("data.sources=[{path: FOLDER/demo, video_fps: 3}]", "how data.sources are read"),
    ("data.streaming=true", "the order of the stream")])
def test_what_differs_is_named(recipe, running, override, what):
    override = override.replace("FOLDER", str(recipe.parent))
    paths = ["data.path="] if "sources" in override else []
    dataset = opened(recipe, override, *paths)
    with pytest.raises(RuntimeError, match=f"differ in .*{re.escape(what)}.*; start the server"):
        asked(dataset, [running[0].address], calls_of(dataset, [0]))


@pytest.mark.slow
def test_a_stopped_server_is_given_up_and_asked_again_later(recipe, monkeypatch):
    server = Process(recipe)
    dataset = opened(recipe)
    calls = calls_of(dataset, range(6))
    workers = RemoteWorkers(dataset, Servers([server.address], "", 300.0), Workers(dataset, 0), 0)
    try:
        workers.request("load", calls)()
        assert workers.counts().remote == 6
        workers._servers[0]._channel.timeout_s = 2.0
        os.kill(server.popen.pid, signal.SIGSTOP)
        workers.request("load", calls)()
        told = workers.counts()
        assert told.local == 6 and "no whole message within 2 s" in told.notes[0]
        os.kill(server.popen.pid, signal.SIGCONT)
        workers.request("load", calls)()
        assert workers.counts().local == 6, "it rests"
        monkeypatch.setattr(client.time, "monotonic", lambda now=time.monotonic: now() + 100)
        workers.request("load", calls)()
        assert workers.counts().remote == 6
    finally:
        workers.close()
        code, out, err = server.end(signal.SIGINT)
    assert (code, err) == (130, "")
    assert re.fullmatch(r"preprocess: ended by SIGINT; \d+ examples served\n", out)


def test_a_server_whose_worker_dies_ends_and_says_so(recipe):
    """Another server, or whoever starts it again, is better than one that fails each request. It is
    not asked: that a worker has died was not seen in most requests that it failed."""
    server = Process(recipe, "--workers", "1")
    for child in psutil.Process(server.popen.pid).children():
        child.kill()
    dataset = opened(recipe)
    try:
        out, _ = server.popen.communicate(timeout=300)
        assert asked(dataset, [server.address], calls_of(dataset, [0]))[1].local == 1
    finally:
        server.popen.kill()
    assert server.popen.returncode == 1
    assert "preprocess: a worker failed: a data worker exited unexpectedly" in out


@pytest.mark.parametrize("args, reason", [
    (["--listen", "0.0.0.0:0"], "0.0.0.0 is not this machine alone, so a secret is needed"),
    (["--listen", "nowhere"], "'nowhere' is no address: write host:port"),
    (["--secret-file", "SHORT"], "is too short; write at least 16"),
    (["--secret-file", "/no/such"], "cannot be read"), (["data.path=/no"], "no such file")])
def test_what_cannot_be_served_is_said(recipe, tmp_path, capsys, args, reason):
    (tmp_path / "short").write_text("abc")
    args = [a.replace("SHORT", str(tmp_path / "short")) for a in args]
    assert main([str(recipe), "--listen", "127.0.0.1:0", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and reason in said


def test_a_recipe_is_checked_before_there_are_ranks(recipe):
    done = python("-m", "orchmllm.train", recipe, "--validate",
                  'data.preprocess=["10.0.0.1:7"]', f"run.dir={recipe.parent}/v")
    assert done.returncode == 2, done.stderr
    assert "data.preprocess: 10.0.0.1 is not this machine alone" in done.stderr
    with pytest.raises(RecipeError, match="servers send decoded media: set balance.dispatch to"):
        load_recipe(recipe, ['data.preprocess=["127.0.0.1:7"]', "balance.dispatch=bytes"])
    for value in ("127.0.0.1:7", "[7]", "[[]]", "{a: 1}"):
        with pytest.raises(RecipeError, match=r"data\.preprocess.*(must be|quote it)"):
            load_recipe(recipe, [f"data.preprocess={value}"])
