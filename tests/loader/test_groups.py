"""Which ranks share the data, by the names of a device mesh: the ranks of a replica get the same
examples, and those of all replicas are every example once."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from orchmllm import BalancedDataLoader
from orchmllm.comm.agree import PlanMismatchError
from orchmllm.comm.exchange import RowGather
from orchmllm.data.loading.pipeline import Prefetcher
from orchmllm.loader.groups import check_group, data_ranks, refuse_parts, trainer_group
from orchmllm.loader.process_groups import _Made
from tests.lib.dropin import Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
STEPS = 30


def batches(mesh) -> list:
    """(examples, tokens) of each batch."""
    loader = loader_of(Texts(4 * STEPS), 2, shuffle=True, collate_fn=collate, lengths=length_of,
                       group=mesh)
    return [(loader.step.example_ids, batch["input_ids"].tolist(), loader.step.imbalance)
            for batch in loader]


@contextmanager
def accelerates(mesh) -> Iterator[None]:
    """Where accelerate keeps its mesh, which it refuses to make without a GPU."""
    state = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state={"device_mesh": mesh}))
    with mock.patch.dict(sys.modules, {"accelerate.state": state}):
        yield


def on_two_by_two(world) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    given = batches(mesh)
    with accelerates(mesh):  # with it nothing needs to be given
        return given, batches(None) == given


@pytest.mark.slow
def test_the_ranks_of_a_replica_get_the_same_batches():
    ranks = [given for given, same in run_ranks(on_two_by_two, 4) if same]
    assert len(ranks) == 4 and {len(r) for r in ranks} == {STEPS}
    differ = [t for t in range(STEPS) if ranks[0][t] != ranks[1][t] or ranks[2][t] != ranks[3][t]]
    assert differ == []
    assert sorted(i for r in (0, 2) for ids, *_ in ranks[r] for i in ids) == list(range(4 * STEPS))
    assert any(after < before for _, _, (before, after) in ranks[0])  # something was balanced


def refused(call) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def by_name(world) -> tuple:
    def ranks(shape, *names):
        return data_ranks(init_device_mesh("cpu", shape, mesh_dim_names=names or None))

    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    out = [ranks((2, 2), "dp_replicate", "dp_shard"), ranks((2, 2), "pp", "dp"),
           ranks((2, 2), "data_parallel", "tensor_parallel"), ranks((2, 1, 2), "cp", "odd", "fsdp"),
           ranks((4,), "odd"), ranks((4,)), data_ranks(whole["dp_shard"]), ranks((4,), "tp")]
    says = [refused(lambda: ranks((2, 2), "odd", "fsdp")), refused(lambda: ranks((2, 2)))]
    assert "the name 'dp_shard_cp' of" in refused(lambda: ranks((4,), "dp_shard_cp"))
    # Trainers: sizes without a mesh that explains them, a mean of parts of sequences.
    trainer = SimpleNamespace(
        model=torch.nn.Linear(1, 1), get_tp_size=lambda: 1,
        get_cp_size=lambda: 2, get_sp_size=lambda: 1)
    says.append(refused(lambda: trainer_group(trainer)))
    with accelerates(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))):
        assert trainer_group(trainer) is None and len(data_ranks(None)) == 2
        says.append(refused(lambda: refuse_parts(trainer)))
        says.append(refused(lambda: check_group(SimpleNamespace(num_ranks=4), None)))
    assert data_ranks(dist.group.WORLD) == data_ranks(None) == [0, 1, 2, 3]
    return out, says


def test_dimensions_by_their_names():
    ranks = run_ranks(by_name, 4)
    for rank, (out, says) in enumerate(ranks):
        pipeline, pair = [[0, 1], [2, 3]][rank // 2], [rank % 2, rank % 2 + 2]
        assert out == [[0, 1, 2, 3], pipeline, pair, pipeline, [0, 1, 2, 3], [0, 1, 2, 3], pipeline,
                       [rank]]
        for text, part in zip(says, (
                "the name 'odd' of a dimension", "the name '' of a dimension",
                "by the device mesh ranks [0, 1, 2, 3] of 4 share", "a loss that is a mean, with",
                "is over 4 ranks, but ranks"),
                strict=True):
            assert part in text, text


DIFFER = {
    "ranks_per_node": {"ranks_per_node": 1}, "shard_size": {"shard_size": 1}, "seed": {"seed": 1},
    "whether lengths are given": {"lengths": None, "length_fn": token_count},
    "whether num_targets is given": {"num_targets": len}}


def after_a_part(world) -> tuple:
    """A loader of two ranks, then one of all three; then loaders with an argument that differs on
    rank 1, and one that rank 2 does not make."""
    def make(**how) -> BalancedDataLoader:
        return loader_of(Texts(12), 2, collate_fn=collate, **{"lengths": length_of, **how})

    def seen(loader) -> list[int]:
        return [i for batch in loader for i in batch["ids"].tolist()]

    part = dist.new_group([0, 1])
    ids = [seen(make(group=part)) if world.rank < 2 else [], seen(make())]
    says = []
    for differs in DIFFER.values():
        with pytest.raises(PlanMismatchError) as error:
            make(**(differs if world.rank == 1 else {}))
        says.append(str(error.value))
    if world.rank < 2:
        with pytest.raises(RuntimeError, match="not all of the ranks 0, 1, 2 made"):
            make(timeout_s=1.0)
    return *ids, says


def test_groups_are_taken_again_when_all_ranks_have_dropped_their_loader():
    made = _Made()
    made.links, made.idle = [SimpleNamespace(gather=RowGather)] * 3, {0, 1}
    made.control = lambda mine: np.array([mine, [0, 1, 1]])  # what another rank has dropped
    assert made.common_idle([0, 1], 1, 1.0) == 1
    made.idle = {0}
    assert made.common_idle([0, 1], 1, 1.0) is None


def dropped_at_work(world) -> list[bool]:
    """Of a loader that is dropped while its thread loads: whether that outlives it, and whether the
    loaders that are made before it ends and then take the groups."""
    there = threading.Event()

    class Slow(Texts):
        def __getitem__(self, i: int) -> dict:
            assert i < 2 or there.wait(60.0)  # the thread goes on with the second step
            return super().__getitem__(i)

    def make() -> BalancedDataLoader:
        return loader_of(Slow(), 2, collate_fn=collate, lengths=length_of)

    loader = make()
    gather, batches = loader._orchestrator.gather, iter(loader)
    next(batches)
    with mock.patch.object(Prefetcher.close, "__defaults__", (0.05,)):
        del loader, batches
        gc.collect()
    outlives, second = gather.closed_thread.is_alive(), make()
    there.set()
    gather.closed_thread.join()
    return [outlives, *(x._orchestrator.gather is gather for x in (second, make()))]


def test_groups_are_not_taken_while_the_thread_of_a_dropped_loader_is_at_work():
    assert run_ranks(dropped_at_work, 1) == [[True, False, True]]


def test_ranks_that_made_other_loaders_before_and_that_give_other_arguments():
    ranks = run_ranks(after_a_part, 3)
    for k in range(2):
        assert sorted(sum((rank[k] for rank in ranks), [])) == list(range(12))
    for *_, says in ranks:
        for name, text in zip(DIFFER, says, strict=True):
            assert f"{name} is " in text and "on rank 0 and" in text and "on rank 1: give" in text
