"""Examples with 0 to 3 small images each, whose vision phase a loader places by itself."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from orchmllm import Segment

PATCH, MERGE, TEMPORAL = 4, 2, 2
ROW = 3 * TEMPORAL * PATCH**2
VISION_START, IMAGE = 60, 61


class Pictures(Dataset):
    """Example i: 0 to 3 images of 4 to 64 patches between pieces of text."""

    def __init__(self, size: int = 256) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict:
        g = torch.Generator().manual_seed(i)
        ids, images = [torch.randint(1, 50, (4,), generator=g)], []
        for _ in range(int(torch.randint(0, 4, (1,), generator=g))):
            h, w = (MERGE * torch.randint(1, 5, (2,), generator=g)).tolist()
            rows = torch.randn(h * w, ROW, generator=g, dtype=torch.float64)
            images.append({"rows": rows, "grid": [1, h, w]})
            ids += [torch.tensor([VISION_START]), torch.full((h * w // MERGE**2,), IMAGE),
                    torch.randint(1, 50, (int(torch.randint(2, 24, (1,), generator=g)),),
                                  generator=g)]
        return {"input_ids": torch.cat(ids), "images": images,
                "grids": [image["grid"] for image in images]}


def segments(example: dict) -> list[Segment]:
    """Lengths of an example's pieces, in reading order."""
    num_images = sum(len(x["rows"]) // MERGE**2 for x in example["images"])
    return [Segment("text", len(example["input_ids"]) - num_images)] + [
        Segment("vision", len(x["rows"]) // MERGE**2, rows=len(x["rows"]), grid=tuple(x["grid"]))
        for x in example["images"]]


def collate_images(images: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, grid) of the images that this rank encodes."""
    return (torch.cat([torch.zeros(0, ROW, dtype=torch.float64), *(x["rows"] for x in images)]),
            torch.tensor([x["grid"] for x in images], dtype=torch.int64).reshape(-1, 3))


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    """The LLM's side: padded text, and the grids of ITS images (not of those it encodes)."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [e["input_ids"] for e in examples], batch_first=True, padding_value=0)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    labels = labels.masked_fill((labels == 0) | (labels == IMAGE), -100)
    # transformers cannot join an empty list of images: one without patches stands for none.
    grids = [g for e in examples for g in e["grids"]] or [[0, 0, 0]]
    return {"input_ids": ids, "labels": labels, "grid": torch.tensor(grids),
            "mask": (ids != 0).long()}
