"""Section of a recipe on how the model is sharded over the ranks, in which numbers it computes, and
what it keeps for the backward pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchmllm.config.schema import did_you_mean, key

DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
CHOICES = ("none", "selective", "full")  # cheapest to most expensive in time
CHECKPOINTING = (*CHOICES, "auto")
LAYERS = re.compile(r"full:(\d{1,6})(?:\+selective:(\d{1,6}))?|selective:(\d{1,6})")
RESHARD = ("full", "node", "none")
RESHARD_OF_PART = ("The same for this part: `full` frees them, `node` keeps them sharded over the "
                   "node's ranks, `none` keeps them whole; empty: as fsdp.reshard_after_forward.")
CHECKPOINTING_OF_PART = ("The same for this part, or by layer: with `full:12+selective:4` the "
                         "first 12 are `full`, the next 4 `selective`, and the rest `none`; empty: "
                         "as fsdp.activation_checkpointing.")
COPIED_ROWS = 4096  # of the gradient of the head's weight of which the chunked loss makes a copy


def layer_counts(choice: str, num_layers: int) -> dict[str, int]:
    """How many layers of a phase are of each of CHOICES. choice: one of them, for all layers, or
    numbers as in `full:12+selective:4`. Raises ValueError for another text, and for more layers
    than there are."""
    if choice in CHOICES:
        return dict.fromkeys(CHOICES, 0) | {choice: num_layers}
    found = LAYERS.fullmatch(choice)
    if not found:
        raise ValueError(f"{did_you_mean(choice, CHECKPOINTING)}choose one of "
                         f"{', '.join(CHECKPOINTING)}, or numbers of layers: full:12+selective:4")
    full, selective = int(found[1] or 0), int(found[2] or found[3] or 0)
    if full + selective > num_layers:
        raise ValueError(f"names {full + selective} layers, but there are {num_layers}")
    return {"none": num_layers - full - selective, "selective": selective, "full": full}


def phase_counts(phase: str, choice: str, num_layers: int) -> dict[str, int]:
    """The same of a phase of a recipe. Raises ValueError, which names the key, too."""
    try:
        return layer_counts(choice, num_layers)
    except ValueError as e:
        raise ValueError(f"fsdp.{phase}_checkpointing={choice}: {e}") from e


def as_choice(counts: Mapping[str, int]) -> str:
    """The shortest text that layer_counts reads so."""
    named = [f"{name}:{counts[name]}" for name in ("full", "selective") if counts[name]]
    alone = [name for name in CHOICES if counts[name] == sum(counts.values())]
    return alone[0] if alone else "+".join(named)


@dataclass(frozen=True)
class FsdpConfig:
    """How the model is sharded and computed."""

    shard_size: int = key(0, "Ranks that a parameter is sharded over; the rest has copies (hybrid "
                          "sharding). 0: all.", at_least=0)
    reshard_after_forward: bool = key(True, "Free gathered parameters between forward and "
                                      "backward; those that the backward pass does not read are "
                                      "always freed.")
    vision_reshard: str = key("", RESHARD_OF_PART, choices=("", *RESHARD))
    audio_reshard: str = key("", RESHARD_OF_PART, choices=("", *RESHARD))
    llm_reshard: str = key("", RESHARD_OF_PART, choices=("", *RESHARD))
    generator_reshard: str = key("", RESHARD_OF_PART, choices=("", *RESHARD))
    cpu_offload: bool = key(False, "Keep parameters, gradients and optimizer state in the host's "
                            "memory, and update them there. This is slow.")
    activation_checkpointing: str = key(
        "none", "What blocks recompute in the backward pass. `selective`: all but matrix products "
        "and attention; `full`: the whole block; `auto`: for each layer the cheapest that fits "
        "fsdp.memory_gb.", choices=CHECKPOINTING)
    vision_checkpointing: str = key("", CHECKPOINTING_OF_PART)
    audio_checkpointing: str = key("", CHECKPOINTING_OF_PART)
    llm_checkpointing: str = key("", CHECKPOINTING_OF_PART)
    generator_checkpointing: str = key("", CHECKPOINTING_OF_PART)
    memory_gb: float = key(0.0, "Memory that a rank's tensors may take, in 1e9 bytes, for `auto` "
                           "and the dry run; 0: 87% of the GPU's.", at_least=0)
    loss_chunk_rows: int = key(
        4096, "Rows whose logits exist at the same time (each takes 12 bytes times the vocabulary, "
        "with its gradient); 0: all, which some models need.", at_least=0)
    prefetch: int = key(0, "Units whose parameters are gathered ahead; 0: FSDP2's own choice.",
                        at_least=0, at_most=8)
    compile: bool = key(False, "Run torch.compile on every block, in the first steps; blocks with "
                        "fewer than two rows run without.")
    param_dtype: str = key("float32", "Dtype of parameters, gradients and optimizer state.",
                           choices=tuple(DTYPE_BYTES))
    reduce_dtype: str = key("", "Dtype of gradients while ranks add them; empty: param_dtype. "
                            "bfloat16 sends half as much and rounds every sum to 8 bits.",
                            choices=("", *DTYPE_BYTES))
    compute_dtype: str = key("", "Dtype of the forward and backward pass; empty: param_dtype.",
                             choices=("", *DTYPE_BYTES),
                             aliases=("dtype", "bf16", "mixed_precision"))

    @property
    def forward_dtype(self) -> str:
        """Name of the dtype of forward and backward."""
        return self.compute_dtype or self.param_dtype

    @property
    def sum_dtype(self) -> str:
        """Name of the dtype in which ranks add up gradients."""
        return self.reduce_dtype or self.param_dtype

    def reshard(self, phase: str) -> str:
        """What is freed between forward and backward in a phase: full, node or none."""
        return getattr(self, f"{phase}_reshard") or (
            "full" if self.reshard_after_forward else "none")

    def checkpointing(self, phase: str) -> str:
        """The choice for a phase."""
        return getattr(self, f"{phase}_checkpointing") or self.activation_checkpointing
