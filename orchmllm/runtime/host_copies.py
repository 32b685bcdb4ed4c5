"""What a save needs of the host's memory: the copies of a rank's tensors in one block, and a file
that is written from them tensor by tensor."""

from __future__ import annotations

import json
import mmap
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

ALIGNMENT = 64  # bytes, of the copies in a block
PORTABLE = 1  # cudaHostRegisterPortable: pinned for all GPUs
SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor (of any shape), which shares its memory."""
    return {name: (x.to_local() if isinstance(x, DTensor) else x).detach()
            for name, x in tensors.items()}


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


class ShardWriter(HuggingFaceStorageWriter):
    """Writes this rank's file of a checkpoint from `parts`, one tensor after the other: torch's own
    writer makes the whole file in memory before. parts: as `local_parts` gives them."""

    def __init__(self, folder: Path, parts: Mapping[str, Tensor]) -> None:
        """parts: of any shape."""
        super().__init__(str(folder), save_distributed=True)
        self._parts = parts

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # read for an index alone, which sharded files have not
        if plan.items:
            offsets = {i.index.fqn: list(i.tensor_data.chunk.offsets) for i in plan.items}
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            write_safetensors(Path(self.path) / name, {k: self._parts[k] for k in offsets}, {
                "DCP_SHARDING_INFO": json.dumps(
                    {k: {"saved_offsets": v} for k, v in offsets.items()}),
                "DCP_VERSION": "1.0", "format": "pt"})
        return done


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """A file in the safetensors format of tensors of any shape; at most one is copied at a time.
    Raises KeyError for a dtype that no checkpoint has."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {"__metadata__": metadata}, 0
    for name, x in ordered:  # the larger elements first, so that all are aligned
        header[name] = {"dtype": SAFETENSORS[x.dtype], "shape": list(x.shape),
                        "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, x in ordered:
            f.write(x.cpu().contiguous().flatten().view(torch.uint8).numpy())
