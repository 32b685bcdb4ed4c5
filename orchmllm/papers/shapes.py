"""Models that papers tell by their shapes alone: ViTs and decoder LLMs, what their layers compute,
hold and keep for the backward pass."""

from __future__ import annotations

from typing import NamedTuple


class Tower(NamedTuple):
    """A ViT: pre-norm, biases, an MLP of two products."""

    layers: int
    width: int
    mlp: int
    heads: int
    patch: int = 14

    def layer_flops(self, rows: float) -> float:
        """Of a layer's forward pass, of an image of so many patches."""
        return 4.0 * self.width * rows * (2 * self.width + self.mlp + rows)

    def front_flops(self, rows: float) -> float:
        """Of the patches' embedding."""
        return 2.0 * 3 * self.patch**2 * self.width * rows

    @property
    def parameters(self) -> int:
        """Of layers, the embedding of patches and the last norm."""
        c = self.width
        return (self.layers * (4 * c * c + 2 * c * self.mlp + 9 * c + self.mlp)
                + (3 * self.patch**2 + 3) * c)

    @property
    def kept(self) -> float:
        """Bytes that all layers keep of a patch in bfloat16: the inputs of the layers and what
        products and attention give."""
        return self.layers * (2.0 * (7 * self.width + self.mlp) + 4 * self.heads)


class Backbone(NamedTuple):
    """A decoder: RMSNorm, biases of q, k and v, grouped-query attention, an MLP of three products,
    and a head that is not the embedding."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    words: int

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    def layer_flops(self, tokens: float) -> float:
        """Of a layer's forward pass, of a text of so many tokens, each of which attends to those
        before it."""
        c = self.width
        return 2.0 * tokens * (2 * c * c + 2 * c * self.kv_width + 3 * c * self.mlp
                               + c * (tokens + 1))

    def head_flops(self, tokens: float) -> float:
        return 2.0 * self.width * self.words * tokens

    @property
    def parameters(self) -> int:
        c, kv = self.width, self.kv_width
        return (self.layers * (2 * c * c + 2 * c * kv + 3 * c * self.mlp + 3 * c + 2 * kv)
                + 2 * self.words * c + c)

    @property
    def kept(self) -> float:
        """As of a tower, of a token."""
        return self.layers * (2.0 * (5 * self.width + 2 * self.kv_width + 2 * self.mlp)
                              + 4 * self.heads)
