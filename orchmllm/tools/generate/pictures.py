"""Images in the answer of a model that makes them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from orchmllm.models.made import key_of


def check(args: argparse.Namespace, model: nn.Module) -> None:
    """Raises ValueError where --out is given and the model makes no images."""
    if args.out and not hasattr(model, "generator"):
        raise ValueError(f"--out {args.out}: {args.folder} has no generator, so its answers have "
                         "no images: leave it out")


def write_pictures(model: nn.Module, folder: Path, given: Mapping[str, Tensor],
                   ids: Sequence[int], args: argparse.Namespace, log: Callable[[str], None]
                   ) -> None:
    """Makes the images of an answer, and writes those that --out asks for. folder: of the model's
    processor, and its VAE if it has one; given: what the model was given, input_ids (1, n) and its
    media; ids: of the answer. Raises OSError."""
    if not hasattr(model, "generator"):
        return
    settings = model.config.generator_config
    at = [k for k, token in enumerate(ids) if token == settings["token_id"]]
    if not at or not args.out:
        if at or args.out:
            log(f"the answer has {len(at)} images" + (
                f", so {args.out} is not written" if args.out else
                ": name a file for them with --out"))
        return
    part, side = model.generator, settings["side"]
    part.load_codec(folder, model.device, model.dtype)
    most = math.isqrt(settings["max_pixels"])
    grid = tuple(max(1, n // side) for n in (args.size or (most, most))[::-1])
    every = torch.cat([given["input_ids"], torch.tensor([ids]).to(given["input_ids"])], 1)
    for number, k in enumerate(at):
        end = given["input_ids"].shape[1] + k + 1
        told = {**given, "input_ids": every[:, :end]}
        states = model(**told, attention_mask=torch.ones_like(told["input_ids"]),
                       states_of=torch.arange(end), use_cache=False).hidden_states[0]
        rows = part.made(states, grid, args.steps, key_of(args.seed, number), args.guidance)
        out = args.out if len(at) == 1 else args.out.with_stem(f"{args.out.stem}_{number + 1}")
        Image.fromarray(part.codec.decoded(rows, grid)).save(out)
        log(f"written: {out} ({grid[1] * side} x {grid[0] * side} pixels, {args.steps} steps)")
