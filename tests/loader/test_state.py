"""What a loader's state keeps and refuses beside its place."""

from __future__ import annotations

import copy
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from orchmllm import BalancedDataLoader
from orchmllm.comm.agree import RemoteError
from orchmllm.loader import setup
from orchmllm.loader.setup import check_state
from tests.lib.dropin import (
    VOCAB,
    Stream,
    Texts,
    collate,
    example_of,
    length_of,
    loader_of,
    token_count,
)
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
MOST = 60  # tokens of a batch where a step has as few as that allows


def set_within_an_iteration(world) -> None:
    """What is set while an iterator is live stays when the iterator is dropped."""
    def make() -> BalancedDataLoader:
        return loader_of(Texts(), 2, collate_fn=collate, lengths=length_of)

    loader = make()
    for k, _ in enumerate(loader):
        if k == 4:
            break
    state, loader = loader.state_dict(), make()
    for _ in loader:  # a look at a first batch, say for the model's shapes
        loader.load_state_dict(state)
        break
    next(iter(loader))
    assert loader.step.step == loader.state_dict()["step"] - 1 == 5
    loader = make()
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(4)
    del iterator
    assert loader.epoch == 4


def test_a_state_or_an_epoch_that_is_set_within_an_iteration_stays():
    run_ranks(set_within_an_iteration, 1)


def within_a_step(world) -> list[int]:
    """Where a loop is that has seen one of a step's two batches, and then both."""
    loader = loader_of(Texts(), 4, collate_fn=collate, lengths=length_of,
                                accumulation_steps=2)
    iterator, steps = iter(loader), []
    for _ in range(4):
        next(iterator)
        steps.append(loader.state_dict()["step"])
    iterator.close()
    return steps


def test_a_step_counts_once_its_last_batch_was_yielded():
    assert run_ranks(within_a_step, 2) == [[0, 1, 1, 2]] * 2


def preempted(world) -> list[dict]:
    """States after three steps: of the loader that made them, of one that has loaded that state and
    was not used, and of one that has loaded the state of the latter."""
    loader, again, third = (loader_of(Texts(), 4, collate_fn=collate, lengths=length_of)
                            for _ in range(3))
    for _ in zip(range(3), loader, strict=False):
        pass
    again.load_state_dict(loader.state_dict())
    third.load_state_dict(again.state_dict())
    return [one.state_dict() for one in (loader, again, third)]


def test_a_state_that_was_loaded_is_told_before_the_first_batch():
    for first, again, third in run_ranks(preempted, 2):
        assert first["step"] == 3 and first == again == third


def streamed_by(world) -> list[str]:
    """A state of a stream that two processes read, for as many and for others; whether batches are
    lost where a loop asks for more after an error."""
    def make(workers: int) -> BalancedDataLoader:
        return loader_of(Stream(0, 24), 4, num_workers=workers, collate_fn=collate,
                         length_fn=token_count, **({"multiprocessing_context": "fork"} if workers
                                                   else {}))

    loader, texts = make(0), []
    for _ in loader:
        break
    state = loader.state_dict()
    for workers in (1, 0, 2):
        try:
            make(workers).load_state_dict({**state, "step": 2})
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    failing = Texts()
    failing.__class__ = type("Failing", (Texts,), {"__getitem__": lambda self, i: 1 / (i != 9)})
    batches = iter(loader_of(failing, 4, collate_fn=lambda _: {"labels": torch.zeros(1, 2)},
                             lengths=length_of, check_loss=False))
    for kind in (RemoteError, RuntimeError, StopIteration):
        with pytest.raises(kind) as error:
            while True:
                next(batches)
        texts.append(str(error.value))
    return texts


def test_a_stream_that_others_read_and_a_pass_that_failed_are_told():
    (one, none, two, failed, again, end), = run_ranks(streamed_by, 1)
    assert (one, none, end) == ("", "", "") and "division by zero" in failed
    assert "num_workers was 1, now it is 2, so the 2 steps that were done" in two
    assert "the pass of this BalancedDataLoader ended with an error" in again
    assert "division by zero" in again


@pytest.mark.parametrize("name, other", [
    ("seed", 1), ("shuffle", False), ("num_examples", 9), ("accumulation_steps", 2),
    ("kind", "stream"), ("version", 0)])
def test_a_state_of_another_order_is_refused(name, other):
    """Examples would be seen twice or never."""
    mine = {"kind": "indices", "version": 1, "accumulation_steps": 1, "seed": 0, "shuffle": True,
            "num_examples": 8, "step": 1, "global_batch_size": 2}
    check_state(mine, mine, "")
    with pytest.raises(ValueError, match=f"loader state: {name} was {other!r}, now it is"):
        check_state({**mine, name: other}, mine, "")


def sampled(size: int, batch_size: int) -> BalancedDataLoader:
    data = Texts(size)
    return loader_of(data, batch_size, sampler=SequentialSampler(data),
                     collate_fn=collate, lengths=length_of)


def batched(size: int, batch_size: int) -> BalancedDataLoader:
    data = Texts(size)
    return loader_of(
        data, batch_sampler=BatchSampler(SequentialSampler(data), batch_size, False),
        collate_fn=collate, lengths=length_of)


def streamed(size: int, batch_size: int) -> BalancedDataLoader:
    return loader_of(Stream(0, size), batch_size, collate_fn=collate,
                     length_fn=token_count)


def told_its_epoch(world) -> list[int]:
    """The examples of this rank in an epoch that a sampler was told, cut by a stop."""
    def make() -> BalancedDataLoader:
        data = Texts(24)
        return loader_of(data, 2, lengths=length_of, collate_fn=collate, sampler=DistributedSampler(
            data, world.world_size, world.rank, seed=3))

    loader, seen = make(), []
    loader.set_epoch(1)
    for batch in loader:
        seen += batch["ids"].tolist()
        if loader.step.step == 2:
            break
    state, loader = loader.state_dict(), make()
    loader.load_state_dict(state)
    return seen + [i for batch in loader for i in batch["ids"].tolist()]


def test_a_sampler_goes_on_in_the_epoch_of_the_state():
    ranks = run_ranks(told_its_epoch, 2)
    assert sorted(sum(ranks, [])) == list(range(24))


def begun(world) -> list[tuple]:
    """The examples of epoch 1, which a loop begins with the state of a step of epoch 0, the last
    one or one before; what the log says; and which other epochs are refused then."""
    def make(kind: str) -> BalancedDataLoader:
        if kind == "batch sampler":
            sampler = type("Lists", (), {"__iter__": lambda _: iter([[k] for k in range(4)])})()
            return loader_of(Texts(), batch_sampler=sampler, collate_fn=collate, lengths=length_of)
        stream = Stream(0, 4)
        return loader_of(StatefulDataLoader(stream, 1) if kind == "its own state" else stream,
                         collate_fn=collate, length_fn=token_count)

    out = []
    for kind in ("batch sampler", "stream", "its own state"):
        for stop in (2, 4):
            loader = make(kind)
            for _ in loader:
                if loader.step.step + 1 == stop:
                    break
            state, loader = loader.state_dict(), make(kind)
            loader.load_state_dict(state)
            for other in (2, 7):
                with pytest.raises(ValueError, match=f"step {stop} of epoch 0; go on in that"):
                    loader.set_epoch(other)
            with mock.patch.object(setup.log, "warning") as warned:
                loader.set_epoch(1)
            said, = [call.args[0] % call.args[1:] for call in warned.call_args_list]
            out.append((said, [i for batch in loader for i in batch["ids"].tolist()], loader.epoch))
    return out


def test_an_epoch_begins_behind_a_state_that_may_be_the_end_of_the_one_before():
    for k, (said, ids, epoch) in enumerate(run_ranks(begun, 1)[0]):
        assert said.startswith("set_epoch(1) begins that epoch")
        assert f"step {(2, 4)[k % 2]} of epoch 0" in said and (ids, epoch) == ([0, 1, 2, 3], 2)


def of_another_size(world, kind: str) -> None:
    make = {"sampler": sampled, "batch sampler": batched, "stream": streamed}[kind]
    loader = make(24, 2)
    for k, _ in enumerate(loader):
        if k == 2:
            break
    state = loader.state_dict()
    with pytest.raises(ValueError, match="batch_size was 2, now it is 4.*go on with batch_size 2"):
        make(24, 4).load_state_dict(state)
    with pytest.raises(ValueError, match="it has no geometry, so it is not whole"):
        make(24, 2).load_state_dict({k: v for k, v in state.items() if k != "geometry"})
    if kind != "stream":
        with pytest.raises(ValueError, match="num_examples was 24, now it is 30"):
            make(30, 2).load_state_dict(state)
    make(30, 4).load_state_dict({**state, "epoch": 1, "step": 0})  # another epoch
    loader = make(24, 2)
    loader.load_state_dict(state)
    assert [b["ids"].tolist() for b in loader] == [[i, i + 1] for i in range(6, 24, 2)]


@pytest.mark.parametrize("kind", [
    "sampler", pytest.param("batch sampler", marks=pytest.mark.slow), "stream"])
def test_the_state_of_a_sampler_or_stream_refuses_another_batch_size(kind):
    run_ranks(of_another_size, 1, kind)


class Learner:
    """A model of one table of logits, and Adam."""

    def __init__(self) -> None:
        self.table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.1)

    def loss_sum(self, batch: dict) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            self.table[batch["input_ids"]].flatten(0, 1), batch["labels"].flatten(),
            reduction="sum")

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def resumed_within_a_step(world, kind: str) -> np.ndarray:
    """The table after 3 steps of microbatches; the loop ends between those of step 1, and begins
    anew with what it had saved after step 0 and the loader's state of the moment of its end."""
    def make() -> BalancedDataLoader:
        how = {"bytes": {"length_fn": token_count}, "stream": {"length_fn": token_count}}.get(
            kind, {"lengths": length_of})
        data = Stream(100 * world.rank, 12) if kind == "stream" else Texts(12 * world.world_size)
        if kind == "sampler":
            how["sampler"] = SequentialSampler(Texts(12))  # of every rank
        if kind == "auto":  # of 4 examples a rank and step, of which no batch holds all
            return loader_of(data, 4, collate_fn=collate, accumulation_steps="auto",
                             max_tokens=MOST, **how)
        return loader_of(data, 2, collate_fn=collate, accumulation_steps=2, **how)

    learner, loader, dies = Learner(), make(), True
    saved = copy.deepcopy(learner)
    while True:
        for batch in loader:
            loader.scale_sum(learner.loss_sum(batch), gradients="sum").backward()
            if loader.step.is_last_microbatch:
                dist.all_reduce(learner.table.grad)
                learner.update()
                saved = copy.deepcopy(learner) if dies else None
            elif dies and loader.step.step == 1:
                break
        else:
            assert not dies
            return learner.table.detach().numpy()
        learner, state, loader, dies = saved, loader.state_dict(), make(), False
        loader.load_state_dict(state)


@pytest.mark.parametrize("kind, num_ranks", [
    ("load", 2), ("bytes", 3), ("stream", 2), ("sampler", 3), ("auto", 3),
    *(pytest.param(kind, n, marks=pytest.mark.slow) for kind, n in (
        ("load", 1), ("load", 3), ("bytes", 1), ("bytes", 2), ("stream", 1), ("stream", 3),
        ("sampler", 1), ("sampler", 2), ("auto", 1), ("auto", 2)))])
def test_weights_of_a_loop_that_ended_within_a_step_are_those_of_one_that_did_not(kind, num_ranks):
    want = Learner()
    for step in range(3):
        ids = range(4 * num_ranks * step, 4 * num_ranks * (step + 1))
        if kind in ("stream", "sampler"):
            ids = [100 * rank * (kind == "stream") + 4 * step + k for rank in range(num_ranks)
                   for k in range(4)]
        batch = collate([example_of(i) for i in ids])
        (want.loss_sum(batch) / (batch["labels"] >= 0).sum()).backward()
        want.update()
    for table in run_ranks(resumed_within_a_step, num_ranks, kind):
        np.testing.assert_allclose(table, want.table.detach().numpy(), rtol=0, atol=1e-12)
