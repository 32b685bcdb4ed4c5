"""Long examples, told of before they are met: by how much the heaviest item of a phase exceeds the
mean load of a rank, what sharing it among ranks gives, and the longest that fits into memory.

An item that is not shared is processed as a whole, so the slowest rank of its phase takes at least
as long as the item alone, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from orchmllm.config.job import Job
from orchmllm.data.index import usable_rows
from orchmllm.models.flops import Lengths, phase_lengths
from orchmllm.plan.assign import EVERY_PHASE, PlanSpec, most_shares
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import OF_MEDIA, TEXT, BatchLayout
from orchmllm.plan.rearrange import sums_of
from orchmllm.sharding.fits import budget_of, largest_fitting
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import Choice, MemoryModel

if TYPE_CHECKING:
    from orchmllm.batch import Step  # with torch

UNITS = {"vision": "patches", "audio": "positions", "llm": "tokens", "generator": "squares"}
SHARED = (2, 4, 8)  # ranks
FULL = dict.fromkeys(EVERY_PHASE, "full")
LONGEST = 10**9 - 1  # positions that are looked for
MOST_NAMED = 3  # of rows that do not fit
TOLD_FROM = 1.1  # times the mean load, and times what was told before


@dataclass(frozen=True)
class LongItem:
    """The heaviest item of a phase. positions: its length; example: dataset index of its example;
    ratio: its cost over the mean load of a rank in a step that holds it. fits: positions of the
    longest that fits alone, as the recipe recomputes and with everything recomputed; () if not
    known."""

    phase: str
    positions: int
    example: int
    ratio: float
    fits: Sequence[int] = ()

    def shared(self, num_ranks: int) -> float:
        """The slowest rank's load over the mean where up to so many ranks share an example of the
        LLM (orchmllm.plan.shares); items of encoders are not shared."""
        return max(1.0, self.ratio / num_ranks) if self.phase == "llm" else self.ratio


def heaviest(
    batches: Sequence[BatchLayout], costs: Mapping[str, CostModel],
    rows: Iterable[BatchLayout] = (),
    fits: Callable[[str, BatchLayout], Sequence[int]] = lambda phase, alone: (),
) -> list[LongItem]:
    """Of the phases that have items, in a step that holds the heaviest one. rows: parts of all that
    may be drawn, if they are known: the heaviest of them takes the place of that of a batch.
    fits: (phase, the item as an example of its own) -> LongItem.fits."""
    found, longest = [], _longest_of(chain(rows, batches), costs)
    for phase, cost in costs.items():
        if (alone := longest.get(phase)) is None:
            continue
        batch = max(batches, key=lambda b: b.item_lengths(phase).max(initial=0))
        length = alone.item_lengths(phase)
        lengths = np.concatenate([np.sort(batch.item_lengths(phase))[:-1], length])
        loads = cost(lengths)
        found.append(LongItem(
            phase, int(length[0]), int(alone.example_id[0]),
            float(loads[-1] * batch.num_ranks / loads.sum()), fits(phase, alone)))
    return found


def _longest_of(parts: Iterable[BatchLayout], phases: Iterable[str]) -> dict[str, BatchLayout]:
    """phase -> its longest item, as an example of its own; without phases that have none."""
    found: dict[str, BatchLayout] = {}
    for part in parts:
        for phase in phases:
            lengths = part.item_lengths(phase)
            before = int(found[phase].item_lengths(phase)[0]) if phase in found else -1
            if lengths.max(initial=-1) > before:
                found[phase] = _alone(part, phase, int(lengths.argmax()))
    return found


def _alone(layout: BatchLayout, phase: str, item: int) -> BatchLayout:
    """An item as an example of its own: a text that is all learnt, or one medium."""
    if phase == "llm":
        tokens = int(layout.tokens_per_example[item])
        return BatchLayout.from_segments(
            int(layout.example_id[item]), tokens, [(TEXT, text_lengths(tokens))])
    at = layout.segments[OF_MEDIA[phase]][item]
    lengths = SegmentLengths(layout.rows[at], layout.attn_len[at], layout.num_tokens[at],
                             tuple(layout.grid[at]))
    example = layout.example_id[layout.example_of_segment[at]]
    return BatchLayout.from_segments(int(example), 0, [(OF_MEDIA[phase], lengths)])


def loads_alone(layout: BatchLayout, encodes: bool = True, shares: int = 1) -> Loads:
    """What a rank processes that has one example of n and nothing else, (n,) of each. encodes: its
    media, too; without it other ranks encode them, and features arrive. shares: ranks that share
    each example; one of them may have all of its targets."""
    phases, received = {}, {}
    for phase, modality in OF_MEDIA.items():
        items, counts = phase_lengths(layout, phase), layout.items_per_example[modality]
        sums = [sums_of(x, counts) for x in (items.rows, items.positions, items.tokens)]
        phases[phase] = Lengths(*(encodes * x for x in sums))
        received[phase] = -(-sums[2] // shares)
    text = phase_lengths(layout, "llm")
    part = -(-text.positions // shares)
    return Loads({**phases, "llm": Lengths(np.minimum(text.rows, part), part, part)}, received,
                 gathered=text.positions * (shares > 1))


@dataclass(frozen=True)
class Room:
    """The memory of a rank. choice: phase -> checkpointing. budget: bytes that tensors may take, 0
    where that is not known. why: where the budget comes from, or why it is not known. spreads:
    whether other ranks may encode an example's media. shares: ranks that may share an example."""

    memory: MemoryModel
    choice: Choice
    budget: float
    why: str
    spreads: bool
    shares: int = 1

    @classmethod
    def of(cls, job: Job, device_bytes: float, memory: MemoryModel) -> Room:
        """Of a rank of a job, which recomputes everything where `auto` will choose. device_bytes:
        of its GPU, 0 without one."""
        balance, fsdp = job.recipe.balance, job.recipe.fsdp
        budget, why = budget_of(job.recipe, device_bytes)
        if not budget:
            why = "there is no GPU, and fsdp.memory_gb is not set"
        return cls(memory, {p: fsdp.checkpointing(p).replace("auto", "full") for p in EVERY_PHASE},
                   budget, why,
                   job.num_ranks > 1 and balance.enabled and not balance.whole_examples,
                   most_shares(balance, job.ranks_per_node, job.num_ranks))

    def fits(self, phase: str, alone: BatchLayout) -> Sequence[int]:
        """LongItem.fits of items like the one that an example consists of."""
        if not self.budget:
            return ()
        loads, length = loads_alone(alone, shares=self.shares), int(alone.item_lengths(phase)[0])
        return tuple(largest_fitting(self.memory, loads, choice, self.budget, length, LONGEST)
                     for choice in (self.choice, FULL))

    def misfits(self, rows: Iterable[BatchLayout], place: Callable[[int], str]) -> list[str]:
        """Lines that name the rows that no plan can make fit, and what helps; none if the memory is
        not known. rows: in parts."""
        if not self.budget:
            return []
        parts, needs = [], []
        for part in rows:
            needed = self._needed(part, self.choice)
            wrong = np.flatnonzero(needed > self.budget)
            parts.append(part.taken(wrong, [len(wrong)]))
            needs.append(needed[wrong])
        needed = np.concatenate([[], *needs])
        if not len(needed):
            return []
        order = np.argsort(-needed, kind="stable")
        unfit = BatchLayout.concat(parts).taken(order, [len(order)])
        tokens = int(unfit.tokens_per_example[0])
        alone = loads_alone(unfit.taken([0], [1]), not self.spreads, self.shares)
        cut = largest_fitting(self.memory, alone, self.choice, self.budget, tokens, LONGEST)
        room = f"a rank ({self.budget / 1e9:.3g} GB)"
        if not cut:
            return [f"warning: the model alone cannot fit {room}: more ranks or larger GPUs help"]
        full = int((self._needed(unfit, FULL) <= self.budget).sum())
        cures = [f"  data.max_example_tokens={cut}"] * (cut < tokens)
        cures += [f"  fsdp.activation_checkpointing=full, with which {full:,} of them fit"] * (
            full > 0)
        return [f"warning: rows that cannot fit {room}, even alone"
                f"{', all recomputed' * (self.choice == FULL)}: {len(order):,}",
                *(f"  {place(int(unfit.example_id[k]))}: {unfit.tokens_per_example[k]:,} tokens, "
                  f"predicted {needed[i] / 1e9:.3g} GB"
                  for k, i in enumerate(order[:MOST_NAMED].tolist())),
                "what helps:", *cures, "  shorter media, more ranks, or larger GPUs"]

    def _needed(self, rows: BatchLayout, choice: Choice) -> np.ndarray:
        """(n,) bytes that a rank needs for each example, or for its largest medium."""
        needed = self.memory.highest(loads_alone(rows, not self.spreads, self.shares), choice)
        for phase, modality in OF_MEDIA.items():
            media = phase_lengths(rows, phase)
            nothing = Lengths(*np.zeros((3, len(media.rows)), np.int64))
            loads = Loads({**dict.fromkeys(EVERY_PHASE, nothing), phase: media},
                          dict.fromkeys(OF_MEDIA, nothing.rows))
            np.maximum.at(needed, rows.example_of_segment[rows.segments[modality]],
                          self.memory.highest(loads, choice))
        return needed


def table(found: Sequence[LongItem], room: Room, place: Callable[[int], str]) -> list[str]:
    """The long items for 80 columns, and what is said of them. place: dataset index -> where it
    is, "" if that is not known."""
    lines = [f"{'Longest items':29}{'load / mean load, on ranks':>28}{'longest that fits':>23}",
             f"{'length':>29}" + "".join(f"{n:>7}" for n in (1, *SHARED))
             + f"{'as it is':>11}{'all full':>12}"]
    for item in found:
        loads = [f"{item.ratio:.2f}", *(
            f"{item.shared(n):.2f}" if item.ratio > 1 and item.phase == "llm" else "-"
            for n in SHARED)]
        here, full = [f"{n:,}" if n else "none" for n in item.fits] or "--"
        lines.append(f"  {f'{item.phase}, {UNITS[item.phase]}':16}{item.positions:>11,}"
                     + "".join(f"{x:>7}" for x in loads) + f"{here:>11}{full:>12}")
    lines += [f"  {item.phase}: {where}" for item in found if (where := place(item.example))]
    if any(item.ratio > 1 for item in found):
        lines += [
            "  on 1 rank: the item alone; no plan makes the slowest rank faster than that",
            "  on 2, 4, 8: predicted, by balance.llm.max_shares; here "
            f"{f'up to {room.shares} ranks share' if room.shares > 1 else 'no ranks share'} one"]
    fits = f"alone on a rank, in {room.budget / 1e9:.3g} GB" if room.budget else "not known"
    return [*lines, f"  longest that fits: {fits}", f"  ({room.why})"]


class LongExamples:
    """What a run is told of its long examples, by one of its ranks (shows).

    When it is made: rows of an index that cannot fit. `tell`, before each step: at first the table,
    of all train_rows if they are indexed, and later a line where a phase waits for one example, and
    longer than before."""

    def __init__(self, job: Job, spec: PlanSpec, dataset, train_rows: Sequence[int],
                 device_bytes: float, log: Callable[[str], object], shows: bool = True) -> None:
        self._room = Room.of(job, device_bytes, MemoryModel.of(job))
        self._costs, self._place, self._log = spec.costs, dataset.name, log
        self._shows, llm = shows, job.recipe.balance.llm
        self._more = most_shares(  # than now
            replace(job.recipe.balance, llm=replace(llm, max_shares=2 * self._room.shares)),
            job.ranks_per_node, job.num_ranks)
        self._told: dict[str, float] = {}
        indexes = getattr(dataset, "indexes", ())
        self._rows = partial(usable_rows, indexes, train_rows) if (
            shows and indexes and None not in indexes) else tuple
        self._warn()

    def _warn(self) -> None:
        if lines := self._room.misfits(self._rows(), self._place):
            self._log("\n".join(lines))

    def tell(self, step: Step, choice: Choice) -> None:
        """step: as it is loaded, before it is trained. choice: what is recomputed in it."""
        if not self._shows:
            return
        batches = [plan.layout for plan in step.plans]
        if not self._told:
            if choice != self._room.choice:
                self._room = replace(self._room, choice=choice)
                self._warn()
            found = heaviest(batches, self._costs, self._rows(), self._room.fits)
            self._log("\n".join(table(found, self._room, self._place)))
            self._told = dict.fromkeys(EVERY_PHASE, 1.0)
        late = {p: self._costs[p] for p, figures in step.phases.items()
                if figures["imbalance_after"] > TOLD_FROM * self._told[p]}
        for item in heaviest(batches, late):
            if item.ratio > TOLD_FROM * self._told[item.phase]:
                self._told[item.phase] = item.ratio
                cure = f" (balance.llm.max_shares={self._more}: {item.shared(self._more):.2f})" * (
                    item.phase == "llm" and self._more > self._room.shares)
                self._log(
                    f"step {step.index}: {item.phase} waits for one example, "
                    f"{self._place(item.example)}: its {item.positions:,} {UNITS[item.phase]} "
                    f"alone are {item.ratio:.2f} times the mean load of a rank{cure}")
