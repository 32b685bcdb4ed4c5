"""torch.compile of transformer blocks: one graph a phase, whatever the lengths of a batch are.

Blocks of a phase share their graph. A batch with fewer than two rows runs without it: torch
compiles a dimension of 0 and of 1 anew, and a phase is rarely so small.
"""

from __future__ import annotations

import torch
import torch.fx.experimental._config
from torch import Tensor, nn

from orchmllm.config.model import ModelConfig
from orchmllm.plan.assign import PHASES

GRAPHS = 64  # of all blocks together: phases, with and without gradients, and a margin


def check_compiles(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError naming the phase whose attention has no kernel that can be compiled: on a
    GPU it is torch's flash attention alone (orchmllm.models.attention_op)."""
    if device.type == "cpu":
        return
    for phase in PHASES:
        config = getattr(model, phase)
        head_dim = config.hidden_size // config.num_heads
        if phase == "audio" and config.mode == "padded":
            continue  # no packed sequences
        if dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
            raise ValueError(
                f"fsdp.compile is true, but the {phase} phase (head size {head_dim}, {dtype}) has "
                "no attention kernel that can be compiled: use fsdp.compute_dtype=bfloat16 and a "
                "head size that is a multiple of 8 and at most 256, or fsdp.compile=false")


def compile_block(block: nn.Module, backend: str = "inductor") -> None:
    """Compiles a block in place, before it is sharded. Raises what torch.compile raises, at the
    first call, where a block is not one graph. backend: of torch.compile."""
    torch._dynamo.config.recompile_limit = GRAPHS
    # Otherwise the number of rows is taken for any other size that equals it in the first batch.
    torch.fx.experimental._config.use_duck_shape = False
    block.compile(dynamic=True, fullgraph=True, backend=backend)
    compiled, plain = block._compiled_call_impl, block._call_impl

    def call(x: Tensor, *args: object, **kwargs: object) -> object:
        small = any(min(a.shape[:2]) < 2 for a in args if isinstance(a, Tensor))
        if small or x.shape[-2] < 2:
            return plain(x, *args, **kwargs)
        # The first block may be given a view, of which its base would be compiled in too.
        return compiled(x.clone() if x._is_view() else x, *args, **kwargs)

    block._compiled_call_impl = call
