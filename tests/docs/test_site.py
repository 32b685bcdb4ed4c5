"""The site of docs/: every page is in its navigation, and it builds without a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml

from scripts.make_readme_picture import main as draw
from tests.lib.commands import ROOT


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav)
            for page in pages(part)]


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [p for p in pages(config["nav"]) if not p.startswith("repository/")]
    there = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there)


@pytest.mark.slow
def test_the_picture_of_the_readme_is_drawn(tmp_path, capsys):
    assert draw(["--out", str(tmp_path / "step.png")]) == 0
    assert "64 ranks, as sampled 1.26x a balanced step" in capsys.readouterr().out
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    text = (tmp_path / "site/api.html").read_text(encoding="utf-8")
    assert "<li><code>min_gain</code>: steps predicted to gain less" in text
    assert (tmp_path / "site/repository/CONTRIBUTING.html").is_file()
    assert (tmp_path / "site/search/search_index.js").is_file()  # that of pages from the disk
    assert 'src="iframe-worker.js"' in text and "unpkg.com" not in text
