"""Options of BalancedDataLoader: each does what it says or raises."""

from __future__ import annotations

import copy
import logging
import os
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from orchmllm import BalancedDataLoader, CostModel, check_equivalence
from orchmllm.comm.agree import RemoteError
from orchmllm.loader.callers import refusal
from orchmllm.loader.indices import batch_layout
from tests.lib.dropin import VOCAB, Stream, Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import each_in_one_world, run_ranks

pytestmark = pytest.mark.dist
LENGTHS = [length_of(i) for i in range(48)]
LENGTHS_FOR = {"load": {"lengths": LENGTHS},
               "bytes": {"lengths": None, "length_fn": token_count}}


def yielded(world, *hows: dict) -> list[list[list[int]]]:
    out = []
    for how in hows:
        loader = loader_of(Texts(), 4, shuffle=True, collate_fn=collate,
                           **{"lengths": LENGTHS, **how})
        out.append([[loader.step.num_global_targets, *loader.step.example_ids] for _ in loader])
    return out


@pytest.mark.parametrize("dispatch", [pytest.param("load", marks=pytest.mark.slow), "bytes"])
def test_shards_keep_their_examples_and_share_targets(dispatch):
    shards, plain = zip(*run_ranks(
        yielded, 4, dict(shard_size=2, **LENGTHS_FOR[dispatch]), dict(enabled=False)), strict=True)
    for rank in range(0, 4, 2):
        for got, want in zip(zip(*shards[rank: rank + 2], strict=True),
                             zip(*plain[rank: rank + 2], strict=True), strict=True):
            assert sorted(got[0][1:] + got[1][1:]) == sorted(want[0][1:] + want[1][1:])
            assert got[0][0] == got[1][0] == want[0][0]
    assert shards != plain


def test_min_gain_runs_steps_as_sampled():
    off, never, often = zip(*run_ranks(
        yielded, 2, dict(enabled=False), dict(min_gain=0.9), dict(min_gain=0.001)), strict=True)
    assert never == off != often


def logged(world) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("orchmllm.loader")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for lengths in (LENGTHS, [7] * 48):
        for _ in loader_of(Texts(), 4, collate_fn=collate, lengths=lengths,
                           log_every=3, check_loss=False):
            pass
    return lines


def test_the_log_says_when_it_does_not_pay():
    first, second = run_ranks(logged, 2)
    first = [line for line in first if "imbalance" in line]
    assert second == [] and len(first) == 4  # 6 steps, every third, twice
    assert "imbalance 1." in first[0] and "gains little" not in first[0]
    assert "gains little" in first[-1]


def refused(world, cases: list[dict]) -> list[str]:
    out = []
    for how in cases:
        data = Stream(0, 8) if how.pop("stream", False) else Texts()
        data = iter([[data[0]]]) if how.pop("lists", False) else data
        how |= {"generator": torch.Generator()} if "generator" in how else {}
        wrapped = how.pop("wrapped", False)
        given = (DataLoader(data, 2),) if wrapped else (data, how.pop("batch_size", 2))
        try:
            loader_of(*given, **{"lengths": LENGTHS, **how})
            out.append("")
        except (ValueError, TypeError) as e:
            out.append(str(e))
    return out


def test_what_cannot_be_honoured_raises():
    loaded = dict(lengths=None, length_fn=len)
    cases = [
        (dict(dispatch="load"), "no argument 'dispatch'"), (dict(lengths=None), "give either"),
        (dict(length_fn=len), "give either"), (dict(lengths=[1]), "lengths has 1 entries"),
        (dict(stream=True), "give length_fn instead"), (dict(policy="fast"), "choose one of"),
        (dict(policy="greedy", tolerance=0.1), "no tolerance"),
        (dict(policy="padded", max_tokens=9), "no such cap"), (dict(shard_size=3), "divide"),
        (dict(max_tokens=-1), "max_tokens must be an integer >= 1"),
        (dict(exchange="flat"), "no argument 'exchange'"), (dict(min_gain=2.0), "min_gain"),
        (dict(shuffle=True, generator=True), "shuffles by seed="),
        (dict(accumulation_steps=0), "must be an integer >= 1"),
        (dict(accumulation_steps="auto"), "as few batches as max_tokens allows: give max_tokens"),
        (dict(accumulation_steps="auto", max_tokens=99, shard_size=1), "another number of batches"),
        (dict(prefetch=-1), "must be >= 0"), (dict(seed=-1), "seed is -1: must be an integer"),
        (dict(seed=1.5), "seed is 1.5"), (dict(lengths=iter(LENGTHS)), "lengths is a list_ite"),
        (dict(wrapped=True, shuffle=True), "shuffle is True: the wrapped DataLoader decides"),
        (dict(wrapped=True, drop_last=True), "drop_last is True"),
        (dict(wrapped=True, num_workers=2), "num_workers is 2"),
        (dict(phases={"llm": CostModel(1, 0)}), "phases is a dict: give one CostModel"),
        (dict(phases={}), "balance_encoders"),
        (dict(stream=True, lengths=None, length_fn=len, shard_size=1), "shard_size"),
        (dict(stream=True, lengths=None, length_fn=len, shuffle=True), "shuffle"),
        (dict(in_order=False, num_workers=2), "in_order is False: a batch that a worker loaded"),
        (dict(batch_sampler=[[0]]), "mutually exclusive"),
        (dict(batch_sampler=[[0]], batch_size=1, sampler=[0]), "mutually exclusive"),
        (dict(batch_sampler=[[0]], batch_size=1, drop_last=True), "mutually exclusive"),
        (dict(batch_size=0), "batch_size"), (dict(batch_size=None), "batch_size is None: give"),
        (dict(stream=True, sampler=[0], **loaded), "expected unspecified sampler"),
        (dict(stream=True, batch_sampler=[[0]], **loaded), "unspecified batch_sampler"),
        (dict(lists=True, **loaded), "batch_size is 2: an iterable of lists of examples decides"),
        (dict(lists=True, batch_size=1, num_workers=2, **loaded), "num_workers is 2: an iterable"),
        (dict(lists=True, batch_size=1, sampler=[0], **loaded), "sampler is [0]: an iterable"),
        (dict(lists=True, drop_last=True, **loaded), ""),
        (dict(lenghts=LENGTHS), "BalancedDataLoader has no argument 'lenghts'"),
    ]
    for text, (_, want) in zip(run_ranks(refused, 2, [c for c, _ in cases])[0], cases,
                               strict=True):
        assert want in text and bool(want) == bool(text), (text, want)


def in_more_groups(world) -> int:
    """Steps of a loader; rank 0 is in one group more, whose number torch puts into names."""
    dist.new_group([0])
    return sum(1 for _ in loader_of(Texts(), 4, collate_fn=collate, lengths=LENGTHS, shard_size=2,
                                    timeout_s=300.0))


def test_ranks_in_unequally_many_groups_do_not_wait_for_each_other():
    assert run_ranks(in_more_groups, 4) == [3] * 4


def in_a_part_of_a_bound_job(world) -> int:
    """Steps of a loader that ranks 1 and 2 make alone while the default group is bound to a device:
    torch would look for the communicator of that device, to split it."""
    default, part = dist.group.WORLD, dist.new_group([1, 2])
    default.bound_device_id = bound = torch.device("cpu", 0)
    if world.rank == 0:
        return 0
    loader = loader_of(Texts(), 4, collate_fn=collate, lengths=LENGTHS, group=part)
    assert default.bound_device_id == bound
    return sum(1 for _ in loader)


def test_a_part_of_the_ranks_makes_groups_without_the_others():
    assert run_ranks(in_a_part_of_a_bound_job, 3) == [0, 6, 6]


def one_after_the_other(world, dispatch: str) -> list[int]:
    """Descriptors after each of some loaders, of which the last yields beside another one."""
    def make() -> BalancedDataLoader:
        return loader_of(Texts(), 4, collate_fn=collate, **LENGTHS_FOR[dispatch])

    held, kept = [], None
    for k in range(8):
        loader = make()
        if world.rank == 0 and k == 2:
            kept = loader  # one rank drops this one later than the other
        yielded = []
        for _ in loader:  # not a comprehension, which is a frame of its own
            yielded.append(loader.step.example_ids)
        held.append(len(os.listdir("/proc/self/fd")))
    del kept
    beside = [loader.step.example_ids + other.step.example_ids
              for other in [make()] for _ in zip(loader, other, strict=True)]
    assert beside == [ids + ids for ids in yielded]
    return held


@pytest.mark.parametrize("dispatch", [pytest.param("load", marks=pytest.mark.slow), "bytes"])
def test_a_loader_takes_the_groups_of_one_that_is_no_more(dispatch):
    for held in run_ranks(one_after_the_other, 2, dispatch):
        assert held[-1] == held[-2] == held[-3], held


def kept_by_a_loop(world) -> object:
    """Of what a loop drops."""
    held = Texts()
    seen = weakref.ref(held)
    for _ in loader_of(Texts(), 4, collate_fn=collate, lengths=LENGTHS):
        held = None
    return seen()


def test_what_a_loop_drops_is_freed_while_it_goes_on(one):
    assert one["kept_by_a_loop"] == [None]


def unbatched(world) -> str:
    """A loader that yields single examples, which are dicts."""
    loader = loader_of(DataLoader(Stream(0, 4), None), length_fn=token_count)
    try:
        next(iter(loader))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_wrapped_loader_of_single_examples_is_told_so(one):
    assert "yielded a dict: wrap one that yields lists of examples" in one["unbatched"][0]


def iterated_before(world) -> list[list[int]]:
    """A loader over a stream whose worker processes were started, and stay, before it is wrapped.
    """
    loader = DataLoader(Stream(0, 8), 4, num_workers=1, persistent_workers=True,
                        collate_fn=collate, multiprocessing_context="fork")
    for _ in loader:
        pass
    return [b["ids"].tolist() for b in loader_of(loader, length_fn=token_count)]


def test_a_wrapped_loader_may_have_been_iterated_before(one):
    assert one["iterated_before"] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


class Budget:
    """A batch sampler as people write it, without a length."""

    def __init__(self, world) -> None:
        self.first, self.epoch = 24 * world.rank, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        yield from ([self.first + i for i in range(k, k + 4)] for k in range(0, 24, 4))


class Epochs(Stream):
    """A stream with an order for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def without_a_length(world) -> None:
    users = Budget(world)
    loader = loader_of(Texts(), batch_sampler=users, collate_fn=collate,
                       lengths=LENGTHS)
    with pytest.raises(TypeError, match="has no len"):
        len(loader)
    next(iter(loader))
    assert len(list(loader)) == 6 and loader.epoch == 1
    loader.set_epoch(5)
    assert users.epoch == 5


def test_a_batch_sampler_needs_no_length(two):
    assert two["without_a_length"] == [None, None]


def epochs_of_what_is_wrapped(world) -> None:
    stream, data = Epochs(0, 8), Texts()
    sampler = DistributedSampler(data)
    for wrapped, part in ((DataLoader(stream, 4), stream),
                          (StatefulDataLoader(data, 4, sampler=sampler), sampler)):
        loader = loader_of(wrapped, length_fn=token_count)
        assert loader.batch_size == 4
        loader.set_epoch(0)
        state = loader.state_dict()
        loader.set_epoch(3)
        assert part.epoch == 3
        loader.load_state_dict(state)
        assert part.epoch == 0


def test_set_epoch_reaches_the_data_and_the_sampler_of_a_wrapped_loader(one):
    assert one["epochs_of_what_is_wrapped"] == [None]


@pytest.mark.parametrize("of", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_a_length_is_a_whole_number(of):
    layout = batch_layout(range(48), of(LENGTHS), None)
    assert layout.num_tokens.tolist() == LENGTHS
    with pytest.raises(ValueError, match="example 1 has length -2"):
        batch_layout([0, 1], of([3, -2]), None)
    with pytest.raises(TypeError, match="example 7: its length is .*balance_encoders"):
        batch_layout([7], of([0.5]), None)


def used_in_one_run(world, balanced: bool) -> str:
    """A parameter that has a gradient in one of the two runs only."""
    torch.manual_seed(0)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    loader = loader_of(Texts(), 4, collate_fn=collate, lengths=LENGTHS)

    def step(batch) -> None:
        x = torch.ones(1, 1)
        (first(x) + (second(x) if loader.enabled == balanced else 0)).sum().backward()

    try:
        check_equivalence(step, nn.ModuleList([first, second]).named_parameters, loader)
    except AssertionError as error:
        return str(error)
    return ""


def used_in_each(world) -> list[str]:
    return [used_in_one_run(world, balanced) for balanced in (True, False)]


def test_check_equivalence_finds_a_gradient_that_one_run_lacks(two):
    assert all("the gradient of 1." in told for told in two["used_in_each"][0])


def without_examples(world) -> str:
    loader = BalancedDataLoader(Texts(), batch_sampler=[[world.rank], []], collate_fn=collate,
                                lengths=LENGTHS)
    with pytest.raises(RemoteError) as told:
        list(loader)
    return str(told.value)


def test_a_step_without_an_example_on_any_rank_is_named(two):
    for told in two["without_examples"]:
        assert "step 1: " in told and "no example on any rank: leave empty batches out" in told


def of_one_length(world) -> str:
    """A loop that is wrong, over examples that stay where they are."""
    model = nn.Linear(1, 1)
    loader = loader_of(Texts(), 4, collate_fn=collate, lengths=[3] * len(LENGTHS))
    with pytest.raises(ValueError, match="nothing changed its rank") as told:
        check_equivalence(lambda batch: model(torch.ones(1, 1)).sum().backward(),
                          model.named_parameters, loader)
    return str(told.value)


def wrong_in_a_shard(world) -> tuple[str, float]:
    """FSDP1 shards what is compared, of which one parameter of one rank's shard is wrong; then one
    of them is frozen, and then all are one parameter."""
    torch.manual_seed(0)
    inner, out = Attention(), []
    for frozen, flat in ((False, False), (True, False), (True, True)):
        inner.head.requires_grad_(flat or not frozen)
        model = FullyShardedDataParallel(copy.deepcopy(inner), use_orig_params=not flat,
                                         device_id=torch.device("cpu"))
        loader = loader_of(Texts(), 8, collate_fn=first_is_learnt, lengths=LENGTHS, policy="greedy")

        def step(batch, model=model, loader=loader, frozen=frozen) -> None:
            loss = nn.functional.cross_entropy(
                model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            loader.scale_mean(loss, batch["labels"], shifted=False).backward()
            for name, p in model.named_parameters():
                if not frozen and name.endswith("embed.weight") and p.grad is not None:
                    p.grad *= 1 + 1e-2 * loader.enabled

        try:
            out.append(check_equivalence(step, model.named_parameters, loader))
        except AssertionError as error:
            out.append(str(error))
    return tuple(out)


def test_check_equivalence_judges_what_all_ranks_have(two):
    assert len(set(two["of_one_length"])) == 1
    [wrong, *right], other = two["wrong_in_a_shard"]
    assert (wrong, *right) == other and "embed.weight differs by 1.0e-02" in wrong
    assert max(right) < 1e-5


class Attention(nn.Module):
    """Without positions, so that the gradient of the keys' bias is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(nn.functional.scaled_dot_product_attention(
            self.queries(x), self.keys(x), self.values(x), is_causal=True))


def first_is_learnt(rows: list[dict]) -> dict:
    """A batch whose first token counts as a target where the loop shifts the labels itself."""
    batch = collate(rows)
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    return batch


def said(how: str, dtype: torch.dtype) -> str:
    """What check_equivalence says of a loop; "" where it passes."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Attention().to(dtype))
    bias, keys = model.module.values.bias, model.module.keys.bias
    size, steps = (4, 2) if how == "right" else (8, 1)
    # Of `auto` the steps that a worker loads ahead stay as sampled, here all, unless batches were
    # seen before.
    planned = dict(policy="greedy") if how != "a mean per rank" else dict(
        policy="auto", num_workers=1)
    loader = loader_of(Texts(), size, collate_fn=first_is_learnt, lengths=LENGTHS, shuffle=True,
                       accumulation_steps=steps, **planned)

    norms: list[torch.Tensor] = []

    def step(batch) -> None:
        logits = model(batch["input_ids"]).flatten(0, 1)
        if how == "dropout":
            logits = nn.functional.dropout(logits, 0.1)
        loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
        if how != "a mean per rank":
            loss = loader.scale_mean(loss, batch["labels"], shifted=how == "shifted")
        loss.backward()
        norms[:] = keys.grad.norm(), bias.grad.norm()
        if how == "one bias":
            bias.grad += 1e-3 * bias.grad.norm() * loader.enabled
        if how == "a nan" and loader.enabled:
            bias.grad *= float("nan")

    try:
        worst = check_equivalence(step, model.named_parameters, loader)
    except AssertionError as e:
        return str(e)
    assert worst < 1e-5 and loader.epoch == 0 and loader.enabled
    assert dtype == torch.bfloat16 or 0 < norms[0] < 1e-5 * norms[1]
    assert keys.grad is bias.grad is None  # the loop's first step begins without
    return ""


SAID = {("right", torch.float32): "", ("right", torch.bfloat16): "",
        ("a mean per rank", torch.bfloat16): "likely cause: the loss is never scaled",
        ("shifted", torch.float32): "`shifted` is the wrong way round",
        ("dropout", torch.float32): "switch off dropout",
        ("dropout", torch.bfloat16): "switch off dropout",
        ("one bias", torch.float32): "padding that no mask hides",
        ("a nan", torch.float32): "values.bias"}


def all_said(world) -> list[str]:
    return [said(*case) for case in SAID]


def test_check_equivalence_tells_an_error_from_rounding_and_from_dropout(two):
    for texts in two["all_said"]:
        for case, text in zip(SAID, texts, strict=True):
            assert SAID[case] in text and bool(text) == bool(SAID[case]), (case, text)


@pytest.fixture(scope="module")
def one() -> dict[str, list]:
    return each_in_one_world(1, (kept_by_a_loop, unbatched, iterated_before,
                                 epochs_of_what_is_wrapped))


@pytest.fixture(scope="module")
def two() -> dict[str, list]:
    return each_in_one_world(2, (without_a_length, used_in_each, without_examples, of_one_length,
                                 wrong_in_a_shard, all_said))


def test_lightning_has_to_train_by_as_many_batches_as_a_step_has():
    """In a frame of its loop, whose other parts the tests of other loops run."""
    space = {"__name__": "lightning.pytorch.loops", "refusal": refusal, "sys": sys}
    exec("def run(self, loader):\n    return refusal(sys._getframe(), loader)", space)
    for planned, trained, automatic in ((2, 2, True), (2, 3, False), (3, 2, True), (2, 3, True)):
        trainer = SimpleNamespace(
            accumulate_grad_batches=trained, training=True,
            lightning_module=SimpleNamespace(automatic_optimization=automatic))
        loader = type("Sized", (), {"__len__": lambda self: 1, "accumulation_steps": planned})()
        said = space["run"](SimpleNamespace(trainer=trainer), loader)
        assert (said is not None) == (automatic and planned != trained), (planned, trained)
