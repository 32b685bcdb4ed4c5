"""The trainers of the client matrix (tests/loader/test_clients.py)."""

from __future__ import annotations

import pytest

from tests.lib.client_cells import PARTS, TRAINERS, cells_of_part, check, fast_cells

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_pairs():
    check(fast_cells(TRAINERS))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("client", TRAINERS)
def test_all(client, part):
    check(cells_of_part(client, part))
