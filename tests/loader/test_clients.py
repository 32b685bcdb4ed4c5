"""The client matrix: loops and trainers that we did not write, each with everything that a long run
does to a loader. Every cell ends with the weights of one process that trained on the same examples.

The fast cells cover every pair of (client, feature on or off) and of two features; the slow ones
are all (make test-slow GROUP=clients, and GROUP=trainers for those of test_trainer_clients.py).
docs/loader_cases.md holds the table.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.lib.client_cells import FAST, LOOPS, PARTS, cells_of_part, check, fast_cells
from tests.lib.clients import CLIENTS, FEATURES, IN_SHARDS, Cell, client_table, run_cells
from tests.lib.commands import ROOT
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


def test_the_fast_cells_cover_all_pairs():
    cells = fast_cells(FAST)
    assert set(FAST) == set(CLIENTS)
    for client, feature, on in product(CLIENTS, FEATURES, (False, True)):
        if not (on and feature == "resumed" and client in IN_SHARDS):  # refused by transformers
            assert any(c.client == client and (feature in c.features) == on for c in cells)
    for (f, g), on, also in product(combinations(FEATURES, 2), (False, True), (False, True)):
        assert any(((f in c.features), (g in c.features)) == (on, also) for c in cells), (f, g)


@pytest.mark.slow
def test_pairs():
    check(fast_cells(LOOPS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("client", LOOPS)
def test_all(client, part):
    check(cells_of_part(client, part))


def unscaled(world) -> float:
    from orchmllm import BalancedDataLoader

    BalancedDataLoader.scale_mean = lambda self, loss, labels, **how: loss
    return run_cells(world, [Cell("fsdp2")])[0][0]


def test_a_mean_for_each_rank_is_found():
    assert min(run_ranks(unscaled, 2)) > 1e-4


def test_the_table_in_the_docs():
    text = (ROOT / "docs/loader_cases.md").read_text()
    assert client_table() in text, f"put this into docs/loader_cases.md:\n{client_table()}"
