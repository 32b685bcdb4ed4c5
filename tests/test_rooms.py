"""The sizes of the three rooms of docs/design.md: what trains, the tools, other papers' schemes."""

from __future__ import annotations

import pytest

from scripts.count_code import count_parts, count_rooms, read_all

# Lines of code. What grows a room says here by how much, and why in its commit.
MOST = {"base": 14_800, "tools": 3_600, "papers": 1_700, "cpp": 1_610}


@pytest.mark.parametrize("room", list(MOST))
def test_a_room_stays_below_its_size(room):
    rooms = count_rooms(count_parts(read_all("")))
    assert rooms.keys() == MOST.keys()
    assert rooms[room] <= MOST[room]
