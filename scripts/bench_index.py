"""Times the length index of a large file with one process and with several, and what a build that
was killed at half makes of the rest.

    python scripts/bench_index.py [--rows 1000000] [--workers 2]

Rows are one round of text. `orchmllm data index` runs as a command of its own. A build is killed,
with all its processes, when half of the rows are written, and started again. All three indexes have
to be equal, byte by byte. CPU is that of all processes of a build, which a busy machine changes
less than its seconds.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from orchmllm.tools.compose.drawn import shapes, write_drawn
from orchmllm.tools.data.build_index import FILES, JOURNAL
from orchmllm.tools.init.demo import LLM, MAX_SIDE, TOWER

WORDS = ("what is the colour of this small round thing on a table near two people who walk along "
         "the river while it rains and somebody plays").split()
RECIPE = """
data: {{path: {folder}/data.jsonl}}
model: {{config: {folder}/model}}
"""


def cpu_seconds() -> float:
    """Of this process and its ended children: what a busy machine does not change."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer.json with the tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainers.BpeTrainer(
        vocab_size=500, show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.save(str(path))


def command(folder: Path, index: Path, workers: int) -> list[str]:
    return [sys.executable, "-c", "from orchmllm.cli import main; main()", "data", "index",
            str(folder / "recipe.yaml"), "--workers", str(workers), f"data.index_dir={index}"]


def rows_written(index: Path) -> int:
    """Of the index that is being built."""
    for journal in index.glob(f"*.part/{JOURNAL}"):
        lines = journal.read_text().rpartition("\n")[0].splitlines()
        return json.loads(lines[-1])[0] if lines else 0
    return 0


def built(folder: Path, index: Path, workers: int) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    started, cpu_s = time.perf_counter(), cpu_seconds()
    subprocess.run(command(folder, index, workers), check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    return time.perf_counter() - started, cpu_seconds() - cpu_s


def write_rows(path: Path, count: int) -> None:
    """Rows of one round whose texts have 1 to 40 words."""
    with path.open("w", encoding="utf-8") as f:
        for k in range(count):
            words = " ".join(WORDS[(k + j) % len(WORDS)] for j in range(1 + k * 7 % 40))
            f.write(json.dumps({"conversations": [
                {"from": "human", "value": f"what is number {k}"},
                {"from": "gpt", "value": words}]}) + "\n")


def killed(folder: Path, index: Path, workers: int, at: int) -> int:
    """Rows that are written when it is killed, `at` of them or a few more."""
    process = subprocess.Popen(command(folder, index, workers), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while (done := rows_written(index)) < at and process.poll() is None:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return done


def told(what: str, took: tuple[float, float], rows: int) -> float:
    """The seconds of a build, which are printed."""
    seconds, cpu_s = took
    print(f"{what}: {seconds:.0f} s, {rows / seconds:.0f} rows/s, {cpu_s:.0f} s of CPU; load "
          f"{os.getloadavg()[0]:.1f}", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "data.jsonl", args.rows)
        write_tokenizer(folder / "tokenizer.json")
        write_drawn(shapes(LLM, TOWER, vocab_size=512), folder / "tokenizer.json",
                    folder / "model", MAX_SIDE)
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
        print(f"{args.rows} rows, {(folder / 'data.jsonl').stat().st_size >> 20} MiB; "
              f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        many, one, resumed = (folder / what for what in ("many", "one", "resumed"))
        many_s = told(f"{args.workers} processes", built(folder, many, args.workers), args.rows)
        done = killed(folder, resumed, args.workers, args.rows // 2)
        told(f"killed with {done} rows written; the rest",
             built(folder, resumed, args.workers), args.rows - done)
        one_s = told("1 process", built(folder, one, 1), args.rows)
        print(f"{args.workers} processes take {one_s / many_s:.2f} times less")
        [first], *others = (sorted(index.glob("*[!k]/")) for index in (one, many, resumed))
        for [other] in others:
            if filecmp.cmpfiles(first, other, FILES, shallow=False)[0] != list(FILES):
                raise SystemExit(f"{other}: not the index that one process makes")
        print("all three are equal")


if __name__ == "__main__":
    main()
