"""GPUs without one, for copies to the host. A copy to pinned memory that does not block is made
when somebody waits for an event that is behind it on the same GPU, and not before; it is lost if
the memory is no longer pinned by then. Memory that is unpinned is overwritten at once. It changes
torch.cuda for good: use it in a process of its own."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import torch

GPU = torch.device("cuda", 3)  # of the tensors


class OnGpu(torch.Tensor):
    """A tensor that says that it is on GPU 3."""

    is_cuda, device = True, GPU

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_ or not (kwargs or {}).get("non_blocking"):
            return super().__torch_function__(func, types, args, kwargs)
        target, source = args[0], args[1].as_subclass(torch.Tensor)
        if is_pinned(target):
            waiting[args[1].device].append(lambda: is_pinned(target) and target.copy_(source))
            return target
        return target.copy_(source)


waiting: dict[torch.device, list] = {torch.device("cuda", i): [] for i in range(4)}
pinned: dict[int, int] = {}  # address -> bytes
pinnings: list[int] = []  # bytes, of all calls


def is_pinned(x: torch.Tensor) -> bool:
    return any(start <= x.data_ptr() < start + size for start, size in pinned.items())


class _Event:
    def record(self, stream: SimpleNamespace | None = None) -> None:
        self._device = (stream or torch.cuda.current_stream()).device
        self._behind = len(waiting[self._device])

    def synchronize(self) -> None:
        for copy in waiting[self._device][:self._behind]:
            copy()
        del waiting[self._device][:self._behind]


def _pin(address: int, num_bytes: int, flags: int) -> int:
    assert not pinned, "the host pins more than one block"
    pinned[address] = num_bytes
    pinnings.append(num_bytes)
    return 0


def _unpin(address: int) -> int:
    ctypes.memset(address, 0xFF, pinned.pop(address))
    return 0


def install() -> None:
    """Puts the stand-ins into torch.cuda; the current GPU of a new thread is the first."""
    current = threading.local()
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: getattr(current, "index", 0)
    torch.cuda.set_device = lambda index: setattr(current, "index", index)
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(
        device=device or torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.Event = _Event
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=_pin, cudaHostUnregister=_unpin)
