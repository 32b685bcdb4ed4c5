"""Datasets of Megatron Energon: tars, with .nv-meta/dataset.yaml, which says what their members
are, and .nv-meta/split.yaml, which says which tars a split has."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from orchmllm.config.recipe import SourceConfig
from orchmllm.config.strict_yaml import YamlProblem, parse
from orchmllm.data.media.kinds import MODALITY_OF

META = ".nv-meta"
# Class of a sample -> field of it -> field of a row.
SAMPLES = {
    "CaptioningSample": {"image": "images", "caption": "text"},
    "VQASample": {"image": "images", "context": "question", "answers": "answer"},
    "TextSample": {"text": "text"},
}
_MEMBERS = {"txt": "text", "text": "text", "caption": "caption", "transcript": "transcript"}


def with_columns(config: SourceConfig) -> SourceConfig:
    """The source with the columns of its dataset.yaml, where the recipe names none. Raises
    ValueError where they cannot be read without code."""
    path = Path(config.path) / META / "dataset.yaml"
    if not path.is_file() or config.row_format != "auto" or any(vars(config.columns).values()):
        return config
    tree = _read(path)
    named = tree.get("sample_type")
    kind = str((named if isinstance(named, dict) else tree).get("__class__", ""))
    if kind.startswith("Crude"):
        return config  # its samples are rows as the tars hold them
    fields = SAMPLES.get(kind.replace("Webdataset", "Sample"))
    if fields is None or not isinstance(tree.get("field_map"), dict):
        raise ValueError(f"{path}: samples of {kind or 'no class'} without a field_map, or of "
                         f"another class than {', '.join(SAMPLES)}, are not read, because no code "
                         "of a dataset is run; name the columns (columns: in the source)")
    columns = {}
    for name, member in tree["field_map"].items():
        if name not in fields:
            raise ValueError(f"{path}: field_map.{name} is not read; of {kind} are read: "
                             f"{', '.join(fields)}")
        columns[fields[name]] = _column(str(member), f"{path}: field_map.{name}")
    return replace(config, columns=replace(config.columns, **columns))


def _column(member: str, where: str) -> str:
    """The column of a row that a member of a tar, or a value in its JSON, becomes."""
    if found := re.fullmatch(r"json((?:\[\w+\]|\.\w+)+)", member):
        return ".".join(re.findall(r"\w+", found[1]))
    if member in MODALITY_OF:
        return "images, image"
    if member not in _MEMBERS:
        raise ValueError(f"{where} is {member!r}: must be the suffix of an image, txt, or a value "
                         "of the JSON, as json[caption]")
    return _MEMBERS[member]


def files_of(config: SourceConfig) -> list[str]:
    """Patterns of the tars of the source's split. Raises ValueError."""
    path = Path(config.path) / META / "split.yaml"
    tree = _read(path)
    parts = tree.get("split_parts")
    if not isinstance(parts, dict) or not all(
            isinstance(files, list | None) and all(isinstance(file, str) for file in files or ())
            for files in parts.values()):
        raise ValueError(f"{path}: split_parts is {parts!r:.200}: must have a list of tars for "
                         "each split")
    parts = {name: files for name, files in parts.items() if files}
    split = config.split or (next(iter(parts)) if len(parts) == 1 else "")
    if split not in parts:
        raise ValueError(f"{path}: split is {config.split!r}; set split of the source to one of "
                         f"{', '.join(parts)}")
    left_out = set(tree.get("exclude") or ())
    if any(".tar/" in name for name in left_out):
        raise ValueError(f"{path}: exclude names samples, which are not left out alone; name tars")
    outside = [name for name in parts[split] if name.startswith("/") or ".." in name.split("/")]
    if outside:
        raise ValueError(f"{path}: {outside[0]!r} leaves the folder of the dataset")
    return [str(Path(config.path) / name) for name in parts[split] if name not in left_out]


def _read(path: Path) -> dict:
    try:
        tree = parse(path.read_bytes())
    except (OSError, YamlProblem) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: must be a mapping")
    return tree
