"""What a run has done so far, as JSON: enough to go on anywhere, on any number of ranks. And what
goes wrong in a step without ending the run, unless the recipe says so: rows and media that cannot
be used, a loss or gradient that is not finite. The same decision on all ranks; rank 0 writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from orchmllm.batch import Step
from orchmllm.comm.errors import AgreedError
from orchmllm.config.recipe import DataConfig, Recipe
from orchmllm.plan.layout import OF_MEDIA, TEXT
from orchmllm.runtime.metrics import JsonLines, read_rows

VERSION = 1
MIN_FOR_PERCENT = 100  # rows, or media
MIN_UNREADABLE = 16  # media of one modality, when none of that modality was ever decoded
TOLD_SHARE = 0.1  # of a step that waited for data, from which it is told
_NAMES = {code: name for name, code in OF_MEDIA.items()}


class NonFiniteError(AgreedError):
    """Loss or gradient is not finite; raised on all ranks before the optimizer step."""


class MediaLimitError(AgreedError):
    """Too many rows or media could not be used; raised on all ranks."""


@dataclass
class Count:
    """Rows or media that were read, those that failed, how many failed in a row at the end of what
    was read, and what is said of the last that failed."""

    read: int = 0
    failed: int = 0
    in_a_row: int = 0
    last: str = ""

    def add(self, failure: str = "", num: int = 1) -> None:
        """`num` more, or one that failed; failure: what is said of it."""
        self.read, self.failed = self.read + num, self.failed + bool(failure)
        if num:
            self.in_a_row = self.in_a_row + 1 if failure else 0
        self.last = failure or self.last

    def add_all(self, read: np.ndarray, failed: Sequence[tuple[int, str]]) -> None:
        """Adds those that were read, by their places (n,), which rise, and those that were not, by
        theirs, with what is said of them."""
        last = int(read[-1]) if len(read) else -1
        for _, said in filter(lambda one: one[0] < last, failed):
            self.add(said)
        self.add(num=len(read))
        for _, said in filter(lambda one: one[0] > last, failed):
            self.add(said)

    def check_limits(self, limits: DataConfig, rows: str, failed: str) -> None:
        """Raises MediaLimitError where the recipe's limits are passed; rows, failed: in words."""
        if limits.max_failed_in_a_row and self.in_a_row >= limits.max_failed_in_a_row:
            raise MediaLimitError(f"{self.in_a_row} {rows} in a row could not be {failed} "
                                  f"(data.max_failed_in_a_row); the last: {self.last}")
        percent = 100.0 * self.failed / max(self.read, 1)
        if self.read >= MIN_FOR_PERCENT and percent > limits.max_failed_percent:
            raise MediaLimitError(
                f"{self.failed} of {self.read} {rows} ({percent:.1f}%) could not be {failed}, over "
                f"data.max_failed_percent={limits.max_failed_percent} since the run began: mend "
                f"them, and raise it to go on; the last: {self.last}")


@dataclass
class MediaCount(Count):
    """Of the media; rows: of the rows, without those that only a medium spoils. By modality, the
    media that were decoded, and those that were not with what is said of the first."""

    rows: Count = field(default_factory=Count)
    decoded: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def count(self, step: Step, describe: Callable[[int, int], dict]) -> list[dict]:
        """Adds a step's media and unusable rows, in source order; returns the quarantine's lines of
        the failed. describe: (example id, segment) -> source, row and file."""
        layout, lines = step.layout, []
        texts, media = [], []  # (place, what is said) of those that failed
        failures = {(f.example, f.segment): f for f in step.failed}
        for (example, segment), failure in sorted(failures.items()):
            index = int(step.example_ids[example])
            lines.append({"step": step.index, "example_id": index, "segment": segment,
                          **describe(index, segment), "reason": failure.reason})
            said = name_of(lines[-1])
            if failure.modality == TEXT:
                texts.append((example, said))
                continue
            media.append((int(layout.segment_start[example]) + segment, said))
            name = _NAMES[failure.modality]
            self.unreadable[name] = self.unreadable.get(name, 0) + 1
            self.first.setdefault(name, said)
        rows, read = np.arange(layout.num_examples), np.flatnonzero(layout.modality != TEXT)
        self.rows.add_all(rows[~np.isin(rows, [example for example, _ in failures])], texts)
        read = read[~np.isin(read, [place for place, _ in media])]
        self.add_all(read, media)
        for code, num in enumerate(np.bincount(layout.modality[read]).tolist()):
            if num:
                self.decoded[_NAMES[code]] = self.decoded.get(_NAMES[code], 0) + num
        return lines

    def check(self, limits: DataConfig, lines: list[dict]) -> None:
        """Raises MediaLimitError where the recipe's limits are passed; `lines`: the newest."""
        if not lines:
            return
        if limits.strict:
            raise MediaLimitError(f"data.strict: {name_of(lines[0])}")
        self.check_modalities(MIN_UNREADABLE)
        self.check_limits(limits, "media", "decoded")
        self.rows.check_limits(limits, "rows", "used")

    def check_modalities(self, at_least: int = 1) -> None:
        """Raises MediaLimitError where no medium of a modality could be decoded, of `at_least` so
        many. At the end of a run one is enough."""
        for name, count in self.unreadable.items():
            if count >= at_least and not self.decoded.get(name):
                raise MediaLimitError(
                    f"{name}: none of the {count} media so far could be decoded, so nothing of "
                    f"this modality is learnt; the first: {self.first[name]}. Check the paths in "
                    "the data file and where they start: the media_root of the source (data."
                    "sources), or else the folder of the data file")


def name_of(line: dict) -> str:
    """A line of the quarantine in words."""
    return (f"{line['data_file']}, row {line['row']} (example {line['example_id']}, segment "
            f"{line['segment']}): {line['file']}: {line['reason']}")


@dataclass
class Progress:
    """step: the next one. skipped_steps: steps without an optimizer step. skip: steps whose update
    is left out (after a rollback). global_batch_size: examples per step over all ranks; it stays
    what it was when the number of ranks changes, and with it every global batch.
    nonfinite_in_a_row: steps that were not finite since the last update; what is done again after a
    rollback does not count as one."""

    global_batch_size: int
    step: int = 0
    skipped_steps: int = 0
    skip: list[int] = field(default_factory=list)
    media: MediaCount = field(default_factory=MediaCount)
    nonfinite_in_a_row: int = 0

    def is_due(self, every: int, num_steps: int) -> bool:
        """Whether what comes `every` steps, and at the end anyway, comes after the last one; 0 and
        less: never."""
        return every > 0 and self.step % every == 0 and self.step < num_steps

    def to_json(self) -> dict:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, state: dict) -> Progress:
        rows = Count(**state["media"].get("rows", {}))  # earlier versions have none
        return cls(**{f.name: state[f.name] for f in fields(cls)} | {
            "media": MediaCount(**{**state["media"], "rows": rows})})


class Incidents:
    """writes: on one rank. log: shows a line."""

    def __init__(self, recipe: Recipe, *, writes: bool, log: Callable[[str], None]) -> None:
        self._recipe, self._writes, self._log = recipe, writes, log
        self._folder = recipe.run.folder
        self._logs: dict[Path, JsonLines] = {}
        self._listed: set[tuple] = set()  # what quarantine.jsonl has
        self._warned = False  # of a row or medium that cannot be used
        self._waited_s = -1.0  # as was told; none before the first step, which starts workers

    def media(self, step: Step, counted: MediaCount, describe: Callable[[int, int], dict]) -> None:
        """Counts and quarantines what could not be used. describe: of the dataset. Raises
        MediaLimitError as the recipe says."""
        before = deepcopy(vars(counted))
        lines = counted.count(step, describe)
        where = self._folder / "quarantine.jsonl"
        if lines and self._writes:
            self._quarantine(where, lines)
        if lines and not self._warned:
            self._warned = True
            self._log(f"warning: not usable, so its example is not learnt: {name_of(lines[0])}\n"
                      f"  This and further ones are listed in {where}")
        try:
            counted.check(self._recipe.data, lines)
        except MediaLimitError:
            vars(counted).update(before)  # what is saved now is of the steps before
            raise

    def waited(self, step: Step, step_s: float, wait_s: np.ndarray, slowest: np.ndarray,
               place: Callable[[int], str]) -> None:
        """Says which example took longest to load where a step waited for data, and twice as long
        as was told before. wait_s (d, 1), slowest (d, 2): of the ranks, see Step; place: of an
        example."""
        longest_s, told_s = float(wait_s.max()), self._waited_s
        rank = int(slowest[:, 0].argmax())
        load_s, example = slowest[rank].tolist()
        if told_s < 0:
            self._waited_s = 0.0
        elif self._writes and load_s and longest_s > max(TOLD_SHARE * step_s, 2 * told_s):
            self._waited_s = longest_s
            cure = ("more of data.num_workers, which divide it, or of data.prefetch"
                    if self._recipe.data.num_workers else "data.num_workers")
            self._log(f"step {step.index} waited {longest_s:.3g} s for data, "
                      f"{longest_s / step_s:.0%} of its time. {place(int(example))} took longest "
                      f"to load: {load_s:.3g} s on rank {rank}; what may help: {cure}")

    def nonfinite(self, step: Step, loss: float, grad_norm: float, progress: Progress) -> None:
        """Counts the step and writes which examples it had. Raises NonFiniteError where the recipe
        says so; after many steps in a row the weights before it are not worth a checkpoint."""
        where = self._folder / "nonfinite.jsonl"
        if self._writes:
            self._file(where).write({"step": step.index, "loss": loss, "grad_norm": grad_norm,
                                    "example_ids": step.example_ids.tolist()})
        message = (f"step {step.index}: loss {loss}, gradient norm {grad_norm}; the step's "
                   f"examples are in {where}")
        progress.nonfinite_in_a_row += step.index not in progress.skip
        train, count = self._recipe.train, progress.nonfinite_in_a_row
        if 0 < (1 if train.nonfinite == "raise" else train.max_skipped_in_a_row) <= count:
            error = NonFiniteError(
                f"{message}; steps in a row without an update: {count} (train.nonfinite=skip or "
                "rollback goes on for train.max_skipped_in_a_row)")
            error.saves = train.nonfinite == "raise"
            progress.nonfinite_in_a_row -= error.saves
            raise error
        self._log(f"warning: {message}")

    def close(self) -> None:
        """Closes its files."""
        for log in self._logs.values():
            log.close()

    def _file(self, path: Path) -> JsonLines:
        if path not in self._logs:
            self._logs[path] = JsonLines(path, late=True)
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
