"""The map-style dataset: conversations of one or more sources, with lengths before decoding.

`layout(i)` is all that planning needs (from the index, or from headers and tokens); `load(i)`
decodes, and only the segments that a rank was given. A row that cannot be used is a stand-in of one
token (see orchmllm.data.lengths), reported by `load` through on_error as its segment 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from orchmllm.batch import ProcessedExample
from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.formats.open import DataSource, index_path, open_source
from orchmllm.data.formats.scanned import sampled
from orchmllm.data.index import LengthIndex, joined_layouts, open_index
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.media.medium import MediaError, Medium, printable
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.sampler import split_rows
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import NOWHERE, Storage, fetch_ahead
from orchmllm.plan.layout import BatchLayout

MEASURED_AT_ONCE = 64  # rows that are in memory with what they hold
CACHED_BYTES = 256 << 20  # of media that rows hold themselves


class ConversationDataset:
    """Examples of `sources` one after the other; example i of a single source is its i-th row.

    sources: a path, or the sources of a recipe. index_dir: where length indexes and scans of files
    are kept (None: ~/.cache/orchmllm/index); an index that fits is used. storage: what may be
    read of other machines. reader: what measures and loads a row. Raises ValueError if a source
    cannot be opened; bad rows and media are reported when they are loaded.
    """

    streaming = False
    cached_examples = 4096  # kept as planned: a load follows its layout soon

    def __init__(
        self,
        sources: str | os.PathLike | Sequence[SourceConfig],
        *,
        index_dir: str | os.PathLike | None = None,
        storage: Storage = NOWHERE,
        reader: ProcessedReader,
    ):
        if isinstance(sources, str | os.PathLike):
            sources = [SourceConfig(path=os.fspath(sources))]
        folder, self.storage = index_path(index_dir), storage
        self.sources = [open_source(config, folder, storage, streaming=self.streaming)
                        for config in sources]
        self.reader, self.tokenizer = reader, reader.tokenizer
        self.indexes: list[LengthIndex | None] = [
            None if self.streaming else open_index(source, self.reader, folder)
            for source in self.sources]
        self.bounds = np.zeros(1, np.int64) if self.streaming else np.concatenate(
            [[0], np.cumsum([len(s) for s in self.sources])])
        self._cache: dict[int, MeasuredExample] = {}  # in the order in which they were planned
        self._cached_bytes = 0

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def where(self, i: int) -> tuple[int, int]:
        """(source, row in it) of example i."""
        if not 0 <= i < self.bounds[-1]:
            raise IndexError(f"example {i} of {len(self)}")
        source = int(np.searchsorted(self.bounds, i, side="right")) - 1
        return source, int(i - self.bounds[source])

    def fingerprint(self) -> dict:
        """What of the data decides which examples are drawn and what they hold: the reader, and
        of each source its rows, their format, its share of what is drawn, and what `sampled` says
        of its files. Neither names nor times, which a copy changes. A source without files, a
        stream of the hub, is known by its name alone. Raises OSError for a file that is gone."""
        configs = [source.config for source in self.sources]
        total = sum(config.weight for config in configs) or 1.0
        return {**self.reader.fingerprint, "sources": [
            {"rows": self._num_rows(source), "row_format": source.layout, **source.chosen,
             "share": round(config.weight / total, 9),
             **(sampled(source.store.files) if source.store.files
                else {"hub": [config.path, config.split, config.subset]})}
            for source, config in zip(self.sources, configs, strict=True)]}

    def _num_rows(self, source: DataSource) -> int:
        return len(source)

    def layout(self, i: int) -> BatchLayout:
        """Lengths of example i from the index, or from headers and tokens; nothing is decoded."""
        source, row = self.where(i)
        index = self.indexes[source]
        if index is None:
            return self._measured([i])[0].layout
        return index.layout(*np.array([[row], [i]]))

    def layouts(
        self, examples: np.ndarray, examples_per_rank: Sequence[int]
    ) -> BatchLayout:
        """`layout` of each of the (n,) examples, joined; see BatchLayout.concat. Those that
        no index knows are measured MEASURED_AT_ONCE at a time."""
        def measure(rest: list[int]) -> list[BatchLayout]:
            return [row.layout for start in range(0, len(rest), MEASURED_AT_ONCE)
                    for row in self._measured(rest[start: start + MEASURED_AT_ONCE])]

        return joined_layouts(self.indexes, self.bounds, examples, examples_per_rank, measure)

    def _measured(self, examples: Sequence[int]) -> list[MeasuredExample]:
        """Examples as they were kept, or read and measured together: what they need of other
        machines is fetched at the same time."""
        found = {i: self._cache.get(i) for i in examples}
        new = [i for i, row in found.items() if row is None]
        if new:
            for i, row in zip(new, self.reader.plan(self.conversation, new), strict=True):
                self._keep(i, row)
                found[i] = row  # by now it may be dropped again
        return [found[i] for i in examples]

    def prepare_loads(self, calls: Sequence[tuple[tuple, dict]]) -> None:
        """Reads the rows of calls of `load`, and begins to fetch their media where those are on
        other machines. calls: (arguments, keywords); "row" is added to them."""
        if not self.storage.config.roots:
            return
        wanted = []
        for (i,), keys in calls:
            row = keys["row"] = keys.get("row") or self._row(i)
            segments = keys.get("segments")
            wanted += [m.path for s, m in row.media_at.items()
                       if segments is None or s in segments]
        fetch_ahead(wanted)

    def problem(self, i: int) -> MediaError | None:
        """Why example i is a stand-in, None if it is not."""
        source, row = self.where(i)
        index = self.indexes[source]
        return self._measured([i])[0].problem if index is None else index.problems.get(row)

    def describe(self, i: int, segment: int) -> dict[str, str | int]:
        """A quarantine line's source, row (line or position from 1) and file."""
        source = self.sources[self.where(i)[0]]
        try:
            problem, media = self.problem(i), {s: m.name for s, _, m in self.media_of(i)}
        except (OSError, StorageError):  # the rows are gone, too, which the next read tells
            problem, media = None, {}
        file = media.get(segment, "") if problem is None else problem.path
        data_file, number = self._place(i)
        return {"source": source.name, "row": number, "data_file": data_file,
                "file": printable(file or data_file)}

    def conversation(self, i: int) -> Conversation:
        """Example i in canonical form. Raises RowError."""
        source, row = self.where(i)
        return self.sources[source].conversation(row)

    def load(self, i: int, *, row: MeasuredExample | None = None, text: bool = True, **wanted: Any
             ) -> ProcessedExample:
        """Reads row i once and decodes it or parts of it. row: what `kept` returned in the process
        that planned it. text, wanted: see ProcessedReader.load."""
        return self.reader.load(row or self._row(i), partial(self.name, i), text=text,
                                **wanted)

    def kept(self, i: int, *, read: bool = False) -> MeasuredExample | None:
        """What planning read of example i, if that is still there: for `load` in a process that
        would have to read it again. read: it is read where it is not there, and no data are on
        other machines, for which a step would wait here."""
        reads = read and not self.storage.config.roots
        return self._cache.get(i) or (self._row(i) if reads else None)

    def media_of(self, i: int) -> list[tuple[int, int, Medium]]:
        """(segment index, modality, medium) of example i's media in reading order; those after the
        cut are left out."""
        return [(s, m.modality, m) for s, m in self._row(i).media_at.items()]

    def split(self, num_validation: int) -> tuple[Sequence[int], Sequence[int]]:
        """See orchmllm.data.sampler.split_rows."""
        return split_rows(self.sources, num_validation)

    def _row(self, i: int) -> MeasuredExample:
        """Row i with its media; its tokens come with these where there is an index."""
        source, number = self.where(i)
        index = self.indexes[source]
        if index is None:
            return self._measured([i])[0]
        layout, problem = self.layout(i), index.problems.get(number)
        if problem is not None:
            return self.reader.stand_in(problem, i, layout)
        media: list[Medium] = []
        turns: Conversation = ()
        sizes, none = index.sizes(number), np.zeros(0, np.int32)
        try:
            turns = self.reader.taken(self.conversation(i))
            media = self.reader.media(turns)
        except ValueError as error:
            problem = MediaError(self.name(i), "the row has changed since it was indexed (`data "
                                 f"lint` reads all rows again): {error}")
        return MeasuredExample(layout, none, none, media, problem, turns, sizes)

    def _keep(self, i: int, row: MeasuredExample) -> None:
        """A row's media may be its own bytes, so what is kept is bounded in bytes, too. Threads of
        a validation may call this: row.num_bytes is computed before _cached_bytes is read."""
        self._drop(i)
        self._cache[i] = row
        self._cached_bytes = row.num_bytes + self._cached_bytes
        while len(self._cache) > 1 and (len(self._cache) > self.cached_examples
                                        or self._cached_bytes > CACHED_BYTES):
            self._drop(next(iter(list(self._cache)), i))

    def _drop(self, i: int) -> None:
        if (row := self._cache.pop(i, None)) is not None:
            self._cached_bytes = -row.num_bytes + self._cached_bytes

    def _place(self, i: int) -> tuple[str, int]:
        """Data file of example i and its row in it, from 1."""
        source, row = self.where(i)
        file, number = self.sources[source].store.place(row)
        return str(file), number

    def name(self, i: int) -> str:
        """Data file of example i and its row in it, from 1, in words."""
        return "{}, row {}".format(*self._place(i))
