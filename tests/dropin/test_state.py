"""What a loader's state keeps and refuses beside its place."""

from __future__ import annotations

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from orchmllm import BalancedDataLoader
from tests.lib.dropin import Stream, Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


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


def of_another_size(world, kind: str) -> None:
    make = {"sampler": sampled, "batch sampler": batched, "stream": streamed}[kind]
    loader = make(24, 2)
    for k, _ in enumerate(loader):
        if k == 2:
            break
    state = loader.state_dict()
    with pytest.raises(ValueError, match="batch_size was 2, now it is 4.*go on with batch_size 2"):
        make(24, 4).load_state_dict(state)
    if kind != "stream":
        with pytest.raises(ValueError, match="num_examples was 24, now it is 30"):
            make(30, 2).load_state_dict(state)
    make(30, 4).load_state_dict({**state, "epoch": 1, "step": 0})  # another epoch
    before = {k: v for k, v in state.items() if k not in ("batch_size", "num_examples")}
    for known in (state, before):  # also of a version that did not keep them
        loader = make(24, 2)
        loader.load_state_dict(known)
        assert [b["ids"].tolist() for b in loader] == [[i, i + 1] for i in range(6, 24, 2)]


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "stream"])
def test_the_state_of_a_sampler_or_stream_refuses_another_batch_size(kind):
    run_ranks(of_another_size, 1, kind)
