"""A conversation as it is tokenized: what the template writes, the texts of the data, and media."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import Medium

NONE, END, ALL = "none", "end", "all"


class Text(NamedTuple):
    """learnt: NONE, ALL, or END: the special token that ends an answer, if nothing but space comes
    before it. of_data: whether it is the data's text, which cannot write special tokens, and not
    the template's."""

    text: str
    learnt: str
    of_data: bool = False


Span = Text | Medium


def with_calls(turn: Turn) -> Turn:
    """A turn whose calls of tools are text, as Qwen's and Hermes' templates write them."""
    text = "\n".join("<tool_call>\n" + json.dumps(call, ensure_ascii=False) + "\n</tool_call>"
                     for call in turn.calls)
    between = "\n" if text and any(turn.parts) else ""
    return turn._replace(parts=(*turn.parts, between + text), calls=()) if text else turn


def spans_of(parts: Sequence[str | Medium], supervised: bool) -> list[Span]:
    """A turn's parts as spans."""
    learnt = ALL if supervised else NONE
    return [p if isinstance(p, Medium) else Text(p, learnt, True) for p in parts if p]
