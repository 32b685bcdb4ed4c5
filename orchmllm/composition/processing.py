"""The processor of a composed model: the image processor and the feature extractor of the towers,
and the tokenizer of the LLM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import AutoProcessor, BatchFeature, ProcessorMixin

from orchmllm.composition.configuration import ComposedConfig, audio_rows

PARTS = ("image_processor", "feature_extractor", "tokenizer")
SETTINGS = ("image_token", "audio_token", "patch_size", "spatial_merge_size", "audio_stack",
            "audio_packed", "chat_template")


class ComposedProcessor(ProcessorMixin):
    """Parts by their names, of which the image processor or the feature extractor may be missing.
    patch_size: pixels of the side of a patch; spatial_merge_size, audio_stack, audio_packed: see
    ComposedConfig; image_token, audio_token: what stands for a medium in a text, and, as often as
    it has rows of features, in what the model is given."""

    _parts: Sequence[str] = PARTS

    def __new__(cls, **named: Any) -> ComposedProcessor:
        return super().__new__(_with_parts(cls, named))

    def __init__(
        self, *, image_token: str = "", audio_token: str = "", patch_size: int = 1,
        spatial_merge_size: int = 1, audio_stack: int = 1, audio_packed: bool = False,
        chat_template: str | None = None, **parts: Any,
    ) -> None:
        super().__init__(chat_template=chat_template, **parts)
        if hasattr(self, "image_processor"):
            self.image_token = image_token
            self.image_token_id = self.tokenizer.convert_tokens_to_ids(image_token)
        if hasattr(self, "feature_extractor"):
            self.audio_token = audio_token
            self.audio_token_id = self.tokenizer.convert_tokens_to_ids(audio_token)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.audio_stack, self.audio_packed = audio_stack, audio_packed

    def __reduce__(self) -> tuple:
        """For pickle and copy, which would make one of other parts, or not find the class."""
        return _of_parts, tuple(self._parts), self.__dict__

    @classmethod
    def get_attributes(cls) -> list[str]:
        return list(cls._parts)

    @classmethod
    def from_pretrained(cls, folder: Any, **options: Any) -> ComposedProcessor:
        there, _ = cls.get_processor_dict(folder, **options)
        return super(ComposedProcessor, _with_parts(cls, there)).from_pretrained(folder, **options)

    @classmethod
    def from_args_and_dict(cls, args: Sequence[Any], settings: Mapping[str, Any], **options: Any
                           ) -> ComposedProcessor:
        given = {**settings, **options}
        return cls(**dict(zip(cls.get_attributes(), args, strict=True)),
                   **{name: given[name] for name in SETTINGS if name in given})

    def replace_image_token(self, image_inputs: Mapping, image_idx: int, **_: Any) -> str:
        if "image_grid_thw" in image_inputs:
            rows = math.prod(map(int, image_inputs["image_grid_thw"][image_idx]))
            rows //= self.image_processor.merge_size**2
        else:
            h, w = np.shape(image_inputs["pixel_values"][0])[-2:]
            side = self.patch_size * self.spatial_merge_size
            rows = (h // side) * (w // side) * int(image_inputs["num_patches"][image_idx]
                                                   if "num_patches" in image_inputs else 1)
        return self.image_token * rows

    def _process_audio(self, audio: Any, **options: Any) -> tuple[dict, list[str]]:
        if self.audio_packed:
            made = self._of_clips(audio, options)
        else:
            made = self.feature_extractor(audio, **{  # a window, however texts are padded
                **options, "return_attention_mask": True, "padding": "max_length",
                "max_length": None})
            made["input_features_mask"] = made.pop("attention_mask")
        mask = np.asarray(made["feature_attention_mask" if self.audio_packed
                               else "input_features_mask"])
        return made, [self.audio_token * rows
                      for rows in audio_rows(mask.sum(-1), self.audio_stack).tolist()]

    def _of_clips(self, audio: Sequence[np.ndarray], options: Mapping[str, Any]) -> BatchFeature:
        """Frames of clips, each of which is computed as if silence came after it, filled to the
        longest. Raises ValueError for a clip that is longer than a window."""
        extractor, frames = self.feature_extractor, []
        for clip in audio:
            if len(clip) > extractor.n_samples:
                raise ValueError(f"a clip has {len(clip)} samples, of at most "
                                 f"{extractor.n_samples}: cut it")
            heard = np.pad(clip, (0, extractor.n_fft))
            made = extractor(heard, **{**options, "padding": False, "truncation": False,
                                       "return_attention_mask": False, "return_tensors": "np"})
            frames.append(made["input_features"][0][:, : -(-len(clip) // extractor.hop_length)])
        lengths = np.array([clip.shape[1] for clip in frames])
        filled = [np.pad(clip, ((0, 0), (0, lengths.max() - clip.shape[1]))) for clip in frames]
        return BatchFeature({
            "input_features": np.stack(filled),
            "feature_attention_mask": (np.arange(lengths.max()) < lengths[:, None]).astype(
                np.int32)}, tensor_type=options.get("return_tensors"))

    @property
    def unused_input_names(self) -> list[str]:
        return ["num_patches"]  # tiles of each image

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "feature_attention_mask" if self.audio_packed
                else "input_features_mask"]


def _of_parts(*parts: str) -> ComposedProcessor:
    return ComposedProcessor.__new__(ComposedProcessor, **dict.fromkeys(parts))


@lru_cache
def _subclass(cls: type[ComposedProcessor], parts: tuple[str, ...]) -> type[ComposedProcessor]:
    return type(cls.__name__, (cls,), {"_parts": parts, "__module__": cls.__module__})


def _with_parts(cls: type[ComposedProcessor], there: Mapping) -> type[ComposedProcessor]:
    """The class for the parts that are named in `there`: transformers asks the class."""
    parts = tuple(name for name in PARTS if name in there or name == "tokenizer")
    return cls if parts == tuple(cls._parts) else _subclass(cls, parts)


AutoProcessor.register(ComposedConfig, ComposedProcessor)
