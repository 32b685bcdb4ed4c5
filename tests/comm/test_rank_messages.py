"""Values between ranks come as they were sent, and nothing is made of bytes but what is known."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from orchmllm.batch import ProcessedExample
from orchmllm.comm.pieces import Form, Piece
from orchmllm.comm.value_bytes import decode
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.loading.rank_messages import packed, unpacked
from orchmllm.data.media.medium import MediaError, Medium, Sampled
from orchmllm.data.text.spans import Text
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout

LAYOUT = BatchLayout.from_segments(7, 2, [
    (TEXT, text_lengths(3)), (VISION, SegmentLengths(4, 4, 1, (1, 2, 2)))])
STORED = Medium(VISION, "a\udc80.png", data=b"\x00\xff", sampled=Sampled(0, (0.1, 1 / 3), 2.5))
TURNS = (Turn("user", ("What?", STORED), False),
         Turn("assistant", ("Ä",), True, ({"function": {"name": "f", "arguments": {"x": [1.5]}}},)))
VALUES = [
    ProcessedExample(7, torch.arange(3), torch.tensor([-100, 1, 2]),
                     {"grid": torch.ones(1, 3, dtype=torch.int64), "mask": torch.tensor(True)},
                     LAYOUT, arguments={1: "pixel_values"}),
    Piece("pixel_values", np.zeros((0, 3), np.int64), (Form(torch.bfloat16, (2, 3)), None),
          (None, torch.ones(1, 3, dtype=torch.int64))),
    MeasuredExample(LAYOUT, np.array([1, 2], np.int32), np.array([True, False]), [], None, TURNS,
                    [(np.int64(5), 6)], [Medium(AUDIO, ""), Text("x", True)], b"digest"),
]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and (
            one.shape == other.shape and bool((one == other).all()))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, f), getattr(other, f)) for f in one.__dataclass_fields__)
    return one == other


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_record_comes_as_it_was_sent(value):
    assert same(value, unpacked(packed(value))) and not same(value, unpacked(packed(VALUES)))


def test_an_error_comes_with_its_fields():
    error = MediaError("a.png", "cut off", 3, VISION)
    assert vars(unpacked(packed(error))) == vars(error)


def test_what_is_not_known_is_neither_sent_nor_made():
    with pytest.raises(TypeError, match=r"message\['a'\]\[0\] is a builtins.object"):
        packed({"a": [object()]})
    with pytest.raises(TypeError, match="SegmentLengths, which cannot"):
        packed(SegmentLengths(4, 4, 1, (1, 2, 2)))
    header = b'["n", ["ls"], "subprocess", "Popen"]'
    for read in (unpacked, decode):
        with pytest.raises(ValueError, match="a subprocess.Popen came"):
            read(np.frombuffer(np.uint64(len(header)).tobytes() + header, np.uint8))
    with pytest.raises(ValueError):
        unpacked(np.frombuffer(pickle.dumps(VALUES), np.uint8))
