"""Times attention alone on a GPU, forward and backward, by the length of the items of a row, and
fits to it the share of the peak that predictions assume: most * n / (n + half), where a position
attends to n on average.

    python -m scripts.gpu.attention [FILE.jsonl] [--gpu h200]

FILE: seconds that were measured before, a line each; without it they are measured and printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from orchmllm.models.gpus import GPUS
from scripts.gpu.drawn import COMPOSITIONS
from scripts.gpu.parts import TOKENS
from scripts.gpu_parts import compare_attention

LEAST = 512  # positions of an item, below which a pass takes as long as its kernels' launch


def measure(positions: int, device: torch.device) -> list[dict]:
    """Of the images and of the texts of the model that `train-none` trains."""
    llm, vision, *_, kv_heads = COMPOSITIONS["7b"]
    rows = []
    for (_, width, _, heads), kv, causal in ((vision, vision[-1], False), (llm, kv_heads, True)):
        for length in 2**np.arange(6, 15):
            found = {"heads": heads, "kv_heads": kv, "head_size": width // heads, "causal": causal,
                     "positions": positions, "length": int(length)}
            lengths = np.full(positions // length, length)
            rows.append(found | {"seconds": compare_attention(
                heads, kv, width // heads, causal, lengths, device, torch.bfloat16, 3
            )["kernel_s"]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def shares(rows: list[dict], peak: float) -> tuple[np.ndarray, np.ndarray]:
    """(positions to which one attends, share of the peak); the backward pass counts as two forward
    passes, as in orchmllm.models.flops."""
    attended, share = [], []
    for r in rows:
        attended.append((r["length"] + 1) / 2 if r["causal"] else r["length"])
        flop = 3 * 4 * r["heads"] * r["head_size"] * r["positions"] * attended[-1]
        share.append(flop / r["seconds"] / peak)
    return np.array(attended), np.array(share)


def fit(rows: list[dict], peak: float) -> tuple[float, float]:
    """(most, half) with the least squares of relative errors, of items from LEAST on."""
    attended, share = shares([r for r in rows if r["length"] >= LEAST], peak)
    each, ones = np.stack([share, share / attended], axis=1), np.ones(len(share))
    slope, cut = np.linalg.lstsq(each, ones, rcond=None)[0]
    return float(1 / slope), float(cut / slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    args = parser.parse_args()
    rows = ([json.loads(line) for line in args.file.read_text().splitlines()] if args.file else
            measure(TOKENS, torch.device("cuda")))
    peak = GPUS[args.gpu].bfloat16
    most, half = fit(rows, peak)
    for row, n, share in zip(rows, *shares(rows, peak), strict=True):
        print(f"{row['heads']:>3} heads of {row['head_size']:<4}{row['length']:>6} positions: "
              f"{share:.3f}, fitted {most * n / (n + half):.3f}")
    print(f"{most:.3f} n / (n + {half:.0f})")


if __name__ == "__main__":
    main()
