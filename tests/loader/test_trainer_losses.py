"""balance_trainer by the loss of a Trainer: the weights of one process, or an error with its cure
on all ranks before the first step."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from orchmllm import balance_trainer, cost_of
from tests.lib.clients import Examples, as_torchrun, collate, forget_accelerate, tiny
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
NEW_PYTHON = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL's releases need it")
LENGTHS = [4 + i * i * 7 % 23 for i in range(24)]


def settings(folder: str, **how: Any) -> dict[str, Any]:
    return dict(output_dir=folder, max_steps=3, learning_rate=0.1, optim="sgd", max_grad_norm=0.0,
                lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True,
                save_strategy="no", **how)


def tagger() -> nn.Module:
    """As many models of transformers: forward takes **kwargs and ignores num_items_in_batch."""
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).double()


def labelled(examples: list[dict]) -> dict:
    batch = collate(examples)
    longest, sizes = batch["labels"].shape[1], torch.tensor([len(e["labels"]) for e in examples])
    return {**batch, "attention_mask": (torch.arange(longest) < sizes[:, None]).long(),
            "labels": batch["labels"].where(batch["labels"] < 0, batch["labels"] % 2)}


def plain(folder: str, size: int, model: nn.Module | None = None, **how: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(model=model or tagger(), train_dataset=Examples(24), data_collator=labelled,
                   args=TrainingArguments(**settings(folder), per_device_train_batch_size=size),
                   **how)


def pairs(kind: str, folder: str, size: int) -> Any:
    """TRL's DPOTrainer or RewardTrainer over pairs of answers that are tokens already."""
    import datasets
    import trl
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2ForSequenceClassification

    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, 64)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>",
        eos_token="<pad>")
    rows = [{"prompt": "w9 w8 ", "chosen": f"w{1 + i % 7} " * n,
             "rejected": f"w{2 + i % 5} " * (n // 2 + 1)} for i, n in enumerate(LENGTHS)]
    model = tiny()
    if kind == "Reward":
        rows = [{k: v for k, v in row.items() if k != "prompt"} for row in rows]
        model.config.num_labels = 1
        torch.manual_seed(0)
        model = Qwen2ForSequenceClassification(model.config).double()
    reference = {"ref_model": tiny()} if kind == "DPO" else {}
    return getattr(trl, f"{kind}Trainer")(
        model=model, **reference, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows), args=getattr(trl, f"{kind}Config")(
            **settings(folder), per_device_train_batch_size=size, bf16=False,
            gradient_checkpointing=False, disable_dropout=True))


def weights(world, kind: str, folder: str) -> list[float]:
    """After 3 steps of 8 examples."""
    size = 8 // world.world_size
    with as_torchrun(world):
        if kind == "mean":
            trainer = balance_trainer(plain(folder, size), lengths=LENGTHS, policy="greedy",
                                      loss="mean")
        else:
            trainer = balance_trainer(pairs(kind, folder, size), lengths=LENGTHS)
        model = trainer.model
        trainer.train()
    forget_accelerate()
    assert trainer._balance["phases"] == cost_of(model)
    assert all(trainer._balance_loader.step.imbalance)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("kind", [
    "mean", *(pytest.param(k, marks=[NEW_PYTHON, pytest.mark.slow]) for k in ("DPO", "Reward"))])
def test_a_mean_over_targets_or_pairs_is_that_of_one_process(tmp_path, kind):
    [want], ranks = (run_ranks(weights, d, kind, str(tmp_path)) for d in (1, 2))
    for got in ranks:
        assert got == pytest.approx(want, abs=1e-9)


def refusals(world, folder: str) -> list[str]:
    """What the checks say, one of them in the first step."""
    from transformers import CLIPConfig, CLIPModel

    part = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    out = []
    with as_torchrun(world):
        in_parts = plain(folder, 2)
        in_parts.get_tp_size = lambda: 2  # as with DeepSpeed, which has no device mesh
        for make in (
                lambda: plain(folder, 2),
                lambda: plain(folder, 2, compute_loss_func=lambda *a, **k: 0),
                lambda: plain(folder, 2, CLIPModel(CLIPConfig(
                    text_config=part, vision_config={**part, "image_size": 8, "patch_size": 8}))),
                lambda: in_parts, lambda: GroupTrainer.__new__(GroupTrainer)):
            try:
                balance_trainer(make(), lengths=LENGTHS, policy="greedy").train()
                out.append("")
            except ValueError as error:
                out.append(str(error))
            forget_accelerate()
        balance_trainer(in_parts, lengths=LENGTHS, group=torch.distributed.group.WORLD)
    return out


class GroupTrainer:
    """Stands in the place of TRL's trainers over groups of answers."""

    __module__ = "trl.trainer.group_trainer"


def test_losses_that_balancing_changes_are_refused_with_the_cure(tmp_path):
    ranks = run_ranks(refusals, 2, str(tmp_path))
    for text, part in zip(ranks[0], (
            "the same for twice the num_items_in_batch",
            "compute_loss_func is not of transformers: say loss=",
            "CLIPModel has a contrastive loss",
            "the ranks of a replica need the same examples",
            "GroupTrainer is none of Trainer, Seq2SeqTrainer, SFTTrainer"), strict=True):
        assert part in text, (text, part)
    assert ranks[0] == ranks[1]


def dropped(world, folder: str) -> list[list[float]]:
    """Weights after 3 steps with dropout, with and without a look at the loss of the first."""
    out = []
    for known in (False, True):
        model = tiny()
        model.config.attention_dropout = 0.5
        model.model.layers[0].self_attn.attention_dropout = 0.5
        with as_torchrun(world):
            trainer = balance_trainer(plain(folder, 2, model), lengths=LENGTHS, policy="greedy")
            trainer._balance_proven = known
            trainer.train()
        forget_accelerate()
        assert trainer._balance_proven
        out.append(torch.cat([p.detach().flatten() for p in model.parameters()]).tolist())
    return out


def test_the_look_at_the_loss_changes_no_random_number(tmp_path):
    for looked, known in run_ranks(dropped, 2, str(tmp_path)):
        assert looked == known
