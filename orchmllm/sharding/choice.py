"""Which layers recompute what: the choice that repeats the least of those that fit, exactly.

The numbers of layers of each phase that recompute everything, and what is no product, are tried in
all combinations that no other one beats in time and memory at once. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from orchmllm.config.fsdp import CHECKPOINTING, CHOICES, as_choice
from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.sharding.activations import Counts, Stack, stack
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import Choice, MemoryModel
from orchmllm.sharding.recomputed import phase_flop, recomputed_flop

ROUNDING = 1e-12  # of the budget: sums of the same numbers in another order


def choose_checkpointing(memory: MemoryModel, loads: Loads, budget_bytes: float,
                         fixed: Choice | None = None, by_layer: bool = True) -> dict[str, str]:
    """phase -> the choice whose predicted peak is within the budget and which repeats least;
    `fixed` phases stay. by_layer: otherwise all layers of a phase are alike.

    Raises ValueError if not even recomputing everything fits, with what it would need."""
    cases = {p: _cases(memory, p, (fixed or {}).get(p), by_layer) for p in memory.phases}
    times, use, room = {}, {}, None
    first = {p: stack(memory.blocks(p), {c: n[0] for c, n in cases[p].items()}) for p in cases}
    least = _rows(memory.moments(loads, first), 1)[0]
    for phase, counts in cases.items():
        time = phase_flop(memory, phase, loads, counts).max(axis=1)
        kept = _undominated(
            time, stack(memory.blocks(phase), counts), loads.phases[phase].positions)
        cases[phase] = {c: n[kept] for c, n in counts.items()}
        times[phase] = time[kept]
        stacks = first | {phase: stack(memory.blocks(phase), cases[phase])}
        use[phase] = _rows(memory.moments(loads, stacks), len(kept)) - least
    room = budget_bytes * (1 + ROUNDING) - least
    found = cheapest([*times.values()], [*use.values()], room)
    if found is None:
        needs = min(memory.peak(loads, dict(zip(cases, tried, strict=True))) for tried in product(
            *([fixed[p]] if p in (fixed or {}) else CHOICES for p in cases)))
        raise ValueError(
            f"needs {needs / 1e9:.3g} GB a rank at least, {(needs - budget_bytes) / 1e9:.3g} GB "
            f"more than the {budget_bytes / 1e9:.3g} GB that are allowed")
    return {p: as_choice({c: int(n[i, 0]) for c, n in cases[p].items()})
            for p, i in zip(cases, found, strict=True)}


def one_layer_more(memory: MemoryModel, loads: Loads, choice: Choice,
                   fixed: Choice | None = None) -> dict[str, str] | None:
    """The choice with one layer that recomputes more, the one that saves most at the highest
    moment, and of equal ones that which repeats least. None if no layer saves anything. Phases of
    `fixed` stay."""
    peak, found = memory.peak(loads, choice), []
    for phase in memory.phases:
        for counts in _next(memory.counts(phase, choice[phase])) if phase not in (
                fixed or {}) else ():
            more = {**choice, phase: as_choice(counts)}
            found.append((memory.peak(loads, more), recomputed_flop(memory, loads, more), more))
    least = min(found, key=lambda x: x[:2], default=(peak,))
    return least[2] if least[0] < peak else None


def _next(counts: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """One layer of a kind becomes one of a kind that recomputes more."""
    for kind, more in (("none", "selective"), ("selective", "full"), ("none", "full")):
        if counts[kind]:
            yield {**counts, kind: counts[kind] - 1, more: counts[more] + 1}


def _cases(memory: MemoryModel, phase: str, fixed: str | None, by_layer: bool) -> Counts:
    """All that may be chosen for a phase, (n, 1) each, what recomputes least first."""
    if fixed is not None or not by_layer:
        tried = [memory.counts(phase, c) for c in ([fixed] if fixed is not None else CHOICES)]
        return {c: np.array([[counts[c]] for counts in tried]) for c in CHOICES}
    layers = memory.num_layers(phase)
    full, selective = (x.ravel()[:, None] for x in np.indices((layers + 1, layers + 1)))
    there = (full + selective <= layers)[:, 0]
    full, selective = full[there], selective[there]
    return {"none": layers - full - selective, "selective": selective, "full": full}


def _undominated(time: np.ndarray, stack: Stack, positions: np.ndarray) -> np.ndarray:
    """The cases that no other one beats, or equals, in time and in all that a phase needs; by
    time. positions: (d,) of the phase; without any a case needs nothing."""
    needs = positions.any() * np.concatenate([np.broadcast_to(x, (len(time), 1)) for x in (
        stack.kept, stack.kept + stack.forward, stack.kept + stack.backward)], axis=1)
    kept: list[int] = []
    for i in np.lexsort((*needs.T, time)):
        if not kept or not (needs[kept] <= needs[i]).all(axis=1).any():
            kept.append(int(i))
    return np.array(kept)


def _rows(moments: Mapping[str, np.ndarray], n: int) -> np.ndarray:
    """(n, moments * d) bytes."""
    d = max(np.shape(m)[-1] for m in moments.values())
    return np.concatenate([np.broadcast_to(m, (n, d)) for m in moments.values()], axis=1)


def cheapest(times: Sequence[np.ndarray], use: Sequence[np.ndarray], room: np.ndarray
             ) -> tuple[int, ...] | None:
    """One case of each group: the least time in total, of those whose use is within the room in
    every row; None if there are none. times: (n,) by group, ascending; use: (n, rows); room:
    (rows,).

    Exact: rows that a found combination breaks are added until it breaks none."""
    over = sum(u.max(axis=0) for u in use) - room
    rows = [int(over.argmax())]
    while True:
        found = _within(times, [u[:, rows] for u in use], room[rows])
        if found is None:
            return None
        over = sum(u[i] for u, i in zip(use, found, strict=True)) - room
        if over.max() <= 0:
            return found
        rows.append(int(over.argmax()))


def _within(times: Sequence[np.ndarray], use: Sequence[np.ndarray], room: np.ndarray
            ) -> tuple[int, ...] | None:
    """As `cheapest`, with all rows at once: the groups but the last are joined."""
    time, used, index = np.zeros(1), np.zeros((1, len(room))), np.zeros((1, 0), int)
    *firsts, (last, last_use) = zip(times, use, strict=True)
    for more, added in firsts:
        time = (time[:, None] + more).ravel()
        used = (used[:, None] + added).reshape(-1, len(room))
        index = np.column_stack([index.repeat(len(more), axis=0),
                                 np.tile(np.arange(len(more)), len(index))])
    order = np.argsort(time, kind="stable")
    time, used, index = time[order], used[order], index[order]
    best, found = np.inf, None
    for i, (own, needs) in enumerate(zip(last, last_use, strict=True)):
        few = int(np.searchsorted(time, best - own))  # only these would be faster
        fits = (used[:few] + needs <= room).all(axis=1)
        if fits.any():
            k = int(fits.argmax())
            best, found = float(time[k] + own), (*index[k].tolist(), i)
    return found


def check_layers(recipe: Recipe) -> None:
    """Raises ValueError if fsdp.*_checkpointing names more layers than the model has."""
    memory = MemoryModel(recipe.model, recipe.fsdp, shards=1)
    for phase in EVERY_PHASE:
        choice = recipe.fsdp.checkpointing(phase)
        if choice not in CHECKPOINTING:  # of a word nothing has to be counted
            memory.counts(phase, choice)
