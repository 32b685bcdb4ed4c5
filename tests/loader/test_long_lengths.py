"""Lengths need not be token counts: planning whole examples builds nothing of their size."""

from __future__ import annotations

import pytest

from tests.lib.dropin import Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
UNIT = 10**13  # 8 bytes for each would be more than a process can address


def ids(world, scale: int, dispatch: str) -> list[list[int]]:
    how = {"load": dict(lengths=lambda i: scale * length_of(i)),
           "bytes": dict(length_fn=lambda e: scale * token_count(e))}[dispatch]
    loader = loader_of(Texts(), 4, collate_fn=collate, **how)
    return [batch["ids"].tolist() for batch in loader]


@pytest.mark.parametrize("dispatch", ["load", "bytes"])
def test_the_plan_does_not_grow_with_the_lengths(dispatch):
    assert run_ranks(ids, 3, UNIT, dispatch) == run_ranks(ids, 3, 1000, dispatch)
