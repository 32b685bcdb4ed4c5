"""The integer program from a recipe: solved on one rank, the same plan on all; a solver that fails
does so on all of them, before the model runs."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import orchmllm.config.balance as section
from orchmllm.comm import ilp
from orchmllm.comm.ilp import solve_program
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import RecipeError, load_recipe
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PhasePolicy
from orchmllm.plan.balance import balance
from orchmllm.plan.nodewise import assign_nodes
from orchmllm.tools.predict.workload import sample_layout
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe

needs_solvers = pytest.mark.skipif(
    any(section.importlib.util.find_spec(p) is None for p in ("cvxpy", "highspy", "cylp")),
    reason="the extra ilp is not installed")


def permuted(solver: str, **options) -> BalanceConfig:
    phase = PhasePolicy("greedy", nodewise=True)
    return BalanceConfig(ranks_per_node=2, vision=phase, audio=phase, llm=phase,
                         nodewise_solver=solver, **options)


def run_of(balance: BalanceConfig, accumulation_steps: int = 1):
    base = recipe(balance=balance)
    return replace(base, data=replace(base.data, prefetch=1),
                   train=replace(base.train, num_steps=1, batch_size=3,
                                 accumulation_steps=accumulation_steps))


def killed(*problem, **options):
    """A solver whose process is gone at once, as if the kernel had wanted its memory."""
    run = subprocess.run
    with mock.patch.object(subprocess, "run", lambda _, **how: run(["sh", "-c", "kill -9 $$"],
                                                                   **how)):
        return solve_program(*problem, **options)


def broken(*problem, **options):
    raise RuntimeError("no licence")


SOLVERS = {"raises": broken, "killed": killed}


def digests_and_losses(world, run, solver: str = "") -> tuple[list, str]:
    """([(plan digests, loss) of each step], the error); solver: of SOLVERS, on rank 0."""
    trainer = Trainer(run, world, dataset=SyntheticDataset())
    if solver and world.rank == 0:
        trainer.orchestrator.programs.solve = SOLVERS[solver]
    calls = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        return [([p.digest for p in step.plans], trainer.train_step(step)["loss"])
                for step in trainer.loader()], ""
    except Exception as e:
        assert not calls
        return [], f"{type(e).__name__}: {e}"


@pytest.mark.dist
@needs_solvers
@pytest.mark.slow
@pytest.mark.parametrize("solver, num_ranks, accumulation_steps", [
    pytest.param("highs", 4, 1, marks=pytest.mark.slow), ("cbc", 3, 2)])
def test_one_rank_solves_for_all(solver, num_ranks, accumulation_steps):
    results = run_ranks(digests_and_losses, num_ranks, run_of(
        permuted(solver, nodewise_limit_s=20.0), accumulation_steps))
    assert all(r == results[0] for r in results) and len(results[0][0]) == 1
    want = run_ranks(digests_and_losses, num_ranks,
                     run_of(permuted("search"), accumulation_steps))[0]
    assert [x for _, x in results[0][0]] == pytest.approx([x for _, x in want[0]], rel=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize("solver, text", [
    pytest.param("raises", "rank 0 (also ranks [1, 2]) failed: RuntimeError: no licence",
                 marks=pytest.mark.slow),
    ("killed", "the process of solver 'highs' died (exit code -9"),
])
def test_a_solver_that_fails_fails_on_all_ranks(solver, text):
    results = run_ranks(digests_and_losses, 3,
                        run_of(permuted("highs", nodewise_limit_s=0.01)), solver)
    assert all(r == results[0] for r in results)
    assert results[0][1].startswith("RemoteError: step 0: ") and text in results[0][1]


@needs_solvers
def test_a_child_process_answers_like_the_library():
    rng = np.random.default_rng(0)
    options = {"num_ranks": 6, "ranks_per_node": 2, "solver": "highs", "limit": 20.0}
    problem = rng.integers(0, 6, 30), rng.integers(0, 6, 30), rng.integers(0, 9, 30)
    assert np.array_equal(solve_program(*problem, **options), assign_nodes(*problem, **options))
    with pytest.raises(RuntimeError, match=r"ValueError: batch\[0\] = 7 is not a rank of 6"):
        solve_program(np.array([0]), np.array([7]), np.array([1]), **options)


@needs_solvers
def test_a_solver_that_ignores_its_limit_is_ended(monkeypatch):
    """CBC looks at its clock rarely: it needs a tenth of a second here, whatever its limit."""
    layout = sample_layout(MODELS["84b"], num_ranks=128, batch_size=60, seed=0)
    weight, home = layout.tokens_per_example, layout.rank_of_example
    problem = home, balance(weight, num_ranks=128, policy="greedy", home=home), weight
    text = r"1\.2 times its limit of 0\.01 s and was ended; raise balance\.nodewise_limit_s"
    few = [part[:20] % 8 for part in problem]
    found = solve_program(*few, num_ranks=8, ranks_per_node=4, solver="cbc", limit=20.0)
    assert sorted(found) == list(range(8))
    with pytest.raises(RuntimeError, match=text):
        solve_program(*problem, num_ranks=128, ranks_per_node=8, solver="cbc", limit=.01)
    monkeypatch.setattr(ilp, "GRACE_S", 1e-3)  # it does not get to begin
    with pytest.raises(RuntimeError, match="was ended"):
        solve_program(*few, num_ranks=8, ranks_per_node=4, solver="cbc", limit=20.0)


def test_a_recipe_names_what_is_missing(tmp_path, monkeypatch):
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\nmodel: {config: x}\nbalance: {nodewise_solver: highs, "
                    "llm: {policy: greedy, nodewise: true}}\n")
    assert load_recipe(path).balance.num_programs == 1
    monkeypatch.setattr(section.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="needs cvxpy and highspy: pip install cvxpy highspy, "):
        load_recipe(path)


@needs_solvers
def test_a_recipe_bounds_the_time(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\nbalance: {nodewise_solver: cbc, "
                    "llm: {policy: greedy, nodewise: true}}\n")
    with pytest.raises(RecipeError, match="may take 300 s.*below launch.stall_timeout_s"):
        load_recipe(path, ["train.accumulation_steps=5"])
    with pytest.raises(RecipeError, match="nothing would be solved"):
        load_recipe(path, ["balance.llm.nodewise=false"])
