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
from collections.abc import Iterator
from itertools import count
from typing import BinaryIO

import numpy as np

from orchmllm.data.media import containers
from orchmllm.data.media import frames as video_frames
from orchmllm.data.media.medium import MediaError, Medium, VideoHeader, part_of, reading
from orchmllm.data.wire import Channel, WireError

INSTALL = "it is read with PyAV, which is not installed: pip install '.[video]' in the clone"
CPU_S = 120  # of a request
WALL_S = 900.0  # a request that only waits
MEMORY_BYTES = 8 << 30  # of the process, addresses included
MAX_BYTES = 4 << 30  # of a request or an answer
FRAMES_BYTES = 1 << 30  # in an answer


def video_header(medium: Medium, demuxer: str) -> VideoHeader:
    """Raises MediaError."""
    return VideoHeader(*_ask(medium, demuxer, "video_header")[0])


def frames(medium: Medium, demuxer: str, seconds: list[float], header: VideoHeader
           ) -> list[np.ndarray]:
    """See orchmllm.data.media.frames.read_frames. Raises MediaError."""
    most = max(1, FRAMES_BYTES // (3 * header.width * header.height))
    return [frame for start in range(0, len(seconds), most) for frame in _ask(
        medium, demuxer, "read_frames", seconds[start: start + most], header)[1]]


def audio_header(medium: Medium, demuxer: str) -> tuple[int, int, int]:
    """(samples per channel, Hz, channels). Raises MediaError."""
    return tuple(_ask(medium, demuxer, "audio_header")[0])


def audio_samples(medium: Medium, demuxer: str) -> Iterator[np.ndarray]:
    """Blocks of (samples, channels) float32. No other request is answered before the last block is
    taken, or the iterator is closed. Raises MediaError."""
    for _, blocks in _answers(medium, demuxer, "read_audio"):
        yield from blocks


class Child:
    """The process. It ends with the one that started it, at the latest after a request."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = (f"import sys; sys.path[:] = {sys.path!r}; "
                f"from orchmllm.data.media.av_process import serve; serve({theirs.fileno()})")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()])
        self.channel = Channel(ours, WALL_S)

    def end(self) -> int:
        """Kills it if it is still there. Returns its exit code, -n where signal n ended it."""
        self.channel.close()
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
_child: Child | None = None


def has_pyav() -> bool:
    """Whether containers can be read here."""
    return importlib.util.find_spec("av") is not None


def _ask(medium: Medium, demuxer: str, what: str, *args) -> tuple[list, list[np.ndarray]]:
    """What a function of containers returns: (values, arrays)."""
    [answer] = _answers(medium, demuxer, what, *args)
    return answer


def _answers(medium: Medium, demuxer: str, what: str, *args
             ) -> Iterator[tuple[list, list[np.ndarray]]]:
    """(values, arrays) of each message of an answer. Raises MediaError."""
    if not has_pyav():
        raise MediaError(medium.name, INSTALL)
    request = {"what": what, "demuxer": demuxer, "args": args, "path": str(medium.path),
               "offset": medium.offset, "size": medium.size, "cpu_s": CPU_S}
    with reading(medium) as file:
        is_local = medium.data is None and isinstance(medium.path, str | os.PathLike)
        data = [] if is_local else [np.frombuffer(file.read(), np.uint8)]
    for answer, arrays in _answered(request, data, medium.name):
        if "refused" in answer:
            raise MediaError(medium.name, answer["refused"])
        yield answer["values"], arrays


def _answered(request: dict, data: list[np.ndarray], name: str
              ) -> Iterator[tuple[dict, list[np.ndarray]]]:
    """The messages of an answer, of which the last is not followed by `more`. Asks again where the
    process had answered others before: what ended it may be no fault of this file."""
    global _child
    num_given = 0
    with _lock:
        while True:
            fresh = _child is None
            try:
                if _child is None:
                    _child = Child()
                _child.channel.send(request, data)
                for k in count():
                    answer = _child.channel.receive(MAX_BYTES)
                    if not answer[0].get("more"):
                        break
                    if k == num_given:
                        num_given += 1
                        yield answer
                break
            except (OSError, EOFError) as error:
                how = str(error) if _child is None else _ended(error)
                if fresh:
                    raise MediaError(name, f"{how}; the file is damaged, or takes too long: "
                                           "convert it (ffmpeg -i in -c:v libx264 out.mp4)"
                                     ) from error
            except BaseException:  # its answer may be under way
                close()
                raise
    yield answer


def _ended(error: Exception) -> str:
    """Ends the process; says how it ended."""
    seconds, code = _child.channel.timeout_s, close()
    if isinstance(error, WireError):
        return f"no answer within {seconds:g} s"
    if code == -signal.SIGXCPU:
        return f"more than {CPU_S} s of CPU time"
    return f"FFmpeg crashed ({signal.Signals(-code).name})" if code < 0 else "FFmpeg ended"


def close() -> int:
    """Ends the process of this process; its exit code."""
    global _child
    ended, _child = _child, None
    return 0 if ended is None else ended.end()


def _forked() -> None:
    """A fork has neither the process nor, perhaps, the lock."""
    global _lock, _child
    if _child is not None:
        _child.channel.sock.close()  # without a shutdown, which would reach the one that forked
    _lock, _child = threading.Lock(), None


atexit.register(close)
os.register_at_fork(after_in_child=_forked)


# In the process.

def serve(fd: int) -> None:
    """Answers requests on the socket until its other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the one who asks decides when it ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import av

    av.logging.set_level(None)
    channel = Channel(socket.socket(fileno=fd), WALL_S)
    while True:
        try:
            request, data = channel.receive(MAX_BYTES, idle=True)
        except (EOFError, OSError):
            return
        try:
            for answer in _answer(request, data):
                channel.send(*answer)
        except OSError:
            return
        request = data = answer = None  # else up to a GiB is held until the next request


_FUNCTIONS = {function.__name__: function for function in (
    video_frames.video_header, video_frames.read_frames, containers.audio_header,
    containers.read_audio)}


def _answer(request: dict, data: list[np.ndarray]) -> Iterator[tuple[dict, list[np.ndarray]]]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + request["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        with _file(request, data) as file:
            out = _FUNCTIONS[request["what"]](file, request["demuxer"], *request["args"])
            if request["what"] == "read_audio":
                for block in out:
                    yield {"values": [], "more": True}, [block]
                out = []
    except containers.BadFile as error:
        yield {"refused": str(error)}, []
    except (MemoryError, OSError, ArithmeticError, LookupError, TypeError) as error:
        yield {"refused": f"{type(error).__name__}: {error}"}, []
    else:
        is_read = request["what"].startswith("read")
        yield ({"values": []}, out) if is_read else ({"values": out}, [])


def _file(request: dict, data: list[np.ndarray]) -> BinaryIO:
    if data:
        return io.BytesIO(data[0])
    path, size = request["path"], request["size"]
    size = os.path.getsize(path) if size < 0 else size
    return part_of(path, request["offset"], size, 1 << 16)
