"""attempts.jsonl of a run folder: a line when an attempt of the run starts, and one when it ends.

    {"attempt": 2, "started": time, "resumed_from": {"checkpoint": path, "step": 12, "attempt": 1,
     "changed": {key: [was, is]}}, "changed": {key: [was, is]}, "settings": {key: value}}
    {"attempt": 2, "ended": "finished", "at": time}

`settings` is everything that an attempt is compared by: the whole resolved recipe by its dotted
keys, `content.` what the data and the tokenizer are, `versions.` and `world.`. `changed` is what
differs from the attempt before in the folder, `resumed_from.changed` what differs from the attempt
that wrote the checkpoint. An attempt without a second line was killed.

`init_from`, with the fields of `resumed_from`, is there where the weights of another run's
checkpoint were read (run.init_from).

A checkpoint holds the first line of the attempt that wrote it (`attempt` in its state.json), and
that line alone decides whether a run goes on from it (orchmllm.runtime.resumable): so it can be
copied to another folder, and the file may be gone.
"""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

from orchmllm.config.job import Job
from orchmllm.data.formats.scanned import digest
from orchmllm.data.sampler import lengths_digest
from orchmllm.data.storage.clients import without_query
from orchmllm.runtime.metrics import JsonLines, read_rows

NAME = "attempts.jsonl"
PACKAGES = ("orchmllm", "torch", "transformers", "tokenizers", "numpy")


def flat(value: object, where: str = "") -> dict:
    """Dotted key -> value of nested sections and lists of sections: `data.sources[0].path`. The
    query of a URL, which may hold a signature, is left out."""
    if isinstance(value, Mapping):
        inner = {f"{where}.{name}".lstrip("."): part for name, part in value.items()}
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        inner = {f"{where}[{k}]": part for k, part in enumerate(value)}
    else:
        return {where: without_query(value) if isinstance(value, str) else value}
    return {key: leaf for name, part in inner.items() for key, leaf in flat(part, name).items()}


def _identity(folder: Path) -> str:
    """Digest of the config.json of a model, without what says nothing of it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("_name_or_path", "dtype", "torch_dtype", "transformers_version"):
        config.pop(name, None)
    return digest([config])


def settings_of(job: Job, dataset, weights: int = 0) -> dict:
    """Everything that an attempt is compared by, for JSON. weights: fingerprint of those that the
    run starts from. Raises OSError for a data file that is gone."""
    recipe, content = job.recipe, dataset.fingerprint()
    if recipe.data.batching == "capped":
        content |= {"capped_lengths": lengths_digest(dataset),
                    "capped_batch_size": recipe.train.batch_size}
    versions = {name: d.version for name in PACKAGES for d in distributions(name=name)}
    model = asdict(recipe.model) | {"config_json": _identity(Path(recipe.model.folder))}
    if recipe.model.lora.rank:  # the checkpoint does not hold them
        model["weights"] = f"{weights:012x}"
    return flat({
        **asdict(recipe), "model": model, "content": content,
        "versions": {"python": platform.python_version(), **versions},
        "world": {"ranks": job.num_ranks, "ranks_per_node": job.ranks_per_node,
                  "host": socket.gethostname()}})


def read_attempts(folder: Path) -> list[dict]:
    """The attempts of a run folder, in the order of their starts: the first line of each with what
    its second one adds. Raises ValueError naming a line that is damaged."""
    found: dict[int, dict] = {}
    for row in read_rows(folder / NAME):
        found.setdefault(row["attempt"], {}).update(row)
    return [attempt for attempt in found.values() if "settings" in attempt]


@contextmanager
def recorded(folder: Path, attempt: dict) -> Iterator[Callable[[str], None]]:
    """Writes that an attempt starts, and how it ends, to the attempts of a run folder; gives what
    writes the end of one that hangs, from another thread. Raises ValueError if the file cannot be
    opened; a line that cannot be written is warned about."""
    lines, once = JsonLines(folder / NAME, synced=True), iter((True,))
    lines.write({"attempt": attempt["attempt"], "started": _now(), **attempt})
    how = "finished"

    def end(how: str) -> None:
        if next(once, False):
            lines.write({"attempt": attempt["attempt"], "ended": how, "at": _now()})

    try:
        yield end
    except BaseException as error:
        how = f"{type(error).__name__}: {error}"
        raise
    finally:
        end(how)
        lines.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
