"""Requests to object stores and web servers, by the file systems of fsspec.

Every thread of every process has an event loop and connections of its own, and requests run in the
thread that asks. So no thread of fsspec exists when data workers are forked, and a worker never
uses the connections of the rank that forked it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from fsspec.callbacks import Callback

from orchmllm.config.recipe import RemoteConfig, RemoteRoot

T = TypeVar("T")
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of the cache
# Of botocore and huggingface_hub, which are imported only where they are used.
LOCAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "OfflineModeIsEnabled"}
FINAL_ERRORS = {"GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError",
                "EntryNotFoundError", "RemoteEntryNotFoundError"}
SIGNED = re.compile(r"(https?://[^\s'\"?]*)\?[^\s'\"]*")  # in what a library says
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0  # between attempts; doubled after each

_here = threading.local()
_inherited: list[object] = []  # of the process that forked this one: closing it would disturb that


class StorageError(RuntimeError):
    """A remote file that could not be read although it may be there, or a file of rows that has
    changed since it was opened: training cannot go on as if it were damaged."""


class NoAccess(PermissionError):
    """A request that must not be made, or whose answer must not be used; it is not repeated."""


def declared(config: RemoteConfig, url: str) -> RemoteRoot | None:
    """The root of a recipe that `url` is below."""
    url = without_query(url) + "/"
    return next((r for r in config.roots if url.startswith(r.url.rstrip("/") + "/")), None)


def _system(root: RemoteRoot, config: RemoteConfig):
    """The file system of this thread for a root."""
    if getattr(_here, "pid", None) != os.getpid():
        _inherited.append(dict(vars(_here)))
        _here.pid, _here.systems = os.getpid(), {}
        _here.loop = asyncio.new_event_loop()
        _here.loop.set_exception_handler(lambda loop, context: None)  # sessions left at the exit
    key = root, config
    if key not in _here.systems:
        _here.systems[key] = _new_system(*key)
    return _here.systems[key]


def _new_system(root: RemoteRoot, config: RemoteConfig):
    import fsspec

    scheme, stall_s = root.url.split(":")[0], config.stall_s
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        options |= {"anon": root.anonymous, "endpoint_url": root.endpoint or None,
                    "max_concurrency": 1, "config_kwargs": {
                        "connect_timeout": stall_s, "read_timeout": stall_s,
                        "retries": {"max_attempts": 0}}}
    elif scheme == "gs":
        options |= {"token": "anon" if root.anonymous else None,
                    "endpoint_url": root.endpoint or None, "timeout": stall_s}
    elif scheme == "hf":
        options |= {"endpoint": root.endpoint or None, "token": False if root.anonymous else None}
    else:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall_s, sock_read=stall_s)
        options |= {"encoded": True, "get_client": _guarded(config),
                    "client_kwargs": {"timeout": timeout,
                                      "headers": {"Accept-Encoding": "identity"}}}
    try:
        kind = fsspec.get_filesystem_class(scheme)
        if kind.async_impl:
            options["asynchronous"] = True
        system = kind(**options)
    except ImportError as error:
        raise NoAccess(f"{error}: pip install '.[remote]' in the clone") from error
    system.retries = 1  # they are counted here
    return system


def _guarded(config: RemoteConfig) -> Callable:
    """A maker of aiohttp sessions that follow redirects to declared folders only."""
    async def check(session, context, params) -> None:
        location = params.response.headers.get("Location", "")
        target = urljoin(str(params.response.url), location)
        if not any(_is_below(target, root.url) for root in config.roots):
            raise NoAccess(f"the server redirects to {without_query(target)}, whose folder is not "
                          "among data.remote.roots: declare it if it is meant")

    async def session(loop=None, **keys):
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(check)
        return aiohttp.ClientSession(trace_configs=[trace], **keys)

    return session


def _is_below(url: str, folder: str) -> bool:
    """Whether a URL is that of something in a folder, as a server may resolve its path."""
    there, root = urlsplit(url), urlsplit(folder)
    path = posixpath.normpath(unquote(there.path))
    return there[:2] == root[:2] and f"{path}/".startswith(f"{unquote(root.path).rstrip('/')}/")


def call(root: RemoteRoot, config: RemoteConfig, method: str, url: str, *args: Any,
         timeout_s: float, **keys: Any) -> Any:
    """One request: a method of fsspec's file systems on a URL below `root`."""
    system = _system(root, config)
    path = url if url.startswith("http") else url.split("://", 1)[1]
    if not system.async_impl:
        return getattr(system, method)(path, *args, **keys)
    return _here.loop.run_until_complete(
        asyncio.wait_for(getattr(system, f"_{method}")(path, *args, **keys), timeout_s))


def repeated(url: str, config: RemoteConfig, attempt: Callable[[float], T]) -> T:
    """attempt(seconds left), again after an error that may pass. Raises FileNotFoundError or
    NoAccess where it cannot pass, and StorageError after all attempts, and at once where this
    machine is the reason: its files are not to pass for damaged."""
    started, count, wait_s = time.monotonic(), 0, FIRST_WAIT_S
    url = without_query(url)
    while True:
        count += 1
        try:
            return attempt(config.deadline_s - (time.monotonic() - started))
        except StorageError:
            raise
        except Exception as error:  # each library has types of its own
            reason = SIGNED.sub(r"\1", f"{type(error).__name__}: {error}".removesuffix(": "))
            if getattr(error, "errno", None) in DISK_ERRNOS or (
                    type(error).__name__ in LOCAL_ERRORS):
                raise StorageError(f"{url} cannot be read on this machine: {reason}; see its "
                                   "credentials, and the room in data.remote.cache") from error
            if isinstance(error, FileNotFoundError) and not os.path.isabs(error.filename or ""):
                raise FileNotFoundError(errno.ENOENT, "the server has no such file", url
                                        ) from error  # and not that the cache was removed
            if _is_final(error):
                why = error if isinstance(error, NoAccess) else reason
                raise NoAccess(f"{url}: {why}") from error
            taken = time.monotonic() - started
            wait_s = min(2 * wait_s, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)
            if count < config.attempts and taken + wait_s < config.deadline_s:
                time.sleep(wait_s)
                continue
            raise StorageError(
                f"{url} cannot be read: {count} attempt{'s' if count > 1 else ''} in {taken:.1f} s "
                f"failed, the last with {reason}; see whether the server answers and start again "
                "(a run resumes where it was saved), or raise data.remote.attempts "
                f"({config.attempts}) and data.remote.deadline_s ({config.deadline_s:g})"
            ) from error


def _is_final(error: Exception) -> bool:
    """Whether the same request would fail again."""
    status = getattr(error, "status", None) or getattr(
        getattr(error, "response", None), "status_code", None)
    return (isinstance(error, PermissionError | ValueError | TypeError | ImportError)
            or type(error).__name__ in FINAL_ERRORS
            or isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429))


def without_query(url: str) -> str:
    """For people: the query of a URL may hold a signature."""
    return url.split("?", 1)[0] if url.lower().startswith("http") else url


class Progress(Callback):
    """Of one file. size: the number of bytes that the server promises, or None. limit: of bytes;
    more are NoAccess, promised or not."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def set_size(self, size: int | None) -> None:
        super().set_size(size)
        self._check(size or 0)

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self._check(self.value)

    def _check(self, size: int) -> None:
        if size > self.limit:
            raise NoAccess(f"it has {size} bytes or more: more than the limit of {self.limit} (of "
                          "one medium, or of the cache: data.remote.cache_gib)")


def version_of(info: dict) -> str:
    """What tells one content of a file from another, or nothing."""
    names = ("ETag", "etag", "generation", "blob_id", "Content-MD5", "Last-Modified")
    return str(next(filter(None, map(info.get, names)), "")).strip('"')
