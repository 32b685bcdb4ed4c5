"""The host's memory of a save: what is copied, pinned, kept and written."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save

from orchmllm.comm.exchange import RowGather
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.runtime.checkpoint import Checkpointer, CheckpointError
from orchmllm.runtime.host_copies import HostCopies
from orchmllm.runtime.shards import write_safetensors
from tests.lib.late_copies import OnGpu, install, pinned, pinnings
from tests.lib.process import memory_kb
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


class Held(RowGather):
    """The thread that saves waits at its first agreement until it is let go."""

    def __init__(self) -> None:
        super().__init__(8)
        self.go = threading.Event()

    def __call__(self, row):
        if threading.current_thread().name == "orchmllm-checkpoint":
            self.go.wait()
        return super().__call__(row)


def saved_while_learning(world, folder: Path) -> list[float]:
    """What a checkpoint holds of weights that learn on while it is written."""
    gather = Held()
    keeper = Checkpointer(folder, CheckpointConfig(asynchronous=True), gather)
    weights = {"whole": torch.zeros(1000), "part": torch.zeros(1000)[100:200]}
    keeper.save(1, weights, {})
    for weight in weights.values():
        weight += 1
    threading.Timer(0.5, gather.go.set).start()
    keeper.save(2, weights, {})  # waits for the one before
    first = folder / "step_00000001"
    assert first.is_dir()
    keeper.wait()
    keeper.load(first, weights)
    return [float(weight.abs().max()) for weight in weights.values()]


def test_an_asynchronous_save_is_of_the_moment_of_its_call(tmp_path):
    """Of tensors on the CPU too, where a copy to the CPU could be the tensor itself."""
    assert run_ranks(saved_while_learning, 1, tmp_path) == [[0.0, 0.0]]


def saved_from_a_gpu(world, folder: Path) -> tuple[list[float], list[int], dict[int, int]]:
    """(largest error of each tensor in two checkpoints, what was pinned, what still is). The thread
    that saves has another current GPU than its tensors; nobody holds the Checkpointer when the
    second save begins to write."""
    install()
    gather, errors = Held(), []
    keeper = Checkpointer(folder, CheckpointConfig(), gather)
    weights = {"matrix": torch.arange(999.0).reshape(27, 37), "bias": torch.full((3,), 7.0)}
    for step in (1, 2):
        gather.go.clear()
        for weight in weights.values():
            weight += step
        keeper.save(step, {k: w.as_subclass(OnGpu) for k, w in weights.items()}, {})
        (thread,) = (t for t in threading.enumerate() if t.name == "orchmllm-checkpoint")
        if step == 2:
            del keeper
            gc.collect()
        gather.go.set()
        thread.join()
        (file,) = (folder / f"step_0000000{step}").glob("*.safetensors")
        errors += [float((x - weights[name]).abs().max()) for name, x in load_file(file).items()]
    gc.collect()
    return errors, pinnings, pinned


def test_a_save_from_a_gpu_has_one_pinned_block(tmp_path):
    ((errors, pinnings, pinned),) = run_ranks(saved_from_a_gpu, 1, tmp_path)
    assert errors == [0.0] * 4  # nan where a block was given back too early
    assert pinnings == [4032 + 64] and not pinned  # 999 and 3 numbers, each from a multiple of 64


def test_a_fork_has_nothing_of_the_block():
    """A fork copies the pages of a mapping that are pinned, at once; it does not see this one."""
    weight = torch.ones(8 << 20)
    copies, _ = HostCopies().make({"weight": weight})
    start = copies["weight"].data_ptr()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").open()]
        shared = sum(max(0, min(int(end, 16), start + weight.nbytes) - max(int(begin, 16), start))
                     for begin, end in ranges)
        os.write(writer, str(shared).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(reader, 20)) == 0 and torch.equal(copies["weight"], weight)


def without_room(world, folder: Path, gpu: bool) -> tuple[str, float]:
    """(What a rank is told of a save for which the first rank has no room, what the checkpoint of
    the next one holds)."""
    keeper = Checkpointer(folder, CheckpointConfig(), RowGather(8))
    fitting = torch.full((3,), 7.0)
    weight = fitting
    if world.rank == 0 and gpu:
        install()
        torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2)
        weight = fitting.as_subclass(OnGpu)
    elif world.rank == 0:
        weight = fitting[:1].expand(1 << 50)  # a copy of it would be 4.5 million GB
    with pytest.raises(CheckpointError) as told:
        keeper.save(1, {"x": weight}, {})
    keeper.save(2, {"x": fitting}, {})
    keeper.wait()
    loaded = {"x": torch.zeros(3)}
    keeper.load(keeper.saved, loaded)
    return str(told.value), float(loaded["x"].sum())


@pytest.mark.slow
@pytest.mark.parametrize("gpu, said", [(False, "the host lacks the 4503599.6 GB"),
                                       (True, "the host cannot pin the 0.0 GB")])
def test_copies_that_one_rank_cannot_make_fail_the_save_on_all(tmp_path, gpu, said):
    for told, loaded in run_ranks(without_room, 2, tmp_path, gpu):
        assert "rank 0 failed" in told and said in told and "asynchronous=false" in told
        assert loaded == 21.0


def growth(world, folder: Path, asynchronous: bool) -> float:
    """Host memory that a save takes at most, over what it saves; only the first rank writes."""
    keeper = Checkpointer(folder, CheckpointConfig(asynchronous=asynchronous), RowGather(8),
                          writers=[0])
    keeper.save(0, {"warm": torch.ones(10)}, {})
    keeper.wait()
    weights = {f"model.{i}": torch.ones(1 << 20) for i in range(32)}
    before = memory_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident set counts from here
    keeper.save(1, weights, {})
    keeper.wait()
    return (memory_kb("VmHWM") - before) / (32 << 12)


@pytest.mark.parametrize("asynchronous, least, most", [(True, 0.95, 1.15), (False, 0.0, 0.15)])
def test_a_save_takes_one_copy_or_none(tmp_path, asynchronous, least, most):
    writer, other = run_ranks(growth, 2, tmp_path, asynchronous)
    assert least <= writer <= most and other <= 0.15


def test_a_file_is_what_safetensors_writes(tmp_path):
    torch.manual_seed(0)
    tensors = {"b": torch.randn(5, 3), "a": torch.randn(4, 6).t(), "none": torch.empty(0, 3),
               "half": torch.randn(7).bfloat16(), "wide": torch.randn(2).double(),
               "count": torch.tensor(5), "byte": torch.arange(3).byte()}
    write_safetensors(tmp_path / "x", tensors, {"format": "pt"})
    whole = {name: x.contiguous() for name, x in tensors.items()}
    assert (tmp_path / "x").read_bytes() == save(whole, {"format": "pt"})
