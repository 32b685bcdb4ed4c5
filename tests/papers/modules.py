"""Small modules for tests of the planner, and an independent count of their plans."""

from __future__ import annotations

from itertools import product
from math import ceil

import numpy as np

from orchmllm.papers.profiles import ModuleProfile


def random_modules(seed: int, count: int = 3) -> dict[str, ModuleProfile]:
    """An encoder, an LLM and (count 3) a generator with random times and memory."""
    rng = np.random.default_rng(seed)
    out = {}
    for name in ("encoder", "llm", "generator")[:count]:
        work, comm = rng.uniform(1, 10) * (4 if name == "llm" else 1), rng.uniform(0, 0.5)
        out[name] = ModuleProfile(
            name, int(rng.integers(1, 9)), 1.0,
            lambda tp, w=work, c=comm: w / tp + c * (tp > 1),
            rng.uniform(1, 8), rng.uniform(1, 8), rng.uniform(2, 16), rng.uniform(1, 6),
            rng.uniform(0.1, 0.4), forward_flops=work)
    return out


def stage_bytes(p: ModuleProfile, tp: int, dp: int, pp: int, dp_llm: int, in_flight: int) -> float:
    """Of the first stage of a unit, from the definition: weights and gradients divide over tp and
    stages, the optimizer also over dp (ZeRO-1), activations of in_flight microbatches of
    dp_llm / dp samples over tp and stages; whole layers."""
    layers = ceil(p.layers / pp)
    weights = (p.weight_bytes + (p.gradient_bytes if p.trains else 0)) * layers / p.layers / tp
    optimizer = (p.optimizer_bytes if p.trains else 0) * layers / p.layers / tp / dp
    if not p.input_gradient:
        kept = p.boundary_bytes_per_row
    elif p.recompute:
        kept = p.layers * p.boundary_bytes_per_row
    else:
        kept = p.activation_bytes_per_row
    return weights + optimizer + in_flight * dp_llm / dp * p.rows * kept * layers / p.layers / tp


def plan_bytes(profiles, dp_llm: int, batch: int, choice) -> list[float]:
    """(modules,) of each unit's first stage; choice: (tp, dp, pp) per module."""
    out = []
    for k, (p, (tp, dp, pp)) in enumerate(zip(profiles.values(), choice, strict=True)):
        in_flight = min(batch // dp_llm, sum(c[2] for c in choice[k:]))
        out.append(stage_bytes(p, tp, dp, pp, dp_llm, in_flight))
    return out


def iteration(profiles, dp_llm: int, batch: int, choice) -> float:
    warm, slowest = 0.0, 0.0
    for p, (tp, dp, pp) in zip(profiles.values(), choice, strict=True):
        total = p.forward_ms(tp) * (1 + p.input_gradient + p.trains
                                    + (p.recompute and p.input_gradient))
        warm += dp_llm / dp * total
        slowest = max(slowest, dp_llm / dp * total * ceil(p.layers / pp) / p.layers)
    return warm + (batch // dp_llm - 1) * slowest


def brute_force(profiles, num_gpus: int, batch: int, gpu_bytes: float, tps) -> tuple | None:
    """(iteration, fewest GPUs at that iteration) over every tp, dp and pp; None if nothing fits."""
    plans = []
    for dp_llm in (d for d in range(1, batch + 1) if batch % d == 0):
        choices = []
        for name, p in profiles.items():
            dps = [dp_llm] if name == "llm" else [d for d in range(1, dp_llm + 1)
                                                  if dp_llm % d == 0]
            choices.append([c for c in product(tps, dps, range(1, p.layers + 1))
                            if np.prod(c) < num_gpus])
        for choice in product(*choices):
            gpus = sum(int(np.prod(c)) for c in choice)
            if gpus <= num_gpus and max(
                    plan_bytes(profiles, dp_llm, batch, choice)) <= gpu_bytes:
                plans.append((iteration(profiles, dp_llm, batch, choice), gpus))
    if not plans:
        return None
    best = min(p[0] for p in plans)
    return best, min(g for t, g in plans if t <= best * (1 + 1e-9))
