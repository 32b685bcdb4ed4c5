"""What README and docs show is what the commands print, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex

import pytest

from orchmllm.cli import dispatch
from tests.lib.commands import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_shows_what_data_stats_prints(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\n\$ (orchmllm data stats[^\n]*)\n(.*?)\n```", text, re.S)
    assert dispatch(shlex.split(block[1])[1:]) == 0
    assert capsys.readouterr().out.rstrip() == block[2]
    assert text.count("\n") <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:orchmllm|cpp|scripts|tests|examples|recipes|docs)/[\w/.]+\.\w+)`",
                           text):
        assert (ROOT / name).exists(), name
