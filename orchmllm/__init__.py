"""OrchMLLM: every phase of multimodal training balanced over the ranks, after sampling.

The names below are what a training loop of your own needs (docs/loader.md); they are imported when
they are first used, so that `import orchmllm` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchmllm.comm.exchange import exchange_rows
    from orchmllm.dropin.adapt import at_least_one, rebalance_encoder
    from orchmllm.dropin.equivalence import check_equivalence
    from orchmllm.dropin.examples import Phase, Segment, StepInfo
    from orchmllm.dropin.loader import BalancedDataLoader, balance
    from orchmllm.dropin.trainers import balance_trainer
    from orchmllm.plan.cost import CostModel

_HOME = {
    "BalancedDataLoader": "orchmllm.dropin.loader",
    "CostModel": "orchmllm.plan.cost",
    "Phase": "orchmllm.dropin.examples",
    "Segment": "orchmllm.dropin.examples",
    "StepInfo": "orchmllm.dropin.examples",
    "at_least_one": "orchmllm.dropin.adapt",
    "balance": "orchmllm.dropin.loader",
    "balance_trainer": "orchmllm.dropin.trainers",
    "check_equivalence": "orchmllm.dropin.equivalence",
    "exchange_rows": "orchmllm.comm.exchange",
    "rebalance_encoder": "orchmllm.dropin.adapt",
}
__all__ = [
    "BalancedDataLoader", "CostModel", "Phase", "Segment", "StepInfo", "at_least_one", "balance",
    "balance_trainer", "check_equivalence", "exchange_rows", "rebalance_encoder",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'orchmllm' has no attribute {name!r}; it exports "
                             f"{', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
