"""The map-style dataset: conversations of one or more sources, with lengths before decoding.

`layout(i)` is all that planning needs (from the index, or from headers and tokens); `load(i)`
decodes, and only the segments that a rank was given. A row that cannot be used is a stand-in of one
token (see orchmllm.data.lengths), reported by `load` through on_error as its segment 0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import Example
from orchmllm.config import SourceConfig
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.formats.open import DataSource, index_path, open_source
from orchmllm.data.index import LengthIndex, open_index
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.decode import decode_audio, decode_image
from orchmllm.data.media.medium import MediaError, Medium, printable, reading
from orchmllm.data.sequence import padded_counts, shifted_labels, text_sequence
from orchmllm.data.tokenizer import ChatTokenizer, Piece
from orchmllm.plan.layout import AUDIO, TEXT, VISION, AudioGeometry, ExampleLayout, VisionGeometry

# Layouts and token ids kept; loads follow their layout soon, so an old one is seldom read again.
CACHED_EXAMPLES = 4096


class ConversationDataset:
    """Examples of `sources` one after the other; example i of a single source is its i-th row.

    sources: a path, or the sources of a recipe. max_example_tokens: see LengthReader. index_dir:
    where length indexes and scans of large files are kept (None: ~/.cache/orchmllm/index); an index
    that fits is used. Raises ValueError if a source cannot be opened; bad rows and media are
    reported when they are loaded.
    """

    streaming = False

    def __init__(
        self,
        sources: str | os.PathLike | Sequence[SourceConfig],
        *,
        tokenizer: ChatTokenizer,
        vision: VisionGeometry,
        audio: AudioGeometry,
        max_example_tokens: int = 0,
        index_dir: str | os.PathLike | None = None,
    ):
        if isinstance(sources, str | os.PathLike):
            sources = [SourceConfig(path=os.fspath(sources))]
        folder = index_path(index_dir)
        self.sources = [self._open(config, folder) for config in sources]
        self.tokenizer, self.vision, self.audio = tokenizer, vision, audio
        self.planner = LengthReader(tokenizer, vision, audio, max_example_tokens)
        self.indexes: list[LengthIndex | None] = [
            None if self.streaming else open_index(source, self.planner, folder)
            for source in self.sources]
        self.bounds = np.concatenate([[0], np.cumsum([len(s) for s in self.sources])])
        self._cache: dict[int, MeasuredExample] = {}

    def _open(self, config: SourceConfig, folder: Path) -> DataSource:
        return open_source(config, folder)

    @property
    def weights(self) -> list[float] | None:
        """Shares of the sources in what is drawn; None: every example once per epoch."""
        weights = [s.config.weight for s in self.sources]
        return weights if any(weights) else None

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def where(self, i: int) -> tuple[int, int]:
        """(source, row in it) of example i."""
        if not 0 <= i < len(self):
            raise IndexError(f"example {i} of {len(self)}")
        source = int(np.searchsorted(self.bounds, i, side="right")) - 1
        return source, int(i - self.bounds[source])

    def fingerprint(self) -> dict:
        """What a checkpoint remembers of the data: rows, bytes, weight and a hash of the files'
        heads; not their times, which a copy changes."""
        out = {}
        for k, source in enumerate(self.sources):
            head = hashlib.sha256(source.layout.encode())
            for path in source.store.files:
                with open(path, "rb") as f:
                    head.update(f.read(1 << 16))
            out[f"{k} {source.name}"] = {
                "rows": len(source), "weight": source.config.weight,
                "head": head.hexdigest()[:16],
                "bytes": sum(os.path.getsize(p) for p in source.store.files)}
        return out

    def layout(self, i: int) -> ExampleLayout:
        """Lengths of example i from the index, or from headers and tokens; nothing is decoded."""
        source, row = self.where(i)
        index = self.indexes[source]
        return self._planned(i).layout if index is None else index.layout(row, i)

    def problem(self, i: int) -> MediaError | None:
        """Why example i is a stand-in, None if it is not."""
        source, row = self.where(i)
        index = self.indexes[source]
        return self._planned(i).problem if index is None else index.problems.get(row)

    def describe(self, i: int, segment: int) -> dict[str, str | int]:
        """A quarantine line's source, row (line or position from 1) and file."""
        source, problem = self.sources[self.where(i)[0]], self.problem(i)
        if problem is not None:
            file = problem.path
        else:
            media = self._media(i)
            file = media[segment].name if segment in media else ""
        data_file, number = self._file(i)
        return {"source": source.name, "row": number, "data_file": data_file,
                "file": printable(file or data_file)}

    def conversation(self, i: int) -> Conversation:
        """Example i in canonical form. Raises RowError."""
        source, row = self.where(i)
        return self.sources[source].conversation(row)

    def load(
        self,
        i: int,
        *,
        text: bool = True,
        segments: Collection[int] | None = None,
        on_error: Callable[[int, MediaError], None] | None = None,
    ) -> Example:
        """Decodes example i or parts of it.

        text: False leaves token_ids and labels None. segments: positions in the segment list of
        the media to decode; None for all. A medium that fails raises MediaError with `segment`
        set; with `on_error`, it is called with (segment, error) instead, and the rows are zeros.
        A stand-in reports its problem as segment 0 when its text is loaded.
        Raises ValueError if `segments` names one that is not a medium of this example.
        """
        layout, problem = self.layout(i), self.problem(i)
        known = np.flatnonzero(layout.modality != TEXT).tolist()
        wanted = known if segments is None else sorted(segments)
        if not set(known) >= set(wanted):
            raise ValueError(f"example {i}: segments {wanted} asked for, but its media are {known}")
        media = {s: self._load_medium(i, s, layout, on_error) for s in wanted}
        if not text:
            return Example(i, None, None, media)
        if problem is not None:
            self._fail(0, problem, on_error)
        tokens, supervised = text_sequence(layout, self._pieces(i, layout, on_error))
        labels = shifted_labels(tokens, supervised)
        return Example(i, torch.from_numpy(tokens), torch.from_numpy(labels), media)

    def media_of(self, i: int) -> list[tuple[int, int, Medium]]:
        """(segment index, modality, medium) of example i's media in reading order."""
        return [(s, m.modality, m) for s, m in self._media(i).items()]

    def split(self, num_validation: int) -> tuple[Sequence[int], Sequence[int]]:
        """(training, validation) indices: the last rows of each source are held out, in proportion
        to its size. Raises ValueError if that leaves no row to train on."""
        total = len(self)
        if num_validation < 0 or total - num_validation < 1:
            raise ValueError(
                f"{num_validation} rows to hold out of {total}; must be between 0 and {total - 1}")
        if len(self.sources) == 1:
            return range(total - num_validation), range(total - num_validation, total)
        ends = np.floor(self.bounds * (num_validation / total) + 0.5).astype(int)
        held = np.diff(ends)
        starts, stops = self.bounds[:-1], self.bounds[1:]
        train = np.concatenate([np.arange(a, b - n) for a, b, n in
                                zip(starts, stops, held, strict=True)])
        held_out = [i for b, n in zip(stops, held, strict=True) for i in range(b - n, b)]
        return train, held_out

    def _planned(self, i: int) -> MeasuredExample:
        cached = self._cache.get(i)
        if cached is None:
            source, row = self.where(i)
            [cached] = self.planner.plan(self.sources[source].conversation, [row], [i])
            if any(m.data is not None for m in cached.conversation.media):
                # Encoded media of thousands of examples would fill the memory: read them again.
                cached = cached._replace(conversation=Conversation(()))
            if len(self._cache) >= CACHED_EXAMPLES:
                self._cache.clear()
            self._cache[i] = cached
        return cached

    def _media(self, i: int) -> dict[int, Medium]:
        """Segment -> medium of example i, those after the cut left out."""
        modality = self.layout(i).modality
        media = self._planned(i).conversation.media if i in self._cache else []
        at = np.flatnonzero(modality != TEXT).tolist()
        if len(media) < len(at):
            media = self.conversation(i).media
        return dict(zip(at, media, strict=False))

    def _load_medium(self, i: int, segment: int, layout: ExampleLayout, on_error) -> Tensor:
        modality, rows = int(layout.modality[segment]), int(layout.rows[segment])
        try:
            return self._decode(self._medium(i, segment), modality, rows)
        except MediaError as error:
            error.modality = modality
            self._fail(segment, error, on_error)
            return self._zeros(modality, rows)

    def read(self, i: int, segment: int, *, on_error: Callable[[int, MediaError], None]) -> bytes:
        """Encoded bytes of a medium (dispatch `bytes`); none of them after on_error was called."""
        try:
            with reading(self._medium(i, segment)) as file:
                return Path(file).read_bytes() if isinstance(file, str) else file.read()
        except MediaError as error:
            error.modality = int(self.layout(i).modality[segment])
            self._fail(segment, error, on_error)
            return b""

    def decode(self, modality: int, data: bytes, rows: int, *, segment: int,
               on_error: Callable[[int, MediaError], None]) -> Tensor:
        """Rows of a medium that `read` returned, zeros after on_error was called."""
        try:
            return self._decode(Medium(modality, "", data=data), modality, rows)
        except MediaError as error:
            error.modality = modality
            self._fail(segment, error, on_error)
            return self._zeros(modality, rows)

    def _medium(self, i: int, segment: int) -> Medium:
        try:
            return self._media(i)[segment]
        except (ValueError, KeyError) as error:
            raise MediaError(self._name(i), "the row has changed since its lengths were read: "
                                            f"{error}") from error

    def _pieces(self, i: int, layout: ExampleLayout, on_error) -> list[Piece]:
        """Token ids of example i, the lengths of `layout`."""
        planned = self._cache.get(i)
        if planned is not None:
            return planned.pieces
        if self.problem(i) is not None:
            return self.planner.stand_in
        try:
            pieces = self.tokenizer.pieces(self.conversation(i).turns)
            counts = [len(p.token_ids) if p.modality == TEXT else n for p, n in
                      zip(pieces, padded_counts(layout.num_tokens, len(pieces)), strict=True)]
            pieces = self.planner.truncate(pieces, counts)
            changed = [len(p.token_ids) for p in pieces if p.modality == TEXT] != (
                layout.num_tokens[layout.modality == TEXT].tolist())
            reason = "its text does not have the indexed lengths" if changed else ""
        except ValueError as error:
            changed, reason = True, str(error)
        if not changed:
            return pieces
        self._fail(0, MediaError(self._name(i), "the row has changed since it was indexed: "
                                 f"{reason}"), on_error)
        return [Piece(int(m), np.zeros(n if m == TEXT else 0, np.int32),
                      np.zeros(n if m == TEXT else 0, bool))
                for m, n in zip(layout.modality, layout.num_tokens, strict=True)]

    def _file(self, i: int) -> tuple[str, int]:
        """Data file of example i and its row in it, from 1."""
        source, row = self.where(i)
        store = self.sources[source].store
        return str(store.file(row)), store.number(row)

    def _name(self, i: int) -> str:
        return "{}, row {}".format(*self._file(i))

    def _fail(self, segment: int, error: MediaError, on_error) -> None:
        error.segment = segment
        if on_error is None:
            raise error
        on_error(segment, error)

    def _decode(self, medium: Medium, modality: int, rows: int) -> Tensor:
        decoded = (decode_image(medium, self.vision) if modality == VISION
                   else decode_audio(medium, self.audio))
        if len(decoded) != rows:
            raise MediaError(medium.name, f"decoded to {len(decoded)} rows where {rows} were "
                                          "planned: the file has changed since its header was read")
        return decoded

    def _zeros(self, modality: int, rows: int) -> Tensor:
        if modality == AUDIO:
            return torch.zeros(rows, self.audio.row_size)
        return torch.zeros(rows, self.vision.row_size, dtype=torch.uint8)
