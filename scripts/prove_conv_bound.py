"""Lower bound on the `conv_transformer` policy's largest batch cost that counts padding and the cap
of a batch.

    python scripts/prove_conv_bound.py [--ranks 512] [--batch-size 30] [--seed 0] [--minutes 10]

Input: the audio clips of the natural mix, as in bench_local.py --others --only audio; needs the
extra `ilp`. The cost of a batch is sum(l) + count * pad(longest), LB = sum(l + pad(l)) / ranks.

The configuration LP for a cap T: cover every clip with as few batches of cost <= T as possible,
batches taken in fractions. A price per length proves that T is impossible if all clips together are
worth more than `ranks` times the dearest batch (duality; Farley's bound). The prices may come from
anywhere, so they are rounded to integers, and the dearest batch is found exactly, with as many
clips of a length as it likes: a dynamic program over (count, sum of lengths) adds lengths in
ascending order and so meets every choice of the longest. It gives the dearest batch of every cost
at once, thus the smallest T that these prices allow. Lengths are not rounded to classes. Prices are
the duals of the LP over the batches found so far, smoothed towards the best so far; batches found
at one cap serve at every higher one. "proven": no assignment is below that value. "LP": fractions
of batches reach this one, so no proof of this kind goes higher.
"""

from __future__ import annotations

import argparse
import time

import highspy
import numpy as np
from bench_local import LAMBDA, inputs

from orchmllm.plan.balance import core

SCALE = 10**8  # of prices; the dearest batch is worth about 1, sums stay far below 2^63
UNREACHED = -(2**62)
KEEP = 0.5  # share of the best prices so far in the next ones


class Pricing:
    """Dearest batches of cost <= cap for integer prices of the distinct lengths (ascending)."""

    def __init__(self, length: np.ndarray, pad: np.ndarray, cap: int):
        self.length, self.pad, self.cap = length, pad, cap
        # The most clips in a batch whose longest is the k-th: the others are at least length[0].
        self.most = (cap - length + length[0]) // (length[0] + pad)

    def solve(self, price: np.ndarray, keep: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """(worth, batches): the dearest batch of cost <= c for every c, and for each longest length
        the dearest batch of cost <= keep as counts per length."""
        worth = np.zeros(self.cap + 1, np.int64)
        shape = (int(self.most.max()) + 1, self.cap + 1)
        best, last = np.full(shape, UNREACHED), np.zeros(shape, np.int32)  # by count and sum
        best[0, 0] = 0
        batches = []
        for k, (length, pad) in enumerate(zip(self.length, self.pad, strict=True)):
            found = (0, 0, 0)
            for count in range(1, self.most[k] + 1):
                room = self.cap + 1 - count * pad  # the cost with this longest stays in the array
                new = best[count - 1, :max(0, room - length)] + price[k]
                old = best[count, length:room]
                better = new > old
                old[better] = new[better]
                last[count, length:room][better] = k
                row = best[count, :room]
                np.maximum(worth[count * pad:], row, out=worth[count * pad:])
                if count * pad <= keep:
                    top = int(row[:keep + 1 - count * pad].argmax())
                    found = max(found, (int(row[top]), count, top))
            batches.append(self._trace(last, *found[1:]))
        return np.maximum.accumulate(worth), batches

    def _trace(self, last: np.ndarray, count: int, total: int) -> np.ndarray:
        out = np.zeros(len(self.length), np.int64)
        for left in range(count, 0, -1):
            k = last[left, total]
            out[k] += 1
            total -= self.length[k]
        return out


class Master:
    """Fewest batches, in fractions, of those given so far; its duals are the prices."""

    def __init__(self, items: np.ndarray):
        self.items, self.known, self.cost = items, set(), []
        self.lp = highspy.Highs()
        self.lp.setOptionValue("output_flag", False)
        for count in items:
            self.lp.addRow(float(count), highspy.kHighsInf, 0, np.zeros(0, np.int32), np.zeros(0))
        for k in range(len(items) - 1):  # a place for a clip also takes a shorter one
            self.lp.addCol(0.0, 0.0, highspy.kHighsInf, 2, np.array([k, k + 1], np.int32),
                           np.array([1.0, -1.0]))

    def add(self, batch: np.ndarray, cost: int) -> bool:
        if batch.tobytes() in self.known:
            return False
        self.known.add(batch.tobytes())
        self.cost.append(cost)
        rows = np.flatnonzero(batch).astype(np.int32)
        self.lp.addCol(1.0, 0.0, highspy.kHighsInf, len(rows), rows, batch[rows].astype(float))
        return True

    def solve(self, cap: int) -> tuple[float, np.ndarray]:
        """(batches, prices) with batches of cost <= cap only."""
        upper = np.where(np.array(self.cost) <= cap, highspy.kHighsInf, 0.0)
        n = len(self.cost)
        columns = np.arange(n, dtype=np.int32) + len(self.items) - 1
        self.lp.changeColsBounds(n, columns, np.zeros(n), upper)
        self.lp.run()
        feasible = self.lp.getModelStatus() == highspy.HighsModelStatus.kOptimal
        value = self.lp.getInfo().objective_function_value if feasible else np.inf
        return value, np.maximum(0, np.array(self.lp.getSolution().row_dual))


class Search:
    """Bisects the smallest cap between what prices exclude (low) and what the LP reaches (high)."""

    def __init__(self, length: np.ndarray, pad: np.ndarray, items: np.ndarray, ranks: int):
        self.length, self.pad, self.items, self.ranks = length, pad, items, ranks
        self.mean = float(items @ (length + pad) / ranks)
        self.low = max(int(np.ceil(self.mean)), int(length[-1] + pad[-1]))
        self.master = Master(items)
        # One of each alone, so that there is an answer at every cap, and what `conv_transformer`
        # finds on more ranks, whose batches cost less, so that the first prices at a cap are
        # sensible.
        self.add(np.eye(len(length), dtype=np.int64))
        for extra in range(max(1, ranks // 100) + 1):
            batches = self.conv(ranks + extra)
            self.add(batches)
            if extra == 0:
                self.first = self.high = max(map(self.cost, batches))
        self.pricing = Pricing(length, pad, self.high)

    def conv(self, ranks: int) -> list[np.ndarray]:
        kind = np.repeat(np.arange(len(self.items)), self.items)
        rank_of = core().conv_transformer(
            self.length[kind], self.pad[kind], np.zeros_like(kind), ranks)
        return [np.bincount(kind[rank_of == r], minlength=len(self.items))
                for r in range(ranks) if (rank_of == r).any()]

    def cost(self, batch: np.ndarray) -> int:
        return int(batch @ self.length + batch.sum() * self.pad[np.flatnonzero(batch).max()])

    def add(self, batches: list[np.ndarray]) -> bool:
        return any([self.master.add(batch, self.cost(batch)) for batch in batches])

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        best = (self.length + self.pad) / self.mean  # the prices with the best bound at this cap
        rounds, cap, bound = 0, self.high, 0.0
        while self.low < self.high and time.monotonic() < until:
            if not self.low <= cap < self.high:
                cap, bound = (self.low + self.high) // 2, 0.0
            batches, dual = self.master.solve(cap)
            if batches <= self.ranks:
                self.high = cap
                continue
            for share in (KEEP, 0.0):
                price = (SCALE * (share * best + (1 - share) * dual)).astype(np.int64)
                worth, found = self.pricing.solve(price, cap)
                total = int(self.items @ price)
                self.low = max(self.low, int(np.argmax(self.ranks * worth >= total)))
                if total / worth[cap] > bound:
                    best, bound = price / SCALE, total / worth[cap]
                if self.add([batch for batch in found if batch.any()]):
                    break
            else:
                if self.low <= cap:
                    return  # within the LP's tolerance of `ranks`
            rounds += 1
            print(f"round {rounds}: {cap / self.mean:.5f} x LB needs {bound:.3f} to {batches:.3f} "
                  f"batches; {self.describe()}", flush=True)

    def describe(self) -> str:
        return f"proven {self.low / self.mean:.5f} x LB, LP {self.high / self.mean:.5f} x LB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    weight, _ = inputs(args.ranks, args.batch_size, args.seed)["audio"]
    length, items = np.unique(weight[weight > 0], return_counts=True)
    search = Search(length, (LAMBDA * length * length).astype(np.int64), items, args.ranks)
    print(f"{args.ranks} ranks, {args.batch_size} examples per rank, seed {args.seed}: "
          f"{items.sum() / args.ranks:.1f} clips per rank, {len(length)} lengths, "
          f"LB {search.mean:.1f}, `conv_transformer` {search.first / search.mean:.5f} x LB",
          flush=True)
    search.run(60 * args.minutes)
    print(search.describe())


if __name__ == "__main__":
    main()
