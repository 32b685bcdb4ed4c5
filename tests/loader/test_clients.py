"""The client matrix: loops and trainers that we did not write, each with everything that a long run
does to a loader. Every cell ends with the weights of one process that trained on the same examples.

All cells are slow (make test-slow GROUP=clients, and GROUP=trainers for those of
test_trainer_clients.py). docs/loader_cases.md holds the table.
"""

from __future__ import annotations

import pytest

from tests.lib.client_cells import LOOPS, PARTS, cells_of_part, check
from tests.lib.clients import Cell, client_table, run_cells
from tests.lib.commands import ROOT
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


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
