"""LLaMA-Factory's dataset_info.json: which files of a folder are a dataset, and what their columns
and roles are called."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from orchmllm.data.formats.conversation import PREFERENCES
from orchmllm.data.media.medium import RowError

NAME = "dataset_info.json"
# What a column is called there, and here, by the layout of its rows.
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
_SHAREGPT = {"messages": "conversations"}
_TEXTS = ("instruction", "input", "output", "history", "system", "tools", "messages",
          "conversations")  # what formats read beside media
_ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "observation",
          "function_tag": "function_call", "system_tag": "system"}
_SAID = ("role", "from", "content", "value", "text")  # of a turn; tags name them


def read(folder: Path) -> Mapping[str, Mapping] | None:
    """What it says of each dataset; None where the folder has no such file (that of the `datasets`
    package has its name, and describes one dataset). Raises ValueError if it cannot be read."""
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
    return found or None


def choose(folder: Path, entries: Mapping[str, Mapping], name: str
           ) -> tuple[list[Path], Callable[[dict], dict], str]:
    """(files, what renames the columns of a row, layout) of a dataset; empty: the only one. Raises
    ValueError."""
    where = f"{folder / NAME}"
    if not name and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        missing = f"there is no {name!r}; " if name else ""
        raise ValueError(f"{where}: {missing}set `subset` of the source to one of: "
                         f"{', '.join(entries)}")
    entry = entries[name]
    if entry.get("ranking"):
        raise ValueError(f"{where}: {name}: {PREFERENCES}")
    if "kto_tag" in (entry.get("columns") or {}):
        raise ValueError(f"{where}: {name}: answers with labels (kto_tag) are for preference "
                         "tuning (KTO), which is not done here; for fine-tuning write the rows "
                         "whose answers are good to a file of their own")
    if entry.get("num_samples") is not None:
        raise ValueError(f"{where}: {name}: num_samples = {entry['num_samples']!r} is not "
                         "supported: remove it to train on all rows, or give `data.sources` "
                         "weights for their shares")
    if not isinstance(entry.get("file_name"), str):
        raise ValueError(f'{where}: {name} has no "file_name"; a dataset of the hub is given as '
                         "`path: hf:org/name`")
    path = folder / entry["file_name"]
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(f"{where}: {name}: {path} is missing")
    alpaca = entry.get("formatting", "alpaca") == "alpaca"
    names = _ALPACA if alpaca else _SHAREGPT
    columns = {theirs: names.get(ours, ours)
               for ours, theirs in (entry.get("columns") or {}).items()}
    rename = partial(_renamed, columns, dict(entry.get("tags") or {}))
    return files, rename, "llama_factory (alpaca)" if alpaca else "llama_factory"


def _renamed(columns: Mapping[str, str], tags: Mapping[str, str], row: dict) -> dict:
    """A row with the columns and roles that FORMATS know. Raises RowError."""
    if columns and not columns.keys() & row.keys():
        raise RowError(f"none of the columns of {NAME} is there: {', '.join(columns)}")
    if columns:  # of the texts those that it names, and no other that has their name here
        row = {k: v for k, v in row.items()
               if k not in columns and k not in _TEXTS and k not in columns.values()
               } | {ours: row[theirs] for theirs, ours in columns.items() if theirs in row}
    if tags and isinstance(row.get("conversations"), list):
        roles = {written: _ROLES[tag] for tag, written in tags.items() if tag in _ROLES}
        role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        row["conversations"] = [
            {**{k: v for k, v in turn.items() if k not in _SAID},
             "role": roles.get(turn.get(role), turn.get(role)), "content": turn.get(content)}
            if isinstance(turn, Mapping) else turn for turn in row["conversations"]]
    return row
