"""`orchmllm data preview`: examples as training sees them, on the terminal and as an HTML page."""

from __future__ import annotations

import base64
import html
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.batch import IGNORE_INDEX
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError
from orchmllm.plan.geometry import VisionGeometry
from orchmllm.plan.layout import TEXT, VISION

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
THUMBNAIL_HEIGHT = 160  # pixels on the page
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f6;padding:1rem}
mark{background:#bdebc4}img{height:160px;max-width:100%;display:block;image-rendering:pixelated}
figure{margin:.5rem 0}figcaption,.facts{color:#555;font-size:.9rem}"""


class Shown(NamedTuple):
    """One stretch of an example. text: of tokens; of a medium, what it is. learnt: whether its
    tokens are labels. rows: a medium's decoded rows, None: text, or a medium that cannot be read.
    """

    modality: int
    text: str
    learnt: bool = False
    rows: np.ndarray | None = None
    grid: tuple[int, ...] = ()


def stretches(dataset: ConversationDataset, i: int) -> tuple[list[Shown], str]:
    """Example i as `load` gives it to training, and its numbers in words."""
    failed: dict[int, MediaError] = {}
    layout = dataset.layout(i)
    example = dataset.load(i, on_error=lambda segment, error: failed.setdefault(segment, error))
    problem = dataset.problem(i)
    if problem is not None:
        return [Shown(TEXT, f"cannot be used: {problem}")], "a stand-in without labels is trained"
    media = {segment: medium for segment, _, medium in dataset.media_of(i)}
    ids, labels = example.token_ids.numpy(), example.labels.numpy()
    learnt = np.concatenate([[False], labels[:-1] != IGNORE_INDEX])
    out, end = [], 0
    for segment, (modality, count) in enumerate(zip(
            layout.modality.tolist(), layout.num_tokens.tolist(), strict=True)):
        start, end = end, end + count
        if modality == TEXT:
            out += _text(dataset, ids[start:end], learnt[start:end])
        else:
            out.append(_medium(modality, media[segment], layout, segment, count,
                               example.media[segment].numpy(), failed.get(segment)))
    facts = (f"{len(ids)} tokens: {int((layout.num_tokens[layout.modality == TEXT]).sum())} of "
             f"text, {int((layout.num_tokens[layout.modality != TEXT]).sum())} of "
             f"{len(media)} media; {layout.num_targets.sum()} are learnt")
    return out, facts


def _text(dataset: ConversationDataset, ids: np.ndarray, learnt: np.ndarray) -> Iterator[Shown]:
    borders = [0, *(np.flatnonzero(learnt[1:] != learnt[:-1]) + 1).tolist(), len(ids)]
    for start, end in zip(borders, borders[1:], strict=False):
        yield Shown(TEXT, dataset.tokenizer.decode(ids[start:end]), bool(learnt[start]))


def _medium(modality: int, medium, layout, segment: int, num_tokens: int, rows: np.ndarray,
            error: MediaError | None) -> Shown:
    kind = "image" if modality == VISION else "clip"
    if error is not None:
        return Shown(modality, f"{kind} {medium.name}: zeros are trained: {error.reason}")
    if modality == VISION:
        width, height = image_header(medium)
        what = f"{width}x{height} pixels"
        if medium.frame is not None:
            kind, what = "frame", f"at {medium.frame.second:.2f} s, {what}"
    else:
        samples, rate = audio_header(medium)
        what = f"{samples / rate:.2f} s at {rate} Hz"
    grid = tuple(int(n) for n in layout.grid[segment])
    return Shown(modality, f"{kind} {medium.name}: {what} -> {len(rows)} rows, {num_tokens} tokens",
                 rows=rows, grid=grid)


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


def on_page(examples: Sequence[tuple[str, list[Shown], str]], vision: VisionGeometry) -> str:
    """(title, stretches, facts) of examples as one HTML page that needs nothing else. Pictures are
    made from the decoded rows, so they show what the encoders read."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8>"
             "<meta name=viewport content='width=device-width,initial-scale=1'>"
             f"<title>orchmllm data preview</title><style>{STYLE}</style>"
             "<h1>Examples as they are trained</h1><p>What is learnt is <mark>marked</mark>.</p>"]
    for title, shown, facts in examples:
        parts.append(f"<h2>{html.escape(title)}</h2><p class=facts>{html.escape(facts)}</p><pre>")
        for part in shown:
            text = html.escape(part.text)
            if part.modality == TEXT:
                parts.append(f"<mark>{text}</mark>" if part.learnt else text)
            else:
                picture = "" if part.rows is None else (
                    f"<img alt='' src='data:image/png;base64,{_picture(part, vision)}'>")
                parts.append(f"<figure>{picture}<figcaption>{text}</figcaption></figure>")
        parts.append("</pre>")
    return "".join(parts)


def _picture(part: Shown, vision: VisionGeometry) -> str:
    from PIL import Image

    if part.modality == VISION:
        image = Image.fromarray(unpatchify(part.rows, part.grid, vision))
    else:  # low frequencies at the bottom
        low, high = float(part.rows.min()), float(part.rows.max())
        scaled = (part.rows - low) / max(high - low, 1e-6)
        image = Image.fromarray((255 * scaled).astype(np.uint8).T[::-1])
    if image.height > 2 * THUMBNAIL_HEIGHT:
        image.thumbnail((8 * THUMBNAIL_HEIGHT, 2 * THUMBNAIL_HEIGHT))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def unpatchify(rows: np.ndarray, grid: tuple[int, ...], vision: VisionGeometry) -> np.ndarray:
    """(h * w, 3 * patch_size^2) rows in the order of `patchify` -> (H, W, 3) uint8."""
    p, m, (_, h, w) = vision.patch_size, vision.merge_size, grid
    blocks = rows.reshape(h // m, w // m, m, m, 3, p, p)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * p, w * p, 3)


def preview(dataset: ConversationDataset, first: int, count: int, page: Path | None) -> int:
    """Prints examples `first` (from 0) on, and writes them to `page`. Returns the exit code. Raises
    ValueError where there is no such row."""
    if first >= len(dataset):
        raise ValueError(f"--row {first + 1}: the sources have {len(dataset)} rows")
    examples = []
    for i in range(first, min(first + count, len(dataset))):
        shown, facts = stretches(dataset, i)
        where = dataset.describe(i, -1)
        title = f"{where['data_file']}, row {where['row']}"
        print(f"--- {title}\n{on_terminal(shown, sys.stdout.isatty()).strip()}\n{facts}\n")
        examples.append((title, shown, facts))
    if page is not None:
        page.write_text(on_page(examples, dataset.vision), encoding="utf-8")
        print(f"page: {page}")
    return 0
