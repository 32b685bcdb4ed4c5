"""Messages between processes that do not trust each other's bytes: a JSON header and arrays, both
of a length that is told first. Nothing is unpickled.

    "orch" | header bytes (u32) | array bytes (u64) | header (JSON) | arrays, one after the other

The header's "arrays" holds [dtype, shape] of each. Little-endian.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

_PREFIX = struct.Struct("<4sIQ")
MAGIC = b"orch"
MAX_HEADER_BYTES = 16 << 20
_DTYPES = {name: np.dtype(name) for name in ("uint8", "int32", "int64", "float32", "float64")}


class WireError(ConnectionError):
    """What came is no message, is too large, or did not come in time."""


class Channel:
    """A connected socket. timeout_s: within which a whole message has to be sent or come."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock, self.timeout_s = sock, timeout_s

    def send(self, header: dict, arrays: Sequence[np.ndarray] = ()) -> None:
        """arrays: of any shapes. Raises WireError or another OSError where the other side is gone
        or does not read."""
        arrays = [np.ascontiguousarray(a) for a in arrays]
        text = json.dumps({**header, "arrays": [[a.dtype.name, a.shape] for a in arrays]}).encode()
        self.sock.settimeout(self.timeout_s)
        try:
            self.sock.sendall(_PREFIX.pack(MAGIC, len(text), sum(a.nbytes for a in arrays)) + text)
            for array in arrays:
                self.sock.sendall(memoryview(array.reshape(-1).view(np.uint8)))
        except TimeoutError as error:
            raise WireError(f"nothing was taken for {self.timeout_s:g} s") from error

    def receive(self, max_bytes: int, *, idle: bool = False, max_header: int = MAX_HEADER_BYTES
                ) -> tuple[dict, list[np.ndarray]]:
        """(header, arrays) of the next message. idle: it may begin at any time. Raises WireError
        for more than max_bytes of arrays, or max_header of header, before it allocates them;
        EOFError where the other side has closed."""
        if idle:
            self.sock.settimeout(None)
            self.sock.recv(1, socket.MSG_PEEK)
        deadline = time.monotonic() + self.timeout_s
        first = self._read(_PREFIX.size, deadline)
        magic, header_bytes, array_bytes = _PREFIX.unpack(first)
        if magic != MAGIC:
            raise WireError(f"this is no message: it begins with {bytes(first[:4])!r}")
        if header_bytes > max_header or array_bytes > max_bytes:
            raise WireError(f"a message of {header_bytes} + {array_bytes} bytes: more than the "
                            f"limit of {max_header} + {max_bytes}")
        try:
            header = json.loads(self._read(header_bytes, deadline).tobytes())
            kinds = [(_DTYPES[name], [int(n) for n in shape])
                     for name, shape in header.pop("arrays")]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise WireError(f"the header of a message cannot be read: {error}") from error
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
        if sum(sizes) != array_bytes or any(n < 0 for _, shape in kinds for n in shape):
            raise WireError(f"the arrays of a message have {sum(sizes)} bytes, not {array_bytes}")
        return header, [self._read(size, deadline).view(dtype).reshape(shape)
                        for size, (dtype, shape) in zip(sizes, kinds, strict=True)]

    def _read(self, size: int, deadline: float) -> np.ndarray:
        data = np.empty(size, np.uint8)
        view, at = memoryview(data), 0
        while at < size:
            self.sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                count = self.sock.recv_into(view[at:])
            except TimeoutError as error:
                raise WireError(f"no whole message within {self.timeout_s:g} s") from error
            if not count:
                raise EOFError("the other side has closed the connection")
            at += count
        return data

    def close(self) -> None:
        """Also ends what another thread sends or receives."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
