"""ADAPTERS turn a row (a dict, as its file holds it) into a Conversation; `detect` tells from a
row's keys which of them fits. A row that cannot be used raises RowError with the cure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

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
