"""Whisper's encoder on clips of unequal length, without padding: the frames of all clips are one
sequence of rows, and each clip is encoded as if it were alone.

The weights and their names are those of transformers. Whisper itself computes windows of 30 s, the
silence after a clip included. Here each position of a convolution gathers its three input rows,
with zeros outside of its clip, and one product applies the convolution's own weight: the same sums
as of the clip alone. Positions restart in each clip, and attention stays inside of it.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from orchmllm.batch import SequenceLengths, on_device
from orchmllm.models import towers


def index_in_sequence(lengths: np.ndarray) -> np.ndarray:
    """(sum,) int64: 0..n-1 for each of the lengths n, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def windows(
    x: Tensor, lengths: np.ndarray, out_lengths: np.ndarray, first: int, stride: int, width: int
) -> Tensor:
    """The rows of clips x (R, C) that each output position reads, (sum of out_lengths, width, C):
    position j of a clip reads its clip's rows first + stride * j + (0 .. width - 1), zeros outside
    the clip. lengths, out_lengths: (n,) int64, rows of each clip before and after."""
    frame = (first + stride * index_in_sequence(out_lengths))[:, None] + np.arange(width)
    start = np.repeat(np.cumsum(lengths) - lengths, out_lengths)[:, None]
    length = np.repeat(lengths, out_lengths)[:, None]
    index = np.where((frame >= 0) & (frame < length), start + frame, len(x))
    rows = torch.cat([x, x.new_zeros(1, x.shape[1])])  # the last one is read outside a clip
    # One gather per column: inside a column no real row is read twice, so the backward adds in a
    # fixed order on every device.
    columns = on_device(index, x.device).unbind(1)
    return torch.stack([rows.index_select(0, column) for column in columns], dim=1)


def packed_conv1d(x: Tensor, conv: nn.Conv1d, lengths: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """`conv_transformer` (kernel 3, padding 1) on each clip alone.

    x: (R, C_in), lengths: (n,) rows per clip. Returns (R', C_out) and the n new lengths,
    ceil(length / stride).
    """
    stride = conv.stride[0]
    out_lengths = -(-lengths // stride)
    read = windows(x, lengths, out_lengths, -1, stride, 3)  # (R', 3, C_in)
    weight = conv.weight.transpose(1, 2).flatten(1)  # (C_out, 3 * C_in)
    return F.linear(read.flatten(1), weight, conv.bias), out_lengths


class PackedWhisperEncoder(WhisperEncoder):
    """config: a WhisperConfig, of which it has a copy: its attention is chosen here, and stays."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(copy.deepcopy(config))
        self.config._attn_implementation = towers.NAME

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: of custom code transformers leaves out the initial values that a module without
        parameters of its own sets, here the sinusoids of positions."""
        return False

    def forward(self, input_features: Tensor, feature_attention_mask: Tensor, **_: Any
                ) -> BaseModelOutput:
        """input_features: (n, mel bands, frames); feature_attention_mask (n, frames): 1 at those of
        each clip, which come first. last_hidden_state: (P, C), ceil(frames / 2) positions of each
        clip, one clip after the other. Raises ValueError for a clip that is longer than the table
        of positions, RuntimeError where another attention was chosen, by which clips would see each
        other."""
        lengths = np.array(feature_attention_mask.sum(-1).tolist(), np.int64)
        if len(lengths) > 1 and self.config._attn_implementation != towers.NAME:
            raise RuntimeError("another attention was chosen for packed clips, which would see "
                               "each other: leave _attn_implementation of the audio tower as it is")
        count, longest = feature_attention_mask.shape
        index = np.repeat(longest * np.arange(count), lengths) + index_in_sequence(lengths)
        x = input_features.transpose(1, 2).flatten(0, 1).index_select(
            0, on_device(index, input_features.device))
        for conv in (self.conv1, self.conv2):
            x, lengths = packed_conv1d(x, conv, lengths)
            x = F.gelu(x)
        table = self.embed_positions.weight
        if lengths.max(initial=0) > len(table) and not table.is_meta:
            raise ValueError(f"a clip has {lengths.max()} positions, and the audio tower knows "
                             f"{len(table)}: leave it out, or cut it")
        x = x + table.index_select(0, on_device(index_in_sequence(lengths), x.device))
        borders = torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))
        borders.seqlens = SequenceLengths.from_lengths(lengths, x.device)  # not read in the blocks
        for layer in self.layers:
            x = layer(x[None], None, cu_seq_lens_q=borders, cu_seq_lens_k=borders,
                      is_causal=False)[0]
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))
