"""Small corpora in exactly the layouts of LLaVA-1.5's mix, LibriSpeech and AIR-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from tests.lib.formats import as_dataset
from tests.lib.tokenizers import write_tokenizer

LLAVA_FOLDERS = ("coco/train2017", "gqa/images", "ocr_vqa/images", "textvqa/train_images",
                 "vg/VG_100K", "vg/VG_100K_2")
FOUNDATION_TASKS = (("Speech_Grounding", "librispeech"), ("Audio_Grounding", "AudioGrounding"),
                    ("Music_Instruments_Classfication", "nsynth"))
WORDS = "red blue one two square low high tone the first yes no".split()


def say(rng: np.random.Generator, count: int) -> str:
    return " ".join(rng.choice(WORDS, count))


def write_llava(folder: Path, count: int = 24, seed: int = 0) -> Path:
    """<folder>/llava_v1_5_mix665k.json; every sixth row is text only, as ShareGPT's part is."""
    rng, rows = np.random.default_rng([seed, 1]), []
    for k in range(count):
        rounds = int(rng.integers(1, 4))
        turns = []
        for r in range(rounds):
            mark = "<image>\n" if r == 0 and k % 6 else ""
            turns += [{"from": "human", "value": mark + say(rng, 5)},
                      {"from": "gpt", "value": say(rng, int(rng.integers(1, 20)))}]
        row: dict = {"id": k if k % 2 else f"{k:012d}", "conversations": turns}
        if k % 6:
            name = f"{LLAVA_FOLDERS[k % 6]}/{k:012d}.jpg"
            size = tuple(int(x) for x in rng.integers(30, 200, 2))
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, tuple(rng.integers(0, 255, 3).tolist())).save(folder / name)
            row = {"id": row["id"], "image": name, "conversations": turns}
        rows.append(row)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llava_v1_5_mix665k.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def _clip(rng: np.random.Generator, path: Path, seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, rng.normal(0, 0.1, int(seconds * 16000)), 16000)


def write_librispeech(folder: Path, count: int = 16, seed: int = 0) -> Path:
    """<folder>/train-clean-100/<speaker>/<chapter>/..., and one clip in dev-clean."""
    rng = np.random.default_rng([seed, 2])
    lines: dict[Path, list[str]] = {}
    for k in range(count):
        speaker, chapter = 100 + k // 8, 1000 + k // 4
        where = folder / "train-clean-100" / str(speaker) / str(chapter)
        name = f"{speaker}-{chapter}-{k % 4:04d}"
        _clip(rng, where / f"{name}.flac", rng.uniform(0.2, 1.5))
        trans = where / f"{speaker}-{chapter}.trans.txt"
        lines.setdefault(trans, []).append(f"{name} {say(rng, 6).upper()}")
    other = folder / "dev-clean" / "7" / "8"
    _clip(rng, other / "7-8-0000.flac", 0.3)
    lines[other / "7-8.trans.txt"] = ["7-8-0000 ONE"]
    for path, text in lines.items():
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return folder


def write_librispeech_hf(folder: Path) -> Path:
    """The hub's columns, saved by `datasets` with its splits."""
    import datasets

    rng, rows = np.random.default_rng(3), []
    for k in range(5):
        path = folder / f"{k}.flac"
        _clip(rng, path, 0.3 + 0.1 * k)
        rows.append({"file": f"{k}.flac", "audio": {"bytes": path.read_bytes(),
                                                    "path": f"{k}.flac"},
                     "text": say(rng, 4).upper(), "speaker_id": 1, "chapter_id": 2,
                     "id": f"1-2-{k:04d}"})
    saved = datasets.DatasetDict({"train.100": as_dataset(rows, {"audio": "audio"})})
    saved.save_to_disk(str(folder / "saved"))
    return folder / "saved"


def write_air_bench(folder: Path, count: int = 12, seed: int = 0) -> Path:
    """<folder>/Foundation and <folder>/Chat with their meta files."""
    rng = np.random.default_rng([seed, 4])
    foundation, chat = [], []
    for k in range(count):
        task, source = FOUNDATION_TASKS[k % 3]
        real = f"{k}.flac" if task == "Audio_Grounding" else f"{k}.wav"
        _clip(rng, folder / "Foundation" / f"{task}_{source}" / real, rng.uniform(0.2, 1.0))
        choices = ["red", "blue", "one", "two"]
        foundation.append({
            "path": f"{k}.wav", "question": "Which?", "answer_gt": choices[k % 4],
            **{f"choice_{c}": v for c, v in zip("abcd", choices, strict=True)},
            "task_name": task, "dataset_name": source, "uniq_id": k})
    for k in range(count // 3):
        _clip(rng, folder / "Chat" / "sound_QA_clotho" / f"{k}.wav", rng.uniform(0.3, 2.0))
        chat.append({"path": f"{k}.wav", "question": say(rng, 4), "answer_gt": say(rng, 6),
                     "meta_info": "a tone", "task_name": "sound_QA", "dataset_name": "clotho",
                     "uniq_id": k})
    for name, rows in (("Foundation", foundation), ("Chat", chat)):
        (folder / name / f"{name}_meta.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


def write_paper_mix(root: Path, seed: int = 0, scale: int = 1) -> None:
    """Everything that recipes/paper_mix.yaml names, below root/data."""
    write_llava(root / "data" / "llava", 24 * scale, seed)
    write_librispeech(root / "data" / "LibriSpeech", 16 * scale, seed)
    write_air_bench(root / "data" / "AIR-Bench", 12 * scale, seed)
    (root / "data" / "tokenizer").mkdir(parents=True, exist_ok=True)
    write_tokenizer(root / "data" / "tokenizer")
