"""What balance_encoders adds to a forward.

    python scripts/bench_encoders.py --ranks 8 256 --images 8

First without the network, for one rank among many simulated ones: describing its images, reading
the table of all ranks, planning, and the indices of the exchanges. Then on 2 real gloo ranks with a
vision tower of Qwen2-VL's kind, where rank 0 holds three of four images: the forward without
balancing, planned only (shadow=True), and balanced. At last the CPU time that balancing adds to a
forward and backward on 4 ranks.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from orchmllm import Encoder, Packed, balance_encoders
from orchmllm.encoders.sharing import assign
from orchmllm.encoders.table import Tables, describe_local
from orchmllm.plan.cost import CostModel

QWEN2_VL = Encoder("vision", {"get_image_features": Packed(
    "pixel_values", "image_grid_thw", frames=True)}, towers=("visual",), cast=True)
COST = CostModel(6 * 32 * (4 * 1280**2 + 8 * 1280**2), 12 * 32 * 1280)
ROW = 1176  # values of a patch of Qwen2-VL


class Simulated:
    """Stands for the gather of one rank among many: the other rows are there already.
    sent: its own row."""

    def __init__(self, others: list[np.ndarray]) -> None:
        self.others, self.world_size = others, len(others) + 1

    def __call__(self, row: np.ndarray) -> np.ndarray:
        self.sent = row
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
    owner.visual = nn.Linear(1, 1, dtype=torch.bfloat16)
    out: dict[str, list[float]] = {}
    for _ in range(repeat):
        inputs = [images(rng, most) for _ in range(num_ranks)]
        locals_ = [describe_local(QWEN2_VL, owner, x) for x in inputs]
        alone, others = Simulated([]), []
        for local in locals_[1:]:
            Tables([QWEN2_VL], alone)(1, [local], None)
            others.append(alone.sent)
        tables = Tables([QWEN2_VL], Simulated(others))
        marks = [time.perf_counter()]
        describe_local(QWEN2_VL, owner, inputs[0])
        marks.append(time.perf_counter())
        (world,) = tables(1, locals_[:1], None)
        marks.append(time.perf_counter())
        plan = assign(QWEN2_VL, locals_[0], world, COST, min_gain=0.0, ranks_per_node=8)
        marks.append(time.perf_counter())
        patches = QWEN2_VL.layout.rows(world.meta)[0]
        plan.move.exchange(patches, 0)
        plan.move.inverse.exchange(patches[plan.move.order] // 4, 0)
        marks.append(time.perf_counter())
        parts = 1e3 * np.diff(marks)
        for name, ms in zip(("describe", "table", "plan", "indices"), parts, strict=True):
            out.setdefault(name, []).append(float(ms))
        out.setdefault("all", []).append(float(parts.sum()))
    return out


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config=dict(vocab_size=64, hidden_size=64, intermediate_size=128, bos_token_id=0,
                         eos_token_id=0, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2,
                         rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                          "mrope_section": [2, 3, 3]}),
        vision_config=dict(depth=3, embed_dim=384, hidden_size=64, num_heads=6, patch_size=14,
                           spatial_merge_size=2, temporal_patch_size=2),
        image_token_id=61, vision_start_token_id=60, vision_end_token_id=62, video_token_id=63))


def inputs_of(num_images: int, side: int) -> dict[str, torch.Tensor]:
    """One sequence with images of side x side patches."""
    grid = torch.tensor([[1, side, side]] * num_images)
    image = torch.cat([torch.tensor([60]), torch.full((side**2 // 4,), 61), torch.arange(1, 9)])
    ids = image.repeat(num_images)[None]
    return dict(input_ids=ids, pixel_values=torch.randn(int(grid.prod(1).sum()), ROW),
                image_grid_thw=grid, mm_token_type_ids=(ids == 61).int(), use_cache=False)


def real(rank: int, folder: str, num_ranks: int, repeat: int) -> None:
    """Prints the median milliseconds of the model's forward on two ranks; and the CPU time of this
    thread that balancing adds to a forward and backward on four, where nothing has to move."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank,
                            world_size=num_ranks)
    model, cpu = qwen2_vl(), num_ranks == 4
    inputs = inputs_of(2, 4) if cpu else inputs_of(6 if rank == 0 else 2, 24)
    clock = time.thread_time if cpu else time.perf_counter

    def step() -> float:
        times = []
        for _ in range(repeat):
            dist.barrier()
            started = clock()
            result = model(**inputs)
            if cpu:
                result.logits.sum().backward()
            else:
                dist.barrier()
            times.append(1e3 * (clock() - started))
        return float(np.median(times))

    step()
    out = {"without": step()}
    for name, options in (("planned only", {"shadow": True}), ("balanced", {})):
        handle = balance_encoders(model, **options)
        model(**inputs)
        out[name] = step()
        handle.remove()
    if rank == 0:
        what = ("4 ranks, CPU of a forward and backward" if cpu
                else "2 ranks, 6 and 2 images of 576 patches, forward")
        print(f"{what}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in out.items()))
    dist.destroy_process_group()


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
    for num_ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(real, (folder, num_ranks, args.repeat), nprocs=num_ranks)


if __name__ == "__main__":
    main()
