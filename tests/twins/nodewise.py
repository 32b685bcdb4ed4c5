"""Slow twin of `orchmllm._core.nodewise`, the tabu search of the node-wise rearrangement."""

from __future__ import annotations

import numpy as np

from tests.twins.core import largest_shares, near_home, ranks_inside

PATIENCE, KICK = 1500, 100  # steps without a new best
FEW = 32  # batches


class Traffic:
    """What every rank sends to other nodes."""

    def __init__(self, source, batch, volume, num_ranks, width):
        self.d, self.width = num_ranks, width
        shares = sorted((b, r, v) for v, b, r in largest_shares(source, batch, volume) if v > 0)
        self.of_batch = [[(r, v) for b, r, v in shares if b == k] for k in range(num_ranks)]
        self.of_source = [[b for b, r, _ in shares if r == k] for k in range(num_ranks)]

    def of(self, node_of: list[int]) -> list[int]:
        out = [0] * self.d
        for b, pieces in enumerate(self.of_batch):
            for rank, volume in pieces:
                if rank // self.width != node_of[b]:
                    out[rank] += volume
        return out

    def change(self, a: int, b: int, node_of: list[int]) -> dict[int, int]:
        """Traffic added when a and b swap nodes, in the order in which the core adds it up."""
        out: dict[int, int] = {}
        p, q = node_of[a], node_of[b]
        for batch, node, sign in ((a, p, 1), (b, q, 1), (a, q, -1), (b, p, -1)):
            for rank, volume in self.of_batch[batch]:
                if rank // self.width == node:
                    out[rank] = out.get(rank, 0) + sign * volume
        return out

    def swaps(self, busiest: int, node_of: list[int], members: list[list[int]]):
        """Pairs (batch of the node that gets relief, batch of another node) worth a look."""
        home = busiest // self.width
        return [(a, b) for b in self.of_source[busiest] if node_of[b] != home
                for a in members[home]]


def nodewise(
    source: np.ndarray, batch: np.ndarray, volume: np.ndarray, num_ranks: int,
    ranks_per_node: int, steps: int,
) -> np.ndarray:
    """rank_of_batch (num_ranks,) with a busy rank that sends little to other nodes."""
    width = min(ranks_per_node, num_ranks)
    traffic = Traffic(source, batch, volume, num_ranks, width)
    start = near_home(source, batch, volume, num_ranks, width)
    node_of = [int(r) // width for r in start]
    members = [[b for b in range(num_ranks) if node_of[b] == k]
               for k in range(-(-num_ranks // width))]
    now = traffic.of(node_of)
    best, best_nodes, last = max(now), list(node_of), 0
    rests, random = [-1] * num_ranks, 0
    few = num_ranks <= FEW

    def swap(a: int, b: int) -> None:
        p, q = node_of[a], node_of[b]
        members[p][members[p].index(a)], members[q][members[q].index(b)] = b, a
        node_of[a], node_of[b] = q, p

    for step in range(steps):
        if (step - last >= PATIENCE and not few) or best <= 0:
            break
        goal = best - best // 32
        if few and step > last and (step - last) % KICK == 0:
            for _ in range(4):
                drawn = []
                for _ in range(2):
                    random = (random * 6364136223846793005 + 1442695040888963407) % 2**64
                    drawn.append((random >> 33) % num_ranks)
                if node_of[drawn[0]] != node_of[drawn[1]]:
                    swap(*drawn)
            now = traffic.of(node_of)

        def price(pair, goal=goal, now=now):
            def excess(value):
                return float(max(0, value - goal)) ** 2
            total = 0.0
            for k, amount in traffic.change(*pair, node_of).items():
                if amount:
                    total += excess(now[k] + amount) - excess(now[k])
            return total

        offers = [(a, b) for a, b in traffic.swaps(now.index(max(now)), node_of, members)
                  if rests[a] < step and rests[b] < step]
        if not offers and not few:
            break
        if offers:
            a, b = min(offers, key=price)
            swap(a, b)
            rests[a] = rests[b] = step + min(3 + step % 7, num_ranks // 4)
            now = traffic.of(node_of)
        if max(now) < best:
            best, best_nodes, last = max(now), list(node_of), step
    return ranks_inside(source, batch, volume, num_ranks, width, best_nodes)
