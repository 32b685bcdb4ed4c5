"""Lengths need not be token counts: planning whole examples builds nothing of their size. A
column of a table holds them by place."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.lib.dropin import Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
UNIT = 10**13  # 8 bytes for each would be more than a process can address


def ids(world) -> list[list[list[int]]]:
    """Of the batches, by dispatch and by unit."""
    out = []
    for scale in (UNIT, 1000):
        for how in (dict(lengths=lambda i, scale=scale: scale * length_of(i)),
                    dict(length_fn=lambda e, scale=scale: scale * token_count(e))):
            loader = loader_of(Texts(), 4, collate_fn=collate, **how)
            out.append([batch["ids"].tolist() for batch in loader])
    lengths = [length_of(i) for i in range(len(Texts()))]
    for given in (lengths, pd.Series(lengths, index=range(len(lengths))[::-1])):
        loader = loader_of(Texts(), 4, collate_fn=collate, lengths=given)
        out.append([batch["ids"].tolist() for batch in loader])
    return out


def test_the_plan_does_not_grow_with_the_lengths():
    for load, by_bytes, load_of_short, bytes_of_short, listed, sorted_table in run_ranks(ids, 3):
        assert (load, by_bytes) == (load_of_short, bytes_of_short)
        assert load == listed == sorted_table
