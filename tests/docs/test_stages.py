"""The table of docs/stages.md is what `orchmllm dry-run` predicts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchmllm.tools.predict import dry_run_command
from tests.lib.commands import ROOT

MODELS = ("mllm10b", "mllm84b")


def predicted(overrides: Sequence[str], out: Path) -> list[str]:
    """The cells of a line: of each model, seconds of a step without and with balancing, and how
    many times as fast that is."""
    cells = []
    for name in MODELS:
        assert dry_run_command.main([f"recipes/{name}.yaml", "--ranks", "256", "--json", str(out),
                                     *overrides]) == 0
        found = json.loads(out.read_text())
        before, after = (found["predicted"][how]["step_s"] for how in ("none", "balanced"))
        cells.append(f"{before:.1f} -> {after:.1f} s, {before / after:.2f}x")
    return cells


@pytest.mark.slow
def test_the_predictions_of_the_settings_are_those_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/stages.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| [^|]* \| (none|`model[^|]*`) \| (.*x) \|$", text, re.M)
    assert len(lines) == 5
    for overrides, shown in lines:
        cells = predicted(re.findall(r"`(.*?)`", overrides), tmp_path / "out.json")
        assert shown == " | ".join(cells)
