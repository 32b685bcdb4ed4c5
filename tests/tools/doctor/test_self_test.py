"""`orchmllm doctor --self-test` on two gloo ranks passes, and fails where an exchange is wrong."""

from __future__ import annotations

import pytest
import torch

from orchmllm.encoders import planned
from orchmllm.models import fused
from orchmllm.tools.doctor import self_test
from tests.lib.commands import python
from tests.lib.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.dist


def all_tests(world) -> list[str]:
    tests = (self_test.gradients, self_test.no_media, self_test.half_precision,
             self_test.save_and_resume)
    return [name for test in tests for name in test(world)]


@pytest.mark.slow
def test_it_passes_on_two_ranks():
    said, other = run_ranks(all_tests, 2)
    assert said == other and len(said) == 4 + 3


def broken(world) -> None:
    """Features come back in the wrong order where they are exchanged."""
    right = planned.exchange_rows

    def wrong(x, exchange, group):
        out = right(x, exchange, group)
        return out.flip(0) if exchange.moves else out

    planned.exchange_rows = wrong
    for _ in self_test.gradients(world):
        pass


def test_a_wrong_exchange_is_found():
    with pytest.raises(RankFailure, match="the gradient of .* differs by .* of its size"):
        run_ranks(broken, 2)


def broken_in_half_precision(world) -> None:
    """Rotated queries and keys have no gradient, which is a small share of all."""
    right = fused.Rotate.backward
    fused.Rotate.backward = staticmethod(lambda ctx, grad: (
        right(ctx, grad)[0] * (grad.dtype is not torch.bfloat16), None, None, None))
    for _ in self_test.half_precision(world):
        pass


def test_a_gradient_that_is_lost_in_half_precision_is_found():
    with pytest.raises(RankFailure, match="the gradient of .*[qk]_proj.* differs by 1.0e.00 of"):
        run_ranks(broken_in_half_precision, 1)


@pytest.mark.slow
def test_the_command_under_torchrun():
    done = python("-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "orchmllm",
                  "doctor", "--self-test", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all(line.startswith("ok    ") for line in lines[:-1]), lines
    assert lines[-1].startswith("self-test on 4 ranks of cpu: no failure")
