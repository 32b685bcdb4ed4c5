"""The cells of the client matrix: a client with features on or off, and the check of each."""

from __future__ import annotations

from tests.lib.clients import CLIENTS, EPOCHS, FEATURES, IN_SHARDS, Cell, run_cells
from tests.lib.ranks import run_ranks

TRAINERS = ("trainer", "trainer_fsdp2", "sft", "sft_fsdp2", "sft_packed", "lightning",
            "lightning_fsdp2")
LOOPS = tuple(sorted(set(CLIENTS) - set(TRAINERS)))
PARTS = 4  # of the cells of a client


def cells_of_part(client: str, part: int) -> list[Cell]:
    return [Cell(client, frozenset(f for i, f in enumerate(FEATURES) if bits >> i & 1))
            for bits in range(part, 2 ** len(FEATURES), PARTS)]


def check(cells: list[Cell]) -> None:
    """Each ends with the weights of one process, and every epoch has every example."""
    cells = [cell for cell in cells if not (cell.resumed and cell.client in IN_SHARDS)]
    for cell, (error, steps) in zip(cells, run_ranks(run_cells, 2, cells)[0], strict=True):
        assert error <= 1e-12, (cell, error)
        if cell.client != "sft_packed":  # whose rows hold several examples
            assert len(steps) == EPOCHS * cell.num_steps, cell
            for epoch in range(EPOCHS):
                seen = steps[epoch * cell.num_steps: (epoch + 1) * cell.num_steps]
                assert {i for s in seen for i in s} == set(range(len(cell.data))), (cell, seen)
