"""Chat templates: what one writes for a conversation, and which of it is learnt.

A conversation is rendered twice: as transformers renders it, and with Traced texts, which know in
what is written where they are. Both have to be the same text. Where turns of the data cannot be
found in it the conversation is refused: what is trained on is what transformers'
apply_chat_template renders, or nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.text.page import ARGUMENT, CHANGED, CONTENT, NAME, REASONING, Page, Source
from orchmllm.data.text.spans import PART, Span
from orchmllm.data.text.template_engine import (
    Environment,
    Message,
    TracingEnvironment,
    undeclared,
)
from orchmllm.data.text.traced import as_json, joined, traced

_MEDIUM = "\ufffc"  # stands for a medium in a text
_TALK = [Turn("user", ("Who is it?",), False), Turn("assistant", ("It is I, Anna.",), True)]


class ChatTemplate:
    """source: in Jinja. variables: its special tokens by name. special: tokens that data must not
    be able to write; marks: modality -> what the template may write for a medium, of which the
    attribute `marks` holds those that it does write. Raises RowError, naming `path`, for a template
    that cannot be used."""

    def __init__(self, source: str, variables: dict[str, str], special: Sequence[str], path: str,
                 marks: Mapping[int, str] = MappingProxyType({})):
        self.variables, self.special = variables, list(special)
        self._has_blocks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        either = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        run = rf"(?:{either})(?:\s*(?:{either}))*"
        if (end := variables.get("eos_token")) in special:  # nothing after it is the answer's
            others = "|".join(re.escape(token) for token in special if token != end) or "(?!)"
            run = rf"(?:(?:{others})\s*)*{re.escape(end)}|{run}"
        self._ending = re.compile(run)
        self._following = re.compile(rf"\s*(?:{either})")
        try:
            self._plain = Environment().from_string(source)
            self._tracing = [TracingEnvironment(captures).from_string(source)
                             for captures in (True, False)]
        except Exception as error:  # of jinja's parser
            raise RowError(f"{path}: the chat template cannot be read: {error}") from error
        self.marks: dict[int, str] = {}
        self._probe(path)
        self.marks = self._written(marks)

    def spans(self, turns: Sequence[Turn]) -> list[Span]:
        """The conversation as rendered. Raises RowError for turns that the template refuses, and
        where it is not known which of the text is the template's."""
        page, turns = self._page(turns)
        if self._has_blocks:
            learnt = page.in_blocks(turns)
        else:
            learnt = np.zeros(len(page.text), bool)
            for k in [k for k, turn in enumerate(turns) if turn.supervised]:
                start, end = page.answer(k, self._opening, self._ending, self._following)
                learnt[start:end] = True
        return page.spans(learnt, page.media(turns, self.marks))

    def _probe(self, path: str) -> None:
        """That it can write a question and an answer; whether contents have to be lists."""
        reasons = []
        for self._lists in (False, True):
            try:
                text = "".join(span.text for span in self.spans(_TALK))
                if all(part in text for turn in _TALK for part in turn.parts):
                    return
                reasons.append(CHANGED)
            except RowError as error:
                reasons.append(error.reason)
        raise RowError(f"{path}: its chat template cannot write a question and an answer: "
                       f"{reasons[0]}")

    def _written(self, marks: Mapping[int, str]) -> dict[int, str]:
        """Those that it writes for a medium in a list of content parts, if it reads such lists."""
        lists_only, out = self._lists, {}
        for modality, mark in marks.items():
            self.marks = {modality: mark}
            shown = _TALK[0]._replace(parts=(Medium(modality, ""), *_TALK[0].parts))
            try:
                self._lists = lists_only
                page, _ = self._page(_TALK)
                self._lists = True
                listed, _ = self._page(_TALK)
                text = self._render(self._plain, self._messages([shown, _TALK[1]], True, []))
            except RowError:  # it takes texts only
                continue
            # A template that prints a list as it prints a text would write its type.
            if text.count(mark) > page.text.count(mark) and listed.text == page.text:
                out[modality] = mark
        self._lists = lists_only
        return out

    def _page(self, turns: Sequence[Turn], as_text: bool = False) -> tuple[Page, Sequence[Turn]]:
        """What is written for the turns, and those of them that are not definitions of tools.
        as_text: whether arguments of calls are given as JSON."""
        tools, talk = self._tools(turns)
        there = {p.modality for turn in talk for p in turn.parts if isinstance(p, Medium)}
        sources: list[Source] = []
        in_lists = self._lists or bool(there & self.marks.keys())
        messages = self._messages(talk, in_lists, sources, as_text)
        try:
            truth = self._render(self._plain, json.loads(json.dumps(messages)), tools)
        except RowError:
            if as_text or not any(turn.calls for turn in talk):
                raise
            return self._page(turns, as_text=True)
        for template in self._tracing:
            page = Page(self._render(template, messages, tools), sources)
            if page.text == truth:
                page.check(self._ending)
                return page, talk
        raise RowError(CHANGED)

    def _tools(self, turns: Sequence[Turn]) -> tuple[list | None, Sequence[Turn]]:
        """The definitions of tools, and the other turns."""
        if not turns or turns[0].role != "tools":
            return None, turns
        text = turns[0].parts[0]
        for token in self.special:
            if token in text:
                raise RowError(f"the definitions of the tools contain the special token {token}")
        return json.loads(text), turns[1:]

    def _messages(self, turns: Sequence[Turn], lists: bool, sources: list[Source],
                  as_text: bool = False) -> list[Message]:
        """With Traced texts, which `sources` gets. lists: contents are lists of parts."""
        def told(kind: str, value: object) -> object:
            if isinstance(value, dict):
                return {told(kind, key): told(kind, item) for key, item in value.items()}
            if isinstance(value, list):
                return [told(kind, item) for item in value]
            if not isinstance(value, str | Medium):
                return value
            sources.append(Source(k, kind, value))
            return traced(value if isinstance(value, str) else _MEDIUM, len(sources))

        def part(value: str | Medium) -> dict:
            if lists and isinstance(value, Medium) and value.modality in self.marks:
                return {"type": PART[value.modality]}
            return {"type": "text", "text": told(CONTENT, value)}

        messages = []
        for k, turn in enumerate(turns):
            parts = [part(p) for p in turn.parts or ("",)]
            content = parts if lists else joined(part["text"] for part in parts)
            message = Message({"role": turn.role, "content": content,
                               **{key: told(ARGUMENT, value) for key, value in turn.named}}, k)
            if turn.reasoning:
                message["reasoning_content"] = told(REASONING, turn.reasoning)
                message["thinking"] = message["reasoning_content"]
            if turn.calls:
                message["tool_calls"] = [Message(
                    {**told(ARGUMENT, {key: call[key] for key in call.keys() - {"function"}}),
                     "type": "function", "function": {
                        "name": told(NAME, call["function"]["name"]),
                        "arguments": told(ARGUMENT, as_json(call["function"]["arguments"])
                                          if as_text else call["function"]["arguments"])}},
                    k, is_call=True) for call in turn.calls]
            messages.append(message)
        return messages

    def _render(self, template, messages: list[Message], tools: list | None = None,
                prompt: bool = False) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=prompt, tools=tools,
                                   documents=None, **self.variables)
        except Exception as error:  # templates raise on roles that they do not know
            raise RowError(f"the chat template refuses these turns: {error}") from error

    @cached_property
    def _opening(self) -> str | None:
        """What comes before every answer, if that is known."""
        asked = self._messages(_TALK[:1], self._lists, [])
        try:
            without, prompt = (self._render(self._plain, asked, None, add) for add in (False, True))
            if prompt.startswith(without) and prompt != without:
                return prompt[len(without):]
        except RowError:  # a template that wants another turn
            pass
        page, _ = self._page(_TALK)
        there = np.flatnonzero(page.turn == 1)
        return page.text[there[0]: page.said.tolist().index(1)] if len(there) else None


def read_template(folder: Path, given: str) -> tuple[str, dict[str, str]] | None:
    """(template, special tokens by name) of the model beside tokenizer.json. given: the template,
    where it is known. Raises ValueError for a template that writes a token that no file names."""
    config = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as transformers does
        config |= read_json(folder / "special_tokens_map.json")
    template = given or config.get("chat_template")
    if not given and (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # several by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not template:
        return None
    for name in ("bos_token", "eos_token"):
        if name not in config and name in undeclared(template):
            raise ValueError(
                f"{folder}: the chat template writes {name}, which neither tokenizer_config.json "
                f'nor special_tokens_map.json names: copy them from the model, or put "{name}" '
                "(null if it has none) into tokenizer_config.json")
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items()
              if k.endswith("_token") and isinstance(v, str | dict)}
    return template, tokens


def read_json(path: Path) -> dict:
    """What a file holds; nothing where there is none. Raises ValueError."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
