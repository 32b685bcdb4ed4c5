"""One example as every format is read into: turns of text and media in reading order.

`ADAPTERS` turn a row (a dict, as its file holds it) into a Conversation; `detect` tells from a
row's keys which of them fits. A row that cannot be used raises RowError with the cure.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from orchmllm.data.media.kinds import MODALITY_OF
from orchmllm.data.media.medium import MediaRoot, Medium, RowError, from_base64
from orchmllm.data.media.video import expand
from orchmllm.plan.layout import AUDIO, VISION

ROLES = {"system": "system", "developer": "system", "human": "user", "user": "user",
         "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "bard": "assistant", "model": "assistant", "function_call": "assistant", "tool": "tool",
         "function": "tool", "observation": "tool", "ipython": "tool"}
IMAGE_KEYS = ("images", "image")
AUDIO_KEYS = ("audios", "audio", "sound")
VIDEO_KEYS = ("videos", "video")
TRANSCRIPT_KEYS = ("text", "sentence", "transcript", "transcription")
CAPTION_KEYS = ("caption", "text")
_PLACEHOLDER = re.compile("(<image>|<audio>|<video>)")
TRANSCRIBE, DESCRIBE = "Transcribe the speech.", "Describe the image."
DESCRIBE_VIDEO = "Describe the video."
CHOOSE = ("Choose the most suitable answer from options A, B, C, and D to respond the question in "
          "next line, you may only choose A or B or C or D.")  # AIR-Bench's own prompt


class Turn(NamedTuple):
    """role: system | user | assistant | tool | tools (the definitions of a row's tools, as JSON,
    before all others). parts: text and media in reading order. supervised: whether its text is
    learnt. calls: {"name", "arguments"} of the tools that it calls, after its text."""

    role: str
    parts: tuple[str | Medium, ...]
    supervised: bool
    calls: tuple[dict, ...] = ()


Conversation = tuple[Turn, ...]  # the canonical example


PREFERENCES = ('a pair of answers ("chosen", "rejected") is for preference tuning (DPO), which is '
               "not done here; for fine-tuning write the chosen answer as the last turn")


def media_of(turns: Conversation) -> list[Medium]:
    """In reading order, which is that of the example's media segments."""
    return [p for turn in turns for p in turn.parts if isinstance(p, Medium)]


def _listed(row: Mapping, keys: tuple[str, ...]) -> list:
    """The media of a row under the first of `keys` that it has, as a list."""
    for key in keys:
        value = row.get(key)
        if value is None or value == "":
            continue
        many = isinstance(value, list | tuple) and not isinstance(value, Medium)
        return list(value) if many else [value]
    return []


def _is_image(value: object) -> bool:
    """Whether a video's entry is an image, a frame, by its name. A GIF is a video."""
    if isinstance(value, Mapping):
        value = value.get("path", value.get("url"))
    name = value.name if isinstance(value, Medium) else value
    suffix = name.rpartition(".")[2].lower() if isinstance(name, str) else ""
    return MODALITY_OF.get(suffix) == VISION and suffix != "gif"


def _video(value: object, root: MediaRoot, options: Mapping = MappingProxyType({})) -> list[Medium]:
    """The frames of a video (and its sound, if that is asked for): a list of images, or a file."""
    if isinstance(value, list | tuple) and not isinstance(value, Medium):
        return [root.medium(VISION, frame) for frame in value]
    medium = root.medium(VISION, value)
    return [medium] if _is_image(value) else expand(medium, root.video, options)


class _RowMedia:
    """The media that a row lists beside its text, handed out one placeholder at a time."""

    def __init__(self, row: Mapping, root: MediaRoot) -> None:
        self.root = root
        videos = _listed(row, VIDEO_KEYS)
        if videos and isinstance(row.get("video"), list) and all(map(_is_image, videos)):
            videos = [videos]  # one video given as its list of frames
        self.left = {"<image>": _listed(row, IMAGE_KEYS), "<audio>": _listed(row, AUDIO_KEYS),
                     "<video>": videos}
        self.given = {mark: len(values) for mark, values in self.left.items()}
        self.asked = dict.fromkeys(self.left, 0)

    def take(self, mark: str) -> list[Medium]:
        self.asked[mark] += 1
        if not self.left[mark]:
            return []
        value = self.left[mark].pop(0)
        if mark == "<video>":
            return _video(value, self.root)
        return [self.root.medium(VISION if mark == "<image>" else AUDIO, value)]

    def check(self) -> None:
        for mark, given in self.given.items():
            if self.asked[mark] != given:
                key = mark.strip("<>") + "s"
                raise RowError(
                    f'{self.asked[mark]} {mark} placeholders but {given} paths in "{key}"; write '
                    f"one {mark} in the text for each path, in the same order (where the word "
                    'itself is meant, give the text as a content part {"type": "text"})')

    def parts(self, text: str) -> list[str | Medium]:
        out: list[str | Medium] = []
        for part in _PLACEHOLDER.split(text):
            out += self.take(part) if part in self.left else [part] if part else []
        return out


def _content_parts(content: list, media: _RowMedia) -> Iterator[str | Medium]:
    """OpenAI's content parts (and Qwen's {"type": "image", "image": ...})."""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind in ("image", "image_url", "audio", "audio_url"):
            modality = VISION if kind.startswith("image") else AUDIO
            value = part.get(kind)
            if value is None:
                value = next((part[k] for k in ("image", "audio", "url", "path") if part.get(k)),
                             None)
            if value is None:  # {"type": "image"}: the next of the row's list
                yield from media.take("<image>" if modality == VISION else "<audio>")
            else:
                yield media.root.medium(modality, value)
        elif kind == "input_audio" and isinstance(part.get(kind), Mapping):
            data = part[kind].get("data")
            yield (media.root.medium(AUDIO, part[kind]) if data is None
                   else from_base64(str(data), AUDIO, "audio in input_audio"))
        elif kind in ("video", "video_url"):
            value = next((part[k] for k in (kind, "video", "url", "path") if part.get(k)), None)
            yield from (media.take("<video>") if value is None else _video(value, media.root, part))
        else:
            raise RowError(f"content part {str(part)[:200]!r}: type must be text, image_url, "
                           "image, input_audio, audio or video, with its value")


def _chat_turns(row: Mapping) -> list:
    if "chosen" in row and "rejected" in row:
        raise RowError(PREFERENCES)
    turns = row.get("messages") if "messages" in row else row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise RowError('needs a non-empty list "conversations" or "messages"')
    return turns


def chat(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """LLaVA, ShareGPT, OpenAI messages and LLaMA-Factory's conversations: turns with from/value or
    role/content; media in the text as placeholders or as content parts. Raises RowError for a row
    that cannot be used."""
    media = _RowMedia(row, root)
    out = _tools(row)
    if isinstance(row.get("system"), str) and row["system"]:
        out.append(Turn("system", (row["system"],), False))
    for turn in _chat_turns(row):
        if not isinstance(turn, Mapping):
            raise RowError(f"a turn is {str(turn)[:200]!r}, not an object")
        out.append(_turn(turn, media))
    media.check()
    return tuple(out)


def _turn(turn: Mapping, media: _RowMedia) -> Turn:
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise RowError(f'a turn needs "from" or "role" (one of {", ".join(ROLES)}), got {said!r}')
    content = next((turn[key] for key in ("content", "value", "text")
                    if turn.get(key) is not None), None)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if said == "function_call":
        calls, content = content, None
    calls = _calls(calls)
    if isinstance(content, str):
        parts = tuple(media.parts(content))
    elif isinstance(content, list):
        parts = tuple(_content_parts(content, media))
    elif content is None and calls:
        parts = ()
    else:
        raise RowError(f'a turn needs a string or a list in "value" or "content", got '
                       f"{str(content)[:200]!r}")
    return Turn(role, parts, role == "assistant" and turn.get("weight", 1) != 0, calls)


def _calls(given: object) -> tuple[dict, ...]:
    """OpenAI's tool_calls and function_call, and ShareGPT's turns of the role function_call."""
    given = _from_json(given)
    out = []
    for call in given if isinstance(given, list) else [given] if given else []:
        call = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise RowError('a tool call needs a "name" and "arguments", got '
                           f"{str(call)[:200]!r}")
        out.append({"name": call["name"], "arguments": _from_json(call.get("arguments") or {})})
    return tuple(out)


def _tools(row: Mapping) -> list[Turn]:
    tools = _from_json(row.get("tools"))
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise RowError(f'"tools" must be a list of objects, got {str(tools)[:200]!r}')
    return [Turn("tools", (json.dumps(tools, ensure_ascii=False),), False)]


def _from_json(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"a tool or its call is not JSON ({error}): {value[:200]!r}") from error


def instruction(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """LLaMA-Factory's alpaca rows: instruction, input, output, system, history. Raises RowError for
    a row that cannot be used."""
    rounds = [*(row.get("history") or []),
              ["\n".join(t for t in (row.get("instruction"), row.get("input")) if t),
               row.get("output")]]
    turns = []
    for pair in rounds:
        if not (isinstance(pair, list | tuple) and len(pair) == 2
                and all(isinstance(t, str) for t in pair)):
            raise RowError('needs strings "instruction" and "output"; "history" is a list of '
                           "[question, answer]")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return chat({**row, "messages": turns}, root)


def _pair(question: tuple, answer: str) -> Conversation:
    return Turn("user", question, False), Turn("assistant", (answer,), True)


def _text_of(row: Mapping, keys: tuple[str, ...]) -> str:
    for key in keys:
        value = row.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise RowError(f"needs a text in one of {', '.join(keys)}")


def transcript(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """A clip and what is said in it: LibriSpeech and other corpora of the `datasets` layout. Raises
    RowError for a row that cannot be used."""
    clips = _listed(row, (*AUDIO_KEYS, "file", "path"))
    if len(clips) != 1:
        raise RowError(f'needs one clip in "audio", got {len(clips)}')
    clip = root.medium(AUDIO, clips[0])
    return _pair((clip, f"\n{prompt or TRANSCRIBE}"), _text_of(row, TRANSCRIPT_KEYS))


def caption(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """An image or a video and its caption. Raises RowError for a row that cannot be used."""
    videos = _listed(row, VIDEO_KEYS)
    images = _listed(row, IMAGE_KEYS)
    if len(images) + len(videos) != 1:
        raise RowError(f'needs one image in "image" or one video in "video", got {len(images)} and '
                       f"{len(videos)}")
    media = _video(videos[0], root) if videos else [root.medium(VISION, images[0])]
    what = DESCRIBE_VIDEO if videos else DESCRIBE
    return _pair((*media, f"\n{prompt or what}"), _text_of(row, CAPTION_KEYS))


def air_bench(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """AIR-Bench's Foundation (four choices) and Chat rows; the clip of a row is
    <task_name>_<dataset_name>/<path> beside the meta file. Raises RowError for a row that cannot be
    used."""
    for key in ("path", "question", "answer_gt", "task_name", "dataset_name"):
        if not isinstance(row.get(key), str):
            raise RowError(f'needs a string "{key}"')
    name = row["path"]
    if row["task_name"] == "Audio_Grounding":  # its files are FLAC, its rows say .wav
        name = os.path.splitext(name)[0] + ".flac"
    clip = root.medium(AUDIO, f"{row['task_name']}_{row['dataset_name']}/{name}")
    question, answer = row["question"], row["answer_gt"]
    choices = {letter: row[f"choice_{letter.lower()}"] for letter in "ABCD"
               if isinstance(row.get(f"choice_{letter.lower()}"), str)
               and row[f"choice_{letter.lower()}"].strip()}
    if choices:
        question = "\n".join([prompt or CHOOSE, question,
                              *(f"{letter}. {text}" for letter, text in choices.items())])
        right = next((letter for letter, text in choices.items() if text == answer), None)
        if right is None:
            raise RowError(f"answer_gt {answer!r} is none of its choices")
        answer = f"{right}. {answer}"
    return _pair((clip, f"\n{question}"), answer)


ADAPTERS: dict[str, Callable[..., Conversation]] = {
    "llava": chat, "sharegpt": chat, "openai": chat, "llama_factory": chat,
    "llama_factory (alpaca)": instruction, "asr": transcript, "caption": caption,
    "air_bench": air_bench,
}
LOOKED_FOR = {
    "llava": '"conversations" of {from, value} with "image", "images" or "audios"',
    "sharegpt": '"conversations" of {from, value} without media',
    "openai": '"messages" of {role, content}',
    "llama_factory": '"messages" or "conversations" with "images", "audios" or "videos"; '
                     '"instruction" and "output"',
    "asr": '"audio" with ' + ", ".join(f'"{k}"' for k in TRANSCRIPT_KEYS),
    "caption": '"image" or "video" with "caption" or "text"',
    "air_bench": '"path", "question", "answer_gt", "task_name", "dataset_name"',
}


def detect(row: Any) -> str | None:
    """The key of ADAPTERS that fits a row, None if none does."""
    if not isinstance(row, Mapping):
        return None
    has = {key for key, value in row.items() if value is not None}
    lists = bool(has & {"images", "audios", "videos"})
    if {"path", "question", "answer_gt", "task_name", "dataset_name"} <= has:
        return "air_bench"
    if isinstance(row.get("messages"), list):
        return "llama_factory" if lists else "openai"
    if isinstance(row.get("conversations"), list):
        return "llava" if lists or has & {"image", "audio", "sound", "video"} else "sharegpt"
    if {"instruction", "output"} <= has:
        return "llama_factory (alpaca)"
    if has & {"audio", "file"} and has & set(TRANSCRIPT_KEYS):
        return "asr"
    if has & {"image", "video"} and has & set(CAPTION_KEYS):
        return "caption"
    return None
