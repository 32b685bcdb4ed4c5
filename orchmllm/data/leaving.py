"""Rows for a whole model of transformers that another rank decodes a medium of: the processor needs
the example around it there, but not the other media."""

from __future__ import annotations

from itertools import chain

from orchmllm.data.formats.conversation import media_of
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.media.decode import OnError, fail, stored_bytes
from orchmllm.data.media.medium import MediaError
from orchmllm.data.media.video import pictures
from orchmllm.data.media.video_processor import items_of
from orchmllm.data.text.processor import Processor
from orchmllm.plan.layout import TEXT


def row_of_medium(row: MeasuredExample, segment: int, processor: Processor, on_error: OnError
                  ) -> MeasuredExample:
    """The row with what is stored of the medium at a segment, and nothing of the others. A medium
    that cannot be read is told of here (see orchmllm.data.media.decode.fail), and is blank there,
    as all media of a row with a problem are."""
    if row.problem is not None:
        return row._replace(media=[], turns=())
    items = [*chain.from_iterable(items_of(row.turns, processor.videos))]
    at = int((row.layout.modality[:segment] != TEXT).sum())
    media, first = media_of(row.turns), sum(map(len, items[:at]))
    mine = media[first: first + len(items[at])]
    data: list[bytes | None] = [None] * len(media)
    try:
        shown = pictures(mine)
        data[first: first + len(mine)] = [
            stored_bytes(medium, shown.get(medium)).numpy().tobytes() for medium in mine]
    except MediaError as error:
        error.modality = mine[0].modality
        fail(segment, error, on_error)
        return row._replace(media=[], turns=(), problem=error)
    alone = iter([medium._replace(path="", offset=0, size=-1, data=stored, frame=None, part=None)
                  for medium, stored in zip(media, data, strict=True)])
    return row._replace(media=[], turns=tuple(turn._replace(parts=tuple(
        part if isinstance(part, str) else next(alone) for part in turn.parts))
        for turn in row.turns))
