"""When a pipeline's iteration ends, and in which order its microbatches should run.

Simulated are schedules of torch.distributed.pipelining with uneven stages, uneven microbatches and
a delay between devices that overlaps with computing. DistTrain calls the order inside a pipeline
inter-microbatch (section 6.2) and the division over data-parallel groups intra-microbatch (6.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchmllm.plan.balance import core
from orchmllm.simulate.schedule import operations


@dataclass(frozen=True)
class Timeline:
    """One iteration of l microbatches on p devices with S stages, in milliseconds.

    start, end (2, S, l): of each forward and backward, by microbatch. bubble (p,): idle share of
    each device. peak_in_flight (S,): microbatches whose activations a stage holds at once."""

    start: np.ndarray
    end: np.ndarray
    total_ms: float
    bubble: np.ndarray
    peak_in_flight: np.ndarray


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
    start, end = (x.reshape(2, stages, slots) for x in (start, end))
    work = duration.reshape(2, num_chunks, -1, slots).sum(axis=(0, 1, 3))
    return Timeline(start, end, total, 1 - work / total if total else work * 0,
                    in_flight(ops, stages, slots))


def in_flight(ops: np.ndarray, num_stages: int, num_slots: int) -> np.ndarray:
    """(S,) most microbatches that a stage has run forward and not yet backward."""
    stage, backward = ops // num_slots % num_stages, ops >= num_stages * num_slots
    held = np.zeros(num_stages, np.int64)
    for s in range(num_stages):
        mine = stage[s % len(ops)] == s
        held[s] = np.cumsum(np.where(backward[s % len(ops)][mine], -1, 1)).max()
    return held


def lower_bound(forward_ms: np.ndarray, backward_ms: np.ndarray, *, num_chunks: int = 1,
                comm_ms: float | np.ndarray = 0.0) -> float:
    """Milliseconds that no order of microbatches beats, whatever the schedule: a device cannot
    start before the cheapest way to it, has all its work to do, and the cheapest way back follows;
    and every microbatch passes through all stages twice. Arguments as in simulate. forward_ms,
    backward_ms: (stages, microbatches)."""
    _, duration, comm = _tables(forward_ms, backward_ms, "interleaved" if num_chunks > 1 else
                                "1f1b", num_chunks, comm_ms)
    f, b = np.split(duration, 2)
    hops = np.concatenate([[0.0], np.cumsum(comm if len(f) > num_chunks else 0 * comm)])
    device = (f + b).reshape(num_chunks, -1, f.shape[1]).sum(axis=(0, 2))
    head, tail = ((np.cumsum(x, axis=0) - x).min(axis=1)[:len(device)] for x in (f, b))
    through = (f + b).sum(axis=0).max() + 2 * hops[-1]
    return float(max(through, (head + device + tail + 2 * hops[:len(device)]).max()))


def inter_reorder(forward_ms: np.ndarray, backward_ms: np.ndarray, *, num_chunks: int = 1,
                  comm_ms: float | np.ndarray = 0.0, as_printed: bool = False) -> np.ndarray:
    """(l,) order of the microbatches by DistTrain's Algorithm 3. Arguments as in simulate.

    The printed loop runs to l - p and needs l + p - 2 microbatches; it is repaired to end at
    l - 2p + 2. as_printed: the loop as it stands, which raises ValueError unless p = 2. Chunks of a
    device count as one stage."""
    merged = [np.asarray(x, float).reshape(num_chunks, -1, np.shape(x)[-1]).sum(axis=0)
              for x in (forward_ms, backward_ms)]
    p, slots = merged[0].shape
    if as_printed and p != 2:
        raise ValueError(f"Algorithm 3 as printed takes {slots + p - 2} of {slots} microbatches in "
                         f"a pipeline of {p} stages: it is right for 2 stages only")
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
