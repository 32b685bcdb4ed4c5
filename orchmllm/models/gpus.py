"""What data sheets say of GPUs: the one table that peaks, the dry run and the planner read.

Dense rates without sparsity; float32 is that of the plain units, which torch uses by default (TF32
is off); float64 is that of the tensor cores where there are any. Sources, all by NVIDIA: "H100
Tensor Core GPU" data sheet (SXM, PCIe: 2022; NVL: 2024), "H200 Tensor Core GPU" data sheet (2024),
"HGX B200" data sheet (2025; an eighth of the board), "A100 Tensor Core GPU" data sheet (2022),
"L40S" data sheet (2023), "RTX A6000" data sheet (2021), "Ada GPU architecture" (2023, RTX 4090).
H800, A800 and H20 are export variants: as H100, A100 and H100 but for what differs below, by the
press. Memory is what torch reports, which is less than 1024**3 times the name's GB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """FLOP/s by dtype, bytes, and bytes/s in one direction. node: to the other GPUs of a node, by
    NVLink, or by PCIe where at most pairs have a bridge; host: to the memory of the host. parts:
    what torch's device name contains."""

    parts: tuple[str, ...]
    bfloat16: float
    float32: float
    float64: float
    memory_bytes: float
    memory_bandwidth: float
    node: float
    host: float = 64e9


_H100 = Gpu(("H100",), 989e12, 67e12, 67e12, 85e9, 3.35e12, 450e9)
_A100 = Gpu(("A100",), 312e12, 19.5e12, 19.5e12, 85e9, 2.04e12, 300e9, 32e9)
GPUS = {
    "h100-sxm": _H100,
    "h100-pcie": Gpu(("H100", "PCIe"), 756e12, 51e12, 51e12, 85e9, 2.0e12, 64e9),
    "h100-nvl": Gpu(("H100", "NVL"), 835e12, 60e12, 60e12, 100e9, 3.9e12, 64e9),
    "h200": replace(_H100, parts=("H200",), memory_bytes=150e9, memory_bandwidth=4.8e12),
    "h200-nvl": Gpu(("H200", "NVL"), 835e12, 60e12, 60e12, 150e9, 4.8e12, 64e9),
    "h800": replace(_H100, parts=("H800",), float64=1e12, node=200e9),
    "h20": Gpu(("H20",), 148e12, 44e12, 1e12, 102e9, 4.0e12, 450e9),
    "b200": Gpu(("B200",), 2250e12, 75e12, 37e12, 191e9, 7.7e12, 900e9),
    "a100": _A100,
    "a100-40gb": replace(_A100, parts=("A100", "40GB"), memory_bytes=42e9,
                         memory_bandwidth=1.56e12),
    "a100-pcie": replace(_A100, parts=("A100", "80GB PCIe"), memory_bandwidth=1.94e12, node=32e9),
    "a800": replace(_A100, parts=("A800",), node=200e9),
    "l40s": Gpu(("L40S",), 362e12, 91.6e12, 1.4e12, 48e9, 0.86e12, 32e9, 32e9),
    "a6000": Gpu(("RTX A6000",), 155e12, 38.7e12, 0.6e12, 51e9, 0.77e12, 32e9, 32e9),
    "4090": Gpu(("RTX 4090",), 165e12, 82.6e12, 1.3e12, 25e9, 1.0e12, 32e9, 32e9),
}


def kind_of(device_name: str) -> str | None:
    """The key of GPUS that fits torch's name of a device best; None for one that is not there."""
    fitting = [key for key, gpu in GPUS.items() if all(p in device_name for p in gpu.parts)]
    return max(fitting, key=lambda k: sum(map(len, GPUS[k].parts)), default=None)
