"""OrchMLLM: every phase of multimodal training balanced over the ranks, after sampling.

The names below are what a training loop of your own needs (docs/loader.md); they are imported when
they are first used, so that `import orchmllm` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchmllm.adapt import at_least_one, check_equivalence, rebalance_encoder, scale_loss
    from orchmllm.comm import exchange_rows
    from orchmllm.data.batches import Phase, Segment, StepInfo
    from orchmllm.data.loader import BalancedDataLoader
    from orchmllm.plan.cost import CostModel

_HOME = {
    "BalancedDataLoader": "orchmllm.data.loader",
    "CostModel": "orchmllm.plan.cost",
    "Phase": "orchmllm.data.batches",
    "Segment": "orchmllm.data.batches",
    "StepInfo": "orchmllm.data.batches",
    "at_least_one": "orchmllm.adapt",
    "check_equivalence": "orchmllm.adapt",
    "exchange_rows": "orchmllm.comm",
    "rebalance_encoder": "orchmllm.adapt",
    "scale_loss": "orchmllm.adapt",
}
__all__ = [
    "BalancedDataLoader", "CostModel", "Phase", "Segment", "StepInfo", "at_least_one",
    "check_equivalence", "exchange_rows", "rebalance_encoder", "scale_loss",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'orchmllm' has no attribute {name!r}; it exports "
                             f"{', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
