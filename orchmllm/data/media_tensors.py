"""The tensors that a processor of transformers makes of an example, cut into those of single
media."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import IN_ONE_ROW
from orchmllm.data.media.kinds import VIDEO
from orchmllm.plan.layout import AUDIO, VISION

VIDEOS = "pixel_values_videos"  # the argument that holds videos
OF_EXAMPLE = "batch_num_images"  # says of an example how many images it has
TYPES = {VISION: 1, VIDEO: 2, AUDIO: 3}  # of tokens that stand for features, as transformers has it
# How the names of tensors begin that hold images or their sizes.
_OF_IMAGES = ("pixel_", "image_")


def is_content(name: str) -> bool:
    """Whether a tensor of a processor holds pixels or frames, which the encoder alone reads."""
    return name.startswith("pixel_") or name == "input_features"


def parts(tensors: Mapping[str, Tensor], grids: np.ndarray) -> list[dict[str, Tensor]]:
    """The tensors of each of n images, as one image has them in a batch of its own: a view each.
    tensors: those of an example with these images alone, by the argument of the model; grids
    (n, 3): of each, (t, h, w), t tiles of h x w patches. A tensor has a row for an image, a tile or
    a patch; padding to the largest image of the example stays, and so does the number of its
    images. Raises ValueError for one that has another number of rows."""
    t, h, w = grids.T
    ways = (np.ones_like(t), t, t * h * w)  # where two have as many rows, they are the same
    out: list[dict[str, Tensor]] = [{} for _ in grids]
    for name, value in tensors.items():
        if name == OF_EXAMPLE:
            out = [part | {name: value} for part in out]
        if not name.startswith(_OF_IMAGES) or name == VIDEOS:
            continue
        across = int(IN_ONE_ROW in tensors)
        rows = value.shape[across]
        counts = next((way for way in ways if way.sum() == rows), None)
        if counts is None:
            raise ValueError(f"{name} has {rows} rows, which are neither those of {len(grids)} "
                             f"images nor of their tiles or patches ({t.sum()}, {ways[2].sum()})")
        for part, piece in zip(out, value.split(counts.tolist(), across), strict=True):
            part[name] = piece
    return out


def parts_of_slices(tensors: Mapping[str, Tensor], grids: np.ndarray) -> list[dict[str, Tensor]]:
    """The same of each of n slices of videos, of which `tensors` hold the pixels of these alone.
    grids (n, 3): 1, and the patches of each."""
    pixels = tensors[VIDEOS].split(grids.prod(1).tolist()) if len(grids) else ()
    return [{VIDEOS: rows, "video_grid_thw": torch.from_numpy(grid[None])}
            for rows, grid in zip(pixels, grids, strict=True)]


def parts_of_clips(tensors: Mapping[str, Tensor], grids: np.ndarray) -> list[dict[str, Tensor]]:
    """The same of each of n clips, which have as many windows; of one that is not a window, without
    padding. grids (n, 3): 1, 1 and the frames of each."""
    of_clips = {n: v for n, v in tensors.items() if n.startswith(("input_features", "feature_"))}
    out: list[dict[str, Tensor]] = [{} for _ in grids]
    for name, value in of_clips.items():
        frames = np.minimum(grids[:, 2], value.shape[-1]).tolist()
        for part, piece, count in zip(out, value.tensor_split(len(grids)), frames, strict=True):
            part[name] = piece[..., :count]
    return out


class MediumKind(NamedTuple):
    """name: of one medium, for people. content: the argument of the model that holds the media."""

    name: str
    content: str
    parts: Callable[[Mapping[str, Tensor], np.ndarray], list[dict[str, Tensor]]]


KINDS = {VISION: MediumKind("image", "pixel_values", parts),
         VIDEO: MediumKind("video", VIDEOS, parts_of_slices),
         AUDIO: MediumKind("clip", "input_features", parts_of_clips)}
