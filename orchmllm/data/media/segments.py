"""A medium of an example -> its rows, or its bytes as they are stored; failures are reported."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from orchmllm.data.media.decode import decode_audio, decode_image, pixel_rows
from orchmllm.data.media.medium import MediaError, Medium, reading
from orchmllm.data.media.video import ppm
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry
from orchmllm.plan.layout import AUDIO, VISION

OnError = Callable[[int, MediaError], None] | None


class SegmentReader:
    """vision, audio: as the model has them."""

    def __init__(self, vision: VisionGeometry, audio: AudioGeometry) -> None:
        self.vision, self.audio = vision, audio

    def __call__(
        self, medium: Medium | MediaError, modality: int, rows: int, segment: int,
        on_error: OnError, *, encoded: bool = False,
        picture: np.ndarray | MediaError | None = None,
    ) -> Tensor:
        """(rows, values) of a medium, or, encoded, its bytes (n,) uint8. medium, picture (the frame
        of a video): an error is one that was met before. A medium that fails raises MediaError with
        `segment` set; with `on_error`, it is called with (segment, error) instead, and the rows are
        zeros (there are no bytes)."""
        try:
            for problem in (medium, picture):
                if isinstance(problem, MediaError):
                    raise problem
            if encoded:
                return _bytes_of(medium, picture)
            decoded = (pixel_rows(picture, self.vision) if picture is not None
                       else decode_image(medium, self.vision) if modality == VISION
                       else decode_audio(medium, self.audio))
            if len(decoded) == rows:
                return decoded
            raise MediaError(medium.name, f"decoded to {len(decoded)} rows where {rows} were "
                             "planned: the file has changed since its header was read")
        except MediaError as error:
            error.modality = modality
            fail(segment, error, on_error)
        if encoded:
            return torch.zeros(0, dtype=torch.uint8)
        if modality == AUDIO:
            return torch.zeros(rows, self.audio.row_size)
        return torch.zeros(rows, self.vision.row_size, dtype=torch.uint8)


def _bytes_of(medium: Medium, picture: np.ndarray | None) -> Tensor:
    """Of the file; of a frame of a video, as it is cut into patches."""
    if picture is not None:
        data = ppm(picture)
    else:
        with reading(medium) as file:
            data = file.read()
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def fail(segment: int, error: MediaError, on_error: OnError) -> None:
    """Tells `on_error` of a segment that failed; raises the error where there is nobody to tell."""
    error.segment = segment
    if on_error is None:
        raise error
    on_error(segment, error)
