"""What other programs show of a run (run.trackers): TensorBoard, and Weights & Biases by its own
environment variables. Each works in a thread of its own, so that the run never waits for it."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from orchmllm.config.recipe import RunConfig
from orchmllm.runtime.attempts import flat

CLOSE_S = 60.0  # that the trackers have to send what is left
MOST_ROWS = 10_000  # that wait for a tracker
# What logs values at a step, and what ends the tracker.
Tracker = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]


def _tensorboard(folder: Path) -> Callable[[], Tracker]:
    """Where the run goes back to a step, by a rollback or as it resumes, what it had logged after
    that step is hidden: of the step itself it is kept, as a validation before it is not repeated.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer, last = None, math.inf

    def log(values: Mapping[str, float], step: int) -> None:
        nonlocal writer, last
        if step < last:
            close()
            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step and step + 1)
        last = step
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def close() -> None:
        if writer is not None:
            writer.close()

    return lambda: (log, close)


def _wandb(folder: Path) -> Callable[[], Tracker]:
    """Each start of a run is a run there, and all of them are one group. Their own step only grows,
    so `step` is a value: a rollback goes back. Queries of URLs, which may hold signatures, stay
    here."""
    import wandb

    def begin() -> Tracker:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        run = wandb.init(dir=str(folder), group=folder.resolve().name, config=flat(recipe),
                         settings=wandb.Settings(console="off"))  # the run's lines stay its own
        run.define_metric("*", step_metric="step")
        return (lambda values, step: run.log({"step": step, **values})), run.finish

    return begin


# Imports what a tracker needs, and returns what begins it in its thread.
_FOUND = {"tensorboard": _tensorboard, "wandb": _wandb}


class _Thread(threading.Thread):
    """A tracker begins, logs the rows that are put, and ends at None. error: what it failed with.
    """

    def __init__(self, begin: Callable[[], Tracker]) -> None:
        super().__init__(daemon=True)
        self._begin, self._rows = begin, queue.Queue(MOST_ROWS)
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            log, end = self._begin()
            while row := self._rows.get():
                log(*row)
            end()
        except BaseException as e:  # of any kind, as it may exit: what it raises is not ours
            self.error = e if isinstance(e, Exception) else RuntimeError(repr(e))

    def put(self, row: tuple[Mapping[str, float], int] | None) -> None:
        """Raises what the tracker failed with, or TimeoutError."""
        if self.error:
            raise self.error
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            raise TimeoutError(f"{MOST_ROWS} rows wait for it") from None


class Trackers:
    """Those of run.trackers, on the rank that shows the run. A tracker that fails is named once to
    `note` and dropped: it never ends the run. patience_s: that the run may take to end."""

    def __init__(self, run: RunConfig, note: Callable[[str], object], patience_s: float) -> None:
        self._note, self._patience_s = note, patience_s
        self._open: dict[str, _Thread] = {}
        for name in run.trackers:
            with self._dropping(name):
                self._open[name] = _Thread(_FOUND[name](run.folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """values: by name, of a step."""
        self._put((values, step))

    def _put(self, row: tuple[Mapping[str, float], int] | None) -> None:
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.put(row)

    def close(self) -> None:
        """Writes out what is left. A tracker that needs longer than CLOSE_S is named, and not
        waited for: an error of this rank may still have to reach the others."""
        limit_s = min(CLOSE_S, self._patience_s)
        until = time.monotonic() + limit_s
        self._put(None)
        for name, tracker in list(self._open.items()):
            with self._dropping(name):
                tracker.join(max(0.0, until - time.monotonic()))
                if tracker.error:
                    raise tracker.error
                if tracker.is_alive():
                    self._note(f"warning: run.trackers: {name} has not ended after {limit_s:g} s "
                               "and is not waited for; what it shows of this run may lack its end")
        self._open.clear()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self._open.pop(name, None)
            self._note(f"warning: run.trackers: {name} failed and gets nothing more of this run, "
                       f"which goes on ({type(e).__name__}: {e})")
