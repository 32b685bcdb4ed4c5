"""The whole model: encoders with their connectors, the feature exchange, and the LLM.

Forward, on every rank and with any number of rows (0 included, so that FSDP's collectives line up):
encode -> exchange features, encoder rank to LLM rank, once (OrchMLLM section 6) -> place them in
the text embeddings -> LLM -> sum of the loss.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.batch import Batch
from orchmllm.comm.exchange import exchange_rows
from orchmllm.config.model import ModelConfig
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.llm import PackedQwen2
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.models.vision import VisionEncoder
from orchmllm.plan.layout import ENCODERS


class MultimodalModel(nn.Module):
    """group: ranks among which features are exchanged (default: all). The phases' times are in
    `clock`."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.vision = VisionEncoder(config.vision, config.llm.hidden_size)
        self.audio = AudioEncoder(config.audio, config.llm.hidden_size)
        self.llm = PackedQwen2(config.llm)
        self.clock = PhaseClock()
        self._group = group
        for name, parameter in self.named_parameters():
            part = "connector" if ".connector." in name else name.split(".")[0]
            parameter.requires_grad_(config.learns(part))

    @property
    def token_embedding(self) -> nn.Parameter:
        return self.llm.embed_tokens.weight

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the cross entropy over this rank's labels, a scalar. The caller divides by
        batch.num_global_targets: a mean per rank would depend on the rearrangement. Of a batch
        without labels the logits (n, V) of the token after each example."""
        return self.llm(self.embedded(batch), batch.position_ids, batch.text_lengths, batch.labels)

    def embedded(self, batch: Batch) -> Tensor:
        """What the LLM reads of a batch, (R_llm, D): its text's embeddings, with the features of
        the media in their places."""
        clock = self.clock
        features = {}
        for phase in ENCODERS:  # one order on all ranks: each step is a collective
            clock.switch(phase)
            rows, lengths = batch.inputs[phase], batch.input_lengths[phase]
            if phase == "vision":
                encoded = self.vision(rows, batch.plan.grid[phase], lengths)
            else:
                encoded = self.audio(rows, lengths)
            encoded = clock.mark(encoded, before=phase, after="exchange")
            received = exchange_rows(encoded, batch.plan.feature[phase], self._group)
            features[phase] = clock.mark(received, before="exchange", after="llm")
        x = self.llm.embed_tokens(batch.token_ids)  # what media positions hold is replaced
        for phase, rows in features.items():
            x = x.index_copy(0, batch.scatter[phase], rows)
        return x
