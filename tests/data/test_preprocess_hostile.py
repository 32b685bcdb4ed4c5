"""Clients and servers of preprocessing that lie, and a server without descriptors: no run is
changed by them, and none ends."""

from __future__ import annotations

import re
import resource
import socket
import struct
import threading
import time

import numpy as np
import pytest
import torch

from orchmllm.data.loading import preprocess_handshake as handshake
from orchmllm.data.loading.preprocess_handshake import admit, identity_of
from orchmllm.data.loading.preprocess_messages import from_request, to_answer
from orchmllm.data.loading.workers import Workers
from orchmllm.data.wire import MAGIC, Channel, WireError
from orchmllm.plan.layout import VISION
from orchmllm.tools.preprocess.server import FAILED_S
from tests.lib.preprocess import SECRET, Process, asked, calls_of, opened, same


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
    {"load": [[10**9, {"text": True, "segments": []}]]},
    {"load": [[0, {"text": True, "segments": [99]}]]},
    {"load": [[0, {"text": True, "segments": [0], "row": 1}]]}, {"load": [["x", {}]]}, {"load": 3},
    {}, {"load": [[0, {"text": True, "segments": "ab"}]]}, {"load": [[0, {"segments": [0]}]]},
    {"load": [[True, {"text": True, "segments": []}]]}])
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
    planned = to_answer(Workers(dataset, 0).request("load", from_request(said, None))())[1]
    channel.send({"failed": [[] for _ in said["load"]]}, [np.zeros(3, np.int32)] * len(planned))


def narrower(channel, said, dataset) -> None:
    """Right but for the media, which have a row less."""
    header, arrays = to_answer(Workers(dataset, 0).request("load", from_request(said, None))())
    channel.send(header, [a[1:] if a.ndim == 2 else a for a in arrays])


def fewer(channel, said, dataset) -> None:
    channel.send({"failed": [[] for _ in said["load"]]})


def endless(channel, said, dataset) -> None:
    channel.send({"failed": [[[float("inf"), "", 0]] for _ in said["load"]]},
                 to_answer(Workers(dataset, 0).request("load", from_request(said, None))())[1])


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
    (oversized, "1099511627776 bytes: more than the limit of"), (shorter, "int32 (3,) came where"),
    (narrower, "came where"), (fewer, "0 arrays came where"),
    (endless, "an answer cannot be read: OverflowError"),
    (junk, "this is no message: it begins with b'\\x80\\x04ju'"), (closes, "closed"),
    (trickles, "no whole message within 1 s")])
def test_answers_that_are_no_answers_are_read_by_the_rank(recipe, answer, reason):
    dataset = opened(recipe)
    calls = calls_of(dataset, [1, 2])
    want = Workers(dataset, 0).request("load", calls)()
    address, thread = serve_once(dataset, answer)
    got, told = asked(dataset, [address], calls, timeout_s=1.0 if answer is trickles else 300.0)
    thread.join(60)
    assert (told.remote, told.local) == (0, 2) and reason in " ".join(told.notes)
    assert all(same(a, b) for a, b in zip(want, got, strict=True))


def blind(channel, said, dataset) -> None:
    """Of a machine on which the folder of the media is not mounted."""
    header, arrays = to_answer(Workers(dataset, 0).request("load", from_request(said, None))())
    header["failed"] = [[[s, "the file is missing", VISION] for s in keys["segments"]]
                        for _, keys in said["load"]]
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
    server, started = Process(recipe), time.monotonic()
    host, port = server.address.split(":")
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (40, 40))
    connections = [socket.create_connection((host, int(port))) for _ in range(60)]
    failed = "a connection failed: .*Too many open files"
    for line in server.popen.stderr:  # until it says so
        if re.search(failed, line):
            break
    for connection in connections:
        connection.close()
    assert server.popen.poll() is None
    _, _, said = server.end()
    assert len(re.findall(failed, said)) <= 1 + (time.monotonic() - started) / FAILED_S
