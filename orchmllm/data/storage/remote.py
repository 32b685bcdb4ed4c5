"""Files behind URLs: what may be read of them, and how they are found and opened.

Only what `data.remote.roots` of the recipe declares is ever asked for. A file is fetched whole into
a cache on disk when it is opened. Credentials come from the environment, never from a recipe or a
row.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit

from orchmllm.config.recipe import RemoteConfig
from orchmllm.data.storage.cache import DiskCache, below_home, written
from orchmllm.data.storage.clients import (
    NoAccess,
    Progress,
    StorageError,
    call,
    declared,
    repeated,
    version_of,
    without_query,
)

DEFAULT_CACHE = "~/.cache/orchmllm/remote"
URL = re.compile(r"(s3|gs|hf|https?)://", re.IGNORECASE)
NUM_THREADS = 8  # that fetch ahead, or ask about the files of a source

_waiting: dict[int, queue.SimpleQueue] = {}  # by process: what its threads fetch ahead


def is_url(path: object) -> bool:
    """Whether a path of a recipe or a row is a URL of a kind that can be read."""
    return isinstance(path, str) and URL.match(path) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL. version, size: as the server said when the run opened its data; of a
    medium that a row names they are not known. limit: bytes that it may have; 0: those of the
    cache. Behaves like a Path where rows are read."""

    url: str
    storage: Storage
    version: str = ""
    size: int = -1
    limit: int = 0

    def __str__(self) -> str:
        return without_query(self.url)

    @property
    def name(self) -> str:
        last = without_query(self.url).rpartition("/")[2]
        return unquote(last) if self.url.startswith("http") else last

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> str:
        return without_query(self.url).rpartition("/")[0]

    @property
    def key(self) -> str:
        """What its copy on disk is called."""
        root = declared(self.storage.config, self.url)
        identity = "\n".join((self.url, self.version, str(self.size), root.endpoint))
        return hashlib.sha256(identity.encode()).hexdigest()[:40]

    def open(self, mode: str = "rb") -> BinaryIO:
        """The whole file, fetched if it is not on disk. Raises FileNotFoundError or NoAccess where
        the server has or gives no such file, StorageError where it cannot be reached."""
        return self.storage.cache.open(self.key, partial(self.storage.fetch, self))

    def num_bytes(self) -> int:
        """Raises as `open` does."""
        if self.size >= 0:
            return self.size
        with self.open() as f:
            return os.fstat(f.fileno()).st_size

    def copied(self, folder: Path) -> Path:
        """A copy below `folder` that stays, for readers that need a path."""
        path = folder / f"remote-{self.key}{self.suffix}"
        if not path.is_file():
            with self.open() as source, written(path) as target:
                shutil.copyfileobj(source, target, 8 << 20)
        return path


@dataclass(frozen=True)
class Storage:
    """What a recipe declares under data.remote."""

    config: RemoteConfig = RemoteConfig()

    @property
    def cache(self) -> DiskCache:
        folder = below_home(str(self.config.cache or DEFAULT_CACHE), "data.remote.cache")
        return DiskCache(folder, int(self.config.cache_gib * 2**30), self.config.deadline_s)

    def file(self, url: str, limit: int = 0) -> RemoteFile:
        """The file of a URL. Raises ValueError where the recipe does not declare it."""
        web = url.startswith("http")  # other names are taken as they are
        path = unquote(unquote(urlsplit(url).path)) if web else url
        if any(part in (".", "..") for part in re.split(r"[/\\]", path)):
            raise ValueError(f"URL {without_query(url)!r:.200} has . or .. in its path; write it "
                             "without")
        if "@" in urlsplit(url).netloc or re.search(
                r"[#\s\x00-\x1f\\]" if web else r"[\x00-\x1f]", url):
            raise ValueError(f"URL {without_query(url)!r:.200} must have no user, fragment, space "
                             "or backslash; credentials come from the environment")
        if declared(self.config, url) is None:
            raise ValueError(f"{without_query(url)!r:.200} is a URL that is not declared, and so "
                             "never fetched; add its host and folder to data.remote.roots of the "
                             "recipe, or download the file below the media root")
        return RemoteFile(url, self, limit=limit)

    def below(self, folder: str, name: str, limit: int = 0) -> RemoteFile:
        """The file that a row calls `name`, relative to a folder. Raises ValueError."""
        name = quote(name) if folder.startswith("http") else name
        return self.file(f"{folder.rstrip('/')}/{name}", limit)

    def fetch(self, file: RemoteFile, part: Path) -> None:
        """Writes a whole file to `part`; a part of it never passes for the whole."""
        root = declared(self.config, file.url)

        def attempt(left_s: float) -> None:
            promised = Progress(file.limit or self.cache.limit)
            call(root, self.config, "get_file", file.url, str(part), callback=promised,
                 timeout_s=left_s)
            size = promised.size
            if size is None or file.version:
                info = call(root, self.config, "info", file.url, timeout_s=left_s)
                if size is None and info.get("size") is None:
                    raise NoAccess("the server does not say how long the file is, so a part of it "
                                  "would pass for the whole")
                size = info["size"] if size is None else size
                if file.version not in ("", version_of(info)):
                    raise StorageError(f"{file} has changed since this run opened it; start again "
                                       "to read it as it is now")
            there = part.stat().st_size
            if there != size or file.size not in (-1, there):
                raise ConnectionError(f"{there} bytes came of {max(size, file.size)}")

        repeated(file.url, self.config, attempt)

    def listed(self, url: str) -> list[RemoteFile]:
        """The file of a URL, those of a pattern, or those in a folder and its folders `data` and
        `.nv-meta`, with their sizes and versions, by name. Raises as `file` and `RemoteFile.open`
        do."""
        root = declared(self.config, self.file(url).url)

        def attempt(left_s: float) -> list[tuple[str, dict]]:
            def ask(method: str, below: str = "", **keys):
                return call(root, self.config, method, url + below, timeout_s=left_s, **keys)

            if url.startswith("http"):
                return [(url, ask("info"))]
            if any(c in url for c in "*?["):
                return list(ask("glob", detail=True).items())
            info = ask("info")
            if info["type"] == "file":
                return [(url, info)]
            there = ask("ls", detail=True)
            folders = [d["name"] for d in there if d["type"] == "directory"]
            for name in ("/data", "/.nv-meta"):
                if any(f.rstrip("/").endswith(name) for f in folders):
                    there = [*there, *ask("ls", name, detail=True)]
            return [(d["name"], d) for d in there]

        found = repeated(url, self.config, attempt)
        scheme = url.split("://")[0]
        files = [(self.file(name if "://" in name else f"{scheme}://{name}"), info)
                 for name, info in sorted(found, key=itemgetter(0))
                 if info.get("type", "file") == "file"]
        return [replace(file, version=version_of(info),
                        size=-1 if info.get("size") is None else info["size"])
                for file, info in files]

    def each(self, urls: list[str], pattern: str) -> list[RemoteFile]:
        """The files of many URLs, as `listed`. pattern: of all of them, by which a store tells a
        thousand at a time; what it does not tell is asked for by itself, in threads that end."""
        there = {}
        if not pattern.startswith("http"):
            with suppress(NoAccess):  # a store may give files and no list of them
                there = {file.url: file for file in self.listed(pattern)}
        others = [url for url in urls if url not in there]
        with ThreadPoolExecutor(max(1, min(NUM_THREADS, len(others)))) as threads:
            there |= {url: file for url, [file] in zip(
                others, threads.map(self.listed, others), strict=True)}
        return [there[url] for url in urls]


NOWHERE = Storage()  # nothing is declared


def fetch_ahead(files: Iterable[object]) -> None:
    """Begins to fetch those that are remote files, in threads of this process. What fails is tried
    again, and reported, when the file is opened."""
    wanted = {file.url: file for file in files if isinstance(file, RemoteFile)}
    if wanted and os.getpid() not in _waiting:
        _waiting[os.getpid()] = started = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            threading.Thread(target=_fetch_all, args=(started,), daemon=True).start()
    for file in wanted.values():
        _waiting[os.getpid()].put(file)


def _fetch_all(files: queue.SimpleQueue) -> None:
    while True:
        with suppress(Exception):  # whoever needs the file gets the error
            files.get().open().close()

