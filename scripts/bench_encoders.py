"""What balance_encoders adds to a forward, without the network: describing one rank's images,
reading the table of all ranks, planning, and the indices of the exchanges, for one rank among many
simulated ones.

    python scripts/bench_encoders.py --ranks 8 256 --images 8
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

from orchmllm.dropin.encoders.assignment import assign
from orchmllm.dropin.encoders.families import FAMILIES
from orchmllm.dropin.encoders.table import Tables, describe_local
from orchmllm.plan.cost import CostModel

QWEN2_VL = FAMILIES["qwen2_vl"].encoders[0]
COST = CostModel(6 * 32 * (4 * 1280**2 + 8 * 1280**2), 12 * 32 * 1280)
ROW = 1176  # values of a patch of Qwen2-VL


class Simulated:
    """Stands for the gather of one rank among many: the other rows are there already."""

    def __init__(self, others: list[np.ndarray]) -> None:
        self.others, self.world_size = others, len(others) + 1

    def __call__(self, row: np.ndarray) -> np.ndarray:
        rows = np.zeros((self.world_size, len(row)), np.int64)
        rows[0] = row
        for out, other in zip(rows[1:], self.others, strict=True):
            out[: len(other)] = other[: len(row)]
        return rows


def images(rng: np.random.Generator, most: int) -> dict[str, torch.Tensor]:
    """0 to `most` images of 64 to 4,096 patches."""
    sides = 2 * rng.integers(4, 33, (int(rng.integers(0, most + 1)), 2))
    grid = torch.from_numpy(np.column_stack([np.ones(len(sides), np.int64), sides]))
    return {"pixel_values": torch.empty(int(grid.prod(1).sum()), ROW, dtype=torch.bfloat16),
            "image_grid_thw": grid}


def measure(num_ranks: int, most: int, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of each part, `repeat` times."""
    rng, owner = np.random.default_rng(0), nn.Module()
    out: dict[str, list[float]] = {}
    for _ in range(repeat):
        inputs = [images(rng, most) for _ in range(num_ranks)]
        locals_ = [describe_local(QWEN2_VL, owner, x, torch.bfloat16) for x in inputs]
        tables = Tables([QWEN2_VL], Simulated([]))
        rows = [tables._row([x], [(1, 1)]) for x in locals_]
        for row in rows:
            row[:3] = 1, 0, len(row)
        tables = Tables([QWEN2_VL], Simulated(rows[1:]))
        tables._capacity = max(map(len, rows))
        marks = [time.perf_counter()]
        describe_local(QWEN2_VL, owner, inputs[0], torch.bfloat16)
        marks.append(time.perf_counter())
        (world,) = tables(1, locals_[:1], [(1, 1)], None)
        marks.append(time.perf_counter())
        plan = assign(QWEN2_VL, world, COST, tolerance=None, min_gain=0.0, ranks_per_node=8,
                      shadow=False)
        marks.append(time.perf_counter())
        patches = QWEN2_VL.layout.rows(world.meta)[0]
        plan.move.exchange(patches, 0)
        plan.move.inverse().exchange(patches[plan.move.order] // 4, 0)
        marks.append(time.perf_counter())
        parts = 1e3 * np.diff(marks)
        for name, ms in zip(("describe", "table", "plan", "indices"), parts, strict=True):
            out.setdefault(name, []).append(float(ms))
        out.setdefault("all", []).append(float(parts.sum()))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--images", type=int, default=8, help="at most so many on a rank")
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    for num_ranks in args.ranks:
        parts = measure(num_ranks, args.images, args.repeat)
        print(f"{num_ranks} ranks, up to {args.images} images each: " + ", ".join(
            f"{name} {np.median(ms):.2f}" for name, ms in parts.items())
            + f" ms (median of {args.repeat}; worst {max(parts['all']):.2f})")


if __name__ == "__main__":
    main()
