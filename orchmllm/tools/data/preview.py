"""`orchmllm data preview`: examples as training sees them, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.plan.layout import AUDIO, MADE, TEXT, VISION

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


class Shown(NamedTuple):
    """One stretch of an example. text: of tokens; of a medium, what it is. learnt: whether its
    tokens are labels."""

    modality: int
    text: str
    learnt: bool = False


def stretches(dataset: ConversationDataset, i: int) -> tuple[list[Shown], str]:
    """Example i as `load` gives it to training, and its numbers in words."""
    failed: dict[int, MediaError] = {}
    layout = dataset.layout(i)
    example = dataset.load(i, on_error=lambda segment, error: failed.setdefault(segment, error))
    problem = dataset.problem(i)
    if problem is not None:
        return [Shown(TEXT, f"cannot be used: {problem}")], "a stand-in without labels is trained"
    media = {segment: medium for segment, _, medium in dataset.media_of(i)}
    ids, learnt = _of_text(dataset, example)
    out, end = [], 0
    for segment, (modality, count) in enumerate(zip(
            layout.modality.tolist(), layout.num_tokens.tolist(), strict=True)):
        if modality == TEXT:
            start, end = end, end + count
            out += _text(dataset, ids[start:end], learnt[start:end])
        else:
            out.append(_medium(media[segment], int(layout.rows[segment]), count,
                               failed.get(segment)))
    facts = (f"{layout.num_tokens.sum()} tokens: {len(ids)} of "
             f"text, {int((layout.num_tokens[layout.modality != TEXT]).sum())} of "
             f"{len(media)} media; {layout.num_targets.sum()} are learnt")
    return out, facts


def _of_text(dataset: ConversationDataset, example: ProcessedExample
             ) -> tuple[np.ndarray, np.ndarray]:
    """(ids, which are learnt) of the tokens of text of an example."""
    ids = example.input_ids.numpy()
    is_text = ~np.isin(ids, [*dataset.reader.processor.token_ids.values()])
    return ids[is_text], example.labels.numpy()[is_text] != IGNORE_INDEX


def _text(dataset: ConversationDataset, ids: np.ndarray, learnt: np.ndarray) -> Iterator[Shown]:
    borders = [0, *(np.flatnonzero(learnt[1:] != learnt[:-1]) + 1).tolist(), len(ids)]
    for start, end in zip(borders, borders[1:], strict=False):
        yield Shown(TEXT, dataset.tokenizer.decode(ids[start:end]), bool(learnt[start]))


def _medium(medium: Medium, num_rows: int, num_tokens: int, error: MediaError | None) -> Shown:
    kind, rows = {VISION: ("image", "patches"), AUDIO: ("clip", "mel frames"),
                  MADE: ("image to make", "squares")}[medium.modality]
    if error is not None:
        return Shown(medium.modality, f"{kind} {medium.name}: zeros are trained: {error.reason}")
    if medium.modality != AUDIO:
        width, height = image_header(medium)
        what = f"{width}x{height} pixels"
        if medium.frame is not None:
            kind, what = "frame", f"at {medium.frame.second:.2f} s, {what}"
    else:
        samples, rate = audio_header(medium)
        what = f"{samples / rate:.2f} s at {rate} Hz"
    return Shown(medium.modality, f"{kind} {medium.name}: {what} -> {num_rows} {rows}, "
                 f"{num_tokens} tokens")


def on_terminal(shown: Sequence[Shown], color: bool) -> str:
    """Text as it is, what is learnt in green (without colour: in [[ ]]), a line for each medium."""
    out = []
    medium, learnt = ((DIM, RESET), (GREEN, RESET)) if color else (("", ""), ("[[", "]]"))
    for part in shown:
        if part.modality != TEXT:
            out.append(f"\n{medium[0]}<{part.text}>{medium[1]}\n")
        else:
            out.append(f"{learnt[0]}{part.text}{learnt[1]}" if part.learnt else part.text)
    return "".join(out)


def preview(dataset: ConversationDataset, first: int, count: int) -> int:
    """Prints examples `first` (from 0) on. Returns the exit code. Raises ValueError where there is
    no such row."""
    if first >= len(dataset):
        raise ValueError(f"--row {first + 1}: the sources have {len(dataset)} rows")
    for i in range(first, min(first + count, len(dataset))):
        shown, facts = stretches(dataset, i)
        where = dataset.describe(i, -1)
        print(f"--- {where['data_file']}, row {where['row']}\n"
              f"{on_terminal(shown, sys.stdout.isatty()).strip()}\n{facts}\n")
    return 0
