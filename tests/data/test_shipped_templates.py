"""The chat templates that packages of other projects ship: whatever they write around turns, and
with tools, no word of the system, the user or a tool is learnt, and every word of an answer that is
written is. Templates of a package that is not installed are not tested."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import RowError
from orchmllm.data.text.spans import Text
from orchmllm.data.text.templates import ChatTemplate
from tests.data.test_trl_templates import FAST, TOKEN


def shipped() -> dict[str, str]:
    """Package and name -> template."""
    out = {}
    for package in ("trl", "axolotl"):
        found = importlib.util.find_spec(package)
        for path in sorted(Path(found.origin).parent.rglob("*.jinja")) if found else ():
            out[f"{package} {path.stem}"] = path.read_text(encoding="utf-8")
    return out


SHIPPED = shipped()
CALLS = tuple({"id": f"call0000{k}", "function": {
    "name": f"find{k}", "arguments": {"at": f"SAID{k}"}}} for k in (5, 6))


def user(k: int) -> Turn:
    return Turn("user", (f"USER{k} asks",), False)


def says(k: int, **keys) -> Turn:
    return Turn("assistant", (f"SAID{k} is it",), True, **keys)


SYSTEM = Turn("system", ("SYSTEM is brief",), False)
ASKED = Turn("assistant", (), True, calls=CALLS)
TALKS = {
    "one": (user(1), says(1)), "rounds": (user(1), says(1), user(2), says(2), user(3), says(3)),
    "system": (SYSTEM, user(1), says(1), user(2), says(2)),
    "not learnt": (user(1), says(1)._replace(supervised=False, parts=("USER9 is it",)), user(2),
                   says(2)),
    "reasoning": (user(1), says(1, reasoning="SAID7 thinks")),
    "tools": (SYSTEM, user(1), ASKED, *(Turn("tool", (f"TOOL{k} found",), False, named=(
        ("name", f"find{k}"), ("tool_call_id", f"call0000{k}"))) for k in (5, 6)), says(2),
        user(2), says(3)),
}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name.split()[1] in FAST[:6] else pytest.mark.slow)
    for name in SHIPPED])
def test_only_the_words_of_answers_are_learnt(name):
    source = SHIPPED[name]
    special = sorted(set(TOKEN.findall(source)))
    try:
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"},
                                [*special, "<s>", "</s>"], name)
    except RowError:
        pytest.skip("it cannot write a question and an answer of text")
    read = 0
    for talk, turns in TALKS.items():
        try:
            spans = [span for span in template.spans(turns) if isinstance(span, Text)]
        except RowError:  # it refuses such turns, and so does a run
            continue
        read += 1
        learnt = "".join(span.text for span in spans if span.learnt)
        rest = "".join(span.text for span in spans if not span.learnt)
        assert not re.findall(r"SYSTEM|USER\d|TOOL\d", learnt), (talk, learnt)
        assert not re.findall(r"SAID\d", rest), (talk, rest)
        assert re.findall(r"SAID\d", learnt), (talk, learnt)
    assert read >= 1
