"""A closer look at some steps: a Chrome trace of a window of them (profile.steps), and what a rank
had to do in a step in which its memory was exhausted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from orchmllm.batch import Step
from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import PHASES
from orchmllm.runtime.files import write_text

EXHAUSTED = "recompute.json"


def exhausted_before(folder: Path) -> dict:
    """What a run folder says of memory that ran out (see orchmllm.sharding.run_memory); {} if it
    did not."""
    path = folder / EXHAUSTED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class StepProfiler:
    """rank: this one's. log: shows a line. exhausted: what to do when memory has run out, in words,
    and what the next start has to know, for JSON."""

    def __init__(self, recipe: Recipe, rank: int, log: Callable[[str], None],
                 exhausted: Callable[[Step], tuple[str, dict]]) -> None:
        config = recipe.profile
        self._folder, self._rank, self._log = recipe.run.folder, rank, log
        self._exhausted = exhausted
        self._steps = config.steps
        self._window = config.window if rank < config.num_ranks else range(0)
        self._path = self._folder / "profile" / f"steps_{config.steps}_rank{rank}.json"
        self._profile: torch.profiler.profile | None = None

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Around the training of a step. Those of profile.steps are run under torch.profiler; each
        of the first profile.num_ranks ranks writes one trace of them into the folder `profile` of
        the run, for chrome://tracing or https://ui.perfetto.dev. A run that starts inside the
        window records the rest of it.

        Where memory runs out inside, it leaves step_N_rankR.json in the folder `oom` of the run:
        the step's plan, with this rank's examples and every rank's positions by phase; on a GPU
        also a snapshot of the allocator, step_N_rankR.pickle, for
        https://pytorch.org/memory_viz; and recompute.json in the run folder, where the next start
        finds what it has to recompute. Raises RuntimeError with the file's name in place of the
        error."""
        if self._profile is None and step.index in self._window:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
        try:
            yield
        except (RuntimeError, MemoryError) as e:
            if not out_of_memory(e):
                raise
            where, why = _report(step, self._rank, e, self._folder / "oom"), str(e).splitlines()[0]
            advice, known = self._exhausted(step)
            if known:
                self._remember(known)
            raise RuntimeError(
                f"out of memory ({why}); what each rank had to do is in {where}: {advice}; or "
                "lower train.batch_size; with fsdp.memory_gb the recipe is checked before") from e
        if self._profile is not None and step.index + 1 not in self._window:
            self.close()
            self._log(f"profile of steps {self._steps}: {self._path}")

    def _remember(self, known: dict) -> None:
        """Several ranks may; they write the same."""
        path = self._folder / f"{EXHAUSTED}.{self._rank}"
        write_text(path, json.dumps(known))
        path.replace(self._folder / EXHAUSTED)

    def close(self) -> None:
        """Writes what was recorded; nothing where nothing was."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that host or device has no memory left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _report(step: Step, rank: int, error: BaseException, folder: Path) -> Path:
    """Writes what was planned, and on a GPU what its memory held. Returns the first one's file."""
    path = folder / f"step_{step.index}_rank{rank}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_what_was_planned(step, rank, error), indent=1), encoding="utf-8")
    if torch.cuda.is_available():
        with suppress(RuntimeError, OSError):  # the report above matters more
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
    return path


def _what_was_planned(step: Step, rank: int, error: BaseException) -> dict:
    micro = [{"example_ids": one.rank_plan.example_ids.tolist(),
              "positions": {phase: one.plan.positions(phase).tolist() for phase in PHASES}}
             for one in step.micro]
    return {"step": step.index, "rank": rank, "error": str(error), "microbatches": micro}
