"""Images that travel as bytes: the encoder gets bit by bit what the processor makes, or float32
travels."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from orchmllm.comm.pieces import Media
from orchmllm.config.recipe import DataConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.loading.whole_examples import feed_of
from orchmllm.data.loading.workers import Workers
from orchmllm.data.media.raw import as_bytes, one_of_copies, table_of
from orchmllm.data.stream import open_dataset
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.plan.assign import BalancePolicy, PlanSpec
from orchmllm.plan.layout import TEXT
from tests.data.test_processed import write_rows
from tests.lib.processors import FAMILIES
from tests.lib.whole_folders import write_model

FLOATS = 4
# Also of glm4v, whose frames are copies, of tiles, and of what is padded and cut again.
PROVEN = ("aya_vision", "gemma3", "gemma3_pan_and_scan", "glm4v", "internvl", "llava", "llava_next",
          "llava_onevision", "mistral3", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
FAST = ("qwen2_5_vl", "llava_onevision")


def opened(folder, name: str, sizes: list) -> tuple[PlannedEncoders, ConversationDataset]:
    FAMILIES[name](transformers)  # imports a processor that would need torchvision
    model = write_model(name.removesuffix("_pan_and_scan"), folder)
    write_rows(folder, name, sizes)
    rows = DataConfig(path=str(folder / "data.jsonl"))
    return PlannedEncoders(model), open_dataset(rows, str(folder), seed=0)


def of_media(rows: ConversationDataset, i: int, **options) -> list[dict]:
    segments = np.flatnonzero(rows.layout(i).modality != TEXT).tolist()
    return [*rows.load(i, segments=segments, **options).parts.values()]


@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROVEN])
def test_an_encoder_gets_bit_by_bit_what_the_processor_makes(tmp_path, name):
    """From bytes, of which there is one for each value of a frame; and with one bit of one value
    otherwise, nothing is proven."""
    sizes = [[(224, 224)], [(40, 60), (33, 90), (120, 40)]]
    encoders, rows = opened(tmp_path, name, sizes)
    for argument, find in rows.reader.processor.arithmetic().items():
        table, copies, samples = find()
        encoders.pixels[argument] = encoders.prove(table, copies, samples)
        assert encoders.raw[argument] == copies
    for i in range(len(sizes)):
        whole = of_media(rows, i)
        found = [encoders.described("vision", part) for part in of_media(
            rows, i, raw=encoders.raw)]
        media = Media.here(found)
        for piece, start, tensors in zip(found, media.starts.tolist(), whole, strict=True):
            [value, *others] = piece.views(media.data, start)
            made = encoders.described("vision", tensors).values
            assert value.dtype == torch.uint8 and made[0].dtype == torch.float32
            assert value.numel() * copies == made[0].numel()
            restored = encoders.pixels[piece.argument].restored(value)
            assert torch.equal(restored, made[0])
            for there, here in zip(others, made[1:], strict=True):  # integers stay on the host
                travels = here is not None and here.is_floating_point()
                assert torch.equal(there, here) if travels else there is None
    for channel, byte in ((0, 0), (1, 131), (2, 255)):
        table, copies, samples = next(iter(rows.reader.processor.arithmetic().values()))()
        bits = table.clone().view(torch.int32)
        bits[channel, byte] ^= 1
        with pytest.raises(ValueError, match="more than to rescale and to normalise"):
            encoders.prove(bits.view(torch.float32), copies, samples)


def test_an_image_of_256_patches_is_as_many_bytes_as_it_has_values(tmp_path):
    """Between a worker and its rank, and between ranks; 1,204,224 as the processor makes it."""
    encoders, rows = opened(tmp_path, "qwen2_5_vl", [[(224, 224)]])
    argument, find = next(iter(rows.reader.processor.arithmetic().items()))
    table, copies, samples = find()
    encoders.pixels[argument] = encoders.prove(table, copies, samples)
    values = 256 * 14**2 * 3
    segment = int(np.flatnonzero(rows.layout(0).modality != TEXT)[0])
    for raw, size in ((encoders.raw, values), ({}, values * copies * FLOATS)):
        workers = Workers(rows, 1)
        try:
            workers.start()
            answer = workers.processes[0].ask("load", [
                ((0,), {"text": False, "segments": [segment], "raw": raw})])
            assert size <= len(answer) <= size + 6000
        finally:
            workers.close()
        part = rows.load(0, segments=[segment], raw=raw).parts[segment]
        media = Media.here([encoders.described("vision", part)])
        assert len(media.data) == size
        assert len(pickle.dumps(media.pieces)) < 1000


def test_an_image_that_the_encoder_would_not_see_travels_as_float32(tmp_path):
    """A slot of zeros holds no image for this family, and black would be one."""
    encoders, rows = opened(tmp_path, "idefics3", [[(40, 60)]])
    table, copies, samples = next(iter(rows.reader.processor.arithmetic().values()))()
    with pytest.raises(ValueError, match="takes other parts of an image"):
        encoders.prove(table, copies, samples)


def test_values_that_no_sample_has_are_not_proven(tmp_path):
    encoders, rows = opened(tmp_path, "qwen2_5_vl", [[(40, 60)]])
    table, copies, samples = next(iter(rows.reader.processor.arithmetic().values()))()
    with pytest.raises(ValueError, match="not every value of a pixel was seen"):
        encoders.prove(table, copies, [*samples][:1])


def test_a_processor_without_these_steps_ends_nothing(tmp_path, monkeypatch):
    encoders, rows = opened(tmp_path, "qwen2_5_vl", [[(40, 60)]])
    monkeypatch.setattr(rows.reader.processor.calls.stock.image_processor, "rescale", None)
    told = []
    planned = PlanSpec({}, {"vision": 3 * 14**2}, 0, 1, BalancePolicy())
    _, spec = feed_of(SimpleNamespace(encoders=encoders), rows, planned, lambda row: row[None],
                      told.append)
    assert spec.row_bytes == {"vision": 3 * 14**2 * 2 * FLOATS}  # with both frames
    assert "pixel_values" not in encoders.pixels and len(told) == 1
    assert told[0].startswith("pixel_values travel as float32") and "TypeError" in told[0]


def test_values_that_are_no_bytes_are_refused():
    for values in ([0.5, 1.0], [-1.0, 3.0], [256.0, 0.0], [float("nan"), 0.0]):
        with pytest.raises(ValueError, match="not whole numbers from 0 to 255"):
            as_bytes(torch.tensor([values]))
    frames = torch.arange(24.0).reshape(2, 12)  # 3 channels, 2 frames of 2 values, which differ
    assert torch.equal(one_of_copies(frames, 2), frames)
    assert torch.equal(one_of_copies(frames[:, [0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9]], 2),
                       frames[:, [0, 1, 4, 5, 8, 9]])
    assert table_of(lambda image: image / np.float32(2)).shape == (3, 256)
