"""FORMATS: the ways in which rows are written, each with the function that reads such a row as a
Conversation. CONTRIBUTING.md shows how one is added."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from orchmllm.config.strict_yaml import parse
from orchmllm.data.formats.columns import MEDIA, Columns
from orchmllm.data.formats.conversation import (
    DOCUMENT,
    Conversation,
    Turn,
    chat,
)
from orchmllm.data.media.kinds import modality_of
from orchmllm.data.media.medium import RowError
from orchmllm.data.media.parts import DURATION, END, KEYS, START
from orchmllm.data.media.root import MediaRoot
from orchmllm.plan.layout import AUDIO, VISION

TRANSCRIBE, DESCRIBE = "Transcribe the speech.", "Describe the image."
DESCRIBE_VIDEO, DESCRIBE_SOUND = "Describe the video.", "Describe the sound."
CHOOSE = ("Choose the most suitable answer from options A, B, C, and D to respond the question in "
          "next line, you may only choose A or B or C or D.")  # AIR-Bench's own prompt


def _pair(row: Mapping, root: MediaRoot, question: str, answer: str) -> Conversation:
    """A question and its answer, in neither of which a placeholder counts, behind the media."""
    return chat({**row, "messages": [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", question), ("assistant", answer))]}, root)


def described(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """A clip and what is said in it, an image or a video and its caption, or a plain text. Raises
    RowError for a row that cannot be used."""
    text = _first(row["text"])
    if not isinstance(text, str) or not text.strip():
        raise RowError(f"a text is {text!r:.80}: must have letters")
    if row.keys().isdisjoint(MEDIA):
        return (Turn(DOCUMENT, (text,), True),)
    given = [field for field in MEDIA for _ in row.get(field, ())]
    if len(given) != 1:
        raise RowError(f"a text is learnt of one image, clip or video, and the row has "
                       f"{len(given)}")
    question = {"images": DESCRIBE, "audios": TRANSCRIBE, "videos": DESCRIBE_VIDEO}[given[0]]
    return _pair(row, root, prompt or question, text.strip())


def _first(value: object) -> object:
    """Of several texts in a list the first."""
    return value[0] if isinstance(value, list) and value else value


def answered(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """Questions and answers. Media stand before the first question where no text has their
    placeholders. Raises RowError for a row that cannot be used."""
    questions, answers, context = row.get("question", ""), row["answer"], row.get("context") or []
    context = context if isinstance(context, list) else [context]
    if isinstance(questions, list):
        if not isinstance(answers, list) or context or "choices" in row:
            raise RowError("a list of questions needs a list of answers, and neither a context nor "
                           f"choices: {answers!r:.80}, {context!r:.80}")
    else:
        if "choices" in row:
            listed, answers = choose(row["choices"], answers)
            context = [*context, *listed]
        if not all(isinstance(text, str) for text in (questions, *context)):
            raise RowError(f"a question and its context must be texts, got {questions!r:.80} and "
                           f"{context!r:.80}")
        questions, answers = ["\n".join(filter(None, (questions, *context)))], [_first(answers)]
    rounds = [*row.get("history", ()), *zip(questions, answers, strict=True)]
    turns = []
    for pair in rounds:
        if isinstance(pair, list | tuple):
            pair = [str(t) if type(t) in (int, float) else t for t in pair]
        if not (isinstance(pair, list) and len(pair) == 2
                and all(isinstance(t, str) for t in pair)):
            raise RowError("a question and its answer must be two texts (earlier ones in a list "
                           f"of [question, answer]), got {str(pair):.200}")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return chat({**row, "messages": turns}, root)


def choose(choices: object, answer: object) -> tuple[list[str], str]:
    """(A line for each choice, the one that is the answer). choices: texts, or {"text": texts,
    "label": labels}; answer: a text among them, a label, a letter from A, or a number from 0.
    An integer is a number, unless the choices or their labels are. Raises RowError, also for an
    integer that is the number of one and is another one itself."""
    labels = list(map(chr, range(ord("A"), ord("Z") + 1)))
    if isinstance(choices, Mapping) and isinstance(choices.get("label"), list):
        labels, choices = list(map(str, choices["label"])), choices.get("text")
    if not isinstance(choices, list) or not 0 < len(choices) <= len(labels):
        raise RowError(f"choices are {choices!r:.80}: must be a list of texts, or an object with "
                       'the lists "text" and "label"')
    lines = [f"{label}. {text}" for label, text in zip(labels, choices, strict=False)]
    said = str(answer).strip()
    found = {k for k, text in enumerate(choices)
             if said in (str(text).strip(), labels[k]) or said.strip("().") == labels[k]}
    number = {int(said)} & set(range(len(choices))) if said.isdecimal() else set()
    if type(answer) is int:
        found = number | {k for k in found if answer == choices[k] or said == labels[k]}
    found = found or number
    if len(found) != 1:
        raise RowError(f"the answer {said!r:.80} is {'several' if found else 'none'} of the "
                       f"{len(lines)} choices; it must be one of them, its label, or its number "
                       "from 0")
    return lines, lines[found.pop()]


def completion(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """A completion of a prompt, of which alone is learnt: two plain texts, or two lists of turns.
    Raises RowError for a row that cannot be used."""
    texts = row["prompt"], row["completion"]
    if all(isinstance(text, list) for text in texts):
        return chat({**row, "messages": [*({**turn, "train": False} for turn in texts[0]),
                                         *texts[1]]}, root)
    if row.get("images") or not all(isinstance(text, str) for text in texts):
        raise RowError('"prompt" and "completion" must be two texts without media, or two lists '
                       "of turns")
    return Turn(DOCUMENT, texts[:1], False), Turn(DOCUMENT, texts[1:], True)


def document(row: Mapping, root: MediaRoot, prompt: str = "") -> Conversation:
    """Texts with images between them: in two lists that go together, each with nulls where the
    other has something, or images before the texts that `places` numbers from 0. Raises RowError
    for a row that cannot be used."""
    texts, images, places = row["texts"], row.get("images", []), row.get("places")
    between = "\n\n"
    if places is not None or not images:
        between, places = " ", places or []
        if len(places) != len(images) or not set(places) <= set(range(len(texts))):
            raise RowError(f'"places" are {places!r:.80}: must be a number from 0 to '
                           f"{len(texts) - 1} for each of {len(images)} images")
        images = [[i for i, at in zip(images, places, strict=True) if at == k]
                  for k in range(len(texts))]
    elif len(images) != len(texts):
        raise RowError(f"{len(images)} images and {len(texts)} texts: the two lists must be of "
                       "one length, with null where the other has something")
    else:
        images = [[] if image is None else [image] for image in images]
    parts: list = []
    for text, here in zip(texts, images, strict=True):
        parts += [root.medium(VISION, image) for image in here]
        if not isinstance(text, str | None):
            raise RowError(f"a text of a document is {text!r:.80}: must be a text or null")
        if text:
            parts.append(between + text if parts and isinstance(parts[-1], str) else text)
    return (Turn(DOCUMENT, tuple(parts), True),)


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
    choices = [row[key] for key in ("choice_a", "choice_b", "choice_c", "choice_d")
               if isinstance(row.get(key), str) and row[key].strip()]
    question, answer = row["question"], row["answer_gt"]
    if choices:
        lines, answer = choose(choices, answer)
        question = "\n".join([prompt or CHOOSE, question, *lines])
    return _pair({"audios": [f"{row['task_name']}_{row['dataset_name']}/{name}"]}, root, question,
                 answer)


class Reader(NamedTuple):
    """read(fields, root, prompt): the fields of a row as a Conversation; raises RowError with the
    cure for a row that cannot be used. fields: that it reads beside its own."""

    read: Callable[[Mapping, MediaRoot, str], Conversation]
    fields: tuple[str, ...]


# By the field that makes a row be read so; rows of several are read as the first of them.
READERS = {
    "answer_gt": Reader(air_bench, ("path", "question", "task_name", "dataset_name", "choice_a",
                                    "choice_b", "choice_c", "choice_d")),
    "messages": Reader(chat, ("system", "tools", *MEDIA)),
    "texts": Reader(document, ("images", "places")),
    "completion": Reader(completion, ("prompt", "images")),
    "answer": Reader(answered, ("question", "choices", "context", "history", "system", "tools",
                                *MEDIA)),
    "text": Reader(described, MEDIA),
}
TIMES = {"start": START, "end": END, "duration": DURATION}
OF_ALL = ("id", "split", "rows", "segments", *TIMES)  # fields of all rows


class RowFormat:
    """One way in which rows are written. columns: its fields. of: what is written so. media:
    whether a row needs a medium. beside_file: media are in the folder of the row's file, and not in
    that of the source. auto: whether `row_format: auto` may find it. Raises ValueError for fields
    that are not read together."""

    def __init__(self, columns: Mapping[str, str], of: str = "", *, media: bool = False,
                 beside_file: bool = False, auto: bool = True) -> None:
        self.columns, self.given, self.of = Columns(columns), dict(columns), of
        self.media, self.beside_file, self.auto = media, beside_file, auto
        fields = self.columns.specs
        key = next((key for key in READERS if key in fields), None)
        if key is None:
            raise ValueError(f"columns has no {', '.join(list(READERS)[1:-1])} or text, so there "
                             f"is nothing to read; it has {', '.join(fields) or 'nothing'}")
        self.reader = READERS[key]
        known = (key, *self.reader.fields, *OF_ALL)
        for field, spec in fields.items():
            if field not in known:
                raise ValueError(f"columns.{field} is {spec.text!r}, which rows with {key!r} do "
                                 f"not read; they read {', '.join(known)}")
        if "duration" in fields and "start" not in columns:
            raise ValueError(f"columns.duration is {fields['duration'].text!r}, which is read "
                             "together with a start: name columns.start, too")

    def times(self, row: Mapping, fields: Mapping) -> dict:
        """What a row says of the part of its clip or video: keys of KEYS, but for the columns that
        are named for it, or for nothing."""
        named = {field: fields.get(field) for field in TIMES if field in self.given}
        return {key: row.get(key) for field, keys in TIMES.items() if field not in named
                for key in keys} | named

    @property
    def holds(self) -> str:
        """What such a row has, for errors."""
        return f"{self.columns}{' (with a medium)' * self.media}"

    @cached_property
    def skips(self) -> set[str]:
        """Keys that need not be refused: those that are read, questions where there are answers,
        and choices where there are turns."""
        known = {described: (), answered: KEYS["question"].keys}
        return self.columns.names | {*known.get(
            self.reader.read, KEYS["question"].keys + KEYS["choices"].keys)}

    @property
    def takes_prompt(self) -> bool:
        """Whether rows lack a question, so that `prompt` of the source may give it."""
        return self.reader.read is air_bench or (
            self.reader.read is described and not self.columns.specs.keys().isdisjoint(MEDIA))

    def asks(self, row: Mapping) -> str:
        """What rows without a question ask, where it is not what `described` asks of a medium: the
        captions of a clip are no speech."""
        fields = self.columns.specs
        describes = self.reader.read is described and "audios" in fields and re.search(
            "caption|categor|descri|label", fields["text"].find(row)[0], re.IGNORECASE)
        return DESCRIBE_SOUND if describes else ""

    def fits(self, row: Mapping) -> bool:
        """Whether a row is written so, which `row_format: auto` asks. A file whose suffix tells
        that it is of another kind is not the column's medium."""
        return self.auto and self.columns.fits(row, media=self.media) and all(
            modality_of(self.columns.specs[field].find(row)[1]) != other
            for field, other in (("images", AUDIO), ("audios", VISION))
            if field in self.columns.specs)

    def with_columns(self, columns: Mapping[str, str]) -> RowFormat:
        """With columns of the recipe in place of its own. Raises ValueError."""
        return RowFormat(self.given | columns, self.of, media=self.media,
                         beside_file=self.beside_file, auto=self.auto)


PRESETS = Path(__file__).with_name("presets.yaml")
# The values that `row_format` of a source may have. A row has the first format that it fits.
FORMATS = {name: RowFormat(**preset) for name, preset in parse(PRESETS.read_bytes()).items()}
