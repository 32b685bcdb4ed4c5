"""LLaMA-Factory's dataset_info.json: which files of a folder are a dataset, and what their columns
and roles are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from orchmllm.data.formats.conversation import PREFERENCES
from orchmllm.data.formats.rows import RowStore
from orchmllm.data.media.medium import RowError

NAME = "dataset_info.json"
# What a column is called there, and here, by the layout of its rows.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_SHAREGPT = {"messages": "conversations"}
_ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "observation",
          "function_tag": "function_call", "system_tag": "system"}


class Datasets(NamedTuple):
    """folder: where the file is. entries: what it says of each dataset."""

    folder: Path
    entries: Mapping[str, Mapping]

    def choose(self, name: str) -> tuple[list[Path], Callable[[RowStore], RowStore], str]:
        """(files, what renames the columns of their rows, layout) of a dataset; empty: the only
        one. Raises ValueError."""
        where = f"{self.folder / NAME}"
        if not name and len(self.entries) == 1:
            name = next(iter(self.entries))
        if name not in self.entries:
            missing = f"there is no {name!r}; " if name else ""
            raise ValueError(f"{where}: {missing}set `subset` of the source to one of: "
                             f"{', '.join(self.entries)}")
        entry = self.entries[name]
        if entry.get("ranking"):
            raise ValueError(f"{where}: {name}: {PREFERENCES}")
        if not isinstance(entry.get("file_name"), str):
            raise ValueError(f'{where}: {name} has no "file_name"; a dataset of the hub is given '
                             "as `path: hf:org/name`")
        path = self.folder / entry["file_name"]
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"{where}: {name}: {path} is missing")
        alpaca = entry.get("formatting", "alpaca") == "alpaca"
        rename = _Renamed.by(self.folder / NAME, entry, _ALPACA if alpaca else _SHAREGPT)
        return files, rename, "llama_factory (alpaca)" if alpaca else "llama_factory"


def read(folder: Path) -> Datasets | None:
    """None where the folder has no such file (that of the `datasets` package has its name, and
    describes one dataset). Raises ValueError if it cannot be read."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    found = {k: v for k, v in entries.items() if isinstance(v, Mapping)
             and v.keys() & {"file_name", "hf_hub_url", "ms_hub_url", "script_url"}
             } if isinstance(entries, Mapping) else {}
    return Datasets(folder, found) if found else None


class _Renamed:
    """Rows with the columns and roles that the adapters know."""

    def __init__(self, store: RowStore, info: Path, columns: Mapping[str, str],
                 tags: Mapping[str, str]) -> None:
        self._store, self._columns, self._tags = store, columns, tags
        self.files = [*store.files, info]
        self._roles = {said: _ROLES[tag] for tag, said in tags.items() if tag in _ROLES}

    @classmethod
    def by(cls, info: Path, entry: Mapping,
           names: Mapping[str, str]) -> Callable[[RowStore], RowStore]:
        columns = {theirs: names.get(ours, ours)
                   for ours, theirs in (entry.get("columns") or {}).items()}
        tags = dict(entry.get("tags") or {})
        return lambda store: cls(store, info, columns, tags) if columns or tags else store

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def row(self, i: int) -> dict:
        row = self._store.row(i)
        missing = [k for k in self._columns if k not in row]
        if len(missing) == len(self._columns) and missing:
            raise RowError(f"none of the columns of {NAME} is there: {', '.join(missing)}")
        row = {self._columns.get(k, k): v for k, v in row.items()}
        if self._tags and isinstance(row.get("conversations"), list):
            row["conversations"] = [self._turn(turn) for turn in row["conversations"]]
        return row

    def _turn(self, turn: object) -> object:
        if not isinstance(turn, Mapping):
            return turn
        said = turn.get(self._tags.get("role_tag", "from"))
        return {"role": self._roles.get(said, said),
                "content": turn.get(self._tags.get("content_tag", "value"))}
