"""CPU time of a row of a model of transformers beside that of the own composition, in one run.

    python scripts/bench_rows.py [--family qwen3_vl] [--rows 40] [--rounds 5]

Both read the same JPEG files, with the same tokenizer and chat template, and cut them into as many
patches of as many pixels: images are 3:2, of other sizes, and both resize them to 288 x 192.
Measured is one thread of one process: what a row's lengths cost, where a size has not been met
before and where it has; what loading it costs with an index, and without one, where the process
that measured the row hands over what it knows of it. Rows are loaded as in training, images as
bytes, and the two take turns. The table has the median over rows of the fastest of the rounds, in
milliseconds, and the ratio of the two; at last the bytes of an image that a worker process
sends.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchmllm.config.model import ModelConfig, VisionConfig  # noqa: E402
from orchmllm.config.recipe import DataConfig  # noqa: E402
from orchmllm.data.dataset import ConversationDataset  # noqa: E402
from orchmllm.data.loading.workers import Workers  # noqa: E402
from orchmllm.data.processed import ProcessedReader  # noqa: E402
from orchmllm.encoders.planned import PlannedEncoders  # noqa: E402
from orchmllm.models.spec import spec_of  # noqa: E402
from orchmllm.plan.layout import TEXT  # noqa: E402
from orchmllm.tools.data.build_index import build_index  # noqa: E402
from tests.lib.whole_folders import write_model  # noqa: E402

PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}


def write_rows(folder: Path, count: int, unit: int) -> Path:
    """data.jsonl with an image in each row, all of them 3:2 and larger than 9 x 6 units."""
    rng = np.random.default_rng(0)
    rows = []
    for k in range(count):
        width = 3 * (9 * unit // 3 + 10 + 2 * k)
        coarse = Image.fromarray(rng.integers(0, 255, (12, 18, 3), dtype=np.uint8))
        image = coarse.resize((width, width * 2 // 3), Image.Resampling.BICUBIC)
        image.save(folder / f"{k}.jpg", quality=90)
        rows.append({"images": [f"{k}.jpg"], "messages": [
            {"role": "user", "content": "<image>\nWhat is it? Say it in one line, please."},
            {"role": "assistant", "content": f"A picture of colours, number {k}, with nothing "
                                             "else in it at all."}]})
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


class Rows(NamedTuple):
    """bare: measures its rows itself; indexed: has an index; options: of each load."""

    bare: ConversationDataset
    indexed: ConversationDataset
    options: dict[str, Any]

    def forget(self, sizes: bool) -> None:
        self.bare._cache.clear()
        if sizes and isinstance(self.bare.reader, ProcessedReader):
            self.bare.reader.processor.calls.expanded.cache_clear()

    def load(self, k: int, **keys: Any) -> object:
        rows = self.bare if "row" in keys else self.indexed
        return rows.load(k, segments=media_of(self.indexed, k), **keys, **self.options)


def media_of(rows: ConversationDataset, k: int) -> list[int]:
    return np.flatnonzero(rows.layout(k).modality != TEXT).tolist()


WAYS: dict[str, Callable[[Rows, int], object]] = {
    "lengths, new sizes": lambda rows, k: rows.bare.layout(k),
    "lengths, known sizes": lambda rows, k: rows.bare.layout(k),
    "load, measured before": lambda rows, k: rows.load(k, row=rows.bare.kept(k)),
    "load, with an index": lambda rows, k: rows.load(k)}


def milliseconds(both: Sequence[Rows], rounds: int, what: str) -> list[float]:
    """Of each, the median over rows of the fastest of the rounds."""
    spent = np.full((rounds, len(both), len(both[0].bare)), np.inf)
    for of_round in spent:
        for k in range(spent.shape[2]):
            for rows, times in zip(both, of_round, strict=True):
                if what.startswith("lengths"):
                    rows.forget(what == "lengths, new sizes")
                elif rows.bare.kept(k) is None:
                    rows.bare.layout(k)
                start = time.process_time()
                WAYS[what](rows, k)
                times[k] = time.process_time() - start
    return (1e3 * np.median(spent.min(0), axis=1)).tolist()


def sent_bytes(rows: Rows) -> int:
    """What a worker process answers when it is asked for an image alone."""
    workers = Workers(rows.indexed, 1)
    try:
        workers.start()
        return len(workers.processes[0].ask("load", [((0,), {
            "text": False, "segments": media_of(rows.indexed, 0), **rows.options})]))
    finally:
        workers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=PATCH, default="qwen3_vl")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    patch = PATCH[args.family]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = write_model(args.family, folder)
        path = write_rows(folder, args.rows, 2 * patch)

        def opened(kind: str) -> ConversationDataset:
            data = DataConfig(path=str(path), index_dir=str(folder / kind),
                              tokenizer=str(folder / "tokenizer.json") if kind == "own" else "")
            model = ModelConfig(pretrained=name) if kind == "whole" else ModelConfig(
                vision=VisionConfig(patch_size=patch, max_side=18 * patch))
            return spec_of(model).dataset(data, model, seed=0)

        encoders, both = PlannedEncoders(built), []
        for kind in ("own", "whole"):
            dataset = opened(kind)
            build_index(dataset.sources[0], dataset.reader, folder / kind, num_workers=1)
            bare, options = opened(kind), {}
            bare.indexes = [None]
            if kind == "whole":
                for argument, find in bare.reader.processor.arithmetic().items():
                    encoders.pixels[argument] = encoders.prove(*find())
                options = {"raw": encoders.raw}
            patches = {int(bare.layout(k).rows.sum()) for k in range(args.rows)}
            if patches != {18 * 12} or any(bare.problem(k) for k in range(args.rows)):
                raise RuntimeError(f"{kind}: {patches} patches, {bare.problem(0)}")
            both.append(Rows(bare, opened(kind), options))
        print(f"{args.family}, {18 * 12} patches a row   own ms   whole ms   ratio")
        for what in WAYS:
            own, whole = milliseconds(both, args.rounds, what)
            print(f"{what:<30} {own:>8.2f} {whole:>10.2f} {whole / own:>7.2f}", flush=True)
        own, whole = map(sent_bytes, both)
        print(f"{'bytes of an image':<30} {own:>8,} {whole:>10,} {whole / own:>7.2f}")


if __name__ == "__main__":
    main()
