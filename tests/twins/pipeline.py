"""Slow, obvious twins of orchmllm/papers/pipeline.py: lists, run until stuck."""

from __future__ import annotations


def device_lists(p: int, l: int) -> list[list[tuple[str, int, int]]]:  # noqa: E741
    """Per device its operations (F or B, stage, slot), as torch's documentation tells them."""
    out = []
    for rank in range(p):
        forward, backward = ([(kind, rank, slot) for slot in range(l)] for kind in "FB")
        ahead = min(l, p - 1 - rank)
        ops, forward = forward[:ahead], forward[ahead:]
        while backward:
            ops += forward[:1] + backward[:1]
            forward, backward = forward[1:], backward[1:]
        out.append(ops)
    return out


def run(lists, forward, backward, comm, order, known: int | None = None) -> dict:
    """(kind, stage, slot) -> (start, end) of everything that can run when the first `known` slots
    are known."""
    stages, p = len(forward), len(lists)
    times, at, free = {}, [0] * p, [0.0] * p
    moved = True
    while moved:
        moved = False
        for d in range(p):
            while at[d] < len(lists[d]):
                kind, s, slot = lists[d][at[d]]
                if known is not None and slot >= known:
                    break
                if kind == "F":
                    needs, hop = ("F", s - 1, slot) if s else None, s - 1
                else:
                    needs, hop = (("B", s + 1, slot), s) if s < stages - 1 else (
                        ("F", s, slot), None)
                if needs and needs not in times:
                    break
                ready = 0.0
                if needs:
                    ready = times[needs][1]
                    if needs[1] % p != s % p:
                        ready += comm[hop]
                start = max(free[d], ready)
                row = forward if kind == "F" else backward
                times[kind, s, slot] = start, start + row[s][order[slot]]
                free[d] = times[kind, s, slot][1]
                at[d] += 1
                moved = True
    return times


def inter_reorder(forward, backward, comm) -> list[int]:
    """Algorithm 3, repaired, by simulating anew for every interval."""
    p, n = len(forward), len(forward[0])
    size = [sum(row[m] for row in forward) for m in range(n)]
    left = sorted(range(n), key=lambda m: (size[m], m))
    rear_count = n - 1 if n < 2 * p - 1 else p - 1
    first, rear, left = left[0], left[1:1 + rear_count], left[1 + rear_count:]
    order = [first]
    lists = device_lists(p, n)

    def take(volume: float) -> float:
        best = min(left, key=lambda m: (abs(forward[0][m] - volume), left.index(m)))
        left.remove(best)
        order.append(best)
        return forward[0][best]

    if left:
        volume = sum(forward[s][first] + backward[s][first] + 2 * comm[s - 1]
                     for s in range(1, p))
        for k in range(p - 1):
            volume -= take(volume / (p - 1 - k))
    while left:
        i = len(order) - p  # the last backward of stage 0 that is certain
        times = run(lists, forward, backward, comm, order, known=len(order))
        take(times["B", 1, i + 1][1] + comm[0] - times["B", 0, i][1])
    return order + rear[::-1]
