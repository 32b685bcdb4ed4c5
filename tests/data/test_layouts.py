"""Layouts of public corpora: read as what they say, or refused with a line that reads them so."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.check_layouts import verdict
from tests.lib.layouts import LAYOUTS

FAST = {  # -> how it is read
    "ScienceQA": "no key", "TRL vision": "no key", "SQuAD": "one line", "MMLU": "one line",
    "SEED-Bench": "one line", "LJSpeech": "one line", "COCO captions": "one line",
    "M3IT": "one line", "Recap-DataComp": "one line", "HellaSwag": "one line", "ESC-50": "one line",
    "OASST": "refused", "CC3M": "refused"}


@pytest.mark.parametrize("name", FAST)
def test_a_layout_is_read_as_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how, more = verdict(LAYOUTS[name], tmp_path)
    assert how == FAST[name], more


@pytest.mark.slow
def test_no_layout_is_read_silently_as_something_else(tmp_path, monkeypatch):
    counts: Counter[str] = Counter()
    for name, layout in LAYOUTS.items():
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        monkeypatch.chdir(folder)
        how, more = verdict(layout, folder)
        assert how in ("no key", "one line", "refused"), (name, more)
        counts[how] += 1
    assert counts["no key"] + counts["one line"] >= 63, counts
