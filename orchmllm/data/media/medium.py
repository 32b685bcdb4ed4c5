"""A medium: where its bytes are (a file, a slice of a tar, or bytes), and how they are read in
place. Nothing here unpacks or unpickles.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from orchmllm.data.media.kinds import container, listed, modality_of, refusal
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import RemoteFile
from orchmllm.plan.layout import TEXT, VISION

MAX_MEMBER_BYTES = 512 << 20  # a medium's encoded bytes
MAX_NAME, MAX_REASON = 100, 400  # characters of them in errors
ZEROS = 1024  # at the end of a file
ZEROS_AT_END = "truncated: it ends in zeros, so its end was never written; fetch the file again"
# What the machine has run out of says nothing of a file.
OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def printable(text: str) -> str:
    """text, with lone surrogates escaped: they can be neither printed nor sent."""
    return text.encode("utf-8", "backslashreplace").decode()


def told(text: str, most: int) -> str:
    """text as it is printed, without its middle where it is longer than `most`."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2):]}"


class RowError(ValueError):
    """A row that cannot be used. reason: what is wrong and the cure. file: the medium it is about,
    or empty. modality: that medium's, or TEXT."""

    def __init__(self, reason: str, file: str = "", modality: int = TEXT):
        super().__init__(reason)
        self.reason, self.file = told(reason, MAX_REASON), told(file, MAX_NAME)
        self.modality = modality


class MediaError(Exception):
    """A medium that cannot be used. path: the file; reason: what is wrong with it; segment: its
    position in the example's segment list, where a dataset raised it; modality: the medium's, or
    TEXT where the row itself cannot be used."""

    def __init__(self, path: str | os.PathLike, reason: str, segment: int | None = None,
                 modality: int = TEXT):
        super().__init__(str(path), reason, segment)
        self.path, self.reason = told(str(path), MAX_NAME), told(reason, MAX_REASON)
        self.segment, self.modality = segment, modality

    def __str__(self) -> str:
        where = "" if self.segment is None else f" (segment {self.segment})"
        return f"{self.path}{where}: {self.reason}" if self.path else self.reason


class VideoHeader(NamedTuple):
    """Size in pixels as displayed. num_frames: that decoding yields. duration_s: from the first
    frame to the end of the last. has_audio: whether there is an audio track. num_groups: runs of
    frames that decoding can begin at, from one key frame to the next."""

    width: int
    height: int
    num_frames: int
    duration_s: float
    has_audio: bool
    num_groups: int = 1


class Frame(NamedTuple):
    """A picture of a video: the one that is seen `second` after the first. demuxer: see
    CONTAINERS."""

    second: float
    video: VideoHeader
    demuxer: str


class Sampled(NamedTuple):
    """Which of the frames that are read of a video, or of a list of images, this one is: the
    `number`-th (from 0) of those at `seconds`, of length_s that are read."""

    number: int
    seconds: tuple[float, ...]
    length_s: float


class VideoSampling(NamedTuple):
    """Which frames of a video are read: `frames` of them at equal distances, or (0) fps a second,
    and at most max_frames. audio: whether its sound follows them as a clip."""

    fps: float = 1.0
    frames: int = 0
    max_frames: int = 64
    audio: bool = False


class Part(NamedTuple):
    """Seconds of a clip or a video that are read. end: None where it is not known."""

    start: float
    end: float | None


class Medium(NamedTuple):
    """modality: VISION or AUDIO. name: for people. The bytes are `data`, or `size` bytes at
    `offset` of the file `path` (size -1: the whole file). frame: which picture of a video.
    sampled: where it is among those that are read of it. part: first and last second of a clip that
    are read; None: all of it."""

    modality: int
    name: str
    path: str | os.PathLike | RemoteFile = ""
    offset: int = 0
    size: int = -1
    data: bytes | None = None
    frame: Frame | None = None
    sampled: Sampled | None = None
    part: tuple[float, float] | None = None

    @property
    def whole_file(self) -> str | os.PathLike | None:
        """Path of the file of this machine that it is all of, or None."""
        is_part = self.data is not None or self.size >= 0 or isinstance(self.path, RemoteFile)
        return None if is_part else self.path


def given_by(value: object) -> tuple[object, object]:
    """(Content, name) of what a row gives for a medium; None for one that it does not give."""
    content, name = (value, None) if isinstance(value, bytes) else (None, value)
    if isinstance(value, Mapping):
        content, name = value.get("bytes"), value.get("path", value.get("url"))
        if content is None and name is None and isinstance(value.get("data"), str):
            name = f"data:;base64,{value['data']}"  # of a content part
    return (name, None) if isinstance(name, Medium) else (content, name)


def is_image(value: object) -> bool:
    """Whether a video's entry is an image, a frame, by its name. A GIF is a video."""
    content, name = given_by(value)
    name = content.name if isinstance(content, Medium) else name
    return modality_of(name) == VISION and not name.lower().endswith(".gif")


class _Slice(io.RawIOBase):
    """Read-only view of `size` bytes at `offset` of a file, which it closes."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        super().__init__()
        self._file = file
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


def part_of(path: str | os.PathLike | RemoteFile, offset: int, size: int,
            buffer_size: int) -> io.BufferedReader:
    """`size` bytes at `offset` of a file. Raises OSError if it cannot be opened."""
    file = path.open() if isinstance(path, RemoteFile) else open(path, "rb", buffering=0)
    return io.BufferedReader(_Slice(file, offset, size), buffer_size)


@contextmanager
def reading(medium: Medium) -> Iterator[BinaryIO]:
    """The medium as a file. Names the medium in whatever its decoder raises. Raises MediaError."""
    try:
        with _opened(medium) as file:
            yield file
    except (MediaError, MemoryError, StorageError):
        raise
    except Exception as error:  # decoders raise a dozen different types on bad bytes
        if isinstance(error, OSError) and error.errno in OUT_OF:
            raise
        raise MediaError(medium.name, _reason(error, medium)) from error


def _opened(medium: Medium) -> BinaryIO:
    """What `reading` gives. Raises MediaError for a file that is not there or has a wrong size, and
    OSError."""
    path = medium.name
    if medium.data is not None:
        size = len(medium.data)
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
    if medium.data is not None:
        return io.BytesIO(medium.data)
    if medium.whole_file is None:
        return part_of(medium.path, medium.offset, size, 16384)
    return open(medium.path, "rb")


def ends_in_zeros(file: BinaryIO, begin: int = 0) -> bool:
    """Whether a file ends in a KiB of zeros behind byte `begin`, as broken downloads and copies do;
    uncompressed sound and pictures may end so, too."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(begin, end - ZEROS))
    return end - begin >= ZEROS and not file.read().strip(b"\0")


def _reason(error: Exception, medium: Medium) -> str:
    """What a decoder says, or what the file is where that is known to be something else. Raises
    OSError where the machine has run out of something."""
    try:
        with _opened(medium) as file:
            head = file.read(32)
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
