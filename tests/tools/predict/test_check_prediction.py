"""scripts/check_prediction.py on two ranks: ratios within 10%, and the predicted order of
five settings. Times are CPU seconds of threads, of real runs in turn."""

from __future__ import annotations

import json

import pytest

from tests.lib.commands import python


@pytest.mark.slow
def test_predicted_ratios_and_order_are_the_measured_ones(tmp_path):
    found = tmp_path / "found.json"
    done = python("scripts/check_prediction.py", "--ranks", "2", "--steps", "8", "--json", found)
    assert done.returncode == 0, done.stdout + done.stderr
    two = json.loads(found.read_text())["2"]
    assert len(two["predicted_order"]) == len(two["measured_order"]) == 5 and not two["swapped"]
    assert all(abs(r["predicted"] / r["measured"] - 1) < 0.1 for r in two["ratios"])
