"""The cluster that a prediction is made for: data sheets, the network, and how much of both is
reached, assumed or measured by scripts/bench_gpu.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from orchmllm.config.job import Job, resolve
from orchmllm.config.recipe import Recipe
from orchmllm.models.gpus import GPUS, Gpu
from orchmllm.plan.assign import PHASES

MEASURED = ("products", "attention", "layer", "fixed")  # of each phase


@dataclass(frozen=True)
class Hardware:
    """A GPU of a cluster: its data sheet, network_bandwidth between nodes in bytes/s per GPU and
    direction, and efficiencies: of products, of attention of items without end, which is halved
    where a position attends to attention_half of them, of the network, and memory_efficiency of
    the memory's bandwidth by kernels that are no products. measured: phase -> shares of the peak of
    products and of attention with all other kernels in them, in place of the assumed ones, and the
    seconds that each `layer` and the rest (`fixed`) take whatever their rows. *_hop_s: latency of
    one hop of a ring inside a node and between nodes; message_s: of a peer's message in an
    all-to-all."""

    name: str = "h100-sxm"
    sheet: Gpu = GPUS["h100-sxm"]
    ranks_per_node: int = 8
    network_bandwidth: float = 50e9
    # As an H200 says (docs/scale.md): attention by itself, the others by the trace of a step.
    product_efficiency: float = 0.77
    attention_efficiency: float = 0.28
    attention_half: float = 420
    network_efficiency: float = 0.70
    memory_efficiency: float = 0.60
    host_memory_bandwidth: float = 20e9
    node_hop_s: float = 1e-6
    network_hop_s: float = 5e-6
    message_s: float = 2e-6
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in a dtype."""
        return getattr(self.sheet, dtype)

    def job(self, recipe: Recipe, num_ranks: int) -> tuple[Job, Hardware]:
        """The recipe on so many GPUs of this cluster, and the cluster with the job's nodes."""
        job = resolve(recipe, num_ranks, self.ranks_per_node)
        return job, replace(self, ranks_per_node=job.ranks_per_node)

    def fixed_s(self, phase: str, layers: int) -> float:
        """Measured seconds of a phase's forward and backward pass without rows, else 0."""
        known = self.measured.get(phase)
        return known["fixed"] + layers * known["layer"] if known else 0.0

    def rates(self, phase: str, dtype: str, attended: np.ndarray) -> np.ndarray:
        """(2, d) FLOP/s that a phase's products and its attention reach. attended: (d,) positions
        to which one attends, on average."""
        shares = self.product_efficiency, self.attention_efficiency * attended / (
            attended + self.attention_half)
        if known := self.measured.get(phase):
            shares = known["products"], known["attention"]
        return self.peak(dtype) * np.stack([np.broadcast_to(s, attended.shape) for s in shares])

    @property
    def memory_rate(self) -> float:
        """Bytes/s of the GPU's memory that are reached."""
        return self.sheet.memory_bandwidth * self.memory_efficiency


def cluster(gpu: str = "h100-sxm", *, gbit: float = 400, per_node: int = 8,
            measured: Path | None = None) -> Hardware:
    """The hardware of the dry run's options. gbit: of the network, per GPU and direction.
    measured: a file that `scripts/bench_gpu.py --out` wrote. Raises ValueError, naming the option,
    for what cannot be."""
    for right, option in ((0 < gbit < float("inf"), f"--network {gbit:g}: must be above 0"),
                          (per_node >= 1, f"--gpus-per-node {per_node}: must be at least 1")):
        if not right:
            raise ValueError(option)
    if gpu.lower() not in GPUS:
        raise ValueError(f"--gpu {gpu}: choose one of {', '.join(GPUS)}")
    hardware = Hardware(gpu.lower(), GPUS[gpu.lower()], per_node, gbit * 1e9 / 8)
    return _with_measured(hardware, measured) if measured else hardware


def _with_measured(hardware: Hardware, path: Path) -> Hardware:
    """The hardware with what a file of bench_gpu says of each phase. Raises ValueError for a file
    that is none, or of another GPU."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kind, phases = found["gpu"], {p: {k: float(found["phases"][p][k]) for k in MEASURED}
                                      for p in PHASES}
        if not all(0 <= x < float("inf") and (x or k in ("fixed", "layer"))
                   for phase in phases.values() for k, x in phase.items()):
            raise ValueError("a share is not above 0, or seconds are below 0")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--measured {path}: not what `scripts/bench_gpu.py --out` writes "
                         f"({type(e).__name__}: {e})") from e
    if kind not in (hardware.name, "cpu"):
        raise ValueError(f"--measured {path}: it was measured on {kind}: say --gpu {kind}")
    if kind == "cpu":
        peak = float(found["peak_flop_per_s"])
        hardware = replace(hardware, name=f"{hardware.name} as slow as a CPU", sheet=replace(
            hardware.sheet, **dict.fromkeys(("bfloat16", "float32", "float64"), peak)))
    return replace(hardware, measured=phases)
