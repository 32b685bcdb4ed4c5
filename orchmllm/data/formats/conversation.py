"""One example as every format is read into: turns of text and media in reading order; and rows
that hold turns. A row that cannot be used raises RowError with the cure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from orchmllm.data.formats.columns import MEDIA, from_json
from orchmllm.data.media.medium import Medium, RowError, is_image
from orchmllm.data.media.parts import KEYS, refuse_unread
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.media.video import expand, images_as_video
from orchmllm.plan.layout import AUDIO, VISION

ROLES = {"system": "system", "developer": "system", "human": "user", "user": "user",
         "prompter": "user",
         "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "bard": "assistant", "model": "assistant", "function_call": "assistant", "tool": "tool",
         "function": "tool", "observation": "tool", "ipython": "tool"}
DOCUMENT = "document"  # a role: its text is no turn, and not written by a chat template
PLACEHOLDER = re.compile("(<image>|<audio>|<video>)")
_OTHER = re.compile(r"<\|?(?:image|audio|video|(?:image|img|audio|video|sound|speech)[ _-]?"
                    r"(?:here|\d+))\|?>", re.IGNORECASE)  # what other programs write for a medium
_PATH = re.compile(r"<img>([^<>\n]+)</img>")  # as Qwen-VL writes an image into a question


class Turn(NamedTuple):
    """role: system | user | assistant | tool | tools (the definitions of a row's tools, as JSON,
    before all others) | document (a text that is no turn; all of a row's are). parts: text and
    media in reading order. supervised: whether its text is learnt. calls: {"function": {"name",
    "arguments"}} of the tools that it calls, after its text, with "id" where the row has it.
    reasoning: before its text. named: (key, value) of what else templates read of a tool's turn:
    its name, and the id of the call."""

    role: str
    parts: tuple[str | Medium, ...]
    supervised: bool
    calls: tuple[dict, ...] = ()
    reasoning: str = ""
    named: tuple[tuple[str, str], ...] = ()


Conversation = tuple[Turn, ...]  # the canonical example


def media_of(turns: Conversation) -> list[Medium]:
    """In reading order, which is that of the example's media segments."""
    return [p for turn in turns for p in turn.parts if isinstance(p, Medium)]


def video_of(value: object, root: MediaRoot,
             options: Mapping = MappingProxyType({})) -> list[Medium]:
    """The frames of a video (and its sound, if that is asked for): a list of images, or a file."""
    if isinstance(value, list | tuple) and not isinstance(value, Medium):
        return images_as_video([root.medium(VISION, frame) for frame in value], root.video, options)
    medium = root.file(VISION, value)
    if is_image(value):
        return images_as_video([medium], root.video, options)
    own = value if isinstance(value, Mapping) else {}
    return expand(medium, root.video, {**own, **options}, root.of(own).of(options).part)


class _RowMedia:
    """The media that a row lists beside its text, handed out one placeholder at a time."""

    def __init__(self, row: Mapping, root: MediaRoot) -> None:
        self.root = root
        self.given = {f"<{field[:-1]}>": row.get(field) or [] for field in MEDIA}
        self.asked = dict.fromkeys(self.given, 0)

    def take(self, mark: str) -> list[Medium]:
        if mark == "<image>" and not self.given[mark] and self.given["<video>"]:
            mark = "<video>"  # LLaVA's mixes have one placeholder for both
        at = self.asked[mark]
        self.asked[mark] += 1
        if at >= len(self.given[mark]):
            return []
        return self.media(mark, self.given[mark][at])

    def media(self, mark: str, value: object, options: Mapping = MappingProxyType({})
              ) -> list[Medium]:
        if mark == "<video>":
            return video_of(value, self.root, options)
        return [self.root.of(options).medium(VISION if mark == "<image>" else AUDIO, value)]

    def unplaced(self) -> list[str | Medium]:
        """What stands before the first user's turn: all media, where no text has a placeholder."""
        if any(self.asked.values()):
            return []
        return [medium for mark, given in self.given.items() for _ in given
                for medium in self.take(mark)]

    def check(self) -> None:
        for mark, given in self.given.items():
            if self.asked[mark] != len(given):
                key = mark.strip("<>") + "s"
                raise RowError(
                    f'{self.asked[mark]} {mark} placeholders but {len(given)} paths in "{key}"; '
                    f"write one {mark} in the text for each path, in the same order (where the "
                    'word itself is meant, give the text as a content part {"type": "text"})')

    def parts(self, text: str, question: bool) -> list[str | Medium]:
        """question: whether a path may stand in the text."""
        out: list[str | Medium] = []
        for part in PLACEHOLDER.split(text):
            if part in self.given:
                out += self.take(part)
                continue
            for k, piece in enumerate(_PATH.split(part) if question else [part]):
                out += self.media("<image>", piece) if k % 2 else [piece] if piece else []
        return out


def _content_parts(content: list, media: _RowMedia) -> Iterator[str | Medium]:
    """OpenAI's content parts, Qwen's {"type": "image", "image": ...} and Anthropic's "source"."""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind in ("image", "image_url", "audio", "audio_url", "input_audio", "video",
                      "video_url"):
            what = kind.removesuffix("_url").removeprefix("input_")
            value = next((part[k] for k in (kind, what, f"{what}_url", "url", "path", "source")
                          if part.get(k)), None)
            # {"type": "image"}: the next of the row's list
            if value is None and part.get("index") not in (None, media.asked[f"<{what}>"]):
                raise RowError(f'"index" of a content part is {part["index"]!r:.80}, and is not '
                               'read: list the media of the row in the order of the parts')
            refuse_unread(part)
            yield from (media.take(f"<{what}>") if value is None
                        else media.media(f"<{what}>", value, part))
        else:
            raise RowError(f"content part {str(part)[:200]!r}: type must be text, image_url, "
                           "image, input_audio, audio or video, with its value")


def chat(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """LLaVA, ShareGPT, OpenAI messages and LLaMA-Factory's conversations: turns with from/value or
    role/content; media in the text as placeholders, as content parts or as <img>path</img>, or,
    without any, before the first turn of a user. row: its fields. Raises RowError for a row that
    cannot be used."""
    turns = row.get("messages")
    if isinstance(turns, Mapping):  # as `datasets` keeps a list of objects
        turns = [dict(zip(turns, v, strict=True)) for v in zip(*turns.values(), strict=True)]
    if not isinstance(turns, list) or not turns:
        raise RowError('needs a non-empty list "conversations" or "messages"')
    media = _RowMedia(row, root)
    out = _tools(row)
    if isinstance(row.get("system"), str) and row["system"]:
        out.append(Turn("system", (row["system"],), False))
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise RowError(f"a turn is {str(turn)[:200]!r}, not an object")
        out.append(_turn(turn, media))
    first = next((k for k, turn in enumerate(out) if turn.role == "user"), None)
    if first is not None and (before := media.unplaced()):
        for text in (p for turn in out if turn.role == "user" for p in turn.parts):
            if isinstance(text, str) and (mark := _OTHER.search(text)):
                raise RowError(f"{mark[0]!r} stands for no medium here: write <image>, <audio> or "
                               "<video> in the text (in no content part) where each one stands")
        begin, *rest = out[first].parts or ("",)
        begin = [f"\n{begin}"] if isinstance(begin, str) else ["\n", begin]
        out[first] = out[first]._replace(parts=(*before, *begin, *rest))
    media.check()
    return tuple(out)


def _turn(turn: Mapping, media: _RowMedia) -> Turn:
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise RowError(f'a turn needs "from" or "role" (one of {", ".join(ROLES)}), got {name!r}')
    content = next((turn[key] for key in ("content", "value", "text")
                    if turn.get(key) is not None), None)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if name == "function_call":
        calls, content = content, None
    calls = _calls(calls)
    if isinstance(content, str):
        parts = tuple(media.parts(content, role == "user"))
    elif isinstance(content, list):
        parts = tuple(_content_parts(content, media))
    elif content is None and calls:
        parts = ()
    else:
        raise RowError(f'a turn needs a string or a list in "value" or "content", got '
                       f"{str(content)[:200]!r}")
    if role == "tool":
        named = [(key, turn[key]) for key in ("name", "tool_call_id")
                 if isinstance(turn.get(key), str)]
        return Turn(role, parts, False, named=tuple(named))
    reasoning = next((turn[key] for key in KEYS["reasoning"].keys if turn.get(key)), "")
    if not isinstance(reasoning, str):
        raise RowError("the reasoning of a turn must be a text, got "
                       f"{str(reasoning)[:200]}")
    learnt = role == "assistant" and _learnt(turn)
    if learnt and not (calls or reasoning or any(
            isinstance(p, Medium) or p.strip() for p in parts)):
        raise RowError("an answer is empty: leave the row out, or mark the turn as one that is not "
                       'learnt ("train": false)')
    return Turn(role, parts, learnt, calls, reasoning)


def _learnt(turn: Mapping) -> bool:
    """Whether a turn of the assistant is to be learnt. Raises RowError."""
    learnt = True
    for key in KEYS["learnt"].keys:
        if (value := turn.get(key)) is None:
            continue
        if value not in (0, 1):
            raise RowError(f'"{key}" of a turn is {value!r:.80}: must be 0 or false (the turn is '
                           "not learnt), or 1 or true (it is)")
        learnt = learnt and bool(value)
    return learnt


def _calls(given: object) -> tuple[dict, ...]:
    """OpenAI's tool_calls and function_call, and ShareGPT's turns of the role function_call."""
    given = from_json(given)
    out = []
    for call in given if isinstance(given, list) else [given] if given else []:
        known = {"id": call["id"]} if isinstance(call, Mapping) and call.get("id") else {}
        call = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise RowError('a tool call needs a "name" and "arguments", got '
                           f"{str(call)[:200]!r}")
        out.append({**known, "function": {
            "name": call["name"], "arguments": from_json(call.get("arguments") or {})}})
    return tuple(out)


def _tools(row: Mapping) -> list[Turn]:
    tools = from_json(row.get("tools"))
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise RowError(f'"tools" must be a list of objects, got {str(tools)[:200]!r}')
    return [Turn("tools", (json.dumps(tools, ensure_ascii=False),), False)]
