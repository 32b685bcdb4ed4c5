"""Bytes that a model of this project's own parts, and the chunked loss of any model, read and write
outside of products and attention: counted on modules without memory, by what runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import WHISPER_FRAMES, ModelConfig
from orchmllm.counts.counted import Counted
from orchmllm.counts.on_a_gpu import fused
from orchmllm.models.loss import LossHead
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS

SIZES = (1, 2)  # items, or chunks of the loss, of which two counts make a line
ITEM = 1024  # positions of an item


def count_parts(model: ModelConfig, dtype: str) -> dict[str, list[list[float]]]:
    """phase -> (forward, backward) bytes, each (2,): once, and of a position. Blocks are alike, so
    that one of each phase is counted."""
    audio = model.audio
    if audio.mode == "padded":  # its masked attention is a kernel on a GPU
        audio = replace(audio, mode="packed")
    short = replace(model, vision=replace(model.vision, num_layers=1, pretrained=""),
                    audio=replace(audio, num_layers=1, pretrained=""),
                    llm=replace(model.llm, num_layers=1, pretrained=""))
    with torch.device("meta"):
        built = MultimodalModel(short).to(getattr(torch, dtype))
    blocks = {"vision": built.vision.blocks, "audio": built.audio.blocks, "llm": built.llm.layers}
    return {phase: _line(lambda items, phase=phase: _phase(
        built, short, phase, blocks[phase][0], items, getattr(model, phase).num_layers))
        for phase in PHASES}


def count_head(width: int, vocab: int, chunk_rows: int, dtype: str, learns: bool
               ) -> list[list[float]]:
    """The same of the head's loss, and of a row of its logits."""
    with torch.device("meta"):
        head = LossHead(width, vocab).to(getattr(torch, dtype)).requires_grad_(learns)

    def run(count: int) -> tuple[int, np.ndarray]:
        rows = 2 * count * (chunk_rows or ITEM)
        x = torch.empty(rows, width, dtype=head.weight.dtype, device="meta", requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        return rows, _bytes(head, {}, lambda: head(x, labels, chunk_rows))

    return _line(run)


def _line(run: Callable[[int], tuple[int, np.ndarray]]) -> list[list[float]]:
    """Of two sizes (n, (2,) bytes): what is once, and what each of n takes."""
    (short, few), (long, many) = map(run, SIZES)
    each = (many - few) / (long - short)
    return np.stack([few - each * short, each], axis=1).tolist()


def _bytes(module: torch.nn.Module, inside: dict, run: Callable[[], Tensor], copies: int = 1
           ) -> np.ndarray:
    """(2,) of the forward and of the backward pass. inside: the block of which there are so many
    copies."""
    with fused(), Counted(inside, model=module) as counted:
        out = run()
        if out.requires_grad:
            out.backward(torch.empty_like(out))
    return sum(np.array([work.forward_bytes, work.backward_bytes])
               * (copies if stage in inside else 1) for stage, work in counted.stages.items())


def _phase(built: MultimodalModel, model: ModelConfig, phase: str, block: torch.nn.Module,
           items: int, layers: int) -> tuple[int, np.ndarray]:
    config = getattr(model, phase)
    positions = WHISPER_FRAMES // 2 if phase == "audio" else ITEM
    if phase == "vision":  # a strip of whole tokens
        side = config.merge_size
        grid = np.array([[1, side, -(-ITEM // side**2) * side]] * items)
        positions = int(grid[0].prod())
    rows = (2 if phase == "audio" else 1) * positions * items
    lengths = SequenceLengths.from_lengths([rows // items] * items, "meta")

    def run() -> Tensor:
        if phase == "llm":
            return _text(built, model, positions * items, lengths)
        dtype = torch.uint8 if phase == "vision" else torch.float32
        x = torch.empty(rows, config.geometry.row_size, dtype=dtype, device="meta")
        return built.vision(x, grid, lengths) if phase == "vision" else built.audio(x, lengths)

    return positions * items, _bytes(built, {phase: block}, run, layers)


def _text(built: MultimodalModel, model: ModelConfig, tokens: int, lengths: SequenceLengths
          ) -> Tensor:
    """What the head gets of texts; as in MultimodalModel.embedded features are put among them, here
    none."""
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    x = built.llm.embed_tokens(ids)
    for phase in ENCODERS:
        features = x.new_empty(0, x.shape[1], requires_grad=model.features_learn(phase))
        x = x.index_copy(0, ids[:0], features)
    return built.llm.hidden(x, ids, lengths)
