"""Runs in which something fails, and the plain loop over single examples in which what failed was
never there: no ranks, no packing, no plan, no checkpoints. float64."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch

from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.data.sampler import make_sampler
from orchmllm.runtime.build import build_dataset
from orchmllm.trainer import Trainer
from tests.lib.commands import TINY, demo_of
from tests.lib.gradients import example_loss, plain_model
from tests.lib.ranks import run_ranks

UNUSABLE = {3, 11}  # rows of the demo corpus whose clip, or one of two images, is damaged
BATCH, STEPS = 6, 5
State = dict[str, tuple[np.ndarray, ...]]  # name -> weight, moments and Adam's count of steps


@dataclass(frozen=True)
class Failure:
    """What befalls a run. poisoned: steps whose loss (even steps) or gradient (odd steps) is not
    finite on the last rank the first time that they run. dies_in: a step in whose last microbatch
    the run ends with an error on all ranks; it is started once more. left_out: steps of which the
    weights show nothing in the end."""

    nonfinite: str = "raise"
    poisoned: frozenset[int] = frozenset()
    dies_in: int = -1
    left_out: frozenset[int] = frozenset()


FAILURES = {  # each beside the damaged media
    "resume": Failure(dies_in=2),
    "skip": Failure("skip", frozenset({1, 2}), dies_in=4, left_out=frozenset({1, 2})),
    # Both steps come after one checkpoint, and a third run goes on from a later one.
    "rollback": Failure("rollback", frozenset({2, 3}), dies_in=4, left_out=frozenset({2, 3})),
}


def damaged_corpus(demo: Path, folder: Path) -> Path:
    """A copy of the demo corpus; what is damaged has sound headers and cannot be decoded."""
    shutil.copytree(demo, folder)
    for name in ("audio/000003.flac", "images/000011_1.png"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
    return folder


def run_recipe(corpus: Path, folder: Path, failure: Failure, dispatch: str,
               accumulation: int = 2) -> Recipe:
    return load_recipe("recipes/demo.yaml", [
        *TINY, *demo_of(corpus), f"data.index_dir={corpus / 'none'}", f"run.dir={folder}",
        f"balance.dispatch={dispatch}", f"train.nonfinite={failure.nonfinite}",
        # By these a damaged image moves, of an example with another place in its microbatch.
        "run.seed=1", "balance.vision.policy=greedy", "balance.audio.policy=greedy",
        f"train.global_batch_size={BATCH}", f"train.accumulation_steps={accumulation}",
        f"train.num_steps={STEPS}", "train.lr=1e-2", "train.weight_decay=0.1",
        "train.max_grad_norm=3",  # binds in some steps
        "fsdp.param_dtype=float64", "checkpoint.every_steps=2", "checkpoint.asynchronous=false"])


class Died(Exception):
    """The run was to die here."""


def _trainer(world, run: Recipe, failure: Failure, ran: set[int]) -> Trainer:
    """ran: steps that were begun before."""
    trainer, microbatches = Trainer(run, world), count(1)
    forward = trainer.model.forward

    def faulty(batch):
        step, out = trainer.progress.step, forward(batch)
        first, last = step not in ran, next(microbatches) % run.train.accumulation_steps == 0
        if last:
            ran.add(step)
        if first and last and step == failure.dies_in:
            raise Died
        bad = first and last and step in failure.poisoned and world.rank == world.world_size - 1
        if bad and step % 2:
            out.register_hook(lambda g: g * float("inf"))
        return out * (float("nan") if bad and step % 2 == 0 else 1.0)

    trainer.model.forward = faulty
    return trainer


def states_after(world, runs: dict[str, tuple[Recipe, Failure]]) -> dict[str, State]:
    """The state at the end of each run; it is gathered on all ranks, returned by rank 0."""
    return {name: _state_after(world, *one) for name, one in runs.items()}


def _state_after(world, run: Recipe, failure: Failure) -> State:
    ran: set[int] = set()
    for _ in range(2):
        trainer = _trainer(world, run, failure, ran)
        try:
            trainer.run()
            break
        except Died:
            trainer.model.forward = None
        finally:
            trainer.close()
    model, state = trainer.model, trainer.optimizer.state
    out = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        moments = [state[p][key].full_tensor().numpy() for key in ("exp_avg", "exp_avg_sq")]
        out[name] = (p.detach().full_tensor().numpy(), *moments,
                                 np.asarray(state[p]["step"], float))
    return out if world.rank == 0 else {}


def reference_states(run: Recipe, without: Sequence[frozenset[int]], unusable: set[int]
                     ) -> dict[frozenset[int], State]:
    """The same of runs that never had some steps, by these, and the examples `unusable`."""
    return run_ranks(_reference_states, 1, run, without, unusable)[0]


def _reference_states(world, run: Recipe, without: Sequence[frozenset[int]], unusable: set[int]
                      ) -> dict[frozenset[int], State]:
    return {steps: _reference_state(world, run, steps, unusable) for steps in without}


def _reference_state(world, run: Recipe, left_out: frozenset[int], unusable: set[int]) -> State:
    model, train = plain_model(run), run.train
    learning = {f"hf.{name}": p for name, p in model.named_parameters() if p.requires_grad}
    dataset = build_dataset(replace(run, data=replace(run.data, strict=True)))
    table = model.get_input_embeddings().weight
    decayed = [p for p in learning.values() if p.dim() > 1 and p is not table]
    rest = [p for p in learning.values() if p.dim() <= 1 or p is table]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": train.weight_decay},
         {"params": rest, "weight_decay": 0.0}], betas=(train.beta1, train.beta2), foreach=False)
    sampler = make_sampler(dataset, range(len(dataset)), BATCH, seed=run.run.seed, data=run.data)
    for step in sorted({*range(STEPS)} - left_out):
        losses = [example_loss(model, dataset, int(i)) for i in sampler.batch(step)
                  if i not in unusable]
        for p in learning.values():
            p.grad = torch.zeros_like(p)
        (sum(x for x, _ in losses) / sum(n for _, n in losses)).backward()
        torch.nn.utils.clip_grad_norm_(learning.values(), train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, train)
        optimizer.step()
    return {name: tuple(x.detach().numpy().astype(float) for x in (
        p, *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq", "step"))))
        for name, p in learning.items()}


def _rate(step: int, train) -> float:
    """Three steps of warm-up, then half a cosine down to a tenth."""
    if step < 3:
        return train.lr * (step + 1) / 3
    return train.lr * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * (step - 3) / (train.num_steps - 3))))


def differences(got: State, want: State) -> list[float]:
    """Largest difference over all parameters of the weights, both moments and the counts."""
    assert got.keys() == want.keys()
    return [max(float(np.abs(got[name][k] - want[name][k]).max()) for name in want)
            for k in range(4)]
