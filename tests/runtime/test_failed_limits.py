"""What ends a run by data.max_failed_in_a_row and data.max_failed_percent: rows and media apart.
What is listed of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchmllm.batch import FailedSegment
from orchmllm.config.recipe import DataConfig, Recipe, RunConfig
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import TEXT, VISION, BatchLayout
from orchmllm.runtime.metrics import read_rows
from orchmllm.runtime.run_state import Incidents, MediaCount, MediaLimitError, Progress

SEGMENTS = {"t": [TEXT], "i": [VISION, TEXT], "r": [TEXT], "m": [VISION, TEXT], "h": [TEXT]}
FAILED = {"r": TEXT, "m": VISION, "h": VISION}  # h: already by its header


def end_of(rows: str) -> str:
    """How a run of one row a step ends, saved and resumed after each. rows: t of text, i with an
    image, r unusable, m or h with an image that cannot be read."""
    config = DataConfig(path="a.jsonl", max_failed_in_a_row=3, max_failed_percent=25.0)
    progress = Progress(1)
    for k, kind in enumerate(rows):
        layout = BatchLayout.from_segments(k, 1, [(m, text_lengths(1)) for m in SEGMENTS[kind]])
        failed = [FailedSegment(0, 0, kind, FAILED[kind])] if kind in FAILED else []
        step = SimpleNamespace(index=k, layout=layout, failed=failed, example_ids=np.array([k]))
        lines = progress.media.count(step, lambda example, segment: {
            "data_file": "a.jsonl", "row": example, "file": ""})
        assert len(lines) == len(failed)
        try:
            progress.media.check(config, lines)
        except MediaLimitError as error:
            return f"after {k + 1}: {error}"
        progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    return "finished"


def counted(rows: str, size: int) -> dict:
    """What a run has counted after steps of so many rows, without the numbers of the steps."""
    found = MediaCount()
    for start in range(0, len(rows), size):
        kinds = rows[start: start + size]
        layout = BatchLayout.concat([BatchLayout.from_segments(start + k, 1, [
            (m, text_lengths(1)) for m in SEGMENTS[kind]]) for k, kind in enumerate(kinds)],
            [len(kinds)])
        failed = [FailedSegment(k, 0, kind, FAILED[kind]) for k, kind in enumerate(kinds)
                  if kind in FAILED]
        lines = found.count(SimpleNamespace(
            index=0, layout=layout, failed=failed[::-1], example_ids=start + np.arange(len(kinds))),
            lambda example, segment: {"data_file": "a.jsonl", "row": example, "file": ""})
        assert [line["example_id"] for line in lines] == [start + f.example for f in failed]
    return asdict(found)


@given(st.text("tirmh", min_size=1, max_size=40))
def test_a_large_step_is_counted_as_its_rows_are_one_by_one(rows):
    alone = counted(rows, 1)
    assert alone["rows"]["failed"] == rows.count("r") and alone["failed"] == len(
        [kind for kind in rows if kind in "mh"])
    assert counted(rows, 3) == counted(rows, len(rows)) == alone
    assert [f"row {k} " in alone["first"]["vision"] for k, kind in enumerate(rows)
            if kind in "mh"][:1] == [True] * bool(alone["failed"])


@pytest.mark.parametrize("rows, end", [
    ("tttr" * 5, "finished"), ("trtrr" * 9, "finished"), ("irmrmi", "finished"),
    ("rrr", "after 3: 3 rows in a row could not be used (data.max_failed_in_a_row); the last: a."),
    ("itrtmtmth", "after 9: 3 media in a row could not be decoded (data.max_failed_in_a_row); the"),
    ("rmrmr", "after 5: 3 rows in a row could not be used (data.max_failed_in_a_row); the last: "),
    ("tttr" * 25 + "irr", "after 102: 26 of 102 rows (25.5%) could not be used, over data.max"),
])
def test_rows_and_media_have_limits_of_their_own(rows, end):
    assert end_of(rows).startswith(end)


def test_a_row_is_listed_once_in_each_file_of_its_source(tmp_path):
    """Also where a run is resumed: the rows of two files of a source have the same numbers."""
    layout = BatchLayout.from_segments(0, 1, [(TEXT, text_lengths(1))])
    for files in ("ab", "bca"):
        recipe = Recipe(run=RunConfig(dir=str(tmp_path)), data=DataConfig(path="d"))
        incidents = Incidents(recipe, writes=True, log=lambda text: None)
        for k, file in enumerate(files):
            incidents.media(SimpleNamespace(
                index=k, layout=layout, failed=[FailedSegment(0, 0, "r", TEXT)],
                example_ids=np.array([k])), MediaCount(), lambda example, segment, file=file: {
                    "source": "d", "data_file": f"{file}.jsonl", "row": 7, "file": ""})
        incidents.close()
    listed = read_rows(tmp_path / "quarantine.jsonl")
    assert [line["data_file"] for line in listed] == ["a.jsonl", "b.jsonl", "c.jsonl"]
