"""Small corpora in the layouts of published ones, as their public descriptions have them, and what
is to be learnt of each: a reference that reads nothing with this package.

An example of the reference is a list of (text or medium, learnt) in the order of the sequence. A
medium is ("image", shade), ("frames", of which pictures), or ("clip", file, first sample, last)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import yaml
from PIL import Image

from tests.lib.formats import as_dataset, write_jsonl
from tests.lib.videos import write_video

RATE = 16000
SYSTEM, END = "You are a helpful assistant.", "<|endoftext|>"
SAY, SEE, WATCH = "Transcribe the speech.", "Describe the image.", "Describe the video."
HEAR = "Describe the sound."


class Corpus(NamedTuple):
    """source: keys of a recipe's source. examples: of the reference, in order."""

    source: dict
    examples: list[list]


def image(folder: Path, shade: int, name: str = "") -> str:
    """An image of 28x28 pixels, which becomes one token; its name."""
    name = name or f"{shade}.png"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (28, 28), (shade, shade, shade)).save(folder / name)
    return name


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


def clip(folder: Path, seed: int, name: str, seconds: float = 0.5) -> tuple:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE))
    soundfile.write(folder / name, samples, RATE)
    return "clip", str(folder / name), 0, len(samples)


def chat(*said: tuple, system: str = SYSTEM) -> list:
    """ChatML of (question parts, answer) rounds."""
    out = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)]
    for question, answer in said:
        out.append(("<|im_start|>user\n", False))
        out += [(part, False) for part in (question if isinstance(question, list) else [question])]
        out += [("<|im_end|>\n<|im_start|>assistant\n", False), (answer, True),
                ("<|im_end|>", True), ("\n", False)]
    return out


def text(*parts, learnt: bool = True) -> list:
    return [*((part, learnt and isinstance(part, str)) for part in parts), (END, learnt)]


def write_table(path: Path, rows: list[dict], **how) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n", **how)
        writer.writeheader()
        writer.writerows(rows)
    return path


def llava_video(folder: Path) -> Corpus:
    rows = [{"id": f"v{k}", "data_source": "0_30_s_academic", "video": f"academic/{k}.mp4",
             "conversations": [{"from": "human", "value": "<image>\nWhat moves?"},
                               {"from": "gpt", "value": f"square {k}"}]} for k in range(3)]
    (folder / "academic").mkdir()
    for k in range(3):
        write_video(folder / "academic" / f"{k}.mp4", count=24)  # 3 s at 8 frames a second
    (folder / "a.json").write_text(json.dumps(rows))
    return Corpus({"path": folder / "a.json", "row_format": "llava_video_178k"},
                  [chat((["F", "\nWhat moves?"], f"square {k}")) for k in range(3)])


def sharegpt4video(folder: Path) -> Corpus:
    for k in range(2):
        write_video(folder / f"{k}.mp4", count=24)
    rows = [{"video_id": f"v{k}", "video_path": f"{k}.mp4", "timestamp": [0, 1.5], "keyframe": [0],
             "captions": [{"idx": "1", "content": "first"}, {"idx": "1-2", "content": "then"},
                          {"idx": "-1", "content": f"square {k}, in all."}],
             "zip_folder": "panda_1.zip"} for k in range(2)]
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)},
                  [chat((["F", f"\n{WATCH}"], f"square {k}, in all.")) for k in range(2)])


def cauldron(folder: Path) -> Corpus:
    rows = [{"images": [{"bytes": png(10 * k), "path": None}, {"bytes": png(10 * k + 5)}],
             "texts": [{"user": "Which?", "assistant": f"low {k}", "source": "x"},
                       {"user": "And?", "assistant": "high", "source": "x"}]} for k in range(3)]
    as_dataset(rows, {"images": "images"}).to_parquet(str(folder / "a.parquet"))
    return Corpus({"path": folder / "a.parquet"}, [
        chat(([("image", 10 * k), ("image", 10 * k + 5), "\nWhich?"], f"low {k}"), ("And?", "high"))
        for k in range(3)])


def interleaved(name: str) -> Callable[[Path], Corpus]:
    def write(folder: Path) -> Corpus:
        rows = [{"images": [image(folder, k), None, None, image(folder, k + 9)],
                 "texts": [None, f"one {k}", "two", None], "metadata": "[]", "url": "x"}
                for k in range(3)]
        return Corpus({"path": write_jsonl(folder / "a.jsonl", rows), "row_format": name}, [
            text(("image", k), f"one {k}\n\ntwo", ("image", k + 9)) for k in range(3)])

    return write


def mmc4(folder: Path) -> Corpus:
    rows = [{"url": "x", "text_list": [f"one {k}.", "two.", "first."],
             "image_info": [{"image_name": image(folder, 20 + k), "raw_url": "x",
                             "matched_text_index": 1, "matched_sim": 0.3},
                            {"image_name": image(folder, 40 + k), "matched_text_index": 0}],
             "similarity_matrix": [[0.1]]} for k in range(3)]
    rows.append({"text_list": ["no", "yes"], "image_info": []})
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)}, [
        *(text(("image", 40 + k), f"one {k}.", ("image", 20 + k), "two. first.") for k in range(3)),
        text("no yes")])


def c4(folder: Path) -> Corpus:
    rows = [{"text": f"the first {k}\n\ntone ", "timestamp": "2019", "url": "x"} for k in range(3)]
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows), "row_format": "text"},
                  [text(row["text"]) for row in rows])


def prompt_completion(folder: Path) -> Corpus:
    rows = [{"prompt": f"the first {k} is", "completion": " red."} for k in range(3)]
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)}, [
        [(row["prompt"], False), (row["completion"], True), (END, True)] for row in rows])


def commonvoice(folder: Path) -> Corpus:
    (folder / "clips").mkdir()
    rows = [{"client_id": "ab", "path": f"{k}.wav", "sentence": f'the "{k}" tone', "up_votes": 2,
             "down_votes": 0, "age": "", "locale": "en"} for k in range(3)]
    clips = [clip(folder, k, f"clips/{k}.wav") for k in range(3)]
    for split in ("train", "dev", "test"):
        write_table(folder / f"{split}.tsv", rows if split == "train" else rows[:1], delimiter="\t",
                    quoting=csv.QUOTE_NONE, quotechar=None)
    return Corpus({"path": folder, "split": "train"}, [
        chat(([clips[k], f"\n{SAY}"], f'the "{k}" tone')) for k in range(3)])


def clotho(folder: Path) -> Corpus:
    rows = [{"file_name": f"a tone {k}.wav"} | {
        f"caption_{n}": f'low, "{n}"\nand {k}' for n in range(1, 6)} for k in range(3)]
    clips = [clip(folder, k, rows[k]["file_name"]) for k in range(3)]
    return Corpus({"path": write_table(folder / "clotho_captions_development.csv", rows)}, [
        chat(([clips[k], f"\n{HEAR}"], f'low, "1"\nand {k}')) for k in range(3)])


def audiocaps(folder: Path) -> Corpus:
    rows = [{"audiocap_id": 90 + k, "youtube_id": f"-_{k}", "start_time": k,
             "caption": f"a tone {k}"} for k in range(3)]
    clips = [clip(folder, k, f"-_{k}.wav", 3) for k in range(3)]
    return Corpus({"path": write_table(folder / "train.csv", rows)}, [
        chat(([clips[k], f"\n{HEAR}"], f"a tone {k}")) for k in range(3)])


def audio_captions(folder: Path) -> Corpus:
    """AudioCaps of the Hub has what the preset of cut clips reads, and the clips themselves."""
    clips = [clip(folder, k, f"{k}.wav") for k in range(3)]
    rows = [{"audiocap_id": 90 + k, "youtube_id": f"-_{k}", "start_time": k, "audio": f"{k}.wav",
             "caption": f"a tone {k}"} for k in range(3)]
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)}, [
        chat(([clips[k], f"\n{HEAR}"], f"a tone {k}")) for k in range(3)])


def audiofolder(folder: Path) -> Corpus:
    clips = [clip(folder, k, f"deep/{k}.flac") for k in range(3)]
    rows = [{"file_name": f"deep/{k}.flac", "text": f"low {k}"} for k in range(3)]
    write_table(folder / "metadata.csv", rows)
    return Corpus({"path": folder}, [
        chat(([clips[k], f"\n{SAY}"], f"low {k}")) for k in range(3)])


def gigaspeech(folder: Path) -> Corpus:
    audios, expected = [], []
    for k in range(2):
        path = f"audio/podcast/POD{k}.wav"
        _, name, _, _ = clip(folder, k, path, 3)
        audios.append({"title": "x", "aid": f"POD{k}", "path": path, "duration": 3.0, "segments": [
            {"sid": f"POD{k}_S{n}", "speaker": "N/A", "begin_time": 0.5 * n + 0.25,
             "end_time": 0.5 * n + 0.6, "text_tn": f"LOW {k} {n}",
             "subsets": ["{XL}", "{L}"] if n < 3 else ["{TEST}"]} for n in range(4)]})
        expected += [chat(([("clip", name, 8000 * n + 4000, 8000 * n + 9600), f"\n{SAY}"],
                           f"LOW {k} {n}")) for n in range(3)]
    (folder / "GigaSpeech.json").write_text(json.dumps(
        {"dataset": "GigaSpeech", "language": "EN", "audios": audios}, indent=1))
    return Corpus({"path": folder / "GigaSpeech.json", "row_format": "gigaspeech", "split": "XL"},
                  expected)


def nemo(folder: Path) -> Corpus:
    _, name, _, _ = clip(folder, 1, "long.wav", 2)
    whole = clip(folder, 2, "short.wav", 0.5)
    rows = [{"audio_filepath": "long.wav", "offset": 0.5, "duration": 0.4, "text": "low"},
            {"audio_filepath": "long.wav", "offset": 1.5, "duration": 0.5, "text": "high"},
            {"audio_filepath": "short.wav", "duration": 0.5, "text": "first"}]
    return Corpus({"path": write_jsonl(folder / "manifest.json", rows)}, [
        chat(([("clip", name, 8000, 14400), f"\n{SAY}"], "low")),
        chat(([("clip", name, 24000, 32000), f"\n{SAY}"], "high")),
        chat(([whole, f"\n{SAY}"], "first"))])


def imagefolder(folder: Path) -> Corpus:
    for split, first in (("train", 10), ("test", 50)):
        rows = [{"file_name": f"deep/{k}.png", "text": f"red {first + k}"} for k in range(3)]
        for k in range(3):
            image(folder / split, first + k, f"deep/{k}.png")
        write_table(folder / split / "metadata.csv", rows)
    return Corpus({"path": folder, "split": "train"}, [
        chat(([("image", 10 + k), f"\n{SEE}"], f"red {10 + k}")) for k in range(3)])


def vqa(folder: Path) -> Corpus:
    rows = [{"image": image(folder, k), "question": f"Which {k}?", "question_id": k,
             "multiple_choice_answer": "red", "answers": [{"answer": "rot", "answer_id": 1}]}
            for k in range(2)]
    rows.append({"image": image(folder, 9), "question": "Which?", "answers": ["blue", "low"]})
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)}, [
        *(chat(([("image", k), f"\nWhich {k}?"], "red")) for k in range(2)),
        chat(([("image", 9), "\nWhich?"], "blue"))])


def energon(kind: str, field_map: dict, member: dict, expected: Callable) -> Callable:
    """A folder of tars, of which two are for training; one sample in a tar has a folder ./"""
    def write(folder: Path) -> Corpus:
        import webdataset

        for k, split in enumerate(("a", "b", "c")):
            (folder / "shards").mkdir(exist_ok=True)
            with webdataset.TarWriter(str(folder / "shards" / f"{split}.tar")) as tar:
                tar.write({"__key__": f"s{k}", "png": png(60 + k), **{
                    name: value(k) for name, value in member.items()}})
        meta = folder / ".nv-meta"
        meta.mkdir()
        (meta / "dataset.yaml").write_text(yaml.safe_dump({
            "sample_type": {"__module__": "megatron.energon", "__class__": kind},
            "field_map": field_map}))
        (meta / "split.yaml").write_text(yaml.safe_dump({"exclude": [], "split_parts": {
            "train": ["shards/a.tar", "shards/b.tar"], "val": ["shards/c.tar"], "test": []}}))
        (meta / ".info.json").write_text('{"shard_counts": {}}')
        return Corpus({"path": folder, "split": "train"}, [expected(k) for k in range(2)])

    return write


def img2dataset(folder: Path) -> Corpus:
    import webdataset

    rows = [{"url": "x", "caption": f"red {k}", "key": f"00000{k}", "status": "success"}
            for k in range(2)]
    for shard in ("00000", "00001"):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as tar:
            for k, row in enumerate(rows):
                tar.write({"__key__": f"{shard}{k}", "jpg": png(70 + k), "txt": row["caption"],
                           "json": row})
        as_dataset(rows, {}).to_parquet(str(folder / f"{shard}.parquet"))
        (folder / f"{shard}_stats.json").write_text('{"count": 2}')
    return Corpus({"path": folder}, [chat(([("image", 70 + k), f"\n{SEE}"], f"red {k}"))
                                     for _ in range(2) for k in range(2)])


def swift(folder: Path) -> Corpus:
    rows = [{"query": "<image>Which?", "response": f"low {k}", "images": [image(folder, k)],
             "system": "Be first.", "history": [["yes", "no"]]} for k in range(2)]
    rows.append({"query": "Which?", "response": "high", "images": [image(folder, 9)]})
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)}, [
        *(chat(("yes", "no"), ([("image", k), "Which?"], f"low {k}"), system="Be first.")
          for k in range(2)),
        chat(([("image", 9), "\nWhich?"], "high"))])


def qwen2_audio(folder: Path) -> Corpus:
    clips = [clip(folder, k, f"{k}.wav") for k in range(3)]
    rows = [{"conversation": [
        {"role": "user", "content": [{"type": "audio", "audio_url": f"{k}.wav"},
                                     {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": f"tone {k}"}]} for k in range(3)]
    return Corpus({"path": write_jsonl(folder / "a.jsonl", rows)}, [
        chat(([clips[k], "What is it?"], f"tone {k}")) for k in range(3)])


def own_columns(folder: Path) -> Corpus:
    """No preset: columns of the recipe, of a CSV."""
    rows = [{"ask": f"which, {k}?", "say": "red", "name": f"{k:03}", "n": k} for k in range(3)]
    for k in range(3):
        image(folder, k, f"pictures/x{k:05}.png")
    return Corpus({"path": write_table(folder / "a.csv", rows), "columns": {
        "question": "ask", "answer": "say", "images": "pictures/x{n:05}.png", "id": "name"}}, [
        chat(([("image", k), f"\nwhich, {k}?"], "red")) for k in range(3)])


CORPORA: dict[str, Callable[[Path], Corpus]] = {
    "cauldron": cauldron, "obelics": interleaved("obelics"), "mint_1t": interleaved("mint_1t"),
    "mmc4": mmc4, "text": c4,
    "prompt_completion": prompt_completion, "sharegpt4video": sharegpt4video,
    "llava_video_178k": llava_video, "commonvoice": commonvoice, "clotho": clotho,
    "audiocaps": audiocaps, "audio_captions": audio_captions, "audiofolder": audiofolder,
    "gigaspeech": gigaspeech, "nemo": nemo, "imagefolder": imagefolder,
    "vqa": vqa, "ms_swift": swift, "qwen2_audio": qwen2_audio, "img2dataset": img2dataset,
    "own columns": own_columns,
    "energon_vqa": energon(
        "VQASample", {"image": "png", "context": "json[question]", "answers": "json[labels]"},
        {"json": lambda k: {"question": f"Which {k}?", "labels": ["red", "blue"]}},
        lambda k: chat(([("image", 60 + k), f"\nWhich {k}?"], "red"))),
    "energon_captions": energon(
        "CaptioningSample", {"image": "png", "caption": "txt"}, {"txt": lambda k: f"a red {k}"},
        lambda k: chat(([("image", 60 + k), f"\n{SEE}"], f"a red {k}"))),
}


def pieces(example: list) -> Iterator[tuple[str, list[tuple[int, int]]] | tuple]:
    """The texts of an example between its media, each with the characters of it that are learnt,
    and the media."""
    written, learnt = "", []
    for part, is_learnt in example:
        if isinstance(part, str) and part != "F":
            if is_learnt:
                learnt.append((len(written), len(written) + len(part)))
            written += part
            continue
        if written:
            yield written, learnt
        yield from [("frames", second) for second in (0.5, 1.5, 2.5)] if part == "F" else [part]
        written, learnt = "", []
    if written:
        yield written, learnt
