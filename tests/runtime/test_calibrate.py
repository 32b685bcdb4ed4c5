"""Costs fitted to measured steps: the integers are the same on all ranks and in checkpoints, plans
change at the same step everywhere, gradients do not change."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import RecipeError, load_recipe
from orchmllm.plan.cost import CostModel
from orchmllm.plan.fit_cost import Measured, fit_costs
from orchmllm.plan.step import PHASES
from orchmllm.trainer import Trainer
from tests.lib.gradients import Case, all_gradients, reference_gradients, worst_difference
from tests.lib.ranks import run_ranks
from tests.lib.resume import run_recipe
from tests.lib.rows import row_problems
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.training import listened

DERIVED = {"vision": CostModel(6000, 40), "audio": CostModel(9000, 10), "llm": CostModel(20000, 30)}
FIT_STEPS, PREFETCH, FITTED_FROM = 2, 2, 5  # step 0 warms up, 1 and 2 are measured, 3 and 4 planned


def batches(seed: int, balanced: bool, per_batch: int = 12, k: int = 40) -> Measured:
    """LLM batches with seconds of 0.01 + 1e-9 * (1.0 * linear + 1.5 * quadratic) + 1% noise."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers(10, 2000, per_batch) for _ in range(k)]
    linear = np.array([DERIVED["llm"].linear_part(x).sum() for x in lengths], float)
    quadratic = np.array([DERIVED["llm"].quadratic_part(x).sum() for x in lengths], float)
    if balanced:
        linear = np.full(k, linear.mean()) - (quadratic - quadratic.mean())
    seconds = .05 * 1e-9 * linear.mean() + 1e-9 * (linear + 1.5 * quadratic)
    return Measured(linear, quadratic, seconds * rng.normal(1, .005, k))


def ratio(model: CostModel) -> float:
    """Quadratic over linear part, in units of the derived model's."""
    derived = DERIVED["llm"]
    return model.quadratic / model.linear * derived.linear / derived.quadratic


@pytest.mark.parametrize("balanced", [False, True])
def test_fit_finds_the_shape(balanced: bool) -> None:
    m = batches(0, balanced)
    model = fit_costs(DERIVED, {"llm": m})["llm"]
    # The overhead looks like a linear part where all predictions are equal.
    assert ratio(model) == pytest.approx(1.5, rel=.12)
    predicted = m.linear.sum() * model.linear / 20000 + m.quadratic.sum() * model.quadratic / 30
    assert predicted == pytest.approx(m.linear.sum() + m.quadratic.sum(), rel=.02)  # same unit


def test_fit_keeps_what_times_say_nothing_of() -> None:
    flat = batches(1, True)
    noise = np.random.default_rng(0).normal(1, .3, len(flat.seconds))
    unsure = replace(flat, seconds=(flat.linear + flat.quadratic) * 1e-9 * noise)
    nothing = Measured(np.zeros(4), np.zeros(4), np.ones(4))
    fitted = fit_costs(DERIVED, {"llm": unsure, "audio": nothing})
    assert .6 < ratio(fitted["llm"]) < 1.6
    assert fitted["audio"] == DERIVED["audio"] and fitted["vision"] == DERIVED["vision"]
    scaled = fit_costs(DERIVED, {"llm": batches(0, False)}, scaled_only=["llm"])["llm"]
    assert ratio(scaled) == pytest.approx(1.0, rel=.02)
    slow = replace(flat, seconds=3 * flat.seconds)  # twice the mean speed of both phases: a factor
    both = fit_costs(DERIVED, {"vision": flat, "llm": slow}, scaled_only=["vision", "llm"])
    assert both["llm"].linear / 20000 == pytest.approx(3 * both["vision"].linear / 6000, rel=1e-3)
    with pytest.raises(ValueError, match=r"measured\['llm'\].seconds\[1\] = nan"):
        fit_costs(DERIVED, {"llm": Measured(np.ones(2), np.ones(2), np.array([1, np.nan]))})


def test_where_it_cannot_be_fitted(tmp_path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\nbalance: {enabled: false, calibrate_steps: 3}\n")
    with pytest.raises(RecipeError, match="balance.calibrate_steps.*nothing is balanced"):
        load_recipe(path)


def fitting(folder, **changes):
    base = run_recipe(folder, dtype="float64", keep_last=20, **changes)
    return replace(base, balance=BalanceConfig(ranks_per_node=2, calibrate_steps=FIT_STEPS),
                   data=replace(base.data, prefetch=PREFETCH))


def fitted(world, run) -> tuple[list, tuple | None, list[str]]:
    """([(step, loss, plan digest, costs)], the fit, lines of output)."""
    digests, said = [], listened()
    trainer = Trainer(run, world, dataset=SyntheticDataset(),
                      on_step=lambda step, row: digests.append(step.plans[0].digest))
    rows: list[dict] = []
    trainer.run(rows)
    trainer.close()
    assert not any(row_problems({"schema": 1, **row}) for row in rows)
    return [(r["step"], r["loss"], digest, json.dumps(r["costs"]))
            for r, digest in zip(rows, digests, strict=True)], trainer.progress.fitted, [
                text for text in said if not text.startswith("saved step")]  # rank 0 says that


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks, saved", [  # saved: fitted and not yet used; in use
    (2, 4), pytest.param(4, 3, marks=pytest.mark.slow),
    pytest.param(3, 6, marks=pytest.mark.slow)])
def test_fitted_costs_are_agreed_and_resumed(tmp_path, num_ranks, saved) -> None:
    run = fitting(tmp_path / "whole")
    results = run_ranks(fitted, num_ranks, run)
    assert all(r == results[0] for r in results)
    whole, fit, said = results[0]
    costs = [c for *_, c in whole]
    assert fit.first_step == FITTED_FROM
    assert costs[:FITTED_FROM] == [costs[0]] * FITTED_FROM and costs[0] != costs[FITTED_FROM]
    assert costs[FITTED_FROM:] == [costs[FITTED_FROM]] * (len(costs) - FITTED_FROM)
    assert sum(text.startswith("costs fitted, used from step 5; ") for text in said) == 1
    name = f"step_{saved:08d}"
    shutil.copytree(tmp_path / "whole" / "checkpoints" / name,
                    tmp_path / "resumed" / "checkpoints" / name)
    resumed = run_ranks(fitted, num_ranks, fitting(tmp_path / "resumed"))
    assert all(r[:2] == (whole[saved:], fit) for r in resumed)


def rolled_back(world, run) -> list[tuple]:
    """[(step, costs)] of a run whose step 6 is not finite the first time."""
    trainer, poisoned = Trainer(run, world, dataset=SyntheticDataset()), []
    forward = trainer.model.forward

    def once(batch):
        bad = trainer.progress.step == 6 and not poisoned
        poisoned.extend([6] * bad)
        return forward(batch) * (float("nan") if bad else 1.0)

    trainer.model.forward = once
    rows: list[dict] = []
    trainer.run(rows)
    trainer.close()
    return [(r["step"], json.dumps(r["costs"])) for r in rows]


@pytest.mark.dist
def test_after_a_rollback_steps_have_the_costs_of_the_first_time(tmp_path) -> None:
    (rows,) = run_ranks(rolled_back, 1, fitting(tmp_path, every_steps=4,
                                                train={"nonfinite": "rollback"}))
    assert [step for step, _ in rows] == [*range(7), *range(4, 8)]
    assert rows[7:10] == rows[4:7] and rows[4][1] != rows[5][1]


def fit_after(world, run, first: float) -> dict:
    """The fit to steps that take as long as the derived costs say, the first one `first` times."""
    trainer = Trainer(run, world, dataset=SyntheticDataset())
    for step in trainer.loader():
        seconds = 1e-9 * np.stack([step.plans[0].phase_cost(p)[1] for p in PHASES], axis=1)
        fitted = trainer.calibration.add(
            step.plans, seconds * (1.0 if step.index else first), 99)
        if fitted:
            return fitted.costs


@pytest.mark.dist
def test_the_first_step_does_not_count(tmp_path) -> None:
    usual, slow = (run_ranks(fit_after, 1, fitting(tmp_path), first) for first in (1.0, 1000.0))
    assert usual == slow


def odd_costs(trainer) -> None:
    trainer.orchestrator.change_costs({
        phase: replace(model, linear=1 + model.linear // 7, quadratic=9 * model.quadratic)
        for phase, model in trainer.orchestrator.spec.costs.items()}, 0)


@pytest.mark.slow  # test_invariance.py has plans of all kinds
@pytest.mark.dist
def test_gradients_do_not_depend_on_costs() -> None:
    base = Case(recipe(balance=BalanceConfig(ranks_per_node=2)))
    got = run_ranks(all_gradients, 3, {"derived": base, "odd": replace(base, mutate=odd_costs)})[0]
    loss, grads = reference_gradients(base)
    for case in ("derived", "odd"):
        assert got[case][0] == pytest.approx(loss, rel=1e-12)
        assert worst_difference(got[case][1], grads)[0] <= 1e-9
