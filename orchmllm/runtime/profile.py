"""A closer look at some steps: a Chrome trace of a window of them (profile.steps), and what a rank
had to do in a step in which its memory was exhausted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from orchmllm.batch import Step
from orchmllm.config.recipe import Recipe
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.runtime.files import write_text

EXHAUSTED = "recompute.json"
IN_VALIDATION = "validation keeps nothing that could be recomputed: lower train.batch_size"
IN_ANSWERS = "for answers to held-out examples lower train.num_samples or train.sample_tokens"


def exhausted_before(folder: Path) -> dict:
    """What a run folder says of memory that ran out (see orchmllm.sharding.run_memory, which tells
    of what it cannot use: then also of a file that is no JSON); {} if it did not."""
    path = folder / EXHAUSTED
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        return {"next": "not known: the file is damaged"}


class StepProfiler:
    """rank: this one's. log: shows a line. exhausted: when memory has run out in a step and a phase
    of the clock, what to do, in words, and what the next start has to know, for JSON."""

    def __init__(self, recipe: Recipe, rank: int, log: Callable[[str], None],
                 exhausted: Callable[[Step, str | None], tuple[str, dict]]) -> None:
        config = recipe.profile
        self._folder, self._rank, self._log = recipe.run.folder, rank, log
        self._exhausted = exhausted
        self._steps = config.steps
        self._window = config.window if rank < config.num_ranks else range(0)
        self._path = self._folder / "profile" / f"steps_{config.steps}_rank{rank}.json"
        self._profile: torch.profiler.profile | None = None

    @contextmanager
    def around(self, step: Step, clock: PhaseClock) -> Iterator[None]:
        """Around the training of a step. Those of profile.steps are run under torch.profiler; each
        of the first profile.num_ranks ranks writes one trace of them into the folder `profile` of
        the run, for chrome://tracing or https://ui.perfetto.dev. A run that starts inside the
        window records the rest of it. clock: of the model.

        Where memory runs out inside, it leaves step_N_rankR.json in the folder `oom` of the run:
        the step's plan, with this rank's examples and every rank's positions by phase; on a GPU
        also a snapshot of the allocator, step_N_rankR.pickle, for
        https://pytorch.org/memory_viz; and recompute.json in the run folder, where the next start
        finds what it has to recompute, if that helps. Raises RuntimeError with the file's name in
        place of the error."""
        if self._profile is None and step.index in self._window:
            self._profile = torch.profiler.profile()  # the CPU, and a GPU where there is one
            self._profile.start()
        with memory_errors(partial(self._ran_out, step, clock)):
            yield

    def stop(self, step: Step) -> None:
        """Ends a recording after its last step."""
        if self._profile is not None and step.index + 1 not in self._window:
            self.close()
            self._log(f"profile of steps {self._steps}: {self._path}")

    def _ran_out(self, step: Step, clock: PhaseClock, error: BaseException) -> str:
        """Writes what was planned, on a GPU what its memory held, and what the next start has to
        know: several ranks may, and write the same. Returns what is told."""
        path = self._folder / "oom" / f"step_{step.index}_rank{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"step": step.index, "rank": self._rank, "error": str(error), "microbatches": [
            {"example_ids": one.rank_plan.example_ids.tolist(), "positions": {
                phase: one.plan.positions(phase).tolist() for phase in one.plan.spec.phases}}
            for one in step.micro]}
        path.write_text(json.dumps(report, indent=1), encoding="utf-8")
        if torch.cuda.is_available():
            with suppress(RuntimeError, OSError):  # the report above matters more
                torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        advice, known = self._exhausted(step, clock.phase)
        if known:
            mine = self._folder / f"{EXHAUSTED}.{self._rank}"
            write_text(mine, json.dumps(known))
            mine.replace(self._folder / EXHAUSTED)
        return f"what each rank had to do is in {path}: {advice}"

    def close(self) -> None:
        """Writes what was recorded; nothing where nothing was."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))


@contextmanager
def memory_errors(told: Callable[[BaseException], str]) -> Iterator[None]:
    """Where host or device has no memory left inside, RuntimeError says so, and what `told` says
    of the error."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not (isinstance(e, MemoryError | torch.OutOfMemoryError)
                or "can't allocate memory" in str(e)):
            raise
        why = (str(e) or type(e).__name__).splitlines()[0]
        raise RuntimeError(f"out of memory ({why}); {told(e)}") from e
