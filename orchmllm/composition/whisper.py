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
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from orchmllm.batch import SequenceLengths, on_device
from orchmllm.composition.clips import index_in_sequence, packed_conv1d
from orchmllm.models import towers


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
