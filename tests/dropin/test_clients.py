"""The client matrix: loops and trainers that we did not write, each with everything that a long run
does to a loader. Every cell ends with the weights of one process that trained on the same examples.

The fast cells cover every pair of (client, feature on or off) and of two features; the slow ones
are all (make test-slow GROUP=clients). docs/loader.md holds the table.
"""

from __future__ import annotations

import sys
from itertools import combinations, product

import pytest

from tests.lib.clients import CLIENTS, EPOCHS, FEATURES, Cell, client_table, run_cells
from tests.lib.commands import ROOT
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
# Which features the first of a client's two cells has; the second has the others.
FAST = {"fsdp1": 0b000111, "fsdp2": 0b110010, "ddp": 0b011001, "stateful": 0b100110,
        "accelerate": 0b001110, "fabric": 0b101011, "trainer": 0b010110, "sft": 0b000011,
        "sft_packed": 0b010101, "lightning": 0b001011}
TRAINERS = ("trainer", "sft", "sft_packed", "lightning")
NOT_HERE = ("sft", "sft_packed") if sys.version_info < (3, 11) else ()  # TRL's releases need it


def cell_of(client: str, bits: int) -> Cell:
    return Cell(client, frozenset(f for i, f in enumerate(FEATURES) if bits >> i & 1))


def fast_cells(clients) -> list[Cell]:
    return [cell_of(c, bits) for c in clients for bits in (FAST[c], ~FAST[c])]


def check(cells: list[Cell]) -> None:
    cells = [cell for cell in cells if cell.client not in NOT_HERE]
    for cell, (error, steps) in zip(cells, run_ranks(run_cells, 2, cells)[0], strict=True):
        assert error <= 1e-12, (cell, error)
        if cell.client != "sft_packed":  # whose rows hold several examples
            assert len(steps) == EPOCHS * cell.num_steps, cell
            for epoch in range(EPOCHS):
                seen = steps[epoch * cell.num_steps: (epoch + 1) * cell.num_steps]
                assert {i for s in seen for i in s} == set(range(len(cell.data))), (cell, seen)


def test_the_fast_cells_cover_all_pairs():
    cells = fast_cells(FAST)
    assert set(FAST) == set(CLIENTS)
    for client, feature, on in product(CLIENTS, FEATURES, (False, True)):
        assert any(c.client == client and (feature in c.features) == on for c in cells)
    for (f, g), on, also in product(combinations(FEATURES, 2), (False, True), (False, True)):
        assert any(((f in c.features), (g in c.features)) == (on, also) for c in cells), (f, g)


@pytest.mark.parametrize("clients", [sorted(set(FAST) - set(TRAINERS)), TRAINERS],
                         ids=["loops", "trainers"])
def test_pairs(clients):
    check(fast_cells(clients))


@pytest.mark.slow
@pytest.mark.parametrize("rest", range(4))
@pytest.mark.parametrize("client", CLIENTS)
def test_all(client, rest):
    check([cell_of(client, bits) for bits in range(rest, 2 ** len(FEATURES), 4)])


def unscaled(world) -> float:
    from orchmllm import BalancedDataLoader

    BalancedDataLoader.scale_mean = lambda self, loss, labels, **how: loss
    return run_cells(world, [Cell("fsdp2")])[0][0]


def test_a_mean_for_each_rank_is_found():
    assert min(run_ranks(unscaled, 2)) > 1e-4


def test_the_table_in_the_docs():
    text = (ROOT / "docs/loader.md").read_text()
    assert client_table() in text, f"put this into docs/loader.md:\n{client_table()}"
