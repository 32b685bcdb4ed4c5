"""A user's data and loop, for tests of the drop-in loader."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from orchmllm import BalancedDataLoader

VOCAB = 32


def length_of(i: int) -> int:
    return 3 + (i * i * 7) % 41


def example_of(i: int) -> dict:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(1, VOCAB, (length_of(i),), generator=g)
    labels = ids.clone()
    labels[:: 3] = -100
    return {"id": i, "input_ids": ids, "labels": labels}


class Texts(Dataset):
    """Example i is a function of i alone."""

    def __init__(self, size: int = 48) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict:
        return example_of(i)


class Stream(IterableDataset):
    """num_batches * batch_size examples, numbered from `first`."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __iter__(self):
        return (example_of(self.first + k) for k in range(self.size))


def collate(examples: list[dict]) -> dict:
    """Right-padded (B, T)."""
    longest = max(len(e["input_ids"]) for e in examples)
    out = {"ids": torch.tensor([e["id"] for e in examples])}
    for key, fill in (("input_ids", 0), ("labels", -100)):
        out[key] = torch.full((len(examples), longest), fill)
        for row, e in zip(out[key], examples, strict=True):
            row[: len(e[key])] = e[key]
    return out


def token_count(example: dict) -> int:
    return len(example["input_ids"])


def loader_of(*data: Any, **how: Any) -> BalancedDataLoader:
    """A loader that evens out sums of lengths, although `collate` pads."""
    return BalancedDataLoader(*data, **{"policy": "least_move", **how})
