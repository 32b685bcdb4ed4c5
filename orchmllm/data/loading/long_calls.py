"""Calls of a dataset's `load` that take long: workers get them early, each alone, and in parts.

How long a call takes is predicted from headers. One that takes long would keep a step waiting while
its other workers have nothing to do, so its media are divided. A video is divided at its frames:
each worker decodes from the last key frame before those that it reads. The parts of an example are
what the whole call would have made, and where something cannot be decoded the whole call is made
again, so that one file fails once.

A call that takes longer than whole steps do is asked for as soon as its step is planned, before the
other calls of that step. Workers make first what an earlier step needs, so they make its parts when
they would have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.loading.ray_workers import RayWorkers
from orchmllm.data.loading.workers import Call, Result, Workers

LONG_S, PART_S = 0.5, 0.25  # predicted: of a call that takes long, and of its parts at least
STEPS_PLANNED = 24  # beyond the one that is loaded, so that long calls of these can be made early
NEXT = 2  # steps of which all calls are asked for: the one that is loaded, and the one after it
WORTH = 1.25  # times as long is worth it for early calls, if their parts are shorter
LONGER = 2.0  # than the mean of these steps, so at most half as many calls as steps are early
# Of one core, about: to decode a pixel of a video, to decode or convert one and resize it, to make
# features of a sample of sound, and to find a frame in the file of a video.
DECODED_S, READ_S, HEARD_S, LISTED_S = 3e-9, 3e-8, 3e-8, 3e-5


class Calls:
    """Calls of the `load` of a dataset that a step needs. room: for the media that rows hold
    themselves; of those that do not fit in, workers read the rows. takes_s: predicted seconds of
    each, 0 where they are not known. num_bytes: of the media that are kept."""

    def __init__(self, workers: Workers | RayWorkers, dataset: Any, calls: Sequence[Call],
                 step: int, room: int) -> None:
        self._workers, self._calls, self._step = workers, calls, step
        self._rows: list[MeasuredExample | None] = [None] * len(calls)
        if workers.at_once and hasattr(dataset, "kept"):
            self._rows = [dataset.kept(*args, read=len(keys["segments"]) > 1)
                          for args, keys in calls]
        self.takes_s = [predicted_s(row, keys["segments"])[0].sum() if row else 0.0
                        for row, (_, keys) in zip(self._rows, calls, strict=True)]
        self.num_bytes = 0
        for k, row in enumerate(self._rows):
            if row and row.num_bytes > room - self.num_bytes:
                self._rows[k] = None
            elif row:
                self.num_bytes += row.num_bytes
        self._left = set(range(len(calls)))
        self._replies: list[tuple[list[int], Callable[[], list[Result]]]] = []

    def ask(self, early_s: float = 0.0) -> None:
        """Asks for those that were not asked for yet, the longest first. early_s: only for those
        that take at least so long, as their step comes later than others."""
        asked = sorted((k for k in self._left if self.takes_s[k] >= early_s),
                       key=lambda k: -self.takes_s[k])
        self._left.difference_update(asked)
        rest = sorted(k for k in asked if self.takes_s[k] < LONG_S)
        for k in asked[: len(asked) - len(rest)]:
            self._replies.append(([k], self._in_parts(k, WORTH if early_s else 1.0)))
        if rest:
            self._replies.append((rest, self._request([self._call(k) for k in rest])))

    def results(self) -> list[Result]:
        """Waits for all of them; what they loaded, in their order."""
        self.ask()
        out = {k: result for asked, reply in self._replies
               for k, result in zip(asked, reply(), strict=True)}
        return [out[k] for k in range(len(self._calls))]

    def _in_parts(self, k: int, worth: float) -> Callable[[], list[Result]]:
        call = self._call(k)
        parts = self._request(divided(call, self._rows[k], self._workers.at_once, worth),
                              alone=True)
        return lambda: [_joined(parts()) or self._request([call])()[0]]

    def _request(self, calls: Sequence[Call], alone: bool = False) -> Callable[[], list[Result]]:
        return self._workers.request("load", calls, self._step, alone=alone)

    def _call(self, k: int) -> Call:
        """With its row, which a worker would have to read again. A reader of Ray does."""
        args, keys = self._calls[k]
        return args, {**keys, "row": self._rows[k]} if self._workers.num_workers else keys


def divided(call: Call, row: MeasuredExample | None, num_workers: int, worth: float = 1.0
            ) -> list[Call]:
    """The parts of a call, for so many workers. Each is of media that follow each other and take
    about equally long, the first one with the text. They are as short as they can be without all of
    them together taking `worth` times as long as they have to: a worker makes nothing else before
    it has made one."""
    args, keys = call
    segments = keys["segments"]
    if row is None or row.problem or not segments or keys.get("encoded"):
        return [call]
    seconds, again = predicted_s(row, segments)
    total = float(seconds.sum())
    most = max(1, int(total / PART_S))
    found = []
    for count in {min(most, each * num_workers) for each in (4, 2, 1)} | {1}:
        starts = np.unique([0, *np.searchsorted(
            seconds.cumsum() - seconds, total / count * np.arange(1, count) - 1e-9)])
        starts = starts[starts < len(seconds)]
        parts_s = np.add.reduceat(seconds, starts) + again[starts]
        found.append((max(parts_s.max(), parts_s.sum() / num_workers), starts))
    least_s = min(takes_s for takes_s, _ in found)
    starts = max((starts for takes_s, starts in found if takes_s <= worth * least_s), key=len)
    return [(args, {**keys, "segments": part.tolist(), "text": keys["text"] and k == 0})
            for k, part in enumerate(np.split(segments, starts[1:]))]


def predicted_s(row: MeasuredExample, segments: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(n,) seconds of one core for each of the segments after those before it, and (n,) what it
    takes more where those before it are not read: a frame of a video is decoded from the last key
    frame. Key frames are taken to be at equal distances."""
    media, sizes = row.media_at, dict(zip(row.media_at, row.sizes, strict=False))
    seconds, again = np.zeros((2, len(segments)))
    before: tuple = (None, 0, 0.0)  # video, group of frames, and seconds to decode a frame in it
    for k, segment in enumerate(segments):
        if segment not in sizes:  # the row has changed since it was indexed
            continue
        height, width = sizes[segment]
        seconds[k] = height * width * READ_S if height else width * HEARD_S
        if (frame := media[segment].frame) is None:
            continue
        header, video = frame.video, media[segment]._replace(frame=None, sampled=None)
        group, part = divmod(frame.second / max(header.duration_s, 1e-9) * header.num_groups, 1)
        takes_s = part * header.num_frames / header.num_groups * height * width * DECODED_S
        if before[0] == video:
            again[k] = header.num_frames * LISTED_S
        if before[:2] == (video, group):
            seconds[k] -= before[2]
            again[k] += before[2]
        seconds[k] += takes_s
        before = video, group, takes_s
    return seconds, again


def _joined(parts: list[Result]) -> Result | None:
    """The result of a whole call; None if something failed in one of its parts."""
    (example, failed, _), *others = parts
    if others and any(part[1] for part in parts):
        return None
    media = {segment: tensors for value, *_ in parts for segment, tensors in value.parts.items()}
    return replace(example, parts=media), failed, sum(part[2] for part in parts)
