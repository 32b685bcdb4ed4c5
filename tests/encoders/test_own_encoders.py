"""balance_encoders with a model that is not from transformers: exact, or an error on all ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from orchmllm import CostModel, Encoder, Masked, Packed, balance_encoders
from orchmllm.comm.agree import RemoteError
from orchmllm.encoders.infer import infer_encoders
from orchmllm.encoders.items import Cropped
from orchmllm.encoders.sharing import assign
from orchmllm.encoders.table import GatheredItems
from orchmllm.loader.loss_trial import _undisturbed
from tests.lib.encoder_models import FAMILIES, Item, batch
from tests.lib.encoder_runs import (
    gradients,
    mean_gradients,
    mean_gradients_of,
    sharded,
    worst,
)
from tests.lib.examples import load
from tests.lib.ranks import each_in_one_world

pytestmark = pytest.mark.dist
EXACT = 1e-13


def test_cropped_images_are_put_together_as_they_were():
    """Wide, tall and square ones, from patches that moved, padded to the largest."""
    sizes = torch.tensor([[2, 6], [6, 2], [4, 4]])
    images = torch.zeros(3, 2, 6, 8)
    for image, (height, width) in zip(images, sizes.tolist(), strict=True):
        image[:, :height, :width] = torch.randn(2, height, width)
    layout = Cropped("images", "sizes", lambda _: 2)
    items = layout.describe(nn.Module(), {"images": images, "sizes": sizes})
    built, found = layout.build(items.meta, items.values)
    assert torch.equal(built, images[..., :6]) and found.tolist() == sizes.tolist()


def two_towers(world, **options) -> dict:
    """Three steps, of which two make one backward; a deep copy; evaluation; removal."""
    e = load("own_model")
    torch.manual_seed(0)
    model = e.TwoTowers().double()
    out = {}

    def losses(steps):
        return lambda m: [e.loss_of(m, e.inputs_of(world.rank, s)) for s in steps]

    want = {key: mean_gradients(model, losses(steps))
            for key, steps in (("one", [0]), ("two at once", [1, 2]))}
    twin = copy.deepcopy(model)
    handle = e.balanced(model, **options)
    sharded(model)
    for key, steps in (("one", [0]), ("two at once", [1, 2])):
        model.zero_grad()
        sum(losses(steps)(model)).backward()
        out[key] = worst(gradients(model), want[key])
        out[f"{key}, last"] = handle.last
    model.eval()
    with torch.no_grad():  # the ranks make unequal numbers of forwards without the hook
        for _ in range(world.rank):
            e.loss_of(twin.eval(), e.inputs_of(world.rank, 0))
    handle.last = {}
    e.loss_of(model, e.inputs_of(0, 0))  # all ranks hold media, so FSDP2 needs no help
    out["eval"] = handle.last
    model.train()
    ours = len(model._forward_pre_hooks), len(model._forward_hooks)
    handle.remove()
    out["hooks"] = (ours[0] - len(model._forward_pre_hooks), ours[1] - len(model._forward_hooks))
    e.loss_of(model, e.inputs_of(0, 0))
    out["removed"] = handle.last
    return out


def test_a_model_of_ones_own_is_exact(three):
    for rank in three["two_towers"]:
        assert rank["one"] < EXACT and rank["two at once"] < EXACT
        assert rank["eval"] == {} and rank["removed"] == {} and rank["hooks"] == (1, 1)
        last = rank["one, last"]
        assert set(last) == {"photo", "clip"} and last["photo"].moved > 0
        before, after = last["photo"].imbalance
        assert after < before and last["photo"].gain > 0.3


def test_one_rank_is_exact(one):
    (rank,) = one["two_towers"]
    assert rank["one"] < EXACT and rank["one, last"]["photo"].moved == 0


def given_embeddings(world) -> float:
    """inputs_embeds instead of input_ids, with a rank without media; by keyword and by place."""
    torch.manual_seed(0)
    model = FAMILIES["llava"].build()
    inputs = batch(FAMILIES["llava"], model, [Item("image", 1)] * 3 * (world.rank == 0), world.rank)
    labels, ids, images = inputs["labels"], inputs["input_ids"], inputs.get("pixel_values")

    def loss(m):
        embeds = m.get_input_embeddings()(ids)
        if images is None:  # input_ids, pixel_values, attention_mask, position_ids, cache, ...
            hidden = m.model(None, None, None, None, None, embeds)[0]
        else:
            hidden = m.model(inputs_embeds=embeds, pixel_values=images)[0]
        return [m.loss_function(m.lm_head(hidden), labels, vocab_size=64)]

    want = mean_gradients(model, loss)
    balance_encoders(model)
    return worst(mean_gradients_of(model, loss), want)


def test_embeddings_may_be_given(two):
    assert max(two["given_embeddings"]) < EXACT


def test_a_model_is_balanced_once(one):
    assert "balanced already: call remove()" in one["twice"][0]


def twice(world) -> str:
    e = load("own_model")
    model = e.TwoTowers()
    e.balanced(model).remove()
    e.balanced(model)
    try:
        e.balanced(model)
    except ValueError as error:
        return str(error)
    return ""


def copied_and_shadowed(world) -> dict:
    e = load("own_model")
    torch.manual_seed(0)
    model = e.TwoTowers().double()
    inputs = e.inputs_of(world.rank, 0)
    want = mean_gradients(model, lambda m: [e.loss_of(m, inputs)])
    e.balanced(model)
    second = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # the copy's hooks must use the copy's weights
    # Media are given, but of no items.
    given = inputs | {"photos": torch.zeros(0, 3, 16, 16, dtype=torch.float64)} | inputs
    out = {"copy": worst(mean_gradients_of(second, lambda m: [e.loss_of(m, given)]), want)}
    third = e.TwoTowers().double()
    before = e.loss_of(third, inputs)
    shadow = e.balanced(third, shadow=True)
    calls = []
    third.photo_tower.register_forward_hook(lambda m, a, r: calls.append(len(a[0])))
    out["same"] = bool(torch.equal(e.loss_of(third, inputs), before))
    out["calls"], out["last"] = list(calls), shadow.last
    shadow.shadow = False  # from now on
    e.loss_of(third, inputs)
    out["moved"] = shadow.last["photo"].moved
    fourth = e.TwoTowers().double()
    skipping = e.balanced(fourth, min_gain=0.99)
    want = mean_gradients(fourth, lambda m: [e.loss_of(m, inputs)])
    e.loss_of(sharded(fourth), inputs).backward()
    out["skipped"], out["skip"] = worst(gradients(fourth), want), skipping.last
    return out


def test_copies_shadow_and_the_skip_rule(three):
    for rank, seen in enumerate(three["copied_and_shadowed"]):
        assert seen["copy"] < EXACT
        assert seen["same"] and seen["calls"] == ([4] if rank == 0 else [])
        assert seen["last"]["photo"].moved == 0 and seen["last"]["photo"].gain > 0.3
        assert seen["moved"] > 0
        assert seen["skipped"] < EXACT
        assert seen["skip"]["photo"].moved == 0 and seen["skip"]["photo"].gain == 0


@pytest.mark.parametrize("min_gain, moves", [(0.0, True), (0.33, True), (0.34, False)])
def test_a_move_has_to_gain_its_share(min_gain, moves):
    """Rank 0 has three of four equal items: with two each the slowest has a third less."""
    items = GatheredItems(np.array([3, 1]), np.full((4, 1), 8), [None, None])
    encoder = Encoder("clip", {"tower": Packed("clips", "lengths")})
    made = assign(encoder, None, items, CostModel(1000, 0), min_gain=min_gain, ranks_per_node=8)
    assert made.move.target_sizes.tolist() == ([2, 2] if moves else [3, 1])


def test_what_is_even_does_not_move():
    items = GatheredItems(np.array([2, 2]), np.full((4, 1), 8), [None, None])
    encoder = Encoder("clip", {"tower": Packed("clips", "lengths")})
    made = assign(encoder, None, items, CostModel(1000, 0), min_gain=0.0, ranks_per_node=8)
    assert made.move.order.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "qwen2_5_omni"])
def test_attention_of_a_video_costs_what_one_of_its_frames_has(name):
    """An image of 64 patches, and a video of 16 frames of 4."""
    items = GatheredItems(np.ones(2, np.int64), np.array([[1, 8, 8], [16, 2, 2]]), [None, None])
    encoder = infer_encoders(FAMILIES[name].build())[1][0]
    made = assign(encoder, None, items, CostModel(1000, 3000),
                  min_gain=0.0, ranks_per_node=8)
    assert made.cost.tolist() == [64 + 3 * 64 * 64, 64 + 3 * 64 * 4]


def many(world) -> tuple[float, int]:
    """More items than the table of a forward first has room for, on one rank."""
    e = load("own_model")
    torch.manual_seed(0)
    model = e.TwoTowers().double()
    n = 300 if world.rank == 1 else 1
    inputs = {"ids": torch.full((1, n), e.CLIP), "clips": torch.randn(n, 8).double(),
              "clip_lengths": torch.ones(n, dtype=torch.int64)}
    want = mean_gradients(model, lambda m: [m(**inputs).square().mean()])
    handle = e.balanced(model)
    got = mean_gradients_of(model, lambda m: [m(**inputs).square().mean()])
    return worst(got, want), handle.last["clip"].moved


def looked_at(world) -> list[tuple[bool, dict]]:
    """The loss as balance_trainer looks at it, in a forward without gradients on all ranks; and in
    an evaluation that is balanced, too."""
    e = load("own_model")
    torch.manual_seed(0)
    model = e.TwoTowers().double()
    inputs = e.inputs_of(world.rank, 0)
    want = e.loss_of(model, inputs).detach()
    handle = e.balanced(model)
    sharded(model)
    trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")))
    out = []
    for training in (True, False):
        handle.last = {}
        with _undisturbed(trainer, model, training):
            got = e.loss_of(model, inputs)
        out.append((torch.allclose(got, want, atol=EXACT), handle.last))
    handle.remove()
    handle = e.balanced(model.eval(), when="always")
    with torch.no_grad():
        out.append((torch.allclose(e.loss_of(model, inputs), want, atol=EXACT), handle.last))
    return out


def test_encoders_are_balanced_without_gradients_where_that_is_asked_for(two):
    for looks in two["looked_at"]:
        for same, last in looks:
            assert same and last["photo"].moved > 0


def cheap(world) -> int:
    """Frames as the cost, because the FLOPs are not known: in whole kFLOP every clip costs 0."""
    e = load("own_model")
    model = e.TwoTowers().double()
    handle = balance_encoders(model, [
        Encoder("clip", {"clip_tower": Packed("clips", "clip_lengths")}, outputs=(0,),
                cost=CostModel(linear=1, quadratic=0))], join="embed")
    inputs = e.inputs_of(world.rank, 0)
    inputs.pop("photos", None)
    model(**inputs)
    return handle.last["clip"].moved


def test_a_small_cost_of_an_item_balances(two):
    assert min(two["cheap"]) > 0


class Told(nn.Module):
    """A tower that depends on the dtype and the shape of what it is told of its items."""

    def __init__(self, dtype: torch.dtype, ndim: int) -> None:
        super().__init__()
        self.dense, self.told = nn.Linear(4, 8), (dtype, ndim)

    def forward(self, values, told):
        assert (told.dtype, told.dim()) == self.told
        if values.dim() == 3:
            return self.dense(values.transpose(1, 2)).masked_fill(~told[..., None], 0.0).sum(1)
        return torch.stack([self.dense(one).mean(0) for one in values.split(
            told.flatten().tolist())])


class Wrapped(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower, self.embed = tower, nn.Embedding(2, 8)

    def forward(self, ids, values, told):
        return self.embed(ids).sum() + self.tower(values, told).square().sum()


def told(world) -> list[float]:
    """What a tower is told, in the dtype and the shape that its caller gave; a tower in a wrapper,
    whose forward names no arguments."""
    lengths = torch.arange(2, 6 - 2 * world.rank)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.randn(int(lengths.sum()), 4).double()
    mel = torch.randn(len(lengths), 4, mask.shape[1]).double()
    packed, ids, out = Packed("values", "told"), torch.zeros(1, 2, dtype=torch.int64), []
    for layout, values, said, wrap in (
            (Masked("values", "told"), mel, mask, lambda t: t),
            (packed, rows, lengths.int(), checkpoint_wrapper),
            (packed, rows, lengths[:, None], lambda t: torch.compile(t, backend="eager"))):
        torch.manual_seed(0)
        model = Wrapped(wrap(Told(said.dtype, said.dim()).double())).double()

        def losses(m, values=values, said=said):
            return [m(ids, values, said)]

        want = mean_gradients(model, losses)
        handle = balance_encoders(model, [Encoder("e", {"tower": layout})], join="embed")
        out.append(worst(mean_gradients_of(model, losses), want) + (not handle.last["e"].moved))
        if said is mask:  # learnt, its gradient would be lost
            with pytest.raises(RemoteError, match="the argument told requires gradients"):
                losses(model, said=mask.double().requires_grad_())
    return out


def test_a_tower_is_told_what_its_caller_says(two):
    assert max(map(max, two["told"])) < EXACT


def test_many_items(two):
    for difference, moved in two["many"]:
        assert difference < EXACT and moved > 100


def runs(world) -> dict:
    return load("own_model").main(3)


@pytest.fixture(scope="module")
def one() -> dict[str, list]:
    return each_in_one_world(1, (two_towers, twice))


@pytest.fixture(scope="module")
def two() -> dict[str, list]:
    return each_in_one_world(2, (given_embeddings, looked_at, cheap, many, runs, told))


@pytest.fixture(scope="module")
def three() -> dict[str, list]:
    return each_in_one_world(3, (two_towers, copied_and_shadowed))


def test_the_example_runs(two):
    seen = two["runs"]
    assert seen[0] == seen[1] and len(seen[0]["losses"]) == 3
    for before, after in (step["photo"] for step in seen[0]["imbalance"]):
        assert after < before
