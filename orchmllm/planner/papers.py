"""The models and machines of DistTrain and MMScale, as far as the papers tell them; what they leave
open is an argument or stands in ASSUMED."""

from __future__ import annotations

from orchmllm.models.config import LLMConfig, ModelConfig, VisionConfig
from orchmllm.planner.profile import (
    GRADIENT,
    OPTIMIZER,
    WEIGHT,
    ModuleProfile,
    analytic_profiles,
)
from orchmllm.predict import Hardware

A800 = Hardware("A800, 8 a node, 4 x 200 Gbit/s per node", peak_flops=312e12, memory_bytes=80e9,
                network_bandwidth=12.5e9, node_bandwidth=150e9)
# Share of the peak that forward and backward reach; patches of 16 pixels; Stable Diffusion 2.1 with
# its frozen image encoder: forward FLOP and kept bytes of an image by its side.
ASSUMED = {"llm": 0.62, "vision": 0.45, "generator": 0.33}
GENERATOR = {512: (1.9e12, 1e9), 1024: (9.2e12, 4e9)}
SEQUENCE = 8192
# Table 1: layers, hidden, ffn, heads, groups; image side of generation; Megatron's pipeline size.
LLMS = {"9B": ((32, 4096, 11008, 32, 32), 512, 1), "15B": ((40, 5120, 13824, 40, 40), 512, 2),
        "72B": ((80, 8192, 28672, 64, 8), 1024, 10)}


def disttrain_profiles(name: str, *, images: float = 5,
                       hardware: Hardware = A800) -> dict[str, ModuleProfile]:
    """ViT-Huge, Llama 3 and Stable Diffusion 2.1 of MLLM-9B, -15B or -72B. images: of a sample of
    8,192 tokens; the papers do not say how many."""
    (layers, hidden, ffn, heads, groups), side, _ = LLMS[name]
    model = ModelConfig(
        vision=VisionConfig(32, 1280, 5120, 16, patch_size=16, merge_size=1, max_side=side),
        llm=LLMConfig(128256, layers, hidden, ffn, heads, groups))
    made = analytic_profiles(model, {"vision": (side / 16)**2, "llm": SEQUENCE}, hardware,
                             {"vision": images}, ASSUMED)
    flops, kept = GENERATOR[side]
    rate = hardware.peak_flops * ASSUMED["generator"]
    made["generator"] = ModuleProfile(
        "generator", 4, images, lambda tp, rows: 1e3 * rows * flops / (rate * tp), WEIGHT * 1e9,
        GRADIENT * 1e9, OPTIMIZER * 1e9, kept, kept / 8, forward_flops=images * flops)
    return made


FROZEN = {"all modules": ("vision", "llm", "generator"),
          "all but the encoder": ("llm", "generator"), "all but the LLM": ("vision", "generator"),
          "all but the generator": ("vision", "llm")}
