"""Planned phases of models of transformers, from files to gradients on real ranks: images and clips
are decoded where they are encoded, and every parameter's gradient is that of stock transformers in
one process, example by example."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from orchmllm.batch import IGNORE_INDEX
from orchmllm.comm import exchange
from orchmllm.comm.exchange import RowGather, all_to_all
from orchmllm.config.balance import PhaseConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, FsdpConfig, Recipe, RunConfig, TrainConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.data.stream import open_dataset
from orchmllm.encoders import planned
from orchmllm.encoders.results import Features
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.processors import CLIPS, FAMILIES
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.recipes import frozen
from tests.lib.whole_folders import write_counted, write_model

pytestmark = [pytest.mark.dist, pytest.mark.whole]
# Media of each example. Of the steps of 8 examples the second has one, so that ranks encode nothing
# and have no media, the third has none; the last has 2 examples for up to 4 ranks.
COUNTS = [3, 1, 0, 2, 0, 1, 2, 0, *[0, 1, *[0] * 6], *[0] * 8, 1, 2]
BATCH = 8


def recipe(folder: Path, **train_keys) -> Recipe:
    return Recipe(
        run=RunConfig(dir=str(folder / "run")), model=ModelConfig(pretrained=str(folder)),
        data=DataConfig(path=str(folder / "data.jsonl"), index_dir=str(folder / "index")),
        train=TrainConfig(num_steps=9, global_batch_size=BATCH, **train_keys),
        fsdp=FsdpConfig(param_dtype="float64"))


def steps_of(trainer: Trainer) -> StepLoader:
    """Its steps in the order of the rows."""
    sampler = GlobalSampler(range(len(trainer.dataset)), BATCH, shuffle=False)
    return StepLoader(
        trainer.dataset, sampler, trainer.orchestrator, num_steps=len(sampler), feed=trainer._feed,
        accumulation_steps=trainer.recipe.train.accumulation_steps)


GATHER = RowGather.__call__


def in_the_prefetch_thread(gather: RowGather, row: np.ndarray) -> np.ndarray:
    """The training thread gathers nothing in a forward or backward pass."""
    assert threading.current_thread() is not threading.main_thread()
    return GATHER(gather, row)


def summed(trainer: Trainer, step) -> float:
    """The sum of the loss of a step over all ranks; its gradient is in the parameters. The trainer
    divides it before, which rounds otherwise where stock code computes in float32."""
    total = torch.zeros((), dtype=torch.float64)
    with mock.patch.object(RowGather, "__call__", in_the_prefetch_thread):
        for micro in step.micro:
            out = trainer.model(trainer.orchestrator.dispatch(micro))
            out.backward()
            total += out.detach()
    torch.distributed.all_reduce(total)
    return float(total)


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the sum of the loss, by parameter; they are taken away."""
    found = {n: torch.zeros_like(p).full_tensor() if p.grad is None else p.grad.full_tensor()
             for n, p in trainer.model.hf.named_parameters()}
    trainer.optimizer.zero_grad(set_to_none=True)
    return found


def reference(stock, rows: ConversationDataset, ids: list[int]) -> tuple[float, dict, int]:
    """(loss, gradients, targets) of stock transformers, one example after the other."""
    inputs = []
    for i in ids:
        example = rows.load(i, on_error=lambda segment, error: None)
        inputs.append({
            "input_ids": example.input_ids[None], "labels": example.labels[None],
            "attention_mask": torch.ones_like(example.input_ids)[None],
            **{k: v.double() if v.is_floating_point() else v for k, v in example.media.items()}})
    targets = sum(int((models.shifted(one) != IGNORE_INDEX).sum()) for one in inputs)
    return (*models.stock(stock, inputs), targets)


def compared(world, folder: Path, name: str, runs: list[Recipe], phase: str = "vision"
             ) -> list[dict]:
    """What the plans of the first of the runs do in a phase, step by step; every run is compared
    with stock transformers, on the first rank."""
    if name in FAMILIES:
        FAMILIES[name](transformers)  # imports a processor that would need torchvision
    stock = models.stock_of(folder)
    rows = open_dataset(runs[0].data, runs[0].model.folder, seed=0)
    exact = models.LOOSE.get(name, models.EXACT)
    wanted, seen = {}, []
    for number, run in enumerate(runs):
        trainer = Trainer(replace(run, run=RunConfig(dir=f"{run.run.dir}{number}")), world)
        try:
            for step in steps_of(trainer):
                loss = summed(trainer, step)
                found = gradients(trainer)
                if number == 0:
                    seen.append((step.micro[0].plan, step.failed))
                if world.rank:
                    continue
                if step.index not in wanted:
                    wanted[step.index] = reference(stock, rows, step.example_ids.tolist())
                want_loss, want, targets = wanted[step.index]
                assert step.num_global_targets == targets
                assert loss == pytest.approx(want_loss, rel=exact)
                assert models.difference(found, want) <= exact, step.index
        finally:
            trainer.close()
    return [{"failed": [f.example for f in failed],
             "encoded": plan.encode[phase].target_sizes.tolist(),
             "held": np.bincount(plan.feature[phase].target_rank,
                                 minlength=plan.layout.num_ranks).tolist(),
             "moved": plan.stats[phase]["moved_bytes"],
             "shared": [] if plan.pieces is None else np.unique(
                 plan.pieces.example[plan.pieces.is_shared]).tolist(),
             "examples": plan.llm.target_sizes.tolist()} for plan, failed in seen]


@pytest.mark.slow
@pytest.mark.parametrize("name, phase, ranks, shard_size", [("qwen3_vl", "vision", 4, 0), *(
    (name, phase, *groups)
    for name, phase in (
        *((name, "vision") for name in models.ADMITTED if "image" in models.kinds_of(name)),
        *((name, "audio") for name in CLIPS))
    for groups in ((1, 0), (2, 0), (3, 0), (4, 2)))])
def test_gradients_are_those_of_stock_transformers(name, phase, ranks, shard_size, tmp_path):
    """By every dispatch. Balanced where one layer of a phase is recomputed, or a part of it, and
    the loss is made by chunks. audioflamingo3 takes one clip, of up to three windows."""
    write_model(name, tmp_path, torch.float64)
    kinds = ["image"] if phase == "vision" else ["audio", *["image"] * ("omni" in name)]
    most, longest = (1, 3.0) if name == "audioflamingo3" else (3, 1.0)
    counts = [min(most, count) for count in COUNTS]
    write_counted(tmp_path, counts, kinds, longest=longest)
    run = recipe(tmp_path)
    greedy = PhaseConfig(policy="greedy")  # moves media of one size, too
    run = replace(run, fsdp=replace(run.fsdp, shard_size=shard_size),
                  balance=replace(run.balance, vision=greedy, audio=greedy))
    off = replace(run, balance=replace(run.balance, enabled=False, dispatch="load"),
                  train=replace(run.train, accumulation_steps=2))
    stored = replace(run, balance=replace(run.balance, dispatch="bytes"))
    run = replace(run, fsdp=replace(
        run.fsdp, **{f"{phase}_checkpointing": "full:1"}, llm_checkpointing="selective:1",
        loss_chunk_rows=16))
    first, second, third, last = run_ranks(compared, ranks, tmp_path, name, [run, stored, off],
                                           phase)[0]
    of_phase = sum(len(range(0, count, len(kinds))) for count in counts[:BATCH])
    assert sum(first["encoded"]) == of_phase and sum(second["encoded"]) == 1
    assert not any(third["encoded"]) and sum(last["examples"]) == 2
    if ranks > 1:
        assert first["moved"] > 0  # some media are encoded on other ranks than their example's
        assert 0 in second["encoded"] and 0 in second["held"]
        assert (0 in last["examples"]) == (ranks > 2)


def frozen_compared(
    world, folder: Path, name: str, settings: list[tuple[str, ...]], shard_size: int,
    exact: float = 1e-9, unequal: bool = False, max_shares: int = 1,
) -> dict[tuple[str, ...], list[bool]]:
    """By what is frozen, of each exchange of features whether it is in the backward pass. Gradients
    of what learns, summed over two balanced microbatches, are those of stock transformers, on the
    first rank. unequal: in some step these have unequal numbers of examples."""
    if name in FAMILIES:
        FAMILIES[name](transformers)
    stock, run = models.stock_of(folder), recipe(folder, accumulation_steps=2)
    every = {*models.named_parts(stock, (n for n, _ in stock.named_parameters()))}
    greedy = PhaseConfig(policy="greedy")
    rows, wanted = open_dataset(run.data, run.model.folder, seed=0), {}
    found: dict[tuple[str, ...], list[bool]] = {}
    sizes = set()

    def logged(*args):
        found[parts].append(torch._C._current_graph_task_id() != -1)
        return all_to_all(*args)

    for number, parts in enumerate(settings):
        found[parts] = []
        trainer = Trainer(replace(
            run, run=RunConfig(dir=f"{run.run.dir}{number}"), model=frozen(*parts, model=run.model),
            fsdp=replace(run.fsdp, shard_size=shard_size, loss_chunk_rows=16), balance=replace(
                run.balance, vision=greedy, audio=greedy,
                llm=PhaseConfig(max_shares=max_shares))), world)
        try:
            learns = [n for n, p in trainer.model.hf.named_parameters() if p.requires_grad]
            assert {*models.named_parts(stock, learns)} == every - {*parts}
            for step in steps_of(trainer):
                with mock.patch.object(exchange, "all_to_all", logged):
                    summed(trainer, step)
                got, index = gradients(trainer), step.index
                sizes.add(len({len(micro.positions) for micro in step.micro}))
                if world.rank:
                    continue
                if index not in wanted:
                    _, wanted[index], _ = reference(stock, rows, step.example_ids.tolist())
                compared = {**wanted[index], **{n: got[n] for n in learns}}
                assert models.difference(compared, wanted[index]) <= exact, (parts, index)
        finally:
            trainer.close()
    assert 2 in sizes or not unequal
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shard_size", [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2)])
def test_what_is_frozen_sends_nothing_back_and_changes_no_other_gradient(
        ranks, shard_size, tmp_path):
    """Ranks without media, a step with one image and one without any are among the steps."""
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_counted(tmp_path, COUNTS)
    every = ("vision", "connector", "llm")
    settings = [parts for n in (1, 2) for parts in combinations(every, n)]
    for found in run_ranks(frozen_compared, ranks, tmp_path, "qwen3_vl", settings, shard_size,
                           exact=1e-12, unequal=True):
        for parts, exchanges in found.items():
            assert bool(exchanges) == (ranks > 1), parts
            assert any(exchanges) == (ranks > 1 and not {"vision", "connector"} <= {*parts}), parts


def one_row_less(world, run: Recipe) -> None:
    """The encoder of rank 1 makes it of its first medium."""
    FAMILIES["qwen3_vl"](transformers)
    trainer, made = Trainer(run, world), planned.flatten

    def less(*args) -> Features:
        found = made(*args)
        return replace(found, rows=found.rows[1:], counts=found.counts - np.eye(
            1, len(found.counts), dtype=np.int64)[0])

    if world.rank == 1:
        planned.flatten = less
    for step in steps_of(trainer):
        summed(trainer, step)


@pytest.mark.slow
def test_an_encoder_that_makes_other_rows_on_one_rank_ends_all(tmp_path):
    """That rank says why; the others, which wait for its features, end with it."""
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_counted(tmp_path, COUNTS)
    with pytest.raises(RankFailure) as found:
        run_ranks(one_row_less, 3, recipe(tmp_path))
    assert found.value.errors.keys() == {0, 1, 2}
    kind, told, _ = found.value.errors[1]
    assert kind == "RuntimeError" and "rows of features of its media, where" in told


@pytest.mark.slow
def test_an_image_that_cannot_be_decoded_where_it_is_encoded(tmp_path):
    """Its example is not learnt on another rank; a rank that reads it as a placeholder does not
    tell of it twice."""
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_counted(tmp_path, COUNTS)
    run = recipe(tmp_path)
    run = replace(run, balance=replace(run.balance, vision=PhaseConfig(policy="greedy")))
    for name in ("0_1.png", "9_0.png"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # its header is whole
    runs = [replace(run, balance=replace(run.balance, dispatch=dispatch))
            for dispatch in ("load", "tensors", "bytes")]
    first, second, *_ = run_ranks(compared, 2, tmp_path, "qwen3_vl", runs, timeout_s=300.0)[0]
    assert first["failed"] == [0]
    assert second["failed"] == [1] and 0 in second["encoded"]
