"""torch.compile of transformer blocks: one graph a phase, whatever the lengths of a batch are.

Blocks of a phase share their graph. A batch with fewer than two rows runs without it: torch
compiles a dimension of 0 and of 1 anew, and a phase is rarely so small.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
import torch.fx.experimental._config
from torch import Tensor, nn

if TYPE_CHECKING:
    from orchmllm.models.hf import WholeModel

GRAPHS = 64  # of all blocks together: phases, with and without gradients, and a margin


def compile_whole(whole: WholeModel, device: torch.device) -> None:
    """Compiles the blocks of a model of transformers in place: of the LLM, and of towers whose
    blocks are given tensors alone. Those that are given the borders of sequences read their values.
    Raises ValueError where the LLM's attention has no kernel that can be compiled: on a GPU it is
    torch's flash attention alone (orchmllm.models.attention_op)."""
    text = whole.hf.config.get_text_config(decoder=True)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = whole.dtype in (torch.bfloat16, torch.float16)
    if device.type != "cpu" and (not half or size % 8 or size > 256):
        raise ValueError(
            f"fsdp.compile is true, but the llm phase (head size {size}, {whole.dtype}) has no "
            "attention kernel that can be compiled: use fsdp.compute_dtype=bfloat16 and a head "
            "size that is a multiple of 8 and at most 256, or fsdp.compile=false")
    for stack in whole.blocks().values():
        for block in stack:
            if "cu_seqlens" not in inspect.signature(block.forward).parameters:
                compile_block(block)


def compile_block(block: nn.Module, backend: str = "inductor") -> None:
    """Compiles a block in place, before it is sharded; something may run between its graphs, such
    as attention with a mask for each example. backend: of torch.compile."""
    torch._dynamo.config.recompile_limit = GRAPHS
    # What norms and attention have of numbers is fixed: else torch traces each block twice.
    torch._dynamo.config.specialize_float = True
    # Otherwise the number of rows is taken for any other size that equals it in the first batch.
    torch.fx.experimental._config.use_duck_shape = False
    block.compile(dynamic=True, fullgraph=False, backend=backend)
    compiled, plain = block._compiled_call_impl, block._call_impl

    def call(x: Tensor, *args: object, **kwargs: object) -> object:
        small = any(min(a.shape[:2]) < 2 for a in args if isinstance(a, Tensor))
        if small or x.shape[-2] < 2 or kwargs.get("past_key_values") is not None:
            return plain(x, *args, **kwargs)
        # The first block may be given a view, of which its base would be compiled in too.
        return compiled(x.clone() if x._is_view() else x, *args, **kwargs)

    block._compiled_call_impl = call
