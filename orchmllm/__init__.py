"""OrchMLLM: every phase of multimodal training balanced over the ranks, after sampling.

The names below are what a training loop of your own needs (docs/loader.md); they are imported when
they are first used, so that `import orchmllm` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from orchmllm.composition import register_when_imported

if TYPE_CHECKING:
    from orchmllm.encoders.hook import balance_encoders
    from orchmllm.encoders.items import Masked, Packed, Rows
    from orchmllm.encoders.spec import Encoder
    from orchmllm.loader.costs import cost_of
    from orchmllm.loader.equivalence import check_equivalence
    from orchmllm.loader.lengths import lengths_of
    from orchmllm.loader.loader import BalancedDataLoader
    from orchmllm.loader.loss import StepInfo
    from orchmllm.loader.trainers import balance, balance_trainer
    from orchmllm.plan.batches import plan_batches
    from orchmllm.plan.cost import CostModel

_HOME = {
    "BalancedDataLoader": "orchmllm.loader.loader",
    "CostModel": "orchmllm.plan.cost",
    "Encoder": "orchmllm.encoders.spec",
    "Masked": "orchmllm.encoders.items",
    "Packed": "orchmllm.encoders.items",
    "Rows": "orchmllm.encoders.items",
    "StepInfo": "orchmllm.loader.loss",
    "balance": "orchmllm.loader.trainers",
    "balance_encoders": "orchmllm.encoders.hook",
    "balance_trainer": "orchmllm.loader.trainers",
    "check_equivalence": "orchmllm.loader.equivalence",
    "cost_of": "orchmllm.loader.costs",
    "lengths_of": "orchmllm.loader.lengths",
    "plan_batches": "orchmllm.plan.batches",
}
__all__ = [
    "BalancedDataLoader", "CostModel", "Encoder", "Masked", "Packed", "Rows", "StepInfo", "balance",
    "balance_encoders", "balance_trainer", "check_equivalence", "cost_of",
    "lengths_of", "plan_batches",
]

register_when_imported()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'orchmllm' has no attribute {name!r}; it exports "
                             f"{', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
