"""What DistTrain and MMScale compare with, and their own relaxation: not meant for use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from orchmllm.papers.units import Problem, UnitsPlan

KEPT = 64  # choices of tp and dp, per DP of the LLM, for which a convex program may be solved


def in_proportion(problem: Problem) -> dict[str, int]:
    """name -> GPUs in proportion to the module's FLOPs, rounded down, at least 1. Raises ValueError
    for profiles without FLOPs."""
    work = {n: p.forward_flops * (1 + p.backward_units) for n, p in problem.profiles.items()}
    whole = sum(work.values())
    if not whole:
        raise ValueError("method ratio needs forward_flops in the profiles")
    return {n: max(1, int(problem.num_gpus * w / whole)) for n, w in work.items()}


def megatron(problem: Problem, llm_pp: int | None) -> tuple[int, dict[str, tuple]]:
    """(DP, name -> (tp, dp, pp)): the largest tp for the LLM, one stage before and after it whose
    GPUs each process a share of the images, the fewest stages and then the largest DP that fit.
    Raises ValueError if none fits."""
    tp, names = max(problem.tp_sizes), list(problem.profiles)
    for pp in [llm_pp] if llm_pp else range(1, problem.profiles["llm"].layers + 1):
        for dp in reversed(problem.dps):
            choice = {n: (tp, dp, pp) if n == "llm" else (1, dp * tp, 1) for n in names}
            if problem.fits(dp, choice):
                return dp, choice
    raise ValueError(problem.why_not())


def convex(problem: Problem) -> UnitsPlan:
    """The papers' Algorithm 1: x, y, z GPUs from a convex program (CVXPY) for every tp and dp, here
    in the order of a lower bound until it exceeds the best; then stages rounded down, which the
    papers leave out. Choices whose rounded plan does not fit are passed over. Raises ValueError if
    none fits."""
    import cvxpy as cp

    names, rows = list(problem.profiles), []
    for dp in problem.dps:
        steps, columns = problem.global_batch // dp - 1, []
        for name, p in problem.profiles.items():
            dps = [dp] if name == "llm" else problem.divisors(dp)
            columns.append([(tp, d, dp / d * p.total_ms(tp), dp * tp * p.total_ms(tp))
                            for tp in problem.tp_sizes for d in dps])
        total = np.zeros(())
        for column in columns:
            total = np.add.outer(total, [c[2] + steps * c[3] / problem.num_gpus for c in column])
        for at in np.argsort(total, axis=None, kind="stable")[:KEPT]:
            picked = np.unravel_index(at, total.shape)
            rows.append((float(total[picked]), dp,
                         [c[i] for c, i in zip(columns, picked, strict=True)]))
    size = cp.Variable(len(names), pos=True)  # shares of the GPUs
    work, least = cp.Parameter(len(names), pos=True), cp.Parameter(len(names), pos=True)
    slowest = cp.max(cp.multiply(work, cp.inv_pos(size)))
    program = cp.Problem(cp.Minimize(slowest), [cp.sum(size) <= 1, size >= least])
    best, relaxed = None, np.inf
    for bound, dp, picked in sorted(rows, key=lambda row: row[:2]):
        if best and bound > relaxed:
            break
        unit = sum(c[3] for c in picked)
        work.value = np.array([c[3] / unit for c in picked])
        least.value = np.array([_least_gpus(problem, n, dp, c) / problem.num_gpus
                                for n, c in zip(names, picked, strict=True)])
        if least.value.sum() > 1:
            continue
        program.solve(solver=cp.CLARABEL)
        steps = problem.global_batch // dp - 1
        relaxed = min(relaxed, sum(c[2] for c in picked)
                      + steps * float(slowest.value) * unit / problem.num_gpus)
        choice = {n: (c[0], c[1], min(int(x * problem.num_gpus / (c[0] * c[1]) + 1e-6),
                                      problem.profiles[n].layers))
                  for n, c, x in zip(names, picked, size.value, strict=True)}
        if problem.fits(dp, choice):
            made = problem.plan(dp, choice)
            best = made if best is None or made.iteration_ms < best.iteration_ms else best
    if best is None:
        raise ValueError(problem.why_not())
    return replace(best, relaxed_ms=relaxed)


def _least_gpus(problem: Problem, name: str, dp: int, picked: tuple) -> float:
    """The papers' memory constraint: DP * P / y + S / y + L / TP within a GPU; at least a stage."""
    p, (tp, d, *_) = problem.profiles[name], picked
    state, optimizer = p.state_bytes
    room = problem.gpu_bytes - dp / d * p.kept_bytes / tp
    return max(tp * d, (d * state + optimizer) / room) if room > 0 else 1e9
