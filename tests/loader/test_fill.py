"""Every rank has an example in every microbatch, wherever there are enough; fillers elsewhere; how
many targets a batch has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from orchmllm.comm.agree import RemoteError
from orchmllm.plan.assign import at_least
from tests.lib.dropin import Texts, collate, example_of, length_of, loader_of
from tests.lib.ranks import run_ranks

LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 96).astype(int).clip(2).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_at_least_moves_the_fewest_items_that_fill_every_place(seed):
    rng = np.random.default_rng(seed)
    places, least = rng.integers(1, 6, 2).tolist()
    lengths = rng.integers(0, 9, rng.integers(0, 40))
    before = rng.integers(0, places, len(lengths)) ** 2 // places  # more in the first ones
    after = at_least(before, lengths, places, least)
    held, holds = (np.bincount(p, minlength=places) for p in (before, after))
    if len(lengths) < places * least:
        assert (after == before).all()
    else:
        assert holds.min() >= least
        assert (after != before).sum() == np.maximum(least - held, 0).sum()
        assert (holds >= np.minimum(held, least)).all()


class Sized(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, i: int) -> dict:
        return {"id": i, "text": torch.zeros(LENGTHS[i])}


def num_tokens(example: dict) -> int:
    return len(example["text"])


def numbers(world, cases: list[dict]) -> list[list[list[int]]]:
    """Of the examples of each batch: collate gives no labels, so that a filler is an error."""
    out = []
    for how in cases:
        loader = loader_of(Sized(), drop_last=True, shuffle=True, check_loss=False,
                           collate_fn=lambda e: [x["id"] for x in e], **how)
        out.append([batch for batch in loader if loader.step.num_examples])
    return out


@pytest.mark.dist
def test_no_rank_goes_without_an_example_beside_a_long_one():
    """A long example takes a microbatch, or with `padded` some ranks, for itself."""
    cases = [dict(batch_size=1, accumulation_steps=4, lengths=LENGTHS),
             dict(batch_size=1, accumulation_steps=4, length_fn=num_tokens),
             dict(batch_size=2, accumulation_steps=2, lengths=LENGTHS, policy="none"),
             dict(batch_size=2, accumulation_steps=2, lengths=LENGTHS, min_gain=0.9),
             dict(batch_size=4, lengths=LENGTHS, policy="padded")]
    ranks = run_ranks(numbers, 2, cases)
    for k, how in enumerate(cases):
        assert [len(rank[k]) for rank in ranks] == [48 // how["batch_size"]] * 2
        assert sorted(i for rank in ranks for batch in rank[k] for i in batch) == list(range(96))


def of_shards(world, *hows: dict) -> list[list[tuple]]:
    """(examples, targets of the step, ids in the batch) of each batch, of 9 examples in steps of 8;
    resumed: begins with the second one."""
    out = []
    for how in hows:
        resumed = how.pop("resumed", False)
        loader = loader_of(Texts(9), collate_fn=collate, shard_size=2, **how)
        if resumed:
            loader.load_state_dict({**loader.state_dict(), "step": 1})
        out.append([(loader.step.example_ids, loader.step.num_global_targets, batch["ids"].tolist())
                    for batch in loader])
    return out


@pytest.mark.dist
def test_a_shard_that_has_no_example_in_a_short_step_gets_fillers():
    table = [length_of(i) for i in range(9)]
    whole, function, resumed = zip(*run_ranks(
        of_shards, 4, dict(batch_size=2, lengths=table),
        dict(batch_size=1, accumulation_steps=2, lengths=length_of, shuffle=True),
        dict(batch_size=2, lengths=table, resumed=True)), strict=True)
    for ranks in (whole, function):
        assert sorted(i for rank in ranks for ids, *_ in rank for i in ids) == list(range(9))
    shortest = min(range(4), key=table.__getitem__)  # of those that this shard had
    for ranks, filler in ((whole, shortest), (resumed, 0)):
        targets = int((collate([example_of(8)])["labels"] != -100).sum())
        assert [rank[-1] for rank in ranks[:2]] == [([], targets, [filler])] * 2
        assert sorted(len(rank[-1][0]) for rank in ranks[2:]) == [0, 1]


def on_fewer_ranks(world) -> list[tuple[int, bool]]:
    """Batches without labels, until an error if there is one, of two ranks that go on with a state
    of three: of 9 examples steps of 3 are whole and those of 2 are not, of 10 the other way."""
    out = []
    for size in (9, 10):
        loader, seen = loader_of(Texts(size), 1, lengths=length_of, check_loss=False,
                                 collate_fn=lambda e: [x["id"] for x in e]), 0
        loader.load_state_dict({**loader.state_dict(), "step": 1, "global_batch_size": 3})
        try:
            for _ in loader:
                seen += 1
            out.append((seen, True))
        except RemoteError:
            out.append((seen, False))
    return out


@pytest.mark.dist
def test_whether_the_last_step_has_fillers_is_told_of_the_batches_of_a_loaded_state():
    assert run_ranks(on_fewer_ranks, 2) == [[(2, True), (0, False)]] * 2


class Batch:
    """A class of batch whose copies share what holds its tensors."""

    def __init__(self, examples: list[dict]) -> None:
        self.tensors = collate(examples)

    @classmethod
    def of(cls, tensors: dict) -> Batch:
        batch = cls.__new__(cls)
        batch.tensors = tensors
        return batch

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value


def targets_in(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


def labelled(world) -> list[list[tuple[int, int]]]:
    """(labels, targets) of each batch; 13 examples, so that the last batch is a filler."""
    out = []
    for counts in (None, targets_in):
        loader = loader_of(Texts(13), 3, accumulation_steps=2, collate_fn=Batch,
                           lengths=length_of, num_targets=counts)
        out.append([(targets_in(batch), loader.step.local_targets[0]) for batch in loader])
    return out


@pytest.mark.dist
def test_looking_for_a_fillers_labels_changes_no_batch():
    for batches in run_ranks(labelled, 1)[0]:
        assert [held for held, _ in batches] == [counted for _, counted in batches]
        assert [held > 0 for held, _ in batches] == [True] * 5 + [False]


class Fixed:
    """A batch whose labels cannot be set."""

    def __init__(self, labels: torch.Tensor) -> None:
        self._labels = labels

    @property
    def labels(self) -> torch.Tensor:
        return self._labels


def of_bytes(world) -> list[str]:
    """Labels that cannot hold what says that they are ignored, and some that cannot be replaced, of
    an epoch that ends with a filler; of one that does not, where nobody asks."""
    weight = torch.ones(1, dtype=torch.int64)  # of a class; other labels are none
    for dtype, count in ((torch.uint8, len), (
            torch.int64, lambda batch: int(weight[batch["labels"]].sum()))):
        counted = loader_of(Texts(12), 3, lengths=length_of, num_targets=count, check_loss=False,
                            collate_fn=lambda e, dtype=dtype: {
                                "labels": torch.zeros(len(e), dtype=dtype)})
        assert len(list(counted)) == 4
    said = []
    for collate_fn in (lambda e: {"labels": torch.zeros(len(e), 2, dtype=torch.uint8)},
                       lambda e: Fixed(torch.zeros(len(e), 2, dtype=torch.int64))):
        loader = loader_of(Texts(13), 3, accumulation_steps=2, lengths=length_of,
                           collate_fn=collate_fn)
        with pytest.raises(RemoteError) as error:
            next(iter(loader))
        said.append(str(error.value))
    return said


@pytest.mark.dist
def test_labels_that_cannot_be_ignored_are_refused_at_the_first_batch():
    [(unsigned, fixed)] = run_ranks(of_bytes, 1)
    assert "step 0: " in unsigned and "labels\" are torch.uint8, which cannot hold -100" in unsigned
    assert "step 0: " in fixed and "the \"labels\" of a Fixed cannot be replaced (" in fixed


def other_than_100(world) -> list[list[float]]:
    """The labels of the filler at the end of an epoch where labels of -1, 0 or -100 are ignored and
    where targets are no labels; the calls of num_targets beside one for each batch."""
    out = []
    for ignored in (-1, 0, -100, None):
        calls = []

        def collate_with(examples, ignored=ignored):
            labels = torch.nn.utils.rnn.pad_sequence(
                [torch.ones(1 + x["id"] % 3, dtype=torch.int64) for x in examples], True,
                -100 if ignored is None else ignored)
            return Batch.of({"labels": labels, "weight": torch.ones(len(labels))})

        def count(batch, ignored=ignored, calls=calls) -> int:
            calls.append(1)
            return int(batch["weight"].sum() if ignored is None
                       else (batch["labels"] != ignored).sum())

        loader = loader_of(Texts(13), 3, lengths=length_of, collate_fn=collate_with,
                           check_loss=False, num_targets=count)
        seen = [batch["labels"] for batch in loader if not loader.step.num_examples]
        num_batches = 3 - len(seen)
        out.append([*{float(x) for labels in seen for x in labels.flatten()},
                    len(calls) - num_batches <= 12])
    return out


@pytest.mark.dist
def test_a_filler_has_the_labels_that_the_loss_ignores():
    ranks = run_ranks(other_than_100, 2)
    assert sorted(ranks) == [[[-1.0, True], [0.0, True], [-100.0, True], [-100.0, True]],
                             [[True]] * 4]


def counts(world, given: list) -> list[str]:
    out = []
    for value in given:
        loader = loader_of(Texts(), 4, collate_fn=collate, lengths=length_of,
                           num_targets=lambda batch, value=value: value)
        try:
            next(iter(loader))
            out.append(str(loader.step.num_global_targets))
        except RemoteError as error:
            out.append(str(error))
    return out


@pytest.mark.dist
def test_num_targets_returns_a_whole_number():
    right = [7, 7.0, np.int32(7), torch.tensor(7), True, 0]
    wrong = [0.98, -1, math.nan, math.inf, torch.tensor(2.5), None]
    texts, = run_ranks(counts, 1, right + wrong)
    assert texts[:6] == ["7", "7", "7", "7", "1", "0"]
    for text, value in zip(texts[6:], [0.98, -1, "nan", "inf", 2.5, None], strict=True):
        assert f"num_targets returned {value}: return a whole number >= 0" in text
