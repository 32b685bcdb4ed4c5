"""torch.compile of transformer blocks: one graph a phase, whatever the lengths of a batch are.

Blocks of a phase share their graph. A batch with fewer than two rows runs without it: torch
compiles a dimension of 0 and of 1 anew, and a phase is rarely so small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from orchmllm.encoders.mirrored import Mirrored
from orchmllm.models import attention_op, towers
from orchmllm.plan.layout import GENERATOR

if TYPE_CHECKING:
    from orchmllm.models.whole_model import WholeModel

GRAPHS = 64  # of all blocks together: phases, with and without gradients, and a margin


def compile_whole(whole: WholeModel, device: torch.device, backend: str = "inductor") -> None:
    """Compiles the blocks of a model of transformers in place, of the LLM and of towers, not of a
    generator, which reads lengths. Raises ValueError where the LLM's attention has no kernel that
    can be compiled: on a GPU it is torch's flash attention alone (orchmllm.models.attention_op).
    backend: of torch.compile."""
    text = whole.hf.config.get_text_config(decoder=True)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not attention_op.has_kernel(device, whole.dtype, size):
        raise ValueError(
            f"fsdp.compile is true, but the llm phase (head size {size}, {whole.dtype}) has no "
            "attention kernel that can be compiled: use fsdp.compute_dtype=bfloat16 and a head "
            "size that is a multiple of 8 and at most 256, or fsdp.compile=false")
    for part, stack in whole.blocks().items():
        for block in stack if part != GENERATOR else ():
            compile_block(block, backend)


def compile_block(block: nn.Module, backend: str) -> None:
    """Compiles what a block computes in place, before it is sharded: its hooks, such as those of
    FSDP2, run outside of its graph. Something may run between its graphs, such as attention with a
    mask for each example."""
    torch._dynamo.config.recompile_limit = GRAPHS
    # What norms and attention have of numbers is fixed: else torch traces each block twice.
    torch._dynamo.config.specialize_float = True
    # Otherwise the number of rows is taken for any other size that equals it in the first batch.
    torch.fx.experimental._config.use_duck_shape = False
    compiled = torch.compile(_run, dynamic=True, fullgraph=False, backend=backend)

    def forward(x: Tensor, *args: object, **kwargs: object) -> object:
        small = any(min(a.shape[:2]) < 2 for a in args if isinstance(a, Tensor))
        if small or x.shape[-2] < 2:
            return _run(block, x, *args, **kwargs)
        _drop_collectors(block)
        args, kwargs = tree_map_only(Mirrored, towers.on_host, (args, kwargs))
        # The first block may be given a view, of which its base would be compiled in too.
        return compiled(block, x.clone() if x._is_view() else x, *args, **kwargs)

    block.forward = forward


def _run(block: nn.Module, x: Tensor, *args: object, **kwargs: object) -> object:
    """By the class that the block has by now: it may have come to recompute."""
    return type(block).forward(block, x, *args, **kwargs)


def _drop_collectors(block: nn.Module) -> None:
    """Takes hooks of transformers from what a block is made of. They collect weights of attention,
    which no kernel returns, and would end the graph; the first forward that is asked for the states
    between blocks adds them."""
    for module in block.modules():
        for key, hook in [*module._forward_hooks.items()] if module is not block else ():
            if hook.__module__ == "transformers.utils.output_capturing":
                del module._forward_hooks[key]
