"""Reading and decoding on other machines, in place of worker processes.

Calls of a step are dealt to the servers of the recipe. A server that fails is left out for
RETRY_S: its calls go to the next one, and where none is left to the rank itself (or its workers).
What comes is what the rank would have read, so losses do not depend on who decoded.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from orchmllm.batch import Preprocessed
from orchmllm.data.loading.preprocess_handshake import (
    HANDSHAKE_S,
    NotAdmitted,
    Servers,
    greet,
    identity_of,
    split_address,
)
from orchmllm.data.loading.preprocess_messages import from_answer, planned_arrays, to_request
from orchmllm.data.loading.workers import Call, Result, Workers
from orchmllm.data.wire import Channel, WireError

RETRY_S = 30.0
CONNECT_S = 5.0


class RemoteWorkers:
    """The same as Workers, which it falls back on, for `load` alone. rank: of this process, so that
    not all begin with the same server. Used by one thread."""

    num_workers = 0  # a server reads rows itself

    def __init__(self, dataset: Any, servers: Servers, local: Workers, rank: int) -> None:
        self.dataset, self._local, self._rank = dataset, local, rank
        self._servers = [_Server(address, servers) for address in servers.addresses]
        self._threads: ThreadPoolExecutor | None = None
        self._lock, self._notes = threading.Lock(), []
        self._counts = [0, 0]  # examples from servers, and of this rank's own

    def start(self) -> None:
        """Starts the rank's own processes, which are for when no server is left."""
        self._local.start()

    def request(self, method: str, calls: Sequence[Call]) -> Callable[[], list[Result]]:
        """See Workers.request. Raises RuntimeError for a server that refuses this run."""
        assert method == "load", "a recipe refuses servers with balance.dispatch=bytes"
        if self._threads is None:
            self._connect()
        count = len(self._servers)
        size = max(1, -(-len(calls) // count))
        chunks = [list(calls[at: at + size]) for at in range(0, len(calls), size)]
        futures = [self._threads.submit(self._ask, chunk, planned_arrays(chunk, self.dataset),
                                        (k + self._rank) % count)
                   for k, chunk in enumerate(chunks)]
        return lambda: [result for future, chunk in zip(futures, chunks, strict=True)
                        for result in self._come(future.result(), chunk)]

    def counts(self) -> Preprocessed:
        """What has happened since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
        counts, self._counts = self._counts, [0, 0]
        return Preprocessed(*counts, notes)

    def close(self) -> None:
        """Closes the connections and ends local workers."""
        for server in self._servers:
            server.drop()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._local.close()

    def _connect(self) -> None:
        """Asks every server once: one that refuses has to be told before the run goes on."""
        identity = identity_of(self.dataset)
        self._threads = ThreadPoolExecutor(len(self._servers), "preprocess")
        for server in self._servers:
            server.identity = identity
            try:
                server.connect()
            except NotAdmitted as error:
                raise RuntimeError(f"data.preprocess: {server.address} refuses this run: {error}"
                                   ) from error
            except (OSError, EOFError) as error:
                self._gave_up(server, error)

    def _ask(self, chunk: list[Call], planned: list, first: int) -> list[Result] | None:
        """None if no server answers. planned: see planned_arrays."""
        for k in range(len(self._servers)):
            server = self._servers[(first + k) % len(self._servers)]
            try:
                results = server.ask(chunk, planned)
            except (OSError, EOFError, NotAdmitted) as error:
                self._gave_up(server, error)
            else:
                if results is not None:
                    return results
        return None

    def _come(self, results: list[Result] | None, chunk: list[Call]) -> list[Result]:
        if results is None:
            self._counts[1] += len(chunk)
            return self._local.request("load", chunk)()
        self._counts[0] += len(chunk)
        wrong = [k for k, (_, failed) in enumerate(results) if failed]
        own = self._local.request("load", [chunk[k] for k in wrong])() if wrong else []
        for k, result in zip(wrong, own, strict=True):  # a server may lack files that are here
            if len(result[1]) < len(results[k][1]):
                self._note("a server cannot read what this rank can, and has to see the same "
                           f"files: {results[k][1][0][1]}")
            results[k] = result
        return results

    def _gave_up(self, server: _Server, error: Exception) -> None:
        self._note(f"{server.address} is left out for {RETRY_S:g} s: "
                   f"{error or type(error).__name__}")

    def _note(self, text: str) -> None:
        with self._lock:
            self._notes.append(f"data.preprocess: {text}")


class _Server:
    """A connection that is made when it is needed. Used by several threads, one at a time."""

    def __init__(self, address: str, settings: Servers) -> None:
        self.address, self.identity, self._settings = address, {}, settings
        self._channel: Channel | None = None
        self._lock, self._rests_until = threading.Lock(), 0.0

    def ask(self, chunk: list[Call], planned: list) -> list[Result] | None:
        """None where it has failed a short while ago. Raises OSError, EOFError or NotAdmitted."""
        with self._lock:
            if time.monotonic() < self._rests_until:
                return None
            if self._channel is None:
                self.connect()
            try:
                self._channel.send(to_request(chunk))
                message, arrays = self._channel.receive(
                    sum(dtype.itemsize * math.prod(shape) for dtype, shape in planned))
                if "error" in message:
                    raise WireError(str(message["error"])[:1000])
                return from_answer(message, arrays, chunk, planned)
            except BaseException:
                self.drop()
                raise

    def connect(self) -> None:
        """Raises OSError, EOFError or NotAdmitted."""
        try:
            sock = socket.create_connection(split_address(self.address), CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._channel = Channel(sock, HANDSHAKE_S)
            greet(self._channel, self._settings.secret, self.identity)
            self._channel.timeout_s = self._settings.timeout_s
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Closes the connection; the next one is made after a while."""
        channel, self._channel = self._channel, None
        self._rests_until = time.monotonic() + RETRY_S
        if channel is not None:
            channel.close()
