"""Run folders with logs of our own, and what `orchmllm report` makes of them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from orchmllm.cli import dispatch
from orchmllm.plan.assign import PHASES
from tests.lib.rows import a_row


def measured_row(step: int, of: int | None = None, **changes) -> dict:
    """of: the step whose times it has; they grow with it."""
    of = step if of is None else of
    slow = {"rank": of % 2, "positions": 90 + of, "example_ids": [1000 + of, 7], "lengths": [50, 3]}
    return {"schema": 1, **a_row(step), "measured": {
        "step": of, "imbalance": dict.fromkeys(PHASES, 1.25),
        "slowest_s": {**dict.fromkeys(PHASES, 0.1 * (1 + of)), "exchange": 0.01},
        "slowest": dict.fromkeys(PHASES, slow)}, **changes}


def write(folder: Path, rows: list[dict], tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(r) + "\n" for r in rows)
    (folder / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


class Page(HTMLParser):
    """Checks that every element is closed, and keeps the cells of tables."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.rows, self.text = [], [], ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def report(folder: Path, *more: str) -> tuple[str, Page]:
    assert dispatch(["report", str(folder), *more]) == 0
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|https?:|src=|url\(|@import", html)  # nothing from elsewhere
    for points in re.findall(r'points="([^"]*)"', html):
        xy = np.array([p.split(",") for p in points.split()], float)
        assert (xy >= 0).all() and (xy[:, 0] <= 360).all() and (xy[:, 1] <= 190).all()
    return html, Page(html)
