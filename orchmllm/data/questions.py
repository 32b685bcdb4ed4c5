"""Rows up to their first answer, for those who ask a model of transformers what it would say."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.lengths import MeasuredExample
from orchmllm.plan.layout import BatchLayout


class Questions:
    """Examples of `rows`, those of a processor of transformers, each of which ends before its first
    answer: what comes after it, media too, is not there. It has what WholeFeed needs."""

    def __init__(self, rows: ConversationDataset) -> None:
        self._rows, self.reader = rows, rows.reader
        self.row = lru_cache(maxsize=1024)(self._row)

    def _row(self, i: int) -> MeasuredExample:
        """Up to the end of the first answer; a stand-in where it cannot be used."""
        def read(i: int):
            turns = self._rows.conversation(i)
            answered = accumulate((turn.supervised for turn in turns), max)
            return turns[: 1 + list(answered).count(False)]

        [row] = self.reader.plan(read, [i])
        return row

    def layout(self, i: int) -> BatchLayout:
        return self.row(i).layout

    def answer(self, i: int) -> list[int]:
        """The token ids of the first answer."""
        row = self.row(i)
        first = _first(row)
        end = int(np.append(row.supervised[first:], False).argmin())
        return row.token_ids[first: first + end].tolist()

    def load(self, i: int, *, text: bool = True, **wanted: Any) -> ProcessedExample:
        """As the dataset does it; nothing of it is learnt. wanted: see there."""
        row = self.row(i)
        example = self._rows.load(i, text=text, row=row, **wanted)
        return before_answer(example, row) if text else example


def before_answer(example: ProcessedExample, row: MeasuredExample) -> ProcessedExample:
    """What of the example of a row comes before what is learnt."""
    first = _first(row)
    media = {name: value[:, :first] if name.endswith("type_ids") else value
             for name, value in example.media.items()}
    return replace(example, input_ids=example.input_ids[:first], media=media,
                   labels=example.labels[:first].fill_(IGNORE_INDEX))


def _first(row: MeasuredExample) -> int:
    """The position of the first token that is learnt; of a stand-in, none of which is, its end."""
    return 1 + int(np.append(row.supervised[1:], True).argmax())
