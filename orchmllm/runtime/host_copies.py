"""What a save needs of the host's memory: the copies of a rank's tensors in one block."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, of the copies in a block
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs


class HostCopies:
    """Copies of tensors in one block of the host's memory, of their size. The block stays for the
    next save, because to make and to pin it takes longer than to copy, and goes with this object.
    torch would pin a power of two of bytes for each tensor, and keep it until the process ends.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def make(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """(copies; the event after which they are complete, None if they are). From a GPU they are
        made in the order of the other work of its stream. The next call overwrites them. Tensors
        may have any shape. Raises RuntimeError if there is not enough memory, or it cannot be
        pinned."""
        gpu = next((x.device for x in tensors.values() if x.is_cuda), None)
        sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors.values()]
        if sum(sizes) > len(self._block):
            self._reserve(sum(sizes), pinned=gpu is not None)
        rooms = self._block[:sum(sizes)].split(sizes)
        copies = {
            name: room[:x.nbytes].view(x.dtype).view(x.shape).copy_(x, non_blocking=True)
            for (name, x), room in zip(tensors.items(), rooms, strict=True)}
        if gpu is None:
            return copies, None
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(gpu))  # not of the thread's current GPU
        return copies, copied

    def _reserve(self, num_bytes: int, pinned: bool) -> None:
        self._unpin()  # what is freed while it is pinned stays with the driver
        self._block = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        try:
            room = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE)
        except OSError as e:
            raise RuntimeError(_no_room("lacks", num_bytes, str(e))) from e
        room.madvise(mmap.MADV_DONTFORK)  # a fork copies pinned pages at once (Linux 5.12)
        block = torch.frombuffer(room, dtype=torch.uint8)[:num_bytes]
        if pinned:
            start, cudart = block.data_ptr(), torch.cuda.cudart()
            if error := int(cudart.cudaHostRegister(start, num_bytes, PORTABLE)):
                raise RuntimeError(_no_room("cannot pin", num_bytes, f"CUDA error {error}"))
            self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, start)
            self._unpin.atexit = False  # CUDA is gone by then
        self._block = block


def _no_room(problem: str, num_bytes: int, cause: str) -> str:
    return (f"the host {problem} the {num_bytes / 1e9:.1f} GB for the copies of a save ({cause}): "
            "checkpoint.asynchronous=false saves without them")
