"""What both ways to an answer share: how tokens are chosen, and where."""

from __future__ import annotations

import argparse

import torch


def sampling(args: argparse.Namespace) -> dict:
    """Arguments of transformers' generate, and the seed is set. args: of the command."""
    torch.manual_seed(args.seed)
    drawn = {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    return {"max_new_tokens": args.max_tokens, "do_sample": args.temperature > 0,
            **(drawn if args.temperature else {})}


def device_of(name: str) -> torch.device:
    """The device of a name; "": a GPU if there is one. Raises ValueError."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} finds no GPU; use "
                         "--device cpu")
    try:
        return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device {name}: choose cpu or cuda") from error
