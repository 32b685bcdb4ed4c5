"""What a loop needs of a batch is on the loader, whatever the loop does to the batch."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from orchmllm import BalancedDataLoader, StepInfo, scale_loss
from tests.lib.commands import ROOT
from tests.lib.dropin import VOCAB, Texts, collate, length_of
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
LENGTHS = [length_of(i) for i in range(48)]


def prepare_input(batch: dict) -> dict:
    """As transformers' Trainer moves a batch."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, use_cpu=True, report_to=[])
        return Trainer(model=nn.Linear(1, 1), args=args)._prepare_input(batch)


def send_to_device(batch: dict) -> dict:
    from accelerate.utils import send_to_device

    return send_to_device(batch, torch.device("cpu"))


MOVES: list[Callable[[dict], dict]] = [
    lambda b: {k: v.to("cpu") for k, v in b.items()}, dict, lambda b: b.copy(), copy.copy,
    lambda b: b | {"more": 1}, lambda b: pickle.loads(pickle.dumps(dict(b))),
    send_to_device, prepare_input,
]


def moved(world) -> list[str]:
    loader = BalancedDataLoader(Texts(), 4, collate_fn=collate, lengths=LENGTHS)
    texts = []
    try:
        loader.scale_sum(torch.ones(()))
    except RuntimeError as e:
        texts.append(str(e))
    for at, (move, batch) in enumerate(zip(MOVES[:6], loader, strict=True)):
        batch, step = move(batch), loader.step
        labels = torch.tensor(int((batch["labels"] != -100).sum()))
        ids = batch["ids"].tolist()
        assert isinstance(step, StepInfo) and (step.step, step.epoch) == (at, 0)
        assert step.example_ids == ids and step.num_examples == len(ids)
        assert step.is_last_microbatch and step.imbalance["llm"][1] <= step.imbalance["llm"][0]
        total = labels.clone()
        torch.distributed.all_reduce(total)
        assert step.num_global_targets == int(total)
        one = torch.tensor(3.0, dtype=torch.float64)
        factor = 3.0 / int(total)
        assert float(loader.scale_sum(one)) == pytest.approx(factor * world.world_size)
        assert float(loader.scale_sum(one, gradients="sum")) == pytest.approx(factor)
        assert float(loader.scale_sum(one, num_ranks=6)) == pytest.approx(factor * 6)
    for move in (MOVES[0], *MOVES[6:]):
        move = move if world.rank == 0 else MOVES[0]  # libraries take seconds to import
        for batch in loader:
            targets = batch.num_global_targets
            try:
                scale_loss(torch.ones(()), move(batch))
            except TypeError as e:
                texts.append(str(e))
            assert loader.step.num_global_targets == targets
            break
    return texts


def test_facts_are_there_for_a_moved_batch():
    for texts in run_ranks(moved, 2):
        first, *others = texts
        assert "no batch was yielded yet" in first
        assert others and all("loader.scale_sum" in text for text in others)


@dataclass(frozen=True)
class Frozen:
    labels: torch.Tensor


@dataclass(slots=True)
class Slotted:
    labels: torch.Tensor


def transformers_batch(examples: list):
    from transformers import BatchEncoding

    return BatchEncoding(collate(examples))


CLASSES: list[Callable] = [
    transformers_batch, lambda e: OrderedDict(collate(e)), lambda e: UserDict(collate(e)),
    lambda e: Frozen(collate(e)["labels"]), lambda e: Slotted(collate(e)["labels"])]


def classes_as_they_are(world) -> list[str]:
    names = []
    for make in CLASSES:
        loader = BalancedDataLoader(Texts(), 24, collate_fn=make, lengths=LENGTHS)
        for batch in loader:
            labels = batch["labels"] if hasattr(batch, "keys") else batch.labels
            assert loader.step.num_global_targets == int((labels != -100).sum())
        names.append(f"{type(batch).__module__}.{type(batch).__name__}")
    return names


def test_facts_are_there_for_a_batch_whose_class_cannot_carry_them():
    """transformers' collators return a BatchEncoding."""
    (names,) = run_ranks(classes_as_they_are, 1)
    assert names == ["transformers.tokenization_utils_base.BatchEncoding",
                     "collections.OrderedDict", "collections.UserDict",
                     f"{__name__}.Frozen", f"{__name__}.Slotted"]


def tensors(world) -> list[bool]:
    """A batch that is one tensor, converted."""
    loader = BalancedDataLoader(
        Texts(), 4, lengths=LENGTHS, num_targets=lambda b: int((b > 3).sum()),
        collate_fn=lambda e: collate(e)["input_ids"])
    out = []
    for batch in loader:
        targets, batch = batch.num_global_targets, batch.to(torch.float64)
        out.append(not hasattr(batch, "num_global_targets")
                   and loader.step.num_global_targets == targets)
    return out


def test_facts_are_there_for_a_converted_tensor():
    assert all(all(r) and len(r) == 6 for r in run_ranks(tensors, 2))


def microbatches(world, prefetch: int) -> list[tuple]:
    loader = BalancedDataLoader(Texts(), 2, collate_fn=collate, lengths=LENGTHS, shuffle=True,
                                accumulation_steps=3, prefetch=prefetch)
    out = []
    for batch in loader:
        facts = loader.step
        assert facts.example_ids == batch["ids"].tolist() and facts.num_microbatches == 3
        out.append((facts.step, facts.microbatch, facts.is_last_microbatch, facts.num_examples,
                    facts.num_global_targets, int((batch["labels"] != -100).sum())))
    assert loader.step is facts  # those of the last batch, after the loop
    return out


@pytest.mark.parametrize("prefetch", [0, 3])
def test_facts_are_those_of_the_microbatch_last_yielded(prefetch):
    ranks = run_ranks(microbatches, 2, prefetch)
    assert [f[:3] for f in ranks[0]] == [(s, k, k == 2) for s in range(4) for k in range(3)]
    for step in range(4):
        facts = [f for rank in ranks for f in rank[3 * step: 3 * step + 3]]
        assert {f[4] for f in facts} == {sum(f[5] for f in facts)}
        assert sum(f[3] for f in facts) == 12


def drop_in_block() -> tuple[str, set[str]]:
    """(the code of the README's drop-in block, the names that it says the user has)."""
    section = (ROOT / "README.md").read_text().split("## In your own training loop")[1]
    code, after = re.match(r".*?```python\n(.*?)```\n(.*?)\n\n##", section, re.S).groups()
    return code, set(re.findall(r"`(\w+)`", re.match(r"\s*Yours are (.*?) \(`red", after, re.S)[1]))


def sum_of_losses(model, batch: dict) -> torch.Tensor:
    assert type(batch) is dict
    return nn.functional.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def run_block(world, code: str, names: set[str]) -> dict[str, list]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)).double()
    fully_shard(model)
    users = dict(dataset=Texts(), collate=collate, lengths=LENGTHS, device=torch.device("cpu"),
                 model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                 sum_of_losses=sum_of_losses)
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
