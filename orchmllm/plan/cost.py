"""What one item costs, as planning takes it (OrchMLLM section 5.1): linear layers cost per
position, attention per squared item length. orchmllm.models.flops derives the coefficients of a
model.

Objective: costs that are in proportion to the time of an item, so that ranks of equal cost take
equally long.

Invariants: costs are whole numbers and exact, and a longer item never costs less. `in_fine_unit`
refuses a model by which every item would cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """cost(l) = (constant + linear * l + quadratic * l * span) // unit, exact in int64, where span
    is how many positions each position attends to: l, or less with frames or a window.

    linear, quadratic, constant: FLOP (forward + backward) per position, attended pair, item.
    window: positions of an attention window; 0: none. padded: a rank pads its items to the longest,
    so that its cost is their number times that one's.
    unit: FLOP per unit of the result. The default gives kFLOP: the sum over a global batch of an
    84B model on 2560 ranks is near 2^65 FLOP but fits int64 in kFLOP, and rounding per item
    (never per coefficient) loses less than 1 kFLOP an item on the smallest model.
    """

    linear: int
    quadratic: int
    constant: int = 0
    unit: int = 1000
    window: int = 0
    padded: bool = False

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "constant", "unit", "window"):
            value, least = getattr(self, name), int(name == "unit")
            if not (value >= least and value % 1 == 0):
                raise ValueError(f"{name} = {value}: must be a whole number >= {least}")
            object.__setattr__(self, name, int(value))  # those of numpy overflow

    def __call__(self, lengths: np.ndarray, frames: np.ndarray | None = None) -> np.ndarray:
        """(n,) int64 costs of items of `lengths` (n,). frames (n,): attention stays inside each of
        so many equal parts of an item (frames of a video). ValueError if one overflows int64."""
        lengths = np.asarray(lengths, np.int64)
        if len(lengths):
            index = int(lengths.argmax())
            longest = int(lengths[index])
            if lengths.min() < 0:
                raise ValueError(f"a length is {lengths.min()}: must be >= 0")
            if self.constant + longest * (self.linear + self.quadratic * longest) >= 2**63:
                raise ValueError(f"lengths[{index}] = {longest}: its cost overflows int64")
        span = lengths if frames is None else lengths // np.maximum(frames, 1)
        if self.window:
            span = np.minimum(span, self.window)
        return (self.constant + lengths * (self.linear + self.quadratic * span)) // self.unit

    def of_ranks(self, lengths: np.ndarray, rank: np.ndarray, num_ranks: int) -> np.ndarray:
        """(num_ranks,) int64 cost of what each rank has: items of `lengths` (n,) on `rank` (n,)."""
        cost = self(lengths)
        total = np.zeros(num_ranks, np.int64)
        if not self.padded:
            np.add.at(total, rank, cost)
            return total
        np.maximum.at(total, rank, cost)
        return total * np.bincount(rank, minlength=num_ranks)

    @property
    def positions(self) -> CostModel:
        """What counts the positions of an item, and of a rank those that it pads."""
        return CostModel(1, 0, unit=1, padded=self.padded)

    def linear_part(self, lengths: np.ndarray) -> np.ndarray:
        """(n,) int64: constant and linear part, for batches whose attention alone is padded."""
        return replace(self, quadratic=0)(lengths)

    def quadratic_part(self, lengths: np.ndarray) -> np.ndarray:
        """(n,) int64: attention of an item of each length."""
        return replace(self, linear=0, constant=0)(lengths)


def in_fine_unit(costs: Mapping[str, CostModel]) -> dict[str, CostModel]:
    """The same costs, all enlarged by one factor if an item of one position would cost 0 in some of
    them: whole numbers of units could not tell short items apart. Raises ValueError for a cost that
    is 0 for every item."""
    of_one = {name: cost.constant + cost.linear + cost.quadratic for name, cost in costs.items()}
    if free := [name for name, flop in of_one.items() if not flop]:
        raise ValueError(f"the cost of {free[0]} is 0 for every item, so nothing would be "
                         "balanced: give CostModel(linear=1, quadratic=0) for the length")
    factor = max((c.unit for name, c in costs.items() if of_one[name] < c.unit), default=1)
    return {name: replace(cost, linear=factor * cost.linear, quadratic=factor * cost.quadratic,
                          constant=factor * cost.constant) for name, cost in costs.items()}
