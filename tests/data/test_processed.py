"""Rows for models of transformers: lengths from headers are those of pixels, ids and tensors those
of transformers alone, and labels those of an independent reading of the ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.recipe import DataConfig
from orchmllm.data.processed import ProcessedRows
from tests.lib.processors import FAMILIES, OPTIONS, write_processor

TOLD = ("the red row", "What\n\n", "user assistant", "a", "1 of 2\n", "Grüße, 世界 ")


def write_rows(folder: Path, family: str, sizes: list[list[tuple[int, int]]], seed: int = 0
               ) -> list[list[dict]]:
    """A model folder and data.jsonl of one row for each list of (height, width); returns the
    messages of the rows, with images in place of their names."""
    rng = np.random.default_rng(seed)
    write_processor(family, folder)
    talks = []
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for k, images in enumerate(sizes):
            parts, shown = [], []
            for m, size in enumerate(images):
                pixels = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
                pixels.save(folder / f"{k}_{m}.png", compress_level=0)
                parts.append({"type": "image", "image": f"{k}_{m}.png"})
                shown.append({"type": "image", "image": pixels})
                if rng.random() < 0.7:
                    parts.append({"type": "text", "text": rng.choice(TOLD)})
                    shown.append(parts[-1])
            say = [str(rng.choice(TOLD)) for _ in range(3)]
            first = [{"type": "text", "text": say[0]}] * (not parts or rng.random() < 0.5)

            def talk(parts):
                return [{"role": "user", "content": first + parts},
                        {"role": "assistant", "content": say[1]},
                        {"role": "user", "content": "the row"},
                        {"role": "assistant", "content": say[2]}]
            file.write(json.dumps({"messages": talk(parts)}) + "\n")
            talks.append([{"role": t["role"], "content": t["content"] if isinstance(
                t["content"], list) else [{"type": "text", "text": t["content"]}]}
                for t in talk(shown)])
    return talks


def opened(folder: Path, family: str = "", **keys) -> ProcessedRows:
    return ProcessedRows(folder, DataConfig(
        path=str(folder / "data.jsonl"), index_dir=str(folder / "index"), **keys),
        OPTIONS.get(family, {}))


def learnt(ids: list[int], tokenizer) -> list[int]:
    """Labels by a reading of the ids alone: after <turn>, the role and a line's end, all tokens of
    an assistant's turn up to its <end>."""
    turn, end = tokenizer.convert_tokens_to_ids(["<turn>", "<end>"])
    opening = [turn, *tokenizer("assistant\n", add_special_tokens=False)["input_ids"]]
    out, said = [], False
    for k, token in enumerate(ids):
        out.append(token if said else IGNORE_INDEX)
        said = said and token != end or ids[k + 1 - len(opening): k + 1] == opening
    return out


def check(rows: ProcessedRows, processor, talks: list[list[dict]], options: dict) -> int:
    """Compares every row with what transformers makes of it; returns the images of all rows."""
    num_images = 0
    for i, talk in enumerate(talks):
        measured, example = rows.measure(i), rows.load(i)
        assert rows.problem(i) is None
        theirs = processor.apply_chat_template(
            talk, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"images_kwargs": options} if options else None)
        ids = theirs.pop("input_ids")[0]
        theirs.pop("attention_mask", None)
        assert torch.equal(example.input_ids, ids)
        assert example.labels.tolist() == learnt(ids.tolist(), processor.tokenizer)
        assert example.media.keys() == theirs.keys()
        for name, value in example.media.items():
            assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name
        assert example.lengths.to_payload().tolist() == measured.to_payload().tolist()
        shown = measured.modality == 1
        assert measured.num_tokens.sum() == len(ids)
        assert measured.num_tokens[shown].sum() == (ids == rows.processor.image_token_id).sum()
        assert measured.num_targets.tolist() == [(example.labels[1:] != IGNORE_INDEX).sum()]
        num_images += int(shown.sum())
    return num_images


def stock(folder: Path):
    from orchmllm.data.text.processor import _load

    return _load(folder)[0]


def drawn(count: int, most: int, seed: int) -> list[list[tuple[int, int]]]:
    rng = np.random.default_rng(seed)
    return [[tuple(np.exp(rng.uniform(np.log(16), np.log(200), 2)).astype(int).tolist())
             for _ in range(int(rng.integers(min(most, 2), most + 1)))] for _ in range(count)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3_pan_and_scan"])
def test_headers_pixels_and_transformers_agree(tmp_path, family):
    sizes = [*drawn(5, 1, 0), *drawn(3, 3, 1), []]
    talks = write_rows(tmp_path, family, sizes)
    rows = opened(tmp_path, family)
    assert check(rows, stock(tmp_path), talks, OPTIONS.get(family, {})) == sum(map(len, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_at_many_sizes(tmp_path, family):
    sizes = [*drawn(220, 1, 2), *drawn(40, 4, 3), [], []]
    talks = write_rows(tmp_path, family, sizes)
    rows = opened(tmp_path, family)
    assert check(rows, stock(tmp_path), talks, OPTIONS.get(family, {})) == sum(map(len, sizes))
