"""When a pipeline's iteration ends, and in which order its microbatches should run.

Simulated is the schedule 1F1B of torch.distributed.pipelining with a stage a device, uneven stages,
uneven microbatches and a delay between devices that overlaps with computing. DistTrain calls the
order inside a pipeline inter-microbatch (section 6.2) and the division over data-parallel groups
intra-microbatch (6.1).
"""

from __future__ import annotations

import numpy as np


def operations(num_stages: int, num_microbatches: int) -> list[list[tuple[int, int]]]:
    """For each stage (row, slot) of what it runs, in its order. Row s is the forward pass of stage
    s, row num_stages + s its backward pass; slot k is the k-th microbatch of the chosen order."""
    out = []
    for s in range(num_stages):
        # torch's 1F1B runs min(l, p - s) forwards, then a backward and a forward in turn.
        ahead = min(num_microbatches, num_stages - 1 - s)
        mine = [(s, k) for k in range(ahead)]
        for k in range(num_microbatches):
            if k + ahead < num_microbatches:
                mine.append((s, k + ahead))
            mine.append((num_stages + s, k))
        out.append(mine)
    return out


class Pipeline:
    """An iteration, run as far as its order is known. ends[row][slot]: when an operation ends.
    forward_ms, backward_ms: (stages, microbatches); comm_ms: a number or (stages - 1,). Raises
    ValueError for times that do not fit."""

    def __init__(self, forward_ms: np.ndarray, backward_ms: np.ndarray,
                 comm_ms: float | np.ndarray) -> None:
        forward, backward = (np.asarray(x, float) for x in (forward_ms, backward_ms))
        if forward.ndim != 2 or forward.shape != backward.shape or 0 in forward.shape:
            raise ValueError(f"forward_ms {forward.shape} and backward_ms {backward.shape} must "
                             "have one shape (stages, microbatches)")
        self.num_stages, self.num_slots = forward.shape
        self.duration = [*forward.tolist(), *backward.tolist()]
        self.comm = np.broadcast_to(comm_ms, (self.num_stages - 1,)).tolist()
        if not np.isfinite(forward + backward).all() or min(map(min, self.duration)) < 0:
            raise ValueError("forward_ms and backward_ms must be finite and >= 0")
        self.order: list[int] = []
        self.ends: list[list[float]] = [[] for _ in self.duration]
        self._left = [iter(mine) for mine in operations(*forward.shape)]
        self._next = [next(mine) for mine in self._left]
        self._free = [0.0] * self.num_stages

    def run(self, microbatches: list[int]) -> None:
        """Appends them to the order, and runs all operations that can run by then."""
        self.order += microbatches
        while any([self._run(stage) for stage in range(self.num_stages)]):
            pass  # what a stage ran may be what another one waited for

    def _run(self, stage: int) -> bool:
        """What a stage can run now; whether there was something."""
        ran, p = False, self.num_stages
        while self._next[stage]:
            row, slot = self._next[stage]
            if slot == len(self.order):
                break
            ready = 0.0
            if row:
                # The row before it: of the stage before, of the next one on the way back.
                needs = row - 1 if row < p else row + 1 if row < 2 * p - 1 else p - 1
                if len(self.ends[needs]) == slot:
                    break
                ready = self.ends[needs][slot]
                if needs % p != stage:
                    ready += self.comm[min(needs % p, stage)]
            end = max(self._free[stage], ready) + self.duration[row][self.order[slot]]
            self.ends[row].append(end)
            self._free[stage], self._next[stage] = end, next(self._left[stage], None)
            ran = True
        return ran


def simulate(forward_ms: np.ndarray, backward_ms: np.ndarray, *,
             comm_ms: float | np.ndarray = 0.0, order: np.ndarray | None = None) -> float:
    """Milliseconds of an iteration. forward_ms, backward_ms: (stages, microbatches); a frozen stage
    has a backward row of what it still computes, or 0. comm_ms: between neighbouring stages, a
    number or (stages - 1,). order: (microbatches,) microbatch of each slot. Raises ValueError for
    shapes or values that do not fit."""
    made = Pipeline(forward_ms, backward_ms, comm_ms)
    made.run(list(range(made.num_slots) if order is None else order))
    return max(row[-1] for row in made.ends)


def inter_reorder(forward_ms: np.ndarray, backward_ms: np.ndarray, *,
                  comm_ms: float | np.ndarray = 0.0) -> np.ndarray:
    """(microbatches,) order of the microbatches by DistTrain's Algorithm 3. Arguments as in
    simulate.

    The printed loop runs to l - p and needs l + p - 2 microbatches, which there are for p = 2
    only; it is repaired to end at l - 2p + 2."""
    made = Pipeline(forward_ms, backward_ms, comm_ms)
    p, slots = made.num_stages, made.num_slots
    first, *left = np.argsort(np.sum(forward_ms, axis=0), kind="stable").tolist()
    num_last = slots - 1 if slots < 2 * p - 1 else p - 1
    last, left = left[:num_last][::-1], left[num_last:]
    made.run([first])
    # The time that forwards of stage 0 fill: first that of the first microbatch behind it.
    interval = sum(made.duration[s][first] + made.duration[p + s][first] + 2 * made.comm[s - 1]
                   for s in range(1, p))
    while left:
        known = len(made.order)
        if p > 1 and known >= p:  # from its last certain backward to the next one's start
            interval = made.ends[p + 1][known - p + 1] + made.comm[0] - made.ends[p][known - p]
        share = interval / max(p - known, 1)
        best = min(left, key=lambda m: abs(made.duration[0][m] - share))
        interval -= made.duration[0][best]
        left.remove(best)
        made.run([best])
    return np.array([*made.order, *last])
