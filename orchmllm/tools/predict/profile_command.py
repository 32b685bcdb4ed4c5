"""Measures how long the phases of a recipe take on the device at hand, for the option --profile of
`orchmllm papers plan`.

    orchmllm profile recipes/demo.yaml --device cpu --repeat 1

Of blocks that are alike one or two are measured and count for all of them, so that a model fits
that would not as a whole (orchmllm.tools.predict.whole_runner). Forward is taken as a
third of forward and backward."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from orchmllm.cli.options import in_one_line, recipe_parser
from orchmllm.config.recipe import Recipe, load_recipe

SIZES = (1, 2, 4, 8)  # items of a measurement on a CPU
# Positions of one on a GPU, as many as a rank has in training: with fewer, kernels are shorter than
# their launch.
GPU_ROWS = (4096, 8192, 16384, 32768, 65536)
CHUNK_ROWS = 4096  # of the loss there, if the recipe makes it in one piece


OPTIONS = (("--out", Path("profile.json"), "where the times go"),
           ("--device", str, "cuda or cpu (cuda if there is a GPU)"),
           ("--rows", int, "positions of an item (256; on a GPU 1024, and items for 4k to 64k "
            "positions)"),
           ("--repeat", 3, "runs of which the quickest counts"))


def measure(recipe: Recipe, args: Namespace) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Phase by phase of those that the model has {rows, ms}: forward milliseconds of all the
    phase's layers at each size. Raises ValueError where its folder cannot be used."""
    import torch

    from orchmllm.tools.predict.whole_runner import timed_phases

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    chunk_rows = recipe.fsdp.loss_chunk_rows or CHUNK_ROWS * on_gpu
    for phase, length, seconds in timed_phases(
            recipe, args.rows or (1024 if on_gpu else 256), device,
            torch.bfloat16 if on_gpu else torch.float32, chunk_rows):
        sizes = sorted({max(rows // length, 1) for rows in GPU_ROWS}) if on_gpu else SIZES
        yield phase, {"rows": [n * length for n in sizes],
                      "ms": [1e3 / 3 * seconds(n, args.repeat) for n in sizes]}


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for a device that cannot measure, or a model that cannot be."""
    args = recipe_parser("profile", __doc__, OPTIONS).parse_recipe(argv)
    recipe, out = load_recipe(args.recipe, args.overrides), {}
    import torch

    if (args.device or "").startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch {torch.__version__} finds no GPU; use "
                         "--device cpu")
    try:
        for phase, out[phase] in measure(recipe, args):
            print(f"{phase:<7} " + ", ".join(f"{r} rows {m:.2f} ms" for r, m in zip(
                *out[phase].values(), strict=True)), flush=True)
    except RuntimeError as error:  # of torch: no such device, no memory
        raise ValueError(str(error)) from error
    args.out.write_text(json.dumps(out) + "\n", encoding="utf-8")
    print(f"written: {args.out} (forward of all layers, one device)")
    return 0
