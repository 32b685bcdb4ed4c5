"""Measures how long the phases of a recipe take on the device at hand, for the option --profile of
`orchmllm papers plan`.

    orchmllm profile recipes/demo.yaml --device cpu --repeat 1

Two depths are measured and the difference scaled to the recipe's layers, so that a model fits that
would not as a whole. Forward is taken as a third of forward and backward."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from orchmllm.cli.options import in_one_line, recipe_parser
from orchmllm.config.recipe import load_recipe
from orchmllm.plan.assign import PHASES

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


def measure(recipe, phase: str, args: Namespace) -> dict[str, list[float]]:
    """{rows, ms}: forward milliseconds of all the phase's layers at each size."""
    import numpy as np
    import torch

    from orchmllm.models.flops import lengths_of
    from orchmllm.tools.predict.phase_runner import PhaseRunner, Work, shortened

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = getattr(recipe.model, phase)
    side = config.merge_size if phase == "vision" else 1  # an image is a strip of whole tokens
    group = side**2 if phase != "audio" else config.stack
    on_gpu = device.type == "cuda"
    length = max((args.rows or (1024 if on_gpu else 256)) // group, 1) * group
    sizes = sorted({max(rows // length, 1) for rows in GPU_ROWS}) if on_gpu else SIZES
    grid = [1, side, (2 if phase == "audio" else 1) * length // side]
    totals = []
    for depth in (1, 2):
        model = shortened(recipe.model, depth)
        model = replace(model, **{phase: replace(getattr(model, phase), pretrained="")})
        runner = PhaseRunner(model, phase, device, dtype, recipe.run.seed,
                             recipe.fsdp.loss_chunk_rows or CHUNK_ROWS * on_gpu)
        totals.append([runner.seconds(Work(
            phase, lengths_of(phase, config, np.full(n, length)), np.tile(grid, (n, 1))),
            args.repeat) for n in sizes])
    first, second = np.array(totals)
    layers = max(config.num_layers - 1, 0)
    ms = 1e3 / 3 * (first + layers * np.maximum(second - first, 1e-9))
    return {"rows": [n * length for n in sizes], "ms": ms.tolist()}


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for a device that cannot measure, or a model that cannot be."""
    args = recipe_parser("profile", __doc__, OPTIONS).parse_recipe(argv)
    recipe, out = load_recipe(args.recipe, args.overrides), {}
    recipe.model.require_parts(
        "two layers of a phase are measured for all of them, but its layers need not be alike "
        "(windows, experts): leave --profile out of orchmllm papers plan, which then goes by FLOP")
    import torch

    if (args.device or "").startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch {torch.__version__} finds no GPU; use "
                         "--device cpu")
    try:
        for phase in PHASES:
            out[phase] = measure(recipe, phase, args)
            print(f"{phase:<7} " + ", ".join(f"{r} rows {m:.2f} ms" for r, m in zip(
                out[phase]["rows"], out[phase]["ms"], strict=True)), flush=True)
    except RuntimeError as error:  # of torch: no such device, no memory
        raise ValueError(str(error)) from error
    args.out.write_text(json.dumps(out) + "\n", encoding="utf-8")
    print(f"written: {args.out} (forward of all layers, one device)")
    return 0
