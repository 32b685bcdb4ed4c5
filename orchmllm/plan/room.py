"""What memory leaves a rank in a microbatch: limits of the positions of all its phases together.

Objective: caps of the single phases under which no limit is passed, as wide as possible.

Invariants: the caps are the same multiple of an even share in all phases, but no smaller than one
item, and ranks that hold as much as all caps allow are below every limit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

PARTS = 1024  # of an even share of a phase: steps in which caps are searched
MOST = 64  # even shares: what nobody would call a cap


@dataclass(frozen=True)
class Limit:
    """Of a rank in a microbatch: the sum over phases of `each` times its positions is at most
    `most`: bytes at one of the moments of a step when memory may be highest, or positions."""

    most: int
    each: Mapping[str, int]

    def taken(self, positions: Mapping[str, int | np.ndarray]) -> int | np.ndarray:
        """That sum for so many positions by phase: numbers, or arrays of one shape."""
        return sum(each * positions[phase] for phase, each in self.each.items()
                   if phase in positions)


class Share(NamedTuple):
    """Of a phase in a microbatch of num_ranks ranks: the positions of all its items, and those that
    a rank holds at least, its longest item. Where no cap can change what ranks hold: 0, and the
    most of a rank."""

    total: int
    least: int


def caps_below(
    limits: tuple[Limit, ...], shares: Mapping[str, Share], num_ranks: int
) -> dict[str, int]:
    """Phase -> positions of a rank that keep below all limits if all phases have so many: as many
    times an even share as possible, the same in all phases, but no fewer than one item has. {} if
    there are none."""
    def caps(parts: int) -> dict[str, int]:
        return {phase: max(share.least, share.total * parts // (PARTS * num_ranks))
                for phase, share in shares.items()}

    def above(parts: int) -> bool:
        return any(limit.taken(caps(parts)) > limit.most for limit in limits)

    parts = PARTS - 1 + bisect_right(range(PARTS, MOST * PARTS), False, key=above)
    return {} if parts < PARTS else caps(parts)
