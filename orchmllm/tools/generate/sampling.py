"""What both ways to an answer share: how a question is read, how tokens are chosen, and where."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from orchmllm.batch import ProcessedExample
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.medium import MediaError


def asked(reader: LengthReader, turns: Sequence[Turn]
          ) -> tuple[ProcessedExample, MeasuredExample]:
    """A question as training reads a row of data, with an answer behind it. reader: one that loads
    rows, too. Raises ValueError for what cannot be read."""
    [row] = reader.plan(lambda _: (*turns, Turn("assistant", ("a",), True)), [0])
    try:
        if row.problem is not None:
            raise row.problem
        return reader.load(row, lambda: "the question"), row
    except MediaError as error:
        raise ValueError(str(error)) from error


def sampling(args: argparse.Namespace) -> dict:
    """Arguments of transformers' generate, and the seed is set. args: of the command."""
    torch.manual_seed(args.seed)
    drawn = {"temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    return {"max_new_tokens": args.max_tokens, "do_sample": args.temperature > 0,
            **(drawn if args.temperature else {})}


def length_told(before: int, count: int, args: argparse.Namespace, *, ended: bool) -> str:
    """What is said of an answer of `count` tokens after `before` others. ended: by itself."""
    cut = "" if ended else f": cut off at --max-tokens {args.max_tokens}"
    return f"{before} tokens before the answer, {count} in it{cut}"


def device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
