"""What the folder of a model of transformers says to those who make its examples, and how its
processor is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from orchmllm.data.media.medium import RowError


def load_processor(folder: Path) -> tuple[Any, Any]:
    """(The processor of a folder, without its part for videos, which would need torchvision; the
    model's configuration, of an omni model that of its thinker). Raises ValueError."""
    from transformers import AutoConfig, WhisperFeatureExtractor
    from transformers.image_processing_backends import PilBackend

    keys = dict(trust_remote_code=False, local_files_only=True)
    try:
        config = AutoConfig.from_pretrained(folder, **keys)
        config = getattr(config, "thinker_config", config)
        kind = processor_class(config)
        if kind is None:
            raise ValueError(f"models of the type {config.model_type} have no processor")
        processor = of_images(kind).from_pretrained(folder, backend="pil", **keys)
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        raise ValueError(f"{folder}: its processor cannot be read: {error}; give a folder that has "
                         "the model's own, as its save_pretrained writes it") from error
    images, clips = (getattr(processor, name, None)
                     for name in ("image_processor", "feature_extractor"))
    if not isinstance(images, PilBackend) and (images is not None or clips is None):
        raise ValueError(f"{folder}: {type(processor).__name__} has no image processor that "
                         "resizes by Pillow, which has the same pixels everywhere")
    if clips is not None and (not isinstance(clips, WhisperFeatureExtractor) or clips.dither):
        raise ValueError(f"{folder}: the {type(clips).__name__} of its processor was not tested "
                         "or adds noise: choose a model with a WhisperFeatureExtractor whose "
                         "dither is 0")
    return processor, config


def processor_class(config: Any) -> type | None:
    """Of models of such a configuration, or of the thinker of one; None if they take no media."""
    from transformers import CONFIG_MAPPING, PROCESSOR_MAPPING

    return PROCESSOR_MAPPING.get(CONFIG_MAPPING[config.model_type.removesuffix("_thinker")], None)


def of_images(kind: type) -> type:
    """A class of processors without its part for videos."""
    class OfImages(kind):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name != "video_processor"]

        @classmethod
        def from_args_and_dict(cls, args: Any, processor_dict: dict, **keys: Any) -> Any:
            # Some classes have no default for it. In an omni class, where others follow it, these
            # are given by place, both here and from there on, and must not be moved.
            if super().get_attributes()[-1:] == ["video_processor"]:
                keys["video_processor"] = None
            others = {name: value for name, value in processor_dict.items()
                      if name != "video_processor"}  # transformers 5 saves its settings there
            return super().from_args_and_dict(args, others, **keys)

    OfImages.__name__ = kind.__name__  # which transformers compares
    return OfImages


def image_grids(processor: Any, out: Mapping[str, Any], features: Sequence[int], patch: int
                ) -> tuple[tuple[int, int, int], ...]:
    """(t, h, w) of each image of an example: t tiles of h x w patches. out: the tensors that a
    processor made of it; features: rows of features of each; patch: pixels of its side."""
    if "image_grid_thw" in out:
        return tuple(map(tuple, out["image_grid_thw"].tolist()))
    shape, sizes = out["pixel_values"].shape, out.get("image_sizes")
    h, w = shape[-2] // patch, shape[-1] // patch
    if sizes is not None and len(shape) == 4:  # padded to the largest image of the example
        return tuple((1, int(h) // patch, int(w) // patch) for h, w in sizes)
    if sizes is None or len(sizes) == 1 or shape[1] == 1:
        total = int(np.prod(shape[:-3]))
        return tuple((total * count // sum(features), h, w) for count in features)
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    pinpoints = processor.image_processor.image_grid_pinpoints
    return tuple((image_size_to_num_patches(size, pinpoints, shape[-1]), h, w)
                 for size in sizes.tolist())  # padded to the most tiles of the example


@contextmanager
def refused() -> Iterator[None]:
    """Raises RowError for what a processor raises: processors check little themselves."""
    try:
        yield
    except (MemoryError, RowError):
        raise
    except Exception as error:
        raise RowError(f"the processor of the model refuses it: {type(error).__name__}: {error}"
                       ) from error


def most_tokens(config: Any) -> int:
    """Of an example whose rotary positions do not depend on its neighbours: `dynamic` and
    `longrope` choose frequencies by the longest example of a batch. 0: of any."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    limits = []
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, Mapping))):  # of layers
        kind = parameters.get("rope_type", "")
        if kind == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(text.max_position_embeddings)
    return min(limits, default=0)
