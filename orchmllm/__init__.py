"""OrchMLLM: every phase of multimodal training balanced over the ranks, after sampling.

The names below are what a training loop of your own needs (docs/loader.md); they are imported when
they are first used, so that `import orchmllm` costs nothing and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchmllm.comm.exchange import exchange_rows
    from orchmllm.dropin.adapt import check_equivalence, scale_loss
    from orchmllm.dropin.encoders.hook import balance_encoders
    from orchmllm.dropin.encoders.items import Masked, Packed, Rows
    from orchmllm.dropin.encoders.spec import Encoder
    from orchmllm.dropin.examples import Phase, Segment, StepInfo
    from orchmllm.dropin.loader import BalancedDataLoader
    from orchmllm.plan.cost import CostModel

_HOME = {
    "BalancedDataLoader": "orchmllm.dropin.loader",
    "CostModel": "orchmllm.plan.cost",
    "Encoder": "orchmllm.dropin.encoders.spec",
    "Masked": "orchmllm.dropin.encoders.items",
    "Packed": "orchmllm.dropin.encoders.items",
    "Phase": "orchmllm.dropin.examples",
    "Rows": "orchmllm.dropin.encoders.items",
    "Segment": "orchmllm.dropin.examples",
    "StepInfo": "orchmllm.dropin.examples",
    "balance_encoders": "orchmllm.dropin.encoders.hook",
    "check_equivalence": "orchmllm.dropin.adapt",
    "exchange_rows": "orchmllm.comm.exchange",
    "scale_loss": "orchmllm.dropin.adapt",
}
__all__ = [
    "BalancedDataLoader", "CostModel", "Encoder", "Masked", "Packed", "Phase", "Rows", "Segment",
    "StepInfo", "balance_encoders", "check_equivalence", "exchange_rows", "scale_loss",
]
_GONE = {"rebalance_encoder": "balance_encoders(model), called once before the loop",
         "at_least_one": "balance_encoders(model), which runs a placeholder where it is needed"}


def __getattr__(name: str) -> object:
    if name in _GONE:  # an AttributeError would lose its text in `from orchmllm import ...`
        raise ImportError(f"orchmllm.{name} is gone: use orchmllm.{_GONE[name]} "
                          "(docs/encoders.md)")
    if name not in _HOME:
        raise AttributeError(f"module 'orchmllm' has no attribute {name!r}; it exports "
                             f"{', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
