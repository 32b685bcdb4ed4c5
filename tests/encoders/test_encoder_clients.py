"""balance_encoders as programs use it that nobody here wrote: meshes, empty tensors, precision,
models that are saved whole. Exact, or an error on all ranks."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from orchmllm import Encoder, Rows, balance_encoders
from orchmllm.comm.agree import RemoteError
from orchmllm.encoders import sharing
from tests.lib.encoder_runs import gradients, mean_gradients, mean_gradients_of, worst
from tests.lib.ranks import each_in_one_world

pytestmark = pytest.mark.dist
EXACT = 1e-13
ENCODERS = [Encoder("photo", {"tower": Rows("photos")})]


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, photos):
        deviation, mean = torch.std_mean(photos, -1, keepdim=True)
        return self.dense((photos - mean) / deviation).tanh()


class Model(nn.Module):
    """precise: its forward switches autocast off around the tower."""

    def __init__(self, precise: bool = False) -> None:
        super().__init__()
        self.tower, self.embed, self.precise = Tower(), nn.Embedding(2, 8), precise

    def forward(self, ids, photos=None):
        x = self.embed(ids).mean(1)
        if photos is None:
            return x.square().sum()
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.precise):
            return (x + self.tower(photos).square().sum(0)).square().sum()


def balanced(model: nn.Module, **options):
    return balance_encoders(model, ENCODERS, join="embed", **options)


def model_and(sizes: list[int], rank: int, **options) -> tuple[Model, dict]:
    """A model, and the batch of a rank that has sizes[rank] photos."""
    torch.manual_seed(rank)
    inputs = {"ids": torch.zeros(1, 2, dtype=torch.int64)}
    if sizes[rank]:
        inputs["photos"] = torch.randn(sizes[rank], 8).double()
    torch.manual_seed(0)
    return Model(**options).double(), inputs


def refusal(act) -> str:
    with pytest.raises((RemoteError, ValueError)) as error:
        act()
    return str(error.value)


def empties(world) -> list[float]:
    """A rank without photos holds an empty tensor of another dtype or shape."""
    out = []
    for empty in (torch.empty(0, 8), torch.empty(0), torch.empty(0, dtype=torch.int64)):
        model, inputs = model_and([6, 0], world.rank)
        want = mean_gradients(model, lambda m, given=inputs: [m(**given)])
        balanced(model)
        given = {"photos": empty} | inputs if world.rank else inputs
        out.append(worst(mean_gradients_of(model, lambda m, given=given: [m(**given)]), want))
    return out


def test_an_empty_tensor_may_have_another_dtype_and_shape(two):
    assert max(map(max, two["empties"])) < EXACT


class Logarithm(Tower):
    def forward(self, photos):
        return super().forward(photos.log())


class OfBytes(Tower):
    def forward(self, photos):
        return super().forward(photos.double())


class LogarithmOfBytes(OfBytes):
    def forward(self, photos):
        return super().forward(photos.double().log())


class Dict(Model):
    """Its media are in a dict, which a rank without media does not have."""

    def forward(self, ids, media=None):
        return super().forward(ids, None if media is None else media["photos"])


class Root(Tower):
    """Not finite for what is below 1."""

    def forward(self, photos):
        return super().forward((photos - 1).sqrt())


def alone(world) -> tuple[list[float], str]:
    """One photo in the world, and a tower that divides by the deviation of what it gets."""
    out = []
    for tower in (Tower(), OfBytes(), LogarithmOfBytes(), Logarithm()):
        _, inputs = model_and([1, 0], world.rank)
        model = made_of(Model, tower=tower)
        if "photos" in inputs:
            photos = inputs["photos"].abs() + 1
            inputs["photos"] = (photos * 50).byte() if isinstance(tower, OfBytes) else photos
        want = mean_gradients(model, lambda m, given=inputs: [m(**given)])
        balanced(model)
        out.append(worst(mean_gradients_of(model, lambda m, given=inputs: [m(**given)]), want))
    model = made_of(Model, tower=Root())
    balanced(model)
    refused = refusal(lambda: model(**inputs))
    model = made_of(Model, tower=Root())
    model.tower.requires_grad_(False)
    want = mean_gradients(model, lambda m: [m(**inputs)])
    balanced(model)
    out.append(worst(mean_gradients_of(model, lambda m: [m(**inputs)]), want))
    model, given = made_of(Dict), {"ids": inputs["ids"]}
    if "photos" in inputs:
        given["media"] = {"photos": inputs["photos"]}
    want = mean_gradients(model, lambda m: [m(**given)])
    balanced(model)
    out.append(worst(mean_gradients_of(model, lambda m: [m(**given)]), want))
    return out, refused


def test_what_a_rank_without_media_encodes_has_finite_gradients(two):
    for differences, refused in two["alone"]:
        assert max(differences) < EXACT and "the result is not finite where a rank" in refused


class Changed(Model):
    """It gives its tower what is equal to its argument, by chance or at first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(8))

    def forward(self, ids, photos=None):
        return super().forward(ids, photos * self.scale if self.how == "scaled" else
                               photos.clamp(-99, 99))


class Dummy(Model):
    """It calls its tower in each forward, as models do for FSDP without balance_encoders."""

    def forward(self, ids, photos=None):
        out = super().forward(ids, photos)
        return out if photos is not None else out + 0 * self.tower(torch.ones(1, 8).double()).sum()


def refused(world) -> dict[str, str]:
    out = {}
    model, inputs = model_and([4, 1], world.rank)
    balanced(model)
    loss = model(**inputs)
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(g.square().sum() for g in first).backward()
    given = {**inputs, "photos": inputs["photos"].requires_grad_(world.rank == 0)}
    out["gradients"] = refusal(lambda: model(**given))
    model, inputs = model_and([4, 1], world.rank)
    balance_encoders(model, [Encoder("photo", {"tower": Rows("photo")})], join="embed")
    out["another name"] = refusal(lambda: model(**inputs))
    for how in ("scaled", "clamped"):
        torch.manual_seed(0)
        model = Changed(how).double()
        balanced(model)
        out[how] = refusal(lambda model=model, given=inputs: model(**given))
    model, inputs = model_and([4, 1], world.rank)
    model.tower.dense = nn.BatchNorm1d(8, track_running_stats=False).eval()
    out["statistics"] = refusal(lambda: balanced(model))
    _, inputs = model_and([4, 0], world.rank)
    model = made_of(Dummy)
    balanced(model)
    model(inputs["ids"])  # none has media
    try:
        model(**inputs)
    except (RuntimeError, RemoteError) as error:
        out["a dummy"] = str(error).rpartition("failed: ")[2].removeprefix("RuntimeError: ")
    model, inputs = model_and([4, 1], world.rank, precise=True)
    balanced(model)
    with torch.autocast("cpu", torch.bfloat16):
        out["autocast"] = refusal(lambda: model(**inputs))
    model, inputs = model_and([4, 1], world.rank)
    balanced(model)
    with torch.autocast("cpu", torch.bfloat16):
        out["the same autocast"] = str(float(model(**inputs).detach()) > 0)
    return out


def test_what_would_differ_silently_is_refused_on_all_ranks(two):
    one, other = two["refused"]
    assert one == other and one["the same autocast"] == "True"
    assert "rank 0 failed" in one["gradients"]
    assert "the argument photos requires gradients" in one["gradients"]
    assert "called tower where autocast is off" in one["autocast"]
    assert "Model.forward has no argument 'photo', but ids, photos" in one["another name"]
    for how in ("scaled", "clamped"):
        assert "called tower with another tensor than its argument photos" in one[how]
    assert "is a BatchNorm1d, whose result depends on the other items" in one["statistics"]
    assert "called tower on 1 rows without being given media: leave" in one["a dummy"]


class InPlace(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(8, 8)

    def forward(self, ids, photos=None):
        features = self.tower(photos)
        features += 1.0
        return (self.embed(ids).mean(1) + features.relu_().sum(0)).square().sum()


class Stopped(Model):
    def forward(self, ids, photos=None):
        x = self.embed(ids).mean(1)
        return (x if photos is None else x + self.tower(photos).detach().sum(0)).square().sum()


class Tokens(nn.Module):
    """Its features are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, photos):
        return self.dense(photos).argsort(-1)


class OfTokens(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed = Tokens(), nn.Embedding(4, 8)

    def forward(self, ids, photos):
        return self.embed(self.tower(photos)).sum((0, 1)).square().sum() + self.embed(ids).sum()


class Beside(Tower):
    """how: what it keeps of all items of a call, or takes from them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, photos):
        out = super().forward(photos)
        if self.how == "centred":
            return out - out.mean(0)
        if self.how == "a loss":
            self.loss = out.square().mean()
        if self.how == "some losses":
            self.losses = [out.square().mean(-1)]
        elif self.how == "statistics":
            self.seen += out.detach().mean(0)
        return out


class Harmless(Tower):
    """It keeps what does not depend on its items, but on its parameters or on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(1))
        self.register_buffer("unknown", torch.full((3,), torch.nan))
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, photos):
        self.scale = self.logarithm.exp()
        if len(photos) > len(self.table):
            self.table = torch.arange(len(photos)).double()
        return super().forward(photos) * self.scale


class Held(Model):
    """Its tower is held by name, as towers are that a configuration picks, and is called on a view
    of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"photo": self.tower})
        del self.tower

    def forward(self, ids, photos=None):
        features = self.towers["photo"](photos[:])
        return (self.embed(ids).mean(1) + features.square().sum(0)).square().sum()


class Still(Tower):
    """What it draws and averages is switched off, and it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(8)
        self.sparse = torch.ones(2, 2).to_sparse()  # and what is kept is odd
        self.registry = {"self": self}
        self.registry["registry"] = self.registry
        self.scale = torch.ones(3).to(torch.float8_e4m3fn)

    def train(self, mode: bool = True):
        super().train(mode)
        self.drop.eval()
        self.norm.eval()
        return self

    def forward(self, photos):
        return self.norm(self.drop(super().forward(photos)))


class Second(Model):
    """Its other tower keeps statistics, of items that come in the second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Beside("statistics")

    def forward(self, ids, photos=None, others=None):
        out = super().forward(ids, photos)
        return out if others is None else out + self.other(others).square().sum()


def made_of(kind: type, **parts: nn.Module) -> Model:
    torch.manual_seed(0)
    model = kind()
    for name, part in parts.items():
        setattr(model, name, part)
    return model.double()


def exact_or_refused(world) -> tuple[list[float], dict[str, str]]:
    out, texts = [], {}
    for model in (made_of(InPlace), made_of(OfTokens), made_of(Model, tower=Harmless()),
                  made_of(Held), made_of(Model, tower=Still()).train()):
        _, inputs = model_and([4, 1], world.rank)
        want = mean_gradients(model, lambda m, given=inputs: [m(**given)])
        call = "towers.photo" if isinstance(model, Held) else "tower"
        handle = balance_encoders(model, [Encoder("photo", {call: Rows("photos")})], join="embed")
        out.append(worst(mean_gradients_of(model, lambda m, given=inputs: [m(**given)]), want)
                   + (not handle.last["photo"].moved))
    _, inputs = model_and([4, 0], world.rank)
    model = made_of(Stopped)
    balanced(model)
    texts["stopped"] = refusal(lambda: model(**inputs))
    for how in ("centred", "a loss", "some losses", "statistics"):
        _, inputs = model_and([1, 1], world.rank)
        model = made_of(Model, tower=Beside(how))
        balanced(model)
        texts[how] = refusal(lambda model=model, given=inputs: model(**given))
    _, inputs = model_and([1, 1], world.rank)
    model = made_of(Second)
    balance_encoders(model, [*ENCODERS, Encoder("other", {"other": Rows("others")})], join="embed")
    model(**inputs).backward()
    texts["second"] = refusal(lambda: model(**inputs, others=inputs["photos"]))
    texts["wrapped"] = refusal(lambda: balanced(DistributedDataParallel(made_of(Model))))
    return out, texts


def test_towers_and_forwards_of_others_are_exact_or_refused(two):
    for differences, texts in two["exact_or_refused"]:
        assert max(differences) < EXACT
        assert "Stopped.forward stops the gradient of its features" in texts["stopped"]
        assert "with another beside it" in texts["centred"]
        assert "tower keeps a value with a gradient, loss," in texts["a loss"]
        assert "tower keeps a value with a gradient, losses[0]," in texts["some losses"]
        assert "the buffer tower.seen is computed of the items" in texts["statistics"]
        assert "the buffer other.seen is computed of the items" in texts["second"]
        assert "DistributedDataParallel has no 'tower'" in texts["wrapped"]


class Interrupted(Model):
    def forward(self, ids, photos=None):
        out = super().forward(ids, photos)
        if self.training and self.precise:
            raise KeyboardInterrupt
        return out


def interrupted(world) -> bool:
    """An evaluation after Ctrl-C within a forward gets the features of its own media."""
    _, inputs = model_and([2, 2], world.rank)
    model = made_of(Interrupted)
    balanced(model)
    model(**inputs).backward()
    model.precise = True
    with pytest.raises(KeyboardInterrupt):
        model(**inputs)
    other = {**inputs, "photos": inputs["photos"] + torch.arange(8)}
    with torch.no_grad():
        return bool(model.eval()(**other) == copy.deepcopy(model)(**other)
                    == Model.forward(made_of(Interrupted).eval(), **other))


def test_an_evaluation_after_an_interrupted_forward_is_right(two):
    assert two["interrupted"] == [True, True]


class Late(Tower):
    """wait_s: until it raises, or until it does not."""

    wait_s, raises = 0.0, False

    def forward(self, photos):
        if torch.is_grad_enabled() and self.wait_s:
            time.sleep(self.wait_s)
        if torch.is_grad_enabled() and self.raises:
            raise KeyError("the user's bug in ファイル一覧.png")
        return super().forward(photos)


def late(world) -> list[str]:
    """A rank fails, and another one takes longer than its patience with encoders that wait for each
    other; all raise, skip the batch and go on."""
    _, inputs = model_and([2, 2], world.rank)
    model, out = made_of(Model, tower=Late()), []
    balanced(model)
    patience, sharing.PATIENCE_S = sharing.PATIENCE_S, 0.2
    for wait_s, raises in ((0.0, False), (1.0 * world.rank, not world.rank), (0.0, False)):
        model.tower.wait_s, model.tower.raises = wait_s, raises
        try:
            model(**inputs).backward()
            out.append("fine")
        except RemoteError as error:
            out.append(str(error))
    sharing.PATIENCE_S = patience
    return out


def test_a_rank_that_fails_waits_for_one_that_is_slower_than_its_patience(two):
    for first, failed, last in two["late"]:
        assert first == last == "fine" and "rank 0 failed: KeyError" in failed
        assert "ファイル一覧.png" in failed


def saved_whole(world) -> tuple[float, bool]:
    """A model that is pickled is loaded without balancing, and can be balanced again."""
    model, inputs = model_and([4, 1], world.rank)
    want = mean_gradients(model, lambda m: [m(**inputs)])
    handle = balanced(model)
    loaded = pickle.loads(pickle.dumps(model))
    unbalanced = worst(mean_gradients(loaded, lambda m: [m(**inputs)]), want)
    untouched = handle.last == {}
    handle = balanced(loaded)
    again = worst(mean_gradients_of(loaded, lambda m: [m(**inputs)]), want)
    return max(unbalanced, again), untouched and handle.last["photo"].moved > 0


def test_a_model_that_was_saved_whole_is_loaded_unbalanced(two):
    for difference, as_expected in two["saved_whole"]:
        assert difference < EXACT and as_expected


def data_and_tensor_parallel(world) -> tuple[float, int, str, str]:
    """2 x 2 ranks, of which two each have the same batch and a tower that is not theirs alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    out = []
    for group in (mesh["dp"], None):
        model, inputs = model_and([4, 1], mesh["dp"].get_local_rank())
        want = mean_gradients(model, lambda m, given=inputs: [m(**given)])
        handle = balanced(model, group=group)
        if group is not None:  # else the root's unit has the tower's parameters
            fully_shard(model.tower, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        if group is None:
            out.append(refusal(lambda m=model, given=inputs: m(**given)))
            continue
        model(**inputs).backward()
        out += [worst(gradients(model), want), handle.last["photo"].num_items]
    return *out, refusal(lambda: balanced(model_and([1] * 4, world.rank)[0], group=mesh))


def frozen_in_nodes(world) -> tuple[float, int]:
    """A tower that does not learn, and is sharded by fewer ranks than share its media."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model, inputs = model_and([4, 1, 0, 2], world.rank)
    model.tower.requires_grad_(False)
    want = mean_gradients(model, lambda m: [m(**inputs)])
    handle = balanced(model)
    fully_shard(model.tower, mesh=mesh["local"])
    fully_shard(model)
    model(**inputs).backward()
    del want["tower.dense.weight"], want["tower.dense.bias"]
    return worst(gradients(model), want), handle.last["photo"].num_items


def hybrid(world) -> tuple[float, list[str]]:
    """2 x 2 ranks, of which two shard the tower and all reduce its gradients: all share media, or
    each two do, and all have some."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    differences, texts = [], []
    pairs = dist.new_subgroups(2)[0]
    for group, sizes in ((None, [5, 1, 0, 0]), (mesh["shard"], [5, 1, 0, 3]),
                         (mesh["shard"], [5, 1, 0, 0]), (pairs, [0, 0, 4, 1])):
        model, inputs = model_and(sizes, world.rank)
        want = mean_gradients(model, lambda m, given=inputs: [m(**given)])
        balanced(model, group=group)
        fully_shard(model.tower, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if group is not None and 3 not in sizes:
            texts.append(refusal(lambda m=model, given=inputs: m(**given)))
            continue
        model(**inputs).backward()
        differences.append(worst(gradients(model), want))
        model(ids=inputs["ids"]).backward()  # no group has media
    return max(differences), texts


def test_those_share_media_over_which_gradients_are_reduced(four):
    for difference, items, of_all, of_mesh in four["data_and_tensor_parallel"]:
        assert difference < EXACT and items == 5
        assert ("reduces the gradients of tower over the ranks [0, 2], but the ranks "
                "[0, 1, 2, 3] share its media: give") in of_all
        assert "group is a mesh of 2 dimensions" in of_mesh and "mesh['dp']" in of_mesh
    assert all(d < EXACT and n == 7 for d, n in four["frozen_in_nodes"])
    for difference, texts in four["hybrid"]:
        assert difference < EXACT and len(texts) == 2
        assert all("encoder 'photo' has media in some groups of ranks and none in others" in text
                   for text in texts)


@pytest.fixture(scope="module")
def two() -> dict[str, list]:
    return each_in_one_world(2, (
        empties, alone, refused, exact_or_refused, late, interrupted, saved_whole))


@pytest.fixture(scope="module")
def four() -> dict[str, list]:
    return each_in_one_world(4, (data_and_tensor_parallel, frozen_in_nodes, hybrid))
