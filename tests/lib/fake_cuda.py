"""A CUDA device without CUDA: fake tensors whose device is `cuda`, in a build of torch for CPUs, so
that every branch for CUDA runs and no value can be read. It changes a process before torch is
there, so that what uses it runs in one of its own."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchmllm.models import attention
from orchmllm.sharding import fsdp
from tests.lib.accelerator import really

SOURCE = Path(__file__).with_name("noop_cuda.cpp")
# torch asks once, early, what devices there are.
START = ("import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); "
         "from tests.lib.fake_cuda import answer; answer(*sys.argv[2:])")


def run_with_guard(folder: Path, module: str, function: str, *args: Any) -> Any:
    """What a function of a test module returns in a process with a device guard, built into the
    folder, where it can use `fake_cuda`. Arguments and result are JSON."""
    ran = subprocess.run([sys.executable, "-c", START, str(_library(folder)), module, function,
                          json.dumps(args)], capture_output=True, text=True, timeout=560)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def answer(module: str, function: str, args: str) -> None:
    print(json.dumps(getattr(import_module(module), function)(*json.loads(args))))


def _library(folder: Path) -> Path:
    """Skips the test where it cannot be built, or where there is a real device."""
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA itself")
    if not (compiler := shutil.which("g++")):
        pytest.skip("no g++ to build a stand-in for CUDA")
    root = Path(torch.__file__).parent  # of another clone, which may be gone, it cannot be loaded
    about = hashlib.sha256(
        f"{root} {torch.__version__} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    kept = Path(os.environ["XDG_CACHE_HOME"]) / f"noop_cuda_{about}.so"  # between runs of the tests
    if kept.exists():
        return kept
    out = folder / "noop_cuda.so"
    built = subprocess.run(
        [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include", str(SOURCE),
         f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib", "-o", str(out)],
        capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-2000:]
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(out, part := kept.with_suffix(f".{os.getpid()}"))
    part.replace(kept)
    return kept


class _Stream(torch.cpu.Stream):
    device, stream_id, device_index, cuda_stream = torch.device("cuda", 0), 0, 0, 0

    def record_event(self, event: object = None) -> torch.cpu.Event:
        return event or torch.cpu.Event()


@contextmanager
def fake_cuda(num_ranks: int) -> Iterator[torch.device]:
    """The device, on the first rank of a fake default group of num_ranks, which stays; tensors made
    inside have no memory."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=0,
                                world_size=num_ranks)
    asked = {
        "is_initialized": lambda: True, "_lazy_init": lambda: None, "current_device": lambda: 0,
        "device_count": lambda: 1, "current_stream": lambda *a: _Stream(),
        "get_device_capability": lambda *a: (9, 0),
        "Stream": _Stream, "Event": torch.cpu.Event, "stream": torch.cpu.stream}
    with ExitStack() as stack:
        for name, answer in asked.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", _Stream))
        # A pinned copy is another tensor of the host.
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda x: x.clone()))
        stack.enter_context(patch.object(torch.Tensor, "is_pinned", lambda x: False))
        # The thread that tries a kernel out knows no fake tensors.
        stack.enter_context(patch.object(attention, "_try_out", lambda *given: None))
        attention.attention_backend.cache_clear()
        for module, name in ((fsdp, "make_mesh"), (_fully_shard, "_get_post_forward_mesh_info")):
            stack.enter_context(really(module, name))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield torch.device("cuda", 0)
