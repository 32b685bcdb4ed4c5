"""The feed of a model of transformers: each rank loads the media that it encodes and the text of
the examples that its LLM takes, as the processor makes them, and joins them to the arguments of its
encoders and one packed row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from orchmllm.batch import UNCOUNTED, PackedExamples, Step
from orchmllm.data.loading.step_loader import SegmentFeed


class WholeFeed(SegmentFeed):
    """join: see orchmllm.models.hf.WholeModel. A rank for which a step has too few examples gets a
    row of one token, of which it learns nothing: the model needs a row. Other arguments: see
    SegmentFeed, whose dataset's `load` returns ProcessedExamples here."""

    fills = True

    def __init__(self, *args: Any, join: Callable[..., PackedExamples], **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._join = join

    def load(self, step: Step) -> tuple[int, int]:
        for micro, request in zip(step.micro, self._requested.popleft(), strict=True):
            loaded = request.loaded(step)
            media = {p: [loaded[e].parts[s] for e, s in at] for p, at in request.media.items()}
            micro.content = self._join([loaded[e] for e in request.texts], media, micro)
            if self.orchestrator.device.type == "cuda":  # see SegmentFeed
                micro.content = micro.content.moved(Tensor.pin_memory)
        return UNCOUNTED  # the lengths tell it


def feed_of(model: Any) -> Callable[..., WholeFeed]:
    """The feed of an orchmllm.models.hf.WholeModel."""
    return partial(WholeFeed, join=model.join)
