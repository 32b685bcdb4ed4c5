"""Calls of the processor of a model of transformers: of the whole, and of its parts for media,
which decide what media become and make their tensors. That both give the same is proven when a
folder is opened (orchmllm.data.text.proof); the parts need no text around the media."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import BatchFeature

from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.raw import NOTHING
from orchmllm.data.media.shapes import (
    Content,
    Shapes,
    Size,
    adapted,
    kind_of,
    of_clips,
    reading,
    sized,
)
from orchmllm.data.media.video_processor import PROCESSORS, Videos
from orchmllm.data.text.clips import Clips
from orchmllm.data.text.encoded import OneCall
from orchmllm.data.text.model_folder import image_grids, load_processor, refused
from orchmllm.data.text.spans import Expanded
from orchmllm.plan.layout import AUDIO, VISION


class Calls:
    """folder, options: see orchmllm.data.text.processor.Processor. config: of the model; stock: its
    processor; marks, token_ids: modality -> what is written for a medium, and the token that stands
    for a row of its features; patch, videos, clips: see Processor; has_grids: whether the model
    tells images apart by tokens between them. Raises ValueError for a model that is not known, and
    RowError for options that its processor refuses."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.options = options
        self.stock, self.config = load_processor(folder)
        self.videos: Videos | None = None
        self.clips: Clips | None = None
        self.has_grids, self.patch = False, 0
        self.marks: dict[int, str] = {}
        self.token_ids: dict[int, int] = {}
        # Parts that read no pixels and samples, and those that read what is no `sized`.
        self._shapes, self._reads = copy.copy(self.stock), copy.copy(self.stock)
        try:
            self._read_parts(folder)
        except AttributeError as error:
            raise ValueError(f"{folder}: its config.json does not say {error.name}, so it is no "
                             "model of images or clips that is known here") from error
        self.features = {kind: self.stock.tokenizer.convert_ids_to_tokens(token)
                         for kind, token in self.token_ids.items()}
        # Tokens that the processor takes for media, of some kinds that are not read here, too.
        self.placeholders = {getattr(self.stock, f"{kind}_token"): getattr(
            self.stock, f"{kind}_token_id", None) for kind in ("image", "video", "audio")
            if getattr(self.stock, f"{kind}_token", None) is not None}
        with refused():  # audioflamingo3 makes tensors of torch alone
            self._settings = self._merged("np" if VISION in self.marks else "pt")
        self.unused: set[str] = set()  # what the parts make and the whole does not
        self.expanded = lru_cache(maxsize=1024)(self._expanded)

    def _read_parts(self, folder: Path) -> None:
        """The parts of the processor for images, videos and clips, of those that it has. Raises
        AttributeError for what the configuration does not say."""
        stock, config, marks, tokens = self.stock, self.config, self.marks, self.token_ids
        if (kind := type(stock).__name__) in PROCESSORS:
            self.videos = Videos(folder, kind)
            for processor in (stock, self._shapes, self._reads):
                processor.video_processor = self.videos.processor
        if hasattr(stock, "image_processor"):
            images = stock.image_processor
            self.has_grids = "image_grid_thw" in images.model_input_names and any(
                hasattr(config, f"{kind}_start_token_id") for kind in ("vision", "image"))
            self.patch = int(np.max(config.vision_config.patch_size))
            marks[VISION], tokens[VISION] = stock.image_token, int(config.image_token_id)
            self._shapes.image_processor = adapted(images, Shapes)
            with refused():
                self._reads.image_processor = reading(images, self.options)
        if self.videos is not None:
            marks[VIDEO], tokens[VIDEO] = stock.video_token, int(config.video_token_id)
        if hasattr(stock, "feature_extractor"):
            self.clips, heard = Clips(stock, config), of_clips(stock.feature_extractor)
            marks[AUDIO], tokens[AUDIO] = stock.audio_token, int(config.audio_token_id)
            self._shapes.feature_extractor = self._reads.feature_extractor = heard

    def _merged(self, tensors: str, **videos: Any) -> dict[str, Any]:
        """The options of each part, by the processor's own rules."""
        audio = {"sampling_rate": self.clips.geometry.sample_rate} if self.clips else {}
        return self._shapes._merge_kwargs(
            self._shapes.valid_processor_kwargs,
            tokenizer_init_kwargs=self.stock.tokenizer.init_kwargs, images_kwargs=self.options,
            audio_kwargs=audio, return_tensors=tensors, **videos)

    def written(self, media: Sequence[Content]) -> str:
        """The placeholders of media, or of their sizes."""
        return "\n".join(self.marks[kind_of(medium)] for medium in media)

    def adds_special_tokens(self, text: str) -> bool:
        """As apply_chat_template decides it."""
        begin = self.stock.tokenizer.bos_token
        return begin is None or not text.startswith(begin)

    def _expanded(self, sizes: tuple[Size, ...]) -> Expanded:
        """What media of these sizes become, which are all media of an example: processors treat
        several in another way than one. Raises RowError."""
        return self.made([*map(sized, sizes)])[1]

    def made(self, media: Sequence[Content], options: Mapping[str, Any] = NOTHING
             ) -> tuple[BatchFeature, Expanded]:
        """(The tensors of the media of an example by argument name; what these become), by the
        parts for them. media: see Processor.load; options: of the call for images. Raises
        RowError."""
        processor, kinds = self._reading(media), [*map(kind_of, media)]
        given, videos = self._given(media, kinds)
        out, texts = {}, {}
        with refused():
            laid = dict(zip(("images", "text", "videos", "audio"), processor.prepare_inputs_layout(
                text=[self.written(media)], **given), strict=False))
            processor.validate_inputs(text=laid["text"], **{name: laid[name] for name in given})
            settings = self._settings
            if videos:
                settings = {**self._merged("pt", **videos), "images_kwargs":
                            settings["images_kwargs"]}
            for kind, name, run in ((VISION, "images", processor._process_images),
                                    (VIDEO, "videos", processor._process_videos),
                                    (AUDIO, "audio", processor._process_audio)):
                if name in given:
                    more = options if kind == VISION else NOTHING
                    made, texts[kind] = run(laid[name], **{**settings[f"{name}_kwargs"], **more})
                    out |= made
            of_kinds = {kind: iter(of_kind) for kind, of_kind in texts.items()}
            expanded = self._become(out, media, kinds, [next(of_kinds[kind]) for kind in kinds])
            return BatchFeature({n: v for n, v in out.items() if n not in self.unused}), expanded

    def tensors(self, made: BatchFeature) -> dict[str, Any]:
        """What `made` gives, as tensors of torch. Raises RowError."""
        with refused():
            return dict(made.convert_to_tensors("pt", self.stock.skip_tensor_conversion))

    def whole(self, text: str, media: Sequence[Content], tokenizer: OneCall,
              options: Mapping[str, Any] = NOTHING, of_videos: Mapping[str, Any] = NOTHING, *,
              stock: bool = False) -> tuple[dict[str, Any], Expanded]:
        """(All tensors that the processor makes of one text and its media, with a tokenizer in
        place of its own; what the media become). options, of_videos: of its call for images and for
        videos; stock: also of media that are `sized` all is computed. Raises RowError."""
        processor = copy.copy(self.stock if stock else self._reading(media))
        processor.tokenizer, kinds = tokenizer, [*map(kind_of, media)]
        given, videos = self._given(media, kinds, of_videos)
        if "audio" in given:
            given["audio_kwargs"] = {"sampling_rate": self.clips.geometry.sample_rate}
        with refused():
            out = processor(text=[text], images_kwargs={**self.options, **options},
                            return_tensors="pt", add_special_tokens=self.adds_special_tokens(text),
                            return_text_replacement_offsets=True, **given, **videos)
        out.pop("attention_mask", None)
        texts = [found["replacement"] for row in out.pop("text_replacement_offsets", [])
                 for found in row]
        expanded = self._become(out, media, kinds, texts)
        return dict(out), expanded

    def _reading(self, media: Sequence[Content]) -> Any:
        has_pixels = any(isinstance(medium, Image.Image) for medium in media)
        return self._reads if has_pixels else self._shapes

    def _given(self, media: Sequence[Content], kinds: Sequence[int],
               of_videos: Mapping[str, Any] = NOTHING) -> tuple[dict[str, Any], dict[str, Any]]:
        """(Media as arguments of a processor, its options for videos). They are nested as
        apply_chat_template does it: some processors tell examples by the lists."""
        images, clips, shown = ([m for m, kind in zip(media, kinds, strict=True) if kind == wanted]
                                for wanted in (VISION, AUDIO, VIDEO))
        videos = self.videos.arguments(shown, of_videos) if shown else {}
        given = {"images": [images] if images else [], "audio": clips,
                 "videos": videos.pop("videos", [])}
        return {name: value for name, value in given.items() if value}, videos

    def _become(self, out: dict[str, Any], media: Sequence[Content], kinds: Sequence[int],
                texts: Sequence[str]) -> Expanded:
        """What media become of which the processor made the texts and the tensors `out`; frames
        that are not encoded are cut from these."""
        shown, heard = ([t for t, kind in zip(texts, kinds, strict=True) if kind == wanted]
                        for wanted in (VISION, AUDIO))
        features = [text.count(self.features[VISION]) for text in shown]
        clips = [m for m, kind in zip(media, kinds, strict=True) if kind == AUDIO]
        grids = {VISION: zip(image_grids(self.stock, out, features, self.patch) if shown else ()),
                 AUDIO: zip(self.clips.grids(out, clips, heard) if clips else ()),
                 VIDEO: Videos.grids(out)}
        return Expanded(tuple(texts), tuple(next(grids[kind]) for kind in kinds))
