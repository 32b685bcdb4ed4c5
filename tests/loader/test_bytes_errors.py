"""With dispatch `bytes` ranks wait for each other's data while a step is loaded: an error of one
rank still reaches all of them, as itself and not as a timeout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from orchmllm.comm.agree import RemoteError
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import TrainConfig
from orchmllm.trainer import Trainer
from tests.lib.dropin import Texts, collate, loader_of, token_count
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

pytestmark = pytest.mark.dist
BAD = 1  # the rank that fails
TIMEOUT_S = 120.0  # of an agreement: longer than a test may take


def outcome(steps) -> tuple[str, str]:
    """(type, text) of what ends a loop."""
    try:
        for _ in steps:
            pass
    except Exception as e:
        return type(e).__name__, str(e)
    return "", ""


class Unsendable(Texts):
    """Long examples on the failing rank, short ones elsewhere, so that it sends and gets nothing;
    one of its examples holds an object."""

    def __getitem__(self, i: int) -> dict:
        example = super().__getitem__(i)
        return {**example, "extra": {3} if i // 4 % 3 == BAD else 0}


def unsendable(world) -> tuple:
    return outcome(loader_of(
        Unsendable(), 4, collate_fn=collate,
        length_fn=lambda e: 40 if e["id"] // 4 % 3 == BAD else 1, timeout_s=TIMEOUT_S))


def test_the_drop_in_tells_all_ranks():
    ranks = run_ranks(unsendable, 3)
    assert {r[0] for r in ranks} == {"RemoteError"}, ranks
    assert len({r[1] for r in ranks}) == 1, ranks
    cause = "TypeError: example['extra'] is a builtins.set, which cannot be sent"
    assert f"rank {BAD} failed" in ranks[0][1] and cause in ranks[0][1]


def of_a_shard(world, what: str) -> tuple:
    """Rank 1 has an error of its own where lengths are asked for, other lengths, or an array of
    them where the others have a function."""
    def length(i: int) -> int:
        if world.rank == BAD and i >= 24:
            raise KeyError("of a length")
        return token_count(Texts()[i])

    table = np.array([token_count(example) for example in map(Texts().__getitem__, range(48))])
    table[24:] += 5 * (world.rank == BAD)
    has_table = what == PLAN or what == CONFIG and world.rank == BAD
    return outcome(loader_of(Texts(), 4, collate_fn=collate, shard_size=2, timeout_s=TIMEOUT_S,
                             lengths=table if has_table else length))


PLAN, CONFIG = "ranks disagree on plan", "ranks disagree on spec_digest"


@pytest.mark.parametrize("what", ["KeyError: 'of a length'", PLAN, CONFIG])
def test_an_error_of_one_shard_is_raised_on_the_others(what):
    """Which would else wait for its ranks in COMMIT, or in what follows it."""
    ranks = run_ranks(of_a_shard, 4, what)
    assert len(set(ranks)) == 1 and ranks[0][0] and what in ranks[0][1], ranks


def of_a_measured_step(world, with_table: bool) -> tuple:
    """Rank 3 of two shards of two has an error, where lengths are asked for or in the data set."""
    class Data(Texts):
        def __getitem__(self, i: int) -> dict:
            if world.rank == 3 and i >= 16:
                raise KeyError("of an example")
            return super().__getitem__(i)

    def length(i: int) -> int:
        return token_count(Data()[i])

    table = [token_count(example) for example in map(Texts().__getitem__, range(48))]
    try:
        for _ in loader_of(Data(), 4, collate_fn=collate, shard_size=2, timeout_s=TIMEOUT_S,
                           measure_every=2, lengths=table if with_table else length):
            pass
    except RemoteError as error:
        return str(error), repr(error.__cause__)


@pytest.mark.parametrize("with_table", [False, True])
def test_an_error_of_one_shard_is_raised_on_the_others_in_a_measured_step(with_table):
    """As itself, of the rank that failed among all; the others plan the step as sampled."""
    ranks = run_ranks(of_a_measured_step, 4, with_table)
    assert ranks == [("step 1: rank 3 failed: KeyError: 'of an example'", cause)
                     for cause in ["None"] * 3 + ["KeyError('of an example')"]]


class Broken(SyntheticDataset):
    """One rank fails with what is not an unreadable medium: while it reads what it sends, loads
    what it keeps, or decodes what came."""

    def __init__(self, stage: str, rank: int) -> None:
        super().__init__()
        self.stage, self.rank = stage, rank

    def load(self, i, **wanted):
        stage = "decode" if wanted.get("row") else "read" if wanted.get("encoded") else "load"
        if self.rank == BAD and self.stage == stage:
            raise KeyError(f"of {stage}")
        return super().load(i, **wanted)


def broken(world, stage: str) -> tuple:
    run = recipe(model=SHALLOW, balance=BalanceConfig(dispatch="bytes", ranks_per_node=2),
                 train=TrainConfig(num_steps=4, batch_size=6, accumulation_steps=2))
    trainer = Trainer(run, world, dataset=Broken(stage, world.rank))
    return outcome(trainer.loader())


@pytest.mark.parametrize("stage", ["read", "load", "decode"])
def test_the_trainers_loader_tells_all_ranks(stage):
    ranks = run_ranks(broken, 3, stage)
    assert {r[0] for r in ranks} == {"RemoteError"}, ranks
    assert len({r[1] for r in ranks}) == 1 and f"KeyError: 'of {stage}'" in ranks[0][1], ranks


class Lists:
    """Lists of examples with a state; on the failing rank they cannot go on from it."""

    def __init__(self, rank: int, fails: bool) -> None:
        self.rank, self.fails = rank, fails and rank == BAD

    def state_dict(self) -> dict:
        return {"at": 0}

    def load_state_dict(self, state: dict) -> None:
        if self.fails:
            raise KeyError("at another place")

    def __iter__(self):
        return iter([[Texts()[4 * k + self.rank]] for k in range(3)])


class Undrawable(Lists):
    """A batch sampler that cannot begin."""

    def __iter__(self):
        if self.fails:
            raise KeyError("of the sampler")
        return iter([[4 * k + self.rank] for k in range(3)])


class Pairs(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(3), torch.zeros(3))])


def cannot_begin(world, what: str) -> tuple:
    how = dict(collate_fn=collate, length_fn=token_count, timeout_s=TIMEOUT_S)
    if what == "index":
        return outcome(loader_of(Texts(), sampler=["0", "1"], **how))
    if what == "pair":  # one example of two tensors, and no list of two examples
        return outcome(loader_of(Pairs(), batch_size=None, **how))
    if what == "sampler":
        return outcome(loader_of(
            Texts(), batch_sampler=Undrawable(world.rank, True), **how))
    before = loader_of(Lists(world.rank, False), **how)
    next(iter(before))
    loader = loader_of(Lists(world.rank, True), **how)
    loader.load_state_dict(before.state_dict())
    return outcome(loader)


@pytest.mark.parametrize("what, text", [
    ("sampler", "of the sampler"), ("state", "at another"), ("index", "yielded '0' as an index"),
    ("pair", "yielded a tuple: wrap one that yields lists of examples")])
def test_a_rank_whose_data_cannot_begin_tells_all(what, text):
    ranks = run_ranks(cannot_begin, 2, what)
    assert {r[0] for r in ranks} == {"RemoteError"} and text in ranks[0][1], ranks
    assert ranks[0][1] == ranks[1][1]


class Silent(Exception):
    """One whose text raises, as that of a library may that formats what it does not have."""

    def __str__(self) -> str:
        return {}["text"]


def untellable(world, error: Exception) -> tuple:
    class Data(Texts):
        def __getitem__(self, i: int) -> dict:
            if world.rank == BAD:
                raise error
            return super().__getitem__(i)

    return outcome(loader_of(Data(), 4, collate_fn=collate, length_fn=token_count,
                             timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("error, text", [
    (ValueError("a\udcff.jpg"), "ValueError: a\\udcff.jpg"), (Silent(), "Silent: ")])
def test_an_error_whose_text_cannot_be_sent_reaches_all_ranks(error, text):
    """A name of a file that is no UTF-8, and a text that cannot be had."""
    ranks = run_ranks(untellable, 2, error)
    assert {r[0] for r in ranks} == {"RemoteError"} and ranks[0][1] == ranks[1][1], ranks
    assert f"rank {BAD} failed: {text}" in ranks[0][1]
