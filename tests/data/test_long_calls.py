"""Calls that take long: workers get them first and in parts, and what comes is the same."""

from __future__ import annotations

import multiprocessing
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from orchmllm.config.recipe import Recipe
from orchmllm.data.loading import long_calls
from orchmllm.data.loading.workers import Workers
from orchmllm.plan.layout import TEXT
from orchmllm.runtime.run_state import Incidents
from tests.data.test_processed import edited, indexed, opened, talk, write_rows
from tests.lib.processors import write_video_settings
from tests.lib.sources import same_example
from tests.lib.videos import write_video

WHAT = {"type": "text", "text": "What"}
GROUPED = {"g": "6", "sc_threshold": "0"}  # 8 groups of 48 frames


@pytest.fixture(params=["qwen2_5_vl", "gemma3"])
def corpus(request, tmp_path):
    """Of a model with videos of its own, and of one that sees their frames as images: rows of a
    video of 8 groups, of one of two, of a damaged one, and of images."""
    messages = [[{"type": "video", "video": f"{name}.mp4", "nframes": 16}, WHAT]
                for name in ("groups", "single", "damaged")]
    write_rows(tmp_path, request.param, [[]] * 3 + [[(40, 60), (30, 30), (56, 28)]])
    if request.param.startswith("qwen"):
        write_video_settings(tmp_path, 14)
    for k, parts in enumerate(messages):
        edited(tmp_path, k, messages=talk(parts, "the red row"))
    for name in ("groups", "damaged"):
        write_video(tmp_path / f"{name}.mp4", count=48, size=(64, 32), options=GROUPED)
    write_video(tmp_path / "single.mp4", count=48, size=(64, 32), options={"g": "1000"})
    path = tmp_path / "damaged.mp4"
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat")
    at += int.from_bytes(data[at - 4: at], "big") * 3 // 4  # in a group of its own
    data[at: at + 40] = bytes(40)
    path.write_bytes(data)
    return tmp_path


def call(rows, i: int) -> tuple:
    media = np.flatnonzero(rows.layout(i).modality != TEXT).tolist()
    return (i,), {"text": True, "segments": media, "row": rows.kept(i, read=True)}


@pytest.fixture
def all_are_long(monkeypatch):
    monkeypatch.setattr(long_calls, "LONG_S", 0.0)
    monkeypatch.setattr(long_calls, "PART_S", 1e-9)
    monkeypatch.setattr(long_calls, "LISTED_S", 0.0)


@pytest.mark.parametrize("opening", [opened, indexed])
def test_parts_are_what_the_whole_call_makes(corpus, opening, all_are_long):
    """Also of a file that fails, which fails once."""
    rows = opening(corpus)
    calls = [call(rows, i) for i in range(4)]
    parts = [long_calls.divided(each, each[1]["row"], 3, 2.0) for each in calls]
    assert all(1 < len(part) <= 12 for part in parts)
    for (_, keys), part in zip(calls, parts, strict=True):
        assert [s for _, some in part for s in some["segments"]] == keys["segments"]
        assert [some["text"] for _, some in part] == [True] + [False] * (len(part) - 1)
    with closing(Workers(rows, 3)) as workers:
        whole = workers.request("load", calls)()
        found = long_calls.Calls(workers, rows, calls, 0, 0).results()
    assert [bool(failed) for _, failed, _ in whole] == [False, False, True, False]
    for (want, failed, _), (got, also_failed, _) in zip(whole, found, strict=True):
        assert failed == also_failed and same_example(want, got)


def test_what_is_short_unknown_or_made_by_one_worker_is_not_divided(corpus):
    rows = opened(corpus)
    short = call(rows, 0)
    row = short[1]["row"]
    assert 0 < long_calls.predicted_s(row, short[1]["segments"])[0].sum() < long_calls.LONG_S
    empty, leaving = ((0,), {**short[1], "segments": []}), ((0,), {**short[1], "encoded": [1]})
    for one, known in ((short, row), (short, None), (empty, row), (leaving, row)):
        assert long_calls.divided(one, known, 2) == [one]


def test_seconds_grow_with_what_has_to_be_decoded(corpus):
    """From the last key frame on, or from the frame before if that is read, too."""
    rows = opened(corpus)
    for i, group in ((0, 6), (1, 24)):  # frames from one key frame to the next
        _, keys = call(rows, i)
        row, segments = keys["row"], keys["segments"]
        seconds, again = long_calls.predicted_s(row, segments)
        height, width = row.sizes[0]
        at = np.array([row.media_at[s].frame.second * 48 / 6 for s in segments])
        place = at % group
        goes_on = np.append(False, at[1:] // group == at[:-1] // group)
        before = np.append(0.0, place[:-1]) * goes_on
        frame_s = height * width * long_calls.DECODED_S
        read_s = height * width * long_calls.READ_S
        assert seconds == pytest.approx((place - before) * frame_s + read_s)
        listed_s = np.append(0.0, np.full(len(at) - 1, 48 * long_calls.LISTED_S))
        assert again == pytest.approx(before * frame_s + listed_s)


def test_parts_are_short_where_that_takes_hardly_longer(corpus, monkeypatch):
    """Each of them would be decoded from the start of its group."""
    monkeypatch.setattr(long_calls, "PART_S", 1e-12)
    for name in ("READ_S", "LISTED_S"):  # of pictures as small as these it is most
        monkeypatch.setattr(long_calls, name, 0.0)
    rows = opened(corpus)
    grouped, single = call(rows, 0), call(rows, 1)
    assert len(long_calls.divided(grouped, grouped[1]["row"], 2, 1.25)) == 8
    assert len(long_calls.divided(single, single[1]["row"], 2)) == 2


class Meeting:
    """The load of a dataset in which the parts of an example wait for each other, and the others
    until all of these have begun."""

    def __init__(self, load, example: int, num_parts: int) -> None:
        self.load, self.example = load, example
        self.parts = multiprocessing.get_context("fork").Barrier(num_parts)
        self.began = multiprocessing.get_context("fork").Event()

    def __call__(self, i, **keys):
        if i == self.example:
            self.parts.wait(300)  # BrokenBarrierError where one worker gets two of them
            self.began.set()
        elif not self.began.is_set():
            raise AssertionError(f"example {i} came before the one that takes long")
        return self.load(i, **keys)


class Recorded(Workers):
    """Which tells what it was asked for."""

    asked = 0

    def request(self, method, calls, *args, **keys):
        self.asked += len(calls)
        return super().request(method, calls, *args, **keys)


def test_no_call_is_asked_for_twice(corpus):
    """A step asks for its calls whenever another one is planned, and when it needs them. They take
    unequally long."""
    rows, wanted = opened(corpus), [3, 0, 3]
    with closing(Recorded(rows, 1)) as workers:
        calls = long_calls.Calls(workers, rows, [call(rows, i) for i in wanted], 0, 0)
        calls.ask()
        assert [value.example_id for value, *_ in calls.results()] == wanted
        assert workers.asked == 3


def test_parts_come_first_and_to_as_many_workers(corpus, all_are_long):
    """The verdict does not depend on how fast anything is: parts that one worker made one after
    the other would wait for each other in vain."""
    rows = opened(corpus)
    calls = [call(rows, i) for i in (3, 1, 3, 0, 3)]
    rows.load = Meeting(rows.load, 0, 2)
    kept = rows.kept
    rows.kept = lambda i, **how: kept(i, **how) if i == 0 else None
    with closing(Workers(rows, 2)) as workers:
        found = long_calls.Calls(workers, rows, calls, 0, 0).results()
    assert [value.example_id for value, *_ in found] == [3, 1, 3, 0, 3]


def test_the_log_says_which_example_a_step_waited_for(tmp_path):
    """Not of the first step, nor of a wait that is short, nor again of one that is as long."""
    said: list[str] = []
    incidents = Incidents(Recipe(), writes=True, log=said.append)
    slowest = np.array([[0.2, 5], [9.0, 7]])
    for index, wait_s in enumerate((30.0, 0.05, 4.0, 5.0)):
        incidents.waited(SimpleNamespace(index=index), 10.0, np.array([[0.0], [wait_s]]), slowest,
                         lambda i: f"data.jsonl, row {i + 1}")
    assert said == [
        "step 2 waited 4 s for data, 40% of its time. data.jsonl, row 8 took longest to load: 9 s "
        "on rank 1; what may help: data.num_workers"]
