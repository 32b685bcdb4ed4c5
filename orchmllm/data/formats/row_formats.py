"""FORMATS: the ways in which rows are written, each with the function that reads such a row as a
Conversation. CONTRIBUTING.md shows how one is added."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from orchmllm.data.formats.conversation import (
    AUDIO_KEYS,
    IMAGE_KEYS,
    VIDEO_KEYS,
    Conversation,
    Turn,
    chat,
    instruction,
    listed,
    video_of,
)
from orchmllm.data.media.medium import RowError
from orchmllm.data.media.root import MediaRoot
from orchmllm.plan.layout import AUDIO, VISION

TRANSCRIPT_KEYS = ("text", "sentence", "transcript", "transcription")
CAPTION_KEYS = ("caption", "text")
AIR_BENCH_KEYS = ("path", "question", "answer_gt", "task_name", "dataset_name")
TRANSCRIBE, DESCRIBE = "Transcribe the speech.", "Describe the image."
DESCRIBE_VIDEO = "Describe the video."
CHOOSE = ("Choose the most suitable answer from options A, B, C, and D to respond the question in "
          "next line, you may only choose A or B or C or D.")  # AIR-Bench's own prompt


def _pair(question: tuple, answer: str) -> Conversation:
    return Turn("user", question, False), Turn("assistant", (answer,), True)


def _text_of(row: Mapping, keys: tuple[str, ...]) -> str:
    for key in ("question", "answer", "answers"):
        if row.get(key):
            raise RowError(f'"{key}" is {row[key]!r:.80}, and is not read beside a text'
                           ': write "conversations", or leave it out if that text is meant')
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
    clips = listed(row, AUDIO_KEYS) or listed(row, ("file",)) or listed(row, ("path",))
    if len(clips) != 1:
        raise RowError(f'needs one clip in "audio", got {len(clips)}')
    clip = root.medium(AUDIO, clips[0])
    return _pair((clip, f"\n{prompt or TRANSCRIBE}"), _text_of(row, TRANSCRIPT_KEYS))


def caption(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """An image or a video and its caption. Raises RowError for a row that cannot be used."""
    videos = listed(row, VIDEO_KEYS)
    images = listed(row, IMAGE_KEYS)
    if len(images) + len(videos) != 1:
        raise RowError(f'needs one image in "image" or one video in "video", got {len(images)} and '
                       f"{len(videos)}")
    media = video_of(videos[0], root) if videos else [root.medium(VISION, images[0])]
    what = DESCRIBE_VIDEO if videos else DESCRIBE
    return _pair((*media, f"\n{prompt or what}"), _text_of(row, CAPTION_KEYS))


def air_bench(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """AIR-Bench's Foundation (four choices) and Chat rows; the clip of a row is
    <task_name>_<dataset_name>/<path> beside the meta file. Raises RowError for a row that cannot be
    used."""
    for key in AIR_BENCH_KEYS:
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


def has(*groups: tuple[str, ...], turns: str = "") -> Callable[[Mapping], bool]:
    """A test of rows: whether a row has a value under at least one key of each group, and, where
    `turns` is given, a list under that key."""
    def fits(row: Mapping) -> bool:
        if turns and not isinstance(row.get(turns), list):
            return False
        return all(any(row.get(key) is not None for key in group) for group in groups)

    return fits


class RowFormat(NamedTuple):
    """One way in which rows are written. read(row, root, prompt): the row (a dict, as its file
    holds it) as a Conversation; raises RowError with the cure for a row that cannot be used. holds:
    what such a row has, for errors and docs/formats.md. fits: whether a row is written so, which
    `row_format: auto` asks. takes_prompt: whether rows lack a question, so that `prompt` of the
    source may give it. beside_file: media are in the folder of the row's file, and not in that of
    the source."""

    read: Callable[[Mapping, MediaRoot, str], Conversation]
    holds: str
    fits: Callable[[Mapping], bool]
    takes_prompt: bool = False
    beside_file: bool = False


# The values that `row_format` of a source may have. A row has the first format that it fits.
FORMATS: dict[str, RowFormat] = {
    "air_bench": RowFormat(
        air_bench, ", ".join(f'"{key}"' for key in AIR_BENCH_KEYS),
        has(*((key,) for key in AIR_BENCH_KEYS)), takes_prompt=True, beside_file=True),
    "llama_factory": RowFormat(
        chat, '"messages" with "images", "audios" or "videos"',
        has(("images", "audios", "videos"), turns="messages")),
    "openai": RowFormat(chat, '"messages" of {role, content}', has(turns="messages")),
    "llava": RowFormat(
        chat, '"conversations" of {from, value} with "image", "images", "audio", "audios", '
        '"video" or "videos"',
        has((*IMAGE_KEYS, *AUDIO_KEYS, *VIDEO_KEYS), turns="conversations")),
    "sharegpt": RowFormat(
        chat, '"conversations" of {from, value} without media', has(turns="conversations")),
    "llama_factory (alpaca)": RowFormat(
        instruction, '"instruction" and "output"', has(("instruction",), ("output",))),
    "asr": RowFormat(
        transcript, '"audio" with ' + ", ".join(f'"{key}"' for key in TRANSCRIPT_KEYS),
        has(("audio", "file"), TRANSCRIPT_KEYS), takes_prompt=True),
    "caption": RowFormat(
        caption, '"image" or "video" with "caption" or "text"',
        has(("image", "video"), CAPTION_KEYS), takes_prompt=True),
}
