"""Batch post-balancing: which rank processes which item (OrchMLLM section 5.1, Appendix A).

Objective: that of the policy, as the table POLICIES says it: a low cost of the slowest rank, and
with `least_move` and `quadratic` as little movement as a tolerance of that cost allows.

Invariants:
- Every item gets one rank. The result is exact in integers, with ties to the lowest index, and
  takes no clock, so that it is the same on all ranks.
- An option has its meaning or is refused; a cap is kept or CapError is raised.
- The C++ core does what its slow twins in tests/twins/ do.

`balance` is the one entry point: it checks its input and calls the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

DEFAULT_TOLERANCE = 0.001  # smaller ones cost far more planning time than they gain
MAX_SUM = 2**62  # room for the sum of two loads in int64
NOTHING = np.zeros(0, np.int64)


class Items(NamedTuple):
    """What a policy assigns: n items, checked, on num_ranks ranks.

    weight (n,): the cost that adds up on a rank; home (n,): where each item is. padded_cost (n,),
    move_cost (n,), held (num_ranks,): empty where they are not given. tolerance: the accepted
    excess."""

    weight: np.ndarray
    home: np.ndarray
    num_ranks: int
    ranks_per_node: int
    tolerance: float
    padded_cost: np.ndarray
    move_cost: np.ndarray
    held: np.ndarray


@dataclass(frozen=True)
class Policy:
    """A row of POLICIES.

    minimises: the cost of a rank that it keeps low; l: the length of an item, or its `cost` if that
    is given. assign: items -> (n,) the rank of each. options: those of `balance` that it honours;
    any other that is given raises. `home` and `ranks_per_node` are taken by all. needs: the option
    that has to be given. padded: a rank pads its items to the longest, so that its cost is no sum
    over them. node_blind: it does not look at nodes, so that its batches may be permuted over the
    ranks (`nodewise`)."""

    minimises: str
    assign: Callable[[Items], np.ndarray]
    options: frozenset[str] = frozenset()
    needs: str = ""
    padded: bool = False
    node_blind: bool = False


class CapError(ValueError):
    """No plan was found in which every rank holds at most max_rank_tokens."""


def core() -> ModuleType:
    """The compiled module `orchmllm._core`; ImportError with the cure when it was not built."""
    try:
        from orchmllm import _core
    except ImportError as error:
        raise ImportError(
            "orchmllm._core is not built: run `python setup.py build_ext --inplace` in the "
            f"checkout (or `pip install -e .`): {error}"
        ) from error
    return _core


def _least_move(items: Items) -> np.ndarray:
    cap = load_cap(items.weight, items.num_ranks, items.tolerance, items.held)
    return core().least_move(items.weight, items.home, items.move_cost, items.num_ranks,
                             items.ranks_per_node, cap, items.held)


_ADDITIVE = frozenset({"tolerance", "cost", "move_cost", "max_rank_tokens", "held",
                       "held_lengths"})
POLICIES: dict[str, Policy] = {
    "none": Policy("nothing moves", lambda items: items.home.copy()),
    "greedy": Policy(
        "sum(l), longest first (Algorithm 1)",
        lambda items: core().greedy(items.weight, items.home, items.num_ranks),
        frozenset({"cost", "max_rank_tokens"}), node_blind=True),
    "padded": Policy(
        "count * max(l), optimal (Algorithm 2)",
        lambda items: core().padded(items.weight, items.home, items.num_ranks),
        frozenset({"cost"}), padded=True, node_blind=True),
    "quadratic": Policy(
        "sum(cost) with cost = l + lambda * l^2 (Algorithm 4's objective), as `least_move`",
        _least_move, _ADDITIVE, needs="cost"),
    "conv_transformer": Policy(
        "sum(l) + count * max(padded_cost) (Algorithm 5's objective)",
        lambda items: core().conv_transformer(items.weight, items.padded_cost, items.home,
                                              items.num_ranks),
        frozenset({"cost", "padded_cost"}), needs="padded_cost", padded=True, node_blind=True),
    "least_move": Policy(
        "sum(l) within `tolerance` of its lower bound, moving as little as possible",
        _least_move, _ADDITIVE),
}


def as_int64(name: str, values: object, size: int | None = None) -> np.ndarray:
    """(n,) int64 C-contiguous array of non-negative integers whose sum fits; raises ValueError
    naming the argument and, where one entry is at fault, its index."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {array.shape}")
    if size is not None and len(array) != size:
        raise ValueError(f"{name} has {len(array)} entries, expected {size}")
    if len(array) == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, got {array.dtype}{_first_bad(array)}")
    if array.dtype == np.uint64 and int(array.max()) > MAX_SUM:
        raise ValueError(f"{name}[{int(array.argmax())}] = {array.max()} overflows int64")
    array = np.ascontiguousarray(array, np.int64)
    if int(array.min()) < 0:
        index = int(np.argmax(array < 0))
        raise ValueError(f"{name}[{index}] = {array[index]} is negative")
    # The float sum only decides near 2**62, where its relative error of 1e-16 is irrelevant.
    if float(array.sum(dtype=np.float64)) >= MAX_SUM:
        raise ValueError(
            f"the sum of {name} overflows; the largest entry is {name}[{int(array.argmax())}] = "
            f"{array.max()}"
        )
    return array


def _first_bad(array: np.ndarray) -> str:
    """Where a non-integer array goes wrong first, for the message."""
    if array.dtype.kind == "f":
        bad = ~np.isfinite(array) | (array != np.floor(array))
        index = int(np.argmax(bad)) if bad.any() else 0
        return f": {array[index]} at index {index}"
    return f": {array.flat[0]!r} at index 0"


def default_home(n: int, num_ranks: int) -> np.ndarray:
    """(n,) int64: equal contiguous shares, as a global batch is sampled."""
    return np.arange(n, dtype=np.int64) * num_ranks // max(n, 1)


def check_ranks(name: str, values: object, size: int, num_ranks: int) -> np.ndarray:
    """(size,) int64 array of ranks in [0, num_ranks); ValueError naming the first one outside."""
    array = as_int64(name, values, size)
    if len(array) and int(array.max()) >= num_ranks:
        index = int(np.argmax(array >= num_ranks))
        raise ValueError(f"{name}[{index}] = {array[index]} is not a rank of {num_ranks}")
    return array


def at_least_1(name: str, value: object) -> int:
    """The value as a Python integer. Raises ValueError naming it where it is none, below 1, or of
    more than 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not (
            1 <= value < 2**63):
        raise ValueError(f"{name} must be an integer >= 1 and below 2**63, got {value!r}")
    return int(value)


def balance(
    lengths: np.ndarray,
    *,
    num_ranks: int,
    policy: str,
    home: np.ndarray | None = None,
    ranks_per_node: int = 8,
    tolerance: float | None = None,
    cost: np.ndarray | None = None,
    move_cost: np.ndarray | None = None,
    max_rank_tokens: int | None = None,
    padded_cost: np.ndarray | None = None,
    held: np.ndarray | None = None,
    held_lengths: np.ndarray | None = None,
) -> np.ndarray:
    """rank_of (n,) int64: the rank that processes each of n items.

    lengths: (n,) integers, tokens (or patches, positions) of each item.
    policy: what the cost of a rank is and how it is kept low; see POLICIES.
    home: (n,) rank where each item is now; default: equal contiguous shares.
    ranks_per_node: ranks [k * ranks_per_node, ...) are node k; the last node may be smaller.
    tolerance: accepted excess of the largest load over its lower bound; default 0.001. One between
        two of 0.001, 0.002, 0.005, 0.01, ... (1, 2 and 5 times a power of 10) counts as the lower.
    cost: (n,) integers to balance instead of lengths, e.g. CostModel(lengths).
    move_cost: (n,) bytes of moving an item to another node; default lengths.
    max_rank_tokens: hard cap of the sum of lengths on a rank (activation memory).
    padded_cost: (n,) what the longest item of a batch costs more, per item of it; grows with l.
    held: (num_ranks,) cost that each rank has besides the items, which never moves; in the unit of
        cost, or of lengths without it. Default: none.
    held_lengths: (num_ranks,) the lengths of that, which count towards max_rank_tokens. Needed
        where both are given, refused elsewhere.

    Raises ValueError for malformed input and for an option the policy does not honour (POLICIES),
    CapError when no plan below max_rank_tokens is found.
    """
    _check_options(policy, tolerance=tolerance, cost=cost, move_cost=move_cost,
                   max_rank_tokens=max_rank_tokens, padded_cost=padded_cost, held=held,
                   held_lengths=held_lengths)
    if (held_lengths is None) == (held is not None and max_rank_tokens is not None):
        raise ValueError("held_lengths must be given with held and max_rank_tokens, and only then")
    num_ranks = at_least_1("num_ranks", num_ranks)
    ranks_per_node = at_least_1("ranks_per_node", ranks_per_node)
    lengths = as_int64("lengths", lengths)
    n = len(lengths)
    weight = lengths if cost is None else as_int64("cost", cost, n)
    home = check_ranks("home", default_home(n, num_ranks) if home is None else home, n, num_ranks)
    items = Items(
        weight, home, num_ranks, ranks_per_node,
        tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
        padded_cost=NOTHING if padded_cost is None else _padded_cost(weight, padded_cost),
        move_cost=NOTHING if move_cost is None else as_int64("move_cost", move_cost, n),
        held=NOTHING if held is None else as_int64("held", held, num_ranks))
    rank_of = POLICIES[policy].assign(items)
    if max_rank_tokens is None:
        return rank_of
    return _enforce_cap(
        items, lengths, rank_of, max_rank_tokens,
        np.zeros(num_ranks, np.int64) if held_lengths is None
        else as_int64("held_lengths", held_lengths, num_ranks))


def load_cap(
    weight: np.ndarray, num_ranks: int, tolerance: float, held: np.ndarray = NOTHING
) -> int:
    """The largest load that `least_move` accepts: (1 + tolerance) times the lower bound, where a
    tolerance counts as the largest of TOLERANCES (cpp/least_move.hpp) that is not above it, and as
    0 below them. weight: (n,); held: (num_ranks,) or empty, see balance. Raises ValueError for a
    tolerance outside [0, 1]."""
    if not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"tolerance must be in [0, 1], got {tolerance!r}")
    bound = core().lower_bound(weight, num_ranks, held)
    levels = core().TOLERANCES
    return bound + int(bound * levels[levels <= tolerance].max(initial=0))


def check_policy(policy: str) -> None:
    """Raises ValueError for a policy that does not exist, naming those that do."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose one of {', '.join(POLICIES)}")


def _check_options(policy: str, **options: object) -> None:
    check_policy(policy)
    row = POLICIES[policy]
    for option, value in options.items():
        if value is not None and option not in row.options:
            raise ValueError(f"policy {policy!r} does not honour {option}")
        if value is None and option == row.needs:
            raise ValueError(f"policy {policy!r} needs {option}")


def _enforce_cap(
    items: Items, lengths: np.ndarray, rank_of: np.ndarray, cap: int, held: np.ndarray
) -> np.ndarray:
    """`rank_of` where no rank has more than `cap` tokens; else with the fewest tokens moved off the
    ranks that do or, where a rank then costs more than the tolerance accepts, packed anew if that
    is cheaper. held (num_ranks,): tokens that each has besides the items."""
    cap = at_least_1("max_rank_tokens", cap)
    if len(lengths) and int(lengths.max()) > cap:
        index = int(lengths.argmax())
        raise CapError(f"max_rank_tokens = {cap} is below lengths[{index}] = {lengths[index]}")
    if int(held.max()) > cap:
        rank = int(held.argmax())
        raise CapError(f"max_rank_tokens = {cap} is below held_lengths[{rank}] = {held[rank]}")
    ranks = items.num_ranks, items.ranks_per_node
    found = [core().least_move(lengths, rank_of, NOTHING, *ranks, cap, held)]
    if not len(items.held) and (found[0] != rank_of).any():
        packed = core().fill_slots(items.weight, lengths, np.array([cap]), items.num_ranks)
        if packed is not None:  # its batches go near where their items are
            rank_of_batch = core().nodewise(items.home, packed, lengths, *ranks, 0)
            found.append(np.where(items.weight + lengths > 0, rank_of_batch[packed], items.home))
    below = [plan for plan in found if _largest(lengths, plan, held) <= cap]
    if not below:
        raise CapError(
            f"max_rank_tokens = {cap}: no plan found; the mean is "
            f"{-(-int(lengths.sum() + held.sum()) // items.num_ranks)} tokens per rank"
        )
    accepted = load_cap(items.weight, items.num_ranks, items.tolerance)
    return min(below, key=lambda plan: max(_largest(items.weight, plan, 0 * held), accepted))


def _largest(values: np.ndarray, rank_of: np.ndarray, held: np.ndarray) -> int:
    """The largest sum of values (n,) and of what it held (num_ranks,) that a rank has."""
    load = held.copy()
    np.add.at(load, rank_of, values)
    return int(load.max())


def _padded_cost(weight: np.ndarray, values: object) -> np.ndarray:
    pad = as_int64("padded_cost", values, len(weight))
    order = np.lexsort((pad, weight))
    if np.any(np.diff(pad[order]) < 0):
        at = order[int(np.argmax(np.diff(pad[order]) < 0)) + 1]
        raise ValueError(f"padded_cost[{at}] = {pad[at]} is less than that of a lighter item")
    return pad


def assign_microbatches(costs: np.ndarray, num_microbatches: int) -> np.ndarray:
    """(n,) int64 microbatch of each example, by vector LPT: examples with the largest share of any
    phase first, each to the microbatch whose fullest phase stays lowest.

    costs: (n, phases) int64, non-negative, any unit per phase. Raises ValueError.
    """
    num_microbatches = at_least_1("num_microbatches", num_microbatches)
    costs = np.asarray(costs)
    if costs.ndim != 2 or not costs.shape[1]:
        raise ValueError(f"costs must be 2-D, with a phase, got shape {costs.shape}")
    columns = [as_int64(f"costs[:, {p}]", costs[:, p]) for p in range(costs.shape[1])]
    table = np.stack([_share(column) for column in columns], axis=1)
    return core().assign_microbatches(np.ascontiguousarray(table), num_microbatches)


def _share(column: np.ndarray) -> np.ndarray:
    """(n,) int64 parts per billion of the column's sum, so that all phases count alike. Integers,
    so that all ranks break ties alike; large sums first lose the bits that would overflow."""
    total = int(column.sum())
    shift = max(0, total.bit_length() - 33)
    return (column >> shift) * 10**9 // max(1, total >> shift)
