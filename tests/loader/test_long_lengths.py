"""Lengths need not be token counts: planning whole examples builds nothing of their size."""

from __future__ import annotations

import pytest

from tests.lib.dropin import Texts, collate, length_of, loader_of
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
UNIT = 10**13  # 8 bytes for each would be more than a process can address


def ids(world, scale: int, dispatch: str) -> list[list[int]]:
    loader = loader_of(Texts(), 4, collate_fn=collate, dispatch=dispatch,
                       lengths=[scale * length_of(i) for i in range(48)])
    return [batch["ids"].tolist() for batch in loader]


@pytest.mark.parametrize("dispatch", ["load", "bytes"])
def test_the_plan_does_not_grow_with_the_lengths(dispatch):
    assert run_ranks(ids, 3, UNIT, dispatch) == run_ranks(ids, 3, 1000, dispatch)
