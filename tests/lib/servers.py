"""Servers on this machine that data is read from: a web server that can be told to fail, and an
object store (moto, which speaks S3) that can be stopped and started again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from orchmllm.config.recipe import RemoteConfig, RemoteRoot
from orchmllm.data.storage.remote import Storage

BUCKET = "bucket"


class Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(None)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.counts[path] += 1
        self._answer(self.server.fault(path))

    def _answer(self, fault: object) -> None:
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if isinstance(fault, int) or not path.is_file():
            self._head(fault or 404, 0)
            return
        if isinstance(fault, str) and fault.startswith("http"):
            self.send_response(302)
            self.send_header("Location", fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        if self.command == "HEAD" and self.server.always.get(self.path) == "unknown_length":
            self._head(200, None)
            self.close_connection = True
        elif fault is not None:
            self.close_connection = True
            getattr(self, fault)(data)
        else:
            self._head(200, len(data), hashlib.md5(data).hexdigest())
            self._body(data)

    def _head(self, status: int, length: int | None, tag: str = "") -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()

    def _body(self, data: bytes) -> None:
        if self.command == "GET":
            try:
                self.wfile.write(data)
            except ConnectionError:
                pass  # the client left

    def stall(self, data: bytes) -> None:
        """Half of the body, then nothing."""
        self._head(200, len(data))
        self._body(data[: len(data) // 2])
        self.wfile.flush()
        self.server.release.wait(60)

    def silent(self, data: bytes) -> None:
        """No answer at all."""
        self.server.release.wait(60)

    def cut(self, data: bytes) -> None:
        """The connection ends within the body."""
        self._head(200, len(data))
        self._body(data[: len(data) // 2])

    def too_short(self, data: bytes) -> None:
        """A Content-Length that is too small, and as many bytes."""
        self._head(200, len(data) - 10)
        self._body(data[:-10])

    def too_long(self, data: bytes) -> None:
        self._head(200, len(data) + 10)
        self._body(data)

    def huge(self, data: bytes) -> None:
        """It promises more than a medium may have."""
        self._head(200, (512 << 20) + 1)
        self._body(data)

    def unknown_length(self, data: bytes) -> None:
        """Neither a length nor chunks: the end of the connection is the end of the file."""
        self._head(200, None)
        self._body(data[: len(data) // 2])

    def chunked(self, data: bytes) -> None:
        self._in_chunks(data)

    def half_in_chunks(self, data: bytes) -> None:
        """Half of the body, which ends as a whole one would; a HEAD tells its length."""
        if self.command == "HEAD":
            self._head(200, len(data))
        else:
            self._in_chunks(data[: len(data) // 2])

    def _in_chunks(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._body(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))


class Hub(BaseHTTPRequestHandler):
    """What `hf://` asks of the hub: the files of one repository, those of the server's folder."""

    protocol_version = "HTTP/1.1"
    log_message = Files.log_message

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url, folder = urlsplit(self.path), self.server.folder
        kind, path = "", None
        for kind in ("tree", "resolve"):
            if f"/{kind}/main" in url.path:
                path = folder / unquote(url.path).split(f"/{kind}/main", 1)[1].strip("/")
                break
        if path is None:
            self._send(json.dumps({"id": "org/name", "sha": "a" * 40, "siblings": []}).encode())
        elif kind == "tree":
            there = path.rglob("*") if "recursive=true" in url.query.lower() else path.glob("*")
            self._send(json.dumps([self._entry(p) for p in sorted(there)]).encode())
        else:
            self._send(path.read_bytes() if path.is_file() else b"", path.is_file())

    def _entry(self, path: Path) -> dict:
        data = path.read_bytes() if path.is_file() else b""
        return {"type": "file" if path.is_file() else "directory", "size": len(data),
                "path": path.relative_to(self.server.folder).as_posix(),
                "oid": hashlib.sha1(data).hexdigest()}

    def _send(self, data: bytes, there: bool = True) -> None:
        self.send_response(200 if there else 404)
        for name, value in (("Content-Length", len(data)), ("X-Repo-Commit", "a" * 40),
                            ("ETag", f'"{hashlib.sha1(data).hexdigest()}"'),
                            *(() if there else [("X-Error-Code", "EntryNotFound")])):
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


class WebServer(ThreadingHTTPServer):
    """Serves the files of a folder. faults[path]: what its next GET requests meet, one each (a
    number of the status, or a method of Files); `always` follows when they are used up. counts:
    GET requests by path."""

    daemon_threads = True

    def __init__(self, folder: Path, handler: type = Files) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.folder, self.faults, self.always = folder, {}, {}
        self.counts: Counter[str] = Counter()
        self.release = threading.Event()  # of requests that stall

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, path: str) -> object:
        waiting = self.faults.get(path, deque())
        return waiting.popleft() if waiting else self.always.get(path)


@contextmanager
def web_server(folder: Path, handler: type = Files) -> Iterator[WebServer]:
    server = WebServer(folder, handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()


class ObjectStore:
    """An S3 server with one bucket, whose content outlives stop()."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._new = lambda: ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._server, self._sent = None, {}
        logging.getLogger("werkzeug").setLevel(logging.ERROR)

    def start(self) -> None:
        self._server = self._new()
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None

    def client(self):
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def upload(self, folder: Path, prefix: str = "data") -> str:
        """Puts all files below a folder; returns its URL."""
        client = self.client()
        for path in folder.rglob("*"):
            key, said = f"{prefix}/{path.relative_to(folder).as_posix()}", path.stat()
            if path.is_file() and self._sent.get(key) != said.st_mtime_ns:
                self._sent[key] = said.st_mtime_ns
                client.put_object(Bucket=BUCKET, ACL="public-read", Body=path.read_bytes(), Key=key)
        return f"s3://{BUCKET}/{prefix}"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {k: os.environ.get(k) for k in keys}
    os.environ.update(keys)
    store = ObjectStore()
    store.start()
    store.client().create_bucket(Bucket=BUCKET, ACL="public-read")
    try:
        yield store
    finally:
        store.stop()
        for k, value in before.items():
            os.environ.pop(k) if value is None else os.environ.update({k: value})


def remote(cache: Path, *roots: str | RemoteRoot, **keys) -> RemoteConfig:
    """A recipe's section. Its limits are above what a busy machine takes to answer."""
    return RemoteConfig(
        roots=tuple(r if isinstance(r, RemoteRoot) else RemoteRoot(r) for r in roots),
        cache=str(cache), **{"attempts": 4, "stall_s": 30.0, "deadline_s": 200.0, **keys})


def storage(cache: Path, *roots: str | RemoteRoot, **keys) -> Storage:
    return Storage(remote(cache, *roots, **keys))
