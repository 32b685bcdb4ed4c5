"""Parts of the examples of a model of transformers: a medium's tensors are those of the whole
example, and what is not asked for is not read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from orchmllm.data.media.shapes import Size
from orchmllm.data.media_tensors import parts
from orchmllm.data.text.processor import Processor
from tests.data.test_processed import drawn, opened, write_rows
from tests.lib.processors import write_processor

OF_IMAGES = (
    "aya_vision", "gemma3", "gemma3_pan_and_scan", "glm4v", "idefics3", "internvl", "llava",
    "llava_next", "llava_onevision", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
FAST = ("llava_onevision", "idefics3")


def cut(example) -> dict[int, dict]:
    """By segment, from the tensors of the whole example."""
    at = np.flatnonzero(example.lengths.modality == 1)
    return dict(zip(at.tolist(), parts(example.media, example.lengths.grid[at]), strict=True))


def same(some: dict, others: dict) -> bool:
    return some.keys() == others.keys() and all(
        some[n].dtype == others[n].dtype and torch.equal(some[n], others[n]) for n in some)


@pytest.mark.parametrize("family", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OF_IMAGES])
def test_a_medium_s_tensors_are_bit_equal_to_its_part_of_the_whole_example(tmp_path, family):
    """Also where the files of the other images are gone."""
    sizes = [*drawn(4, 3, 5), [(40, 60)], [], [(33, 90), (120, 40), (64, 64)]]
    write_rows(tmp_path, family, sizes)
    rows = opened(tmp_path, family)
    whole = [rows.load(i) for i in range(len(sizes))]
    files = {path: path.read_bytes() for path in tmp_path.glob("*.png")}
    for path in files:
        path.unlink()
    for i, example in enumerate(whole):
        wanted = cut(example)
        assert len(wanted) == len(sizes[i])
        text = rows.load(i, segments=[])
        assert text.parts == {} and list(text.arguments) == list(wanted)
        assert torch.equal(text.input_ids, example.input_ids)
        assert torch.equal(text.labels, example.labels)
        assert same(text.media, {n: v for n, v in example.media.items()
                                 if not n.startswith("pixel_")})
        for m, (segment, tensors) in enumerate(wanted.items()):
            path = tmp_path / f"{i}_{m}.png"
            path.write_bytes(files[path])
            part = rows.load(i, text=False, segments=[segment])
            assert part.input_ids is None and part.labels is None
            assert list(part.parts) == [segment] and same(part.parts[segment], tensors)
            path.unlink()


def test_lengths_of_a_large_image_take_no_memory_for_its_patches(tmp_path):
    """Which would have 6 values for each pixel."""
    processor = Processor(write_processor("qwen2_5_vl", tmp_path), {
        "size": {"shortest_edge": 1 << 12, "longest_edge": 1 << 24}})
    image = Size(2800, 1400)
    tracemalloc.start()
    try:
        [[(t, h, w)]] = processor.calls.expanded((image,)).grids
        assert (t, h * processor.patch, w * processor.patch) == (1, *image[:2])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
