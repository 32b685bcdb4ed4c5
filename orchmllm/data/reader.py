"""Loading a row for a model of this project's parts: tokens, patches of images and frames of clips.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from orchmllm.batch import IGNORE_INDEX, Example
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.decode import OnError, SegmentReader, fail
from orchmllm.data.media.medium import MediaError
from orchmllm.data.media.video import pictures
from orchmllm.plan.layout import TEXT


class RowReader(LengthReader):
    """One that loads the rows, too. rows: decodes a medium; its arguments: see LengthReader."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.rows = SegmentReader(self.vision, self.audio)

    def load(
        self,
        row: MeasuredExample,
        name: Callable[[], str],
        *,
        text: bool = True,
        segments: Collection[int] | None = None,
        encoded: Collection[int] = (),
        on_error: OnError = None,
    ) -> Example:
        """Decodes a row that was measured, or parts of it. name: tells where the row is.

        text: False leaves token_ids and labels None. segments: positions in the segment list of
        the media to decode; None for all. encoded: those of them that are not decoded: their bytes
        as they are stored, (n,) uint8, in place of rows. A medium that fails raises MediaError with
        `segment` set; with `on_error`, it is called with (segment, error) instead, and the rows are
        zeros (there are no bytes). A stand-in reports its problem as segment 0 when its text is
        loaded. Raises ValueError if `segments` names one that is not a medium of this example.
        """
        layout = row.layout
        i = int(layout.example_id[0])
        known = np.flatnonzero(layout.modality != TEXT).tolist()
        wanted = known if segments is None else sorted(segments)
        if not set(known) >= set(wanted):
            raise ValueError(f"example {i}: segments {wanted} asked for, but its media are {known}")
        at, media = row.media_at, {}
        frames = pictures([at[s] for s in wanted if s in at], self.vision)
        for s in wanted:
            medium = at.get(s) or MediaError(name(), "the row has changed since its lengths "
                                             "were read")
            media[s] = self.rows(medium, int(layout.modality[s]), int(layout.rows[s]), s, on_error,
                                 encoded=s in encoded, picture=frames.get(medium))
        if not text:
            return Example(i, None, None, media)
        if row.problem is not None:
            fail(0, row.problem, on_error)
        tokens, labels = token_ids_and_labels(row)
        return Example(i, torch.from_numpy(tokens), torch.from_numpy(labels), media)


def token_ids_and_labels(row: MeasuredExample) -> tuple[np.ndarray, np.ndarray]:
    """(L,) int32 token ids of an example's whole sequence, 0 at media positions; (L,) int32 labels:
    the token at t + 1 where that is learnt, else IGNORE_INDEX."""
    is_text = np.repeat(row.layout.modality == TEXT, row.layout.num_tokens)
    tokens = np.zeros(len(is_text), np.int32)
    tokens[is_text] = row.token_ids
    labels = np.full(len(tokens) + 1, IGNORE_INDEX, np.int32)  # of the position before each token
    labels[:-1][is_text] = np.where(row.supervised, row.token_ids, IGNORE_INDEX)
    return tokens, labels[1:]
