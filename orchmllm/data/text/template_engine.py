"""Jinja for chat templates: transformers' environment, in jinja's sandbox; and the same for Traced
texts, where what is written says which turn it is of and what {% generation %} is around."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from orchmllm.data.text.traced import (
    BLOCK,
    CALL,
    SOURCE,
    TURN,
    Traced,
    as_json,
    between,
    joined,
    recoded,
)

# What strftime_now writes: lengths and resumed runs must not depend on the day, so it is one day,
# which is also the date that Llama's template writes where there is no strftime_now.
TODAY = datetime(2024, 7, 26)


class Message(dict):
    """A message, or a call of a tool in one. _code: of what a loop writes when it is there, under a
    name that jinja's sandbox hides from templates."""

    def __init__(self, keys: Mapping, turn: int, *, is_call: bool = False) -> None:
        super().__init__(keys)
        self._code = TURN * (turn + 1) + CALL * is_call


class _Generation(Extension):
    """{% generation %}: transformers' tag around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller: Callable[[], str]) -> str:
        text = caller()
        return recoded(text, lambda code: code | BLOCK)


def _refuse(message: str):
    raise TemplateError(message)


class Environment(ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True,
                         extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = as_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = TODAY.strftime


class TracingEnvironment(Environment):
    """Writes Traced texts. captures: whether they say which turn a loop was at; then what a loop
    writes before it goes on to the next with `continue` is lost."""

    concat = staticmethod(joined)

    def __init__(self, captures: bool) -> None:
        super().__init__()
        self._captures = captures
        self.filters |= {
            "join": self._join, "concatenated": lambda texts: joined(map(str, texts)),
            "safe": lambda value: value if isinstance(value, Traced) else Markup(value),
            "written_at": _written_at}

    def _parse(self, *args):
        return _Instrumented(self._captures).visit(super()._parse(*args))

    def _join(self, texts: Iterable, sep: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            texts = [self.getitem(text, attribute) for text in texts]
        return joined(between(sep, map(str, texts)))


def _written_at(text: str, value: object) -> str:
    """What a loop wrote when it was at `value`. Loops inside it have said so before."""
    if not isinstance(value, Message):
        return text
    return recoded(text, lambda code: code if code & ~BLOCK > SOURCE else code | value._code)


class _Instrumented(NodeTransformer):
    """Captures what the body of a loop writes, and says what the loop was at."""

    def __init__(self, captures: bool) -> None:
        self._captures = captures

    def visit_For(self, node: nodes.For):
        self.generic_visit(node)
        if self._captures and isinstance(node.target, nodes.Name):
            at = nodes.Name(node.target.name, "load")
            written = nodes.Filter(nodes.Name("written_", "load"), "written_at", [at], [], None,
                                   None)
            node.body = [nodes.AssignBlock(nodes.Name("written_", "store"), None, node.body),
                         nodes.Output([written])]
            for inner in node.body:
                inner.set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat):
        self.generic_visit(node)
        texts = nodes.List(node.nodes)
        return nodes.Filter(texts, "concatenated", [], [], None, None).set_lineno(node.lineno)


def undeclared(source: str) -> set[str]:
    """The variables that the template expects to be given; none of one that cannot be parsed."""
    try:
        return meta.find_undeclared_variables(Environment().parse(source))
    except TemplateError:  # ChatTemplate says what is wrong with it
        return set()
