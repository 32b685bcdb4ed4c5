"""What a step took, as measured on all ranks.

On a CPU times are CPU seconds of a rank's thread: waiting for other ranks does not count. On a GPU
they are the device's, from events that are read with what the step's ranks reported and told to
the other ranks with the report of the next step; waiting for parameters on their way counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from orchmllm.batch import Step
from orchmllm.comm.exchange import Sent
from orchmllm.models.phase_clock import PhaseClock, device_s
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.gain import GainMeter, slowest_costs
from orchmllm.plan.step import StepPlan, imbalance
from orchmllm.runtime.host_memory import resident_gb

CLOCK_PHASES = (*EVERY_PHASE, "exchange")
NAMED_ITEMS = 3  # of the slowest rank, the longest ones
NAMED_RANKS = 8  # of each phase, the slowest ones
SCHEDSTAT = Path("/proc/thread-self/schedstat")


def thread_times() -> np.ndarray:
    """Seconds of this thread so far: by the wall clock, on a core, and ready to run while it waited
    for a core (nan where the system does not count that)."""
    try:
        core_wait_s = int(SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, LookupError):
        core_wait_s = math.nan
    return np.array([time.perf_counter(), time.thread_time(), core_wait_s])


def peak_bytes(device: torch.device) -> float:
    """The most that tensors have taken of a GPU so far; 0 on a CPU, where nobody counts."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0


class StepFacts(NamedTuple):
    """What all d ranks reported at the end of a step (StepTimer.send). loss_sum: (d, losses),
    see WholeModel.forward; slowest (d, 2): see Step; update_s, exchange_s, wait_s, signal, save,
    peak_bytes, host_gb: (d, 1);
    cpu_s, measured_s: (d, CLOCK_PHASES); norms (d, 1 + parts): of the gradient and of its parts,
    the same on all ranks."""

    loss_sum: np.ndarray
    update_s: np.ndarray
    exchange_s: np.ndarray
    wait_s: np.ndarray
    slowest: np.ndarray
    signal: np.ndarray
    save: np.ndarray
    cpu_s: np.ndarray
    measured_s: np.ndarray
    norms: np.ndarray
    peak_bytes: np.ndarray
    host_gb: np.ndarray

    @property
    def finite(self) -> bool:
        """Of the loss and the norm of the gradient."""
        return bool(np.isfinite(self.loss_sum.sum()) and np.isfinite(self.norms[0, 0]))

    def losses(self, step: Step) -> list[float]:
        """Of the text, and of the images that are made; nan of what the step has not."""
        totals, counts = self.loss_sum.sum(axis=0), (step.num_global_targets, step.num_made_rows)
        return [float(total) / count if count else math.nan
                for total, count in zip(totals, counts, strict=False)]

    def row(self, step: Step, step_s: float, parts: Sequence[str]) -> dict:
        """Its part of the step's row of metrics. parts: those of the gradient."""
        loss, *of_images = self.losses(step)
        norm, *part_norms = self.norms[0].tolist()
        return {
            "step": step.index, "as_sampled": step.as_sampled,
            "loss": loss, **({"generator_loss": of_images[0]} if of_images else {}),
            "grad_norm": norm, "grad_norms": dict(zip(parts, part_norms, strict=True)),
            "tokens_per_s": sum(int(p.layout.num_tokens.sum()) for p in step.plans) / step_s,
            "update_s": float(self.update_s.max()),
            "data_wait_s": float(self.wait_s.max()), "plan_ms": 1e3 * step.plan_s,
            "exchange_ms": 1e3 * float(self.exchange_s.max()),
            "host_memory_gb": None if np.isnan(self.host_gb).any() else float(self.host_gb.max()),
            "num_global_targets": step.num_global_targets,
            "num_ranks": len(self.cpu_s), "phases": step.phases,
            "costs": {phase: {"linear": cost.linear, "quadratic": cost.quadratic}
                      for phase, cost in step.plans[0].spec.costs.items()},
            "cpu_s": {p: self.cpu_s[:, i].tolist() for i, p in _columns(step.plans)},
            "num_failed_media": len(step.failed), "stop_signal": int(self.signal.max()),
            "save_due": bool(self.save.max()),
        }


class Reported(NamedTuple):
    """The facts of a step on their way to the host. bad: 1.0 on the device where the loss or the
    norm of the gradient of the step is not finite, on all ranks, else 0.0."""

    sent: Sent
    sizes: list[int]
    marks: list[tuple[str, Any]]
    bad: torch.Tensor

    def facts(self) -> StepFacts:
        """Waits for them."""
        return StepFacts(*np.split(self.sent.read(), np.cumsum(self.sizes)[:-1], axis=1))


class StepTimer:
    """From a rank's clock to what all ranks took; on a GPU the clock gets its events."""

    def __init__(self, clock: PhaseClock, device: torch.device) -> None:
        self._clock, self._device = clock, device
        if device.type == "cuda":
            clock.use_events(partial(torch.cuda.Event, enable_timing=True))
        self.restart()

    def restart(self) -> None:
        """The next step does not follow the last one."""
        self._before: tuple | None = None  # of the step whose times are not known yet
        self._gain = GainMeter()
        self._seconds, self._update_s = [0.0] * len(CLOCK_PHASES), 0.0

    def send(self, send: Callable[[list], Sent], step: Step, loss_sum: torch.Tensor,
             norms: torch.Tensor, signal: int, save: bool) -> Reported:
        """What all ranks report of a step; nothing waits. send: numbers -> those of all ranks.
        norms: (1 + parts,). signal: that asked this rank to stop. save: whether this rank says that
        the time for a checkpoint has come."""
        clock = self._clock
        cpu_s = [clock.cpu_s[p] for p in CLOCK_PHASES]
        update_s = clock.cpu_s.pop("update")  # what follows is reported with the next step
        mine = StepFacts(  # lists of this rank's numbers
            loss_sum=list(loss_sum.reshape(-1)), wait_s=[step.wait_s],
            slowest=list(step.slowest), signal=[signal], save=[save],
            cpu_s=cpu_s,
            update_s=[self._update_s if clock.has_events else update_s],
            exchange_s=self._seconds[-1:] if clock.has_events else [clock.wall_s["exchange"]],
            measured_s=self._seconds if clock.has_events else cpu_s, norms=list(norms),
            peak_bytes=[peak_bytes(self._device)], host_gb=[resident_gb()])
        sent, sizes = send([number for numbers in mine for number in numbers]), [*map(len, mine)]
        of_ranks = StepFacts(*sent.rows.split(sizes, dim=1))
        finite = of_ranks.loss_sum.sum().isfinite() & of_ranks.norms[0, 0].isfinite()
        return Reported(sent, sizes, clock.take_marks(), 1.0 - finite.float())

    def measured(self, step: Step, seconds: np.ndarray, marks: list[tuple[str, Any]]
                 ) -> dict | None:
        """What metrics.jsonl says of the step that was measured: this one, or with events the one
        before. seconds: (d, CLOCK_PHASES), what all ranks reported with `step`; marks: of the
        report, which has been read."""
        timed = step.index, step.plans, slowest_costs(step.phases), step.as_sampled
        if self._clock.has_events:
            of_device = device_s(marks)
            self._seconds = [of_device.get(p, 0.0) for p in CLOCK_PHASES]
            self._update_s = of_device.get("update", 0.0)
            timed, self._before = self._before, timed
            if timed is None:
                return None
        index, plans, costs, as_sampled = timed
        slow = np.argsort(-seconds, axis=0, kind="stable")[:NAMED_RANKS]  # (8, CLOCK_PHASES) ranks
        slowest_s = seconds.max(axis=0)
        gain = self._gain.add(*costs, float(slowest_s.sum()), as_sampled)
        *phases, exchange = _columns(plans)
        return {"step": index,
                "imbalance": {p: imbalance(seconds[:, i]) for i, p in phases},
                "slowest_s": {p: float(slowest_s[i]) for i, p in (*phases, exchange)},
                "slowest": {p: _had_to_do(plans, p, int(slow[0, i])) for i, p in phases},
                "slow_ranks": {
                    p: {"ranks": slow[:, i].tolist(), "s": seconds[slow[:, i], i].tolist()}
                    for i, p in (*phases, exchange)},
                "gain": gain and gain._asdict()}


def _columns(plans: Sequence[StepPlan]) -> list[tuple[int, str]]:
    """Of the CLOCK_PHASES those that are planned, and the exchange, which is the last."""
    planned = (*plans[0].spec.phases, "exchange")
    return [(i, p) for i, p in enumerate(CLOCK_PHASES) if p in planned]


def _had_to_do(plans: Sequence[StepPlan], phase: str, rank: int) -> dict:
    """A rank's items of a phase in a step, with the longest of them."""
    items = [plan.items_of(phase, rank) for plan in plans]
    lengths, examples = (np.concatenate(x) for x in zip(*items, strict=True))
    longest = np.argsort(-lengths, kind="stable")[:NAMED_ITEMS]
    return {"rank": rank, "positions": int(lengths.sum()),
            "example_ids": examples[longest].tolist(), "lengths": lengths[longest].tolist()}
