"""What goes wrong in a step without ending the run, unless the recipe says so: media that cannot be
decoded, a loss or gradient that is not finite. The same decision on all ranks; rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchmllm.batch import Step
from orchmllm.config.recipe import Recipe
from orchmllm.runtime.metrics import JsonLines, read_rows
from orchmllm.runtime.run_state import MediaCount, NonFiniteError, Progress, name_of


class Incidents:
    """writes: on one rank. log: shows a line."""

    def __init__(self, recipe: Recipe, *, writes: bool, log: Callable[[str], None]) -> None:
        self._recipe, self._writes, self._log = recipe, writes, log
        self._folder = recipe.run.folder
        self._logs: dict[Path, JsonLines] = {}
        self._listed: set[tuple] = set()  # what quarantine.jsonl has
        self._warned = False  # of a medium that cannot be decoded
        self._alone = False  # no server has answered in the step before

    def media(self, step: Step, counted: MediaCount, describe: Callable[[int, int], dict]) -> None:
        """Counts and quarantines what could not be decoded. describe: of the dataset. Raises
        MediaLimitError as the recipe says."""
        lines = counted.count(step, describe)
        where = self._folder / "quarantine.jsonl"
        if lines and self._writes:
            self._quarantine(where, lines)
        if lines and not self._warned:
            self._warned = True
            self._log(f"warning: not usable, so its example is not learnt: {name_of(lines[0])}; "
                      f"this and further ones are listed in {where}")
        counted.check(self._recipe.data, lines)

    def preprocessed(self, step: Step, num_local: int) -> None:
        """Tells what happened to servers of data.preprocess. num_local: examples that ranks read
        because none answered."""
        for note in step.preprocessed.notes:
            self._log(f"warning: {note}")
        if num_local and not self._alone:
            self._log(f"warning: data.preprocess: no server answered for {num_local} examples of "
                      f"step {step.index}; the ranks read and decode them")
        elif self._alone and not num_local:
            self._log(f"data.preprocess: from step {step.index} on servers answer again")
        self._alone = bool(num_local)

    def nonfinite(self, step: Step, loss: float, grad_norm: float, progress: Progress,
                  newest: Callable[[], Path | None]) -> None:
        """Counts the step and writes which examples it had. newest: gives the newest checkpoint.
        Raises NonFiniteError where the recipe says so."""
        where = self._folder / "nonfinite.jsonl"
        if self._writes:
            self._file(where).write({"step": step.index, "loss": loss, "grad_norm": grad_norm,
                                    "example_ids": step.example_ids.tolist()})
        message = (f"step {step.index}: loss {loss}, gradient norm {grad_norm}; the step's "
                   f"examples are in {where}")
        progress.nonfinite_in_a_row += step.index not in progress.skip
        train, count = self._recipe.train, progress.nonfinite_in_a_row
        if 0 < (1 if train.nonfinite == "raise" else train.max_skipped_in_a_row) <= count:
            raise NonFiniteError(
                f"{message}; steps in a row without an update: {count} (train.nonfinite=skip or "
                "rollback goes on for train.max_skipped_in_a_row); the newest checkpoint is "
                f"{newest() or 'none'}")
        self._log(f"warning: {message}")

    def close(self) -> None:
        """Closes its files."""
        for log in self._logs.values():
            log.close()

    def _file(self, path: Path) -> JsonLines:
        if path not in self._logs:
            self._logs[path] = JsonLines(path)
        return self._logs[path]

    def _quarantine(self, path: Path, lines: list[dict]) -> None:
        """Appends the lines of rows and media that are not there yet: an example comes again in the
        next epoch, and after a resume."""
        def key(line: dict) -> tuple:
            return line["data_file"], line["row"], line["segment"]

        if path not in self._logs:
            self._file(path)  # leaves whole lines
            self._listed = set(map(key, read_rows(path)))
        for line in lines:
            if key(line) not in self._listed:
                self._listed.add(key(line))
                self._file(path).write(line)
