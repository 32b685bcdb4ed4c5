"""Streaming: the shards of a source read in order, the same on any number of ranks and workers.

A source's files are dealt to logical shards, which take turns in proportion to their rows until
each of them has given all of its rows: that is an epoch. Inside a shard, files come in a seeded
order per epoch and rows are shuffled in windows. So an example is a pure function of its number and
of the numbers of rows: a rank reads the shards it needs and skips the rest, and to resume is to ask
for a later number. Nothing is random access but the position in a file.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from orchmllm.config.recipe import DataConfig, SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.open import DataSource, sources_of
from orchmllm.data.formats.rows import LaterRows, StoreUnit, StreamRow
from orchmllm.data.formats.scanned import sizes as file_sizes
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.sampler import Mixture
from orchmllm.data.storage.remote import RemoteFile, Storage, fetch_ahead
from orchmllm.data.text.processor import Processor
from orchmllm.plan.layout import ranges

WINDOW = 256  # rows that are shuffled together
TURNS = 1000  # draws of a source that are dealt to its shards at a time, about
UNCOUNTED = 1 << 40  # in place of the rows of a shard that nobody has read to its end


class LogicalShard:
    """Epochs of its units in seeded order. units: StoreUnit or OrderedUnit. key: what its
    randomness is derived from. window: rows that are shuffled together."""

    def __init__(self, units: Sequence, key: Sequence[int], window: int = WINDOW) -> None:
        self.units, self.key, self.window = list(units), list(key), window
        # The last two, as rows are counted shortly before they are drawn.
        self._windows: dict[tuple[int, int, int], list[StreamRow]] = {}
        self._rest: tuple[tuple[int, int], Iterator[StreamRow]] | None = None
        self._begun: tuple[int, int] | None = None  # (epoch, unit) of which rows were drawn last
        self._later = [unit.store for unit in units if isinstance(unit, StoreUnit)
                       and isinstance(unit.store, LaterRows)]

    @property
    def num_rows(self) -> int | None:
        """Of an epoch; None until all units are counted."""
        counts = [unit.num_rows for unit in self.units]
        return None if None in counts else sum(counts)

    def order(self, epoch: int) -> list[int]:
        """The units as they come in an epoch."""
        return np.random.default_rng([*self.key, 0, epoch]).permutation(len(self.units)).tolist()

    def get(self, epoch: int, row: int) -> StreamRow:
        """A row that an epoch has."""
        units, row = self.find(epoch, row)
        if self._begun != (epoch, units[0]):
            self._begun = epoch, units[0]
            fetch_ahead(f for k in units[1:2] for f in self.units[k].files)
        block = row // self.window
        window = self._read(epoch, units[0], block)
        order = np.random.default_rng([*self.key, 1, epoch, units[0], block])
        return window[order.permutation(len(window))[row % self.window]]

    def find(self, epoch: int, row: int) -> tuple[list[int], int]:
        """The units of an epoch from the one that a row is in, none where it has not so many rows;
        and which row of that unit it is. Units before it are counted, and nothing is read beyond
        its window."""
        order = self.order(epoch)
        for at, k in enumerate(order):
            unit, (block, offset) = self.units[k], divmod(row, self.window)
            if unit.num_rows is None and offset < len(self._read(epoch, k, block)):
                return order[at:], row
            if unit.num_rows is None:  # a row far behind its end was asked for
                unit.num_rows = sum(1 for _ in unit.rows(0))
            if row < unit.num_rows:
                return order[at:], row
            row -= unit.num_rows
        return [], row

    def _read(self, epoch: int, k: int, block: int) -> list[StreamRow]:
        """A window of a unit; behind its end it is empty."""
        unit, start = self.units[k], block * self.window
        if (epoch, k, block) not in self._windows:
            goes_on = self._rest is not None and self._rest[0] == (k, block)
            for store in () if goes_on else self._later:
                store.close()
            rest = self._rest[1] if goes_on else unit.rows(start)
            window = list(islice(rest, self.window))
            is_end = len(window) < self.window and (window or goes_on or block == 0)
            if is_end and unit.num_rows is None:
                unit.num_rows = start + len(window)
            self._windows = dict([*self._windows.items(), ((epoch, k, block), window)][-2:])
            self._rest = (k, block + 1), rest
        return self._windows[epoch, k, block]


class Deal:
    """Which row each draw of a source is. In an epoch every shard gives each of its rows once: the
    shards take turns at distances that follow from their sizes, shards of one size one after the
    other, and one that has no more rows is passed over. Where some rows are not counted before a
    shard has been fetched, its bytes are its size, and without bytes (`hf:`) all have one size."""

    def __init__(self, name: str, shards: Sequence[LogicalShard]) -> None:
        self.name, self.shards = name, shards
        sizes = [shard.num_rows for shard in shards]
        self.is_counted = None not in sizes
        if not self.is_counted:
            sizes = [sum(size for unit in shard.units for _, size, _ in file_sizes(unit.files))
                     for shard in shards]
            sizes = [max(1, 1_000_000 * size // max(1, *sizes)) for size in sizes]
        self.sizes = np.array(sizes, np.int64)
        self._num_rows = self.sizes.copy() if self.is_counted else np.full(len(sizes), UNCOUNTED)
        turns = TURNS if self.is_counted else min(TURNS, shards[0].window)
        self._num_parts = max(1, sum(sizes) // turns)
        # Draws of each shard in so many parts, as long as it has rows.
        self._in_parts = self.sizes * max(1, turns // max(1, sum(sizes)))
        self._dealt = range(0), 0, np.zeros((0, 2), np.int64)

    def __call__(self, draw: int) -> StreamRow:
        """Raises ValueError for a source without rows."""
        draws, epoch, rows = self._part_of(draw)
        shard, row = rows[draw - draws.start].tolist()
        return self.shards[shard].get(epoch, row)

    def shards_of(self, draws: np.ndarray) -> np.ndarray:
        """(n,) shard of each of ascending draws (n,)."""
        found = np.zeros(0, np.int64)
        while len(found) < len(draws):
            rest = draws[len(found):]
            part, _, rows = self._part_of(int(rest[0]))
            found = np.append(found, rows[rest[rest < part.stop] - part.start, 0])
        return found

    def _part_of(self, draw: int) -> tuple[range, int, np.ndarray]:
        dealt = self._dealt  # another thread may replace it
        if draw not in dealt[0]:
            self._dealt = dealt = self._deal(draw)
        return dealt

    def _deal(self, draw: int) -> tuple[range, int, np.ndarray]:
        """The part of an epoch that a draw is in: its draws, the epoch, (draws, 2) [shard, row]."""
        end = None
        while end is None or (end > self._num_rows).any():
            total = int(self._num_rows.sum())
            if total == 0:
                raise ValueError(f"{self.name}: the source has no rows; leave it out")
            epoch, at = divmod(draw, total)
            part = bisect_right(range(self._num_parts << 30), at,
                                key=lambda k: self._before(k + 1).sum())
            first, end = self._before(part), self._before(part + 1)
            if not first.any():  # all shards begin
                fetch_ahead(f for shard in self.shards
                            for k in shard.order(epoch)[:1] for f in shard.units[k].files)
            for k in np.flatnonzero((self._num_rows == UNCOUNTED) & (end > 0)).tolist():
                if not self.shards[k].find(epoch, int(end[k]) - 1)[0]:
                    self._num_rows[k] = self.shards[k].num_rows
        counts = end - first
        shards, before = np.repeat(np.arange(len(counts)), counts), ranges(first, counts)
        order = np.argsort((before - first[shards] + 0.5) / counts[shards], kind="stable")
        start = draw - at + int(first.sum())
        return (range(start, start + len(order)), epoch,
                np.stack([shards, before], axis=1)[order])

    def _before(self, part: int) -> np.ndarray:
        """(shards,) draws of each shard in the parts before one of the parts of an epoch."""
        turns, part = divmod(part, self._num_parts)  # a product of all three could overflow
        return np.minimum(self._in_parts * turns + self._in_parts * part // self._num_parts,
                          self._num_rows)


class StreamDataset(ConversationDataset):
    """Example n is draw n of an endless stream; no length, no index, nothing held out.

    sources: drawn in proportion to their weights. num_shards: S, logical shards of each source (at
    most as many as it has pieces). seed: of the order. window: rows that are shuffled together. The
    rest as in ConversationDataset."""

    streaming = True
    cached_examples = 1024

    def __init__(self, sources: Sequence[SourceConfig], *, num_shards: int, seed: int,
                 window: int = WINDOW, **keys):
        super().__init__(sources, **keys)
        self._mixture = Mixture([s.config.weight or 1.0 for s in self.sources], seed)
        self._deals = []
        for k, source in enumerate(self.sources):
            units = source.store.units(num_shards)
            self._deals.append(Deal(source.config.path, [
                LogicalShard(units[s::num_shards], [seed, 3, k, s], window)
                for s in range(min(num_shards, len(units)))]))
        self._check_cache()
        self._one_reads = threading.Lock()
        self._found: OrderedDict[int, tuple[int, StreamRow]] = OrderedDict()

    def _check_cache(self) -> None:
        """Raises ValueError if the shards that are read at the same time, and as many that follow
        them, do not fit the cache on disk: each of them would be fetched for a few rows."""
        needed = 0
        for source, deal in zip(self.sources, self._deals, strict=True):
            bytes_ = sorted(f.num_bytes() for f in source.store.files if isinstance(f, RemoteFile))
            needed += sum(bytes_[-2 * len(deal.shards):])
        if needed > self.storage.config.cache_gib * 2**30:
            raise ValueError(f"data.remote.cache_gib is {self.storage.config.cache_gib:g}, but the "
                             f"shards that are read at the same time have {needed / 2**30:.2f} "
                             "GiB: raise it, or lower data.num_shards")

    def split(self, num_validation: int) -> tuple[Sequence[int], Sequence[int]]:
        """Nothing: a stream has no end to hold rows out of."""
        return range(0), range(0)

    def _num_rows(self, source: DataSource) -> int:
        """-1 where counting them would read all shards."""
        return len(source) if all(s.is_counted for s in source.store.parts()) else -1

    def fingerprint(self) -> dict:
        """With what the shards of each source are dealt by, which is rows, or bytes."""
        return {**super().fingerprint(), "shards": [d.sizes.tolist() for d in self._deals]}

    def where(self, i: int) -> tuple[int, int]:
        """(source, row from 0 in its file) of example i."""
        source, found = self._locate(i)
        return source, found.number - 1

    def near(self, draws: np.ndarray) -> np.ndarray:
        """(n,) where ascending draws (n,) are among those of their source, from 0 to 1, in the
        order of its shards, so that any part of them has as much of each source. Of a source whose
        rows are counted as they are read, which every rank does, draws stay in their order."""
        source, before = self._mixture(draws)
        where = np.zeros(len(draws))
        for k, deal in enumerate(self._deals):
            mine = np.flatnonzero(source == k)
            if deal.is_counted:
                mine = mine[np.argsort(deal.shards_of(before[mine]), kind="stable")]
            where[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
        return where

    def conversation(self, i: int):
        source, found = self._locate(i)
        return self.sources[source].parse(found.read(), found.file)

    def _locate(self, i: int) -> tuple[int, StreamRow]:
        with self._one_reads:  # the training thread asks for the places of what failed
            if i not in self._found:
                (source,), (draw,) = self._mixture(np.array([i]))
                found = self._deals[source](int(draw))
                while len(self._found) >= self.cached_examples:
                    self._drop(self._found.popitem(last=False)[0])
                self._found[i] = int(source), found
            return self._found[i]

    def _place(self, i: int) -> tuple[str, int]:
        found = self._locate(i)[1]
        return str(found.file), found.number


def open_dataset(data: DataConfig, folder: str, *, seed: int) -> ConversationDataset:
    """The dataset of a recipe's data section, for the model of a folder: map-style or, with
    data.streaming, a stream whose order `seed` decides. Raises ValueError naming what cannot be
    read."""
    reader = ProcessedReader(Processor(folder), data.max_example_tokens)
    keys = dict(reader=reader, index_dir=data.index_dir or None, storage=Storage(data.remote))
    if data.streaming:
        return StreamDataset(sources_of(data), num_shards=data.num_shards, seed=seed,
                             window=data.shuffle_window or WINDOW, **keys)
    return ConversationDataset(sources_of(data), **keys)
