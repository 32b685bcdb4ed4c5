"""Loaders of other libraries that a BalancedDataLoader takes over, and what their states become."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from orchmllm import BalancedDataLoader, balance, balance_trainer
from orchmllm.loader.streams import ForeignStream
from tests.lib.clients import (
    Examples,
    as_torchrun,
    collate,
    forget_accelerate,
    length_of,
    settings,
    tiny,
)
from tests.lib.dropin import Stream, Texts, loader_of, token_count
from tests.lib.dropin import collate as collate_texts
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


class Rows(IterableDataset):
    """The same stream on every rank; accelerate shares it out."""

    def __iter__(self):
        data = Examples(24)
        return map(data.__getitem__, range(len(data)))


def streamed(world, folder: str) -> list:
    """A Trainer over a stream, its own loader and one of the user's: examples by step; and what is
    said without the setting."""
    from transformers import Trainer, TrainingArguments

    class Mine(Trainer):
        def get_train_dataloader(self) -> BalancedDataLoader:
            rank, ranks = self.args.process_index, self.args.world_size
            lists = [list(range(k, k + 2)) for k in range(2 * rank, 24, 2 * ranks)]
            return BalancedDataLoader(
                [[Examples(24)[i] for i in part] for part in lists].__iter__(),
                collate_fn=collate, length_fn=length_of, policy="greedy")

    def train(kind: type, dispatch: bool | None) -> list:
        with as_torchrun(world):
            trainer = balance_trainer(kind(
                model=tiny(), train_dataset=Rows(), data_collator=collate,
                args=TrainingArguments(**settings(
                    folder, max_steps=6, per_device_train_batch_size=2,
                    accelerator_config={"dispatch_batches": dispatch}))),
                length_fn=length_of, policy="greedy")
            trainer.train()
        forget_accelerate()
        return trainer.model.seen

    with pytest.raises(ValueError, match='"dispatch_batches": False'):
        train(Trainer, None)
    forget_accelerate()
    return [train(Trainer, False), train(Mine, None)]


@pytest.mark.slow
def test_a_trainer_over_a_stream_has_every_example_once(tmp_path):
    ranks = run_ranks(streamed, 2, str(tmp_path))
    for of_ranks in zip(*ranks, strict=True):
        assert len({len(seen) for seen in of_ranks}) == 1
        steps = [sorted(sum(step, [])) for step in zip(*of_ranks, strict=True)]
        assert steps == [list(range(k, k + 4)) for k in range(0, 24, 4)]


def prepared(world) -> list[int]:
    from accelerate import Accelerator

    with as_torchrun(world):
        data = Texts(24)
        plain = DataLoader(data, 4, shuffle=True, collate_fn=collate_texts)
        loader = balance(Accelerator(cpu=True).prepare(plain),
                         lengths=[len(data[i]["input_ids"]) for i in range(24)])
        seen = [i for _ in loader for i in loader.step.example_ids]
    forget_accelerate()
    return seen


def test_what_accelerate_prepared_takes_lengths():
    assert sorted(sum(run_ranks(prepared, 2), [])) == list(range(24))


class Ahead(DataLoader):
    """Iterates as Ray's wrapper of a loader does."""

    def __init__(self, loader: DataLoader) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader = loader

    def __iter__(self):
        self.batches = iter(self._dataloader)
        self.next_batch = next(self.batches, None)
        return self

    def __next__(self):
        batch = self.next_batch
        if batch is None:
            raise StopIteration
        self.next_batch = next(self.batches, None)
        return batch


def fetched_ahead(world) -> list[int]:
    """Examples of each batch, with a state that is loaded within an epoch."""
    seen, state = [], None
    for stop in (2, None):
        loader = loader_of(Texts(24), 3, collate_fn=collate_texts,
                           lengths=lambda i: len(Texts(24)[i]["input_ids"]))
        if state is not None:
            loader.load_state_dict(state)
        batches = Ahead(loader)
        for _ in range(2 if stop is None else 1):
            for n, batch in enumerate(batches, 1):
                ids, info = batch["ids"].tolist(), batches.step
                assert ids == info.example_ids == loader.step.example_ids
                loss = torch.tensor(1.0)
                assert batches.scale_mean(loss, shifted=False) == info.scale_mean(
                    loss, shifted=False) == loader.scale_mean(loss, shifted=False)
                seen += ids
                state = loader.state_dict()
                if n == stop:
                    break
    return seen


def test_a_wrapper_that_fetches_ahead_has_the_step_of_the_batch_it_hands_out():
    ranks = run_ranks(fetched_ahead, 2)
    assert sorted(sum(ranks, [])) == sorted([*range(24)] * 2)
    assert sum(ranks, []) != [*range(24)] * 2


def test_short_batches_of_what_is_wrapped_are_left_out_and_counted():
    """Also of those that are drawn again up to the place; two ranks number what they draw
    otherwise."""
    def stream(rank: int, first_step: int = 0) -> ForeignStream:
        return ForeignStream(
            [[1, 2, 3], [4], [5, 6, 7], [8, 9, 10]][: 3 + first_step],
            lambda batch: [(9, e) for e in batch], 2, full_size=3, rank=rank, first_step=first_step,
            state=None)

    first, other = stream(0), stream(1)
    measured, numbers = first.draw()
    assert [example for _, example in measured] == [1, 2, 3, 5, 6, 7]
    assert first.num_dropped == 1 and first.draw() is None
    assert len(numbers) == 6 and not {*numbers} & {*other.draw()[1]}
    resumed = stream(0, first_step=1)
    assert [example for _, example in resumed.draw()[0]] == [8, 9, 10] and resumed.num_dropped == 1


def tarred(world) -> list[int]:
    import webdataset

    def loader() -> webdataset.WebLoader:
        return webdataset.WebLoader(Stream(24 * world.rank, 24), batch_size=4)

    balanced = balance(loader(), collate_fn=collate_texts, length_fn=token_count)
    seen = [i for batch in balanced for i in batch["ids"].tolist()]
    with pytest.raises(ValueError, match="move them into the WebDataset"):
        BalancedDataLoader(loader().unbatched().batched(4), length_fn=token_count)
    return seen


def test_a_webloader_is_taken_over_or_refused():
    assert sorted(sum(run_ranks(tarred, 2), [])) == list(range(48))


def checkpointed(world, folder: str) -> list:
    """torch's distributed checkpoint of a wrapped StatefulDataLoader, in the middle of an epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> BalancedDataLoader:
        data = Texts(32)
        return loader_of(StatefulDataLoader(
            data, 2, collate_fn=collate_texts, sampler=DistributedSampler(data, shuffle=False)),
            length_fn=token_count)

    loader, seen = make(), []
    for batch in loader:
        seen.append(batch["ids"].tolist())
        if len(seen) == 3:
            dcp.save({"loader": loader}, checkpoint_id=Path(folder) / "save")
    again = make()
    dcp.load({"loader": again}, checkpoint_id=Path(folder) / "save")
    assert [batch["ids"].tolist() for batch in again] == seen[3:] and len(seen) == 8


def test_a_wrapped_loaders_state_goes_through_a_distributed_checkpoint(tmp_path):
    run_ranks(checkpointed, 2, str(tmp_path))


def of_another_batch_size(world) -> None:
    def make(size: int) -> BalancedDataLoader:
        return loader_of(Texts(24), size, collate_fn=collate_texts, lengths=token_counts())

    loader = make(2)
    for k, _ in enumerate(loader):
        if k == 2:
            break
    state = loader.state_dict()
    with pytest.raises(ValueError, match="batch_size was 2, now it is 4"):
        make(4).load_state_dict(state)
    other = make(4)
    other.load_state_dict({**state, "epoch": 1, "step": 0})
    assert other.batch_size == 4 and other.global_batch_size == 4 * world.world_size
    more_ranks = make(2)
    more_ranks.load_state_dict({**state, "global_batch_size": 8 * world.world_size})
    assert more_ranks.batch_size == 8  # as if it was saved by four times the ranks


def token_counts() -> list[int]:
    return [token_count(Texts()[i]) for i in range(24)]


def test_another_batch_size_is_refused_within_an_epoch_and_taken_at_its_end():
    run_ranks(of_another_batch_size, 2)


def ahead(world) -> None:
    """A loop that fetches two batches before it trains on the first."""
    def pairs(examples: list[dict]) -> tuple:
        batch = collate_texts(examples)
        return batch["input_ids"], batch["labels"]

    how = dict(collate_fn=collate_texts, lengths=token_counts())
    one = torch.ones((), dtype=torch.float64)
    for count in (None, lambda batch: int((batch["labels"] != -100).sum())):
        loader = loader_of(Texts(24), 4, num_targets=count, **how)
        batches = iter(loader)
        first, info = next(batches), loader.step
        want = loader.scale_mean(one, first["labels"], shifted=False)
        next(batches)
        with pytest.raises(ValueError, match="keeps loader.step of each"):
            loader.scale_mean(one, first["labels"], shifted=False)
        assert info.scale_mean(one, first["labels"], shifted=False) == want
        assert info.scale_sum(one) * info.local_targets[0] == pytest.approx(float(want))
        batches.close()
    loader = loader_of(Texts(24), 4, **{**how, "collate_fn": pairs})
    for _, labels in loader:
        with pytest.raises(ValueError, match="give BalancedDataLoader a num_targets function"):
            loader.scale_mean(one, labels, shifted=False)


def test_a_kept_step_scales_its_own_batch_and_tuples_need_num_targets():
    run_ranks(ahead, 2)
