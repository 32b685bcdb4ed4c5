"""Videos and clips in containers, for the rank and its workers: what orchmllm.data.media.containers
says, from a process that may crash.

Each process that asks has one such process of its own, which it starts when it meets the first
container. A crash of FFmpeg, a request that takes too much CPU time, or one that never ends costs
the file, and not the run.
"""

from __future__ import annotations

import atexit
import importlib.util
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import numpy as np

from orchmllm.data.media import containers
from orchmllm.data.media import frames as video_frames
from orchmllm.data.media.frames import VideoHeader
from orchmllm.data.media.medium import MediaError, Medium, _Slice, reading
from orchmllm.data.wire import Channel, WireError

INSTALL = "it is read with PyAV, which is not installed: pip install '.[video]' in the clone"
CPU_S = 120  # of a request
WALL_S = 900.0  # a request that only waits
MEMORY_BYTES = 8 << 30  # of the process, addresses included
MAX_ANSWER_BYTES = 4 << 30


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("av") is not None


def video_header(medium: Medium, demuxer: str) -> VideoHeader:
    """Raises MediaError."""
    if _is_local(medium):
        with suppress(OSError):  # `reading` says what is wrong
            info = os.stat(medium.path)
            return _header(medium, demuxer, (info.st_size, info.st_mtime_ns))
    return _header.__wrapped__(medium, demuxer, None)  # which keeps nothing


def _is_local(medium: Medium) -> bool:
    return medium.data is None and isinstance(medium.path, str | os.PathLike)


@lru_cache(maxsize=4096)
def _header(medium: Medium, demuxer: str, stamp: tuple[int, int] | None) -> VideoHeader:
    return VideoHeader(*_ask(medium, demuxer, "video_header")[0])


def frames(medium: Medium, demuxer: str, seconds: list[float], num_frames: int,
           displayed: tuple[int, int], size: tuple[int, int]) -> list[np.ndarray]:
    """See orchmllm.data.media.frames.read_frames. Raises MediaError."""
    return _ask(medium, demuxer, "read_frames", seconds, num_frames, displayed, size)[1]


def audio_header(medium: Medium, demuxer: str) -> tuple[int, int, int]:
    """(samples per channel, Hz, channels). Raises MediaError."""
    return tuple(_ask(medium, demuxer, "audio_header")[0])


def audio_samples(medium: Medium, demuxer: str) -> np.ndarray:
    """(samples, channels) float32. Raises MediaError."""
    return _ask(medium, demuxer, "read_audio")[1][0]


class _Process:
    """One asks at a time. It ends with the process that started it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = ("import sys; from orchmllm.data.media.av_process import serve; "
                "serve(int(sys.argv[1]))")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env)
        self._channel = Channel(ours, WALL_S)

    def ask(self, request: dict, arrays: list[np.ndarray]) -> tuple[object, list[np.ndarray]]:
        self._channel.send(request, arrays)
        return self._channel.receive(MAX_ANSWER_BYTES)

    def end(self, late: bool) -> str:
        """Says how it ended. late: it has not."""
        if late:
            self._popen.kill()
        self._channel.close()
        code = -self._popen.wait()
        if late:
            return f"no answer within {self._channel.timeout_s:g} s"
        if code == signal.SIGXCPU:
            return f"more than {CPU_S} s of CPU time"
        return f"FFmpeg crashed ({signal.Signals(code).name})" if code > 0 else "FFmpeg ended"


_lock = threading.Lock()
_process: _Process | None = None


def _ask(medium: Medium, demuxer: str, what: str, *args) -> tuple[list, list[np.ndarray]]:
    """What a function of containers returns: (values, arrays)."""
    if not _installed():
        raise MediaError(medium.name, INSTALL)
    request = {"what": what, "demuxer": demuxer, "args": args, "path": str(medium.path),
               "offset": medium.offset, "size": medium.size, "cpu_s": CPU_S}
    with reading(medium) as file:
        data = [] if _is_local(medium) else [np.frombuffer(file.read(), np.uint8)]
        answer, arrays = _answered(request, data, medium.name)
    if "refused" in answer:
        raise MediaError(medium.name, answer["refused"])
    return answer["values"], arrays


def _answered(request: dict, data: list[np.ndarray], name: str) -> tuple[dict, list[np.ndarray]]:
    """Asks again where the process had answered others before: what ended it may be no fault of
    this file."""
    global _process
    with _lock:
        while True:
            fresh = _process is None
            try:
                if _process is None:
                    _process = _Process()
                return _process.ask(request, data)
            except (OSError, EOFError) as error:
                ended, _process = _process, None
                how = ended.end(isinstance(error, WireError)) if ended else str(error)
                if fresh:
                    raise MediaError(name, f"{how}; the file is damaged, or takes too long: "
                                           "convert it (ffmpeg -i in -c:v libx264 out.mp4)"
                                     ) from error
            except BaseException:  # its answer may be under way
                close()
                raise


def close() -> None:
    """Ends the process of this process."""
    global _process
    ended, _process = _process, None
    if ended is not None:
        ended.end(late=True)


def _forked() -> None:
    """A fork has neither the process nor, perhaps, the lock."""
    global _lock, _process
    if _process is not None:
        _process._channel.sock.close()  # without a shutdown, which would reach the one that forked
    _lock, _process = threading.Lock(), None


atexit.register(close)
os.register_at_fork(after_in_child=_forked)


# In the process.

def serve(fd: int) -> None:
    """Answers requests on the socket until its other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the one who asks decides when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    import av

    av.logging.set_level(None)
    channel = Channel(socket.socket(fileno=fd), WALL_S)
    while True:
        try:
            request, arrays = channel.receive(MAX_ANSWER_BYTES, idle=True)
        except (EOFError, OSError):
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + request["cpu_s"]
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))
        try:
            channel.send(*_answer(request, arrays))
        except OSError:
            return


_FUNCTIONS = {function.__name__: function for function in (
    video_frames.video_header, video_frames.read_frames, containers.audio_header,
    containers.read_audio)}


def _answer(request: dict, arrays: list[np.ndarray]) -> tuple[dict, list[np.ndarray]]:
    function: Callable = _FUNCTIONS[request["what"]]
    if arrays:
        file, size = io.BytesIO(arrays[0].tobytes()), arrays[0].nbytes
    elif request["size"] >= 0:
        size = request["size"]
        file = io.BufferedReader(_Slice(request["path"], request["offset"], size), 1 << 16)
    else:
        file, size = open(request["path"], "rb"), os.path.getsize(request["path"])
    try:
        with file:
            size = [size] if request["what"].endswith("header") else []
            values = function(file, request["demuxer"], *size, *request["args"])
    except containers.BadFile as error:
        return {"refused": str(error)}, []
    except (MemoryError, OSError, ArithmeticError, LookupError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}, []
    if request["what"] == "read_frames":
        return {"values": []}, values
    return ({"values": []}, [values]) if isinstance(values, np.ndarray) else (
        {"values": list(values)}, [])
