"""The examples of docs/loader.md run, and balancing changes nothing but the time."""

from __future__ import annotations

import difflib

import pytest

from tests.lib.clients import as_torchrun
from tests.lib.examples import EXAMPLES, load
from tests.lib.ranks import run_ranks


def run(world, name: str, *args):
    with as_torchrun(world):
        return load(name).main(*args)


def test_five_lines_apart():
    plain, balanced = ((EXAMPLES / f"fsdp_{n}.py").read_text().split('"""', 2)[2].splitlines()
                       for n in ("plain", "balanced"))
    changed = [line for line in difflib.ndiff(plain, balanced) if line[0] in "+-" and line[2:]]
    assert sum(line[0] == "+" for line in changed) <= 5
    assert sum(line[0] == "-" for line in changed) <= 5


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_balanced_losses_are_the_plain_ones(num_ranks):
    plain = run_ranks(run, num_ranks, "fsdp_plain", 20)
    balanced = run_ranks(run, num_ranks, "fsdp_balanced", 20)
    assert len(plain[0]) == 20
    assert balanced[0] == pytest.approx(plain[0], rel=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("name", [
    "with_accelerate", "stateful",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "fsdp1", "with_lightning", "hf_trainer"))])
def test_off_equals_on(name):
    """Each example's main(balance) returns its losses (or what it compares)."""
    off = run_ranks(run, 2, name, False)
    on = run_ranks(run, 2, name, True)
    assert on[0] == pytest.approx(off[0], rel=1e-6) and len(on[0]) >= 20


@pytest.mark.dist
@pytest.mark.slow
def test_qwen2_vl_is_balanced_in_both_phases():
    """Stock transformers code: the same losses, and the imbalance of both phases goes."""
    off, on = (run_ranks(run, 2, "qwen2_vl", balance)[0] for balance in (False, True))
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-6) and len(on["losses"]) == 20
    for phase in ("vision", "llm"):
        before, after = on["imbalance"][phase]
        assert after < 1.05 < before
