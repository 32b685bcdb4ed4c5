"""What a step took, as measured on all ranks.

On a CPU times are CPU seconds of a rank's thread: waiting for other ranks does not count. On a GPU
they are the device's, from events that are read after the step's one synchronisation and told to
the other ranks in that of the next step; waiting for parameters on their way counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchmllm.models.phase_clock import PhaseClock
from orchmllm.plan.step import PHASES, StepPlan, imbalance

CLOCK_PHASES = (*PHASES, "exchange")


@dataclass(frozen=True)
class MeasuredStep:
    """seconds: (d, CLOCK_PHASES)."""

    index: int
    plans: Sequence[StepPlan]
    seconds: np.ndarray

    def row(self) -> dict:
        """What metrics.jsonl says of it."""
        return {"step": self.index,
                "imbalance": {p: imbalance(self.seconds[None, :, i])
                              for i, p in enumerate(PHASES)},
                "slowest_s": dict(zip(CLOCK_PHASES, self.seconds.max(axis=0).tolist(),
                                      strict=True))}


class StepTimer:
    """From a rank's clock to what all ranks took."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """The next step does not follow the last one."""
        self._before: tuple[int, Sequence[StepPlan]] | None = None
        self._seconds = [0.0] * len(CLOCK_PHASES)

    def tell(self) -> list[float]:
        """This rank's seconds (CLOCK_PHASES), for the step's synchronisation."""
        if self._clock.has_events:
            return self._seconds
        return [self._clock.cpu_s[p] for p in CLOCK_PHASES]

    def hear(self, index: int, plans: Sequence[StepPlan], seconds: np.ndarray
             ) -> MeasuredStep | None:
        """seconds: (d, CLOCK_PHASES), what all ranks told in the synchronisation of step `index`
        -> the step that was measured: this one, or with events the one before."""
        if not self._clock.has_events:
            return MeasuredStep(index, plans, seconds)
        device_s = self._clock.device_s()
        self._seconds = [device_s.get(p, 0.0) for p in CLOCK_PHASES]
        before, self._before = self._before, (index, plans)
        return before and MeasuredStep(*before, seconds)
