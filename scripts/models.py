"""The models of OrchMLLM's Table 1, as the repository's recipes have them."""

from __future__ import annotations

from pathlib import Path

from orchmllm.config.model import ModelConfig

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
MODELS = {size: ModelConfig(config=str(CONFIGS / f"mllm{size}")) for size in ("10b", "18b", "84b")}
