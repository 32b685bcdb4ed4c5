"""Dangerous changes of the package are noticed by its fast tests (tests/lib/mutations.py)."""

from __future__ import annotations

import pytest

from tests.lib.commands import ROOT
from tests.lib.mutations import COMM, DATA, MUTATIONS, RUNTIME, run


def test_every_row_is_of_a_text_that_is_there_once():
    for m in MUTATIONS:
        assert (ROOT / m.file).read_text(encoding="utf-8").count(m.old) == 1, m
        assert m.new != m.old and all((ROOT / t.split("::")[0]).is_file() for t in m.tests.split())
    inside = sum(m.file.startswith((COMM, DATA, RUNTIME)) for m in MUTATIONS)
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 40 and inside >= 20


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_they_are_noticed():
    missed = [m.name for m, found in run([]) if not found]
    assert len(MUTATIONS) - len(missed) >= 34, missed
