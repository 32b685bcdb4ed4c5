"""Which places a data file may name: a row can only point below the declared root, or carry the
bytes itself."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from orchmllm.data.media.kinds import REFUSED_SUFFIXES
from orchmllm.data.media.medium import (
    MAX_MEMBER_BYTES,
    Medium,
    Part,
    RowError,
    VideoSampling,
    given_by,
    printable,
    told,
)
from orchmllm.data.media.parts import cut, part_of, refuse_unread
from orchmllm.data.storage.clients import without_query
from orchmllm.data.storage.remote import NOWHERE, RemoteFile, Storage, is_url
from orchmllm.plan.layout import AUDIO, VISION

_BASE64 = re.compile(r"[A-Za-z0-9+/]{76}")


@lru_cache(maxsize=65536)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def resolve(name: str, root: str, *, absolute: bool) -> str:
    """Path of the medium `name` below `root` (a real path). absolute: whether absolute paths and
    file: URLs that lead there are allowed, i.e. the root was declared. Raises RowError."""
    shown = told(name, 60)
    if not name or "\0" in name or printable(name) != name:
        raise RowError(f"media path {shown!r} must be a non-empty string without NUL or lone "
                       "surrogates", name[:100])
    scheme = name.split(":", 1)[0].lower() if ":" in name else ""
    if scheme == "file" and name.startswith("file:///"):
        path = unquote(name[len("file://"):])
    elif "://" in name or scheme in ("file", "pipe", "data"):
        raise RowError(f"media path {shown!r} is a URL of a kind that is never fetched; "
                       "download the file below the media root and write its relative path",
                       name[:200])
    else:
        path = name
    pure = PurePosixPath(path)
    if pure.is_absolute() and not absolute:
        raise RowError(f"media path {shown!r} is absolute and no media_root is declared; write it "
                       "relative to the data file, or declare media_root", name)
    if ".." in pure.parts:
        raise RowError(f"media path {shown!r} leaves the folder {root}; write a path below it "
                       "without ..", name)
    full = os.path.join(root, path)
    real = os.path.realpath(full) if os.path.islink(full) else os.path.join(
        _real_folder(os.path.dirname(full)), os.path.basename(full))
    if not (real + os.sep).startswith(root.rstrip(os.sep) + os.sep):
        how = "a symbolic link leads" if full.startswith(root) else "leads"
        raise RowError(f"media path {shown!r}: {how} out of {root}; declare a media_root that "
                       "holds both, or copy the file", name)
    return full


def is_base64(text: str) -> bool:
    """Whether a text can be no path, and begins as the content of a file does."""
    return _BASE64.match(text) is not None and "." not in text


def from_base64(body: str, modality: int, name: str) -> Medium:
    """Raises RowError if `body` is not base64."""
    try:
        body = "".join(body.split()) if "\n" in body else body
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
    names. storage: what may be read of other machines. video: what is read of videos. part: of the
    row's clip or video. taken: is told of what a row gives for media, and of the medium, or None
    where it cannot be used."""

    path: str
    declared: bool = False
    prefix: str = ""
    storage: Storage = NOWHERE
    video: VideoSampling = VideoSampling()
    part: Part | None = None
    taken: list[tuple[object, Medium | None]] | None = None

    def of(self, keys: object) -> MediaRoot:
        """With the part that keys of a medium or a content part name. Raises RowError."""
        if not isinstance(keys, Mapping):
            return self
        refuse_unread(keys)
        part = part_of(keys)
        return self if part is None else replace(self, part=part)

    def medium(self, modality: int, value: object) -> Medium:
        """An image, or a clip or its part. value: see `file`. Raises RowError."""
        medium = self.file(modality, value)
        if modality == AUDIO:
            return cut(medium, self.of(value).part)
        if isinstance(value, Mapping) and part_of(value):
            raise RowError("an image has no start and no end: leave the keys out", medium.name,
                           VISION)
        return medium

    def file(self, modality: int, value: object) -> Medium:
        """What a row holds for one medium: a path, a data: URL, bytes, or Hugging Face's
        {"bytes", "path"}; all of it. Raises RowError."""
        medium = None
        try:
            if isinstance(value, Mapping):
                refuse_unread(value)
            medium = self._medium(modality, value)
            return medium
        except RowError as error:
            error.modality = modality
            raise
        finally:
            if self.taken is not None:
                self.taken.append((value, medium))

    def _medium(self, modality: int, value: object) -> Medium:
        kind = "image" if modality == VISION else "audio"
        data, value = given_by(value)
        if isinstance(data, Medium):
            return data._replace(modality=modality)
        if data is not None:
            name = value if isinstance(value, str) and value else f"embedded {kind}"
            return Medium(modality, printable(name), data=_as_bytes(data, kind))
        if not isinstance(value, str) or not value:
            raise RowError(f"a medium is {value!r:.80}: must be a non-empty string (a path below "
                           f"the media root), or bytes (in {kind!r})")
        if value.startswith("data:"):
            head, _, body = value.partition(",")
            name = f"{kind} in a data: URL"
            if not head.endswith(";base64"):
                raise RowError(f"{name} must be base64 (data:image/png;base64,...)", name)
            return from_base64(body, modality, name)
        if is_base64(value):
            return from_base64(value, modality, f"embedded {kind}")
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
