"""The tables of docs/schemes.md and docs/scale.md are what the commands say."""

from __future__ import annotations

import pytest

from scripts.make_paper_tables import DOCS, TABLES, made, main


@pytest.mark.slow
def test_the_pages_are_what_the_commands_say(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_made_anew_between_its_markers(monkeypatch):
    text = "\n".join((DOCS / f"{name}.md").read_text(encoding="utf-8")
                     for name in ("schemes", "scale"))
    for name in TABLES:
        monkeypatch.setitem(TABLES, name, lambda name=name: f"| {name} |")
    new = made(text)
    for name in TABLES:
        assert new.count(f": {name} -->\n| {name} |\n<!-- End -->") == 1
    assert made(new) == new != text
