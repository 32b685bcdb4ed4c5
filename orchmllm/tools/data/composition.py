"""What a recipe's data looks like to training: lengths per modality and source, and what balancing
would give. Reads indexes only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.data.index import LengthIndex, usable_rows
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.layout import MODALITIES, BatchLayout
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.rearrange import sums_of
from orchmllm.plan.step import imbalance, sampled_costs
from orchmllm.sharding.caps import open_count

NUM_BATCHES = 20  # global batches that the prediction averages over
MAX_SAMPLED = 200_000  # examples that it plans at most: minutes on a large world


@dataclass(frozen=True)
class Lengths:
    """Lengths of all usable examples of a recipe. source (n,): index into names; tokens[m] (n,):
    LLM positions of a modality; segments[m] (n,): its segments."""

    names: list[str]
    source: np.ndarray
    tokens: dict[str, np.ndarray]
    segments: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        """(n,) LLM positions of each example."""
        return sum(self.tokens.values())


def read_lengths(names: Sequence[str], indexes: Sequence[LengthIndex]) -> Lengths:
    """Joins the indexes; unusable rows are left out."""
    every = BatchLayout.concat([*usable_rows(indexes, range(sum(map(len, indexes))))])
    source = np.searchsorted(np.cumsum([len(index) for index in indexes]), every.example_id,
                             side="right")
    tokens, counts = ({m: sums_of((every.modality == code) * values, every.segments_per_example)
                       for m, code in MODALITIES.items()} for values in (every.num_tokens, 1))
    return Lengths(list(names), source, tokens, counts)


def lengths_table(lengths: Lengths) -> str:
    """Tokens per example and modality, of every source and of all together."""
    out = [f"  {'':<9} {'examples':>9} {'segments':>9} {'mean':>8} "
           f"{'p50':>7} {'p90':>7} {'p99':>7} {'max':>7} {'share':>6}"]
    groups = [(name, lengths.source == k) for k, name in enumerate(lengths.names)]
    if len(groups) > 1:
        groups.append(("all", np.ones(len(lengths.source), bool)))
    for name, mine in groups:
        total = max(int(lengths.total[mine].sum()), 1)
        out.append(name)
        for modality in MODALITIES:
            count = lengths.segments[modality][mine].sum()
            values = lengths.tokens[modality][mine]
            values = values[values > 0]
            if not len(values):
                continue
            p50, p90, p99 = np.percentile(values, [50, 90, 99])
            out.append(f"  {modality:<9} {len(values):>9} {count:>9} "
                       f"{values.mean():>8.1f} {p50:>7.0f} {p90:>7.0f} {p99:>7.0f} "
                       f"{values.max():>7} {values.sum() / total:>6.1%}")
    return "\n".join(out)


def predict(
    batches: Iterable[BatchLayout], recipe: Recipe
) -> tuple[dict[str, tuple[float, float]], float]:
    """(Phase that has work -> (imbalance as sampled, as planned) of the microbatches of all these
    steps, predicted time of unbalanced steps over that of balanced ones), where every phase waits
    for its slowest rank. Communication is not in it."""
    balanced = replace(recipe, balance=replace(recipe.balance, enabled=True))
    costs: dict[str, list] = {}  # (2, microbatches, d) of each step: as sampled, as planned
    for layout in batches:
        spec = plan_spec(resolve(balanced, layout.num_ranks, 8))
        plans = [plan for _, plan in plan_microbatches(layout, spec, open_count(recipe, spec))]
        for phase in spec.phases:
            costs.setdefault(phase, []).append(np.stack([
                sampled_costs(layout, spec, phase, len(plans)),
                [plan.planned_cost(phase) for plan in plans]]))
    sides = {phase: np.concatenate(c, axis=1) for phase, c in costs.items()}
    sampled, planned = sum(side.max(axis=2).sum(axis=1) for side in sides.values())
    return ({p: (imbalance(a), imbalance(b)) for p, (a, b) in sides.items() if a.any()},
            sampled / max(planned, 1))
