"""Rows of clips of unequal length that follow each other, and a convolution of each of them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import on_device


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
    """`conv` (kernel 3, padding 1) on each clip alone.

    x: (R, C_in), lengths: (n,) rows per clip. Returns (R', C_out) and the n new lengths,
    ceil(length / stride).
    """
    stride = conv.stride[0]
    out_lengths = -(-lengths // stride)
    read = windows(x, lengths, out_lengths, -1, stride, 3)  # (R', 3, C_in)
    weight = conv.weight.transpose(1, 2).flatten(1)  # (C_out, 3 * C_in)
    return F.linear(read.flatten(1), weight, conv.bias), out_lengths
