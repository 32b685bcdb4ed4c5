"""A recipe's source -> its rows and the format in which they are written.

Flow: path -> row store (how rows are kept) -> first rows -> row format -> DataSource.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from orchmllm.config.recipe import DataConfig, SourceConfig
from orchmllm.config.schema import did_you_mean
from orchmllm.data.formats import energon
from orchmllm.data.formats.columns import NONE, PLACES, absent, changed
from orchmllm.data.formats.compressed import CURES, CompressedRows
from orchmllm.data.formats.conversation import DOCUMENT, Conversation, media_of
from orchmllm.data.formats.find import find_store
from orchmllm.data.formats.propose import proposal
from orchmllm.data.formats.row_formats import FORMATS, RowFormat
from orchmllm.data.formats.rows import RowStore
from orchmllm.data.media.medium import RowError, VideoSampling
from orchmllm.data.media.parts import KEYS, part_of, refuse_unread
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.storage.cache import below_home
from orchmllm.data.storage.clients import StorageError, without_query
from orchmllm.data.storage.remote import NOWHERE, Storage, is_url
from orchmllm.plan.layout import AUDIO

NUM_PEEKED = 20  # first rows that detection looks at: some of them may be broken
DEFAULT_INDEX_DIR = "~/.cache/orchmllm/index"
MAX_ROW_CHARS = 1 << 20  # of all turns: about 250,000 tokens


@dataclass
class DataSource:
    """Rows of one source of a recipe. layout: a key of FORMATS, or "columns". row_format: how they
    are read. root: where its media may be. others: how a row is read that is not written so, if it
    is written in one of these."""

    config: SourceConfig
    name: str
    store: RowStore
    layout: str
    row_format: RowFormat
    root: MediaRoot
    others: Sequence[RowFormat] = ()

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        return (f"{self.name}: {len(self)} rows of {self.layout} in {self.store.kind} "
                f"({self.config.path})")

    @property
    def settings(self) -> list:
        """What decides, beside the files, which rows there are and what they become."""
        config = self.config
        return [self.layout, config.split, config.subset, self.root.declared, config.prompt,
                config.max_row_bytes, self.root.video, self.row_format.given,
                config.learn_documents]

    @property
    def chosen(self) -> dict:
        """What the recipe says of how rows are read, where that is not what it is by default."""
        config, columns = self.config, changed(self.config.columns)
        of_rows = bool(config.split) and "split" in self.row_format.given
        return ({"columns": columns} if columns else {}) | (
            {"split": config.split} if of_rows else {}) | (
            {} if config.learn_documents else {"learn_documents": False})

    def conversation(self, i: int) -> Conversation:
        """Row i as the canonical example. Raises RowError."""
        return self.parse(self.store.row(i), self.store.place(i)[0])

    def parse(self, row: dict, file: Path) -> Conversation:
        """A row of `file` as the canonical example. Raises RowError."""
        row_format, root = self.format_of(row), self.root
        if row_format.beside_file:
            folder = os.path.relpath(file.parent, self.store.root)
            root = replace(root, prefix="" if folder[0] == "." else folder)
        try:
            conversation = self._read(row, row_format, root)
            texts = [p for t in conversation for p in t.parts if isinstance(p, str)]
            refuse_unread(row, "\n".join(texts), row_format.skips)
            texts += [text for t in conversation for text in (t.reasoning, *dict(t.named).values())]
            calls = [json.dumps(t.calls, ensure_ascii=False) for t in conversation if t.calls]
            "\n".join([*texts, *calls]).encode()
        except RowError as error:
            spec = row_format.columns.specs.get("id")
            if name := spec and spec.find(row)[1]:
                error.reason = f"{name!s:.80}: {error.reason}"
            raise
        except UnicodeEncodeError as error:
            raise RowError(f"text cannot be written as UTF-8 ({error}); remove the lone surrogate"
                           ) from error
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
                ValueError) as error:  # formats read a row as if it had the right types
            raise RowError(f"not a row of {self.layout} ({row_format.holds}): "
                           f"{type(error).__name__}: {error}") from error
        num_chars = sum(map(len, texts))
        if num_chars > MAX_ROW_CHARS:
            raise RowError(f"{num_chars} characters of text: more than the limit of "
                           f"{MAX_ROW_CHARS}")
        return conversation

    def format_of(self, row: dict) -> RowFormat:
        """How a row is read: of a source with rows of several layouts, each by its own."""
        if self.row_format.columns.fits(row, media=False):
            return self.row_format
        return next((one for one in self.others if one.fits(row)), self.row_format)

    def proposal(self, rows: Sequence[tuple[dict, Path]], *, known: bool = False) -> str:
        """The line under which most of the rows can be used, each with its file, in words; empty
        where there is none, or none that is better than it is (known: it is read somehow)."""
        files = {id(row): file for row, file in rows}

        def read(row: dict, row_format: RowFormat) -> Conversation:
            file = files.get(id(row), rows[0][1])
            return replace(self, row_format=row_format, others=()).parse(row, file)

        return proposal([row for row, _ in rows], self.root, read,
                        self.row_format if known else None)

    def _read(self, row: dict, row_format: RowFormat, root: MediaRoot) -> Conversation:
        """A row as a format reads it, with the part that the row names. Raises RowError."""
        fields = row_format.columns.pick(row)
        part = problem = None
        try:
            part = part_of(row_format.times(row, fields))
        except RowError as error:  # such keys may mean something else in a row without media
            problem = error
        conversation = row_format.reader.read(
            fields, replace(root, part=part), self.config.prompt or row_format.asks(row))
        media = media_of(conversation)
        if media and problem:
            raise problem
        timed = {m._replace(frame=None, sampled=None, modality=AUDIO, part=None) for m in media
                 if m.modality == AUDIO or m.frame is not None}
        if part is not None and media and len(timed) != 1:
            raise RowError(f"the row names {part.start} s to {part.end} s, of {len(timed)} clips "
                           "and videos: give such times in the medium ({path, start, end})")
        if not self.config.learn_documents and conversation[0].role == DOCUMENT:
            return tuple(turn._replace(supervised=False) for turn in conversation)
        return conversation


def index_path(index_dir: str | os.PathLike | None) -> Path:
    """Where indexes and scans are kept (None or empty: below the user's cache folder)."""
    return below_home(str(index_dir or DEFAULT_INDEX_DIR), "data.index_dir")


def sources_of(data: DataConfig) -> Sequence[SourceConfig]:
    """The sources of a recipe."""
    return data.sources or (SourceConfig(path=data.path),)


def open_source(config: SourceConfig, cache_dir: Path, storage: Storage = NOWHERE, *,
                streaming: bool = False) -> DataSource:
    """storage: what may be read of other machines. streaming: see find_store. Raises ValueError
    naming the path, what was looked for and the cure."""
    if not config.path:
        raise ValueError("data.sources: a source needs a path")
    _check_keys(config, storage)
    with _explained(config):
        config = energon.with_columns(config)
        store, layout = find_store(_with_rows(config), cache_dir, storage, streaming)()
        first = store.parts()[0]
        if isinstance(first, CompressedRows) and not streaming:
            path = first.files[0]
            raise ValueError(f"{path}: it is compressed, so its rows are read in order alone: set "
                             f"data.streaming, or decompress it ({CURES[path.suffix]})")
        return _as_source(config, store, layout, storage)


def check_source(config: SourceConfig, storage: Storage = NOWHERE) -> None:
    """Raises ValueError if a source's files or its media_root are not there, or its row_format is
    unknown; opens nothing."""
    with _explained(config):
        find_store(_with_rows(energon.with_columns(config)), Path(), storage)
    _check_keys(config, storage)


def _with_rows(config: SourceConfig) -> SourceConfig:
    """With what its row_format says of where rows are, where the recipe does not."""
    known = FORMATS[config.row_format].given if config.row_format in FORMATS else {}
    where = {field: "" if spec == NONE else spec
             for field, spec in (known | changed(config.columns)).items() if field in PLACES}
    return replace(config, columns=replace(config.columns, **where))


@contextmanager
def _explained(config: SourceConfig) -> Iterator[None]:
    """Errors of reading a source as ValueError."""
    try:
        yield
    except (UnicodeDecodeError, RowError) as error:
        raise ValueError(f"{config.path}: {error}") from error
    except (StorageError, OSError) as error:
        path = without_query(config.path)
        raise ValueError(f"{'' if path in str(error) else path + ': '}{error}") from error


def _check_keys(config: SourceConfig, storage: Storage) -> None:
    if is_url(config.media_root):
        storage.below(config.media_root, "name")
    elif config.media_root and not os.path.isdir(config.media_root):
        raise ValueError(f"{config.path}: media_root {config.media_root!r} is not a folder")
    choices = ("auto", *FORMATS)
    if config.row_format not in choices:
        raise ValueError(f"{config.path}: row_format is {config.row_format!r}: "
                         f"{did_you_mean(config.row_format, choices)}choose one of "
                         f"{', '.join(choices)}")


def _as_source(config: SourceConfig, store: RowStore, layout: str | None,
               storage: Storage) -> DataSource:
    root = config.media_root or store.root
    root = root if is_url(root) else os.path.realpath(root)
    name = config.name or _short_name(config.path)
    columns = changed(config.columns)
    if config.row_format != "auto":
        layout = _chosen(config.row_format, store)
    elif columns.keys() - {"split", "segments", "rows", "id"}:
        layout = "columns"
    others = () if layout else tuple(FORMATS.values())
    video = VideoSampling(config.video_fps, config.video_frames, config.video_max_frames,
                          config.video_audio)
    media = MediaRoot(root, bool(config.media_root), storage=storage, video=video)
    layout = layout or _detected(store, config, media)
    try:
        row_format = (RowFormat(columns) if layout == "columns"
                      else FORMATS[layout].with_columns(columns))
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error
    unread: list[RowError] = []
    rows = list(_peek(store, unread)) if columns else []
    if unread and not rows:
        raise ValueError(f"{config.path}: none of its first rows can be read: {unread[0].reason}")
    for field in absent(columns, rows) if rows else ():
        raise ValueError(f"{config.path}: columns.{field} is {columns[field]!r}, which none of the "
                         f"first {len(rows)} rows has; their columns are "
                         f"{', '.join(dict.fromkeys(str(key) for row in rows for key in row))}")
    if config.prompt and not row_format.takes_prompt:
        raise ValueError(f"{config.path}: prompt is {config.prompt!r:.80}, but rows of {layout} "
                         "hold their questions: leave it out")
    return DataSource(config, name, store, layout, row_format, media, others)


def _short_name(path: str) -> str:
    last = Path(path.rstrip("/")).name
    return last.split("{")[0].split("*")[0].rstrip("-_.") or Path(path).parent.name


def _peek(store: RowStore, unread: list[RowError]) -> Iterator[dict]:
    """The first rows; of shards no more are opened than hold them. unread: where the errors of
    those that cannot be read go."""
    places = ((one, i) for one in store.parts() for i in range(len(one)))
    for shard, i in islice(places, NUM_PEEKED):
        try:
            yield shard.row(i)
        except RowError as error:
            unread.append(error)


def _chosen(layout: str, store: RowStore) -> str:
    if layout == "llama_factory" and any("instruction" in row for row in _peek(store, [])):
        return "llama_factory (alpaca)"
    return layout


def _detected(store: RowStore, config: SourceConfig, root: MediaRoot) -> str:
    """Raises ValueError, with the columns that would read the rows, where no format does."""
    path = config.path
    unread: list[RowError] = []
    rows = list(_peek(store, unread))
    if any("chosen" in row and "rejected" in row for row in rows):
        raise ValueError(f"{path}: {KEYS['preferences'].done}")
    fits = [next((name for name, known in FORMATS.items() if known.fits(row)), None)
            for row in rows]
    votes = Counter(filter(None, fits))
    if votes:  # a row of another layout is read by its own
        return votes.most_common(1)[0][0]
    keys = set().union(*rows)
    seen = f"keys {', '.join(sorted(map(str, keys))):.300}" if keys else (
        f"no row that can be read{''.join(f' ({error.reason})' for error in unread[:1])}")
    source = DataSource(config, path, store, "text", FORMATS["text"], root)
    columns = source.proposal([(row, store.files[0]) for row in rows] if store.files else [])
    if not keys and store.kind == "JSONL":  # a row is on one line
        columns = "; where the file is one object, name its list of rows (columns: {rows: NAME})"
    raise ValueError(f"{path}: {store.kind} of unknown layout: its first {NUM_PEEKED} rows have "
                     f"{seen}{columns or '; name the columns (columns: in the source)'}, or the "
                     "format (row_format), as docs/formats.md lists them")
