"""Jinja for chat templates: transformers' environment, in jinja's sandbox; and the same for Traced
texts, where what is written says which turn it belongs to and what {% generation %} is around."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from jinja2 import TemplateError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from orchmllm.data.text.traced import (
    BEGUN,
    ENDED,
    ENTERED,
    LEFT,
    Traced,
    as_json,
    between,
    joined,
)

# What strftime_now writes: lengths and resumed runs must not depend on the day, so it is one day,
# which is also the date that Llama's template writes where there is no strftime_now.
TODAY = datetime(2024, 7, 26)


class Message(dict):
    """A message, or a call of a tool in one. _event: what is written when a loop comes to it, under
    a name that jinja's sandbox hides from templates."""

    def __init__(self, keys: Mapping, turn: int, *, is_call: bool = False) -> None:
        super().__init__(keys)
        self._event = ENTERED + 2 * turn + is_call


class _Generation(Extension):
    """{% generation %}: transformers' tag around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller: Callable[[], str]) -> str:
        if not isinstance(self.environment, TracingEnvironment):
            return caller()
        return joined((_event(BEGUN), caller(), _event(ENDED)))


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
    """Writes Traced texts, with events: the one-character texts of `_event`."""

    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__()
        self.filters |= {
            "join": self._join, "concatenated": lambda texts: joined(map(str, texts)),
            "safe": lambda value: value if isinstance(value, Traced) else Markup(value),
            "entered": _entered, "left": _left}
        self._plain_join = Environment().filters["join"]

    def _parse(self, *args):
        return _Instrumented().visit(super()._parse(*args))

    def _join(self, texts: Iterable, between_them: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            texts = [self.getitem(text, attribute) for text in texts]
        return joined(between(between_them, map(str, texts)))


def _event(code: int, loop: int = 0) -> Traced:
    return Traced(chr(loop), chr(code))


@pass_context
def _entered(context, value: object, loop: int) -> str:
    return _event(value._event, loop) if isinstance(value, Message) else ""


@pass_context
def _left(context, loop: int) -> str:
    return _event(LEFT, loop)


class _Instrumented(NodeTransformer):
    """Writes an event wherever a loop over turns or calls comes to the next, and where it ends."""

    num_loops = 0

    def visit_For(self, node: nodes.For):
        self.generic_visit(node)
        if not (isinstance(node.target, nodes.Name)
                and ("role" in _keys(node, node.target.name) or "tool_calls" in _keys(node.iter))):
            return node
        self.num_loops += 1
        loop = nodes.Const(self.num_loops)
        turn = nodes.Name(node.target.name, "load")
        node.body.insert(0, _written(nodes.Filter(turn, "entered", [loop], [], None, None), node))
        return [node, _written(nodes.Filter(loop, "left", [], [], None, None), node)]

    def visit_Concat(self, node: nodes.Concat):
        self.generic_visit(node)
        texts = nodes.List(node.nodes)
        return nodes.Filter(texts, "concatenated", [], [], None, None).set_lineno(node.lineno)


def _written(expression: nodes.Expr, near: nodes.Node) -> nodes.Output:
    return nodes.Output([expression]).set_lineno(near.lineno)


def _keys(node: nodes.Node, of: str = "") -> set[object]:
    """The attributes and keys that are read in `node`, of the variable `of` if that is given."""
    inner = nodes.Output([node]) if isinstance(node, nodes.Expr) else node
    found = [n for n in inner.find_all((nodes.Getattr, nodes.Getitem))
             if not of or getattr(n.node, "name", None) == of]
    keys = {n.attr if isinstance(n, nodes.Getattr) else getattr(n.arg, "value", None)
            for n in found}
    if not of:
        keys |= {n.value for n in inner.find_all(nodes.Const)}  # as in message.get("tool_calls")
    return keys


def undeclared(source: str) -> set[str]:
    """The variables that the template expects to be given; none of one that cannot be parsed."""
    try:
        return meta.find_undeclared_variables(Environment().parse(source))
    except TemplateError:  # ChatTemplate says what is wrong with it
        return set()
