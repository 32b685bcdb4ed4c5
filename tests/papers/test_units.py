"""plan_units: equal to brute force, within memory by an independent count, monotone, honest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchmllm.papers.profiles import with_frozen
from orchmllm.papers.units import plan_units
from tests.papers.modules import brute_force, iteration, plan_bytes, random_modules

TPS = (1, 2)


def small(seed: int):
    """(profiles, GPUs, global batch, GPU memory) of a small instance; memory binds in many."""
    rng = np.random.default_rng(100 + seed)
    return (random_modules(seed, count=int(rng.integers(2, 4))), int(rng.integers(4, 13)),
            int(rng.choice([4, 6, 8, 12])), float(rng.uniform(15, 60)))


@pytest.mark.parametrize("seed", range(24))
def test_exact_equals_brute_force(seed):
    profiles, gpus, batch, room = small(seed)
    if seed % 3 == 0:
        profiles = with_frozen(profiles, list(profiles)[:1 + seed % 2])
    best = brute_force(profiles, gpus, batch, room, TPS)
    if best is None:
        with pytest.raises(ValueError, match="no plan"):
            plan_units(profiles, num_gpus=gpus, global_batch=batch, gpu_bytes=room, tp_sizes=TPS)
        return
    plan = plan_units(profiles, num_gpus=gpus, global_batch=batch, gpu_bytes=room, tp_sizes=TPS)
    assert plan.iteration_ms == pytest.approx(best[0], rel=1e-9) and plan.gpus == best[1]
    check(plan, profiles, gpus, batch, room)


def check(plan, profiles, gpus, batch, room):
    """The plan is whole, fits, and takes what it says."""
    choice = [(u.tp, u.dp, u.pp) for u in plan.units.values()]
    dp = plan.units["llm"].dp
    assert plan.gpus <= gpus and plan.num_microbatches * dp == batch
    held = plan_bytes(profiles, dp, batch, choice)
    assert max(held) <= room * (1 + 1e-12)
    assert [u.bytes for u in plan.units.values()] == pytest.approx(held)
    assert plan.iteration_ms == pytest.approx(iteration(profiles, dp, batch, choice))
    assert 0.5 * plan.iteration_ms <= plan.simulated_ms <= plan.iteration_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_other_methods_are_sound_and_no_faster(seed):
    profiles, _, batch, _ = small(seed)
    room, gpus = 200.0, 24
    exact = plan_units(profiles, num_gpus=gpus, global_batch=batch, gpu_bytes=room, tp_sizes=TPS)
    for method in ("ratio", "convex"):
        other = plan_units(profiles, num_gpus=gpus, global_batch=batch, gpu_bytes=room,
                           tp_sizes=TPS, method=method)
        check(other, profiles, gpus, batch, room)
        assert other.iteration_ms >= exact.iteration_ms * (1 - 1e-9), method
        if method == "convex":
            assert other.relaxed_ms <= exact.iteration_ms * (1 + 1e-6)
    rigid = plan_units(profiles, num_gpus=gpus, global_batch=batch, gpu_bytes=room, tp_sizes=TPS,
                       method="megatron")
    assert {(u.tp, u.dp) for n, u in rigid.units.items() if n != "llm"} == {
        (1, 2 * rigid.units["llm"].dp)}


def test_more_gpus_are_never_slower():
    profiles = random_modules(5)
    times = [plan_units(profiles, num_gpus=n, global_batch=24, gpu_bytes=60).iteration_ms
             for n in (8, 12, 16, 24, 48)]
    assert times == sorted(times, reverse=True) and times[-1] < times[0]


def test_too_little_names_module_and_bytes():
    profiles = random_modules(1)
    profiles["generator"] = replace(profiles["generator"], weight_bytes=100e9, layers=1)
    with pytest.raises(ValueError, match=r"module 'generator' needs \d+\.\d\d GB more on a GPU"):
        plan_units(profiles, num_gpus=4, global_batch=4, gpu_bytes=16e9, tp_sizes=(1,))
    tight = {n: replace(p, weight_bytes=30.0, layers=4) for n, p in random_modules(1).items()}
    with pytest.raises(ValueError, match="every module fits alone, but not all"):
        plan_units(tight, num_gpus=6, global_batch=4, gpu_bytes=24.0, tp_sizes=(1,))


def test_frozen_work():
    """Forward is one unit, the gradient of the input another, that of the weights a third."""
    profiles = random_modules(0)
    units = {n: [1 + p.backward_units for p in with_frozen(profiles, f).values()]
             for n, f in {"none": (), "encoder": ("encoder",), "all": tuple(profiles)}.items()}
    assert units == {"none": [3, 3, 3], "encoder": [1, 3, 3], "all": [1, 2, 2]}
    with pytest.raises(ValueError, match="no module 'vision'"):
        with_frozen(profiles, ["vision"])


@pytest.mark.parametrize("change, message", [
    ({"method": "best"}, "choose one of exact"), ({"num_gpus": 2}, "at least 3")])
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        plan_units(random_modules(0), **{
            "num_gpus": 8, "global_batch": 4, "gpu_bytes": 50} | change)
