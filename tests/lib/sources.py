"""A dataset of one source, and a medium of one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orchmllm.batch import ProcessedExample
from orchmllm.config.recipe import SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.formats.row_formats import FORMATS
from orchmllm.data.lengths import LengthReader
from orchmllm.data.media.decode import decode_samples
from orchmllm.data.media.medium import Medium
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.storage.remote import NOWHERE, Storage
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import VISION

SOUND = AudioGeometry(16000)


def samples_of(medium: Medium) -> np.ndarray:
    """(n,) float32 at the rate of SOUND, mono."""
    return decode_samples(medium, SOUND)


def opened(path: Path | str, reader: LengthReader, folder: Path, storage: Storage = NOWHERE,
           **keys) -> ConversationDataset:
    """folder: its index is below it. keys: of the source."""
    return ConversationDataset(
        [SourceConfig(path=str(path), **keys)], reader=reader, index_dir=folder / "index",
        storage=storage)


def same_tensors(some: dict, others: dict) -> bool:
    """By name, with their dtypes, bit by bit."""
    return some.keys() == others.keys() and all(
        value.dtype == others[name].dtype and value.equal(others[name])
        for name, value in some.items())


def same_example(a: ProcessedExample, b: ProcessedExample) -> bool:
    """The same ids and labels, where there are any, and tensors of media and of parts."""
    texts = {"ids": a.input_ids, "labels": a.labels}, {"ids": b.input_ids, "labels": b.labels}
    said, also_said = ({n: v for n, v in text.items() if v is not None} for text in texts)
    return (same_tensors(said, also_said) and a.arguments == b.arguments
            and same_tensors(a.media, b.media) and a.parts.keys() == b.parts.keys()
            and all(same_tensors(a.parts[s], b.parts[s]) for s in a.parts))


def read_row(row: dict) -> Conversation:
    """A row as the first format that it fits reads it."""
    known = next(known for known in FORMATS.values() if known.fits(row))
    return known.reader.read(known.columns.pick(row), MediaRoot(""), "")


def medium_at(path: Path | str, modality: int = VISION) -> Medium:
    return Medium(modality, str(path), str(path))
