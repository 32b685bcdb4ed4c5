"""Remote preprocessing with real servers: the same batches whoever decodes, and no server that is
dead, slow, foreign or hostile ends a run or changes it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import numpy as np
import psutil
import pytest
import torch

from orchmllm.cli.preprocess import main
from orchmllm.config import RecipeError, load_recipe
from orchmllm.data.loading.workers import Workers
from orchmllm.data.preprocess import client, handshake
from orchmllm.data.preprocess.client import RemoteWorkers
from orchmllm.data.preprocess.examples import from_request, to_answer
from orchmllm.data.preprocess.handshake import Servers, admit, identity_of
from orchmllm.data.stream import open_dataset
from orchmllm.data.wire import MAGIC, Channel, WireError
from orchmllm.plan.layout import TEXT, VISION
from orchmllm.runtime.log_schema import ROW_SCHEMA
from tests.lib.commands import ROOT, make_demo_data, python
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.training import train

SECRET = "0123456789abcdef" * 2
SMALL = """
data: {{path: {folder}/demo, index_dir: {folder}/index, prefetch: 2}}
model:
  vision: {{num_layers: 1, hidden_size: 32, intermediate_size: 32}}
  audio: {{num_layers: 1, hidden_size: 32, intermediate_size: 32}}
  llm: {{num_layers: 1, hidden_size: 48, intermediate_size: 32}}
train: {{num_steps: 12, batch_size: 2, warmup_steps: 2}}
balance: {{dispatch: load, ranks_per_node: 2}}
checkpoint: {{every_steps: -1}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preprocess")
    make_demo_data(folder / "demo", 40)
    for path in sorted((folder / "demo").rglob("*.jpg"))[:2]:
        path.write_bytes(path.read_bytes()[:-200])
    (folder / "secret").write_text(SECRET + "\n")
    path = folder / "r.yaml"
    path.write_text(SMALL.format(folder=folder))
    return path


class Process:
    """A real server. address: host:port that it said."""

    def __init__(self, recipe: Path, *args: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "orchmllm", "preprocess", str(recipe), "--listen",
             "127.0.0.1:0", "--workers", "0", *args], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        said = []
        for line in self.popen.stdout:
            said.append(line)
            if match := re.match(r"preprocess: listening on (\S+), ", line):
                self.address = match[1]
                return
        pytest.fail("".join(said) + self.popen.stderr.read())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=300)
        return self.popen.returncode, out, err


@pytest.fixture(scope="module")
def running(recipe):
    """Two servers: without a secret, and with one. A signal ends them with one line."""
    servers = [Process(recipe), Process(recipe, "--secret-file", str(recipe.parent / "secret"),
                                        "--workers", "1")]
    yield servers
    for server in servers:
        code, out, _ = server.end(signal.SIGTERM)
        assert code == 143
        assert re.fullmatch(r"preprocess: ended by SIGTERM; \d+ examples served\n", out)


def opened(recipe: Path, *overrides: str):
    loaded = load_recipe(recipe, overrides)
    return open_dataset(loaded.data, loaded.model.vision.geometry, loaded.model.audio.geometry,
                        seed=loaded.run.seed)


def calls_of(dataset, examples, encoded: bool = False) -> list:
    """Everything of some examples, as dispatch `load` and `bytes` ask for it."""
    calls = []
    for i in examples:
        media = np.flatnonzero(dataset.layout(i).modality != TEXT).tolist()
        calls.append(((i,), {"text": i % 3 != 0, "segments": media[:2],
                             **({"encoded": media[:1]} if encoded else {})}))
    return calls


def same(a, b) -> bool:
    (x, failed), (y, also) = a, b
    tensors = [(x.token_ids, y.token_ids), (x.labels, y.labels),
               *((x.media[s], y.media[s]) for s in x.media)]
    return (x.example_id == y.example_id and list(x.media) == list(y.media) and failed == also
            and all(p is q is None or p.dtype == q.dtype and p.equal(q) for p, q in tensors))


def asked(dataset, addresses: list[str], calls, secret_file: str = "", timeout_s: float = 300.0):
    """(results, what happened) of one request."""
    workers = RemoteWorkers(dataset, Servers(addresses, secret_file, timeout_s),
                            Workers(dataset, 0), 0)
    try:
        results = workers.request("load", calls)()
        return results, workers.tell()
    finally:
        workers.close()


@pytest.mark.parametrize("encoded", [False, True])
def test_what_comes_is_what_the_rank_would_have_read(recipe, running, encoded):
    dataset = opened(recipe)
    calls = calls_of(dataset, range(40), encoded)
    want = Workers(dataset, 0).request("load", calls)()
    for addresses, secret in (([running[0].address], ""),
                              ([running[1].address] * 2, str(recipe.parent / "secret"))):
        got, told = asked(dataset, addresses, calls, secret)
        assert (told.remote, told.local, told.notes) == (40, 0, [])
        assert encoded or sum(len(failed) for _, failed in want) == 2
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


def test_a_wrong_secret_is_refused(recipe, running, tmp_path, monkeypatch):
    (tmp_path / "wrong").write_text("f" * 32)
    dataset = opened(recipe)
    calls = calls_of(dataset, [0])
    for secret_file in ("", str(tmp_path / "wrong")):
        with pytest.raises(RuntimeError, match="the secrets are not the same"):
            asked(dataset, [running[1].address], calls, secret_file)
    monkeypatch.setenv(handshake.SECRET_VARIABLE, SECRET)
    assert asked(dataset, [running[1].address], calls)[1].remote == 1


def talk(address: str, data: bytes) -> bytes:
    """What a server answers to bytes after its greeting, until it closes."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 30) as sock:
        sock.settimeout(60)
        sock.recv(1 << 16)
        sock.sendall(data)
        out = b""
        while piece := sock.recv(1 << 16):
            out += piece
        return out


HUGE = struct.pack("<4sIQ", MAGIC, 10, 1 << 50) + b"{}"
LONG = struct.pack("<4sIQ", MAGIC, 1 << 30, 0)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" + bytes(40), HUGE, LONG,
                                  struct.pack("<4sIQ", MAGIC, 4, 0) + b"\xff\xff\xff\xff",
                                  struct.pack("<4sIQ", MAGIC, 4, 0) + b"[[]]"])
def test_garbage_and_oversized_messages_are_refused(recipe, running, data):
    try:
        assert b"proof" not in talk(running[1].address, data)
    except ConnectionError:
        pass  # closed before all of it was read
    dataset = opened(recipe)
    results, told = asked(dataset, [running[1].address], calls_of(dataset, [1]),
                          str(recipe.parent / "secret"))
    assert told.remote == 1


@pytest.mark.parametrize("request_", [
    {"load": [[10**9, {"segments": []}]]}, {"load": [[0, {"segments": [99]}]]},
    {"load": [[0, {"segments": [0], "row": 1}]]}, {"load": [["x", {}]]}, {"load": 3}, {},
    {"load": [[0, {"segments": "ab"}]]}, {"load": [[True, {"segments": []}]]}])
def test_requests_for_what_is_not_there_are_answered_with_an_error(recipe, running, request_):
    sock = socket.create_connection(tuple(running[0].address.split(":")), 30)
    channel = Channel(sock, 60)
    try:
        handshake.greet(channel, b"", identity_of(opened(recipe)))
        for _ in range(2):  # and it goes on
            channel.send(request_)
            said, arrays = channel.receive(0)
            assert said["error"] and not arrays
    finally:
        channel.close()


def serve_once(dataset, answer) -> tuple[str, threading.Thread]:
    """A server that lets a client in, and then does as `answer` says with its channel."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener:
            channel = Channel(listener.accept()[0], 60)
            try:
                admit(channel, b"", identity_of(dataset))
                said, _ = channel.receive(0)
                answer(channel, said, dataset)
            except (OSError, EOFError):
                pass
            finally:
                channel.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


def oversized(channel, said, dataset) -> None:
    channel.sock.sendall(struct.pack("<4sIQ", MAGIC, 2, 1 << 40) + b"{}")


def shorter(channel, said, dataset) -> None:
    channel.send({"results": [{"text": True, "segments": s["segments"], "failed": []}
                              for _, s in said["load"]]}, [np.zeros(3, np.int32)] * 9)


def narrower(channel, said, dataset) -> None:
    """Right but for the media, which have a row less."""
    header, arrays = to_answer(Workers(dataset, 0).request("load", from_request(said, None))())
    channel.send(header, [a[1:] if a.ndim == 2 else a for a in arrays])


def junk(channel, said, dataset) -> None:
    channel.sock.sendall(b"\x80\x04junk" * 100)


def closes(channel, said, dataset) -> None:
    pass


def trickles(channel, said, dataset) -> None:
    channel.sock.sendall(struct.pack("<4sIQ", MAGIC, 100, 100))
    for _ in range(100):
        channel.sock.sendall(b" ")
        time.sleep(0.2)


@pytest.mark.parametrize("answer, reason", [
    (oversized, "1099511627776 bytes: more than the limit of"), (shorter, "came for"),
    (narrower, "came where"),
    (junk, "this is no message: it begins with b'\\x80\\x04ju'"), (closes, "closed"),
    (trickles, "no whole message within 1 s")])
def test_answers_that_are_no_answers_are_read_by_the_rank(recipe, answer, reason):
    dataset = opened(recipe)
    calls = calls_of(dataset, [1, 2])
    want = Workers(dataset, 0).request("load", calls)()
    address, thread = serve_once(dataset, answer)
    got, told = asked(dataset, [address], calls, timeout_s=1.0)
    thread.join(60)
    assert (told.remote, told.local) == (0, 2) and reason in " ".join(told.notes)
    assert all(same(a, b) for a, b in zip(want, got, strict=True))


def blind(channel, said, dataset) -> None:
    """Of a machine on which the folder of the media is not mounted."""
    header, arrays = to_answer(Workers(dataset, 0).request("load", from_request(said, None))())
    for told in header["results"]:
        told["failed"] = [[s, "the file is missing", VISION] for s in told["segments"]]
    channel.send(header, [np.zeros_like(a) if a.ndim == 2 else a for a in arrays])


def test_what_a_server_lacks_is_read_by_the_rank(recipe):
    dataset = opened(recipe)
    calls = calls_of(dataset, [8, 9, 10])
    want = Workers(dataset, 0).request("load", calls)()
    assert not any(failed for _, failed in want) and any(x.media for x, _ in want)
    address, thread = serve_once(dataset, blind)
    got, told = asked(dataset, [address], calls)
    thread.join(60)
    assert told.remote == 3 and "has to see the same files: the file is missing" in told.notes[0]
    assert all(same(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.slow
def test_a_stopped_server_is_given_up_and_asked_again_later(recipe, monkeypatch):
    server = Process(recipe)
    dataset = opened(recipe)
    calls = calls_of(dataset, range(6))
    workers = RemoteWorkers(dataset, Servers([server.address], "", 300.0), Workers(dataset, 0), 0)
    try:
        workers.request("load", calls)()
        assert workers.tell().remote == 6
        workers._servers[0]._channel.timeout_s = 2.0
        os.kill(server.popen.pid, signal.SIGSTOP)
        workers.request("load", calls)()
        told = workers.tell()
        assert told.local == 6 and "no whole message within 2 s" in told.notes[0]
        os.kill(server.popen.pid, signal.SIGCONT)
        workers.request("load", calls)()
        assert workers.tell().local == 6, "it rests"
        monkeypatch.setattr(client.time, "monotonic", lambda now=time.monotonic: now() + 100)
        workers.request("load", calls)()
        assert workers.tell().remote == 6
    finally:
        workers.close()
        code, out, err = server.end(signal.SIGINT)
    assert (code, err) == (130, "")
    assert re.fullmatch(r"preprocess: ended by SIGINT; \d+ examples served\n", out)


def test_a_server_whose_worker_dies_ends_and_says_so(recipe):
    """Another server, or whoever starts it again, is better than one that fails each request."""
    server = Process(recipe, "--workers", "1")
    for child in psutil.Process(server.popen.pid).children():
        child.kill()
    dataset = opened(recipe)
    try:
        assert asked(dataset, [server.address], calls_of(dataset, [0]))[1].local == 1
        out, _ = server.popen.communicate(timeout=300)
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
    done = python("-m", "orchmllm.train", "--recipe", recipe, "--validate",
                  'data.preprocess=["10.0.0.1:7"]', f"run.dir={recipe.parent}/v")
    assert done.returncode == 2, done.stderr
    assert "data.preprocess: 10.0.0.1 is not this machine alone" in done.stderr
    for value in ("127.0.0.1:7", "[7]", "[[]]", "{a: 1}"):
        with pytest.raises(RecipeError, match=r"data\.preprocess.* expected"):
            load_recipe(recipe, [f"data.preprocess={value}"])


def test_messages_hold_arrays_of_any_shape():
    a, b = socket.socketpair()
    left, right = Channel(a, 10), Channel(b, 10)
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 588), np.uint8),
              np.array([2.5], np.float64), np.ones((2, 1, 2), np.float32)[::-1]]
    left.send({"x": "ü"}, arrays)
    said, came = right.receive(1 << 20)
    assert said == {"x": "ü"}
    for want, got in zip(arrays, came, strict=True):
        np.testing.assert_array_equal(want, got, strict=True)
        assert torch.from_numpy(got) is not None
    left.send({}, arrays)
    with pytest.raises(WireError, match="more than the limit"):
        right.receive(10)
    left.close()
    right.close()


def test_a_server_without_descriptors_waits_for_one(recipe):
    server = Process(recipe)
    host, port = server.address.split(":")
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (40, 40))
    connections = [socket.create_connection((host, int(port))) for _ in range(60)]
    time.sleep(2)
    for connection in connections:
        connection.close()
    assert server.popen.poll() is None
    _, _, said = server.end()
    assert 1 <= len(re.findall("a connection failed: .*Too many open files", said)) <= 5
