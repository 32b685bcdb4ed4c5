"""measure_every of BalancedDataLoader: every Nth step as sampled, and the gain that the time of the
user's loop shows. The clock is the test's own, so that every figure is known."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from orchmllm import BalancedDataLoader
from orchmllm.loader import loop_gain
from orchmllm.loader.setup import make_spec
from tests.lib.dropin import Texts, collate, length_of
from tests.lib.ranks import run_ranks
from tests.loader.test_padding import by_rank, messages, packed

pytestmark = pytest.mark.dist
# CONSTANT_S: of a step, whatever it holds. The time of a step is known some steps later, which have
# to be balanced ones.
EVERY, STEPS, CONSTANT_S = 4, 16, 40


def looped(world, how: dict) -> tuple[list, list, list[str]]:
    """Positions of each batch by rank, without balancing and with it, the second time by two
    loaders of which one goes on where the other stopped; what the log says. The loop takes a second
    for each position, and CONSTANT_S for a step."""
    now, lines, size = [0.0], messages(), STEPS * 8 * how.get("accumulation_steps", 1)
    time.thread_time = lambda: now[0]

    def run(state: dict | None = None, until: int = STEPS, **more) -> tuple[list[int], dict]:
        del lines[:]
        loader = BalancedDataLoader(  # lines of the first step (of `auto` the second) and the last
            Texts(size), 4, shuffle=True, log_every=STEPS - 1 - ("policy" in how), check_loss=False,
            lengths=[length_of(i) for i in range(size)], measure_every=EVERY,
            **{"collate_fn": collate, "policy": "padded", **how, **more})
        if state is not None:
            loader.load_state_dict(state)
        sizes = []
        for batch in loader:
            sizes.append(batch["input_ids"].numel())
            now[0] += sizes[-1] + CONSTANT_S * loader.step.is_last_microbatch
            if loader.step.is_last_microbatch and loader.step.step + 1 == until:
                break
        return sizes, loader.state_dict()

    first, state = run(until=EVERY + 1)
    cut = first + run(state)[0]
    off, (on, _) = run(enabled=False)[0], run()
    assert cut == on
    return by_rank(off).tolist(), by_rank(on).tolist(), [x for x in lines if "imbalance" in x]


def slowest(batches: list, accumulation_steps: int) -> np.ndarray:
    """(steps, 2) of the slowest rank: positions, microbatch by microbatch, and seconds."""
    by_step = np.reshape(batches, (len(batches), STEPS, accumulation_steps))
    return np.stack([by_step.max(axis=0).sum(axis=1),
                     by_step.sum(axis=2).max(axis=0) + CONSTANT_S], axis=1)


@pytest.mark.parametrize("how", [
    {}, pytest.param(dict(prefetch=0, accumulation_steps=2), marks=pytest.mark.slow),
    pytest.param(dict(num_workers=1), marks=pytest.mark.slow),
    pytest.param(dict(collate_fn=packed, policy="auto"), marks=pytest.mark.slow)],
    ids=["", "accumulated in this thread", "with workers", "another cost after the first step"])
def test_the_gain_is_that_of_the_loops_clock(how):
    (off, on, lines), (*_, silent) = run_ranks(looped, 2, how)
    sampled, taken = (slowest(x, how.get("accumulation_steps", 1)) for x in (off, on))
    last, first = range(EVERY - 1, STEPS, EVERY), int("policy" in how)
    assert np.array_equal(taken[last], sampled[last]) and not np.array_equal(taken, sampled)
    gains = []
    for t in last[:-1]:  # the time of the very last is not known before the last line
        before, after = (x[max(first, t - EVERY + 1): t].sum(axis=0) for x in (sampled, taken))
        as_sampled_s = before[0] * sampled[t, 1] / sampled[t, 0]
        gains.append((1 - after[0] / before[0], 1 - after[1] / as_sampled_s))
    predicted, measured = 100 * np.median(gains, axis=0)
    assert abs(predicted - measured) > 0.2  # the constant part is not balanced
    assert len(lines) == 2 and "as measured" not in lines[0] and silent == []
    assert f"; balancing saved {predicted:.1f}% (" in lines[1]
    assert f"%) as predicted, {measured:.1f}% (" in lines[1]
    assert f"compared with steps as sampled: {len(gains)})" in lines[1]


def test_a_step_of_another_policy_is_not_compared(monkeypatch):
    """Its costs are in another unit."""
    monkeypatch.setattr(loop_gain, "costs_of", lambda step: step.costs)
    loop = loop_gain.LoopGain()
    for index, (policy, costs, seconds, as_sampled) in enumerate([
            ("first", (100, 50), 9, False), ("second", (10, 8), 9, False),
            ("second", (10, 8), 12, True)]):
        spec = SimpleNamespace(costs={"llm": policy})
        loop.committed(SimpleNamespace(index=index, plans=[SimpleNamespace(spec=spec)], costs=costs,
                                       as_sampled=as_sampled, loop=(index, seconds)))
    assert loop.gains == [pytest.approx((0.2, 0.25))]


def short(world) -> list[str]:
    """The second step has three examples for four ranks."""
    lines = messages()
    loader = BalancedDataLoader(Texts(7), 1, lengths=[9] * 7, collate_fn=collate, measure_every=2,
                                check_loss=False)
    assert [len(batch["ids"]) for batch in loader] == [1, 1]
    return [line for line in lines if "not measured" in line]


def test_what_cannot_run_as_sampled_is_said():
    with pytest.raises(ValueError, match="measure_every is 1: must be 0 .never. or at least 2"):
        make_spec("none", None, 0, cost=None, ranks_per_node=1, dispatch="load", min_gain=0.0,
                  measure_every=1)
    first, *others = run_ranks(short, 4)
    assert first == ["step 1 is not measured as sampled: a rank would have no example"]
    assert others == [[]] * 3
