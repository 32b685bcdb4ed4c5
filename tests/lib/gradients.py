"""Gradients of one step, computed by the real trainer on any number of ranks, and by a plain loop
over single examples that shares nothing with the orchestrator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from orchmllm.batch import IGNORE_INDEX, SequenceLengths
from orchmllm.config.recipe import Recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.launch import World
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.layout import AUDIO, ENCODERS, TEXT, VISION
from orchmllm.plan.step import build_plan, plan_step
from orchmllm.sharding.init import seed_weights
from orchmllm.trainer import Trainer
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
        accumulation_steps=case.accumulation_steps, prefetch=case.recipe.data.prefetch)
    (step,) = loader
    loss_sum = trainer._accumulate(step)
    loss = trainer._gather([float(loss_sum)]).sum() / max(step.num_global_targets, 1)
    grads = {}
    for name, p in trainer.model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, f"{name} has no gradient"
            grads[name] = p.grad.full_tensor().numpy()
    return float(loss), grads


def all_gradients(world: World, cases: dict[str, Case]) -> dict[str, tuple]:
    """step_gradients of each case, one after the other; the arrays come from rank 0."""
    out = {}
    for name, case in cases.items():
        loss, grads = step_gradients(world, case)
        out[name] = (loss, grads if world.rank == 0 else None)
    return out


def reference_gradients(case: Case) -> tuple[float, dict[str, np.ndarray]]:
    """The same from one example at a time, in one process: no packing, no plan, no FSDP."""
    torch.manual_seed(0)
    torch.manual_seed(case.recipe.run.seed)
    model = MultimodalModel(case.recipe.model).to(getattr(torch, case.recipe.fsdp.param_dtype))
    if case.recipe.fsdp.meta_init:
        seed_weights(model, case.recipe.run.seed)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for i in range(BATCH):
        loss, count = example_loss(model, case.dataset, i)
        total, targets = total + loss, targets + count
    loss = total / max(targets, 1)
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad
             for n, p in model.named_parameters() if p.requires_grad}
    return float(loss.detach()), {n: g.numpy() for n, g in grads.items()}


def example_loss(model: MultimodalModel, dataset: SyntheticDataset, i: int):
    layout, example = dataset.layout(i), dataset.load(i)
    parts, start = [], 0
    for k, modality in enumerate(layout.modality):
        n = int(layout.num_tokens[k])
        if modality == TEXT:
            parts.append(model.llm.embed_tokens(example.token_ids[start: start + n]))
        elif modality == VISION:
            parts.append(model.vision(example.media[k], layout.grid[k: k + 1],
                                      SequenceLengths.from_lengths(layout.rows[k: k + 1])))
        else:
            assert modality == AUDIO
            parts.append(model.audio(example.media[k],
                                     SequenceLengths.from_lengths(layout.rows[k: k + 1])))
        start += n
    x = torch.cat(parts)
    loss = model.llm(x, torch.arange(len(x)), SequenceLengths.from_lengths([len(x)]),
                     example.labels)
    return loss, int((example.labels != IGNORE_INDEX).sum())


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
