"""What the planner knows of a module: its time, its memory, what it hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchmllm.tools.predict.hardware import Hardware


def state_of(parameters: float) -> tuple[float, float, float]:
    """Bytes of weights (bfloat16), gradients (float32), float32 copy and AdamW's two moments."""
    return 2 * parameters, 4 * parameters, 12 * parameters


@dataclass(frozen=True)
class ModuleProfile:
    """A module of a multimodal model, for one training sample.

    layers: that pipeline stages can divide. rows: positions of a sample. forward_ms(tp):
    milliseconds of all layers on tp GPUs; the backward pass takes as long towards the input, and as
    long again towards the weights. activation_bytes_per_row: that all layers keep for the backward
    pass. boundary_bytes_per_row: that one layer hands to the next. forward_flops: of a sample.
    trains: its weights learn.
    input_gradient: something learns in it or before it. recompute: activations are made again."""

    name: str
    layers: int
    rows: float
    forward_ms: Callable[[int], float]
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes_per_row: float
    boundary_bytes_per_row: float
    forward_flops: float = 0.0
    trains: bool = True
    input_gradient: bool = True
    recompute: bool = False

    @property
    def backward_units(self) -> float:
        """Backward time, recomputation included, over forward time."""
        return self.input_gradient * (1.0 + self.recompute) + self.trains

    @property
    def state_bytes(self) -> tuple[float, float]:
        """(weights and gradients, optimizer), of the whole module."""
        return (self.weight_bytes + self.trains * self.gradient_bytes,
                self.trains * self.optimizer_bytes)

    @property
    def kept_bytes(self) -> float:
        """Activations of a sample in all layers, from its forward to its backward pass."""
        kept = self.layers * self.boundary_bytes_per_row if self.recompute else (
            self.activation_bytes_per_row)
        return self.rows * (kept if self.input_gradient else self.boundary_bytes_per_row)

    def total_ms(self, tp: int) -> float:
        """Forward and backward of a sample on tp GPUs."""
        return self.forward_ms(tp) * (1 + self.backward_units)


def with_frozen(profiles: Mapping[str, ModuleProfile],
                frozen: Sequence[str]) -> dict[str, ModuleProfile]:
    """The profiles in pipeline order with some modules frozen. Projectors always learn, so the LLM
    and what follows it still pass gradients on; a frozen encoder has no backward pass. Raises
    ValueError for an unknown name."""
    for name in frozen:
        if name not in profiles:
            raise ValueError(f"frozen: no module {name!r}; there are {', '.join(profiles)}")
    names = list(profiles)
    behind = names.index("llm") if "llm" in names else len(names)
    return {name: replace(p, trains=name not in frozen,
                          input_gradient=name not in frozen or names.index(name) >= behind)
            for name, p in profiles.items()}


def analytic_ms(flops: float, rows: float, layers: int, width: int, hardware: Hardware,
                efficiency: float) -> Callable[[int], float]:
    """forward_ms from a sample's FLOPs at a share of the peak, and two all-reduces of its rows in
    each layer when tp > 1."""
    def forward_ms(tp: int) -> float:
        moved = 2 * layers * 2 * (tp - 1) / tp * rows * width * 2
        return 1e3 * (flops / (hardware.sheet.bfloat16 * efficiency * tp)
                      + moved / hardware.sheet.node)
    return forward_ms


def analytic(name: str, layers: int, width: int, *, rows: float, flops: float, parameters: float,
             kept: float, hardware: Hardware, efficiency: float) -> ModuleProfile:
    """A profile by what a sample computes. kept: bytes of a position, of all layers."""
    return ModuleProfile(name, layers, rows, analytic_ms(
        flops, rows, layers, width, hardware, efficiency), *state_of(parameters), kept,
        2.0 * width, forward_flops=flops)
