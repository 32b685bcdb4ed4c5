"""Whisper-style audio encoder on the clips of a rank, each encoded as if it were alone.

Flow: (R, num_mels) log-mel frames -> two convolutions (the second halves the rate) -> sinusoidal
positions that restart in each clip -> pre-norm blocks -> LayerNorm -> connector, which stacks
`config.stack` positions into one LLM position.

OrchMLLM pads audio because of the convolutions. In mode `packed` each output position gathers its
three input rows, with zeros outside its clip, and one matrix product applies Conv1d's own weight:
the same sums as Conv1d on each clip alone, and 0 rows work. Mode `padded` computes a dense batch
with its padding masked, after the first convolution too (the second reads one frame beyond a clip's
end), and so equals `packed`. Mode `fixed` is Whisper's own: clips of one length, nothing masked.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import SequenceLengths, on_device
from orchmllm.config.model import WHISPER_FRAMES, AudioConfig
from orchmllm.models.attention import packed_attention, padded_attention
from orchmllm.models.parts import Connector, check_sizes, init_parameters


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


def sinusoids(position: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Whisper's encoder positions for position (R,) int64 of any size -> (R, size) in dtype,
    computed in at least float32."""
    compute = torch.promote_types(torch.float32, dtype)
    step = math.log(10_000) / (size // 2 - 1)
    scale = torch.exp(-step * torch.arange(size // 2, dtype=compute, device=position.device))
    angle = position.to(compute).unsqueeze(1) * scale  # (R, size / 2)
    return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


def _real(lengths: np.ndarray, longest: int) -> np.ndarray:
    """(n, longest) bool: which places of clips padded to `longest` are real."""
    return np.arange(longest) < lengths[:, None]


def _dense_rows(lengths: np.ndarray, longest: int) -> np.ndarray:
    """(sum of lengths,) int64: rows of the real places among n * longest."""
    return np.repeat(np.arange(len(lengths)) * longest, lengths) + index_in_sequence(lengths)


class AudioBlock(nn.Module):
    """Pre-norm transformer block on packed rows, with Whisper's parameter names and biases."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.self_attn_layer_norm = nn.LayerNorm(size)
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size)
        self.out_proj = nn.Linear(size, size)
        self.final_layer_norm = nn.LayerNorm(size)
        self.fc1 = nn.Linear(size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, size)

    def forward(self, x: Tensor, extent: SequenceLengths | Tensor) -> Tensor:
        """x: (P, C) -> (P, C). extent: the P packed positions' clips, or which positions of a dense
        batch are real, (n, L) bool with n * L = P."""
        h = self.self_attn_layer_norm(x)
        q, k, v = [proj(h).unflatten(-1, (self.num_heads, -1))  # (P, H, Dh)
                   for proj in (self.q_proj, self.k_proj, self.v_proj)]
        if isinstance(extent, Tensor):
            attended = padded_attention(q, k, v, extent)
        else:
            attended = packed_attention(q, k, v, extent, causal=False)
        x = x + self.out_proj(attended.flatten(1))
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class AudioEncoder(nn.Module):
    """Audio encoder and its connector; `blocks` are the units that are sharded and checkpointed.

    out_size: the LLM's width. Raises ValueError for sizes that do not fit each other.
    """

    def __init__(self, config: AudioConfig, out_size: int) -> None:
        super().__init__()
        check_sizes(config)
        size = config.hidden_size
        self.config = config
        # Holders of Whisper's weights and biases: packed_conv1d applies them without a call.
        self.conv1 = nn.Conv1d(config.num_mels, size, 3, padding=1)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(AudioBlock(config) for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(size)
        self.connector = Connector(size, config.stack, out_size)
        init_parameters(self)

    def encode(self, mel: Tensor, lengths: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """mel: (R, num_mels), lengths: (n,) frames per clip -> features before the connector,
        (P, C), and (n,) positions per clip. Raises ValueError in mode `fixed` for a clip that is
        not as long as the window."""
        mel = mel.to(self.conv1.weight.dtype)
        if self.config.mode == "packed":
            x, lengths = self._packed_front(mel, lengths)
            extent, real = SequenceLengths.from_lengths(lengths, x.device), None
        else:
            x, lengths, extent, real = self._dense_front(mel, lengths)
        for block in self.blocks:
            x = block(x, extent)
        if real is not None:
            x = x.index_select(0, real)
        return self.layer_norm(x), lengths

    def _packed_front(self, x: Tensor, lengths: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Convolutions and positions of clips one after the other: (P, C), (n,)."""
        for conv in (self.conv1, self.conv2):
            x, lengths = packed_conv1d(x, conv, lengths)
            x = F.gelu(x)
        position = on_device(index_in_sequence(lengths), x.device)
        return x + sinusoids(position, x.shape[1], x.dtype), lengths

    def _dense_front(
        self, mel: Tensor, lengths: np.ndarray
    ) -> tuple[Tensor, np.ndarray, SequenceLengths | Tensor, Tensor | None]:
        """The same of clips padded to the longest: (n * L, C), (n,) real positions, the extent that
        blocks take, and the rows that are real (None: all)."""
        fixed, n = self.config.mode == "fixed", len(lengths)
        if fixed and (lengths != WHISPER_FRAMES).any():
            raise ValueError(f"model.audio.mode is fixed: clips must have {WHISPER_FRAMES} frames, "
                             f"got {sorted(set(lengths.tolist()))}")
        longest = max(int(lengths.max(initial=0)), 1)  # a convolution refuses 0 frames, not 0 clips
        frames = _dense_rows(lengths, longest)
        dense = mel.new_zeros(n * longest, mel.shape[1]).index_copy(
            0, on_device(frames, mel.device), mel)
        x = F.gelu(self.conv1(dense.unflatten(0, (n, longest)).transpose(1, 2)))  # (n, C, longest)
        if not fixed:
            x = x * on_device(_real(lengths, longest), x.device).to(x.dtype).unsqueeze(1)
        x = F.gelu(self.conv2(x)).transpose(1, 2)  # (n, L, C)
        lengths, longest = -(-lengths // 2), x.shape[1]
        x = x + sinusoids(torch.arange(longest, device=x.device), x.shape[2], x.dtype)
        x = x.flatten(0, 1)  # (n * L, C)
        if fixed:
            return x, lengths, SequenceLengths.from_lengths(lengths, x.device), None
        real = on_device(_dense_rows(lengths, longest), x.device)
        return x, lengths, on_device(_real(lengths, longest), x.device), real

    def forward(self, mel: Tensor, seqlens: SequenceLengths) -> Tensor:
        """Embeddings of all clips of this rank; runs with R = 0 and is then still attached to
        every parameter.

        mel: (R, num_mels) floating point. seqlens: mel frames per clip. Returns
        (sum of ceil(ceil(frames / 2) / stack), out_size). Raises ValueError if seqlens does not
        cover the R rows.
        """
        if len(mel) != seqlens.total:
            raise ValueError(f"{len(mel)} mel frames, but seqlens covers {seqlens.total}")
        x, lengths = self.encode(mel, np.array(seqlens.lengths, np.int64))
        stack = self.config.stack
        groups = windows(x, lengths, -(-lengths // stack), 0, stack, stack)  # (tokens, stack, C)
        return self.connector(groups.flatten(0, 1))
