"""A corpus with everything that can be wrong with a file or a row, among rows that are fine."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from tests.lib.formats import QUESTIONS, llava_row, write_media
from tests.lib.tokenizers import write_tokenizer


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header says width x height."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (struct.pack(">I", len(data)) + kind + data
                + struct.pack(">I", zlib.crc32(kind + data)))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100))
            + chunk(b"IEND", b""))


def flac_expanding(path: Path, seconds: int = 150) -> None:
    """Silence on 8 channels: some kB that decode to more than 1,000 times as much."""
    soundfile.write(path, np.zeros((16000 * seconds, 8), np.int16), 16000)


def wav_claiming(content: bytes, num_bytes: int) -> bytes:
    """The WAV `content` with a data chunk that claims num_bytes."""
    at = content.index(b"data") + 4
    return content[:at] + struct.pack("<I", num_bytes) + content[at + 4:]


class Sentinel:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def write_broken_media(folder: Path) -> dict[str, str]:
    """Broken files -> what is said of each. They are written into `folder`."""
    good = {name: (folder / name).read_bytes()
            for name in ("0.png", "1.jpg", "2.webp", "0.wav", "1.flac")}
    files: dict[str, tuple[bytes | None, str]] = {
        "empty.png": (b"", "the file is empty"), "missing.png": (None, "the file is missing"),
        "missing/deeper.jpg": (None, "the file is missing"),
        "junk.jpg": (b"junk" * 100, "UnidentifiedImageError"),
        "page.png": (b"<!DOCTYPE html><html>404</html>", "a download has most likely failed"),
        "vector.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG is not read"),
        "head.jpg": (good["1.jpg"][:30], ""), "head.png": (good["0.png"][:20], ""),
        "sound.png": (good["0.wav"], "UnidentifiedImageError"),
        "pickle.png": (pickle.dumps(Sentinel(folder / "SENTINEL")), "UnidentifiedImageError"),
        "bomb.png": (png_claiming(40000, 25000), "1000000000 pixels"),
        "wide.png": (png_claiming(60000, 2), "sides differ"),
        "cut.jpg": (good["1.jpg"][:-len(good["1.jpg"]) // 2], "truncated"),
        "cut.png": (good["0.png"][:-len(good["0.png"]) // 2], ""),
        "cut.webp": (good["2.webp"][:-len(good["2.webp"]) // 2], ""),
        "flipped.png": (good["0.png"].replace(b"IDAT", b"IDAX"), ""),
        "empty.wav": (b"", "the file is empty"), "missing.wav": (None, "the file is missing"),
        "junk.flac": (b"junk" * 100, "LibsndfileError"), "image.wav": (good["0.png"], "Libsndfile"),
        "head.wav": (good["0.wav"][:20], ""),
        "liar.wav": (wav_claiming(good["0.wav"], 10**9), "truncated"),
        "cut.flac": (good["1.flac"][: len(good["1.flac"]) // 2], ""),
        "clip.mp4": (b"\0\0\0\x18ftypmp42", "it is a video"),
    }
    for name, (data, _) in files.items():
        if data is not None:
            (folder / name).write_bytes(data)
    soundfile.write(folder / "none.wav", np.zeros(0), 16000)
    soundfile.write(folder / "nan.wav", np.full(2000, np.nan), 16000, subtype="FLOAT")
    soundfile.write(folder / "inf.wav", np.full(2000, np.inf), 16000, subtype="FLOAT")
    soundfile.write(folder / "long.wav", np.zeros(4000), 1)
    flac_expanding(folder / "bomb.flac")
    Image.new("RGB", (20, 20)).save(folder / "icon.jpg", format="ICO")
    (folder / "folder.png").mkdir()
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    (folder / "escape.png").symlink_to("/etc/hostname")
    said = {name: reason for name, (_, reason) in files.items()}
    return said | {"none.wav": "the clip is empty", "nan.wav": "NaN or infinite",
                   "inf.wav": "NaN or infinite", "long.wav": "less than 1000 Hz is no sound",
                   "bomb.flac": "expands more than", "icon.jpg": "ICO is not read",
                   "folder.png": "not a regular file", "dangling.png": "the file is missing",
                   "escape.png": "a symbolic link leads"}


def _medium_row(name: str) -> dict:
    kind = "audio" if name.endswith(("wav", "flac")) else "image"
    return llava_row([(kind, name), ("text", "\nwhat?")], "one two")


def broken_rows() -> list[tuple[str, str]]:
    """(line of the file, what is said of it)."""
    fine = llava_row(*QUESTIONS[0])
    turns = fine["conversations"]

    def row(**changes) -> str:
        return json.dumps({**fine, **changes})

    def talk(*said) -> list[dict]:
        return [{"from": who, "value": text} for who, text in said]

    return [
        ('{"conversations": [', "not JSON"), ("[1, 2]", "must be a JSON object"),
        ("null", "must be a JSON object"), ('{"a": ' * 3000 + "1" + "}" * 3000, "JSON"),
        ('{"id": 1, "id": 2, "conversations": []}', "key 'id' is there twice"),
        (json.dumps({"id": "7"}), "nothing in 'conversations'"),
        (row(conversations=[]), "nothing in 'conversations'"),
        (row(conversations="x"), "non-empty list"), (row(conversations=["x"]), "not an object"),
        (row(conversations=talk(("robot", "<image>"))), "a turn needs"),
        (row(conversations=[{"from": "human", "value": 3}]), "needs a string"),
        (row(conversations=talk(("human", "<image>what?"))), "nothing to learn"),
        (row(conversations=turns, images=[]), "1 <image> placeholders but 0"),
        (row(conversations=turns, images=["0.png"] * 2), "1 <image> placeholders but 2"),
        (row(images=[7]), "must be a non-empty string"), (row(images=[""]), "non-empty string"),
        (row(images=["../../etc/passwd"]), "leaves the folder"),
        (row(images=["/etc/passwd"]), "is absolute"),
        (row(images=["file:///etc/passwd"]), "is absolute"),
        (row(images=["http://127.0.0.1:9/a.png"]), "is a URL"),
        (row(images=["pipe:touch SENTINEL"]), "is a URL"),
        (row(images=["a\0.png"]), "NUL"), (row(images=["data:image/png;base64,@@"]), "not base64"),
        (row(images=["data:image/png,abc"]), "must be base64"),
        (row(conversations=talk(("human", "<image>a \ud800 b"), ("gpt", "x"))), "surrogate"),
        (row(conversations=talk(("human", "<image>" + "word " * 300_000), ("gpt", "x"))),
         "more than the limit of 1048576"),
        (row(conversations=talk(("human", "<image>" + "x" * (9 << 20)), ("gpt", "x"))),
         "more than max_row_bytes"),
    ]


def write_broken_corpus(folder: Path, num_good: int = 40) -> dict[int, str]:
    """Writes data.jsonl, tokenizer.json and media; returns line number -> what is said of it."""
    write_media(folder)
    write_tokenizer(folder)
    media = write_broken_media(folder)
    lines = [(json.dumps(_medium_row(name)), reason) for name, reason in media.items()]
    lines += broken_rows()
    lines += [(json.dumps(llava_row(*QUESTIONS[k % 12])), None) for k in range(num_good)]
    order = np.random.default_rng(0).permutation(len(lines))
    (folder / "data.jsonl").write_text("".join(lines[k][0] + "\n" for k in order),
                                       encoding="utf-8")
    return {number: lines[k][1] for number, k in enumerate(order.tolist(), 1)
            if lines[k][1] is not None}
