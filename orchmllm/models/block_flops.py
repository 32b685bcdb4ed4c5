"""What a position costs in the blocks of a model of transformers, by their modules."""

from __future__ import annotations

from torch import nn

CHUNK = 64  # positions that linear attention works on at a time


def multiplied(stack: nn.Module, experts: int) -> int:
    """Weights that a position is multiplied with. experts: of a layer's, those that it is sent
    to."""
    total = 0
    for module in stack.modules():
        for p in module.parameters(recurse=False):
            if p.dim() == 3 and hasattr(module, "num_experts"):
                total += p.numel() // module.num_experts * experts
            elif p.dim() > 1:
                total += p.numel()
    return total


def state_flop(mixer: nn.Module) -> int:
    """FLOP of a position in a layer of linear attention beside its weights: products inside of a
    chunk, a triangular system, and the state."""
    k, v = mixer.head_k_dim, mixer.head_v_dim
    return mixer.num_v_heads * (CHUNK * (5 * k + 3 * v) + 6 * k * v)
