"""Which checkpoints of a folder are sound and belong to which run, in which order they were saved,
and which of them may go.

Every save has a `sequence` number, one above the highest of the folder, so a later save has a
higher one whatever its step is. It also names its `run`; `ancestors` are the runs that this one
branched from, each with the sequence number of the checkpoint that it branched at. A run that is
resumed from its newest checkpoint stays the same run. Resumed from another one it is a new run, a
branch, and what was saved after the branch point no longer belongs to it.

A folder of another run is renamed to `aside_step_...` and never deleted.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from orchmllm.runtime.files import fsync, identify

VERSION = 1  # of a manifest
LINEAGE = {"run", "sequence", "ancestors"}  # which every manifest names
PREFIXES = ("step_", "aside_step_")
LEFTOVERS = (".staged_*", ".old_*")
START_CURE = ("give a run folder, or a step_... folder in its checkpoints; exported weights are "
              "read by model.pretrained (of LoRA: those of export --merged)")


class Saved(NamedTuple):
    """A checkpoint folder. sequence: -1 if its manifest cannot be read, and then its run is ''."""

    path: Path
    run: str
    sequence: int
    ancestors: tuple[tuple[str, int], ...]

    @property
    def is_aside(self) -> bool:
        return self.path.name.startswith("aside_")

    @property
    def is_named_here(self) -> bool:
        """Not by a user, who has made a copy."""
        return self.is_aside or self.path.name.removeprefix("step_").isdigit()


class Lineage(NamedTuple):
    """A run and what it branched from."""

    run: str
    ancestors: tuple[tuple[str, int], ...] = ()

    def holds(self, saved: Saved) -> bool:
        """Whether a checkpoint is one of this run's, or led to it."""
        return saved.sequence >= 0 and (saved.run == self.run or any(
            saved.run == run and saved.sequence <= last for run, last in self.ancestors))


def new_line(ancestors: tuple[tuple[str, int], ...] = ()) -> Lineage:
    """A run of its own."""
    return Lineage(secrets.token_hex(6), ancestors)


def read_saved(path: Path) -> Saved:
    """What the manifest in folder `path` says of itself; its files are not looked at."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        return Saved(path, str(manifest["run"]), int(manifest["sequence"]),
                     tuple((str(run), int(last)) for run, last in manifest["ancestors"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Saved(path, "", -1, ())


def list_saved(root: Path) -> list[Saved]:
    """The checkpoints in a folder, the newest first; whether they are sound is not checked."""
    return sorted((read_saved(p) for p in root.glob("*step_*")
                   if p.name.startswith(PREFIXES) and p.is_dir()),
                  key=lambda s: (s.sequence, s.path.name), reverse=True)


def candidates(saved: Sequence[Saved], start: Saved | None = None,
               line: Lineage | None = None) -> list[Saved]:
    """What `run.resume=auto` tries, in this order: folders whose manifest cannot be read, so that
    they are told, then the newest checkpoint and those that led to it. start: the checkpoint that
    run.resume names; then those saved since a run branched off there, if the newest is one, and
    `start` itself. line: of this run, in place of that of the newest. saved: as `list_saved` gives
    them."""
    if start is not None:
        point = (start.run, start.sequence)
        return [s for s in candidates(saved) if point in s.ancestors] + [start]
    unreadable = [s for s in saved if s.sequence < 0 and not s.is_aside]
    if saved and line is None:
        line = Lineage(saved[0].run, saved[0].ancestors)
    return unreadable + [s for s in saved if line.holds(s)]


def start_of(folder: Path) -> Saved:
    """The checkpoint that run.init_from names: the newest of a run folder, or `folder` itself."""
    saved = candidates(list_saved(folder / "checkpoints"))
    return saved[0] if saved else read_saved(folder)


def line_after(start: Saved, saved: Sequence[Saved], *, branch: bool = False) -> Lineage:
    """The run that goes on from checkpoint `start` in the folder whose checkpoints are `saved`: the
    run that wrote it if that is the newest of the folder, else a branch. branch: in any case."""
    newest = saved and saved[0].path.resolve() == start.path.resolve()
    if newest and not branch:
        return Lineage(start.run, start.ancestors)
    return new_line((*start.ancestors, (start.run, start.sequence)))


def next_sequence(saved: Sequence[Saved]) -> int:
    return 1 + max((s.sequence for s in saved), default=0)


def surplus(members: Sequence[Path], keep_last: int,
            is_sound: Callable[[Path], bool]) -> list[Path]:
    """Those of a run's checkpoints (the newest first) that come after the keep_last newest sound
    ones. is_sound is asked only where something would be deleted."""
    if len(members) <= keep_last:
        return []
    kept = 0
    for index, path in enumerate(members):
        if kept == keep_last:
            return list(members[index:])
        kept += is_sound(path)
    return []


def set_aside(saved: Saved) -> Path:
    """Renames a checkpoint of another run so that it is out of the way; returns its new folder."""
    name = aside = f"aside_{saved.path.name}_save_{saved.sequence}"
    number = 1
    while saved.path.with_name(aside).exists():
        number += 1
        aside = f"{name}_{number}"
    os.rename(saved.path, saved.path.with_name(aside))
    return saved.path.with_name(aside)


def delete(path: Path, log: Callable[[str], object]) -> None:
    """Deletes a checkpoint, under another name: half of one is not taken for one. What cannot be
    deleted is told, and tried again after each save."""
    old = path.with_name(f".old_{path.name}_{secrets.token_hex(4)}")
    os.rename(path, old)
    fsync(path.parent)  # or a machine that loses its power may find half of it under its own name
    shutil.rmtree(old, ignore_errors=True)
    if old.exists():
        log(f"warning: {old} cannot be deleted, and takes its space")


def leftovers(root: Path) -> list[Path]:
    """What saves that were cut off left behind; none of it is needed."""
    return [path for pattern in LEFTOVERS for path in root.glob(pattern)]


def clear_leftovers(root: Path) -> None:
    """Deletes them."""
    for path in leftovers(root):
        shutil.rmtree(path, ignore_errors=True)


def problem_of(path: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with a checkpoint's files, of which this is share `part` of `parts`; or ''."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest["version"] != VERSION:
            return f"manifest.json: version {manifest['version']}, this code reads {VERSION}"
        if missing := sorted(LINEAGE - manifest.keys()):
            return f"manifest.json: it has no {', '.join(missing)}"
        # torch reads every such file of the folder.
        if more := {p.name for p in path.glob("*.safetensors")} - manifest["files"].keys():
            return f"{min(more)} was not saved with it: move it elsewhere"
        for name, recorded in sorted(manifest["files"].items())[part::parts]:
            if Path(name).name != name:
                return f"manifest.json: {name!r} is not a file name"
            if identify(path / name) != recorded:
                return f"{name} is not what was saved (size or SHA-256 differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""
