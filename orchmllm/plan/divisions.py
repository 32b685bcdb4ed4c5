"""Divisions of a step into microbatches that may be shorter than those that are alike, and what the
caps of a rank make of them. orchmllm.plan.microbatches says how, and takes the best.

Objective: a low bound of the step's time, which is the sum over microbatches and phases of
max(mean rank, longest item).

Invariants: every example is in one microbatch, and the first division is the one whose microbatches
are alike. Where no example is shared, the plans of a division take no less than its bound, so that
a division whose bound is too high needs no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from orchmllm.plan import balance as balancing
from orchmllm.plan.assign import PlanSpec, at_least, group_layouts
from orchmllm.plan.balance import core
from orchmllm.plan.layout import TEXT, BatchLayout

MOST_PLANNED = 2**14  # examples of a step whose divisions are planned before one is chosen
USUAL = 1.1  # times an even share, what the fullest rank of a microbatch holds
PACKABLE = 0.98  # of a cap is what examples of different lengths can be packed into


class Division(NamedTuple):
    """micro: (n,) microbatch of each example. spec: by which each microbatch is planned. rank: (n,)
    of each example, below the caps, for microbatches of which the policy finds no plan. raises:
    whether a microbatch may have as much as its largest example."""

    micro: np.ndarray
    spec: PlanSpec
    rank: np.ndarray | None = None
    raises: bool = False


def divided(
    layout: BatchLayout, spec: PlanSpec, count: int, large: bool
) -> list[tuple[float, Division]]:
    """(what a division takes at least, division): the one that is alike first, then others. Those
    of each group of ranks for themselves."""
    if 0 < spec.group_size < layout.num_ranks:
        capped = with_caps(layout, spec, example_positions(layout, spec), 1 if large else count)
        groups = [(first, divided(part, inside, count, large))
                  for first, part, inside in group_layouts(layout, capped)]
        return [_joined([(first, *found[min(k, len(found) - 1)]) for first, found in groups],
                        capped) for k in range(max(len(found) for _, found in groups))]
    n = layout.num_examples
    costs, longest, held = _tables(layout, spec, n + -n % count)
    capped = with_caps(layout, spec, held, 1 if large else count)
    sizes, caps = sizes_and_caps(held, capped)
    alike = np.tile(np.arange(count), len(costs) // count)[:n]
    if large and not len(caps):  # alike by their number
        sums, most = (rows(table.reshape(len(table) // count, -1), axis=0)
                      for rows, table in ((np.sum, costs), (np.max, longest)))
        time = np.maximum(sums / layout.num_ranks, most).sum()
        fills = not spec.fills or n >= count * layout.num_ranks
        if fills and time * layout.num_ranks <= 1.001 * sums.sum():
            return [(time, Division(alike, capped))]  # nothing waits
    costs, longest = costs[:n], longest[:n]
    if len(caps) or not large:
        alike = balancing.assign_microbatches(costs, count)
    if spec.fills:
        alike = at_least(alike, layout.tokens_per_example, count, layout.num_ranks)
    caps = np.maximum(caps, sizes.max(axis=0, initial=0))  # items of one may go to several ranks
    every = sizes.sum(axis=0)  # no room has to be larger; caps may pass 2**63 times the ranks
    room = np.maximum(np.minimum(PACKABLE * layout.num_ranks * caps, every).astype(np.int64),
                      every // count)
    shorten = partial(
        core().shorten_step, costs.ravel(), longest.ravel(), sizes.ravel(), room,
        num_ranks=layout.num_ranks, num_microbatches=count,
        least=layout.num_ranks if spec.fills else 1)
    found = [(0.0, Division(alike, capped))]
    starts = [(alike, False), (alike, True)]
    slot = None if large and not len(caps) else _slots(
        costs.sum(axis=1), sizes, caps, count * layout.num_ranks)
    if slot is not None:
        micro, rank = np.divmod(slot, layout.num_ranks)
        found.append((0.0, Division(micro, capped, rank)))
        starts.append((micro, False))
    for micro, cut in starts:
        moved, bound = shorten(micro_of=micro, cut=cut)
        found.append((bound, Division(moved, capped)))
    return found


def _slots(cost: np.ndarray, sizes: np.ndarray, caps: np.ndarray, num_slots: int
           ) -> np.ndarray | None:
    """(n,) slot of each example, those of the largest cost first; None where no packing is found.
    The most expensive examples are packed first; where that fails those that are the largest for
    their cap; and where that fails these into the first slot that has room. cost: (n,), sizes:
    (n, c), caps: (c,)."""
    if (sizes.sum(axis=0) > float(num_slots) * caps).any():
        return None
    share = np.zeros(len(cost)) if not len(caps) else (
        sizes / np.maximum(caps, 1)).max(axis=1)
    largest, as_given = np.argsort(-share, kind="stable"), np.arange(len(cost))
    for order, first in ((as_given, cost), (as_given, (2**30 * share).astype(np.int64)),
                         (largest, np.zeros_like(cost))):
        packed = core().fill_slots(first, sizes[order].ravel(), caps, num_slots)
        if packed is not None:
            held, place = np.zeros((2, num_slots), np.int64)
            slot = at_least(packed[np.argsort(order)], cost, num_slots, 1)
            np.add.at(held, slot, cost)
            place[np.argsort(-held, kind="stable")] = np.arange(num_slots)
            return place[slot]
    return None


def _joined(
    parts: Sequence[tuple[int, float, Division]], spec: PlanSpec
) -> tuple[float, Division]:
    """(first rank, bound, division) of each group of ranks -> those of all."""
    known = all(division.rank is not None for _, _, division in parts)
    return max(bound for _, bound, _ in parts), Division(
        np.concatenate([division.micro for *_, division in parts]), spec,
        np.concatenate([first + division.rank for first, _, division in parts]) if known else None)


def _tables(
    layout: BatchLayout, spec: PlanSpec, rows: int
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """(costs of each example (rows, phases), that of its most expensive item (rows, phases), its
    positions by phase). rows: at least n; the others are zeros."""
    columns = np.array([[
        spec.of_media.get(phase, TEXT), cost.constant, cost.linear, cost.quadratic, cost.unit,
        cost.window] for phase in spec.phases for cost in [spec.costs[phase]]])
    costs, longest, held = core().example_tables(
        layout.modality, layout.attn_len, layout.num_tokens, layout.segments_per_example, columns,
        rows)
    n, llm = layout.num_examples, spec.phases.index("llm")
    # A model of another class has its own formula (orchmllm.loader.positions).
    costs[:n, llm] = longest[:n, llm] = spec.costs["llm"](layout.tokens_per_example)
    return costs, longest, dict(zip(spec.phases, held[:n].T, strict=True))


def example_positions(layout: BatchLayout, spec: PlanSpec) -> dict[str, np.ndarray]:
    """Phase -> (n,) positions of each example."""
    return _tables(layout, spec, layout.num_examples)[2]


def sizes_and_caps(held: Mapping[str, np.ndarray], spec: PlanSpec) -> tuple[np.ndarray, np.ndarray]:
    """(what each example has of the c things that a rank may not have more of (n, c), these caps
    (c,)): positions of a phase, or bytes, of which one that has more fills a rank. held: see
    example_positions."""
    sizes = [*(held[phase] for phase in spec.hard_caps),
             *(np.minimum(limit.taken(held), limit.most) for limit in spec.room)]
    caps = [*spec.hard_caps.values(), *(limit.most for limit in spec.room)]
    return (np.stack(sizes, axis=1) if sizes else np.zeros((len(held["llm"]), 0), np.int64),
            np.array(caps, np.int64))


def with_caps(
    layout: BatchLayout, spec: PlanSpec, held: Mapping[str, np.ndarray], num_microbatches: int = 1
) -> PlanSpec:
    """The spec, with the cap that is usual where nothing else limits the LLM's positions; see
    above. held: (examples,) positions of each phase, see example_positions."""
    if num_microbatches == 1 or spec.room or not spec.can_cap("llm") or "llm" in spec.hard_caps:
        return spec
    even = int(USUAL * held["llm"].sum() / (layout.num_ranks * num_microbatches))
    return spec.capped({"llm": max(even, int(held["llm"].max(initial=0)), 1)})
