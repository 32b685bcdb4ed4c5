"""A recipe's source -> rows and the adapter that reads them, told from what is there.

Flow: path -> row store (how rows are kept) -> first rows -> layout (what they say) -> DataSource.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from orchmllm.config import DataConfig, SourceConfig
from orchmllm.data.formats import arrow, llama_factory
from orchmllm.data.formats.conversation import (
    ADAPTERS,
    LOOKED_FOR,
    PREFERENCES,
    Conversation,
    detect,
)
from orchmllm.data.formats.copies import PACKED, array_cache, suffix_of, unpacked
from orchmllm.data.formats.rows import JoinedRows, JsonRows, RowStore, TranscriptRows
from orchmllm.data.formats.tars import TarRows
from orchmllm.data.media.medium import MediaRoot, RowError, VideoSampling, refuse_kind
from orchmllm.data.tokenizer import ChatTokenizer

NUM_PEEKED = 20  # first rows that detection looks at: some of them may be broken
JSON_SUFFIXES, ARROW_SUFFIXES = (".jsonl", ".json", ".ndjson"), (".parquet", ".arrow")
READABLE = (*JSON_SUFFIXES, *ARROW_SUFFIXES, ".tar")
DEFAULT_INDEX_DIR = "~/.cache/orchmllm/index"
MAX_ROW_CHARS = 1 << 20  # of all turns: about 250,000 tokens
Found = tuple[Callable[[], RowStore], str | None]  # what opens the rows, and their layout


@dataclass
class DataSource:
    """Rows of one source of a recipe. layout: a key of ADAPTERS. root: where its media may be."""

    config: SourceConfig
    name: str
    store: RowStore
    layout: str
    root: MediaRoot

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        return (f"{self.name}: {len(self)} rows of {self.layout} in {self.store.kind} "
                f"({self.config.path})")

    def conversation(self, i: int) -> Conversation:
        """Row i as the canonical example. Raises RowError."""
        return self.parse(self.store.row(i), self.store.file(i))

    def parse(self, row: dict, file: Path) -> Conversation:
        """A row of `file` as the canonical example. Raises RowError."""
        root = self.root
        if self.layout == "air_bench":  # media are beside the meta file, not beside the source
            folder = os.path.relpath(file.parent, root.path)
            root = replace(root, prefix="" if folder[0] == "." else folder)
        try:
            conversation = ADAPTERS[self.layout](row, root, self.config.prompt)
        except RowError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
                ValueError) as error:  # adapters read a row as if it had the right types
            raise RowError(f"not a row of {self.layout} ({LOOKED_FOR.get(self.layout, '')}): "
                           f"{type(error).__name__}: {error}") from error
        num_chars = sum(map(len, [p for t in conversation for p in t.parts if isinstance(p, str)]))
        if num_chars > MAX_ROW_CHARS:
            raise RowError(f"{num_chars} characters of text: more than the limit of "
                           f"{MAX_ROW_CHARS}")
        return conversation


def index_path(index_dir: str | os.PathLike | None) -> Path:
    """Where indexes and scans are kept (None or empty: below the user's cache folder)."""
    return Path(index_dir or DEFAULT_INDEX_DIR).expanduser()


def beside(path: str) -> Path:
    """The tokenizer.json that lies with the data. Raises ValueError if there is none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / "tokenizer.json").is_file():
        missing = "" if os.path.exists(path) else f"{path}: no such file or folder, and "
        raise ValueError(f"{missing}{folder / 'tokenizer.json'}: no such file; give data.path and "
                         "data.tokenizer (scripts/make_demo_data.py writes both)")
    return folder / "tokenizer.json"


def sources_of(data: DataConfig) -> Sequence[SourceConfig]:
    """The sources of a recipe."""
    return data.sources or (SourceConfig(path=data.path),)


def open_tokenizer(data: DataConfig) -> ChatTokenizer:
    """The tokenizer of a recipe: the one that it names, or the one beside its (first) data. Raises
    ValueError."""
    return ChatTokenizer(data.tokenizer or beside(sources_of(data)[0].path))


def open_source(config: SourceConfig, cache_dir: Path) -> DataSource:
    """Raises ValueError naming the path, what was looked for and the cure."""
    if not config.path:
        raise ValueError("data.sources: a source needs a path")
    try:
        opener, layout = _find_store(config, cache_dir)
        return _as_source(config, opener(), layout)
    except (UnicodeDecodeError, RowError) as error:
        raise ValueError(f"{config.path}: {error}") from error


def check_source(config: SourceConfig) -> None:
    """Raises ValueError if a source's files or its media_root are not there; opens
    nothing."""
    _find_store(config, Path())
    _check_media_root(config)


def _check_media_root(config: SourceConfig) -> None:
    if config.media_root and not os.path.isdir(config.media_root):
        raise ValueError(f"{config.path}: media_root {config.media_root!r} is not a folder")


def stream_of(config: SourceConfig) -> DataSource | None:
    """Parquet files and the hub as a stream, without a copy on disk; None for what a store reads
    in place. Raises ValueError."""
    hub = config.path.startswith("hf:")
    files = [] if hub or os.path.isdir(config.path) else _expand(config.path)
    if not hub and not (files and all(f.suffix == ".parquet" for f in files)):
        return None
    return _as_source(config, arrow.open_stream(config, files), None)


def _as_source(config: SourceConfig, store: RowStore, layout: str | None) -> DataSource:
    root = os.path.realpath(config.media_root or store.root)
    _check_media_root(config)
    name = config.name or _short_name(config.path)
    if config.row_format not in ("auto", "librispeech"):
        layout = _chosen(config.row_format, store)
    return DataSource(config, name, store, layout or _detected(store, config.path),
                  MediaRoot(root, bool(config.media_root), video=VideoSampling(
                      config.video_fps, config.video_frames, config.video_max_frames,
                      config.video_audio)))


def _short_name(path: str) -> str:
    last = Path(path.rstrip("/")).name
    return last.split("{")[0].split("*")[0].rstrip("-_.") or Path(path).parent.name


def _peek(store: RowStore) -> Iterator[dict]:
    for i in range(min(NUM_PEEKED, len(store))):
        try:
            yield store.row(i)
        except RowError:
            continue


def _chosen(layout: str, store: RowStore) -> str:
    if layout == "llama_factory" and any("instruction" in row for row in _peek(store)):
        return "llama_factory (alpaca)"
    return layout


def _detected(store: RowStore, path: str) -> str:
    votes: dict[str, int] = {}
    keys: set[str] = set()
    for row in _peek(store):
        if "chosen" in row and "rejected" in row:
            raise ValueError(f"{path}: {PREFERENCES}")
        keys |= row.keys()
        found = detect(row)
        if found:
            votes[found] = votes.get(found, 0) + 1
    if votes:
        if votes.keys() == {"llava", "sharegpt"}:  # LLaVA's mix holds rows without media
            return "llava"
        return max(votes, key=lambda k: votes[k])
    looked = "".join(f"\n  {name}: {what}" for name, what in LOOKED_FOR.items())
    seen = f"keys {', '.join(sorted(map(str, keys)))}" if keys else "no row that can be read"
    raise ValueError(f"{path}: {store.kind} of unknown layout: its first {NUM_PEEKED} rows have "
                     f"{seen}; looked for{looked}\nrename the columns, or name the format")


def _find_store(config: SourceConfig, cache_dir: Path) -> Found:
    """What opens the rows, and the layout where the place tells it. Raises ValueError if files are
    missing."""
    if config.path.startswith("hf:"):
        return partial(arrow.open_hub, config, cache_dir), None
    path = Path(config.path)
    if path.is_dir():
        return _find_in_folder(path, config, cache_dir)
    files = _expand(config.path)
    if not files:
        raise ValueError(f"{config.path}: no such file or folder; give a JSON, JSONL, parquet, "
                         "arrow or tar file, a pattern of them, a folder, or hf:org/name")
    return _opener(files, files[0].parent, config, cache_dir), None


def _expand(pattern: str) -> list[Path]:
    """Files of a path, a glob, or a range such as shard-{000..012}.tar."""
    span = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if span:
        first, last = span.groups()
        names = [pattern[: span.start()] + str(k).zfill(len(first)) + pattern[span.end():]
                 for k in range(int(first), int(last) + 1)]
        missing = [name for name in names if not os.path.isfile(name)]
        if missing:
            raise ValueError(f"{pattern}: {missing[0]} is missing")
        return [Path(name) for name in names]
    if os.path.isfile(pattern):
        return [Path(pattern)]
    return [Path(p) for p in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(p)]


def _find_in_folder(path: Path, config: SourceConfig, cache_dir: Path) -> Found:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return partial(arrow.open_saved, path, config), None
    listed = llama_factory.read(path)
    if listed:
        files, renamed, layout = listed.choose(config.subset)
        opener = _opener(files, path, config, cache_dir)
        return (lambda: renamed(opener())), layout
    metas = sorted(p for p in (*path.glob("*_meta.json"), *path.glob("*/*_meta.json")))
    if metas and config.row_format in ("auto", "air_bench"):
        return _opener(metas, path, config, cache_dir), "air_bench"
    if next(path.rglob("*.trans.txt"), None) is not None:
        return partial(TranscriptRows, path, config.split), "asr"
    if (path / "data.jsonl").is_file():
        return _opener([path / "data.jsonl"], path, config, cache_dir), None
    for suffixes in (ARROW_SUFFIXES, (".tar",), JSON_SUFFIXES):
        files = sorted(p for folder in (path, path / "data") for p in folder.glob("*")
                       if suffix_of(p) in suffixes and p.name not in NOT_DATA)
        if config.split and len(files) > 1:
            files = [p for p in files if p.name.startswith(config.split)] or files
        if files:
            return _opener(files, path, config, cache_dir), None
    raise ValueError(
        f"{path}: nothing to read; looked for a saved `datasets` folder (state.json), "
        "dataset_info.json (LLaMA-Factory), *_meta.json (AIR-Bench), *.trans.txt (LibriSpeech), "
        "data.jsonl, *.parquet, *.arrow, *.tar, *.json and *.jsonl, and those as .gz or .zst")


NOT_DATA = {"tokenizer.json", "tokenizer_config.json", "dataset_infos.json", "dataset_info.json",
            "config.json"}


def _opener(
    files: Sequence[Path], root: Path, config: SourceConfig, cache_dir: Path
) -> Callable[[], RowStore]:
    for path in files:
        refuse_kind(path.stem if path.suffix in PACKED else str(path))
        readable = READABLE if path.suffix not in PACKED else (*JSON_SUFFIXES, ".tar")
        if suffix_of(path) not in readable:
            raise ValueError(f"{path}: {path.suffix or 'no suffix'} is not read; it must be one of "
                             f"{', '.join(READABLE)} (JSON and tars also as .gz or .zst; convert "
                             ".csv to .jsonl)")
    if suffix_of(files[0]) in ARROW_SUFFIXES:
        return partial(arrow.open_files, files, root, cache_dir)
    return partial(_open_files, files, root, config, cache_dir)


def _open_files(
    files: Sequence[Path], root: Path, config: SourceConfig, cache_dir: Path
) -> RowStore:
    opened = TarRows if suffix_of(files[0]) == ".tar" else JsonRows
    cached = array_cache(cache_dir)
    stores = []
    for path in files:
        stores.append(opened(unpacked(path, cache_dir), config.max_row_bytes, cached))
        stores[-1].path, stores[-1].files, stores[-1].root = path, [path], path.parent
    return stores[0] if len(stores) == 1 and root == stores[0].root else JoinedRows(stores, root)
