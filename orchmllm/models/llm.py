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

from orchmllm.batch import IGNORE_INDEX, SequenceLengths
from orchmllm.config.model import LLMConfig
from orchmllm.models.attention import packed_attention
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


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross entropy of hidden (R, D) through weight (V, D), a chunk of rows at a time.

    The gradients are made in the forward pass, while a chunk's logits exist: no logits are kept
    and none are computed twice. The weight's gradient is summed over chunks in at least float32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, with_grad):
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        need_hidden, need_weight = (with_grad and need for need in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        ignored = (labels == IGNORE_INDEX).unsqueeze(1)  # (R, 1)
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            target = labels[part].clamp(min=0).unsqueeze(1)  # (r, 1)
            # Zeros: an ignored row then adds nothing to the weight's gradient.
            h = hidden[part].masked_fill(ignored[part], 0.0)
            logits = F.linear(h, weight).to(dtype)  # (r, V)
            # In place, like all that follows: a pass reads and writes the only tensor of this size.
            torch.log_softmax(logits, 1, out=logits)
            total -= logits.gather(1, target).masked_fill_(ignored[part], 0.0).sum()
            if not (need_hidden or need_weight):
                del logits
                continue
            # d loss / d logits: softmax - one-hot
            logits.exp_().scatter_add_(1, target, logits.new_full(target.shape, -1.0))
            grad = logits.to(hidden.dtype)
            del logits
            if need_hidden:
                torch.mm(grad, weight, out=grad_hidden[part])
            if need_weight:
                grad_weight += grad.T @ h
            del grad  # or it would stay beside the logits of the next chunk
        if need_hidden:
            grad_hidden.masked_fill_(ignored, 0.0)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None
                              else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        return (*(g if g is None else _scale(g, grad) for g in ctx.saved_tensors),
                None, None, None)


def _scale(x: Tensor, factor: Tensor, rows: int = 4096) -> Tensor:
    """x (n, D) times a scalar, in place: a copy of the weight's gradient takes 2.5 GB at 84B.
    (autograd sees the change and refuses a second backward pass.) It is computed in the factor's
    precision and rounded once to x's dtype: a factor rounded first, such as 1 / number of targets
    in bfloat16, would scale all gradients alike. rows: those that exist in that precision at the
    same time."""
    for part in x.split(rows):
        part.copy_(part.to(factor.dtype).mul_(factor))
    return x


class LossHead(nn.Linear):
    """lm_head with the summed loss, which FSDP2 has to see as this module's forward (it gathers the
    weight for that)."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None, chunk_rows: int = 0) -> Tensor:
        """x: (R, D), labels (R,) -> a scalar in max(float32, x's dtype); without labels the logits
        (R, V) in x's dtype. chunk_rows: rows whose logits exist at a time; 0 or at least R: all at
        once."""
        if labels is None:
            return super().forward(x)
        if 0 < chunk_rows < len(x):
            return _ChunkedLoss.apply(x, self.weight, labels, chunk_rows, torch.is_grad_enabled())
        logits = super().forward(x)
        logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


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
