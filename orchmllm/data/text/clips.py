"""Clips in the processor of a model of transformers: how many frames of each are encoded, and which
clips it would not read as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from orchmllm.data.media.medium import RowError
from orchmllm.plan.geometry import AudioGeometry

_MASKS = ("feature_attention_mask", "input_features_mask")  # of frames that are no padding
# Tokens of a clip. Qwen2-Audio takes clips of one token for placeholders that are not expanded yet,
# and then numbers the positions of the whole row anew.
FEWEST = 2


def fills_windows(config: Any) -> bool:
    """Whether a model's tower encodes windows of one length, with their padding: all do but those
    of omni models and packed ones."""
    return not (hasattr(config.audio_config, "n_window") or getattr(config, "audio_packed", False))


class Clips:
    """processor, config: of a model, with a WhisperFeatureExtractor. geometry: the rate of clips.
    Raises AttributeError for what a configuration does not say."""

    def __init__(self, processor: Any, config: Any) -> None:
        extractor = processor.feature_extractor
        self.geometry = AudioGeometry(extractor.sampling_rate)
        self._windows = fills_windows(config)
        longest_s = getattr(processor, "max_audio_len", extractor.chunk_length)
        self._most_samples = longest_s // extractor.chunk_length * extractor.n_samples
        self._token = processor.audio_token
        # Of a model that looks for the tokens around media: token of features -> that before them.
        self.starts: dict[int, int] = {}
        if hasattr(config, "audio_start_token_id") and hasattr(processor, "image_processor"):
            self.starts = {config.image_token_id: config.vision_start_token_id,
                           config.audio_token_id: config.audio_start_token_id}

    @property
    def identity(self) -> list:
        """What decides, beside the settings of the processor, what becomes of a clip."""
        import soxr

        return [self._windows, self._most_samples, sorted(self.starts.items()), soxr.__version__]

    def grids(self, out: dict[str, Any], clips: Sequence[np.ndarray], texts: Sequence[str]
              ) -> list[tuple[int, int, int]]:
        """(1, 1, frames that are encoded) of each clip of an example. out: what the processor
        makes of the example, from which frames that are not encoded are cut; texts: what it writes
        for the clips. Raises RowError for a clip that it would cut, and for one that is too
        short."""
        for clip, text in zip(clips, texts, strict=True):
            length = f"a clip of {len(clip) / self.geometry.sample_rate:.6g} s is too "
            if len(clip) > self._most_samples:
                most_s = self._most_samples / self.geometry.sample_rate
                raise RowError(f"{length}long: the processor of the model would leave out what "
                               f"comes after {most_s:g} s: cut it")
            if text.count(self._token) < FEWEST:
                raise RowError(f"{length}short: it has fewer than {FEWEST} rows of features: "
                               "leave it out")
        name = next(name for name in _MASKS if name in out)
        mask = np.asarray(out[name])
        if self._windows:  # several clips of one window, or one clip of several
            return [(1, 1, mask.size // len(clips))] * len(clips)
        frames = mask.sum(-1).tolist()
        for key in (name, "input_features"):
            out[key] = out[key][..., : max(frames)]
        return [(1, 1, count) for count in frames]

    def bracketed(self, ids: np.ndarray, learnt: np.ndarray, first: np.ndarray
                  ) -> tuple[np.ndarray, np.ndarray]:
        """Of an omni model, which computes positions from the tokens that begin media: ids, learnt
        without the token that begins a medium which was left out. first (n,): places of the first
        features of each medium. Raises RowError where these tokens are not just before media."""
        starts = [*self.starts.values()]
        if ids[-1] in starts:
            ids, learnt = ids[:-1], learnt[:-1]
        begin = np.flatnonzero(np.isin(ids, starts))
        wanted = [self.starts[token] for token in ids[first].tolist()]
        if begin.tolist() != (first - 1).tolist() or ids[begin].tolist() != wanted:
            raise RowError("the tokens that begin images and clips are not just before these, "
                           "where the model looks for them: mend the chat template, and leave them "
                           "out of texts")
        return ids, learnt
