"""Jinja for chat templates: the sandbox that renders them, and what they look for in texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime

# What strftime_now writes: lengths and resumed runs must not depend on the day, so it is one day,
# which is also the date that Llama's template writes where there is no strftime_now.
TODAY = datetime(2024, 7, 26)
_LOOKS = {"split", "rsplit", "startswith", "endswith", "find", "rfind", "index", "count",
          "partition", "rpartition", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"}


def environment(*, marks: bool):
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: transformers' tag around what the assistant says."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Callable[[], str]) -> str:
            return f"\ue002{caller()}\ue003" if marks else caller()

    def refuse(message: str):
        raise ValueError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = TODAY.strftime
    return made


def undeclared(source: str) -> set[str]:
    """The variables that the template expects to be given; none of one that cannot be parsed."""
    from jinja2 import TemplateError, meta

    try:
        return meta.find_undeclared_variables(environment(marks=False).parse(source))
    except TemplateError:  # ChatTemplate says what is wrong with it
        return set()


def looked_for(source: str, special: Sequence[str]) -> re.Pattern | None:
    """The strings that the template looks for in texts; none that data must not write."""
    from jinja2 import nodes

    found: set[str] = set()
    tree = environment(marks=False).parse(source)
    for node in tree.find_all((nodes.Compare, nodes.Call)):
        asked, word = [], False
        if isinstance(node, nodes.Compare) and any(o.op in ("in", "notin") for o in node.ops):
            asked, word = [node.expr], True  # a word: the key of a message, as in 'tool' in m
        elif isinstance(node, nodes.Call) and getattr(node.node, "attr", None) in _LOOKS:
            asked = node.args
        found |= {c.value.strip() for c in asked if isinstance(c, nodes.Const)
                  and isinstance(c.value, str) and not (word and c.value.isidentifier())}
    found = {text for text in found if text and not any(token in text for token in special)}
    either = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
    return re.compile(f"({either})") if found else None
