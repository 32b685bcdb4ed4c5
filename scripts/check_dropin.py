"""Whether the drop-in says what it cannot do, on 2 gloo ranks.

    python scripts/check_dropin.py uses    # uses that were silently wrong, or slower than without
    python scripts/check_dropin.py loops   # check_equivalence of 30 right and 20 wrong loops

A use is right, refused, or told before step 3. Exits with 1 where one is not, where a right loop is
called wrong, or where the cause of a wrong one is not the one that is known."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from orchmllm import (  # noqa: E402
    BalancedDataLoader,
    Encoder,
    Rows,
    balance_encoders,
    balance_trainer,
    check_equivalence,
)
from tests.lib.clients import VOCAB, Examples, as_torchrun, collate, forget_accelerate  # noqa: E402
from tests.lib.ranks import run_ranks  # noqa: E402

IGNORED = -100


class Text(nn.Module):
    """A model that mixes the positions of an example, none of padding."""

    def __init__(self, leaks: bool = False, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(VOCAB, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head, self.leaks, self.dropout = nn.Linear(8, VOCAB), leaks, nn.Dropout(dropout)
        self.checkpoints = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.leaks:  # a mean over padding, too
            x = x + x.mean(1, keepdim=True)
        inner = (partial(checkpoint, self.inner, use_reentrant=False) if self.checkpoints
                 else self.inner)
        x = self.norm(inner(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.dropout(x.tanh()))


def wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "FSDP2":
        return fully_shard(model)
    if how == "FSDP1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return DistributedDataParallel(model)


def cross_entropy(model: nn.Module, batch: dict, reduction: str = "mean", shifts: bool = False
                  ) -> Tensor:
    logits, labels = model(batch["input_ids"]), batch["labels"]
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def of_examples(model: nn.Module, batch: dict) -> Tensor:
    """A mean over examples of the mean of each."""
    logits, labels = model(batch["input_ids"]), batch["labels"]
    each = nn.functional.cross_entropy(logits.mT, labels, reduction="none").sum(1)
    return (each / (labels != IGNORED).sum(1)).mean()


def contrastive(model: nn.Module, batch: dict) -> Tensor:
    one = model(batch["input_ids"])[:, 0]
    return nn.functional.cross_entropy(one @ one.T, torch.arange(len(one)))


# Wrong loops: name -> (model, loss of (model, batch, loader), part of what has to be said).
WRONG: dict[str, tuple[dict, Callable, str]] = {
    "a mean over a rank's targets": (
        {}, lambda m, b, x: cross_entropy(m, b), "never scaled"),
    "a sum over the rank's own number": (
        {}, lambda m, b, x: cross_entropy(m, b, "sum") / (b["labels"] != IGNORED).sum(),
        "never scaled"),
    "shifted, and the model does not": (
        {}, lambda m, b, x: x.scale_mean(cross_entropy(m, b), shifted=True), "`shifted` is"),
    "not shifted, and the model does": (
        {}, lambda m, b, x: x.scale_mean(cross_entropy(m, b, shifts=True), shifted=False),
        "`shifted` is"),
    "scale_mean of a sum": (
        {}, lambda m, b, x: x.scale_mean(cross_entropy(m, b, "sum"), shifted=False),
        "it is the other one"),
    "scale_sum of a mean": (
        {}, lambda m, b, x: x.scale_sum(cross_entropy(m, b)), "it is the other one"),
    "a mean over examples": (
        {}, lambda m, b, x: x.scale_mean(of_examples(m, b), shifted=False), "mean over examples"),
    "BatchNorm": (
        {"norm": True}, lambda m, b, x: x.scale_mean(cross_entropy(m, b), shifted=False),
        "BatchNorm1d"),
    "padding that is seen": (
        {"leaks": True}, lambda m, b, x: x.scale_mean(cross_entropy(m, b), shifted=False),
        "padding that no mask hides"),
    "a contrastive part": (
        {}, lambda m, b, x: x.scale_mean(cross_entropy(m, b), shifted=False) + contrastive(m, b),
        "compares examples"),
    "dropout": (
        {"dropout": 0.5}, lambda m, b, x: x.scale_mean(cross_entropy(m, b), shifted=False),
        "switch off dropout"),
}
RIGHT = {
    "scale_mean": lambda m, b, x: x.scale_mean(cross_entropy(m, b), b["labels"], shifted=False),
    "scale_sum, shifted": lambda m, b, x: x.scale_sum(
        cross_entropy(m, b, "sum", shifts=True), shifted=True)}
SETTINGS = ("plain", "accumulation", "checkpointing", "compile", "accumulation, checkpointing")


def said(how: str, setting: str, of_model: dict, loss_of: Callable) -> str:
    """What check_equivalence says of a loop; "" where it passes."""
    inner = Text(**of_model).double()
    inner.checkpoints = "checkpointing" in setting
    steps = 2 if "accumulation" in setting else 1
    model = wrap(inner, how)
    run = torch.compile(model, backend="eager") if setting == "compile" else model
    loader = BalancedDataLoader(Examples(48, few_long=True), 8 // steps, collate_fn=collate,
                                lengths=Examples(48, few_long=True).lengths, shuffle=True,
                                policy="greedy", accumulation_steps=steps, check_loss=False)
    try:
        check_equivalence(lambda batch: loss_of(run, batch, loader).backward(),
                          model.named_parameters if how != "FSDP1" else inner.named_parameters,
                          loader)
    except AssertionError as error:
        return str(error)
    return ""


def loops(world: Any) -> list[str]:
    """Complaints."""
    torch.set_num_threads(1)
    out, count = [], 0
    for how in ("FSDP2", "DDP", "FSDP1"):
        for setting in SETTINGS:
            for name, loss_of in RIGHT.items():
                count += 1
                if text := said(how, setting, {}, loss_of):
                    out.append(f"{how}, {setting}, {name} is right, but: {text}")
    wrong = [(how, name) for how in ("DDP", "FSDP2") for name in WRONG][:20]
    for how, name in wrong:
        of_model, loss_of, part = WRONG[name]
        text = said(how, "plain", of_model, loss_of)
        if world.rank == 0:
            print(f"{how}, {name}: {text.splitlines()[0] if text else 'nothing'}", flush=True)
        if part not in text:
            out.append(f"{how}, {name}: not said: {part!r}, but: {text}")
    if world.rank == 0:
        print(f"{count} right loops, {len(wrong)} wrong ones, {len(out)} misjudged")
    return out


class Photos(nn.Module):
    """A model whose forward gives its tower more than its inputs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.tower, self.embed, self.how = Tower(), nn.Embedding(8, 4), how

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, photos: Tensor, ids: Tensor) -> Tensor:
        more = {"an option": {"normalize": True}, "a factor": {"scale": 3.0},
                "a mask made in the forward": {"mask": photos[:, :1] > 0}}.get(self.how, {})
        extra = (True,) if self.how == "by position" else ()
        return self.embed(ids).mean(1) + self.tower(photos, *extra, **more)


class Tower(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, normalize: bool = False, scale: float = 1.0,
                mask: Tensor | None = None) -> Tensor:
        x = scale * super().forward(x)
        x = x if mask is None else x * mask
        return nn.functional.normalize(x) if normalize else x


def encoder_called(world: Any, how: str) -> str:
    torch.manual_seed(0)
    model = Photos(how)
    balance_encoders(model, [Encoder("photo", {"tower": Rows("photos")})])
    try:
        model(photos=torch.randn(3 + 5 * world.rank, 4),
              ids=torch.ones(3 + 5 * world.rank, 2, dtype=torch.long)).sum().backward()
    except RuntimeError as error:
        return f"refused: {error}"
    return ""


def warned(world: Any, together: Callable) -> str:
    """What the log says in 3 steps of a loop that never scales its loss."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("orchmllm.loader")
    logger.addHandler(handler)
    data = Examples(48, few_long=True)
    for k, _ in enumerate(BalancedDataLoader(data, 4, collate_fn=together, lengths=data.lengths)):
        if k == 3:
            break
    logger.removeHandler(handler)
    found = [line for line in lines if "scale" in line]  # rank 0 tells
    return f"told: {found[0]}" if found else ""


def trainer_of(world: Any, folder: str, loss: str | None, seed: int | None) -> str:
    """A Trainer with loss="scaled" of a model that is not, or with a cross entropy that weighs
    classes."""
    from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

    weight = None
    if seed is not None:
        weight = torch.rand(5, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=2, hidden_dropout_prob=0.0, num_labels=5,
                        attention_probs_dropout_prob=0.0)

    def weighed(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight)

    def tags(rows: list[dict]) -> dict:
        batch = collate(rows)
        batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 5)
        return batch

    with as_torchrun(world):
        trainer = Trainer(
            model=BertForTokenClassification(config).double(), data_collator=tags,
            train_dataset=Examples(48, few_long=True),
            compute_loss_func=None if weight is None else weighed,
            args=TrainingArguments(
                folder, max_steps=3, per_device_train_batch_size=3, use_cpu=True, report_to=[],
                disable_tqdm=True, save_strategy="no"))
        trainer.model_accepts_loss_kwargs = False
        try:
            balance_trainer(trainer, loss=loss).train()
            text = ""
        except ValueError as error:
            text = f"refused after {trainer.state.global_step} steps: {error}"
    forget_accelerate()
    return text


def as_tuple(rows: list[dict]) -> tuple:
    return tuple(collate(rows).values())


def as_target(rows: list[dict]) -> dict:
    batch = collate(rows)
    return {"input_ids": batch["input_ids"], "target": batch["labels"]}


def as_pairs(rows: list[dict]) -> dict:
    ids = collate(rows)["input_ids"]
    return {"image": ids[:, :2].float(), "text": ids[:, 2:4]}


def uses(world: Any) -> list[tuple[str, str]]:
    """(use, what happened)."""
    from tests.loader.test_padding import OTHERS, computed, shares

    out = [(f"an Encoder called with {how}", encoder_called(world, how)) for how in (
        "an option", "a factor", "a mask made in the forward", "by position")]
    out += [(f"batches {f.__name__}", warned(world, f))
            for f in (as_tuple, as_target, as_pairs)]
    with tempfile.TemporaryDirectory() as folder:
        out.append(("loss='scaled' of a mean", trainer_of(world, folder, "scaled", None)))
        texts = [trainer_of(world, folder, None, seed) for seed in range(5)]
        out.append(("classes that weigh, 5 seeds", texts[0] if all(texts) else ""))
    cases = [case for case in OTHERS if case[0] == "lognormal"]
    for case, of_case in zip(cases, computed(world, cases), strict=True):
        of_off, of_best = shares(case, of_case)
        what = f"positions of the slowest rank / off {of_off:.3f}, / best {of_best:.3f}"
        fits = of_off <= 1.01 and of_best <= 1.03
        out.append((f"{case[1].__name__}, {case[0]}", f"right: {what}" if fits else ""))
    return out


if __name__ == "__main__":
    if sys.argv[1:] == ["loops"]:
        failures = run_ranks(loops, 2, timeout_s=3000)[0]
        print(*failures, sep="\n")
    elif sys.argv[1:] == ["uses"]:
        found = run_ranks(uses, 2, timeout_s=3000)[0]
        for use, what in found:
            print(f"{use}: {what.splitlines()[0][:160] if what else 'NOTHING SAID'}")
        failures = [use for use, what in found if not what]
    else:
        sys.exit(__doc__)
    sys.exit(bool(failures))
