"""Times what reads data: headers per second of one core, a length index, the memory of a large
JSONL file, a clip of video beside PyAV in this process, and how long a step waits for 1024x1024
JPEG files.

    python scripts/bench_data.py [--rows 100000] [--files 2000] [--workers 2] [--steps 30]

Writes COCO-sized JPEG and PNG files and 1 to 15 s WAV and FLAC clips into a temporary folder, then
reads their headers (files in the page cache), and indexes a JSONL file of conversations on them.
The memory is that of a process that opens 10 times as many rows of text; the steps are those of
recipes/demo.yaml on one rank with its data in worker processes. The load of the machine is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.open import open_source
from orchmllm.data.media import av_process
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium, VideoSampling
from orchmllm.data.media.video import expand, pictures
from orchmllm.data.processed import ProcessedReader
from orchmllm.data.text.processor import Processor
from orchmllm.plan.layout import TEXT
from orchmllm.tools.compose.drawn import shapes, write_drawn
from orchmllm.tools.data.build_index import build_index
from orchmllm.tools.init.demo import LLM, MAX_SIDE, TOWER

WORDS = ("what is the colour of this small round thing on a table near two people who walk along "
         "the river while it rains and somebody plays").split()


def write_media(folder: Path, count: int, rng: np.random.Generator) -> dict[str, list[str]]:
    """`count` files of each kind; every one its own file, few distinct contents."""
    names: dict[str, list[str]] = {"jpg": [], "png": [], "wav": [], "flac": []}
    for suffix, files in names.items():
        contents = []
        for k in range(20):
            path = folder / f"template{k}.{suffix}"
            if suffix in ("jpg", "png"):
                size = [(640, 480), (640, 427), (480, 640), (500, 375)][k % 4]
                small = Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8))
                small.resize(size, Image.Resampling.BICUBIC).save(path)
            else:
                soundfile.write(path, rng.normal(0, 0.1, int(rng.uniform(1, 15) * 16000)), 16000)
            contents.append(path.read_bytes())
            path.unlink()
        for k in range(count):
            (folder / f"{k}.{suffix}").write_bytes(contents[k % 20])
            files.append(f"{k}.{suffix}")
    return names


def rate(read, paths: list[Path]) -> float:
    """Calls per second of CPU time, best of three passes over files in the page cache."""
    best = 0.0
    for _ in range(3):
        started = time.process_time()
        for path in paths:
            read(path)
        best = max(best, len(paths) / (time.process_time() - started))
    return best


def write_rows(path: Path, names: dict[str, list[str]], count: int, rng) -> None:
    """LLaVA rows: 65% with an image, 31% with a clip, the rest text; 4 rounds, ~150 words."""
    images, clips = names["jpg"] + names["png"], names["wav"] + names["flac"]
    with path.open("w", encoding="utf-8") as f:
        for i in range(count):
            kind = rng.random()
            row: dict = {"id": str(i)}
            mark = ""
            if kind < 0.65:
                row["image"], mark = images[i % len(images)], "<image>\n"
            elif kind < 0.96:
                row["audio"], mark = clips[i % len(clips)], "<audio>\n"
            turns = []
            for k in range(4):
                words = [" ".join(rng.choice(WORDS, n)) for n in (10, 27)]
                turns += [{"from": "human", "value": (mark if k == 0 else "") + words[0]},
                          {"from": "gpt", "value": words[1]}]
            f.write(json.dumps({**row, "conversations": turns}) + "\n")


def cpu_seconds() -> float:
    """Of this process and its ended children: what a busy machine does not change."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.save(str(path))


def peak_mb(path: Path, folder: Path) -> float:
    """Most memory of a process that opens a data file and reads 1000 of its rows, in MB."""
    code = ("import sys; from pathlib import Path; from orchmllm.config.recipe import "
            "SourceConfig; from orchmllm.data.formats.open import open_source; "
            "s = open_source(SourceConfig(path=sys.argv[1]), Path(sys.argv[2])); "
            "[s.conversation(k * len(s) // 1000) for k in range(1000)]; "
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])")
    done = subprocess.run([sys.executable, "-c", code, path, folder], capture_output=True,
                          text=True, check=True)
    return int(done.stdout) / 1000


def video_ms(path: Path, rounds: int = 5) -> tuple[float, float]:
    """CPU in ms of one frame a second of 10 s of 1280x720 H.264, (as rows read it, with the process
    that decodes; by PyAV in this process). The fastest of the rounds, in which both take turns."""
    import av

    wide = np.zeros((720, 1530, 3), np.uint8) + np.arange(1530, dtype=np.uint16)[:, None] % 256
    with av.open(path, "w") as out:
        stream = out.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        for k in range(250):
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(wide[:, k: k + 1280].astype(np.uint8)), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    medium = Medium(VIDEO, path.name, path)

    def ours() -> list[float]:
        frames = expand(medium, VideoSampling(), {})
        pictures(frames)
        return [frame.frame.second for frame in frames]

    def theirs(seconds: list[float]) -> None:
        left = seconds.copy()
        with av.open(path) as file:
            file.streams.video[0].codec_context.thread_count = 1
            for frame in file.decode(video=0):
                if left and frame.time >= left[0]:
                    frame.to_ndarray(format="rgb24")
                    del left[0]

    def of_child() -> float:
        stat = Path(f"/proc/{av_process._child.process.pid}/stat").read_text()
        return sum(map(int, stat.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    seconds, spent = ours(), np.zeros((rounds, 2))
    for times in spent:
        start = time.process_time() + of_child()
        for _ in range(3):  # the child's time is known to 10 ms
            ours()
        times[0] = time.process_time() + of_child() - start
        start = time.process_time()
        for _ in range(3):
            theirs(seconds)
        times[1] = time.process_time() - start
    return tuple(spent.min(0) / 3 * 1e3)


def waits(folder: Path, workers: int, steps: int, rng) -> tuple[float, float]:
    """(mean seconds of a step, share of it in which it waits for data), without the first five, of
    the model in `folder`."""
    rows = []
    for k in range(64):
        small = Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        small.resize((1024, 1024), Image.Resampling.BICUBIC).save(folder / f"large{k}.jpg")
        rows.append({"image": f"large{k}.jpg", "conversations": [
            {"from": "human", "value": "<image>\nwhat is this"},
            {"from": "gpt", "value": " ".join(WORDS)}]})
    (folder / "large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run(
        [sys.executable, "-m", "orchmllm.train", "recipes/demo.yaml",
         f"data.path={folder}/large.jsonl", f"model.config={folder}/model",
         f"run.dir={folder}/run", f"data.num_workers={workers}", "data.num_validation=0",
         f"train.num_steps={steps + 5}", "train.warmup_steps=1", "launch.nproc_per_node=1",
         "checkpoint.every_steps=-1"], check=True, stdout=subprocess.DEVNULL)
    log = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    seen = [(row["step_s"], row["data_wait_s"]) for row in log if "step_s" in row][5:]
    step_s, wait_s = np.mean(seen, axis=0)
    return step_s, wait_s / step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000, help="rows to index (0: none)")
    parser.add_argument("--files", type=int, default=2000, help="files of each kind")
    parser.add_argument("--workers", type=int, default=2, help="processes that index")
    parser.add_argument("--steps", type=int, default=30, help="steps to train (0: none)")
    args = parser.parse_args()
    if args.files < 1:
        parser.error("--files: at least 1")
    print("load of the machine: {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()), flush=True)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_media(folder, args.files, rng)
        for suffix, read in (("jpg", image_header), ("png", image_header),
                             ("wav", audio_header), ("flac", audio_header)):
            per_s = rate(read, [Medium(TEXT, f, folder / f) for f in files[suffix]])
            print(f"{suffix:<5} {per_s:>8.0f} headers/s on one core", flush=True)
        ours, theirs = video_ms(folder / "a.mp4")
        print(f"10 frames of 10 s of video: {ours:.0f} ms of CPU, {ours / theirs:.2f} of PyAV in "
              "this process", flush=True)
        if not args.rows:
            return
        write_rows(folder / "data.jsonl", files, args.rows, rng)
        write_tokenizer(folder / "tokenizer.json")
        write_drawn(shapes(LLM, TOWER, TOWER, vocab_size=512), folder / "tokenizer.json",
                    folder / "model", MAX_SIDE)
        reader = ProcessedReader(Processor(folder / "model"))
        config = SourceConfig(path=str(folder / "data.jsonl"))
        for what in ("built", "refreshed"):
            started, cpu_s = time.perf_counter(), cpu_seconds()
            source = open_source(config, folder / "index")
            index, num_read = build_index(source, reader, folder / "index",
                                          num_workers=args.workers)
            print(f"index of {len(index)} rows {what} in {time.perf_counter() - started:.1f} s, "
                  f"{cpu_seconds() - cpu_s:.1f} s of CPU ({num_read} rows read, {args.workers} "
                  "workers)", flush=True)
        batch = rng.integers(0, len(index), 76_800)  # of 2,560 ranks with 30 examples
        index.layout(batch, batch)
        started = cpu_seconds()
        index.layout(batch, batch)
        print(f"lengths of 76,800 examples from the index: {cpu_seconds() - started:.3f} s of CPU")
        text = json.dumps({"conversations": [{"from": "human", "value": "what is this " * 20},
                                             {"from": "gpt", "value": "a round thing " * 20}]})
        (folder / "text.jsonl").write_text(f"{text}\n" * (10 * args.rows))
        print(f"a JSONL file of {10 * args.rows} rows, "
              f"{(folder / 'text.jsonl').stat().st_size >> 20} MiB: opened and read with "
              f"{peak_mb(folder / 'text.jsonl', folder / 'index'):.0f} MB at most", flush=True)
        if args.steps:
            step_s, share = waits(folder, args.workers, args.steps, rng)
            print(f"a step on 1024x1024 JPEG files takes {step_s:.2f} s, {share:.1%} of it waiting "
                  f"for data ({args.workers} workers)")
        print("load of the machine: {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()))


if __name__ == "__main__":
    main()
