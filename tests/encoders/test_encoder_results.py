"""balance_encoders: results of every kind come back as they were, and errors reach all ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from orchmllm import Encoder, Rows, balance_encoders
from orchmllm.comm.agree import RemoteError
from orchmllm.encoders.results import flatten, rebuild
from tests.lib.encoder_runs import gradients, mean_gradients, sharded, worst
from tests.lib.examples import load
from tests.lib.ranks import RankFailure, each_in_one_world, run_ranks

pytestmark = pytest.mark.dist
EXACT = 1e-13


Pair = namedtuple("Pair", ["features", "norm"])


@dataclasses.dataclass
class Record:
    features: object
    norm: object = None
    made: bool = dataclasses.field(default=True, init=False)


class Plain:
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
    "object": (lambda f: Plain(f, f.norm()), ("features",), lambda r: r.features),
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
        self.options: dict[str, float] = {}  # of the call

    def encode(self, photos: torch.Tensor, scale: float = 1.0) -> object:
        return KINDS[self.kind][0](self.tower(photos) * scale)

    def forward(self, ids, photos=None):
        x = self.embed(ids)
        if photos is not None:
            features = KINDS[self.kind][2](self.encode(photos, **self.options))
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
            layers=("deep",) if kind == "layers" else ())], join="embed")
        e.loss_of(sharded(model), inputs).backward()
        out[kind] = worst(gradients(model), want)
    model = OneTower("tensor").double()
    model.options = {"scale": 3.0}
    want = mean_gradients(model, lambda m: [e.loss_of(m, photo_inputs(world.rank))])
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",),
                                     keywords=model.options)], join="embed")
    e.loss_of(sharded(model), photo_inputs(world.rank)).backward()
    out["an option"] = worst(gradients(model), want)
    return out


def test_results_of_every_kind(ranks):
    for rank in ranks["each_kind"]:
        assert max(rank.values()) < EXACT, rank


def test_what_nothing_becomes_can_be_joined_and_padded():
    items = torch.arange(12.0).view(2, 3, 2)
    for form, padded in ((list, False), (torch.clone, True)):
        spec = Encoder("photo", {"encode": Rows("photos")}, padded=padded,
                       rows=(lambda model, meta: meta[:, 0]) if padded else None)
        seen = flatten(spec, nn.Identity(), form(items), np.array([[3], [3]]), False)
        made = rebuild(spec, seen, seen.rows[:0], [])
        assert torch.cat(list(made)).shape == (0, 2)


class Broken(OneTower):
    """Goes wrong in one way, on rank 1 where that is possible."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__("tensor")
        self.how, self.rank = how, rank

    def encode(self, photos, scale=1.0):
        if self.how == "encoder raises" and self.rank == 1:
            raise KeyError("the user's bug")
        features = super().encode(photos, scale)
        if self.how == "other width" and self.rank == 1:
            return features[..., :16]
        if self.how == "mixes items":  # the items of a rank see each other
            return features + features.mean(0)
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
        if self.how == "another tensor" and photos is not None:
            photos = (photos - 0.5) / 0.5
        if self.how == "sorted" and photos is not None:
            photos = photos[photos.flatten(1).norm(dim=1).argsort()]
        if self.how == "without gradients" and torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(ids, photos)
        if self.how == "another input" and photos is not None:
            self.encode(photos.clone())
        if self.how == "changed in place" and photos is not None:
            photos.clamp_(0, 1)
        if self.how == "called twice" and photos is not None:
            self.encode(photos)
        if self.how == "no embedding" and photos is None:
            return self.head(self.embed.weight[ids])
        return super().forward(ids, photos)


BROKEN = {
    "mixes items": "of their norm from those of the same item encoded where it was sampled",
    "encoder raises": "rank 1 failed: KeyError: \"the user's bug\"",
    "other width": "ranks disagree on what encoder 'photo' returns",
    "not by item": "has 8 rows for 2 items: give `rows`",
    "an object": "returns a Record, neither a tensor nor",
    "rows differ": "output 'norm' has [2, 2] rows per item, output 'features' has [4, 4]",
    "dtypes differ": "output 'norm' is torch.float32",
    "bad counts": "rank 1 failed: ValueError: photos is a list",
    "other dtype": "ranks disagree on argument 0 of encoder 'photo'",
    "complex": "rank 1 failed: ValueError: encoder 'photo': cannot move a tensor of torch.com",
    "int16": "cannot move a tensor of torch.int16 and shape (2, 3, 16, 16) (photos)",
    "other shape": "rows of shape (3, 24, 24)",
}
LOCAL = {  # what only a rank with media can see
    "never called": "never called encode: their features were not used",
    "in parts": "it encodes its media in parts",
}


def broken(world, how: str) -> tuple[str, str]:
    """(what was raised, of which cause)."""
    e = load("own_model")
    torch.manual_seed(0)
    model = Broken(how, world.rank).double()
    outputs = {"rows differ": ("features", "norm"), "dtypes differ": ("features", "norm")}
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",),
                                     outputs=outputs.get(how, ()))], join="embed")
    inputs = e.inputs_of(0, 0) | {"photos": torch.randn(
        2, 3, 16, 16, dtype=torch.float64)}
    inputs = {"ids": inputs["ids"], "photos": inputs["photos"]}
    if world.rank == 1:
        inputs["photos"] = {"bad counts": [inputs["photos"]],
                            "other dtype": inputs["photos"].float(),
                            "complex": inputs["photos"].to(torch.complex64),
                            "int16": inputs["photos"].to(torch.int16),
                            "other shape": torch.zeros(2, 3, 24, 24, dtype=torch.float64),
                            }.get(how, inputs["photos"])
    try:
        model(**inputs)
    except Exception as error:
        return str(error), type(error.__cause__).__name__
    return "", ""


def every_way(world) -> dict:
    return {how: broken(world, how) for how in (*BROKEN, *LOCAL)}


def test_errors_reach_all_ranks(ranks):
    zero, one = ranks["every_way"]
    for how, text in BROKEN.items():
        assert zero[how][0] == one[how][0] and text in one[how][0], (how, zero[how], one[how])
    for how, text in LOCAL.items():
        assert text in zero[how][0] and text in one[how][0], (how, one[how])
    assert one["encoder raises"][1] == "KeyError" and zero["encoder raises"][1] == "NoneType"


MISUSED = {
    "another tensor": "called encode with another tensor than its argument photos",
    "sorted": "called encode with another tensor than its argument photos",
    "changed in place": "called encode with photos changed in place",
    "called twice": "called encode twice", "another input": "called encode twice",
    "without gradients": "called encode without gradients",
    "an option": "called encode with scale=3.0", "no option": "called encode with scale=None",
    "an option beside run": "called encode with scale=3.0",
    "never called": "never called encode",
}


def misused(world) -> dict[str, list[str]]:
    """What each forward raises, of which the first or the second is wrong; on rank 0, which alone
    has media."""
    out: dict[str, list[str]] = {how: [] for how in MISUSED}
    for how, wrong in itertools.product(MISUSED, (0, 1)):
        model = Broken("", world.rank).double()
        run = (lambda owner, photos: type(owner).encode(owner, photos)) if "run" in how else None
        balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",),
                                         run=run)], join="embed")
        for k in range(3):
            model.how = how if k == wrong else ""
            model.options = {"an option": {"scale": 3.0}, "an option beside run": {"scale": 3.0},
                             "no option": {"scale": None}}.get(model.how, {})
            try:
                model(**photo_inputs(world.rank))
            except RuntimeError as error:
                out[how].append(f"{wrong} {k} {error}")
    return out


def test_features_of_other_calls_are_an_error_of_all_ranks(ranks):
    """At once in the first forward, later at the begin of the next one."""
    zero, one = ranks["misused"]
    for how, part in MISUSED.items():
        assert zero[how] == one[how] and [text[:3] for text in zero[how]] == ["0 0", "1 2"], how
        assert all(t[4:].startswith("step") and "failed: RuntimeError: encoder 'photo'" in t
                   and part in t for t in zero[how]), how


class Around(nn.Module):
    """A model that calls the tower itself and gives the embeddings to the inner model, as the
    retrieval models of transformers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids, photos=None):
        if photos is not None:
            self.inner.tower(photos)
        return self.inner(ids)


def without_effect(world) -> list[str]:
    """What two forwards raise, of which only rank 0 has media."""
    model = Around(Broken("", world.rank).double())
    balance_encoders(model.inner, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))],
                     join="embed")
    out = []
    for _ in range(2):
        try:
            model(**photo_inputs(world.rank))
            out.append("")
        except RuntimeError as error:
            out.append(str(error))
    return out


def test_a_tower_that_runs_outside_of_the_forward_is_told_on_all_ranks(ranks):
    zero, one = ranks["without_effect"]
    assert zero == one and len(zero) == 2
    assert all("a PhotoTower ran outside of the forward of Broken" in text for text in zero)


def sharing(world) -> list[set]:
    """The encoders that were balanced in the forwards of two models that share a tower: both are
    balanced, then one, of which the other runs first; rank 0 alone has media."""
    out = []
    for num_balanced in (2, 1):
        models = [Broken("", world.rank).double() for _ in range(2)]
        models[1].tower = models[0].tower
        handles = [balance_encoders(
            model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))], join="embed")
            for model in models[:num_balanced]]
        for model in reversed(models):
            model(**photo_inputs(world.rank))
        out += [set(handle.last) for handle in handles]
    return out


def test_models_may_share_a_tower(ranks):
    assert ranks["sharing"] == [[{"photo"}] * 3] * 2


def adapted(world) -> tuple[list[str], bool]:
    """What a forward before and one after an adapter with dropout raise; and whether the random
    numbers go on as without the proof."""
    e = load("own_model")
    out, model = [], Broken("", world.rank).double()
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))],
                     join="embed")
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for _ in range(2):
        try:
            e.loss_of(model, photo_inputs(world.rank))
            out.append("")
        except RuntimeError as error:
            out.append(str(error))
        same = torch.equal(state, torch.get_rng_state())
        model.tower.block.linear1 = nn.Sequential(model.tower.block.linear1, nn.Dropout(0.1))
    return out, same


def test_dropout_that_is_added_later_is_refused(ranks):
    for (first, second), same in ranks["adapted"]:
        assert first == "" and same
        assert "tower.block.linear1.1 has dropout 0.1" in second


def unjoined(world) -> str:
    """A rank without media whose forward does not call the module named in join."""
    model = Broken("no embedding", world.rank).double()
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))],
                     join="embed")
    try:
        model(**photo_inputs(world.rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_join_that_is_not_called_is_named(ranks):
    assert "did not call its embedding" in ranks["unjoined"][1]


@pytest.fixture(scope="module")
def ranks() -> dict[str, list]:
    return each_in_one_world(
        2, (each_kind, every_way, misused, without_effect, sharing, adapted, unjoined))


def sharded_and_raising(world) -> None:
    torch.manual_seed(0)
    model = Broken("encoder raises", world.rank).double()
    balance_encoders(model, [Encoder("photo", {"encode": Rows("photos")}, towers=("tower",))],
                     join="embed")
    fully_shard(model.tower.block)
    fully_shard(model.layers[0])
    fully_shard(model)(**photo_inputs(world.rank))


@pytest.mark.slow
def test_an_error_amid_collectives_ends_all_ranks():
    """The others wait inside FSDP2's gathers; the end of the rank that failed ends theirs."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(sharded_and_raising, 2, timeout_s=200.0)
    assert set(failure.value.errors) == {0, 1}
    assert failure.value.errors[1][0] == "KeyError"
    assert "the user's bug" in failure.value.errors[1][2]


class Normed(nn.Module):
    """A frozen tower with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head, self.embed = nn.Linear(8, 4), nn.Embedding(4, 4)

    def forward(self, ids, photos):
        return self.embed(ids).sum() + self.head(self.tower(photos)).square().sum()


def normed(world, kept: bool) -> tuple[float, str]:
    """kept: the loop leaves the normalisation in eval mode."""
    torch.manual_seed(0)
    model = Normed().double().eval()
    inputs = torch.zeros(1, dtype=torch.int64), torch.randn(2 + 4 * world.rank, 8).double()
    want = mean_gradients(model, lambda m: [m(*inputs)])
    balance_encoders(model, [Encoder("photo", {"tower": Rows("photos")})], join="embed")
    model.train()
    if kept:
        model.tower[1].eval()
    try:
        return worst(mean_gradients(model, lambda m: [m(*inputs)]), want), ""
    except RemoteError as error:
        return 1.0, str(error)


def test_a_batch_norm_that_train_mode_switches_on_is_refused():
    assert all(difference < EXACT for difference, _ in run_ranks(normed, 2, True))
    for _, text in run_ranks(normed, 2, False):
        assert "tower.1 is a BatchNorm1d" in text and "put it in eval mode after" in text
