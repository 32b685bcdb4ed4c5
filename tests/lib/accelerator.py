"""A device without a GPU: torch's slot for third-party backends, with fake tensors on it, so that
FSDP2 runs as on a GPU (streams and events are the host's) and every operator sees where its
arguments are. It changes the process for good: use it in one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from orchmllm.sharding import fsdp

NAME = "accel"


class _Stream(torch.cpu.Stream):
    def record_event(self, event: object = None) -> torch.cpu.Event:
        return event or torch.cpu.Event()


class _Module:
    """What FSDP2 asks of torch.cuda, as torch.accel."""

    Stream, Event = _Stream, torch.cpu.Event
    current_stream, stream = staticmethod(_Stream), staticmethod(torch.cpu.stream)
    current_device, device_count = staticmethod(lambda: 0), staticmethod(lambda: 1)
    is_available = staticmethod(lambda: False)  # nothing is computed on it
    is_initialized = staticmethod(lambda: True)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    _is_in_bad_fork = staticmethod(lambda: False)


@contextmanager
def accelerator(num_ranks: int, rank: int = 1) -> Iterator[torch.device]:
    """The device, in a fake default group of num_ranks, which replaces the process's and stays;
    tensors made inside have no memory."""
    dist.destroy_process_group()
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, _Module())
    dist.init_process_group(f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=rank,
                            world_size=num_ranks)
    with (really(fsdp, "make_mesh"), really(_fully_shard, "_get_post_forward_mesh_info"),
          patch.object(torch.accelerator, "current_stream", _Stream),
          # Or copies of real tensors to the device are computed.
          patch.object(FakeTensorMode, "avoid_device_init", True),
          FakeTensorMode(allow_non_fake_inputs=True)):
        yield torch.device(NAME, 0)


def really(module: ModuleType, name: str) -> AbstractContextManager:
    """A function that makes a mesh runs on real tensors: a mesh reads its ranks."""
    make = getattr(module, name)

    def run(*args):
        with unset_fake_temporarily():
            return make(*args)

    return patch.object(module, name, run)
