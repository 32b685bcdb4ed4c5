"""A closer look at some steps: a Chrome trace of a window of them (profile.steps), and what a rank
had to do in a step in which its memory was exhausted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from orchmllm.batch import Step
from orchmllm.config.recipe import ProfileConfig
from orchmllm.plan.rearrange import sums_of
from orchmllm.plan.step import PHASES, StepPlan


class StepProfiler:
    """Steps of profile.steps under torch.profiler; each of the first profile.num_ranks ranks writes
    one trace into `folder`, for chrome://tracing or https://ui.perfetto.dev. A run that starts
    inside the window records the rest of it."""

    def __init__(self, config: ProfileConfig, folder: Path, rank: int) -> None:
        self._window = config.window if rank < config.num_ranks else range(0)
        self._path = folder / f"steps_{config.steps}_rank{rank}.json"
        self._profile: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if self._profile is None and step in self._window:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()

    def after(self, step: int) -> Path | None:
        """The trace's file, after the last step of the window."""
        if self._profile is None or step + 1 in self._window:
            return None
        return self.close()

    def close(self) -> Path | None:
        """Writes what was recorded; nothing where nothing was."""
        profile, self._profile = self._profile, None
        if profile is None:
            return None
        profile.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._path))
        return self._path


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that host or device has no memory left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


@contextmanager
def explained_oom(step: Step, rank: int, folder: Path) -> Iterator[None]:
    """Where memory runs out inside, leaves step_N_rankR.json in `folder`: the step's plan, with
    this rank's examples and every rank's positions by phase; on a GPU also a snapshot of the
    allocator, step_N_rankR.pickle, for https://pytorch.org/memory_viz. Raises RuntimeError with the
    file's name in place of the error."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        name = f"step_{step.index}_rank{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(_what_was_planned(step, rank, e), indent=1), encoding="utf-8")
        if torch.cuda.is_available():
            with suppress(RuntimeError, OSError):  # the report above matters more
                torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))
        raise RuntimeError(f"out of memory ({str(e).splitlines()[0]}); what each rank had to do is "
                           f"in {path}: lower train.batch_size, set fsdp.activation_checkpointing, "
                           "or fsdp.memory_gb to have the recipe checked before") from e


def _what_was_planned(step: Step, rank: int, error: BaseException) -> dict:
    def positions(plan: StepPlan, phase: str) -> list[int]:
        move = plan.rearrangement(phase)
        return sums_of(plan.layout.item_lengths(phase)[move.order], move.target_sizes).tolist()

    micro = [{"example_ids": one.rank_plan.example_ids.tolist(),
              "positions": {phase: positions(one.plan, phase) for phase in PHASES}}
             for one in step.micro]
    return {"step": step.index, "rank": rank, "error": str(error), "microbatches": micro}
