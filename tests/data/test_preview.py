"""`orchmllm data preview` shows what training reads: the same tokens, labels and rows."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.recipe import load_recipe
from orchmllm.data.media.decode import patchify
from orchmllm.plan.geometry import VisionGeometry
from orchmllm.tools.data.command import dataset_of, main
from orchmllm.tools.data.preview import on_terminal, stretches, unpatchify
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media
from tests.lib.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    write_media(folder)
    write_tokenizer(folder)
    rows = [llava_row(*q) for q in QUESTIONS]
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:-400])
    rows += [{**rows[0], "images": ["broken.png"]}, {**rows[0], "images": ["no.png"]}]
    write_jsonl(folder / "data.jsonl", rows)
    path = folder / "r.yaml"
    path.write_text(f"data: {{path: {folder}/data.jsonl, index_dir: {folder}/index}}\n")
    return path


def test_it_shows_the_tokens_and_labels_that_are_trained(recipe):
    dataset = dataset_of(load_recipe(recipe))
    for i, (_, answer) in enumerate(QUESTIONS):
        shown, facts = stretches(dataset, i)
        example = dataset.load(i)
        learnt = example.labels[example.labels != IGNORE_INDEX]
        text = "".join(s.text for s in shown if s.learnt)
        assert text == dataset.tokenizer.decode(learnt) == f"{answer}<|im_end|>"
        assert facts.startswith(f"{len(example.token_ids)} tokens: ")
        assert facts.endswith(f"{len(learnt)} are learnt")
        assert [len(s.rows) for s in shown if s.rows is not None] == [
            len(rows) for rows in example.media.values()]


def test_terminal_and_page(recipe, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["preview", str(recipe), "--row", "6", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "[[no.<|im_end|>]]" in out and "\x1b" not in out
    assert re.search(r"<image 2.webp: \d+x\d+ pixels -> \d+ rows, \d+ tokens>", out)
    assert re.search(r"<clip 0.wav: [\d.]+ s at \d+ Hz -> \d+ rows, \d+ tokens>", out)
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>") == 3 and "<mark>no.&lt;|im_end|&gt;</mark>" in text
    assert "http" not in text.replace("http-equiv", "")
    pictures = [Image.open(io.BytesIO(base64.b64decode(p)))
                for p in re.findall("base64,([^']+)'", text)]
    assert len(pictures) == 6 and all(min(p.size) > 10 for p in pictures)


def test_what_cannot_be_read_is_said(recipe, capsys):
    assert main(["preview", str(recipe), "--row", "13", "--count", "5"]) == 0
    out = capsys.readouterr().out
    assert "image broken.png: zeros are trained: " in out
    assert "cannot be used: " in out and "the file is missing" in out
    assert main(["preview", str(recipe), "--row", "15"]) == 2
    assert "--row 15: the sources have 14 rows" in capsys.readouterr().err


def test_colours_are_for_terminals(recipe):
    shown, _ = stretches(dataset_of(load_recipe(recipe)), 0)
    assert "\x1b[32ma red square.<|im_end|>\x1b[0m" in on_terminal(shown, True)


def test_a_thumbnail_is_the_image_that_was_cut_into_patches():
    vision = VisionGeometry()
    side = vision.patch_size * vision.merge_size
    pixels = np.random.default_rng(0).integers(0, 255, (3 * side, 2 * side, 3), np.uint8)
    rows = patchify(pixels, vision.patch_size, vision.merge_size)
    grid = (1, 3 * vision.merge_size, 2 * vision.merge_size)
    np.testing.assert_array_equal(unpatchify(rows, grid, vision), pixels)
