"""What of a source is never learnt, told from some of its rows before training: text of the
assistant that the chat template or data.max_example_tokens leaves out, ends of answers, keys of
rows that nothing reads, and rows that cannot be used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from orchmllm.config.recipe import DataConfig
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.formats.open import DataSource
from orchmllm.data.formats.rows import RowStore
from orchmllm.data.lengths import LengthReader
from orchmllm.data.media.medium import RowError

NUM_ROWS = 64  # of each source, before a run
MAX_LEFT_OUT = 0.2  # of what the assistant says, unless the recipe allows more


class _Watched(dict):
    """A row or one of its turns, which remembers which of its keys are read."""

    def __init__(self, keys: dict) -> None:
        super().__init__({key: [_Watched(turn) if isinstance(turn, dict) else turn
                                for turn in value] if isinstance(value, list) else value
                          for key, value in keys.items()})
        self.seen: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.seen.add(key)
        return super().__getitem__(key)

    def __or__(self, other: dict) -> _Watched:
        made = _Watched({})
        made.update(self)
        made.update(other)
        made.seen = self.seen
        return made

    def unread(self) -> set[str]:
        """Keys that hold something and are not read, of turns as "content of a turn"."""
        turns = [turn for key in ("messages", "conversations") for turn in dict.get(self, key) or ()
                 if isinstance(turn, _Watched)]
        return {key for key, value in self.items() if value and key not in self.seen} | {
            f"{key} of a turn" for turn in turns for key in turn.unread()}


def survey(sources: Sequence[DataSource], reader: LengthReader, data: DataConfig,
           log: Callable[[str], object], num_rows: int = NUM_ROWS, *, listed: bool = False
           ) -> None:
    """Tells `log` what is never learnt, by num_rows rows of each source at equal distances, of a
    stream by its first ones. listed: rows that cannot be used are told elsewhere. Raises ValueError
    where no row can be used, and where the chat template leaves out more than MAX_LEFT_OUT of what
    the assistant says, unless `data` allows it."""
    whole = copy.copy(reader)
    whole.max_example_tokens = 0
    for source in sources:
        unread: set[str] = set()
        seen = []  # of each row: characters left out, characters, special tokens that are learnt
        unusable = []  # why a row cannot be used
        targets = []  # of each row: those that are learnt, all of them
        for store, i in _places(source.store, num_rows, data.streaming):
            try:
                row = _Watched(store.row(i))
                turns = source.parse(row, store.place(i)[0])
                seen.append(reader.tokenizer.coverage(turns))
                unread |= row.unread()
                if reader.max_example_tokens:
                    targets.append([_num_targets(turns, one) for one in (reader, whole)])
            except RowError as e:
                path, number = store.place(i)
                unusable.append(f"{path}, row {number}: {e}")
            except OSError:  # told of when it is read to be trained on
                continue
        if unusable and not (seen or listed):
            raise ValueError(f"{source.name}: none of {len(unusable)} rows can be used; the first: "
                             f"{unusable[0]}")
        if unusable and not listed:
            log(f"warning: {source.name}: {len(unusable)} of {len(unusable) + len(seen)} rows that "
                f"were looked at cannot be used; the first: {unusable[0]}")
        learnt, there = np.array(targets, int).reshape(-1, 2).T
        if num_cut := int((learnt < there).sum()):
            log(f"warning: {source.name}: data.max_example_tokens={reader.max_example_tokens} cuts "
                f"{num_cut} of {len(there)} rows that were looked at, and leaves out "
                f"{1 - learnt.sum() / there.sum():.1%} of what is learnt from all of them")
        left_out, said, num_ends = np.sum(seen, axis=0).tolist() if seen else (0, 0, 0)
        if unread:
            log(f"{source.name}: keys that nothing reads: {', '.join(sorted(unread))}")
        if seen and not num_ends:
            log(f"warning: {source.name}: no special token is learnt (in {len(seen)} rows), so the "
                "model does not learn to end its answers")
        if left_out:
            line = (f"{source.name}: the chat template leaves out {left_out / said:.1%} of what "
                    f"the assistant says (in {len(seen)} rows)")
            if left_out > MAX_LEFT_OUT * said and not data.allow_left_out:
                raise ValueError(f"{line}: take a chat template that keeps it, or set "
                                 "data.allow_left_out=true")
            log(line)


def _num_targets(turns: Conversation, reader: LengthReader) -> int:
    """0 where nothing can be learnt."""
    [measured] = reader.plan(lambda _: turns, [0])
    return 0 if measured.problem else int(measured.layout.num_targets.sum())


def _places(store: RowStore, num_rows: int, streaming: bool) -> Iterator[tuple[RowStore, int]]:
    if streaming:
        return islice(((part, i) for part in store.parts() for i in range(len(part))), num_rows)
    return ((store, i) for i in np.unique(np.linspace(
        0, len(store) - 1, min(num_rows, len(store))).astype(int)).tolist())
