"""balance_encoders with a model that is not from transformers: exact, or an error on all ranks."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from orchmllm import Encoder, Rows, balance_encoders
from orchmllm.dropin.encoders import assignment
from orchmllm.dropin.encoders.table import World
from tests.lib.encoder_models import FAMILIES, Item, batch
from tests.lib.encoder_runs import gradients, worst
from tests.lib.examples import EXAMPLES, load
from tests.lib.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.dist
EXACT = 1e-13


def mean_gradients(model: nn.Module, losses) -> dict[str, torch.Tensor]:
    """Over the ranks, of the sum of losses(model) of this rank."""
    return mean_gradients_of(copy.deepcopy(model), losses)


def mean_gradients_of(model: nn.Module, losses) -> dict[str, torch.Tensor]:
    """The same, of this model itself."""
    sum(losses(model)).backward()
    out = {}
    for name, p in model.named_parameters():
        out[name] = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(out[name])
        out[name] /= dist.get_world_size()
    return out


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


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


def test_a_model_of_ones_own_is_exact():
    out = run_ranks(two_towers, 3)
    for rank in out:
        assert rank["one"] < EXACT and rank["two at once"] < EXACT
        assert rank["eval"] == {} and rank["removed"] == {} and rank["hooks"] == (1, 1)
        last = rank["one, last"]
        assert set(last) == {"photo", "clip"} and last["photo"].moved > 0
        before, after = last["photo"].imbalance
        assert after < before and last["photo"].gain > 0.3


def informed(world) -> tuple[float, int, str]:
    """Lengths that all ranks know: gathers of the second forward; then wrong ones on rank 1."""
    e = load("own_model")
    torch.manual_seed(0)
    model = e.TwoTowers().double()
    told = {}
    handle = e.balanced(model, lengths=lambda: told)
    gathers, gather = [], handle._tables.gather
    handle._tables.gather = handle.gather = Counted(gather, gathers)
    sharded(model)
    for step in (0, 1):
        held = [e.inputs_of(r, step) for r in range(world.world_size)]
        told["photo"] = [len(x.get("photos", ())) for x in held], np.zeros((sum(
            len(x.get("photos", ())) for x in held), 0))
        lengths = [x["clip_lengths"] for x in held if "clip_lengths" in x]
        told["clip"] = [len(x.get("clip_lengths", ())) for x in held], torch.cat(lengths).numpy()
        before = len(gathers)
        model.zero_grad()
        want = mean_gradients_of(plain_towers(), lambda m, x=held: [e.loss_of(m, x[world.rank])])
        e.loss_of(model, held[world.rank]).backward()
    difference, count = worst(gradients(model), want), len(gathers) - before
    if world.rank == 1:
        held[1]["clip_lengths"] = held[1]["clip_lengths"].flip(0) + torch.tensor([-1, 1])
    try:
        model(**held[world.rank])
    except RuntimeError as error:
        return difference, count, str(error)
    return difference, count, ""


def plain_towers() -> nn.Module:
    torch.manual_seed(0)
    return load("own_model").TwoTowers().double()


class Counted:
    def __init__(self, gather, calls: list) -> None:
        self.gather, self.calls = gather, calls
        self.rank, self.world_size = gather.rank, gather.world_size

    def __call__(self, row):
        self.calls.append(len(row))
        return self.gather(row)


def test_lengths_that_are_known_are_not_gathered():
    for difference, gathers, text in run_ranks(informed, 2):
        assert difference < EXACT and gathers == 1  # the agreement on the results
        assert "rank 1 failed: ValueError: encoder 'clip': this rank's media are" in text


def test_one_rank_is_exact():
    (rank,) = run_ranks(two_towers, 1)
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
    balance_encoders(model, min_gain=0.0)
    return worst(mean_gradients_of(model, loss), want)


def test_embeddings_may_be_given():
    assert max(run_ranks(given_embeddings, 2)) < EXACT


def test_a_model_is_balanced_once():
    assert "balanced already: call remove()" in run_ranks(twice, 1)[0]


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


def test_it_takes_few_lines():
    source = (EXAMPLES / "own_model.py").read_text()
    call = source[source.index("    return balance_encoders("):].split("\n\n")[0]
    assert "Encoder(" in call and len(call.splitlines()) <= 15


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


def test_copies_shadow_and_the_skip_rule():
    out = run_ranks(copied_and_shadowed, 3)
    for rank, seen in enumerate(out):
        assert seen["copy"] < EXACT
        assert seen["same"] and seen["calls"] == ([4] if rank == 0 else [])
        assert seen["last"]["photo"].moved == 0 and seen["last"]["photo"].gain > 0.3
        assert seen["moved"] > 0
        assert seen["skipped"] < EXACT
        assert seen["skip"]["photo"].moved == 0 and seen["skip"]["photo"].gain == 0


def test_a_move_has_to_pay():
    """Saved cost x pace against the measured exchange, by the median over the ranks."""
    def pays(pace: int, overhead: int, min_gain: float | None = None) -> bool:
        world = World(np.ones((2, 1)), np.ones((2, 0)), [], np.array([pace, pace]),
                      np.array([overhead, overhead]))
        return assignment._pays(np.array([300, 100]), np.array([200, 200]), world, min_gain)

    assert pays(0, 0) and pays(0, 10**9) and pays(5, 0)  # not known yet
    assert pays(20_000, 1_999) and not pays(20_000, 2_001)  # 100 x 20 ns
    assert pays(1, 10**9, min_gain=0.33) and not pays(1, 1, min_gain=0.34)


def in_pairs(world) -> tuple[float, dict]:
    """Two groups of two ranks that share their media; the gradients are of all four."""
    e = load("own_model")
    torch.manual_seed(0)
    model = e.TwoTowers().double()
    inputs = e.inputs_of(world.rank % 2, 0)
    want = mean_gradients(model, lambda m: [e.loss_of(m, inputs)])
    group, _ = dist.new_subgroups(2)
    handle = e.balanced(model, group=group)
    e.loss_of(sharded(model), inputs).backward()
    return worst(gradients(model), want), handle.last


def test_groups_share_their_media():
    for difference, last in run_ranks(in_pairs, 4):
        assert difference < EXACT and last["photo"].num_items == 4 and last["photo"].moved == 2


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


def test_many_items():
    for difference, moved in run_ranks(many, 2):
        assert difference < EXACT and moved > 100


def runs(world) -> dict:
    return load("own_model").main(3)


def test_the_example_runs():
    seen = run_ranks(runs, 2)
    assert seen[0] == seen[1] and len(seen[0]["losses"]) == 3
    for before, after in (step["photo"] for step in seen[0]["imbalance"]):
        assert after < before


Pair = namedtuple("Pair", ["features", "norm"])


@dataclasses.dataclass
class Record:
    features: object
    norm: object = None


class Slotted:
    __slots__ = ("features", "norm")

    def __init__(self, features, norm) -> None:
        self.features, self.norm = features, norm


# How a tower may return its features -> (what it returns, the fields to read, how the model reads).
KINDS = {
    "tensor": (lambda f: f, (), lambda r: r),
    "list": (lambda f: list(f), (), lambda r: torch.cat(r)),
    "tuple": (lambda f: (f, f.norm()), (0,), lambda r: r[0]),
    "namedtuple": (lambda f: Pair(f, f.norm()), ("features",), lambda r: r.features),
    "dict": (lambda f: {"features": f, "norm": f.norm()}, ("features",), lambda r: r["features"]),
    "dataclass": (lambda f: Record(f, f.norm()), ("features",), lambda r: r.features),
    "slots": (lambda f: Slotted(f, f.norm()), ("features",), lambda r: r.features),
    "several": (lambda f: {"a": f[..., :20], "b": list(f[..., 20:])}, ("a", "b"),
                lambda r: torch.cat([r["a"].flatten(0, 1), torch.cat(r["b"])], -1)),
    "layers": (lambda f: {"a": f, "deep": [f * 2, f * 3]}, ("a", "deep"),
               lambda r: r["a"] + r["deep"][0] - r["deep"][1] + 2 * r["a"]),
}


class OneTower(nn.Module):
    """Reads the photos of examples/own_model.py through a tower that returns `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        e = load("own_model")
        self.embed, self.tower, self.kind = nn.Embedding(e.VOCAB, e.DIM), e.PhotoTower(), kind
        self.head, self.layers = nn.Linear(e.DIM, e.VOCAB), nn.ModuleList([e.block()])

    def encode(self, photos: torch.Tensor) -> object:
        return KINDS[self.kind][0](self.tower(photos))

    def forward(self, ids, photos=None):
        x = self.embed(ids)
        if photos is not None:
            features = KINDS[self.kind][2](self.encode(photos))
            x = x.masked_scatter((ids == 62)[..., None], features)
        return self.head(self.layers[0](x))


def photo_inputs(rank: int) -> dict[str, torch.Tensor]:
    inputs = load("own_model").inputs_of(rank, 0)
    return {k: inputs[k] for k in ("ids", "photos") if k in inputs}


def each_kind(world) -> dict[str, float]:
    e, out = load("own_model"), {}
    for kind, (_, outputs, _) in KINDS.items():
        torch.manual_seed(0)
        model = OneTower(kind).double()
        inputs = photo_inputs(world.rank)
        want = mean_gradients(model, lambda m, i=inputs: [e.loss_of(m, i)])
        balance_encoders(model, [Encoder(
            "photo", {"encode": Rows("photos")}, outputs=outputs, towers=("tower",),
            layers=("deep",) if kind == "layers" else ())], join="embed", min_gain=0.0)
        e.loss_of(sharded(model), inputs).backward()
        out[kind] = worst(gradients(model), want)
    return out


def test_results_of_every_kind():
    for rank in run_ranks(each_kind, 2):
        assert max(rank.values()) < EXACT, rank


class Broken(OneTower):
    """Goes wrong in one way, on rank 1 where that is possible."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__("tensor")
        self.how, self.rank = how, rank

    def encode(self, photos):
        if self.how == "encoder raises" and self.rank == 1:
            raise KeyError("the user's bug")
        features = super().encode(photos)
        if self.how == "other width" and self.rank == 1:
            return features[..., :16]
        if self.how == "not by item":
            return features.flatten(0, 1)
        if self.how == "an object":
            return Record(features)
        if self.how == "rows differ":
            return Record(features, features[:, :2])
        if self.how == "dtypes differ":
            return Record(features, features.float())
        return features

    def forward(self, ids, photos=None):
        if self.how == "never called":
            photos = None
        if self.how == "in parts" and photos is not None:
            parts = [self.encode(p) for p in photos.split(1)]
            return self.head(self.embed(ids) + torch.cat(parts).mean())
        if self.how == "no embedding":
            return self.head(self.embed.weight[ids])
        return super().forward(ids, photos)


BROKEN = {
    "encoder raises": "rank 1 failed: KeyError: \"the user's bug\"",
    "other width": "ranks disagree on what encoder 'photo' returns",
    "not by item": "has 8 rows for 2 items: give `rows`",
    "an object": "returns a Record, neither a tensor nor",
    "rows differ": "output 'norm' has [2, 2] rows per item, output 'features' has [4, 4]",
    "dtypes differ": "output 'norm' is torch.float32",
    "bad counts": "rank 1 failed: ValueError: photos is a list",
    "other dtype": "ranks disagree on argument 0 of encoder 'photo'",
    "other shape": "rows of shape (3, 24, 24)",
}
LOCAL = {  # what only a rank with media can see
    "never called": "never called encode: their features were not used",
    "in parts": "it encodes its media in parts",
}


def broken(world, how: str) -> tuple[str, str, float]:
    """(what was raised, of which cause, seconds)."""
    e = load("own_model")
    torch.manual_seed(0)
    model = Broken(how, world.rank).double()
    outputs = {"rows differ": ("features", "norm"), "dtypes differ": ("features", "norm")}
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",),
                                     outputs=outputs.get(how, ()))], join="embed", min_gain=0.0)
    inputs = e.inputs_of(0, 0) | {"photos": torch.randn(
        2, 3, 16, 16, dtype=torch.float64)}
    inputs = {"ids": inputs["ids"], "photos": inputs["photos"]}
    if world.rank == 1:
        inputs["photos"] = {"bad counts": [inputs["photos"]],
                            "other dtype": inputs["photos"].float(),
                            "other shape": torch.zeros(2, 3, 24, 24, dtype=torch.float64),
                            }.get(how, inputs["photos"])
    started = time.monotonic()
    try:
        model(**inputs)
    except Exception as error:
        return str(error), type(error.__cause__).__name__, time.monotonic() - started
    return "", "", 0.0


def every_way(world) -> dict:
    return {how: broken(world, how) for how in (*BROKEN, *LOCAL)}


def test_errors_reach_all_ranks():
    zero, one = run_ranks(every_way, 2)
    for how, text in BROKEN.items():
        assert zero[how][0] == one[how][0] and text in one[how][0], (how, zero[how], one[how])
        assert max(zero[how][2], one[how][2]) < 60  # milliseconds on a quiet machine
    for how, text in LOCAL.items():
        assert text in zero[how][0] and text in one[how][0], (how, one[how])
    assert one["encoder raises"][1] == "KeyError" and zero["encoder raises"][1] == "NoneType"


def unjoined(world) -> str:
    """A rank without media whose forward does not call the module named in join."""
    model = Broken("no embedding", world.rank).double()
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))],
                     join="embed", min_gain=0.0)
    try:
        model(**photo_inputs(world.rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_join_that_is_not_called_is_named():
    assert "did not call its embedding" in run_ranks(unjoined, 2)[1]


def sharded_and_raising(world) -> None:
    torch.manual_seed(0)
    model = Broken("encoder raises", world.rank).double()
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))],
                     join="embed", min_gain=0.0)
    fully_shard(model.tower.block)
    fully_shard(model.layers[0])
    fully_shard(model)(**photo_inputs(world.rank))


@pytest.mark.slow
def test_an_error_amid_collectives_ends_all_ranks():
    """The others wait inside FSDP2's gathers; the end of the rank that failed ends theirs."""
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(sharded_and_raising, 2)
    assert set(failure.value.errors) == {0, 1} and time.monotonic() - started < 200
    assert failure.value.errors[1][0] == "KeyError"
    assert "the user's bug" in failure.value.errors[1][2]
