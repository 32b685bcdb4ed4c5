"""Where a medium's bytes are, and which places a data file may name.

A row can only point below the declared root (or carry the bytes itself); what it points at is read
in place: a file, a slice of a tar, or bytes. Nothing here unpacks, downloads or unpickles.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple
from urllib.parse import unquote

from orchmllm.data.media.kinds import REFUSED_SUFFIXES, container, listed, refusal
from orchmllm.data.storage.clients import StorageError, without_query
from orchmllm.data.storage.remote import NOWHERE, RemoteFile, Storage, is_url
from orchmllm.plan.layout import TEXT, VISION

MAX_MEMBER_BYTES = 512 << 20  # a medium's encoded bytes
# What the machine has run out of says nothing of a file.
OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def printable(text: str) -> str:
    """text, with lone surrogates escaped: they can be neither printed nor sent."""
    return text.encode("utf-8", "backslashreplace").decode()


class RowError(ValueError):
    """A row that cannot be used. reason: what is wrong and the cure. file: the medium it is about,
    or empty. modality: that medium's, or TEXT."""

    modality = TEXT

    def __init__(self, reason: str, file: str = ""):
        super().__init__(reason)
        self.reason, self.file = printable(reason), printable(file)


class MediaError(Exception):
    """A medium that cannot be used. path: the file; reason: what is wrong with it; segment: its
    position in the example's segment list, where a dataset raised it; modality: the medium's, or
    TEXT where the row itself cannot be used."""

    modality = TEXT

    def __init__(self, path: str | os.PathLike, reason: str, segment: int | None = None):
        super().__init__(str(path), reason, segment)
        self.path = printable(str(path))
        self.reason = printable(reason)
        self.segment = segment

    def __str__(self) -> str:
        where = "" if self.segment is None else f" (segment {self.segment})"
        return f"{self.path}{where}: {self.reason}" if self.path else self.reason


class Frame(NamedTuple):
    """A picture of a video: the one that is seen `second` after the first. width, height: as
    displayed; num_frames: of the whole video, by its header. demuxer: see CONTAINERS."""

    second: float
    width: int
    height: int
    num_frames: int
    demuxer: str


class VideoSampling(NamedTuple):
    """Which frames of a video are read: `frames` of them at equal distances, or (0) fps a second,
    and at most max_frames. audio: whether its sound follows them as a clip."""

    fps: float = 1.0
    frames: int = 0
    max_frames: int = 64
    audio: bool = False


class Medium(NamedTuple):
    """modality: VISION or AUDIO. name: for people. The bytes are `data`, or `size` bytes at
    `offset` of the file `path` (size -1: the whole file). frame: which picture of a video."""

    modality: int
    name: str
    path: str | os.PathLike | RemoteFile = ""
    offset: int = 0
    size: int = -1
    data: bytes | None = None
    frame: Frame | None = None


class _Slice(io.RawIOBase):
    """Read-only view of `size` bytes at `offset` of a file."""

    def __init__(self, path: str | os.PathLike | RemoteFile, offset: int, size: int) -> None:
        super().__init__()
        self._file = path.open() if isinstance(path, RemoteFile) else open(path, "rb", buffering=0)
        self._offset, self._size, self._at = offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        data = os.pread(self._file.fileno(), count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


MediumSource = Medium | str | os.PathLike


def medium_of(source: MediumSource) -> Medium:
    """The medium of a path."""
    return source if isinstance(source, Medium) else Medium(0, os.fspath(source), os.fspath(source))


@contextmanager
def reading(source: MediumSource) -> Iterator[object]:
    """What a decoder reads: the path of a whole file, else a binary file object. Names the medium
    in whatever the decoder raises. Raises MediaError."""
    medium = medium_of(source)
    try:
        with _opened(medium) as file:
            yield file
    except (MediaError, MemoryError, StorageError):
        raise
    except Exception as error:  # decoders raise a dozen different types on bad bytes
        if isinstance(error, OSError) and error.errno in OUT_OF:
            raise
        raise MediaError(medium.name, _reason(error, medium)) from error


@contextmanager
def _opened(medium: Medium) -> Iterator[object]:
    """What `reading` gives. Raises MediaError for a file that is not there or has a wrong size, and
    OSError."""
    path = medium.name
    file: object = medium.path
    if medium.data is not None:
        size, file = len(medium.data), io.BytesIO(medium.data)
    elif medium.size >= 0:
        size = medium.size
    elif isinstance(medium.path, RemoteFile):
        try:
            size = medium.path.num_bytes()
        except OSError as error:
            raise MediaError(path, f"cannot be fetched: {error.strerror or error}") from error
    else:
        try:
            info = os.stat(medium.path)
        except (OSError, ValueError) as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            reason = (f"the file is missing{_twin(medium.path)}" if missing
                      else f"cannot be read: {error}")
            raise MediaError(path, reason) from error
        if not stat.S_ISREG(info.st_mode):
            raise MediaError(path, "not a regular file")
        size = info.st_size
    if size == 0:
        raise MediaError(path, "the file is empty")
    if size > MAX_MEMBER_BYTES:
        raise MediaError(path, f"{size} bytes: more than the limit of {MAX_MEMBER_BYTES}")
    if medium.data is None and (medium.size >= 0 or isinstance(medium.path, RemoteFile)):
        with io.BufferedReader(_Slice(medium.path, medium.offset, size), 16384) as file:
            yield file
    else:
        yield file


@contextmanager
def binary(file: object) -> Iterator[BinaryIO]:
    """What `reading` gives, as a file object at its start."""
    if isinstance(file, io.IOBase):
        file.seek(0)
        yield file
    else:
        with open(file, "rb") as opened:
            yield opened


def head_of(source: MediumSource) -> bytes:
    """The first 32 bytes, by which a file's kind is told. Raises MediaError."""
    with reading(source) as file, binary(file) as opened:
        return opened.read(32)


def _reason(error: Exception, medium: Medium) -> str:
    """What a decoder says, or what the file is where that is known to be something else. Raises
    OSError where the machine has run out of something."""
    try:
        with _opened(medium) as file, binary(file) as opened:
            head = opened.read(32)
    except OSError as unread:
        if unread.errno in OUT_OF:
            raise
        return f"cannot be read: {unread}"
    text = re.sub("^(Error opening|cannot identify image file) (<[^>]*>|'.*?')(: |$)", "",
                  str(error))
    if not text or "Format not recognised" in text:
        text = f"no decoder knows its format; it must be one of {listed(medium.modality)}"
    if container(head) in ("mov", "matroska"):
        return ('it is a video or a clip in a container; list it in "videos" (with <video> in the '
                'text), or its sound in "audios"')
    return refusal(head) or f"{type(error).__name__}: {text}; its first bytes are {head[:8]!r}"


def _twin(path: str) -> str:
    """A file that is there under a name that looks the same, in words: file systems and archives
    differ in how they store accents."""
    for form in ("NFC", "NFD"):
        other = unicodedata.normalize(form, path)
        if other != path and os.path.exists(other):
            return (f", but one whose name differs only in Unicode normalisation is there: write "
                    f"the name in the row as {form}, or rename the file")
    return ""


@lru_cache(maxsize=65536)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def resolve(name: str, root: str, *, absolute: bool) -> str:
    """Path of the medium `name` below `root` (a real path). absolute: whether absolute paths and
    file: URLs that lead there are allowed, i.e. the root was declared. Raises RowError."""
    if not name or "\0" in name or printable(name) != name:
        raise RowError(f"media path {name!r:.200} must be a non-empty string without NUL or lone "
                       "surrogates", name[:100])
    scheme = name.split(":", 1)[0].lower() if ":" in name else ""
    if scheme == "file" and name.startswith("file:///"):
        path = unquote(name[len("file://"):])
    elif "://" in name or scheme in ("file", "pipe", "data"):
        raise RowError(f"media path {name[:200]!r} is a URL of a kind that is never fetched; "
                       "download the file below the media root and write its relative path",
                       name[:200])
    else:
        path = name
    pure = PurePosixPath(path)
    if pure.is_absolute() and not absolute:
        raise RowError(f"media path {name!r} is absolute and no media_root is declared; write it "
                       "relative to the data file, or declare media_root", name)
    if ".." in pure.parts:
        raise RowError(f"media path {name!r} leaves the folder {root}; write a path below it "
                       "without ..", name)
    full = os.path.join(root, path)
    try:
        real = os.path.realpath(full) if os.path.islink(full) else os.path.join(
            _real_folder(os.path.dirname(full)), os.path.basename(full))
    except (OSError, ValueError) as error:
        raise RowError(f"media path {name!r}: {error}", name) from error
    if not (real + os.sep).startswith(root.rstrip(os.sep) + os.sep):
        how = "a symbolic link leads" if full.startswith(root) else "leads"
        raise RowError(f"media path {name!r}: {how} out of {root}; declare a media_root that holds "
                       "both, or copy the file", name)
    return full


def from_data_url(url: str, modality: int, name: str) -> Medium:
    """The bytes of a data: URL (base64). Raises RowError."""
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise RowError(f"{name}: a data: URL must be base64 (data:image/png;base64,...)", name)
    return from_base64(body, modality, name)


def from_base64(body: str, modality: int, name: str) -> Medium:
    """Raises RowError if `body` is not base64."""
    try:
        return Medium(modality, name, data=base64.b64decode(body, validate=True))
    except (binascii.Error, ValueError) as error:
        raise RowError(f"{name}: not base64: {error}", name) from error


def _as_bytes(value: object, kind: str) -> bytes:
    """The "bytes" of a row's {"bytes", "path"}: bytes, or the list of their values that JSON has.
    Raises RowError: `bytes` itself takes a number for a size to allocate."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, list) and all(type(v) is int and 0 <= v <= 255 for v in value):
        return bytes(value)
    what = f"{value}" if type(value) in (int, float, bool) else f"a {type(value).__name__}"
    raise RowError(f'{kind}: "bytes" is {what:.80}: must be bytes, or a list of integers from 0 to '
                   "255; in JSON write a path, or a data: URL (base64)")


def refuse_kind(name: str, suffix: str = "") -> None:
    """Raises RowError if a name (or `suffix`, without the dot) is that of a kind of file that is
    not read."""
    kind, cure = REFUSED_SUFFIXES.get(suffix or Path(name).suffix[1:].lower(), ("", ""))
    if kind:
        raise RowError(f"{name!r}: {kind} is not read; {cure}", name)


@dataclass(frozen=True)
class MediaRoot:
    """Where a source's media may be. path: a real path, or the URL of a folder. declared: the
    recipe named it, so absolute paths that lead there are allowed. prefix: put before relative
    names. storage: what may be read of other machines. video: what is read of videos."""

    path: str
    declared: bool = False
    prefix: str = ""
    storage: Storage = NOWHERE
    video: VideoSampling = VideoSampling()

    def medium(self, modality: int, value: object) -> Medium:
        """What a row holds for one medium: a path, a data: URL, bytes, or Hugging Face's
        {"bytes", "path"}. Raises RowError."""
        try:
            return self._medium(modality, value)
        except RowError as error:
            error.modality = modality
            raise

    def _medium(self, modality: int, value: object) -> Medium:
        kind = "image" if modality == VISION else "audio"
        if isinstance(value, Medium):
            return value._replace(modality=modality)
        if isinstance(value, Mapping):
            data, value = value.get("bytes"), value.get("path", value.get("url"))
            if data is not None:
                name = value if isinstance(value, str) and value else f"embedded {kind}"
                return Medium(modality, printable(name), data=_as_bytes(data, kind))
        if isinstance(value, bytes):
            return Medium(modality, f"embedded {kind}", data=value)
        if not isinstance(value, str) or not value:
            raise RowError(f"a medium is {value!r:.200}: must be a non-empty string (a path below "
                           f"the media root), or bytes (in {kind!r})")
        if value.startswith("data:"):
            return from_data_url(value, modality, f"{kind} in a data: URL")
        refuse_kind(value)
        name = value if value.startswith("/") or ":" in value else os.path.join(self.prefix, value)
        if is_url(value) or is_url(self.path):
            return Medium(modality, without_query(name), self._remote(name))
        return Medium(modality, name, resolve(name, self.path, absolute=self.declared))

    def _remote(self, name: str) -> RemoteFile:
        """The file of a URL, or of a name relative to one. Raises RowError."""
        printed = printable(name)
        if printed != name or "\0" in name or name.startswith(("/", "file:", "pipe:")):
            raise RowError(f"media path {printed!r:.200} must be a URL, or relative to "
                           f"{self.path}, without NUL or lone surrogates", printed[:100])
        try:
            return (self.storage.file(name, MAX_MEMBER_BYTES) if is_url(name)
                    else self.storage.below(self.path, name, MAX_MEMBER_BYTES))
        except ValueError as error:
            raise RowError(str(error), without_query(printed)[:200]) from error
