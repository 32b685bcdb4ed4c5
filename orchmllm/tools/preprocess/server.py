"""A server of remote preprocessing: it reads and decodes the examples, and the parts of them, that
ranks ask for. It keeps nothing of a run: any server serves any step of any rank."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

from orchmllm.data.loading.preprocess_handshake import (
    HANDSHAKE_S,
    NotAdmitted,
    admit,
    check_reachable,
    identity_of,
)
from orchmllm.data.loading.preprocess_messages import from_request, to_answer
from orchmllm.data.loading.workers import Workers
from orchmllm.data.wire import Channel, WireError

MAX_CONNECTIONS = 1024
LOOK_S = 0.5  # after which it looks whether it has to end
FAILED_S = 1.0  # between connections that cannot be taken
SEND_S = 300.0  # for an answer to be taken


class Server:
    """address: (host, port); port 0: one that is free. num_workers: processes that read and decode,
    0: the thread of a connection. Raises ValueError for an address that needs a secret, and OSError
    where it cannot be listened on."""

    def __init__(self, dataset: Any, address: tuple[str, int], secret: bytes,
                 num_workers: int) -> None:
        check_reachable(address[0], secret)
        self.dataset, self._secret = dataset, secret
        self._identity = identity_of(dataset)
        self._alone = threading.Lock()  # without workers: a dataset is used by one thread
        self.num_examples = 0
        self._socket = socket.create_server(
            address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self.address = self._socket.getsockname()[:2]
        self._threads = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._workers = Workers(dataset, num_workers)
        self._workers.request("load", [])()  # they start here, before there are threads

    def run(self) -> int:
        """Serves until a signal comes, and prints why it ended. Returns the exit code."""
        ended: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: ended.append(number))
        self._socket.settimeout(LOOK_S)
        while not ended and all(worker.is_alive() for worker in self._workers.processes):
            self._accept()
        self._socket.close()
        self._workers.close()
        why = (f"ended by {signal.Signals(ended[0]).name}" if ended
               else "a worker failed: a data worker exited unexpectedly (killed, or out of memory)")
        print(f"preprocess: {why}; {self.num_examples} examples served", flush=True)
        return 128 + ended[0] if ended else 1

    def _accept(self) -> None:
        try:
            connection, (host, port, *_) = self._socket.accept()
        except TimeoutError:
            return
        except OSError as error:  # of one that has left, or no descriptor is left
            self._log(f"a connection failed: {error}")
            time.sleep(FAILED_S)
            return
        if not self._threads.acquire(blocking=False):
            self._log(f"{host}:{port}: turned away: {MAX_CONNECTIONS} connections")
            connection.close()
            return
        threading.Thread(target=self._serve, args=(connection, f"{host}:{port}"),
                         daemon=True).start()

    def _serve(self, connection: socket.socket, name: str) -> None:
        channel = Channel(connection, HANDSHAKE_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            admit(channel, self._secret, self._identity)
            channel.timeout_s = SEND_S
            while True:
                message, _ = channel.receive(0, idle=True)
                channel.send(*self._answer(message))
        except (NotAdmitted, WireError) as error:
            self._log(f"{name}: refused: {error}")
        except (OSError, EOFError):
            pass  # it has left
        finally:
            channel.close()
            self._threads.release()

    def _answer(self, message: dict):
        try:
            stream = getattr(self.dataset, "streaming", False)
            calls = from_request(message, None if stream else len(self.dataset))
            with nullcontext() if self._workers.num_workers else self._alone:
                results = self._workers.request("load", calls)()
        except Exception as error:  # one request is not answered; the client goes to another server
            return {"error": f"{type(error).__name__}: {error}"}, []
        self.num_examples += len(calls)
        return to_answer(results)

    @staticmethod
    def _log(text: str) -> None:
        print(f"preprocess: {text}", file=sys.stderr, flush=True)
