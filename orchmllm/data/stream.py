"""Streaming: the shards of a source read in order, the same on any number of ranks and workers.

A source's files are dealt to logical shards, which take turns in proportion to their rows, so that
every row of the source comes once an epoch. Inside a shard, files come in a seeded order per epoch
and rows are shuffled in windows, so an example is a pure function of its number: a rank reads the
shards it needs and skips the rest, and to resume is to ask for a later number. Nothing is random
access but the position in a file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.config.recipe import DataConfig, SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.arrow import StreamRows, clean
from orchmllm.data.formats.open import DataSource, open_source, open_tokenizer, sources_of
from orchmllm.data.formats.rows import LaterRows, RowStore
from orchmllm.data.sampler import Mixture
from orchmllm.data.storage.remote import RemoteFile, Storage, fetch_ahead
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry
from orchmllm.plan.layout import ranges

WINDOW = 256  # rows that are shuffled together
TURNS = 1000  # draws of a source that are dealt to its shards at a time, about


class StreamRow(NamedTuple):
    """A row before it is read. number: from 1. read: its dict."""

    file: Path
    number: int
    read: Callable[[], dict]


@dataclass
class StoreUnit:
    """A piece of a source that is read in order: rows part, part + parts, ... of a store. num_rows:
    None until it is opened."""

    store: RowStore
    part: int = 0
    parts: int = 1

    @property
    def num_rows(self) -> int | None:
        if not self.store.is_open:
            return None
        return len(range(self.part, len(self.store), self.parts))

    @property
    def files(self) -> list:
        return self.store.files

    def rows(self, start: int) -> Iterator[StreamRow]:
        store = self.store
        for i in range(self.part + start * self.parts, len(store), self.parts):
            yield StreamRow(*store.place(i), lambda i=i: store.row(i))


@dataclass
class IterableUnit:
    """A shard of a `datasets.IterableDataset`, read as raw Arrow. num_rows: None where no file
    tells it, until somebody reached its end."""

    dataset: object
    label: Path
    num_rows: int | None = None

    def rows(self, start: int) -> Iterator[StreamRow]:
        number = start
        for table in self.dataset.skip(start).with_format("arrow"):
            for k in range(len(table)):
                number, row = number + 1, table.slice(k, 1)
                yield StreamRow(self.label, number, lambda row=row: clean(row.to_pylist()[0]))


Unit = StoreUnit | IterableUnit


class LogicalShard:
    """Endless: epochs of its units in seeded order. key: what its randomness is derived from.
    window: rows that are shuffled together."""

    def __init__(self, units: Sequence[Unit], key: Sequence[int], window: int = WINDOW) -> None:
        self.units, self.key, self.window = list(units), list(key), window
        self._window: tuple[tuple[int, int, int], list[StreamRow]] | None = None
        self._rest: tuple[tuple[int, int], Iterator[StreamRow]] | None = None
        self._begun: tuple[int, int] | None = None  # (epoch, unit) whose next one is being fetched

    def get(self, position: int) -> StreamRow:
        """The example at `position` of this shard. Raises ValueError for a shard without rows."""
        epoch = 0
        while True:
            counts = [u.num_rows for u in self.units]
            if None not in counts:
                total = sum(counts)
                if total == 0:
                    raise ValueError("a shard of the stream has no rows; lower data.num_shards")
                epoch, position = epoch + position // total, position % total
            order = np.random.default_rng([*self.key, 0, epoch]).permutation(len(self.units))
            for at, k in enumerate(order.tolist()):
                found = self._in_unit(epoch, k, position)
                if found is not None:
                    if self._begun != (epoch, k):
                        self._begun = epoch, k
                        for unit in order[at + 1: at + 2]:
                            fetch_ahead(getattr(self.units[unit], "files", ()))
                    return found
                position -= self.units[k].num_rows
            epoch += 1

    def _in_unit(self, epoch: int, unit: int, position: int) -> StreamRow | None:
        """None if the unit has no row `position`; its num_rows is known then."""
        count = self.units[unit].num_rows
        if count is not None and position >= count:
            return None
        block = position // self.window
        window = self._read(epoch, unit, block)
        if position % self.window < len(window):
            order = np.random.default_rng([*self.key, 1, epoch, unit, block])
            return window[order.permutation(len(window))[position % self.window]]
        if self.units[unit].num_rows is None:
            self.units[unit].num_rows = sum(1 for _ in self.units[unit].rows(0))
        return None

    def _read(self, epoch: int, unit: int, block: int) -> list[StreamRow]:
        key = (epoch, unit, block)
        if self._window is None or self._window[0] != key:
            rest = self._rest[1] if self._rest and self._rest[0] == (unit, block) else (
                self.units[unit].rows(block * self.window))
            window = list(islice(rest, self.window))
            if 0 < len(window) < self.window and self.units[unit].num_rows is None:
                self.units[unit].num_rows = block * self.window + len(window)
            self._window, self._rest = (key, window), ((unit, block + 1), rest)
        return self._window[1]


class Deal:
    """Which shard each draw of a source comes from: in sum(sizes) draws each of them `size` times,
    at equal distances; shards of one size take turns. sizes: rows of the shards, above 0."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes, self.total = np.array(sizes, np.int64), sum(sizes)
        self.num_parts = max(1, self.total // TURNS)
        self._part = lru_cache(maxsize=4)(self._deal)

    def __call__(self, draw: int) -> tuple[int, int]:
        """(shard, how many draws of it came before) of a draw."""
        epoch, at = divmod(draw, self.total)
        part = at * self.num_parts // self.total
        while at >= self._before(part + 1).sum():
            part += 1
        shard, before = self._part(part)[at - self._before(part).sum()].tolist()
        return shard, epoch * int(self.sizes[shard]) + before

    def _before(self, part: int) -> np.ndarray:
        """(shards,) draws of each shard in the parts before one of the parts of an epoch."""
        return self.sizes * part // self.num_parts

    def _deal(self, part: int) -> np.ndarray:
        """(draws of the part, 2) [shard, how many of its draws came before in the epoch]."""
        first, counts = self._before(part), self._before(part + 1) - self._before(part)
        shards, before = np.repeat(np.arange(len(counts)), counts), ranges(first, counts)
        order = np.argsort((before - first[shards] + 0.5) / counts[shards], kind="stable")
        return np.stack([shards, before], axis=1)[order]


def _sizes(shards: Sequence[LogicalShard]) -> list[int]:
    """Rows of each shard. Where they are not known before a shard has been fetched, its bytes stand
    for them, and without bytes (`hf:`) the shards count as equally long."""
    rows = [[unit.num_rows for unit in shard.units] for shard in shards]
    if None not in sum(rows, []):
        return list(map(sum, rows))
    sizes = [sum(f.num_bytes() for unit in shard.units for f in getattr(unit, "files", ()))
             for shard in shards]
    return [max(1, 1_000_000 * size // max(1, *sizes)) for size in sizes]


class StreamDataset(ConversationDataset):
    """Example n is draw n of an endless stream; no length, no index, nothing held out.

    sources: with weights where there are several. num_shards: S, logical shards of each source (at
    most as many as it has pieces). seed: of the order. window: rows that are shuffled together. The
    rest as in ConversationDataset. Raises ValueError for several sources without weights."""

    streaming = True
    cached_examples = 1024

    def __init__(self, sources: Sequence[SourceConfig], *, num_shards: int, seed: int,
                 window: int = WINDOW, **keys):
        super().__init__(sources, **keys)
        weights = [s.config.weight for s in self.sources]
        if len(sources) > 1 and not all(weights):
            raise ValueError("data.streaming with several sources needs a weight for each: how "
                             "many rows a stream has is not known")
        self._mixture = Mixture(weights if all(weights) else [1.0], seed)
        self._shards = [
            [LogicalShard(units[s::min(num_shards, len(units))], [seed, 3, k, s], window)
             for s in range(min(num_shards, len(units)))]
            for k, units in enumerate(units_of(s, num_shards) for s in self.sources)]
        self._deals = [Deal(_sizes(shards)) for shards in self._shards]
        self.order_key = [num_shards, seed, window]
        self._check_cache()
        self._found: OrderedDict[int, tuple[int, StreamRow]] = OrderedDict()

    def _check_cache(self) -> None:
        """Raises ValueError if the shards that are read at the same time, and as many that follow
        them, do not fit the cache on disk: each of them would be fetched for a few rows."""
        needed = 0
        for source, shards in zip(self.sources, self._shards, strict=True):
            bytes_ = sorted(f.num_bytes() for f in source.store.files if isinstance(f, RemoteFile))
            needed += sum(bytes_[-2 * len(shards):])
        if needed > self.storage.config.cache_gib * 2**30:
            raise ValueError(f"data.remote.cache_gib is {self.storage.config.cache_gib:g}, but the "
                             f"shards that are read at the same time have {needed / 2**30:.2f} "
                             "GiB: raise it, or lower data.num_shards")

    def _open(self, config: SourceConfig, folder: Path) -> DataSource:
        return open_source(config, folder, self.storage, streaming=True)

    def split(self, num_validation: int) -> tuple[Sequence[int], Sequence[int]]:
        """Nothing: a stream has no end to hold rows out of. Raises ValueError if asked to."""
        if num_validation:
            raise ValueError(f"data.num_validation is {num_validation}, but a stream holds nothing "
                             "out; set it to 0")
        return range(0), range(0)

    def _num_rows(self, source: DataSource) -> int:
        """-1 where counting them would fetch all shards."""
        lazy = any(isinstance(store, LaterRows) for store in source.store.parts())
        return -1 if lazy else len(source)

    def fingerprint(self) -> dict:
        sizes = [deal.sizes.tolist() for deal in self._deals]
        return {**super().fingerprint(), "num_shards": sizes}

    def where(self, i: int) -> tuple[int, int]:
        """(source, row from 0 in its file) of example i."""
        source, found = self._locate(i)
        return source, found.number - 1

    def conversation(self, i: int):
        source, found = self._locate(i)
        return self.sources[source].parse(found.read(), found.file)

    def _locate(self, i: int) -> tuple[int, StreamRow]:
        if i not in self._found:
            (source,), (draw,) = self._mixture(np.array([i]))
            shard, position = self._deals[source](int(draw))
            found = self._shards[source][shard].get(position)
            while len(self._found) >= self.cached_examples:
                self._drop(self._found.popitem(last=False)[0])
            self._found[i] = int(source), found
        return self._found[i]

    def _place(self, i: int) -> tuple[str, int]:
        found = self._locate(i)[1]
        return str(found.file), found.number


def open_dataset(
    data: DataConfig, vision: VisionGeometry, audio: AudioGeometry, *, seed: int
) -> ConversationDataset:
    """The dataset of a recipe's data section: map-style or, with data.streaming, a stream whose
    order `seed` decides. Raises ValueError."""
    configs = sources_of(data)
    keys = dict(tokenizer=open_tokenizer(data), vision=vision, audio=audio,
                max_example_tokens=data.max_example_tokens,
                index_dir=data.index_dir or None, storage=Storage(data.remote))
    if data.streaming:
        return StreamDataset(configs, num_shards=data.num_shards, seed=seed,
                             window=data.shuffle_window or WINDOW, **keys)
    return ConversationDataset(configs, **keys)


def units_of(source: DataSource, num_shards: int) -> list[Unit]:
    """At least num_shards pieces of a source, where its rows can be divided that far."""
    store = source.store
    if isinstance(store, StreamRows):
        return [IterableUnit(*shard) for shard in store.shards()]
    stores = store.parts()
    parts = -(-num_shards // len(stores))
    return [StoreUnit(one, part, parts) for one in stores for part in range(parts)
            if parts == 1 or len(one) > part]
