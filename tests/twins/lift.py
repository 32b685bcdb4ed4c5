"""Part of the twin of `least_move`: loads between multiples of the step that most weights share.
See cpp/lift.hpp."""

from __future__ import annotations


def may_fit(weight: list[int], step: int, cap: int, num_ranks: int) -> bool:
    """Whether the steps fit if every remainder up to cap % step is left out and all larger ones are
    in pairs that save a step."""
    large = sum(w % step > cap % step for w in weight)
    return sum(w // step for w in weight) + (large + 1) // 2 <= cap // step * num_ranks


class Lift:
    """The problem in steps. weight (n,): 0 for the items that stay at `home` (n,), which are
    counted in base (num_ranks,) instead. possible: whether the steps fit under the cap at all."""

    def __init__(
        self, weight: list[int], home: list[int], num_ranks: int, width: int, cap: int, step: int
    ) -> None:
        self._weight, self._step, self._num_ranks, self._width = weight, step, num_ranks, width
        self._over = over = cap % step
        self.cap, self.home = cap // step, list(home)
        self.weight = [-(-w // step) for w in weight]
        self.base, self._room = [0] * num_ranks, [over] * num_ranks
        total, self._saved = sum(self.weight), 0
        odd = [(i, w % step) for i, w in enumerate(weight) if w % step]
        crowded = [(i, rest) for i, rest in odd
                   if rest <= over and not self._fix([i], rest, home[i])]
        for i, rest in crowded:
            self._fix([i], rest, self._roomiest(i))
        for node in range(-(-num_ranks // width)):
            self._fix_pairs(sorted((rest, i) for i, rest in odd
                                   if rest > over and home[i] // width == node))
        self.possible = total - self._saved <= self.cap * num_ranks

    def _fix(self, items: list[int], rest: int, rank: int) -> bool:
        """The items stay on the rank for good, if `rest`, what they have over a multiple, fits."""
        if rest > self._room[rank]:
            return False
        self._room[rank] -= rest
        self.base[rank] += (sum(self._weight[i] for i in items) - rest) // self._step
        for i in items:
            self.home[i], self.weight[i] = rank, 0
        self._saved += 1
        return True

    def _roomiest(self, item: int) -> int:
        first = self.home[item] // self._width * self._width
        return max(range(first, min(self._num_ranks, first + self._width)),
                   key=self._room.__getitem__)

    def _fix_pairs(self, large: list[tuple[int, int]]) -> None:
        """The largest remainder with the smallest that completes a step."""
        while len(large) > 1:
            (small, a), (big, b) = large[0], large[-1]
            rest = small + big - self._step
            if rest < 0:
                large.pop(0)
            elif rest > self._over or not self._fix([a, b], rest, self._roomiest(a)):
                large.pop()
            else:
                large = large[1:-1]
