"""Training loops and trainers that we did not write, run on a BalancedDataLoader: what every client
of the matrix (tests/lib/client_cells.py) does with its batches, and what it should give.

Every example is known by its first token, so the model itself records what it was trained on; an
independent loop over these examples in one process has to end with the same weights.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from orchmllm import BalancedDataLoader, balance_trainer
from tests.lib.commands import ROOT

VOCAB, RATE, EPOCHS, BATCH = 64, 0.5, 2, 2
FEATURES = ("moved", "resumed", "accumulation", "tail", "evaluation", "workers")
IN_SHARDS = ("trainer_fsdp2", "sft_fsdp2")  # transformers refuses to resume these


@dataclass(frozen=True)
class Cell:
    """moved: the batch goes through the client's own move to a device. resumed: the run stops
    within an epoch and goes on from what it saved. accumulation: 2, of unequal numbers of examples
    under a cap of tokens. tail: the last step of an epoch has fewer examples than ranks.
    evaluation: between steps. workers: 1 process a rank."""

    client: str
    features: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> bool:
        if name not in FEATURES:
            raise AttributeError(name)
        return name in self.features

    @property
    def accumulate(self) -> int:
        return 2 if self.accumulation else 1

    @property
    def data(self) -> Examples:
        return Examples(17 if self.tail else 16, few_long=self.accumulation)

    @property
    def num_steps(self) -> int:
        """Of an epoch on two ranks."""
        return -(-len(self.data) // (2 * BATCH * self.accumulate))

    @property
    def stops(self) -> list[int]:
        """Steps after which a run ends."""
        last = EPOCHS * self.num_steps
        return [1, self.num_steps + 1, last] if self.resumed else [last]


class Examples(Dataset):
    """Example i begins with token i and is a function of i. few_long: one of seven is long, so that
    planned microbatches have unequal numbers of examples."""

    def __init__(self, size: int, few_long: bool = False) -> None:
        self.lengths = [(26 if i % 7 == 3 else 4 + i * 7 % 5) if few_long else 4 + i * i * 7 % 23
                        for i in range(size)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(1, VOCAB, (self.lengths[i],), generator=generator)
        ids[0] = i
        labels = ids.clone()
        labels[1 + i % 2: 2] = -100
        return {"input_ids": ids, "labels": labels}


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Right-padded (B, T)."""
    return {key: nn.utils.rnn.pad_sequence([e[key] for e in examples], batch_first=True,
                                           padding_value=fill)
            for key, fill in (("input_ids", 0), ("labels", -100))}


def length_of(example: dict[str, Tensor]) -> int:
    return len(example["input_ids"])


def tiny(weights: dict[str, Tensor] | None = None) -> nn.Module:
    """A causal model that records the first tokens that it trains on in `seen`, one list a batch.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False, eos_token_id=0,
        pad_token_id=0, bos_token_id=0)).double()
    model.config.dtype = torch.float64
    if weights is not None:
        model.load_state_dict(weights)
    return recording(model)


def recording(model: nn.Module) -> nn.Module:
    """With what it is trained on in `seen`."""
    model.seen = []

    def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
        ids, positions = kwargs["input_ids"], kwargs.get("position_ids")
        if module.training and torch.is_grad_enabled():  # TRL runs it again for its metrics
            firsts = ids[:, 0] if positions is None else ids[positions == 0]
            module.seen.append(firsts.tolist())

    model.register_forward_pre_hook(record, with_kwargs=True)
    return model


def forget_filler(model: nn.Module, loader: BalancedDataLoader) -> None:
    """Takes the batch last seen out of `seen` if the loader says that it holds no example."""
    if not loader.step.num_examples:
        model.seen[-1] = []


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """In float64, of a model that shifts its labels (transformers computes it in float32)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                           reduction=reduction)


def trainers_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """compute_loss_func of transformers' Trainer."""
    return loss_of(outputs.logits, labels, "sum") / (num_items_in_batch or 1)


def reference(data: Dataset, seen: list[list[int]]) -> dict[str, Tensor]:
    """Weights after one process trained on the examples of each step; one that a step has twice
    counts twice."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for ids in seen:
        total, count = 0.0, 0
        for i in ids:
            batch = collate([data[i]])
            total = total + loss_of(model(input_ids=batch["input_ids"]).logits, batch["labels"],
                                    "sum")
            count += int((batch["labels"][:, 1:] != -100).sum())
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def options(cell: Cell) -> dict[str, Any]:
    return {"policy": "greedy", "max_tokens": 30 if cell.accumulation else 0}


def loader_of(cell: Cell) -> BalancedDataLoader:
    data = cell.data
    return BalancedDataLoader(
        data, BATCH, shuffle=True, collate_fn=collate, accumulation_steps=cell.accumulate,
        lengths=data.lengths, num_workers=int(cell.workers), **options(cell))


def moved(batch: Any, cell: Cell) -> Any:
    """As a loop moves it: every container is a new one."""
    return {k: v.to("cpu", copy=True) for k, v in batch.items()} if cell.moved else batch


def evaluate(model: nn.Module, cell: Cell) -> None:
    """As people write it; with a second loader, and between two steps of the first."""
    if not cell.evaluation:
        return
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(Examples(4), 2, collate_fn=collate):
            model(input_ids=batch["input_ids"])
    model.train()


# The clients: cell -> (weights at the end, what was seen by batch).
Result = tuple[dict[str, Tensor], list[list[int]]]
CLIENTS: dict[str, Callable[[Cell, Path], Result]] = {}


def client(function: Callable[[Cell, Path], Result]) -> Callable[[Cell, Path], Result]:
    CLIENTS[function.__name__] = function
    return function


def plain(cell: Cell, wrap: Callable[[nn.Module], nn.Module], whole: Callable, *,
          make: Callable[[Cell], Any] = loader_of, backward: Callable = Tensor.backward,
          loader_to_use: Callable = lambda loader: loader) -> Result:
    """A loop of one's own."""
    weights, state, seen, at = None, None, [], 0
    for stop in cell.stops:
        inner = tiny(weights)
        model = wrap(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader = make(cell)
        if state is not None:
            loader.load_state_dict(state)
        batches = loader_to_use(loader)
        while at < stop:
            for batch in batches:
                batch = moved(batch, cell)
                loss = loss_of(model(input_ids=batch["input_ids"]).logits, batch["labels"])
                forget_filler(inner, batches)
                backward(batches.scale_mean(loss, batch["labels"], shifted=True, divided_by=1))
                if batches.step.is_last_microbatch:
                    optimizer.step()
                    optimizer.zero_grad()
                    evaluate(model, cell)
                    at += 1
                if at == stop:
                    break
        state, seen = loader.state_dict(), seen + inner.seen
        weights = whole(model)
    return weights, seen


@client
def fsdp1(cell: Cell, folder: Path) -> Result:
    def whole(model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return {n: p.detach().clone() for n, p in model.module.named_parameters()}

    return plain(cell, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"),
                                                          use_orig_params=True), whole)


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    for unit in (m for m in model.modules() if isinstance(m, FSDPModule)):
        unit.reshard()  # a forward pass without gradients leaves them unsharded
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def of_ddp(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.module.named_parameters()}


@client
def fsdp2(cell: Cell, folder: Path) -> Result:
    return plain(cell, sharded, gathered)


@client
def ddp(cell: Cell, folder: Path) -> Result:
    return plain(cell, DistributedDataParallel, of_ddp)


@client
def stateful(cell: Cell, folder: Path) -> Result:
    """torchdata's StatefulDataLoader, wrapped, as in torchtitan: its state is per rank."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(cell: Cell) -> BalancedDataLoader:
        data = cell.data
        wrapped = StatefulDataLoader(
            data, BATCH, collate_fn=collate, num_workers=int(cell.workers),
            sampler=DistributedSampler(data, shuffle=True))
        return BalancedDataLoader(wrapped, length_fn=length_of,
                                  accumulation_steps=cell.accumulate, **options(cell))

    return plain(cell, sharded, gathered, make=make)


@client
def accelerate(cell: Cell, folder: Path) -> Result:
    """Everything goes through accelerator.prepare, save_state and load_state."""
    from accelerate import Accelerator
    from accelerate.utils import send_to_device

    weights, seen, at = None, [], 0
    for stop in cell.stops:
        accelerator = Accelerator(gradient_accumulation_steps=cell.accumulate)
        inner = tiny(weights)
        model, optimizer, loader = accelerator.prepare(
            inner, torch.optim.SGD(inner.parameters(), lr=RATE), loader_of(cell))
        if at:
            accelerator.load_state(folder)
        while at < stop:
            for batch in loader:
                if cell.moved:
                    batch = send_to_device(batch, accelerator.device)
                if cell.accumulation:
                    asks_for_divisor(loader, "gradient_accumulation_steps")
                with accelerator.accumulate(model):
                    loss = loss_of(model(input_ids=batch["input_ids"]).logits, batch["labels"])
                    forget_filler(inner, loader)
                    accelerator.backward(loader.scale_mean(
                        loss, batch["labels"], shifted=True,
                        divided_by=accelerator.gradient_accumulation_steps))
                    optimizer.step()
                    optimizer.zero_grad()
                if loader.step.is_last_microbatch:
                    evaluate(model, cell)
                    at += 1
                if at == stop:
                    break
        accelerator.save_state(folder)
        weights, seen = of_ddp(model), seen + inner.seen
        forget_accelerate()
    return weights, seen


def loaded_in_shards(folder: Path) -> nn.Module:
    """`tiny` under FSDP2 as transformers shards a model that it loads."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        tiny().save_pretrained(folder)
    dist.barrier()
    return recording(AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())))


def settings(folder: str | Path, **how: Any) -> dict[str, Any]:
    """Arguments of transformers' TrainingArguments for a few steps of SGD on a CPU."""
    return {**dict(output_dir=str(folder), optim="sgd", lr_scheduler_type="constant",
                   max_grad_norm=0.0, use_cpu=True, report_to=[], disable_tqdm=True,
                   save_strategy="no"), **how}


def trainers_run(cell: Cell, folder: Path, make: Callable[..., Any]) -> Result:
    """transformers' Trainer or a subclass. make: (model, stop) -> the trainer."""
    seen: list = []
    for stop in cell.stops:
        inner = loaded_in_shards(folder) if cell.client in IN_SHARDS else tiny()
        trainer = make(inner, settings(
            folder, max_steps=cell.stops[-1], per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=cell.accumulate, learning_rate=RATE,
            save_strategy="steps" if cell.resumed else "no", save_steps=1,
            eval_strategy="steps" if cell.evaluation else "no", eval_steps=1, logging_steps=100,
            dataloader_num_workers=int(cell.workers)))
        if stop < cell.stops[-1]:
            stop_at(trainer, stop)
        trainer.train(resume_from_checkpoint=bool(seen))
        seen += inner.seen
        weights = gathered(inner) if cell.client in IN_SHARDS else {
            n: p.detach().clone() for n, p in inner.named_parameters()}
        forget_accelerate()
    return weights, seen


def asks_for_divisor(loader: BalancedDataLoader, cure: str) -> None:
    """Where the client's backward divides the loss, a scale that does not know it is refused."""
    with pytest.raises(ValueError, match=cure):
        loader.scale_sum(torch.ones(()))


def forget_accelerate() -> None:
    """What the end of a process does to its singletons."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def stop_at(trainer: Any, stop: int) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step >= stop
            return control

    trainer.add_callback(Stop())


@client
def trainer(cell: Cell, folder: Path) -> Result:
    from transformers import Trainer, TrainingArguments

    def make(model: nn.Module, args: dict) -> Trainer:
        data = cell.data
        return balance_trainer(Trainer(
            model=model, args=TrainingArguments(**args), train_dataset=data,
            eval_dataset=Examples(4), data_collator=collate,
            compute_loss_func=trainers_loss), lengths=data.lengths, loss="scaled",
            **options(cell))

    return trainers_run(cell, folder, make)


@client
def trainer_fsdp2(cell: Cell, folder: Path) -> Result:
    return trainer(cell, folder)


def sft_trainer(cell: Cell, folder: Path, packed: bool) -> Result:
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>",
        eos_token="<pad>")

    def rows(data: Examples) -> datasets.Dataset:
        return datasets.Dataset.from_list([{k: v.tolist() for k, v in e.items()}
                                           for e in map(data.__getitem__, range(len(data)))])

    def make(model: nn.Module, args: dict) -> SFTTrainer:
        return balance_trainer(SFTTrainer(
            model=model, processing_class=tokenizer, train_dataset=rows(cell.data),
            eval_dataset=rows(Examples(4)), compute_loss_func=trainers_loss,
            args=SFTConfig(**args, packing=packed, max_length=28, bf16=False,
                           gradient_checkpointing=False, dataset_num_proc=None)),
            loss="scaled", **({"policy": "greedy"} if packed else options(cell)))

    return trainers_run(cell, folder, make)


@client
def sft(cell: Cell, folder: Path) -> Result:
    return sft_trainer(cell, folder, packed=False)


@client
def sft_fsdp2(cell: Cell, folder: Path) -> Result:
    return sft_trainer(cell, folder, packed=False)


@client
def sft_packed(cell: Cell, folder: Path) -> Result:
    return sft_trainer(cell, folder, packed=True)


@client
def lightning(cell: Cell, folder: Path) -> Result:
    return lightnings(cell, folder, "ddp")


@client
def lightning_fsdp2(cell: Cell, folder: Path) -> Result:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return lightnings(cell, folder, ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(), tensor_parallel_size=1))


def lightnings(cell: Cell, folder: Path, strategy: Any) -> Result:
    import lightning as L
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Module(L.LightningModule):
        def __init__(self, model: nn.Module, loader: BalancedDataLoader) -> None:
            super().__init__()
            self.model, self.loader = model, loader

        def configure_model(self) -> None:
            if strategy != "ddp":
                sharded(self.model)

        def training_step(self, batch: dict, index: int) -> Tensor:
            loss = loss_of(self.model(input_ids=batch["input_ids"]).logits, batch["labels"])
            forget_filler(self.model, self.loader)
            if cell.accumulation:
                asks_for_divisor(self.loader, "accumulate_grad_batches")
            return self.loader.scale_mean(loss, batch["labels"], shifted=True,
                                          divided_by=self.trainer.accumulate_grad_batches)

        def validation_step(self, batch: dict, index: int) -> None:
            self.model(input_ids=batch["input_ids"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    class Killed(Exception):
        pass

    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[dict]:
            return map(cell.data.__getitem__, range(len(cell.data)))

    class Save(L.Callback):
        """Saves after `stop` steps, within a batch, and dies."""

        def __init__(self, stop: int) -> None:
            self.stop = stop

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == self.stop and module.loader.step.is_last_microbatch:
                trainer.save_checkpoint(folder / f"{self.stop}.ckpt")
                raise Killed

    def trainer_of(stop: int) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=copy.deepcopy(strategy),
            max_epochs=EPOCHS,
            accumulate_grad_batches=cell.accumulate, logger=False, callbacks=[Save(stop)],
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            default_root_dir=folder, plugins=[TorchElasticEnvironment()],
            val_check_interval=cell.accumulate if cell.evaluation else None,
            num_sanity_val_steps=0)

    if cell.tail:
        stream = BalancedDataLoader(Endless(), BATCH, collate_fn=collate, length_fn=length_of)
        with pytest.raises(TypeError, match="without a length"):
            trainer_of(1).fit(Module(tiny(), stream), stream)
    seen, path = [], None
    for stop in cell.stops:
        inner, loader = tiny(), loader_of(cell)
        module, run = Module(inner, loader), trainer_of(stop)
        with contextlib.suppress(Killed):
            run.fit(module, loader, DataLoader(Examples(4), 2, collate_fn=collate)
                    if cell.evaluation else None, ckpt_path=path)
        path = str(folder / f"{stop}.ckpt")
        seen += inner.seen
    return gathered(inner) if strategy != "ddp" else {
        n: p.detach().clone() for n, p in inner.named_parameters()}, seen


@client
def fabric(cell: Cell, folder: Path) -> Result:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    run = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp",
                 plugins=[TorchElasticEnvironment()])
    run.launch()
    return plain(
        cell, run.setup_module, lambda m: {n: p.detach().clone()
                                           for n, p in m.module.named_parameters()},
        backward=run.backward, loader_to_use=lambda loader: run.setup_dataloaders(loader))


@contextlib.contextmanager
def as_torchrun(world: Any) -> Iterator[None]:
    """What torchrun sets; the group exists already."""
    old = dict(os.environ)
    os.environ.update(
        RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.world_size),
        LOCAL_WORLD_SIZE=str(world.world_size), MASTER_ADDR="localhost", MASTER_PORT="1",
        GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests", ACCELERATE_USE_CPU="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old)


def run_cells(world: Any, cells: list[Cell]) -> list[tuple[float, list[list[int]]]]:
    """Per cell (largest difference of a weight from the reference, examples of each step)."""
    out = []
    for cell in cells:
        folders: list = [tempfile.mkdtemp() if world.rank == 0 else None]
        dist.broadcast_object_list(folders)
        with as_torchrun(world):
            weights, seen = CLIENTS[cell.client](cell, Path(folders[0]))
        everyone: list = [None] * world.world_size
        dist.all_gather_object(everyone, seen)
        assert len({len(s) for s in everyone}) == 1
        k = cell.accumulate
        # With repeats: accelerate completes a Trainer's last step with the epoch's first examples,
        # which may be in that step already. So a Trainer has no fillers here.
        steps = [sorted(i for s in everyone for batch in s[t: t + k] for i in batch)
                 for t in range(0, len(seen), k)]
        sizes = {sum(map(len, batches)) for batches in zip(*everyone, strict=True)}
        assert len(sizes) > 1 or not cell.accumulation, cell
        want = reference(cell.data, steps)
        out.append((max(float((weights[n] - w).abs().max()) for n, w in want.items()), steps))
    return out


def client_table() -> str:
    """The table of docs/loader_cases.md: every cell is right, or the tests of its client fail."""
    lines = (ROOT / "constraints.txt").read_text()
    pinned = dict(reversed(re.findall(r"^([\w-]+)==([\d.]+)", lines, re.M)))  # the first of each
    clients = {
        "torch": {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "ddp": "DDP"},
        "torchdata": {"stateful": "StatefulDataLoader, wrapped, FSDP2"},
        "accelerate": {"accelerate": "prepare, save_state, DDP"},
        "transformers": {"trainer": "Trainer, DDP", "trainer_fsdp2": "Trainer, FSDP2"},
        "trl": {"sft": "SFTTrainer, DDP", "sft_fsdp2": "SFTTrainer, FSDP2",
                "sft_packed": "SFTTrainer, packing, DDP"},
        "lightning": {"lightning": "Trainer, DDP", "lightning_fsdp2": "Trainer, FSDP2",
                      "fabric": "Fabric, DDP"}}
    assert {*CLIENTS} == {name for names in clients.values() for name in names}
    rows = [("library", "client (combinations, all right)"), ("---",) * 2]
    rows += [(f"{package} {pinned[package]}", "; ".join(
        f"{said} ({2 ** (len(FEATURES) - (name in IN_SHARDS))})" for name, said in names.items()))
        for package, names in clients.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
