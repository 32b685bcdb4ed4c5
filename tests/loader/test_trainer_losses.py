"""balance_trainer by the loss of a Trainer: the weights of one process, or an error with its cure
on all ranks before the first step."""

from __future__ import annotations

import copy
import random
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from orchmllm import balance_trainer, check_equivalence, cost_of
from orchmllm.data.text.model_folder import load_processor
from orchmllm.loader.known_trainers import check_trainer
from orchmllm.loader.trainers import _Balanced
from tests.lib import clients
from tests.lib.clients import Examples, as_torchrun, forget_accelerate, tiny
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
FAMILIES_OF_MEDIA = ("qwen2_vl", "qwen3_vl", "gemma3", "internvl", "qwen2_audio",
                     "qwen2_5_vl pairs")
LENGTHS = Examples(24, few_long=True).lengths


settings = partial(clients.settings, max_steps=3, learning_rate=0.1)
BERT = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            num_labels=3)


def heads(kind: str) -> nn.Module:
    """Models of transformers whose loss is a mean that ignores num_items_in_batch, or a sum."""
    import transformers as t

    torch.manual_seed(0)
    if kind == "T5":
        model = t.T5ForConditionalGeneration(t.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0))
    elif kind.startswith("CTC"):
        model = t.Wav2Vec2ForCTC(t.Wav2Vec2Config(
            **BERT, feat_extract_norm="layer", conv_dim=(8,), conv_kernel=(4,), conv_stride=(2,),
            num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=1,
            hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
            activation_dropout=0.0, final_dropout=0.0, apply_spec_augment=False,
            ctc_loss_reduction="sum" if "sum" in kind else "mean"))
    else:
        name = {"masked LM": "MaskedLM", **dict.fromkeys(
            ("tokens", "override"), "TokenClassification")}.get(kind, "SequenceClassification")
        config = t.BertConfig(**{**BERT, "num_labels": 1 if kind == "regression" else 3})
        model = getattr(t, f"BertFor{name}")(config)
    return model.double()


class Rows(Examples):
    """As a head of this kind takes them."""

    def __init__(self, kind: str) -> None:
        # Of short sounds the first batch does not tell a mean over examples from one over targets.
        super().__init__(24, few_long="CTC" not in kind)
        self.kind = kind

    def __getitem__(self, i: int) -> dict:
        row, kind = super().__getitem__(i), self.kind
        if kind in ("sequence", "regression"):
            return {**row, "labels": torch.tensor(i % 3 if kind == "sequence" else i / 7)}
        if kind in ("tokens", "override"):
            return {**row, "labels": row["labels"].where(row["labels"] < 0, row["labels"] % 3)}
        if kind.startswith("CTC"):
            sound = torch.randn(16 * self.lengths[i], generator=torch.Generator().manual_seed(i))
            return {"input_values": sound.double() / 10,
                    "labels": 1 + row["labels"][row["labels"] > 0] % 60}
        return row


def padded(rows: list[dict]) -> dict:
    key = next(iter(rows[0]))
    batch = {name: nn.utils.rnn.pad_sequence(
        [row[name] for row in rows], batch_first=True, padding_value=fill) for name, fill in (
            (key, 0), ("labels", -100)) if rows[0][name].dim()}
    sizes = torch.tensor([len(row[key]) for row in rows])
    mask = (torch.arange(batch[key].shape[1]) < sizes[:, None]).long()
    return {"labels": torch.stack([row["labels"] for row in rows])
            if not rows[0]["labels"].dim() else None, **batch, "attention_mask": mask}


def plain(folder: str, size: int, kind: str = "tokens", model: nn.Module | None = None,
          steps: int = 1, **how: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    class Overrides(Trainer):
        """With a mean that shifts its labels, of which the Trainer cannot know."""

        def compute_loss(self, model: nn.Module, inputs: dict, *_: Any, **how: Any) -> Any:
            logits = model(**{n: x for n, x in inputs.items() if n != "labels"}).logits
            return nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())

    return (Overrides if kind == "override" else Trainer)(
        model=model or heads(kind), train_dataset=Rows(kind),
        **{"data_collator": padded, **how}, args=TrainingArguments(
            **settings(folder, learning_rate=1e-4 if kind == "CTC sum" else 0.1),
            per_device_train_batch_size=size, gradient_accumulation_steps=steps))


def pairs(kind: str, folder: str, size: int, steps: int) -> Any:
    """TRL's DPOTrainer or RewardTrainer over pairs of answers that are tokens already."""
    import datasets
    import trl
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen2ForSequenceClassification

    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, 64)}}
    split = Tokenizer(WordLevel(words, unk_token="<pad>"))
    split.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>",
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
            gradient_accumulation_steps=steps,
            gradient_checkpointing=False, disable_dropout=True))


SOME = ("tokens", "T5", "CTC", "function", "override")
OTHERS = ("sequence", "regression", "masked LM", "CTC sum", "FSDP2")


def mean_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def trained(trainer: Any) -> list[float]:
    """The weights at the end."""
    model = trainer.model
    trainer.train()
    forget_accelerate()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def sharded_tagger(folder: str) -> nn.Module:
    """As transformers shards a model when it loads it."""
    from transformers import BertForTokenClassification
    from transformers.distributed import DistributedConfig

    heads("tokens").save_pretrained(folder)
    torch.distributed.barrier()
    return BertForTokenClassification.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=2), dtype=torch.float64)


def weights(world, kinds: tuple[str, ...], folder: str, steps: int = 1) -> list[list[float]]:
    """After 3 steps of 8 examples, in so many microbatches; one process trains with the plain
    Trainer."""
    out = []
    for kind in kinds:
        how: dict = {"compute_loss_func": mean_of_logits} if kind == "function" else {}
        with as_torchrun(world):
            if kind == "FSDP2" and world.world_size > 1:
                how["model"] = sharded_tagger(folder)
            trainer = plain(folder, 8 // world.world_size // steps,
                            "tokens" if kind in ("function", "FSDP2") else kind, steps=steps, **how)
            if world.world_size > 1:
                data = trainer.train_dataset
                trainer = balance_trainer(
                    trainer, lengths=data.lengths, policy="greedy",
                    max_tokens=40 if steps > 1 and "CTC" not in data.kind else 0)
                if kind == "tokens":
                    assert trainer._balance["phases"] == cost_of(trainer.model)
                    assert check_equivalence(trainer) < 1e-12  # which leaves no trace
            out.append(trained(trainer))
    return out


@pytest.mark.parametrize("kinds, steps", [
    (SOME, 2), *(pytest.param(*case, marks=pytest.mark.slow)
                 for case in ((SOME, 1), (OTHERS, 1), (OTHERS, 2)))])
def test_a_mean_that_ignores_num_items_in_batch_is_that_of_one_process(tmp_path, kinds, steps):
    """CTC is computed in float32 by transformers."""
    [want], ranks = (run_ranks(weights, d, kinds, str(tmp_path), steps if d > 1 else 1)
                     for d in (1, 2))
    for got in ranks:
        for kind, mine, others in zip(kinds, got, want, strict=True):
            assert mine == pytest.approx(others, abs=1e-6 if "CTC" in kind else 1e-10), kind


def of_pairs(world, kind: str, folder: str, steps: int) -> list[float]:
    with as_torchrun(world):
        trainer = balance_trainer(pairs(kind, folder, 8 // world.world_size // steps, steps))
        weight = next(trainer.model.parameters())
        before = weight.detach().clone()
        after = trained(trainer)
        assert (weight - before).abs().max() > 1e-3  # the answers of a pair differ
    return after


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["DPO", "Reward"])
def test_a_mean_over_pairs_is_that_of_one_process(tmp_path, kind, steps):
    """The loss of DPO is computed in float32 by TRL."""
    [want], ranks = (run_ranks(of_pairs, d, kind, str(tmp_path), steps if d > 1 else 1)
                     for d in (1, 2))
    for got in ranks:
        assert got == pytest.approx(want, abs=1e-6 if kind == "DPO" else 1e-9)


def refusals(world, folder: str) -> list[str]:
    """What the checks say, one of them in the first step."""
    from transformers import CLIPConfig, CLIPModel

    part = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    out = []
    with as_torchrun(world):
        in_parts = plain(folder, 2)
        in_parts.get_tp_size = lambda: 2  # as with DeepSpeed, which has no device mesh
        for make in (
                lambda: plain(folder, 2, compute_loss_func=comparing),
                lambda: plain(folder, 2, compute_loss_func=over_padding),
                lambda: plain(folder, 2, compute_loss_func=in_part),
                lambda: plain(folder, 2, model=CLIPModel(CLIPConfig(
                    text_config=part, vision_config={**part, "image_size": 8, "patch_size": 8}))),
                lambda: in_parts, lambda: GroupTrainer.__new__(GroupTrainer)):
            try:
                balance_trainer(make(), lengths=LENGTHS, policy="greedy").train()
                out.append("")
            except ValueError as error:
                out.append(str(error))
            forget_accelerate()
        everyone = dict(lengths=LENGTHS, group=torch.distributed.group.WORLD)
        balance_trainer(in_parts, **everyone)
        forget_accelerate()
        for cp_size, how in ((2, {}), (1, dict(num_targets=failing))):
            trainer = plain(folder, 2)
            trainer.get_cp_size = lambda size=cp_size: size
            with pytest.raises((ValueError, RuntimeError)) as caught:
                balance_trainer(trainer, **everyone, **how).train()
            out.append(str(caught.value))
            forget_accelerate()
    return out


def failing(batch: dict) -> int:
    """On one rank, in the try alone: the loader counts in its prefetch thread."""
    if torch.distributed.get_rank() and threading.current_thread() is threading.main_thread():
        raise KeyError("name")
    return int((batch["labels"] != -100).sum())


def comparing(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Each example of the batch against the others."""
    one = outputs.logits.mean(1)
    return nn.functional.cross_entropy(one @ one.T, torch.arange(len(one)))


def over_padding(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """A mean over all positions of the batch, which looks like one over examples in one width."""
    return nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), reduction="none").mean()


def in_part(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """As the auxiliary loss of routed experts."""
    summed = mean_of_logits(outputs, labels, None) * (labels != -100).sum()
    return summed / num_items_in_batch + 0.01 * outputs.logits.square().mean()


class GroupTrainer:
    """Stands in the place of TRL's trainers over groups of answers."""

    __module__ = "trl.trainer.group_trainer"


def test_losses_that_balancing_changes_are_refused_with_the_cure(tmp_path):
    ranks = run_ranks(refusals, 2, str(tmp_path))
    for text, part in zip(ranks[0], (
            *("do not show it to be what was tried: a sum, or a mean",) * 2,
            "divided by num_items_in_batch only in part",
            "CLIPModel has a contrastive loss",
            "the ranks of a replica need the same examples",
            "GroupTrainer is none of Trainer, Seq2SeqTrainer, SFTTrainer",
            "each rank has that of a part of its sequences",
            "without gradients failed on rank 1"), strict=True):
        assert part in text, (text, part)
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("losses", [["sigmoid", "sft"], ["aot"], ["aot_unpaired"], "auxiliary"])
def test_losses_of_pairs_that_are_no_mean_over_pairs_are_refused(losses):
    part = losses[-1] if isinstance(losses, list) else "the auxiliary loss"
    kind = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer"})
    trainer = kind()
    trainer.model, trainer.args = nn.Linear(1, 1), SimpleNamespace(
        average_tokens_across_devices=True)
    assert check_trainer(trainer, None) is kind
    trainer.loss_types = losses if isinstance(losses, list) else ["sigmoid"]
    trainer.aux_loss_enabled = losses == "auxiliary"
    with pytest.raises(ValueError, match=f"DPOTrainer: {part} is no mean over pairs"):
        check_trainer(trainer, None)


class OfItems:
    """Stands in the place of a Trainer whose loss is divided by num_items_in_batch."""

    def compute_loss(self, model: nn.Module, inputs: torch.Tensor, return_outputs: bool = False,
                     num_items_in_batch: int | None = None) -> torch.Tensor:
        return model(inputs).sum() / num_items_in_batch


@pytest.mark.parametrize("num_examples", [0, 2])
def test_the_loss_of_a_filler_is_nothing_where_it_is_scaled_already(num_examples):
    """Even if it is no loss of labels, which are ignored there."""
    trainer, model = type("Balanced", (_Balanced, OfItems), {})(), nn.Linear(3, 1)
    trainer.accelerator = SimpleNamespace(gather=None)
    trainer._balance_loss, trainer._balance_tries = "scaled", False
    trainer._balance_step = SimpleNamespace(num_examples=num_examples)
    loss = trainer.compute_loss(model, torch.ones(2, 3), num_items_in_batch=4)
    loss.backward()
    assert model.weight.grad.tolist() == [[0.5 if num_examples else 0.0] * 3]
    assert bool(loss) == bool(num_examples)


def without_targets_first(world, folder: str) -> tuple[str, bool]:
    """The first step has none, and the Trainer does not count them."""
    batches = []

    def collate(rows: list[dict]) -> dict:
        batches.append(padded(rows))
        if len(batches) == 1:
            batches[0]["labels"][:] = -100
        return batches[-1]

    with as_torchrun(world):
        trainer = plain(folder, 2, data_collator=collate)
        trainer.model_accepts_loss_kwargs = False
        weights = trained(balance_trainer(trainer, lengths=LENGTHS, policy="greedy"))
    return trainer._balance_loss, bool(np.isfinite(weights).all())


def test_a_first_step_without_targets_is_not_tried(tmp_path):
    assert run_ranks(without_targets_first, 2, str(tmp_path)) == [("targets", True)] * 2


class Counting(nn.Module):
    """A model with all that a try could change: dropout, BatchNorm, generators of Python and numpy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor,
                labels: torch.Tensor, **kwargs: Any) -> dict:
        x = self.embed(input_ids) * (1 + random.random() + np.random.rand())
        x = nn.functional.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2), 0.5, self.training)
        loss = nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / kwargs["num_items_in_batch"]}


def undisturbed(world, folder: str) -> list[list[float]]:
    """Weights and buffers after 3 steps, with and without the try."""
    out = []
    for loss in (None, "scaled"):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Counting().double()
        with as_torchrun(world):
            trainer = balance_trainer(plain(folder, 2, model=model), lengths=LENGTHS,
                                      policy="greedy", loss=loss)
            weights = trained(trainer)
        out.append([*weights, *model.norm.running_mean.tolist(),
                    int(model.norm.num_batches_tracked)])
    return out


def test_the_try_of_the_loss_changes_no_random_number_and_no_buffer(tmp_path):
    for tried, said in run_ranks(undisturbed, 2, str(tmp_path)):
        assert tried == said and tried[-1] == 3


def picture_rows(family: str, of_pairs: bool) -> Any:
    """Rows with none to two images, or one, in the forms that TRL takes; of qwen2_audio a clip."""
    import datasets as hf

    rng, rows = np.random.default_rng(0), []
    text = [{"role": hf.Value("string"), "content": hf.Value("string")}]
    for i in range(24):
        asked = [{"role": "user", "content": "What is " + "it? " * int(rng.integers(1, 20))}]
        said = [{"role": "assistant", "content": "the red row " * int(rng.integers(1, 9))}]
        row = {"messages": asked + said}
        if of_pairs or family == "qwen3_vl":
            row = {"prompt": asked, "completion": said}
        if of_pairs:
            row["chosen"] = row.pop("completion")
            row["rejected"] = [{"role": "assistant", "content": "no"}]
        if family == "qwen2_audio":
            row["clip"] = (rng.standard_normal(int(rng.integers(1600, 16000))) / 4).tolist()
        else:
            shapes = [(*rng.integers(30, 90, 2), 3) for _ in range(1 if family == "gemma3" or (
                of_pairs) else i % 3)]
            images = [Image.fromarray(rng.integers(0, 255, s, np.uint8)) for s in shapes]
            row |= {"image": images[0]} if family == "gemma3" else {"images": images}
        rows.append(row)
    kinds = {"image": hf.Image(), "images": hf.List(hf.Image()), "clip": hf.List(hf.Value("float"))}
    return hf.Dataset.from_list(rows, hf.Features({k: kinds.get(k, text) for k in rows[0]}))


def of_clips(processor: Any, rows: list[dict]) -> dict:
    """A collate function of one's own, as model cards have it."""
    texts = [processor.apply_chat_template([
        {"role": m["role"], "content": [*[{"type": "audio"}] * (m["role"] == "user"),
                                        {"type": "text", "text": m["content"]}]}
        for m in row["messages"]], tokenize=False) for row in rows]
    batch = processor(text=texts, audio=[np.array(row["clip"]) for row in rows], padding=True,
                      return_tensors="pt", sampling_rate=16000)
    batch["input_features"] = batch["input_features"].double()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def of_images(world, families: tuple[str, ...], folder: str) -> tuple[list[list[float]], str]:
    """TRL's SFTTrainer, or DPOTrainer for pairs; one process with the plain Trainer. With what is
    said of a single family where its loss is said to be scaled."""
    found = [of_family(world, name.removesuffix(" pairs"), folder, "pairs" in name)
             for name in families]
    if world.world_size == 1 or len(families) > 1:
        return found, ""
    with pytest.raises(ValueError) as refused:
        of_family(world, families[0], f"{folder}/scaled", False, loss="scaled")
    return found, str(refused.value)


def of_family(world, family: str, folder: str, of_pairs: bool, loss: str | None = None
              ) -> list[float]:
    import trl

    from tests.lib.whole_folders import write_model

    mine = Path(folder) / f"{family}{of_pairs}{world.world_size}{world.rank}"
    mine.mkdir(parents=True)
    model = write_model(family, mine, torch.float64)
    processor, _ = load_processor(mine)
    rows, how = picture_rows(family, of_pairs), {}
    if family == "qwen2_audio":
        how["data_collator"] = lambda rows: of_clips(processor, rows)
    if of_pairs:
        how["ref_model"] = copy.deepcopy(model)
    kind = "DPO" if of_pairs else "SFT"
    steps = min(world.world_size, 2)
    with as_torchrun(world):
        trainer = getattr(trl, f"{kind}Trainer")(
            model=model, processing_class=processor, train_dataset=rows, **how,
            args=getattr(trl, f"{kind}Config")(
                **settings(folder), gradient_accumulation_steps=steps, bf16=False,
                per_device_train_batch_size=12 // world.world_size // steps, max_length=None,
                gradient_checkpointing=family == "qwen3_vl", **(
                    {"disable_dropout": True} if of_pairs else {
                        "remove_unused_columns": False,
                        "dataset_kwargs": {"skip_prepare_dataset": True}})))
        if world.world_size > 1:
            trainer = balance_trainer(trainer, loss=loss)
        found = trained(trainer)
    if world.world_size > 1:
        lengths = trainer._balance_loader._reader._lengths
        collated = trainer.data_collator([rows[5]])["attention_mask"].sum(-1).max()
        assert lengths(5) == collated and len({lengths(i) for i in range(24)}) > 4
        assert encoders_of(model)
    return found


def encoders_of(model: nn.Module) -> list[str]:
    """Encoders that were balanced."""
    return [name for m in model.modules() for hook in m._forward_pre_hooks.values()
            for name in getattr(getattr(hook, "__self__", None), "last", ())]


@pytest.mark.parametrize("families, num_ranks", [
    (("qwen2_5_vl",), 2), *(pytest.param(FAMILIES_OF_MEDIA, d, marks=pytest.mark.slow)
                            for d in (2, 3))])
def test_models_with_encoders_are_trained_as_in_one_process(tmp_path, families, num_ranks):
    """By balance_trainer(trainer) alone. A batch whose patches cannot be cut: its labels alone show
    what the loss is."""
    [(want, _)], ranks = (run_ranks(of_images, d, families, str(tmp_path)) for d in (1, num_ranks))
    for got, refused in ranks:
        for family, mine, one in zip(families, got, want, strict=True):
            assert mine == pytest.approx(one, abs=1e-6), family
        assert len(families) > 1 or "gives the loss no num_items_in_batch" in refused
