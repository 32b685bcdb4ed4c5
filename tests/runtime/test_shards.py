"""The files of a checkpoint: each part is saved once, by a rank that has it, and is read by any
ranks, without a word between them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from orchmllm.comm.exchange import RowGather
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.runtime.checkpoint import Checkpointer, CheckpointError
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
SHAPES = {"few": (2, 3), "uneven": (7, 2), "vector": (5,), "none": (0, 3), "narrow": (3, 0)}
OF_OBJECTS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")


def whole_of(scale: float = 1.0) -> dict[str, torch.Tensor]:
    made = {name: torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            for name, shape in SHAPES.items()}
    return {name: scale * (x + 1) for name, x in {**made, "scalar": torch.tensor(6.0)}.items()}


def sharded(tensors: dict[str, torch.Tensor], shard_size: int) -> dict[str, torch.Tensor]:
    """By rows, over the ranks of each replica, as FSDP2 does; the scalar is whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shard_size, shard_size))
    return {name: distribute_tensor(x, mesh, [Replicate(), Shard(0)]) if x.dim() else x
            for name, x in tensors.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def saved_and_read(world, folder: Path, shard_size: int) -> None:
    """Every rank reads what all have saved."""
    keeper = Checkpointer(folder, CheckpointConfig(asynchronous=False), RowGather(8),
                          writers=list(range(shard_size)))
    with patch.multiple(dist, **dict.fromkeys(OF_OBJECTS, None)), patch.multiple(
            dist.distributed_c10d, **dict.fromkeys(OF_OBJECTS, None)):
        keeper.save(1, sharded(whole_of(), shard_size), {})
    read(world, keeper.saved, shard_size)


def read(world, path: Path, shard_size: int) -> None:
    """Every rank reads its part of what some ranks have saved, from the files that have it."""
    keeper = Checkpointer(path.parent, CheckpointConfig(), RowGather(8),
                          writers=list(range(shard_size)))
    wanted, found = sharded(whole_of(), shard_size), sharded(whole_of(0.0), shard_size)
    with patch("orchmllm.runtime.shards.HuggingFaceStorageReader", None):  # reads all headers
        keeper.load(path, found)
    for name, x in wanted.items():
        assert torch.equal(local(x), local(found[name])), name


def saved_by_one(world, folder: Path) -> str:
    """What is said where a rank that has a part does not save it."""
    keeper = Checkpointer(folder, CheckpointConfig(), RowGather(8), writers=[0])
    keeper.save(1, sharded(whole_of(), 2), {})
    with pytest.raises(CheckpointError) as told:
        keeper.wait()
    return str(told.value)


def test_a_save_that_would_lack_a_part_is_refused_on_all_ranks(tmp_path):
    for told in run_ranks(saved_by_one, 2, tmp_path):
        assert "the parts of all ranks have 15 numbers, and the tensors 26" in told
    assert not [*tmp_path.glob("step_*")]


def unfit(world, folder: Path) -> list[str]:
    """What is said of tensors that a checkpoint lacks, or has in another shape."""
    keeper = Checkpointer(folder, CheckpointConfig(asynchronous=False), RowGather(8))
    keeper.save(1, {"x": torch.ones(3)}, {})
    said = []
    for wanted in ({"y": torch.ones(3)}, {"x": torch.ones(4)}):
        with pytest.raises(CheckpointError) as told:
            keeper.load(keeper.saved, wanted if world.rank else {"x": torch.ones(3)})
        said.append(str(told.value))
    return said


def test_what_does_not_fit_one_rank_is_told_on_all(tmp_path):
    for missing, shape in run_ranks(unfit, 2, tmp_path):
        assert "rank 1 failed: RuntimeError: Missing key in checkpoint state_dict: y" in missing
        assert "rank 1 failed: ValueError: Size mismatch" in shape


def read_whole(world, path: Path) -> None:
    """Tensors that are not cut here."""
    keeper = Checkpointer(path.parent, CheckpointConfig(), RowGather(8))
    found = whole_of(0.0)
    keeper.load(path, found)
    assert all(torch.equal(x, found[name]) for name, x in whole_of().items())


def read_grown(world, path: Path) -> str:
    """What is said of a tensor with a row more, of which some files have what is expected."""
    keeper = Checkpointer(path.parent, CheckpointConfig(), RowGather(8))
    with pytest.raises(CheckpointError) as told:
        keeper.load(path, sharded({"uneven": torch.zeros(8, 2)}, 1))
    return str(told.value)


@pytest.mark.parametrize("ranks, shard_size", [(3, 3), (4, 2)])
def test_each_part_is_saved_once_and_read_without_a_word(ranks, shard_size, tmp_path):
    run_ranks(saved_and_read, ranks, tmp_path, shard_size)
    found: dict[str, list[list[int]]] = {}
    files = sorted((tmp_path / "step_00000001").glob("*.safetensors"))
    for file in files:
        with safe_open(file, "pt") as f:
            for name in f.keys():
                found.setdefault(name, []).append(f.get_slice(name).get_shape())
    assert len(files) == shard_size
    assert found.pop("scalar") == [[]]
    for name, parts in found.items():
        assert sum(rows for rows, *_ in parts) == SHAPES[name][0], (name, parts)
        assert all(rows > 0 for rows, *_ in parts) or name == "none", (name, parts)
    for others in (2, 5):
        run_ranks(read, others, tmp_path / "step_00000001", others)
    run_ranks(read_whole, 1, tmp_path / "step_00000001")
    assert "Size mismatch" in run_ranks(read_grown, 1, tmp_path / "step_00000001")[0]
