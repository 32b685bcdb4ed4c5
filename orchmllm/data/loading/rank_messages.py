"""Values that ranks send each other as bytes: numbers, texts, arrays, and records of the classes
that are named here."""

from __future__ import annotations

from functools import partial

from orchmllm.batch import ProcessedExample
from orchmllm.comm import value_bytes
from orchmllm.comm.pieces import Form, Piece
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.media.medium import Frame, MediaError, Medium, Sampled, VideoHeader
from orchmllm.data.text.spans import Text
from orchmllm.plan.layout import BatchLayout

RECORDS = {record.__name__: record for record in (
    BatchLayout, Form, Frame, MeasuredExample, MediaError, Medium, Piece, ProcessedExample, Sampled,
    Text, Turn, VideoHeader)}
packed = partial(value_bytes.encode, records=RECORDS, name="message")
unpacked = partial(value_bytes.decode, records=RECORDS)
