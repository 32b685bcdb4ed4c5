"""Forwards of balance_encoders that go on after one that failed, or that meet what the ones before
did not: exact, or an error on all ranks."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from orchmllm import Encoder, Rows, balance_encoders
from orchmllm.comm.agree import PlanMismatchError
from orchmllm.encoders import sharing
from orchmllm.encoders.answers import device_of
from tests.encoders.test_encoder_clients import (
    ENCODERS,
    EXACT,
    Late,
    Model,
    Tower,
    balanced,
    made_of,
    model_and,
    refusal,
)
from tests.lib.encoder_runs import mean_gradients, mean_gradients_of, worst
from tests.lib.ranks import RankFailure, each_in_one_world, run_ranks

pytestmark = pytest.mark.dist


class Counting(Tower):
    """Its buffers advance with each call, whatever its items are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, photos):
        self.calls += 1
        return super().forward(photos)


class Reentrant(Model):
    """Its layer reads the features by a closure."""

    def forward(self, ids, photos=None):
        features = self.tower(photos)
        return checkpoint(lambda x: (x + features.square().sum(0)).square().sum(),
                          self.embed(ids).mean(1), use_reentrant=True)


class Casting(Model):
    """It opens autocast in its own forward."""

    def forward(self, ids, photos=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids, photos)


def exact(world) -> list[float]:
    out = []
    for model in (made_of(Reentrant), made_of(Model, tower=Counting()), made_of(Model)):
        _, inputs = model_and([4, 1], world.rank)
        want = mean_gradients(model, lambda m, given=inputs: [m(**given)])
        if not out:  # of media that were prepared in inference mode
            with torch.inference_mode():
                inputs["photos"] = inputs["photos"].clone()
        balanced(model)
        out.append(worst(mean_gradients_of(model, lambda m, given=inputs: [m(**given)]), want))
    model = made_of(Casting)
    balanced(model)
    return [*out, 0.0 if model(**inputs).isfinite() else 1.0]


def without_gradients(world) -> list[bool]:
    """Whether a forward of a model in train mode is balanced: without gradients, and with them."""
    model, inputs = model_and([4, 1], world.rank)
    handle, found = balanced(model), []
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            model(**inputs)
        found.append(bool(handle.last))
    return found


def test_a_forward_without_gradients_may_be_that_of_one_rank(two):
    assert two["without_gradients"] == [[False, True]] * 2


def test_what_changes_no_feature_is_accepted(two):
    assert max(map(max, two["exact"])) < EXACT


class Frozen(Model):
    """Its embedding learns nothing, so nothing can join its output."""

    def forward(self, ids, photos=None):
        with torch.no_grad():
            x = self.embed(ids).mean(1)
        features = 0 if photos is None else self.tower(photos).square().sum(0)
        return (x + features).square().sum() * torch.ones(1, requires_grad=True).double()


def without_a_place_to_join(world) -> tuple[float, str]:
    """Exact where all ranks have media, in later forwards, too; else refused."""
    _, inputs = model_and([4, 1], world.rank)
    model = made_of(Frozen)
    want = mean_gradients(model, lambda m: [m(**inputs)])
    balanced(model)
    for _ in range(2):
        model(**inputs).backward()
    model.zero_grad()
    difference = worst(mean_gradients_of(model, lambda m: [m(**inputs)]), want)
    _, inputs = model_and([4, 0], world.rank)
    model = made_of(Frozen)
    balanced(model)
    return difference, refusal(lambda: model(**inputs))


def test_what_cannot_be_joined_is_refused_where_it_has_to_be(two):
    for difference, refused in two["without_a_place_to_join"]:
        assert difference < EXACT
        assert "rank 1 failed: RuntimeError: Frozen.forward did not call its embedding" in refused


def test_media_go_to_an_accelerator_where_an_argument_is_on_one():
    there = {"lengths": torch.zeros(1), "ids": torch.zeros(1, device="meta"), "flag": True}
    assert device_of(there, Model()).type == "meta"
    assert device_of({}, Model()).type == "cpu"


class Whole(nn.Module):
    """What a Model makes, in an object."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


class Odd(Model):
    """Nothing can join its embedding; or what it reads is hidden, by how it returns it."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.pair = how, nn.Identity()

    def get_input_embeddings(self):
        raise NotImplementedError

    def forward(self, ids, photos=None):
        self.pair((ids, ids))
        features = self.tower(photos)
        out = checkpoint(lambda x: (x + features.square().sum(0)).square().sum(),
                         self.embed(ids).mean(1), use_reentrant=self.how == "hidden")
        return Whole(out) if self.how == "hidden" else out


def later_forwards(world) -> list[float]:
    """Of ranks that all have media, which need not join anything."""
    out = []
    for how, join in (("a tuple", "pair"), ("", ""), ("hidden", "embed")):
        _, inputs = model_and([4, 1], world.rank)
        torch.manual_seed(0)
        model = Odd(how).double()

        def loss(m, given=inputs, how=how):
            found = m(**given)
            return [found.value if how == "hidden" else found]

        want = mean_gradients(model, loss)
        balance_encoders(model, ENCODERS, join=join)
        for _ in range(2):
            sum(loss(model)).backward()
            model.zero_grad()
        out.append(worst(mean_gradients_of(model, loss), want))
    return out


def test_ranks_with_media_need_no_place_to_join(two):
    assert max(map(max, two["later_forwards"])) < EXACT


class Two(Model):
    """breaks: it raises before it has used its features; stops: the gradient of `others`; leaves:
    their features, unread."""

    breaks = stops = leaves = False

    def __init__(self) -> None:
        super().__init__()
        self.other = Late()

    def forward(self, ids, photos=None, others=None):
        if self.breaks:
            raise ValueError("a bad batch")
        out = super().forward(ids, photos)
        if others is None:
            return out
        rows = self.other(others)
        if self.leaves:
            return out
        return out + (rows.detach() if self.stops else rows).square().sum()


def balanced_two(model: Two) -> None:
    balance_encoders(model, [*ENCODERS, Encoder("other", {"other": Rows("others")})], join="embed")


def after_others(world) -> list:
    """(Difference after a forward that failed on all ranks, the refusal of what a later forward has
    for the first time, the difference where one rank then leaves its features, and a refusal)."""
    _, inputs = model_and([4, 1], world.rank)
    model = made_of(Two)
    want = mean_gradients(model, lambda m: [m(**inputs)])
    balanced_two(model)
    model(**inputs).backward()
    model.zero_grad()
    model.breaks = True
    with pytest.raises(ValueError, match="a bad batch"):
        model(**inputs)
    model.breaks = False
    out: list = [worst(mean_gradients_of(model, lambda m: [m(**inputs)]), want)]
    both = {**inputs, "others": inputs["photos"]}
    model.stops = True
    out.append(refusal(lambda: model(**both)))
    model = made_of(Two)
    model.leaves = world.rank == 0
    want = mean_gradients(model, lambda m: [m(**both)])
    model.leaves = False
    balanced_two(model)
    model(**both).backward()
    model.zero_grad()
    model.leaves = world.rank == 0
    out.append(worst(mean_gradients_of(model, lambda m: [m(**both)]), want))
    model = made_of(Two)
    model.other.dense.to(torch.float32 if world.rank else torch.float64)
    model.other.register_forward_pre_hook(
        lambda tower, args: tuple(x.to(tower.dense.weight.dtype) for x in args))
    balanced_two(model)
    with pytest.raises(PlanMismatchError) as error:
        model(**both)
    return [*out, str(error.value)]


def test_a_later_forward_is_judged_by_itself(two):
    for difference, stopped, unread, differs in two["after_others"]:
        assert max(difference, unread) < EXACT
        assert "Two.forward stops the gradient of its features" in stopped
        assert "ranks disagree on what encoder 'other' returns" in differs


def slow_and_sharded(world) -> bool:
    """A rank takes longer than the patience with one that failed, and none has."""
    _, inputs = model_and([4, 4], world.rank)
    model = made_of(Model, tower=Late())
    balanced(model)
    fully_shard(model.tower)
    fully_shard(model)
    patience, sharing.PATIENCE_S = sharing.PATIENCE_S, 0.2
    model.tower.wait_s = 1.0 * world.rank
    model(**inputs).backward()
    sharing.PATIENCE_S = patience
    return True


def test_a_rank_that_has_no_error_waits_for_slower_ones(two):
    assert two["slow_and_sharded"] == [True, True]


class Nested(Late):
    """Ranks wait for each other in its inner layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Linear(8, 8))


def fails_before_the_others(world) -> None:
    _, inputs = model_and([4, 4], world.rank)
    model = made_of(Two, tower=Nested())
    balanced_two(model)
    fully_shard(model.tower.dense, reshard_after_forward=True)
    sharing.PATIENCE_S = 0.2
    model.tower.raises = world.rank == 0
    model(**inputs, others=inputs["photos"])


def test_a_rank_that_fails_ends_although_others_wait_within_a_tower():
    """One of two towers is sharded."""
    started = time.monotonic()
    with pytest.raises(RankFailure) as failed:
        run_ranks(fails_before_the_others, 2, timeout_s=120)
    assert failed.value.errors[0][:2] == ("KeyError", '"the user\'s bug in ファイル一覧.png"')
    assert time.monotonic() - started < 100


@pytest.fixture(scope="module")
def two() -> dict[str, list]:
    return each_in_one_world(2, (exact, without_gradients, after_others, later_forwards,
                                 without_a_place_to_join, slow_and_sharded))
