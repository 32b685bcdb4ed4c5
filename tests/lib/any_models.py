"""Examples for a tiny model of any class of transformers whose encoders are inferred: text alone,
one medium, several of each kind, and two that touch where one example ends and the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.encoders.infer import infer_encoders
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout
from tests.lib.tiny_inputs import batch, media_of

KINDS = ("image", "audio")
TEXTS = ("input_ids", "attention_mask", "labels")


def examples_of(model: nn.Module) -> list[ProcessedExample]:
    """Raises NotImplementedError where no media of a shape that the model takes are found, and
    ValueError where its encoders are not understood."""
    owner, encoders = infer_encoders(model)
    made = [media_of(owner, encoders, seed, sizes)
            for seed, sizes in enumerate(([1], [2, 1, 3], [3], [2]))]
    layouts = {name.split("_")[1] if name.startswith("get_") else "audio": layout
               for encoder in encoders for name, layout in encoder.calls.items()}
    kinds = [kind for kind in KINDS if kind in made[0]]
    wanted = [({}, slice(None)), *[({k: made[0][k]}, slice(None)) for k in kinds],
              ({k: made[1][k] for k in kinds}, slice(None))]
    examples = [_example(model, owner, layouts, media, i) for i, (media, _) in enumerate(wanted)]
    first = {kinds[0]: made[2][kinds[0]]}, {kinds[0]: made[3][kinds[0]]}
    for media, side in zip(first, (-1, 0), strict=True):
        examples.append(_cut(_example(model, owner, layouts, media, len(examples)), side))
    return [e for e in examples if _taken(model, e)] or examples


def _taken(model: nn.Module, example: ProcessedExample) -> bool:
    """Whether transformers itself takes it: some need text around media, or media."""
    ids = example.input_ids[None]
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False,
                  **example.media)
    except Exception:
        return False
    return True


def _example(model: nn.Module, owner: nn.Module, layouts: dict[str, Any], media: dict, i: int
             ) -> ProcessedExample:
    inputs = batch(model, media, 50 + i)
    segments, parts, arguments = [(TEXT, text_lengths(6))], {}, {}
    for kind, (made, counts) in media.items():
        layout = layouts[kind]
        meta = layout.describe(owner, made).meta
        for k, n in enumerate(counts):
            segments[-1] = (TEXT, text_lengths(segments[-1][1].num_tokens + 1))
            parts[len(segments)] = {
                name: value for name, value in zip(layout.arguments, layout.part(
                    made, meta, slice(k, k + 1)), strict=True) if value is not None}
            arguments[len(segments)] = layout.value
            segments += [(AUDIO if kind == "audio" else VISION, SegmentLengths(n, n, n, (1, 1, n))),
                         (TEXT, text_lengths(3))]
    return _made(i, inputs["input_ids"][0], inputs["labels"][0], segments, parts, arguments,
                 {n: v for n, v in inputs.items() if n not in TEXTS})


def _made(i: int, ids: Tensor, labels: Tensor, segments: Sequence, parts: dict, arguments: dict,
          media: dict) -> ProcessedExample:
    targets = int((labels[1:] != IGNORE_INDEX).sum())
    return ProcessedExample(i, ids, labels, media, BatchLayout.from_segments(i, targets, segments),
                            parts, arguments)


def _cut(example: ProcessedExample, side: int) -> ProcessedExample:
    """Without the text after its last medium (-1), or before its first (0)."""
    lengths = example.lengths
    table = [(int(m), SegmentLengths(int(r), int(a), int(n), tuple(g))) for m, r, a, n, g in zip(
        lengths.modality, lengths.rows, lengths.attn_len, lengths.num_tokens,
        lengths.grid.tolist(), strict=True)]
    n = table[side][1].num_tokens
    kept = slice(0, len(example.input_ids) - n) if side else slice(n, None)
    table[side] = (TEXT, text_lengths(0))
    media = {name: value[:, kept] if name.endswith("type_ids") else value
             for name, value in example.media.items()}
    return _made(example.example_id, example.input_ids[kept], example.labels[kept], table,
                 example.parts, example.arguments, media)
