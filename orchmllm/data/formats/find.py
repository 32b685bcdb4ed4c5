"""From the path of a source to its row store: files, patterns and folders, here and behind URLs."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats import arrow, energon
from orchmllm.data.formats.columns import Columns, changed
from orchmllm.data.formats.compressed import CURES, CompressedRows
from orchmllm.data.formats.rows import JoinedRows, JsonRows, LaterRows, RowStore
from orchmllm.data.formats.scanned import File, Scans
from orchmllm.data.formats.tables import PickedRows, TableRows, TranscriptRows
from orchmllm.data.formats.tars import TarRows
from orchmllm.data.media.root import refuse_kind
from orchmllm.data.storage.remote import RemoteFile, Storage, is_url

JSON_SUFFIXES, ARROW_SUFFIXES = (".jsonl", ".json", ".ndjson"), (".parquet", ".arrow")
TABLE_SUFFIXES = (".csv", ".tsv")
COMPRESSED = tuple(kind + packed for kind in (*JSON_SUFFIXES, ".tar") for packed in CURES)
READABLE = (*JSON_SUFFIXES, *TABLE_SUFFIXES, *ARROW_SUFFIXES, ".tar", *COMPRESSED)
NOT_DATA = {"tokenizer.json", "tokenizer_config.json", "dataset_infos.json", "dataset_info.json",
            "config.json"}
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
SPLIT = re.compile("(?<![a-z])(train(ing)?|val(id(ation)?)?|dev|test(ing)?|eval)(?![a-z])", re.I)
LLAMA_FACTORY = "dataset_info.json"
SPLITS, ONE_SPLIT = SAVED = ("dataset_dict.json", "state.json")  # of what save_to_disk wrote
Found = Callable[[], tuple[RowStore, str | None]]  # opens the rows; their layout if the place tells


def find_store(config: SourceConfig, cache_dir: Path, storage: Storage,
               streaming: bool = False) -> Found:
    """What opens the rows of a source. streaming: the hub is read in order, without a copy on
    disk. Raises ValueError, or an error of `Storage`, if files are missing."""
    if is_url(config.path):
        return _find_remote(config, cache_dir, storage)
    if config.path.startswith("hf:"):
        check_places(config, "a dataset of the hub")
        check_installed(config.path, "datasets", "pyarrow")
        return lambda: (arrow.open_stream(config) if streaming
                        else arrow.HubRows(config, cache_dir), None)
    path = Path(config.path)
    if path.is_dir():
        return _find_in_folder(path, config, cache_dir)
    check_parts(config, "a data file", *["split"] * bool(config.columns.split))
    files = expand(config.path)
    if not files:
        raise ValueError(f"{config.path}: no such file or folder; give a JSON, JSONL, CSV, TSV, "
                         "parquet, arrow or tar file, a pattern of them, a folder, or hf:org/name")
    return _opener(files, files[0].parent, config, cache_dir)


def check_installed(path: str, *packages: str) -> None:
    """Raises ValueError if packages that reading `path` needs are not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(f"{path}: reading it needs {' and '.join(missing)}: pip install "
                         "'.[parquet]' in the clone")


def check_parts(config: SourceConfig, what: str, *known: str) -> None:
    """Raises ValueError if the source names a part of its data (`split`, `subset`) that `what` does
    not have."""
    for key in ("split", "subset"):
        if getattr(config, key) and key not in known:
            raise ValueError(f"{config.path}: {key} is {getattr(config, key)!r}, but {what} has no "
                             f"{key}: leave it out, give the path of the files that are meant"
                             + ", or name a column (columns: {split: NAME})" * (key == "split"))


def check_places(config: SourceConfig, what: str, *known: str) -> None:
    """Raises ValueError if columns say which rows there are in a way that `what` does not have."""
    for key in ("rows", "segments", "split"):
        if getattr(config.columns, key) and key not in known:
            raise ValueError(f"{config.path}: columns.{key} is {getattr(config.columns, key)!r}, "
                             f"which is not read of {what}: leave it out, or give other files")


def _numbered(pattern: str) -> list[str]:
    """The names of a range such as shard-{000..012}.tar; none for another path."""
    span = RANGE.search(pattern)
    if not span:
        return []
    first, last = span.groups()
    return [pattern[: span.start()] + str(k).zfill(len(first)) + pattern[span.end():]
            for k in range(int(first), int(last) + 1)]


def expand(pattern: str) -> list[Path]:
    """Files of a path, a glob, or a range such as shard-{000..012}.tar. Raises ValueError if one of
    a range is missing."""
    names = _numbered(pattern)
    if names:
        missing = [name for name in names if not os.path.isfile(name)]
        if missing:
            raise ValueError(f"{pattern}: {missing[0]} is missing")
        return [Path(name) for name in names]
    if os.path.isfile(pattern):
        return [Path(pattern)]
    return [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(p)]


def _find_in_folder(path: Path, config: SourceConfig, cache_dir: Path) -> Found:
    has_splits = (path / SPLITS).is_file()
    if has_splits or (path / ONE_SPLIT).is_file():
        check_places(config, "a saved folder")
        check_parts(config, "a saved folder" if has_splits else f"a saved folder without {SPLITS}",
                    *["split"] * has_splits)
        check_installed(config.path, "pyarrow")
        return lambda: (arrow.open_saved(path, config, cache_dir), None)
    metas = sorted(p for p in (*path.glob("*_meta.json"), *path.glob("*/*_meta.json")))
    if metas and config.row_format in ("auto", "air_bench"):
        check_parts(config, "AIR-Bench")
        return _opener(metas, path, config, cache_dir, "air_bench")
    check_parts(config, "a folder of files", "split")
    if next(path.rglob("*.trans.txt"), None) is not None:
        check_places(config, "LibriSpeech's folders")
        _check_one_split(config, sorted(p.name for p in path.iterdir() if p.is_dir()))
        return lambda: (TranscriptRows(path, config.split), "asr")
    if (path / energon.META / "split.yaml").is_file():
        found = {name: expand(name) for name in energon.files_of(config)}
        missing = [name for name, files in found.items() if not files]
        if missing:
            raise ValueError(f"{missing[0]} of {energon.META}/split.yaml is not there")
        tars = [file for files in found.values() for file in files]
        return _opener(tars, path, config, cache_dir)
    folders = [path, path / energon.META, *(f for f in path.iterdir() if f.is_dir() and (
        f.name == "data" or SPLIT.match(f.name)))]
    there = [f for folder in folders if folder.is_dir() for f in folder.iterdir()]
    files = _data_files(there, config)
    if files:
        return _opener(files, path, config, cache_dir)
    raise ValueError(
        f"{config.path}: nothing to read; looked for a saved `datasets` folder (state.json), "
        "*_meta.json (AIR-Bench), *.trans.txt (LibriSpeech), *.parquet, *.arrow, *.tar, *.csv, "
        "*.tsv, *.json, *.jsonl, *.jsonl.gz and *.tar.gz (or .zst)" + _further_inside(path))


def _further_inside(path: Path) -> str:
    """The cure where data files are in folders of a folder; "" if none is among its first files."""
    for file in islice(path.rglob("*"), 10_000):
        if _kind(file) in READABLE and file.name not in NOT_DATA:
            inside = "/".join(["*"] * len(file.relative_to(path).parts)) + _kind(file)
            return (f". {file} is further inside: give its folder as the path, or a pattern of all "
                    f"files that are meant, such as {path}/{inside}")
    return ""


def _kind(file: File) -> str:
    """The suffix of a file, with the one before it where that is of a compressed file."""
    return next((kind for kind in COMPRESSED if file.name.endswith(kind)), file.suffix)


def _is_of_datasets(info: File) -> bool:
    """Whether a dataset_info.json is that of the `datasets` package, which describes one dataset by
    its features; LLaMA-Factory's lists several."""
    with info.open("rb") as file:
        return b'"features"' in file.read()


def _data_files(there: Sequence[File], config: SourceConfig) -> list[File]:
    """The data files among those of a folder and of `data` in it, of the source's split. Raises
    ValueError if there is none of that, and for data.jsonl beside others."""
    if any(f.name == LLAMA_FACTORY and not _is_of_datasets(f) for f in there):
        raise ValueError(f"{config.path}: {LLAMA_FACTORY} of LLaMA-Factory is not read; give the "
                         "file of one dataset as the path, and write its columns and roles as "
                         "docs/formats.md lists them")
    there = sorted((f for f in there if f.name not in NOT_DATA), key=str)
    if any(Path(f.parent).name == energon.META for f in there):
        raise ValueError(f"{config.path}: the folder is a dataset of Megatron Energon without "
                         f"{energon.META}/split.yaml on this disk; give the tars of one split as "
                         "the path, for example shard-{000..099}.tar in that folder")
    tars = {Path(f.name).stem for f in there if f.suffix == ".tar"}
    files = [f for f in there if _kind(f) in READABLE and (
        f.suffix == ".tar" or Path(f.name).stem.removesuffix("_stats") not in tars)]
    below = [_below(f, config) for f in files]
    if not config.columns.split:
        files = [f for f, name in zip(files, below, strict=True) if _is_of(config.split, name)]
        if below and not files:
            raise ValueError(f"{config.path}: split is {config.split!r}, but no file's name begins "
                             f"so: {', '.join(below[:5])}")
        _check_one_split(config, below)
    if len({f.name == "data.jsonl" for f in files}) > 1:
        raise ValueError(f"{config.path}: it holds data.jsonl and other data files "
                         f"({', '.join(below[:5])}); give the path of the one that is meant, or a "
                         f"pattern of those that are ({config.path}/*.jsonl)")
    return files


def _below(file: File, config: SourceConfig) -> str:
    """The name of a file, with the folder in the source's that it is in."""
    folder = Path(file.parent).name
    return f"{folder}/{file.name}" if SPLIT.match(folder) and folder != Path(
        config.path).name else file.name


def _is_of(split: str, name: str) -> bool:
    """Whether the name of a file, or of the folder that it is in, begins with a split."""
    return not split or any(part.startswith(split) and not part[len(split):][:1].isalpha()
                            for part in name.split("/"))


def _check_one_split(config: SourceConfig, names: Iterable[str]) -> None:
    """Raises ValueError if the source has no `split` and the names of its files or folders are
    those of several."""
    found = [(match[1].lower(), name[: match.end()]) for name in names
             if (match := SPLIT.search(name))]
    if not config.split and len({split for split, _ in found}) > 1:
        raise ValueError(f"{config.path}: it holds several splits, and all of them would be "
                         "trained on; set split of the source to one of "
                         f"{', '.join(dict.fromkeys(begin for _, begin in found))}")


def _find_remote(config: SourceConfig, cache_dir: Path, storage: Storage) -> Found:
    """Data files are opened where they are, one after the other."""
    if config.columns.split and not config.split:
        raise ValueError("columns.split is set, and split is not: which splits there are is not "
                         "known before every file is fetched; name one")
    numbered, url = _numbered(config.path), config.path.rstrip("/")
    files = storage.each(numbered, RANGE.sub("*", url, 1)) if numbered else storage.listed(url)
    if not files:
        raise ValueError("no such file or folder")
    if numbered or set("*?[") & set(url) or files[0].url == url:
        check_parts(config, "a data file", *["split"] * bool(config.columns.split))
        return _opener(files, files[0].parent, config, cache_dir)
    data = _data_files(files, config)
    if not data or any(f.name in SAVED for f in files):
        raise ValueError(f"{url}: a folder behind a URL is read if it holds data files alone; copy "
                         "the rows of one with a layout of its own (save_to_disk, "
                         "AIR-Bench, LibriSpeech) to a disk, and give media_root: the URL")
    check_parts(config, "a folder of files", "split")
    return _opener(data, url, config, cache_dir)


def _is_empty(file: File) -> bool:
    """Whether a file of this machine holds nothing. Those of /proc have no size either."""
    return (isinstance(file, Path) and file.is_file() and not file.stat().st_size
            and not file.read_bytes())


def _opener(files: Sequence[File], root: Path | str, config: SourceConfig, cache_dir: Path,
            layout: str | None = None) -> Found:
    for path in files:
        if _kind(path) not in READABLE:
            refuse_kind(str(path))
            raise ValueError(f"{path}: {path.suffix or 'no suffix'} is not read; it must be one of "
                             f"{', '.join(READABLE)}")
        if isinstance(path, Path) and path.is_symlink() and not path.exists():
            raise ValueError(f"{path}: a link to a file that is gone: mend it, or remove it")
    if all(map(_is_empty, files)):
        raise ValueError(f"{config.path}: it is empty, without a row to read")
    kinds = {"JSON" if path.suffix in JSON_SUFFIXES else _kind(path) for path in files}
    if len(kinds) > 1:
        raise ValueError(f"{config.path}: files of several kinds ({', '.join(sorted(kinds))}); "
                         f"give a source for each, such as {files[0].parent}/*{_kind(files[0])}")
    is_packed = _kind(files[0]) in COMPRESSED
    check_places(config, f"{next(iter(kinds))} files", *["segments", "split"] * (not is_packed),
                 *["rows"] * all(path.suffix == ".json" for path in files))
    if files[0].suffix in (*ARROW_SUFFIXES, ".zst"):
        check_installed(config.path, "pyarrow")
    return lambda: (_open_files(config, files, root, cache_dir), layout)


def _check_splits(config: SourceConfig, stores: Sequence[RowStore]) -> None:
    """Raises ValueError for a split that no row of the stores has, and where they have several and
    the source names none."""
    if not config.columns.split:
        return
    found = dict.fromkeys(split for store in stores for split in store.split_names)
    if config.split not in found if config.split else len(found) > 1:
        said = (f"split is {config.split!r}, which no row has" if config.split
                else "it holds several splits")
        raise ValueError(f"{config.path}: {said}; set split of the source to one of "
                         f"{', '.join(found)}")


def _open_files(config: SourceConfig, files: Sequence[File], root: Path | str, cache_dir: Path
                ) -> RowStore:
    numbered = [name.isdecimal() for name in Columns(changed(config.columns)).names
                if "{" not in name]
    opened = {
        ".tar": TarRows, ".parquet": arrow.ParquetRows, ".arrow": arrow.IpcRows,
        **dict.fromkeys(TABLE_SUFFIXES, partial(
            TableRows, has_names=not all(numbered) if numbered else None)),
        **dict.fromkeys(JSON_SUFFIXES, partial(JsonRows, rows=config.columns.rows)),
        **dict.fromkeys(COMPRESSED, CompressedRows),
    }[_kind(files[0])]

    scans = Scans(cache_dir, files)

    def open_file(path: File) -> RowStore:
        store, columns = opened(path, config.max_row_bytes, scans), config.columns
        return PickedRows(store, config, scans) if columns.segments or columns.split else store

    later = isinstance(files[0], RemoteFile) and opened is not CompressedRows
    stores = [LaterRows(partial(open_file, path), path) if later else open_file(path)
              for path in files]
    if not isinstance(files[0], RemoteFile):
        _check_splits(config, stores)
    return stores[0] if len(stores) == 1 and root == stores[0].root else JoinedRows(stores, root)
