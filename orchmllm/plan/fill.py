"""An example for every rank, where there are enough: beside a long example balancing may leave a
rank without one, which then has to run a filler."""

from __future__ import annotations

import numpy as np

from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import PlanSpec, StepPlan, assign_microbatches, build_plan, plan_step


def at_least(place_of: np.ndarray, lengths: np.ndarray, num_places: int, least: int) -> np.ndarray:
    """(n,) places of n items, the shortest moved from places with more than `least` items to those
    with fewer; as they are where n is less than least * num_places."""
    counts = np.bincount(place_of, minlength=num_places)
    if len(place_of) < least * num_places or counts.min() >= least:
        return place_of
    out = place_of.copy()
    wanting = iter(np.repeat(np.arange(num_places), np.maximum(least - counts, 0)).tolist())
    for item in np.argsort(lengths, kind="stable"):
        if counts[out[item]] > least:
            if (place := next(wanting, None)) is None:
                break
            counts[out[item]] -= 1
            out[item] = place
    return out


def assign_filled(layout: BatchLayout, spec: PlanSpec, num_microbatches: int) -> np.ndarray:
    """As assign_microbatches, each with as many examples as ranks, so that every rank can have
    one."""
    micro = assign_microbatches(layout, spec, num_microbatches)
    if not spec.balance.enabled:
        return micro
    return at_least(micro, layout.tokens_per_example, num_microbatches, layout.num_ranks)


def plan_filled(layout: BatchLayout, spec: PlanSpec) -> StepPlan:
    """As plan_step, with an example for every rank. The slowest rank takes no longer: what moves is
    alone on its new rank, and was not on its old one."""
    plan = plan_step(layout, spec)
    if not spec.balance.enabled or layout.num_examples < layout.num_ranks or (
            plan.llm.target_sizes.all()):
        return plan
    llm = at_least(plan.llm.target_rank[plan.llm.slot_of], layout.tokens_per_example,
                   layout.num_ranks, 1)
    encode = {m: move.target_rank[move.slot_of] for m, move in plan.encode.items()}
    return build_plan(layout, encode, llm, plan.spec)
