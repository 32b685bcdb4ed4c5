"""The trainers of the client matrix (tests/loader/test_clients.py)."""

from __future__ import annotations

import pytest

from tests.lib.client_cells import PARTS, TRAINERS, cells_of_part, check

pytestmark = pytest.mark.dist


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("client", TRAINERS)
def test_all(client, part):
    check(cells_of_part(client, part))
