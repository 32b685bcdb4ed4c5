"""The processor of a model of transformers: what it makes of a conversation's text and images.

It expands the placeholder of every image itself and makes the tensors. Which tokens are learnt is
told by the project's own rendering of the chat template: the ids of both have to be the same.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from orchmllm.data.formats.conversation import Turn, media_of
from orchmllm.data.formats.scanned import digest
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.media.shapes import of_shapes, sized
from orchmllm.data.text.spans import Span, Text
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import TEXT, VISION

# What of a folder decides what its processor does.
_FILES = ("config.json", "processor_config.json", "preprocessor_config.json", "tokenizer.json",
          "tokenizer_config.json", "special_tokens_map.json", "chat_template.json",
          "chat_template.jinja")
_SHOWN = (224, 336)  # height and width of an image that every processor takes
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
Size = tuple[int, int]  # height and width in pixels as displayed


class Expanded(NamedTuple):
    """What images become. texts: in place of the placeholder of each; grids: (t, h, w) of each: t
    tiles of h x w patches."""

    texts: tuple[str, ...]
    grids: tuple[tuple[int, int, int], ...]


class Tokens(NamedTuple):
    """An example's sequence. ids (n,) int32, learnt (n,) bool; segments: (modality, lengths) in
    reading order; num_images: that are not after the cut."""

    ids: np.ndarray
    learnt: np.ndarray
    segments: list[tuple[int, SegmentLengths]]
    num_images: int


class Processor:
    """folder: of a model of transformers, with config.json, its processor, tokenizer.json and a
    chat template. Code of the folder is never run, images are resized by Pillow, and videos are
    read as images. options: of the call of the processor for images (size, do_pan_and_scan, ...),
    instead of its own. Raises ValueError naming the folder if it cannot be used."""

    def __init__(self, folder: str | os.PathLike, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        self.folder, self.options = Path(folder), dict(options)
        self._processor, config = _load(self.folder)
        self._shapes = copy.copy(self._processor)
        self._shapes.image_processor = of_shapes(self._processor.image_processor)
        self._patch = int(np.max(config.vision_config.patch_size))
        self.image_token_id = int(config.image_token_id)
        images = self._processor.image_processor
        self.by_grids = "image_grid_thw" in images.model_input_names
        self._feature = self._processor.tokenizer.convert_ids_to_tokens(self.image_token_id)
        self.tokenizer = ChatTokenizer(self.folder, _template(self.folder, self._processor),
                                       self._processor.image_token)
        self.expanded = lru_cache(maxsize=65536)(self._expanded)
        self._check()

    @property
    def digest(self) -> str:
        """Changes with anything that changes what the processor makes of a row: its files (and not
        how their JSON is written), and the packages that run it."""
        import PIL
        import tokenizers
        import transformers

        files = {}
        for name in _FILES:
            path = self.folder / name
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                files[name] = json.loads(text) if path.suffix == ".json" else text
        versions = [package.__version__ for package in (transformers, tokenizers, PIL)]
        return digest([files, self.options, versions])

    def _check(self) -> None:
        """Raises ValueError if the template and the processor do not fit together."""
        if not self.tokenizer.placeholders.get(VISION):
            raise ValueError(f"{self.folder}: its chat template does not write "
                             f"{self._processor.image_token} for an image")
        image = Medium(VISION, "")
        talk = [Turn("user", (image, "Who is it?"), False), Turn("assistant", ("Anna.",), True)]
        try:
            self.tokens(self.rendered(talk), [_SHOWN])
        except RowError as error:
            raise ValueError(f"{self.folder}: the processor cannot be used for an image, a question"
                             f" and an answer: {error}") from error

    def rendered(self, turns: Sequence[Turn]) -> list[Span]:
        """A conversation as the template writes it. Raises RowError."""
        if any(medium.modality != VISION for medium in media_of(turns)):
            raise RowError("the model takes images alone: leave rows with clips out")
        return self.tokenizer.spans(turns)

    @staticmethod
    def resized(width: int, height: int) -> Size:
        """Frames of videos are read as they are: the processor resizes them."""
        return width, height

    def __reduce__(self):
        return Processor, (self.folder, self.options)  # worker processes open the files themselves

    def _expanded(self, sizes: tuple[Size, ...]) -> Expanded:
        """What images of these sizes become, which are all images of an example: processors treat
        several in another way than one. Raises RowError."""
        images = [sized(*size) for size in sizes]
        out, texts = self._run(self._shapes, "\n".join([self._processor.image_token] * len(images)),
                               images, "np")
        return Expanded(texts, self.grids(out, texts))

    def _run(self, processor: Any, text: str, images: list, tensors: str
             ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """(the arguments that a processor makes of one text and its images, what it writes for each
        image). Raises RowError."""
        try:
            # Nested as apply_chat_template does it: some processors tell examples by the lists.
            out = processor(text=[text], images=[images] if images else None,
                            images_kwargs=self.options, add_special_tokens=False,
                            return_text_replacement_offsets=True, return_tensors=tensors)
        except MemoryError:
            raise
        except Exception as error:  # processors check little themselves
            raise RowError(f"the processor of the model refuses it: {type(error).__name__}: {error}"
                           ) from error
        offsets = out.pop("text_replacement_offsets", [])
        return dict(out), tuple(o["replacement"] for row in offsets for o in row)

    def grids(self, out: dict[str, Any], texts: Sequence[str]) -> tuple[tuple[int, int, int], ...]:
        """(t, h, w) of each image of an example: t tiles of h x w patches. out: the processor's
        tensors; texts: what it writes for the images."""
        if not texts:
            return ()
        if "image_grid_thw" in out:
            return tuple(map(tuple, out["image_grid_thw"].tolist()))
        shape, sizes = out["pixel_values"].shape, out.get("image_sizes")
        h, w = shape[-2] // self._patch, shape[-1] // self._patch
        if sizes is not None and len(shape) == 4:  # padded to the largest of the example
            return tuple((1, int(h) // self._patch, int(w) // self._patch) for h, w in sizes)
        if sizes is not None and shape[1] > 1 and len(texts) > 1:  # padded to the most tiles
            return tuple((self._tiles(size), h, w) for size in sizes.tolist())
        total, features = int(np.prod(shape[:-3])), [t.count(self._feature) for t in texts]
        return tuple((total * count // sum(features), h, w) for count in features)

    def _tiles(self, size: list[int]) -> int:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        image = self._processor.image_processor
        side = image.crop_size.height if image.crop_size else image.size.height
        return image_size_to_num_patches(size, image.image_grid_pinpoints, side)

    def tokens(self, spans: Sequence[Span], sizes: Sequence[Size], limit: int = 0) -> Tokens:
        """The sequence of a rendered conversation with images of these sizes. limit: ids after
        which it ends (0: none); an image that would cross it is left out whole. Raises RowError."""
        while True:
            expanded = self.expanded(tuple(sizes)) if sizes else Expanded((), ())
            tokens, end = self.cut(self.written(spans, expanded), expanded, limit)
            if tokens is not None:
                return tokens
            spans, sizes = before(spans, end), sizes[:end]

    def written(self, spans: Sequence[Span], expanded: Expanded) -> tuple[np.ndarray, np.ndarray]:
        """(ids, learnt) of a rendered conversation whose images become what `expanded` says. Raises
        RowError where the processor's tokenizer has other ids."""
        texts = iter(expanded.texts)
        spans = [Text(next(texts), False) if isinstance(s, Medium) else s for s in spans]
        ids, learnt = self.tokenizer.encode_spans(spans)
        whole = "".join(span.text for span in spans)
        theirs = self._processor.tokenizer(whole, add_special_tokens=False)["input_ids"]
        if ids.tolist() != theirs:
            raise RowError(self._other_ids(spans))
        return ids, learnt

    def _other_ids(self, spans: Sequence[Text]) -> str:
        for token in self.tokenizer.special:
            if any(span.of_data and token in span.text for span in spans):
                return (f"its text contains the special token {token}, which the model would read "
                        "as that token: leave it out or write it in another way")
        return ("the processor's tokenizer has other ids for it than the tokenizer.json of the "
                "folder")

    def cut(self, written: tuple[np.ndarray, np.ndarray], expanded: Expanded, limit: int
            ) -> tuple[Tokens | None, int]:
        """(The sequence up to `limit`, or None where that would cut an image; which image that is).
        Raises RowError where features cannot be told from text."""
        ids, learnt = written
        features = np.array([t.count(self._feature) for t in expanded.texts], np.int64)
        at = np.flatnonzero(ids == self.image_token_id)
        if len(at) != features.sum():
            raise RowError(f"its text contains the token {self._feature}, which stands for images")
        ends = np.cumsum(features)
        first, last = at[ends - features], at[ends - 1]
        if limit and (last >= limit).any():
            return None, int(np.argmax(last >= limit))
        touching = first[1:] == last[:-1] + 1
        if self.by_grids and touching.any():
            raise RowError("two images have no token between them, so the model cannot tell them "
                           "apart: write text between them, or give them one after the other in a "
                           "list of content parts")
        ids, learnt = ids[: limit or None], learnt[: limit or None]
        starts = np.append(first, len(ids))
        texts = np.diff(starts, prepend=0) - np.append(0, features)
        segments = []
        for k, count in enumerate(texts.tolist()):
            segments += [(TEXT, text_lengths(count))] * (count > 0)
            if k < len(features):
                t, h, w = expanded.grids[k]
                rows = t * h * w
                segments.append((VISION, SegmentLengths(rows, rows, int(features[k]), (t, h, w))))
        return Tokens(ids, learnt, segments, len(features)), 0

    def load(self, spans: Sequence[Span], images: list, limit: int
             ) -> tuple[Tokens, dict[str, Tensor]]:
        """(The sequence of a rendered conversation and its decoded images, the processor's other
        tensors by argument name). limit: see `tokens`; no image crosses it. Raises RowError."""
        mark = self._processor.image_token
        text = "".join(mark if isinstance(span, Medium) else span.text for span in spans)
        out, texts = self._run(self._processor, text, images, "pt")
        expanded = Expanded(texts, self.grids(out, texts))
        written = self.written(spans, expanded)
        tokens, _ = self.cut(written, expanded, limit)
        ids = out.pop("input_ids")
        if tokens is None or ids.tolist() != [written[0].tolist()]:
            raise RowError("the processor makes other tokens of its images than of their sizes")
        out.pop("attention_mask", None)
        return tokens, {name: value[:, : len(tokens.ids)] if value.shape == ids.shape else value
                        for name, value in out.items()}

    def arguments_like(self, ids: Tensor, sizes: Sequence[Size]) -> dict[str, Tensor]:
        """The processor's tensors for an example with these ids (n,), and black images."""
        text = "\n".join([self._processor.image_token] * len(sizes)) or "no image"
        images = [np.zeros((*size, 3), np.uint8) for size in sizes]
        out, _ = self._run(self._processor, text, images, "pt")
        kinds = (ids == self.image_token_id).long()[None]
        shape = out.pop("input_ids").shape
        out.pop("attention_mask", None)
        return {name: kinds if value.shape == shape else value for name, value in out.items()}


def before(spans: Sequence[Span], medium: int) -> Sequence[Span]:
    """The spans before a medium, by its number."""
    at = [k for k, span in enumerate(spans) if isinstance(span, Medium)]
    return spans[: at[medium]] if medium < len(at) else spans


def _load(folder: Path) -> tuple[Any, Any]:
    """(the processor of a folder, its model's configuration). Raises ValueError."""
    from transformers import PROCESSOR_MAPPING, AutoConfig
    from transformers.image_processing_backends import PilBackend

    keys = dict(trust_remote_code=False, local_files_only=True)
    try:
        config = AutoConfig.from_pretrained(folder, **keys)
        if type(config) not in PROCESSOR_MAPPING:
            raise ValueError(f"models of the type {config.model_type} have no processor")
        processor = _of_images(PROCESSOR_MAPPING[type(config)]).from_pretrained(
            folder, backend="pil", **keys)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ValueError(f"{folder}: its processor cannot be read: {error}") from error
    if not isinstance(processor.image_processor, PilBackend):
        raise ValueError(f"{folder}: {type(processor.image_processor).__name__} cannot resize "
                         "images by Pillow, which has the same pixels everywhere")
    return processor, config


def _of_images(kind: type) -> type:
    """A class of processors without its part for videos, which would need torchvision."""
    class OfImages(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

    OfImages.__name__ = kind.__name__  # which transformers compares
    return OfImages


def _template(folder: Path, processor: Any) -> str:
    """Its chat template. Raises ValueError where it has none."""
    template = processor.chat_template or processor.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ValueError(f"{folder}: it has no chat template: put the chat_template.jinja of the "
                         "model's instruct version into the folder")
    return template
