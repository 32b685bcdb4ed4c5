"""The ids of an example of a model of transformers, cut into items of the encoders and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from orchmllm.data.media.medium import RowError
from orchmllm.data.media_tensors import KINDS
from orchmllm.data.text.clips import Clips
from orchmllm.data.text.spans import Expanded, Tokens
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION


class Sequences:
    """tokens, texts: modality -> the token that stands for a row of features, as id and as text;
    size: ids that there are; has_grids: whether the model tells images apart by tokens between
    them; omni: of a model that looks for the tokens around its media, None for others.
    most_tokens: of an example; 0: any number."""

    def __init__(self, tokens: Mapping[int, int], texts: Mapping[int, str], size: int,
                 has_grids: bool, omni: Clips | None) -> None:
        self._tokens, self._texts = tokens, texts
        self._have_grids, self._omni, self.most_tokens = has_grids, omni, 0
        self._is_feature = np.zeros(size, bool)
        self._is_feature[[*tokens.values()]] = True

    def of(self, ids: np.ndarray, learnt: np.ndarray, expanded: Expanded, limit: int
           ) -> tuple[Tokens | None, int]:
        """(The sequence of m media with ids (n,) and learnt (n,), how many media fit into
        `limit`); None where not all of them do. Raises RowError where features cannot be told from
        text or from one another."""
        counts = self._num_features(ids, expanded.texts)  # (m,)
        at, ends = np.flatnonzero(self._is_feature[ids]), np.cumsum(counts)
        first, last = at[ends - counts], at[ends - 1]  # (m,): features of each medium
        # The token behind a medium belongs to it where the model looks for it.
        fit = int((last + (self._omni is not None) < (limit or len(ids))).sum())
        if fit < len(counts):
            return None, fit
        if self._have_grids and (first[1:] == last[:-1] + 1).any():
            raise RowError("two media have no token between them, so the model cannot tell them "
                           "apart: write text between them")
        ids, learnt = ids[: limit or None], learnt[: limit or None]
        if self._omni is not None:
            ids, learnt = self._omni.bracketed(ids, learnt, first)
        if self.most_tokens and len(ids) > self.most_tokens:
            raise RowError(f"it has {len(ids)} tokens, but after {self.most_tokens} this model's "
                           "rotary positions change for other examples of the batch, too: set "
                           f"data.max_example_tokens to {self.most_tokens} or less")
        return Tokens(ids, learnt, self._segments(ids, at, counts, expanded.grids)), fit

    def _num_features(self, ids: np.ndarray, texts: Sequence[str]) -> np.ndarray:
        """(m,) int64: of each of m media, whose texts are in the text that `ids` are of."""
        counts = np.zeros(len(texts), np.int64)
        for kind, token in self._texts.items():
            own = np.array([text.count(token) for text in texts], np.int64)
            if np.count_nonzero(ids == self._tokens[kind]) != own.sum():
                raise RowError(f"it has other tokens {token}, which stand for {KINDS[kind].name}s, "
                               "than those of its media")
            counts += own
        return counts

    def _segments(self, ids: np.ndarray, at: np.ndarray, counts: np.ndarray, grids: Sequence
                  ) -> list[tuple[int, SegmentLengths]]:
        """Items of the encoders and texts, in reading order. at (sum of counts,): places of
        features in ids (n,); counts (m,): features of each medium; grids: see Expanded. A text
        begins after the last feature of an item, and reaches to the first of the next."""
        num_items = np.array([len(items) for items in grids], np.int64)  # (m,)
        counts = np.repeat(counts // num_items, num_items)  # (items,) from here on
        first = at[np.cumsum(counts) - counts]
        texts = np.diff(np.append(first, len(ids)), prepend=0) - np.append(0, counts)
        kinds = np.where(ids[first] == self._tokens.get(AUDIO, -1), AUDIO, VISION).tolist()
        out = [(TEXT, text_lengths(int(texts[0])))]
        for kind, (t, h, w), count, after in zip(
                kinds, chain(*grids), counts.tolist(), texts[1:].tolist(), strict=True):
            rows = t * h * w
            positions = (rows + 1) // 2 if kind == AUDIO else rows  # a convolution of stride 2
            out += [(kind, SegmentLengths(rows, positions, count, (t, h, w))),
                    (TEXT, text_lengths(after))]
        return [segment for segment in out if segment[1].num_tokens]
