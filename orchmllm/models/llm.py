"""Qwen2 on packed sequences, built from a configuration alone (no download).

The model is transformers' own, with its parameter names; replaced are the attention's forward
(packed, 0 rows), RMSNorm (exact in float64), the rotary table (no buffer, so nothing to restore
after a meta build and nothing that `.to(bfloat16)` can round) and the loss (labels arrive already
shifted, and the trainer divides the sum by the number of targets of the whole step).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import LLMConfig
from orchmllm.models.attention import packed_attention
from orchmllm.models.loss import LossHead
from orchmllm.models.parts import check_sizes, init_parameters, rotate


class RMSNorm(nn.Module):
    """Qwen2RMSNorm that computes in max(float32, input dtype) where the original always casts to
    float32; on a CPU bit-equal to it for float32, bfloat16 and float16 inputs. torch's own kernel
    normalises (on a GPU it is one), and the weight comes after the rounding to the input's dtype,
    as in the original: multiplied inside the kernel, it would be rounded in another place."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., size) -> (..., size)."""
        return self.weight * F.rms_norm(x, self.weight.shape, eps=self.eps)


class RotaryEmbedding(nn.Module):
    """Qwen2's rotary table, computed from the positions in max(float32, input dtype)."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: gives dtype and device. position_ids: (1, R) -> cosine and sine, (1, R, head_dim)."""
        dtype = torch.promote_types(torch.float32, x.dtype)
        exponent = torch.arange(0, self.head_dim, 2, dtype=dtype, device=x.device) / self.head_dim
        angle = position_ids.unsqueeze(-1).to(dtype) * (1.0 / self.theta**exponent)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class PackedQwen2Attention(Qwen2Attention):
    """Qwen2Attention that also takes 0 rows: the stock forward reshapes with a -1, which 0 rows
    make ambiguous (an error), so sizes are explicit here. It attends within the packed
    sequences."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
        attention_mask: None = None, *, packed_seqlens: SequenceLengths, **_: object,
    ) -> tuple[Tensor, None]:
        """hidden_states: (1, R, D), position_embeddings: (1, R, Dh) each -> ((1, R, D), None).
        packed_seqlens: positions per example; what else the model was called with is ignored."""
        q, k, v = [
            proj(hidden_states)
            .squeeze(0)
            .unflatten(-1, (proj.out_features // self.head_dim, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        ]  # (R, H, Dh)
        cos, sin = [table.transpose(0, 1) for table in position_embeddings]  # (R, 1, Dh)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = packed_attention(q, k, v, packed_seqlens, causal=True)
        return self.o_proj(out.flatten(1).unsqueeze(0)), None


class PackedQwen2(nn.Module):
    """The LLM phase: embeddings of packed examples -> summed cross entropy.

    `embed_tokens`, `layers` and `lm_head` are the units that are sharded; `layers` are those that
    are checkpointed. loss_chunk_rows: see LossHead. Raises ValueError for sizes that do
    not fit each other."""

    loss_chunk_rows = 0

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        check_sizes(config)
        self.config = config
        self.hf = Qwen2ForCausalLM(hf_config(config))
        self.hf.lm_head = LossHead(config.hidden_size, config.vocab_size)
        model = self.hf.model
        model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for index, layer in enumerate(model.layers):
            layer.self_attn = PackedQwen2Attention(self.hf.config, index)
            layer.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            layer.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        model.rotary_emb = RotaryEmbedding(
            config.hidden_size // config.num_heads, config.rope_theta
        )
        init_parameters(self)
        nn.init.normal_(self.lm_head.weight, std=self.head_std)

    @property
    def head_std(self) -> float:
        """Of the head's initial weights: it keeps the logits' standard deviation at or below 0.5 in
        wide models, so that the untrained loss is within 5% of ln(vocab_size)."""
        return min(0.02, 0.5 * self.config.hidden_size**-0.5)

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.hf.model.embed_tokens

    @property
    def layers(self) -> nn.ModuleList:
        return self.hf.model.layers

    @property
    def lm_head(self) -> nn.Linear:
        return self.hf.lm_head

    def hidden(self, x: Tensor, position_ids: Tensor, seqlens: SequenceLengths) -> Tensor:
        """x: (R, D) embeddings, position_ids: (R,) int64 restarting in each example, seqlens:
        positions per example. Returns what the head takes, (R, D) in x's dtype. R = 0 runs and
        stays attached."""
        hidden = self.hf.model(
            inputs_embeds=x.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            # A ready mapping: otherwise transformers looks for packed sequences in position_ids,
            # which waits for the device and fails with 0 rows.
            attention_mask={"full_attention": None},
            use_cache=False,
            packed_seqlens=seqlens,
        ).last_hidden_state  # (1, R, D)
        return hidden.squeeze(0)

    def forward(
        self, x: Tensor, position_ids: Tensor, seqlens: SequenceLengths, labels: Tensor | None
    ) -> Tensor:
        """Cross entropy summed over the labels that are not IGNORE_INDEX.

        x, position_ids, seqlens: as in `hidden`. labels: (R,) integers, already shifted
        (labels[t] is the token after t). Returns a scalar in max(float32, x's dtype): 0, attached
        to every parameter, if there is no row or no target. Without labels the logits (n, V) of
        the token after each of the n sequences.
        """
        hidden = self.hidden(x, position_ids, seqlens)
        if labels is None:
            return self.lm_head(hidden[seqlens.cu_seqlens[1:].long() - 1], None)
        return self.lm_head(hidden, labels.long(), self.loss_chunk_rows)


def hf_config(config: LLMConfig) -> Qwen2Config:
    """transformers' configuration of the same shape."""
    return Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.rms_norm_eps,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        use_cache=False,
    )
