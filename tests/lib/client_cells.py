"""The cells of the client matrix: a client with features on or off, and the check of each."""

from __future__ import annotations

from tests.lib.clients import EPOCHS, FEATURES, IN_SHARDS, Cell, run_cells
from tests.lib.ranks import run_ranks

# Which features the first of a client's two cells has; the second has the others.
FAST = {"fsdp1": 0b000111, "fsdp2": 0b110010, "ddp": 0b011001, "stateful": 0b100110,
        "accelerate": 0b001110, "fabric": 0b101011, "trainer": 0b010110, "sft": 0b000011,
        "sft_packed": 0b010101, "lightning": 0b001011, "trainer_fsdp2": 0b010100,
        "sft_fsdp2": 0b100001, "lightning_fsdp2": 0b010110}
TRAINERS = ("trainer", "trainer_fsdp2", "sft", "sft_fsdp2", "sft_packed", "lightning",
            "lightning_fsdp2")
LOOPS = tuple(sorted(set(FAST) - set(TRAINERS)))
PARTS = 4  # of the cells of a client


def cell_of(client: str, bits: int) -> Cell:
    return Cell(client, frozenset(f for i, f in enumerate(FEATURES) if bits >> i & 1))


def fast_cells(clients) -> list[Cell]:
    cells = [cell_of(c, bits) for c in clients for bits in (FAST[c], ~FAST[c])]
    return [Cell(c.client, c.features - {"resumed"}) if c.client in IN_SHARDS else c for c in cells]


def cells_of_part(client: str, part: int) -> list[Cell]:
    return [cell_of(client, bits) for bits in range(part, 2 ** len(FEATURES), PARTS)]


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
