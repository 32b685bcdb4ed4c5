"""Counts the kernels of one block of a text model and of its chunked loss, and the bytes that they
read and write, on tensors without memory.

    python scripts/count_kernels.py [--recipe recipes/qwen3_vl_8b.yaml] [--rows 16384] [--stock]

Every operator that torch runs on `meta` counts as one kernel; views and allocations do not count.
Two operators are those of a GPU in half precision, which `meta` would replace: attention for packed
sequences, and the fused RMSNorm. A kernel reads its tensor arguments once and writes its results
once, so the bytes are the least that it moves. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from orchmllm.batch import SequenceLengths  # noqa: E402
from orchmllm.config.model import ModelConfig  # noqa: E402
from orchmllm.config.recipe import load_recipe  # noqa: E402
from orchmllm.counts.on_a_gpu import fused  # noqa: E402
from orchmllm.models import packing, whole_model  # noqa: E402
from orchmllm.models.families import model_class, read_config  # noqa: E402
from orchmllm.models.loss import LossHead  # noqa: E402

PRODUCTS = ("mm", "addmm", "bmm")
NO_KERNELS = ("empty", "new_empty", "detach", "_unsafe_view")
ELEMENTS = ("gather", "scatter_add_", "new_full")  # of the logits at most one element a row
LENGTH = 1024  # rows of a sequence


class Kernels(TorchDispatchMode):
    """count: operator -> how often it ran. moved: operator -> bytes of its arguments and results.
    passes: how often an operator took or gave all float32 logits of `chunk` rows."""

    def __init__(self, chunk: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.chunk, self.passes = chunk, 0
        self.count: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        read = [kwargs[k] for k in kwargs if k != "out"]
        tensors = [x for x in tree_leaves((args, read, out)) if isinstance(x, Tensor) and x.is_meta]
        name = operator.__name__.split(".")[0]
        if not tensors or operator.is_view or name.startswith(NO_KERNELS):
            return out
        if name in ELEMENTS:
            tensors = tensors[1:-1]
        self.count[name] += 1
        self.moved[name] += sum(x.numel() * x.element_size() for x in tensors)
        self.passes += name not in PRODUCTS and any(
            x.dtype == torch.float32 and tuple(x.shape) == self.chunk for x in tensors)
        return out

    def others(self) -> list[str]:
        """Operators that are neither matrix products nor attention."""
        return [name for name in self.count if name not in PRODUCTS and "attn" not in name]


def block_of(model: ModelConfig, rows: int, stock: bool = False
             ) -> tuple[Tensor, nn.Module, Callable[[], Tensor]]:
    """One block of the text model in bfloat16 on `meta`: its input, the block, and what runs it.
    stock: by transformers' own code."""
    config = read_config(Path(model.folder))
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 1
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    fuse = (lambda _: None) if stock else whole_model.fuse
    with torch.device("meta"), patch.object(whole_model, "fuse", fuse):
        whole = whole_model.WholeModel(model_class(config)._from_config(config), torch.bfloat16)
        block = whole.to(torch.bfloat16).blocks()["llm"][0]
        x, *tables = (torch.empty(1, rows, size, dtype=torch.bfloat16)
                      for size in (text.hidden_size, head_dim, head_dim))
    lengths = SequenceLengths.from_lengths([LENGTH] * (rows // LENGTH), "meta")
    with packing.packed(lengths, num_layers=0):
        mask = packing.mask_of_row(1, rows, rows, device="meta")

    def run() -> Tensor:
        out = block(x, position_embeddings=tables, attention_mask=mask)
        return out[0] if isinstance(out, tuple) else out

    return x.requires_grad_(), block, run


def count_block(model: ModelConfig, rows: int, stock: bool = False) -> tuple[Kernels, Kernels]:
    """Of the forward and of the backward pass. stock: see block_of."""
    *_, run = block_of(model, rows, stock)
    with fused():
        with Kernels() as forward:
            out = run()
        grad = torch.empty_like(out)
        with Kernels() as backward:
            out.backward(grad)
    return forward, backward


def count_loss(model: ModelConfig, rows: int, chunk: int) -> Kernels:
    """Of the loss of bfloat16 rows in chunks, with its gradients."""
    text = read_config(Path(model.folder)).get_text_config(decoder=True)
    size, vocab = text.hidden_size, text.vocab_size
    with torch.device("meta"):
        head = LossHead(size, vocab).to(torch.bfloat16)
        x = torch.empty(rows, size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(rows, dtype=torch.int64)
    with Kernels((chunk, vocab)) as kernels:
        head(x, labels, chunk).backward()
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="recipes/qwen3_vl_8b.yaml")
    parser.add_argument("--rows", type=int, default=16384, help="a multiple of 4096")
    parser.add_argument("--stock", action="store_true", help="the block by transformers' own code")
    args = parser.parse_args()
    model = load_recipe(args.recipe).model
    print("pass      kernels  other than products and attention  kB a row that these move")
    for name, k in zip(("forward", "backward"), count_block(model, args.rows, args.stock),
                       strict=True):
        moved = sum(k.moved[o] for o in k.others()) / args.rows / 1e3
        print(f"{name:<10}{sum(k.count.values()):>7}"
              f"{sum(k.count[o] for o in k.others()):>35}{moved:>26.1f}")
    k, chunk = count_loss(model, args.rows, 4096), 4096
    moved = sum(k.moved[o] for o in k.others()) / args.rows / 1e6
    print(f"loss in chunks of {chunk} rows: {k.passes * chunk // args.rows} passes over the "
          f"float32 logits of a chunk, {moved:.2f} MB a row moved by other kernels than products")


if __name__ == "__main__":
    main()
