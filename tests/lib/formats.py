"""The same 12 examples written in every format, and corpora in the layouts of published ones."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from orchmllm.data.media.kinds import MODALITY_OF

# (kind, value) parts of the question, then the answer; images and clips by file name.
QUESTIONS: list[tuple[list[tuple[str, str]], str]] = [
    ([("image", "0.png"), ("text", "\nWhat is drawn?")], "a red square."),
    ([("text", "Look: "), ("image", "1.jpg"), ("text", " which colour?")], "blue."),
    ([("image", "0.png"), ("image", "1.jpg"), ("text", "\nCompare.")], "one is red."),
    ([("audio", "0.wav"), ("text", "\nWhat is heard?")], "a low tone."),
    ([("text", "How high is "), ("audio", "1.flac"), ("text", "?")], "very high."),
    ([("image", "2.webp"), ("audio", "0.wav"), ("text", "\nDo they fit?")], "no."),
    ([("audio", "1.flac"), ("image", "3.png"), ("text", "\nAnd these?")], "yes."),
    ([("audio", "0.wav"), ("audio", "1.flac"), ("text", "\nWhich is louder?")], "the first."),
    ([("image", "3.png"), ("text", "\nÜberschrift? 你好")], "größer 🙂"),
    ([("text", "before "), ("image", "4.jpg"), ("text", "")], "it lies on its side."),
    ([("image", "2.webp"), ("text", " a "), ("image", "3.png"), ("text", " b ")], "two of them."),
    ([("image", "0.png"), ("text", "\nSay <end> twice")], "<end><end>"),
]
MARKS = {"image": "<image>", "audio": "<audio>"}


def write_media(folder: Path) -> None:
    """The files that QUESTIONS name."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name, size in (("0.png", (60, 40)), ("1.jpg", (100, 300)), ("2.webp", (333, 200)),
                       ("3.png", (28, 28)), ("4.jpg", (250, 90))):
        exif = Image.Exif()
        if name == "4.jpg":
            exif[0x0112] = 6
        pixels = rng.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name, exif=exif)
    soundfile.write(folder / "0.wav", rng.normal(0, 0.1, 9000), 16000)
    soundfile.write(folder / "1.flac", rng.normal(0, 0.1, (5000, 2)), 8000)


def _names(parts: list[tuple[str, str]], kind: str) -> list[str]:
    return [value for k, value in parts if k == kind]


def _marked(parts: list[tuple[str, str]]) -> str:
    return "".join(value if kind == "text" else MARKS[kind] for kind, value in parts)


def llava_row(parts, answer) -> dict:
    return {"id": "x", "images": _names(parts, "image"), "audios": _names(parts, "audio"),
            "conversations": [{"from": "human", "value": _marked(parts)},
                              {"from": "gpt", "value": answer}]}


def sharegpt_row(parts, answer) -> dict:
    """ShareGPT with media: single ones as strings."""
    row = llava_row(parts, answer)
    for many, one in (("images", "image"), ("audios", "audio")):
        names = row.pop(many)
        if names:
            row[one] = names[0] if len(names) == 1 else names
    return row


def llama_factory_row(parts, answer) -> dict:
    return {"messages": [{"role": "user", "content": _marked(parts)},
                         {"role": "assistant", "content": answer}],
            "images": _names(parts, "image"), "audios": _names(parts, "audio")}


def alpaca_row(parts, answer) -> dict:
    return {"instruction": _marked(parts), "input": "", "output": answer,
            "images": _names(parts, "image"), "audios": _names(parts, "audio")}


def openai_row(parts, answer, folder: Path | None = None) -> dict:
    """folder: media as data: URLs and base64 instead of paths."""
    def encoded(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    content = []
    for kind, value in parts:
        if kind == "text":
            content.append({"type": "text", "text": value})
        elif kind == "image":
            url = value if folder is None else f"data:image/x;base64,{encoded(value)}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        elif folder is None:
            content.append({"type": "audio", "audio": value})
        else:
            content.append({"type": "input_audio", "input_audio": {
                "data": encoded(value), "format": value.rsplit(".", 1)[1]}})
    return {"messages": [{"role": "user", "content": content},
                         {"role": "assistant", "content": [{"type": "text", "text": answer}]}]}


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                    encoding="utf-8")
    return path


def _embedded(folder: Path):
    """A `datasets` dataset with Image and Audio columns that hold the bytes."""
    rows = []
    for parts, answer in QUESTIONS:
        row = llava_row(parts, answer)
        for key in ("images", "audios"):
            row[key] = [{"bytes": (folder / n).read_bytes(), "path": n} for n in row[key]]
        rows.append(row)
    return as_dataset(rows, {"images": "images", "audios": "audios"})


def as_dataset(rows: list[dict], media: dict[str, str]):
    """A `datasets` dataset. media: column -> image | images | audio | audios. Made from Arrow:
    encoding an Audio column would need torchcodec."""
    import datasets
    import pyarrow as pa

    features = datasets.Dataset.from_list(rows).features
    for column, kind in media.items():
        feature = (datasets.Image if kind.startswith("image") else datasets.Audio)()
        features[column] = datasets.List(feature) if kind.endswith("s") else feature
    table = pa.Table.from_pylist(rows, schema=features.arrow_schema)
    return datasets.Dataset(datasets.table.InMemoryTable(table),
                            info=datasets.DatasetInfo(features=features))


def _write_saved(folder: Path) -> Path:
    _embedded(folder).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def _write_parquet(folder: Path) -> Path:
    _embedded(folder).to_parquet(str(folder / "rows.parquet"))
    return folder / "rows.parquet"


def _write_openai_parquet(folder: Path) -> Path:
    import datasets

    rows = [openai_row(*q, folder=folder) for q in QUESTIONS]
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "openai.parquet"))
    return folder / "openai.parquet"


def _write_arrow(folder: Path) -> Path:
    saved = _write_saved(folder)
    return next(saved.glob("*.arrow"))


def write_tar(path: Path, rows: list[dict], media: Path) -> Path:
    """A webdataset shard: <key>.json and <key>.<n>.<suffix> for each medium."""
    import webdataset

    with webdataset.TarWriter(str(path)) as tar:
        for k, row in enumerate(rows):
            sample = {"__key__": f"{k:06d}", "json": row}
            for n, name in enumerate([*row.get("images", []), *row.get("audios", [])]):
                suffix = name.rsplit(".", 1)[1]
                sample[f"{n}.{suffix}"] = (media / name).read_bytes()
            tar.write(sample)
    return path


def _write_tars(folder: Path) -> Path:
    rows = [llava_row(*q) for q in QUESTIONS]
    for k in range(3):
        write_tar(folder / f"shard-{k:03d}.tar", rows[4 * k: 4 * k + 4], folder)
    return folder / "shard-{000..002}.tar"


def _write_json(folder: Path) -> Path:
    path = folder / "llava.json"
    path.write_text(json.dumps([llava_row(*q) for q in QUESTIONS], indent=1), encoding="utf-8")
    return path


def _jsonl(name: str, make: Callable) -> Callable[[Path], Path]:
    return lambda folder: write_jsonl(folder / f"{name}.jsonl", [make(*q) for q in QUESTIONS])


def _write_tar(folder: Path) -> Path:
    return write_tar(folder / "all.tar", [llava_row(*q) for q in QUESTIONS], folder)


def _write_parts(folder: Path, name: str = "parts") -> Path:
    """A folder of JSON files, whose media are below it."""
    parts = folder / name
    parts.mkdir()
    for path in folder.iterdir():
        if path.suffix[1:] in MODALITY_OF:
            shutil.copy(path, parts)
    write_jsonl(parts / "a.jsonl", [llava_row(*q) for q in QUESTIONS[:5]])
    (parts / "b.json").write_text(json.dumps([llava_row(*q) for q in QUESTIONS[5:]]))
    return parts


def _write_splits(folder: Path) -> Path:
    import datasets

    datasets.DatasetDict({"train": _embedded(folder)}).save_to_disk(str(folder / "splits"))
    return folder / "splits"


# name -> (writer, what the detector says)
FORMATS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llava.json": (_write_json, "llava in JSON array"),
    "llava.jsonl": (_jsonl("llava", llava_row), "llava in JSONL"),
    "sharegpt.jsonl": (_jsonl("sharegpt", sharegpt_row), "llava in JSONL"),
    "openai.jsonl": (_jsonl("openai", openai_row), "openai in JSONL"),
    "openai embedded": (lambda folder: write_jsonl(
        folder / "embedded.jsonl", [openai_row(*q, folder=folder) for q in QUESTIONS]),
        "openai in JSONL"),
    "llama_factory": (_jsonl("factory", llama_factory_row), "llama_factory in JSONL"),
    "alpaca": (_jsonl("alpaca", alpaca_row), "llama_factory (alpaca) in JSONL"),
    "saved datasets": (_write_saved, "llava in saved datasets folder"),
    "parquet": (_write_parquet, "llava in parquet file"),
    "openai parquet": (_write_openai_parquet, "openai in parquet file"),
    "arrow": (_write_arrow, "llava in arrow file"),
    "webdataset": (_write_tars, "llava in webdataset tar"),
    "one tar": (_write_tar, "llava in webdataset tar"),
    "several files": (_write_parts, "llava in JSON"),
    "only split": (_write_splits, "llava in saved datasets folder"),
}
