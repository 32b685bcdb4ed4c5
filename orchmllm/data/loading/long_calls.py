"""Calls of a dataset's `load` that take long: workers get them first, each alone, and in parts.

How long a call takes is predicted from headers. One that takes long would keep a step waiting while
its other workers have nothing to do, so its media are divided among them. A video is divided at
its frames: each worker decodes from the last key frame before those that it reads. The parts of an
example are what the whole call would have made, and where something cannot be decoded the whole
call is made again, so that one file fails once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.loading.ray_workers import RayWorkers
from orchmllm.data.loading.workers import Call, Result, Workers

LONG_S, PART_S = 0.5, 0.25  # predicted: of a call that takes long, and of its parts at least
# Of one core, about: to decode a pixel of a video, to decode or convert one and resize it, and to
# decode a sample of sound and make features of it.
DECODED_S, READ_S, HEARD_S = 3e-9, 3e-8, 3e-8


def ask(workers: Workers | RayWorkers, calls: Sequence[Call],
        rows: Sequence[MeasuredExample | None], step: int) -> Callable[[], list[Result]]:
    """Workers.request of calls of `load`. rows: of the calls, None where one is not known."""
    takes_s, parts = zip(*(divided(call, row, workers.at_once) for call, row in zip(
        calls, rows, strict=True)), strict=True) if calls else ((), ())
    long = [k for k in np.argsort(takes_s)[::-1].tolist() if parts[k]]
    rest = [k for k in range(len(calls)) if not parts[k]]
    first = workers.request("load", [part for k in long for part in parts[k]], step, alone=True)
    others = workers.request("load", [calls[k] for k in rest], step)

    def results() -> list[Result]:
        made, out = iter(first()), dict(zip(rest, others(), strict=True))
        for k in long:
            out[k] = _joined([next(made) for _ in parts[k]]) or workers.request(
                "load", [calls[k]], step)()[0]
        return [out[k] for k in range(len(calls))]

    return results


def divided(call: Call, row: MeasuredExample | None, num_workers: int
            ) -> tuple[float, list[Call]]:
    """(Predicted seconds of a call; its parts where it takes long, at most one for each worker).
    Each part is of media that follow each other and take equally long, the first one with the
    text. (0, none) where it is not known."""
    args, keys = call
    segments = keys["segments"]
    if num_workers < 2 or row is None or row.problem or not segments:
        return 0.0, []
    seconds = predicted_s(row, segments, num_workers)
    total = float(seconds.sum())
    if total < LONG_S:
        return total, []
    count = 1 if keys.get("encoded") else min(num_workers, int(total / PART_S))
    before = np.cumsum(seconds) - seconds
    cuts = np.searchsorted(before, total / count * np.arange(1, count) - 1e-9)
    found = [part.tolist() for part in np.split(segments, cuts) if len(part)]
    return total, [(args, {**keys, "segments": part, "text": keys["text"] and k == 0})
                   for k, part in enumerate(found)]


def predicted_s(row: MeasuredExample, segments: Sequence[int], num_parts: int) -> np.ndarray:
    """(n,) seconds of one core for each of the segments. A video with too few key frames to be
    divided counts where its last segment is."""
    media = row.media_at
    videos = {s: m._replace(frame=None, sampled=None) for s, m in media.items() if m.frame}
    items, sizes = Counter(videos.values()), dict(zip(media, row.sizes, strict=False))
    seconds = np.zeros(len(segments))
    for k, segment in enumerate(segments):
        if segment not in sizes:  # the row has changed since it was indexed
            continue
        height, width = sizes[segment]
        seconds[k] = height * width * READ_S if height else width * HEARD_S
        if video := videos.get(segment):
            header = media[segment].frame.video
            decoded = header.num_frames / max(items[video], header.num_groups)
            seconds[k] += height * width * decoded * DECODED_S
            if k and header.num_groups < 2 * num_parts and videos.get(segments[k - 1]) == video:
                seconds[k - 1: k + 1] = 0.0, seconds[k - 1: k + 1].sum()
    return seconds


def _joined(parts: list[Result]) -> Result | None:
    """The result of a whole call; None if something failed in one of its parts."""
    (example, failed, _), *others = parts
    if others and any(part[1] for part in parts):
        return None
    media = {segment: tensors for value, *_ in parts for segment, tensors in value.parts.items()}
    return replace(example, parts=media), failed, sum(part[2] for part in parts)
