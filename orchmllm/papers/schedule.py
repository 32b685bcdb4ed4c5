"""Pipeline schedules as tables of operations, in exactly the orders of torch.distributed.pipelining
(ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@lru_cache(maxsize=64)
def operations(schedule: str, num_devices: int, num_microbatches: int,
               num_chunks: int = 1) -> np.ndarray:
    """(p, 2 * v * l) int64: what each of p devices runs, in its order, for l microbatches.

    An operation is (kind * S + stage) * l + slot, kind 0 forward and 1 backward, S = p * v stages;
    stage s is on device s % p. Slot k is the k-th microbatch of the chosen order.

    Raises ValueError for an unknown schedule, for num_chunks > 1 with a schedule that has one stage
    a device, and for an interleaved l that is not a multiple of max(1, l // p) (torch's rule).
    """
    p, l, v = num_devices, num_microbatches, num_chunks  # noqa: E741
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if v > 1 and schedule != "interleaved":
        raise ValueError(f"schedule {schedule!r} has one stage a device: set num_chunks to 1 "
                         f"instead of {v}, or use interleaved")
    rounds = max(1, l // p)
    if schedule == "interleaved" and l % rounds:
        raise ValueError(f"interleaved: num_microbatches {l} must be a multiple of {rounds}, the "
                         f"rounds of {p} devices")
    table = np.stack([_device(schedule, p, l, v, r, l // rounds) for r in range(p)])
    table.setflags(write=False)
    return table


def _device(schedule: str, p: int, l: int, v: int, rank: int,  # noqa: E741
            per_round: int) -> np.ndarray:
    """(2 * v * l,) operations of one device."""
    step = np.arange(v * l)
    if schedule == "interleaved":
        warm_up = min((v - 1) * per_round + 2 * (p - 1 - rank), v * l)
        chunk = step // per_round % v
        slot = step // (per_round * v) * per_round + step % per_round
    else:
        # torch's 1F1B runs min(l, p - rank) forwards, then a backward and a forward in turn.
        warm_up = l if schedule == "gpipe" else min(l, p - 1 - rank)
        chunk, slot = np.zeros_like(step), step
    forward = (chunk * p + rank) * l + slot
    backward = (p * v + (v - 1 - chunk) * p + rank) * l + slot
    steady = np.stack([forward[warm_up:], backward[:v * l - warm_up]], axis=1).ravel()
    return np.concatenate([forward[:warm_up], steady, backward[v * l - warm_up:]])
