"""What schemes are compared on: the models of OrchMLLM's Table 1 and, beside the lengths of its
data, modelled ones of no published set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchmllm.config.model import ModelConfig
from orchmllm.tools.init.command import RECIPES
from orchmllm.tools.predict.workload import SAMPLE_RATE, Headers, sample_headers

MODELS = {size: ModelConfig(config=str(RECIPES / "configs" / f"mllm{size}"))
          for size in ("10b", "18b", "84b")}
MIXES = ("natural", "omni", "documents", "video", "bimodal audio")
PAGE, FRAME = (1240, 1754), (640, 360)  # A4 at 150 dots an inch; 360p


def headers_of(mix: str, num_examples: int, seed: int) -> Headers:
    """Examples of a mix of MIXES, seeded. From the third on half of them have an image and half a
    clip, and differ in this: `documents` have 1 to 20 pages for the image, each with about 400
    tokens; `video` has 4 to 64 frames for it; in `bimodal audio` clips have 1 or 29 s."""
    if mix in MIXES[:2]:
        return sample_headers(mix, num_examples, seed)
    made, rng = sample_headers("half", num_examples, seed), np.random.default_rng(seed + 1)
    image, n, text, size = made.is_image, num_examples, made.text.copy(), made.size.copy()
    pages, frames = np.minimum(rng.geometric(0.25, n), 20), rng.integers(4, 65, n)
    count = np.where(image, {"documents": pages, "video": frames}.get(mix, 1), 1)
    if mix == "bimodal audio":
        size[~image, 0] = SAMPLE_RATE * rng.choice([1, 29], (~image).sum())
    else:
        size[image] = PAGE if mix == "documents" else FRAME
    if mix == "documents":
        text += (image * count * rng.lognormal(5.8, 0.6, n)).astype(np.int64)
    return replace(made, text=text, media_per_example=count,
                   modality=made.modality.repeat(count), size=size.repeat(count, axis=0))
