"""When a pipeline's iteration ends, and in which order its microbatches should run.

Simulated are schedules of torch.distributed.pipelining with uneven stages, uneven microbatches and
a delay between devices that overlaps with computing. DistTrain calls the order inside a pipeline
inter-microbatch (section 6.2) and the division over data-parallel groups intra-microbatch (6.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchmllm.papers.schedule import operations
from orchmllm.plan.balance import core


@dataclass(frozen=True)
class Timeline:
    """One iteration of l microbatches on p devices with S stages, in milliseconds.

    start, end (2, S, l): of each forward and backward, by microbatch."""

    start: np.ndarray
    end: np.ndarray
    total_ms: float


def simulate(forward_ms: np.ndarray, backward_ms: np.ndarray, *, schedule: str = "1f1b",
             num_chunks: int = 1, comm_ms: float | np.ndarray = 0.0,
             order: np.ndarray | None = None) -> Timeline:
    """The timeline of an iteration. forward_ms, backward_ms: (S, l), S = devices * num_chunks; a
    frozen stage has a backward row of what it still computes, or 0. comm_ms: between neighbouring
    stages on different devices, a number or (S - 1,). order: (l,) microbatch of each slot.

    Raises ValueError for shapes or values that do not fit and for what `operations` refuses."""
    ops, duration, comm = _tables(forward_ms, backward_ms, schedule, num_chunks, comm_ms)
    stages, slots = duration.shape[0] // 2, duration.shape[1]
    order = np.arange(slots) if order is None else np.ascontiguousarray(order, np.int64)
    total, start, end = core().pipeline_times(ops, duration, comm, order)
    return Timeline(*(x.reshape(2, stages, slots) for x in (start, end)), total)


def inter_reorder(forward_ms: np.ndarray, backward_ms: np.ndarray, *, num_chunks: int = 1,
                  comm_ms: float | np.ndarray = 0.0) -> np.ndarray:
    """(l,) order of the microbatches by DistTrain's Algorithm 3. Arguments as in simulate.

    The printed loop runs to l - p and needs l + p - 2 microbatches, which there are for p = 2
    only; it is repaired to end at l - 2p + 2. Chunks of a device count as one stage."""
    merged = [np.asarray(x, float).reshape(num_chunks, -1, np.shape(x)[-1]).sum(axis=0)
              for x in (forward_ms, backward_ms)]
    p = len(merged[0])
    comm = np.broadcast_to(np.asarray(comm_ms, float), (p * num_chunks - 1,))[:p - 1]
    ops, duration, comm = _tables(*merged, "1f1b", 1, comm)
    return core().inter_reorder(ops, duration, comm, np.ascontiguousarray(merged[0].sum(axis=0)))


def search_order(forward_ms: np.ndarray, backward_ms: np.ndarray, *, schedule: str = "1f1b",
                 num_chunks: int = 1, comm_ms: float | np.ndarray = 0.0,
                 max_evaluations: int = 300, seed: int = 0) -> np.ndarray:
    """(l,) order found from the better of two starts (the smallest first, then descending; and
    Algorithm 3's) by random moves, kept when the iteration does not grow. Arguments as in
    simulate; the same arguments give the same order."""
    ops, duration, comm = _tables(forward_ms, backward_ms, schedule, num_chunks, comm_ms)
    largest_first = np.argsort(-duration.sum(axis=0), kind="stable")
    starts = [np.roll(largest_first, 1),
              inter_reorder(forward_ms, backward_ms, num_chunks=num_chunks, comm_ms=comm_ms)]
    totals = [core().pipeline_search(ops, duration, comm, o, 1, seed)[1] for o in starts]
    best = starts[int(np.argmin(totals))]
    return core().pipeline_search(ops, duration, comm, best, max(1, max_evaluations - 2), seed)[0]


def _tables(forward_ms: np.ndarray, backward_ms: np.ndarray, schedule: str, num_chunks: int,
            comm_ms: float | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(operations, (2 * S, l) times, (S - 1,) delays), checked."""
    forward, backward = (np.asarray(x, float) for x in (forward_ms, backward_ms))
    if forward.ndim != 2 or forward.shape != backward.shape or 0 in forward.shape:
        raise ValueError(f"forward_ms {forward.shape} and backward_ms {backward.shape} must have "
                         "one shape (stages, microbatches)")
    stages, slots = forward.shape
    if num_chunks < 1 or stages % num_chunks:
        raise ValueError(f"{stages} stages do not divide into num_chunks = {num_chunks} a device")
    comm = np.asarray(comm_ms, float)
    if comm.ndim > 1 or comm.size not in (1, stages - 1):
        raise ValueError(f"comm_ms has shape {comm.shape}: give a number or {stages - 1} values")
    duration = np.concatenate([forward, backward])
    for name, values in (("forward_ms and backward_ms", duration), ("comm_ms", comm)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"{name} must be finite and >= 0")
    return (operations(schedule, stages // num_chunks, slots, num_chunks), duration,
            np.ascontiguousarray(np.broadcast_to(comm, (stages - 1,))))
