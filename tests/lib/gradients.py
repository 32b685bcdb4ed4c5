"""Gradients of one step, computed by the real trainer on any number of ranks, and by a plain loop
over single examples that shares nothing with the orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.launch import World
from orchmllm.models.families import model_class, read_config
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import build_plan, plan_step
from orchmllm.sharding.load_whole import load_whole
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset

BATCH = 12  # examples per step, whatever the number of ranks
# Of the examples of a step the last ones alone have images and clips: without balancing the first
# ranks have none, of whatever number of ranks above one.
FEW_MEDIA = SyntheticDataset(kinds=[*["TT"] * 9, "TVT", "TAT", "VAT"], size=BATCH)


@dataclass(frozen=True)
class Case:
    """One way to compute the same gradients. mutate(trainer) breaks something on purpose."""

    recipe: Recipe
    dataset: SyntheticDataset = field(default_factory=SyntheticDataset)
    accumulation_steps: int = 1
    planner: Callable = plan_step
    mutate: Callable[[Trainer], None] | None = None
    sampler: Callable = partial(GlobalSampler, range(BATCH), BATCH, shuffle=False)


def step_gradients(world: World, case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, full gradient by parameter name) of the first step."""
    torch.manual_seed(0)
    trainer = Trainer(case.recipe, world, dataset=case.dataset)
    trainer.orchestrator.planner = case.planner
    if case.mutate is not None:
        case.mutate(trainer)
    loader = StepLoader(
        case.dataset, case.sampler(), trainer.orchestrator, num_steps=1,
        accumulation_steps=case.accumulation_steps, prefetch=case.recipe.data.prefetch,
        feed=trainer._feed)
    (step,) = loader
    loss_sum = trainer._accumulate(step)
    loss = trainer._gather([float(loss_sum)]).sum() / max(step.num_global_targets, 1)
    grads = {}
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:  # no gradient: of a tower for which no rank has anything
            grads[name] = (np.zeros(p.shape) if p.grad is None else p.grad.full_tensor().numpy())
    return float(loss), grads


def all_gradients(world: World, cases: dict[str, Case]) -> dict[str, tuple]:
    """step_gradients of each case, one after the other; the arrays come from rank 0."""
    out = {}
    for name, case in cases.items():
        loss, grads = step_gradients(world, case)
        out[name] = (loss, grads if world.rank == 0 else None)
    return out


def reference_gradients(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """The same of the class of transformers, from one example at a time, in one process: no
    packing, no plan, no FSDP."""
    return run_ranks(_reference, 1, case)[0]


def plain_model(recipe: Recipe) -> torch.nn.Module:
    """The class of transformers with the weights that are drawn for a run, in a group of one."""
    model, dtype = recipe.model, recipe.fsdp.param_dtype
    drawn = load_whole(Path(model.folder), model, FsdpConfig(param_dtype=dtype),
                       torch.device("cpu"), dict.fromkeys(PHASES, "none"), seed=recipe.run.seed)
    plain = model_class(config := read_config(Path(model.folder)))._from_config(
        config, dtype=getattr(torch, dtype)).train()
    with torch.no_grad():
        for (name, p), (other, q) in zip(plain.named_parameters(), drawn.hf.named_parameters(),
                                         strict=True):
            assert name == other
            p.copy_(q.full_tensor()).requires_grad_(q.requires_grad)
    return plain


def _reference(world: World, case: Case) -> tuple[float, dict[str, np.ndarray]]:
    plain = plain_model(case.recipe)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for i in range(BATCH):
        loss, count = example_loss(plain, case.dataset, i)
        total, targets = total + loss, targets + count
    loss = total / max(targets, 1)
    loss.backward()
    grads = {f"hf.{n}": torch.zeros_like(p) if p.grad is None else p.grad
             for n, p in plain.named_parameters() if p.requires_grad}
    return float(loss.detach()), {n: g.numpy() for n, g in grads.items()}


def example_loss(plain, dataset: SyntheticDataset, i: int):
    example = dataset.load(i)
    logits = plain(input_ids=example.input_ids[None], attention_mask=torch.ones_like(
        example.input_ids)[None], **{
            n: v.to(plain.dtype) if v.is_floating_point() else v
            for n, v in example.media.items()}).logits[0, :-1]
    labels = example.labels[1:]
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, int((labels != IGNORE_INDEX).sum())


def worst_difference(got: dict, want: dict) -> tuple[float, str]:
    """max over tensors of (||g - g_ref|| - 1e-15) / ||g_ref||, and where."""
    assert got.keys() == want.keys()
    worst = (0.0, "")
    for name, g in got.items():
        error = max(float(np.linalg.norm(g - want[name])) - 1e-15, 0.0)
        scale = float(np.linalg.norm(want[name]))
        if error:
            worst = max(worst, (error / scale if scale else float("inf"), name))
    return worst


@dataclass(frozen=True)
class RandomPlanner:
    """A planner that puts every item on a random rank."""

    seed: int

    def __call__(self, layout, spec):
        rng = np.random.default_rng([self.seed, layout.num_examples])
        encode = {m: rng.integers(0, layout.num_ranks, len(layout.segments[code]))
                  for m, code in ENCODERS.items()}
        return build_plan(layout, encode, rng.integers(0, layout.num_ranks, layout.num_examples),
                          spec)
