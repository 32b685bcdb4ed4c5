"""`plan_batches`: the planner of a step for trainers of other projects, as lists of indices.

Objective: that of orchmllm.plan.microbatches, for one phase. An example, or a group of examples
that stay together, is one item with two numbers: its cost, which is balanced, and its tokens, which
max_tokens limits. The planner takes both where an item has its cost in an encoder, and its tokens
in an LLM that costs nothing.

Invariants: every example is in the plan once, those of a group in one microbatch of one rank, and
no rank has more than max_tokens in a microbatch, or ValueError says why. Costs in another unit give
the same plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from orchmllm.plan.assign import BalancePolicy, PhasePolicy, PlanSpec
from orchmllm.plan.balance import CapError, as_int64, at_least_1, balance, default_home
from orchmllm.plan.cost import CostModel, in_fine_unit
from orchmllm.plan.layout import TEXT, VISION, BatchLayout
from orchmllm.plan.microbatches import plan_microbatches


def plan_batches(
    lengths: Sequence[int], num_ranks: int, *, num_microbatches: int | None = None,
    max_tokens: int | None = None, cost: CostModel | Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None, equal_size: bool = False,
) -> list[list[list[int]]]:
    """Which examples each rank processes in each microbatch of a step: `plan[microbatch][rank]` is
    an ascending list of indices, and every index is in one list. All ranks meet in every
    microbatch, so what is kept low is the sum over microbatches of the slowest rank's cost. A pure
    function: equal arguments give equal plans on all ranks. It loads no torch.

    lengths: (n,) whole numbers, the tokens of each example (or its cost, where nothing else is
    given). num_microbatches: of the step; default 1, or with max_tokens as few as it allows.
    max_tokens: no rank gets more tokens in a microbatch. cost: what is balanced instead of the
    lengths: a CostModel of the length, or (n,) numbers >= 0, in any unit. groups: (n,) keys, such
    as the prompt of each answer; examples of equal keys are in one list. equal_size: all lists have
    equally many examples; for one microbatch without max_tokens.

    Every rank gets an example in every microbatch where there are as many examples (or groups) as
    lists: the ranks of FSDP and DDP communicate in every microbatch and wait for a rank that leaves
    one out. Where there are fewer, some lists are empty, and their ranks have to process something
    that counts nothing.

    Raises ValueError for malformed arguments, an example (or group) that is longer than max_tokens,
    a num_microbatches for which no plan within max_tokens is found, and sizes that cannot be equal.
    """
    num_ranks, lengths = at_least_1("num_ranks", num_ranks), as_int64("lengths", lengths)
    for name, given in ("num_microbatches", num_microbatches), ("max_tokens", max_tokens):
        if given is not None:
            at_least_1(name, given)
    item, first = _items(groups, len(lengths))
    costs = _whole(np.bincount(item, _costs(cost, lengths), len(first)))
    if equal_size:
        slot = _equal(costs, np.bincount(item), num_ranks, num_microbatches, max_tokens)
    else:
        tokens = np.zeros(len(first), np.int64)
        np.add.at(tokens, item, lengths)
        try:
            slot = _slots(tokens, costs, num_ranks, num_microbatches, max_tokens)
        except CapError as error:
            longest = first[tokens.argmax()]
            name = f"example {longest}" if groups is None else f"the group {groups[longest]!r}"
            raise ValueError(_why(f"{name} has {tokens.max()} tokens", tokens, num_ranks,
                                  num_microbatches, max_tokens)) from error
    count = num_microbatches or 1 + int(slot.max(initial=0)) // num_ranks
    plan: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(count)]
    for example, at in enumerate(slot[item].tolist()):
        plan[at // num_ranks][at % num_ranks].append(example)
    return plan


def _why(
    longest: str, tokens: np.ndarray, num_ranks: int, num_microbatches: int | None, max_tokens: int,
) -> str:
    """Why there is no plan. longest: what it says of the longest item."""
    if tokens.max() > max_tokens:
        return f"{longest}, more than max_tokens = {max_tokens}: leave it out, or raise max_tokens"
    return (f"max_tokens = {max_tokens}: no plan was found for {tokens.sum()} tokens in "
            f"{num_microbatches} microbatches of {num_ranks} ranks ({longest}): give more "
            "microbatches, or a larger max_tokens")


def _items(groups: Sequence[Hashable] | None, n: int) -> tuple[np.ndarray, list[int]]:
    """((n,) item of each example, the first example of each item). Raises ValueError."""
    if groups is None:
        return np.arange(n), list(range(n))
    if len(groups) != n:
        raise ValueError(f"groups has {len(groups)} entries, lengths {n}")
    found: dict[Hashable, int] = {}
    keys = [key.item() if hasattr(key, "item") else key for key in groups]  # tensors hash by id
    item = np.array([found.setdefault(key, len(found)) for key in keys], np.int64)
    return item, np.unique(item, return_index=True)[1].tolist()


def _costs(cost: CostModel | Sequence[float] | None, lengths: np.ndarray) -> np.ndarray:
    """(n,) float64 cost of each example. Raises ValueError."""
    if cost is None:
        return lengths.astype(float)
    if isinstance(cost, CostModel):
        if cost.padded:
            raise ValueError("cost.padded: the cost of a rank has to be the sum of its examples'")
        return in_fine_unit({"cost": cost})["cost"](lengths).astype(float)
    values = np.asarray(cost, float)
    if values.shape != lengths.shape:
        raise ValueError(f"cost has the shape {values.shape}, lengths {lengths.shape}")
    for i in np.flatnonzero(~((values >= 0) & np.isfinite(values)))[:1].tolist():
        raise ValueError(f"cost[{i}] = {values[i]}: must be a finite number >= 0")
    return values


def _whole(costs: np.ndarray) -> np.ndarray:
    """(n,) int64 >= 1 in proportion to costs (n,), scaled by a power of two: exact, and so the same
    on every machine. n times their sum has less than 62 bits."""
    bits = min(40, 60 - 2 * len(costs).bit_length()) - int(np.frexp(costs.max(initial=0.0))[1])
    return np.maximum(np.ldexp(costs, bits), 1).astype(np.int64)


def _equal(
    costs: np.ndarray, sizes: np.ndarray, num_ranks: int, num_microbatches: int | None,
    max_tokens: int | None,
) -> np.ndarray:
    """(n,) rank of each item, equally many on each. sizes: (n,) examples of each item. An item more
    costs more than all differences of cost. Raises ValueError."""
    if max_tokens or num_microbatches not in (None, 1):
        raise ValueError("equal_size is for one microbatch without max_tokens: leave out "
                         "num_microbatches and max_tokens")
    if len({*sizes.tolist()}) > 1 or len(sizes) % num_ranks:
        raise ValueError(f"equal_size: {len(sizes)} items of {sizes.min()} to {sizes.max()} "
                         f"examples cannot be divided equally among {num_ranks} ranks")
    costs = costs + 1 + costs.sum()
    return balance(costs, num_ranks=num_ranks, policy="least_move", tolerance=0.0)


def _slots(
    tokens: np.ndarray, costs: np.ndarray, num_ranks: int, num_microbatches: int | None,
    max_tokens: int | None,
) -> np.ndarray:
    """(n,) microbatch * num_ranks + rank of each item. Raises CapError."""
    n = len(tokens)
    table = np.zeros((n, 2, 7), np.int64)
    table[:, 0, [0, 2]] = np.column_stack([np.full(n, VISION), costs])
    table[:, 1, [0, 3]] = np.column_stack([np.full(n, TEXT), tokens])
    layout = BatchLayout.from_table(
        np.arange(n), np.zeros(n, np.int64), np.full(n, 2), table.reshape(2 * n, 7),
        np.bincount(default_home(n, num_ranks), minlength=num_ranks))
    spec = PlanSpec(
        costs={"vision": CostModel(1, 0, unit=1), "llm": CostModel(0, 0)},
        row_bytes={"vision": 0}, feature_bytes=0, ranks_per_node=num_ranks, fills=True,
        balance=BalancePolicy(whole_examples=True, llm=PhasePolicy(
            max_rank_tokens=max_tokens or 0)))
    slot = np.zeros(n, np.int64)
    for k, (at, plan) in enumerate(
            plan_microbatches(layout, spec, num_microbatches or int(not max_tokens))):
        slot[at[plan.llm.order]] = k * num_ranks + np.repeat(
            np.arange(num_ranks), plan.llm.target_sizes)
    return slot
