"""What other programs show of a run (run.trackers): TensorBoard, and Weights & Biases by its own
environment variables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from orchmllm.config.recipe import RunConfig
from orchmllm.runtime.attempts import flat

CLOSE_S = 60.0  # that a tracker has to send what is left
# What logs values at a step, and what ends the tracker.
Tracker = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]


def _tensorboard(folder: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path) -> Tracker:
    """Each start of a run is a run there, and all of them are one group. Their own step only grows,
    so `step` is a value: a rollback goes back. Queries of URLs, which may hold signatures, stay
    here."""
    import wandb

    recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    run = wandb.init(dir=str(folder), group=folder.resolve().name, config=flat(recipe),
                     settings=wandb.Settings(console="off"))  # the run's lines stay its own
    run.define_metric("*", step_metric="step")
    return (lambda values, step: run.log({"step": step, **values})), run.finish


_OPENED = {"tensorboard": _tensorboard, "wandb": _wandb}


class Trackers:
    """Those of run.trackers, on the rank that shows the run. A tracker that fails is named once to
    `note` and dropped: it never ends the run."""

    def __init__(self, run: RunConfig, note: Callable[[str], object]) -> None:
        self._note, self._open = note, {}
        for name in run.trackers:
            with self._dropping(name):
                self._open[name] = _OPENED[name](run.folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """values: by name, of a step."""
        for name, (log, _) in list(self._open.items()):
            with self._dropping(name):
                log(values, step)

    def close(self) -> None:
        """Writes out what is left. A tracker that needs longer than CLOSE_S is named, and not
        waited for: an error of this rank may still have to reach the others."""
        for name in list(self._open):
            ending = threading.Thread(target=self._finish, args=(name,), daemon=True)
            ending.start()
            ending.join(CLOSE_S)
            if ending.is_alive():
                self._note(f"warning: run.trackers: {name} has not ended after {CLOSE_S:g} s and "
                           "is not waited for; what it shows of this run may lack its end")
        self._open.clear()

    def _finish(self, name: str) -> None:
        with self._dropping(name):
            self._open[name][1]()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # of any kind: what it raises is not ours
            self._open.pop(name, None)
            self._note(f"warning: run.trackers: {name} failed and gets nothing more of this run, "
                       f"which goes on ({type(e).__name__}: {e})")
