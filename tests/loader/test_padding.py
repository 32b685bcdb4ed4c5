"""Batches that collate pads: what a plan, its log line and its advice say of them is what a count
of padded tokens says."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchmllm import BalancedDataLoader, CostModel, balance_trainer
from tests.lib.clients import as_torchrun, forget_accelerate, tiny
from tests.lib.dropin import Texts, collate, length_of
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
SIZE = 96
LENGTHS = [length_of(i) for i in range(SIZE)]
LINE = re.compile(r"imbalance ([\d.]+)->([\d.]+); predicted gain (-?[\d.]+)%")


def messages() -> list[str]:
    """Grows by what the loader's logger says from now on."""
    lines: list[str] = []
    log, handler = logging.getLogger("orchmllm.loader"), logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lines


def by_rank(sizes: list[int]) -> torch.Tensor:
    """(ranks, steps) of what each rank counted."""
    out = [torch.zeros(len(sizes), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor(sizes))
    return torch.stack(out)


def counted(world, how: dict) -> tuple[list, list, list[str]]:
    """Entries of the batches by rank and step, as sampled and as planned; what the log says."""
    sizes, lines = [], messages()
    for enabled in (False, True):
        del lines[:]
        loader = BalancedDataLoader(Texts(SIZE), 4, shuffle=True, collate_fn=collate, log_every=1,
                                    lengths=LENGTHS, enabled=enabled, check_loss=False, **how)
        sizes.append(by_rank([batch["input_ids"].numel() for batch in loader]).tolist())
    return *sizes, lines


def test_a_padded_plan_is_measured_in_padded_tokens():
    before, after, lines = run_ranks(counted, 4, dict(policy="padded"))[0]
    off, on = np.array(before), np.array(after)
    said = [[float(x) for x in LINE.search(line).groups()] for line in lines]
    assert len(said) == off.shape[1] and on.max(0).sum() < 0.8 * off.max(0).sum()
    for t, (sampled, planned, gain) in enumerate(said):
        assert sampled == pytest.approx(off[:, t].max() / off[:, t].mean(), abs=0.0051)
        assert planned == pytest.approx(on[:, t].max() / on[:, t].mean(), abs=0.0051)
        assert gain == pytest.approx(100 * (1 - on[:, t].max() / off[:, t].max()), abs=0.051)
    skipping = run_ranks(counted, 4, dict(policy="padded", min_gain=0.02))[0]
    assert skipping[1] == after  # what is worth it is not skipped


def refused(world) -> str:
    with pytest.raises(ValueError) as error:
        BalancedDataLoader(Texts(), 4, lengths=LENGTHS[:48], phases=CostModel(0, 0))
    return str(error.value)


def test_a_small_cost_balances_as_a_large_one():
    """CostModel(1, 0) is the length; in whole kFLOP it would be 0 for every item."""
    assert "is 0 for every item" in run_ranks(refused, 1)[0]
    def said(phases: CostModel) -> tuple[list, list[tuple]]:
        _, planned, lines = run_ranks(counted, 2, dict(policy="greedy", phases=phases))[0]
        return planned, [LINE.search(line).groups() for line in lines]

    assert said(CostModel(1, 0)) == said(CostModel(1000, 0)) != said(CostModel(0, 1))
    assert max(float(before) for before, *_ in said(CostModel(0, 1))[1]) > 1.1


def watched(world, lengths: list[int], **how) -> tuple[int, str, list[str]]:
    """(steps, the error, what is said of padding) of a loader whose collate pads."""
    class Data(Texts):
        def __getitem__(self, i: int) -> dict:
            ids = torch.ones(lengths[i], dtype=torch.int64)
            return {"id": i, "input_ids": ids, "labels": ids}

    lines, seen, text = messages(), 0, ""
    try:
        for _ in BalancedDataLoader(Data(len(lengths)), 4, lengths=lengths, check_loss=False,
                                    **{"collate_fn": collate, **how}):
            seen += 1
    except RuntimeError as error:
        text = str(error)
    return seen, text, [line for line in lines if "collate_fn pads" in line]


def packed(examples: list[dict]) -> dict:
    return {key: torch.cat([e[key] for e in examples])[None] for key in ("input_ids", "labels")}


def all_watched(world, lengths: list[int]) -> list[tuple]:
    return [watched(world, lengths, **how) for how in (
        dict(tolerance=1.0), dict(policy="greedy"), dict(policy="padded"), dict(enabled=False),
        dict(collate_fn=packed))] + [watched(world, [8] * 8 + lengths)]


def test_padding_that_was_not_planned_is_an_error_before_the_first_step():
    """Of one rank alone whose examples are not equally long, and on all ranks."""
    uneven = [8, 8, 8, 8, 30, 9, 12, 20] * 3
    for (seen, error, _), *fine, (later, text, lines) in run_ranks(all_watched, 2, uneven):
        assert seen == 0 and "rank 1 failed" in error and "give policy='padded'" in error
        assert fine == [(3, "", [])] * 4
        assert later == 4 and not text and len(lines) == 1  # nothing ends what has begun
    assert run_ranks(watched, 1, uneven) == [(6, "", [])]


def trained(world, folder: str) -> tuple[list, list, list[str]]:
    """As `counted`, of transformers' Trainer with its own collator and loader."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        DataCollatorForSeq2Seq,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>")), pad_token="<pad>")
    lengths = torch.randint(16, 513, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": [1] * n, "attention_mask": [1] * n, "labels": [1] * n} for n in lengths]
    sizes, lines = [], messages()
    for enabled in (False, True):
        del lines[:]
        own: list[int] = []
        model = tiny().float()
        model.register_forward_pre_hook(
            lambda m, args, given, own=own: own.append(given["input_ids"].numel())
            if torch.is_grad_enabled() else None, with_kwargs=True)
        with as_torchrun(world):
            balance_trainer(Trainer(
                model=model, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer),
                args=TrainingArguments(
                    folder, max_steps=8, per_device_train_batch_size=8, use_cpu=True,
                    save_strategy="no", report_to=[], disable_tqdm=True)),
                lengths=lengths, enabled=enabled, log_every=1).train()
        forget_accelerate()
        sizes.append(by_rank(own).tolist())
    return *sizes, lines


@pytest.mark.slow
def test_a_trainer_with_its_padding_collator_computes_less_padding(tmp_path):
    before, after, lines = run_ranks(trained, 4, str(tmp_path))[0]
    off, on = (int(np.array(sizes).max(0).sum()) for sizes in (before, after))
    said = [float(LINE.search(line)[3]) for line in lines]
    print(f"padded tokens of the slowest rank in {len(said)} steps: {off} without balancing, {on} "
          f"with it ({on / off:.3f}); gain {100 * (1 - on / off):.1f}% counted, "
          f"{np.mean(said):.1f}% logged")
    assert len(said) == 8 and on <= 0.8 * off
    assert abs(np.mean(said) - 100 * (1 - on / off)) <= 5
