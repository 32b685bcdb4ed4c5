"""Examples by which a model is proven, as its own processor makes them of files: text alone, one
medium, several in two turns, and media where one example ends and the next begins."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media.av_process import has_pyav
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import MediaError
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.text.processor import Processor
from orchmllm.plan.layout import AUDIO, TEXT, VISION

_KINDS = {VISION: "image", AUDIO: "audio", VIDEO: "video"}
_SIDES = ((96, 64), (64, 120), (150, 70), (80, 80))  # of images
_SECONDS = (0.4, 0.9, 0.6, 0.5)
_FRAMES = 4


def made_by(processor: Processor) -> Iterator[list[ProcessedExample]]:
    """With the tensors and the parts of all media; all tokens but those of media are learnt. At
    first where one example ends with its medium and the next one begins with it; then, since a
    model may run neither, without the end and without both. Several media are left out where the
    processor takes one, and clips of video where nothing could read them. Raises ValueError, or
    MediaError, where it does not take such media."""
    kinds = [kind for kind in processor.token_ids if kind != VIDEO or (
        has_pyav() and processor.videos.processor is not None
        and processor.tokenizer.writes(VIDEO))]
    features = torch.tensor([*processor.token_ids.values()])
    out = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in _rows(
            Path(folder), kinds)), encoding="utf-8")
        data = ConversationDataset(path, index_dir=folder, reader=ProcessedReader(processor))
        for i in range(len(data)):
            try:
                example = data.load(i)
            except MediaError:
                if i == len(kinds) + 1:  # the row of several
                    continue
                raise
            ids, segments = example.input_ids, np.flatnonzero(data.layout(i).modality != TEXT)
            out.append(replace(
                example, labels=ids.where(~torch.isin(ids, features), IGNORE_INDEX),
                parts=data.load(i, segments=segments.tolist()).parts))
    *others, last, first = out
    yield [*others, cut(last, -1), cut(first, 0)]
    yield [*others, last, cut(first, 0)]
    yield out


def _rows(folder: Path, kinds: Sequence[int]) -> Iterator[list[dict]]:
    """Conversations; the last two have one medium each."""
    rng, number = np.random.default_rng(0), iter(range(100))

    def medium(kind: int) -> dict[str, str]:
        at = next(number)
        name = f"{at}{'.wav' if kind == AUDIO else '.gif' if kind == VIDEO else '.png'}"
        if kind == AUDIO:
            _write_clip(folder / name, rng, _SECONDS[at % len(_SECONDS)])
        else:
            width, height = _SIDES[at % len(_SIDES)]
            frames = [Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
                      for _ in range(_FRAMES if kind == VIDEO else 1)]
            frames[0].save(folder / name, **({"save_all": True, "append_images": frames[1:],
                                              "duration": 500} if kind == VIDEO else {}))
        return {"type": _KINDS[kind], _KINDS[kind]: name}

    def talk(*media: dict[str, str]) -> list[dict]:
        asked = [part for one in media for part in (one, {"type": "text", "text": "and"})]
        return [{"role": "user", "content": [*asked, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": "the red row"}]

    yield talk()
    for kind in kinds:
        yield talk(medium(kind))
    yield talk(*map(medium, kinds), medium(kinds[0])) + talk(medium(kinds[-1]))
    for _ in range(2):
        yield talk(medium(kinds[0]))


def _write_clip(path: Path, rng: np.random.Generator, seconds: float) -> None:
    rate = 16_000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((rng.standard_normal(int(seconds * rate)) * 4000).astype("<i2").tobytes())


def cut(example: ProcessedExample, side: int) -> ProcessedExample:
    """Without the text after its last medium (-1), or before its first (0)."""
    lengths, n = example.lengths, len(example.input_ids)
    tokens = lengths.num_tokens.copy()
    kept = slice(0, n - int(tokens[-1])) if side else slice(int(tokens[0]), None)
    tokens[side] = 0

    def of_kept(name: str, value: Tensor) -> Tensor:
        return value[:, kept] if name.endswith("type_ids") else value

    labels = example.labels[kept]
    return replace(
        example, input_ids=example.input_ids[kept], labels=labels,
        media={name: of_kept(name, value) for name, value in example.media.items()},
        lengths=replace(lengths, num_tokens=tokens, num_targets=np.array(
            [int((labels[1:] != IGNORE_INDEX).sum())])))
