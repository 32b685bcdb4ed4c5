"""What a loop needs of a batch is on the loader, whatever the loop does to the batch."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from orchmllm import StepInfo, balance
from orchmllm.comm.agree import RemoteError
from tests.lib.commands import ROOT
from tests.lib.dropin import VOCAB, Stream, Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
LENGTHS = [length_of(i) for i in range(48)]


def moved(world) -> None:
    """The user's batch is passed on as collate_fn made it; the loader has the facts."""
    made: list = []

    def make(examples: list) -> dict:
        made.append(collate(examples))
        return made[-1]

    loader = loader_of(Texts(), 4, collate_fn=make, lengths=LENGTHS)
    with pytest.raises(RuntimeError, match="no batch was yielded yet"):
        loader.scale_sum(torch.ones(()))
    for at, batch in enumerate(loader):
        assert batch is made[at] and type(batch) is dict and not hasattr(batch, "__dict__")
        step, total = loader.step, (batch["labels"] != -100).sum()
        batch = {k: v.to("cpu") for k, v in batch.items()}
        assert isinstance(step, StepInfo) and (step.step, step.epoch) == (at, 0)
        assert step.example_ids == batch["ids"].tolist() and step.num_examples == len(batch["ids"])
        assert step.is_last_microbatch and step.imbalance[1] <= step.imbalance[0]
        assert step.local_targets[0] == int(total)
        torch.distributed.all_reduce(total)
        assert step.num_global_targets == int(total)
        one, factor = torch.tensor(3.0, dtype=torch.float64), 3.0 / int(total)
        assert float(loader.scale_sum(one)) == pytest.approx(factor * world.world_size)
        assert float(loader.scale_sum(one, gradients="sum")) == pytest.approx(factor)
        assert float(loader.scale_sum(one, num_ranks=6)) == pytest.approx(6 * factor)
        with pytest.raises(ValueError, match="accumulation_steps=2"):
            loader.scale_sum(one, divided_by=2)
    assert at == 5


def test_the_batch_is_untouched_and_the_facts_are_there():
    run_ranks(moved, 2)


@dataclass(frozen=True)
class Frozen:
    labels: torch.Tensor


class Named(NamedTuple):
    labels: torch.Tensor


def transformers_batch(examples: list):
    from transformers import BatchEncoding

    return BatchEncoding(collate(examples))


def several_classes(world) -> list[list]:
    """Also a filler of each: 9 examples, a step of 8 and one that leaves a rank without."""
    out = []
    for make in (transformers_batch, lambda e: Frozen(collate(e)["labels"]),
                 lambda e: Named(collate(e)["labels"])):
        loader = loader_of(Texts(9), 4, collate_fn=make, lengths=LENGTHS[:9])
        for batch in loader:
            labels = batch["labels"] if hasattr(batch, "keys") else batch.labels
            assert loader.step.local_targets[0] == int((labels != -100).sum())
        out.append([type(batch).__name__, loader.step.num_examples, loader.step.local_targets[0]])
    return out


def test_any_class_of_batch_and_its_filler():
    ranks = run_ranks(several_classes, 2)
    for kind, name in enumerate(("BatchEncoding", "Frozen", "Named")):
        assert [r[kind][0] for r in ranks] == [name] * 2
        assert sorted(r[kind][1] for r in ranks) == [0, 1]
        assert [r[kind] for r in ranks if not r[kind][1]][0][2] == 0


def all_labelled(examples: list[dict]) -> dict:
    """Also the first label of each row, which is none for a model that shifts them."""
    return collate([{**e, "labels": e["input_ids"]} for e in examples])


class OneLong(Texts):
    """26 examples, of which one is nine in one."""

    def __getitem__(self, i: int) -> dict:
        if i != 7:
            return super().__getitem__(i)
        parts = [super(OneLong, self).__getitem__(k) for k in range(7, 16)]
        return {"id": i, **{name: torch.cat([part[name] for part in parts])
                            for name in ("input_ids", "labels")}}


LONG = OneLong(26)
LONG_LENGTHS = [len(LONG[i]["labels"]) for i in range(26)]
LOSSES = ("sum", "mean as sampled", "mean", "mean, auto", "shifted", "mean of examples")


def gradients(world, mesh: tuple[int, ...]) -> dict[str, tuple[list[np.ndarray], list[int]]]:
    """By the kind of loss: (gradient of each step of an epoch under FSDP2, examples of each batch).
    Steps of 24 examples, so that ranks have fillers in the last one. No rank has more tokens in a
    batch than the longest example, or 1.1 times an even share, but as it was sampled."""
    names = ("dp_replicate", "dp_shard")[-len(mesh):]
    mesh, out = init_device_mesh("cpu", mesh, mesh_dim_names=names), {}
    most = max(*LONG_LENGTHS, int(1.1 * sum(LONG_LENGTHS[:24]) / (2 * world.world_size)))
    for how in LOSSES:
        torch.manual_seed(0)
        model = fully_shard(model_of(), mesh=mesh)
        loader = loader_of(
            LONG, (24 if "auto" in how else 12) // world.world_size, collate_fn=all_labelled,
            lengths=LONG_LENGTHS, accumulation_steps="auto" if "auto" in how else 2,
            enabled=how != "mean as sampled", max_tokens=most, group=mesh,
            num_targets=(lambda batch: len(batch["ids"])) if how == "mean of examples" else None)
        found, counts = [], []
        for batch in loader:
            loss = loss_of(model, batch, how)
            loss = (loader.scale_sum(loss) if how == "sum" else loader.scale_mean(
                loss, batch["labels"], shifted=how == "shifted"))
            assert torch.isfinite(loss)  # also of a filler, whose mean is one of nothing
            loss.backward()
            counts.append(loader.step.num_examples)
            held = sum(LONG_LENGTHS[i] for i in loader.step.example_ids)
            assert held <= most or not loader.enabled
            if loader.step.is_last_microbatch:
                found.append(flat_gradient(model))
                model.zero_grad()
        out[how] = found, counts
    return out


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB)).double()


def loss_of(model: nn.Module, batch: dict, how: str) -> torch.Tensor:
    logits, labels = model(batch["input_ids"]), batch["labels"]
    if how == "shifted":
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    if how == "mean of examples":
        return (losses.sum(1) / (labels != -100).sum(1)).mean()
    return losses.sum() if how == "sum" else losses.sum() / (labels != -100).sum()


def flat_gradient(model: nn.Module) -> np.ndarray:
    whole = (getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters())
    return torch.cat([g.flatten() for g in whole]).numpy()


@pytest.mark.parametrize("mesh", [(3,), *(pytest.param(mesh, marks=pytest.mark.slow)
                                          for mesh in ((1,), (2,), (4,), (2, 2)))], ids=str)
def test_unequal_microbatches_give_the_gradient_of_one_process(mesh):
    """scale_sum and scale_mean, as sampled and planned under a cap of tokens, of a model that
    shifts its labels and of a mean over examples: one mean over all examples of a step."""
    model, ranks = model_of(), run_ranks(gradients, math.prod(mesh), mesh)
    for how in LOSSES:
        for step, first in enumerate((0, 24)):
            batch = all_labelled([LONG[i] for i in range(first, min(first + 24, 26))])
            loss_of(model, batch, "mean" if how == "sum" else how).backward()
            want = flat_gradient(model)
            model.zero_grad()
            for found, _ in (rank[how] for rank in ranks):
                np.testing.assert_allclose(found[step], want, rtol=0, atol=1e-15, err_msg=how)
        if how == "mean, auto":
            continue
        counts = np.array([rank[how][1] for rank in ranks])
        assert (counts[:, 2:] == 0).sum() == counts[:, 2:].size - 2 or math.prod(mesh) == 1
        assert how == "mean as sampled" or len({*counts[:, :2].sum(0)}) == 2  # in two microbatches


def watched(world) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("orchmllm.loader").addHandler(handler)

    def run(use, **how) -> list[str]:
        lines.clear()
        loader = loader_of(Texts(), 2, lengths=LENGTHS, **{
            "collate_fn": collate, "enabled": False, **how})
        for batch in loader:
            use(loader, batch)
        return [*lines]

    def pairs(rows: list) -> tuple:
        batch = collate(rows)
        return batch["input_ids"], batch["labels"]

    def renamed(rows: list) -> dict:
        batch = collate(rows)
        return {"input_ids": batch["input_ids"], "target": batch["labels"]}

    one = torch.ones(())
    out = [
        run(lambda loader, batch: None),
        run(lambda loader, batch: loader.scale_mean(one, batch["labels"], shifted=False)),
        run(lambda loader, batch: loader.step.num_global_targets),
        run(lambda loader, batch: None, check_loss=False)]
    with torch.no_grad():
        out.append(run(lambda loader, batch: None))
    for collated in (pairs, renamed):  # of which nobody knows the targets
        how = {"collate_fn": collated, "enabled": True}
        seen: list[int] = []
        told = run(lambda loader, batch, seen=seen: seen.append(
            sum("nothing checks" in line for line in lines)), **how)
        out.append([line for line in told if "nothing checks" in line] + [str(seen[2])])
        told = run(lambda loader, batch: loader.scale_mean(one, shifted=False),
                   num_targets=lambda batch: 5, **how)
        out.append([line for line in told if "loss" in line])
    data = Texts()
    lines.clear()
    loader_of(data, 4, sampler=torch.utils.data.SequentialSampler(data), lengths=LENGTHS)
    return [*out, [*lines]]


def test_what_is_warned_about():
    ranks = run_ranks(watched, 2)
    unscaled, *fine, evaluating, tuples, told, keys, also_told, sampler = ranks[0]
    assert len(unscaled) == 1 and "loader.scale_mean(loss, batch[\"labels\"]" in unscaled[0]
    assert fine == [[], [], []] and evaluating == []
    for (line, before_the_third), silent in ((tuples, told), (keys, also_told)):
        assert line.startswith("nothing checks how the loss is scaled") and silent == []
        assert before_the_third == "1"
    assert "DistributedSampler" in sampler[0]
    assert all(found in ([], ["0"]) for found in ranks[1][:-1])


def iterated(world) -> None:
    loader = loader_of(Texts(), 4, collate_fn=collate, lengths=LENGTHS, shuffle=True)
    peeked = next(iter(loader))["ids"].tolist()
    assert loader.epoch == 0
    first = [batch["ids"].tolist() for batch in loader]
    assert first[0] == peeked and len(first) == 6 and loader.epoch == 1
    assert loader.state_dict()["epoch"] == 1 and loader.state_dict()["step"] == 0
    with pytest.raises(RuntimeError, match="a second iterator"):
        for _ in zip(loader, loader, strict=True):
            pass
    with pytest.raises(RuntimeError, match="a second iterator"):
        for _ in loader:
            for _ in loader:
                pass
    loader.set_epoch(0)
    assert [batch["ids"].tolist() for batch in loader] == first  # and it goes on
    for k, _ in enumerate(loader):  # more than a look: the next epoch comes next
        if k == 1:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["step"], loader.epoch) == (1, 2, 2)
    loader.load_state_dict(state)
    loader.set_epoch(1)
    next(iter(loader))
    with pytest.raises(ValueError, match="step 2 of epoch 1"):
        loader.set_epoch(3)
    assert len(list(loader)) == 4
    loader.load_state_dict({**state, "step": 5})
    last = next(iter(loader))["ids"].tolist()  # no look: a loop that counts asks for no more
    loader.set_epoch(2)
    assert last not in (whole := [batch["ids"].tolist() for batch in loader]) and len(whole) == 6
    loader.load_state_dict({**state, "step": 6})
    loader.set_epoch(2)  # as trainers say after an epoch's last step
    assert len(list(loader)) == 6
    loader = loader_of(Texts(), 4, collate_fn=collate, length_fn=token_count, num_workers=1)
    for k, _ in enumerate(loader):  # torch draws more ahead
        if k == 1:
            break
    seen = [i for _ in loader for i in loader.step.example_ids]
    everywhere = [None] * world.world_size
    torch.distributed.all_gather_object(everywhere, seen)
    assert sorted(sum(everywhere, [])) == list(range(48))


def test_iterators_are_one_at_a_time_and_a_look_is_free():
    run_ranks(iterated, 2)


def as_a_dataloader(world) -> None:
    data = Texts(50)
    loader = loader_of(data, 4, collate_fn=collate, lengths=length_of, num_workers=1,
                       drop_last=True)
    assert isinstance(loader, DataLoader) and loader.dataset is data and loader.batch_size == 4
    assert (loader.num_workers, loader.drop_last, loader.collate_fn) == (1, True, collate)
    assert isinstance(loader.sampler, DistributedSampler) and len(loader.sampler) == 24
    with pytest.raises(RuntimeError, match="balance_trainer"):
        next(iter(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler,
                             collate_fn=loader.collate_fn)))
    stream = loader_of(Stream(0, 8), 4, collate_fn=collate, length_fn=token_count)
    with pytest.raises(RuntimeError, match="balance_trainer"):
        next(iter(DataLoader(stream.dataset, stream.batch_size, collate_fn=stream.collate_fn)))
    users = DistributedSampler(data)
    loader = loader_of(data, 4, sampler=users, collate_fn=collate, lengths=length_of)
    loader.sampler.set_epoch(3)
    assert users.epoch == 3
    wrapped = balance(DataLoader(data, 4, shuffle=True, collate_fn=collate), lengths=length_of,
                      policy="padded")
    seen = [i for _ in wrapped for i in wrapped.step.example_ids]
    everywhere = [None] * world.world_size
    torch.distributed.all_gather_object(everywhere, seen)
    assert sorted(sum(everywhere, [])) == list(range(50))  # not once for each rank
    with pytest.raises(ValueError, match="already"):
        balance(wrapped, lengths=length_of)
    with pytest.raises(TypeError, match="not a Texts"):
        balance(data, lengths=length_of)


def test_it_is_a_dataloader_that_nobody_can_rebuild():
    run_ranks(as_a_dataloader, 2)


def unlabelled(examples: list) -> dict:
    return {"ids": collate(examples)["ids"]}


def raised(world) -> list[str]:
    """9 examples on two ranks: a step of 8 and one with a filler."""
    both = dict(lengths=LENGTHS[:9])
    out = []
    for data, how in (
            (Texts(9), dict(collate_fn=lambda e: None, **both)),
            (Texts(9), dict(collate_fn=unlabelled, **both)),
            (Texts(9), dict(collate_fn=unlabelled, num_targets=lambda b: 5, **both))):
        seen = 0
        try:
            loader = loader_of(data, 4, **how)
            for _ in loader:
                seen += 1
                scaled = float(loader.scale_sum(torch.ones(()))) if "num_targets" in how else 0
            out.append(f"{loader.step.num_examples} {scaled}")
        except (RemoteError, ValueError) as error:
            out.append(f"{seen} batches: {error}")
    return out


def test_fillers_work_or_are_refused_before_the_first_batch():
    ranks = run_ranks(raised, 2)
    nothing, unlabelled, _ = ranks[0]
    assert nothing.startswith("0 batches") and "collate_fn returned None" in nothing
    assert unlabelled.startswith("0 batches") and "num_targets=" in unlabelled
    assert [float(r[2].split()[1]) for r in sorted(ranks, key=lambda r: r[2])] == pytest.approx(
        [0.0, 2 / 5])  # 2 ranks, 5 targets
    assert [r[:2] for r in ranks[1:]] == [ranks[0][:2]]


def drop_in_block() -> tuple[str, set[str]]:
    """(the code of the README's drop-in block, the names that it says the user has)."""
    section = (ROOT / "README.md").read_text().split("## In your own training loop")[1]
    code, after = re.match(r".*?```python\n(.*?)```\n(.*?)\n\n##", section, re.S).groups()
    named = re.match(r"\s*You already have (.*?)\.\sNo", after, re.S)[1]
    return code, set(re.findall(r"`(\w+)`", named.replace(
        "(the number of tokens of each example)", "")))


class Output(NamedTuple):
    loss: torch.Tensor


class Model(nn.Module):
    """As transformers' models are called and shift their labels; in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).double()

    def forward(self, input_ids, labels, ids) -> Output:
        logits = self.layers(input_ids)[:, :-1].flatten(0, 1)
        return Output(nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))


def run_block(world, code: str, names: set[str]) -> dict[str, list]:
    torch.manual_seed(0)
    model = Model()
    fully_shard(model)
    users = dict(dataset=Texts(), collate=collate, lengths=LENGTHS, device=torch.device("cpu"),
                 model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    assert set(users) == names
    exec(code, users)
    return {n: p.full_tensor().flatten().tolist() for n, p in model.named_parameters()}


def test_the_readme_block_runs_as_written():
    """On 3 ranks, and on one with the same global batches: the same weights after an epoch."""
    code, names = drop_in_block()
    alone = code.replace("batch_size=4", "batch_size=12")
    assert alone != code
    ranks, [want] = run_ranks(run_block, 3, code, names), run_ranks(run_block, 1, alone, names)
    start = run_ranks(run_block, 1, "", names)[0]
    for name, value in want.items():
        assert value != start[name]
        assert all(got[name] == pytest.approx(value, abs=1e-12) for got in ranks)
