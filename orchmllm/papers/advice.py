"""Colocated or units: every module on all GPUs under FSDP, or GPUs of their own for each. Modelled:
FLOPs at stated efficiencies, and for both the traffic model of orchmllm.tools.predict.collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from orchmllm.papers.profiles import ModuleProfile
from orchmllm.papers.units import UnitsPlan, plan_units
from orchmllm.tools.predict.collectives import gather_bandwidth
from orchmllm.tools.predict.hardware import Hardware


@dataclass(frozen=True)
class Row:
    """One way to train. ms: of an iteration; bytes: of the fullest GPU; recompute: all activations
    are made again; plan: of units."""

    kind: str
    recompute: bool
    ms: float
    bytes: float
    plan: UnitsPlan | None = None


def recomputed(profiles: Mapping[str, ModuleProfile]) -> dict[str, ModuleProfile]:
    """The same modules with every layer's activations made again in the backward pass."""
    return {n: replace(p, recompute=True) for n, p in profiles.items()}


def colocated(profiles: Mapping[str, ModuleProfile], *, num_gpus: int, global_batch: int,
              hardware: Hardware, gpu_bytes: float) -> Row:
    """FSDP over all GPUs, balanced, whole samples, in as few microbatches as fit: per module and
    pass the longer of computing and of gathering its weights (and reducing its gradients), which
    overlap. What no microbatch of one sample makes fit is told with its bytes."""
    share, bandwidth = ceil(global_batch / num_gpus), gather_bandwidth(
        num_gpus, hardware, num_gpus)
    state = sum(sum(p.state_bytes) for p in profiles.values()) / num_gpus
    # Two gathered layers and the gradients of one.
    state += max((2 * p.weight_bytes + p.trains * p.gradient_bytes) / p.layers
                 for p in profiles.values())
    kept = sum(p.kept_bytes for p in profiles.values())
    fitting = min(share, max(1, int((gpu_bytes - state) / kept)))
    total, count = 0.0, ceil(share / fitting)
    for p in profiles.values():
        forward = share / count * p.forward_ms(1)
        gather, reduce = (1e3 * x / bandwidth for x in (p.weight_bytes,
                                                        p.trains * p.gradient_bytes))
        total += max(forward, gather)
        if p.backward_units:
            total += max(forward * p.backward_units, gather + reduce)
    return Row("colocated", any(p.recompute for p in profiles.values()), total * count,
               state + fitting * kept)


def in_units(profiles: Mapping[str, ModuleProfile], *, num_gpus: int, global_batch: int,
             hardware: Hardware, gpu_bytes: float) -> Row:
    """The fastest units, and after the pipeline the ZeRO-1 exchange of each unit over its dp:
    gradients reduced, weights gathered, each GPU through its own link."""
    plan = plan_units(profiles, num_gpus=num_gpus, global_batch=global_batch, gpu_bytes=gpu_bytes)
    link = hardware.network_bandwidth * hardware.network_efficiency
    exchange = max(1e3 * (p.trains * (p.gradient_bytes + p.weight_bytes)) / (u.tp * u.pp)
                   * (u.dp - 1) / u.dp / link
                   for p, u in zip(profiles.values(), plan.units.values(), strict=True))
    return Row("units", any(p.recompute for p in profiles.values()), plan.simulated_ms + exchange,
               max(u.bytes for u in plan.units.values()), plan)


def rows(profiles: Mapping[str, ModuleProfile], *, num_gpus: int, global_batch: int,
         hardware: Hardware, gpu_bytes: float) -> list[Row]:
    """Both ways, without and with recomputation, those that fit; the fastest first."""
    out = []
    for kind in (profiles, recomputed(profiles)):
        common = {"num_gpus": num_gpus, "global_batch": global_batch, "hardware": hardware,
                  "gpu_bytes": gpu_bytes}
        out.append(colocated(kind, **common))
        with suppress(ValueError):  # no units fit
            out.append(in_units(kind, **common))
    return sorted((r for r in out if r.bytes <= gpu_bytes), key=lambda r: r.ms)


def ratio(found: list[Row]) -> float:
    """Time of the best units over that of the best colocated run: above 1 colocated wins; inf if no
    units fit, 0 if colocated does not, nan if neither."""
    best = {kind: min((r.ms for r in found if r.kind == kind), default=np.inf)
            for kind in ("units", "colocated")}
    if np.isinf(best["units"]) and np.isinf(best["colocated"]):
        return float("nan")
    return best["units"] / best["colocated"]
