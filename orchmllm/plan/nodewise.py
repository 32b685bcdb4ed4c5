"""Node-wise rearrangement: which rank processes which given batch (OrchMLLM section 5.2.2, Alg. 3).

Objective: the permutation of finished batches whose busiest rank sends least to other nodes.
`search` (C++, default) is deterministic; `cbc` and `highs` solve the paper's integer program by
CVXPY. A solver under a time limit may answer differently on two ranks: a run solves on one rank for
all (orchmllm.comm.ilp).

Invariants: the result is a permutation, so that the balance stays what it was.

The program, with the paper's slips corrected (the objective is inter-node, x has shape (d, nodes)):
x[b, k] in {0, 1}, rows sum to 1, column k to the ranks of node k, and for every source rank i of
node k: sum_b V[i, b] * (1 - x[b, k]) <= t; minimise t.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchmllm.plan.balance import as_int64, at_least_1, check_ranks, core

SOLVERS = ("search", "cbc", "highs")
CBC_SHARE = 0.7  # of the limit: it looks at its clock rarely


def assign_nodes(
    source_rank: np.ndarray,
    batch: np.ndarray,
    volume: np.ndarray,
    *,
    num_ranks: int,
    ranks_per_node: int,
    solver: str = "search",
    limit: float | None = None,
    begin: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """rank_of_batch (num_ranks,) int64, a permutation.

    source_rank, batch, volume: (m,) triplets: volume bytes of batch are on source_rank. Triplets of
    the same pair add up.
    limit: for `search` the number of swaps (default 40000), for a solver its seconds
    (default 60).
    begin: called when the program is written and the solver is about to begin.
    Raises ValueError for malformed input, an unknown solver, and RuntimeError if a
    solver finds nothing within its limit.
    """
    num_ranks = at_least_1("num_ranks", num_ranks)
    ranks_per_node = at_least_1("ranks_per_node", ranks_per_node)
    volume = as_int64("volume", volume)
    source_rank = check_ranks("source_rank", source_rank, len(volume), num_ranks)
    batch = check_ranks("batch", batch, len(volume), num_ranks)
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    if solver == "search":
        steps = 40000 if limit is None else int(limit)
        return core().nodewise(source_rank, batch, volume, num_ranks, ranks_per_node, steps)
    node_of = _solve(source_rank, batch, volume, num_ranks, ranks_per_node, solver,
                     60.0 if limit is None else float(limit), begin)
    rank_of = np.empty(num_ranks, np.int64)  # inside a node in ascending order of batch
    rank_of[np.argsort(node_of, kind="stable")] = np.arange(num_ranks)
    return rank_of


def _solve(
    source_rank: np.ndarray, batch: np.ndarray, volume: np.ndarray, num_ranks: int,
    ranks_per_node: int, solver: str, seconds: float, begin: Callable[[], None],
) -> np.ndarray:
    """(d,) node of each batch, best found by the solver."""
    try:
        import cvxpy
        import scipy.sparse
    except ImportError as error:
        raise ImportError(
            f"solver {solver!r} needs cvxpy: pip install cvxpy highspy ({error})") from error
    node = source_rank // ranks_per_node
    num_nodes = -(-num_ranks // ranks_per_node)
    sizes = np.bincount(np.arange(num_ranks) // ranks_per_node, minlength=num_nodes)
    # Scaled to about 1: solvers stop at an absolute gap.
    scale = max(1.0, float(np.bincount(source_rank, volume, num_ranks).max()))
    x = cvxpy.Variable((num_ranks * num_nodes,), boolean=True)  # x[b * num_nodes + k]
    bound = cvxpy.Variable()

    # (d, d * nodes): what stays inside the node of its source rank.
    kept = scipy.sparse.csr_matrix((volume / scale, (source_rank, batch * num_nodes + node)),
                                   shape=(num_ranks, num_ranks * num_nodes))
    total = np.bincount(source_rank, volume / scale, num_ranks)
    grid = cvxpy.reshape(x, (num_ranks, num_nodes), order="C")
    constraints = [cvxpy.sum(grid, axis=1) == 1, cvxpy.sum(grid, axis=0) == sizes,
                   total - kept @ x <= bound]
    problem = cvxpy.Problem(cvxpy.Minimize(bound), constraints)
    name, options = {"cbc": (cvxpy.CBC, {"maximumSeconds": CBC_SHARE * seconds}),
                     "highs": (cvxpy.HIGHS, {"time_limit": seconds})}[solver]
    data, chain, inverse = problem.get_problem_data(name)
    begin()
    try:
        problem.unpack_results(chain.solve_via_data(problem, data, solver_opts=options), chain,
                               inverse)
    except cvxpy.error.SolverError as error:
        raise RuntimeError(f"{solver} failed within {seconds} s: {error}") from error
    if x.value is None:
        raise RuntimeError(f"{solver} found no assignment within {seconds} s: {problem.status}")
    return np.argmax(np.round(x.value).reshape(num_ranks, num_nodes), axis=1)
