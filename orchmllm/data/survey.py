"""What of a source is never learnt, told from some of its rows before training: text of the
assistant that the chat template leaves out, ends of answers, keys of rows that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from orchmllm.config.recipe import DataConfig
from orchmllm.data.formats.open import DataSource
from orchmllm.data.formats.rows import RowStore
from orchmllm.data.media.medium import RowError
from orchmllm.data.text.tokenizer import ChatTokenizer

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


def survey(sources: Sequence[DataSource], tokenizer: ChatTokenizer, data: DataConfig,
           log: Callable[[str], object], num_rows: int = NUM_ROWS, *, listed: bool = False
           ) -> None:
    """Tells `log` what is never learnt, by num_rows rows of each source at equal distances, of a
    stream by its first ones. listed: rows that cannot be used are told elsewhere. Raises ValueError
    where no row can be used, and where the chat template leaves out more than MAX_LEFT_OUT of what
    the assistant says, unless `data` allows it."""
    for source in sources:
        unread: set[str] = set()
        seen = []  # of each row: characters left out, characters, special tokens that are learnt
        unusable = []  # why a row cannot be used
        for store, i in _places(source.store, num_rows, data.streaming):
            try:
                row = _Watched(store.row(i))
                seen.append(tokenizer.coverage(source.parse(row, store.place(i)[0])))
                unread |= row.unread()
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


def _places(store: RowStore, num_rows: int, streaming: bool) -> Iterator[tuple[RowStore, int]]:
    if streaming:
        return islice(((part, i) for part in store.parts() for i in range(len(part))), num_rows)
    return ((store, i) for i in np.unique(np.linspace(
        0, len(store) - 1, min(num_rows, len(store))).astype(int)).tolist())
