"""`orchmllm data preview` shows what training reads: the same tokens, labels and rows."""

from __future__ import annotations

import re

import pytest

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.recipe import load_recipe
from orchmllm.plan.layout import TEXT
from orchmllm.tools.data.command import dataset_of, main
from orchmllm.tools.data.preview import on_terminal, stretches
from tests.lib.drawn import write_recipe
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    write_media(folder)
    rows = [llava_row(*q) for q in QUESTIONS]
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:-400])
    rows += [{**rows[0], "images": ["broken.png"]}, {**rows[0], "images": ["no.png"]}]
    write_jsonl(folder / "data.jsonl", rows)
    return write_recipe(folder, f"path: {folder}/data.jsonl")


def test_it_shows_the_tokens_and_labels_that_are_trained(recipe):
    dataset = dataset_of(load_recipe(recipe))
    for i, (_, answer) in enumerate(QUESTIONS):
        shown, facts = stretches(dataset, i)
        example = dataset.load(i)
        learnt = example.labels[example.labels != IGNORE_INDEX]
        text = "".join(s.text for s in shown if s.learnt)
        assert text == dataset.tokenizer.decode(learnt) == f"{answer}<|im_end|>"
        assert facts.startswith(f"{len(example.input_ids)} tokens: ")
        assert facts.endswith(f"{len(learnt)} are learnt")
        lengths, media = example.lengths, example.lengths.modality != TEXT
        assert f"{lengths.num_tokens[media].sum()} of {media.sum()} media; " in facts
        told = [re.search(r"-> (\d+) (?:patches|mel frames), (\d+) tokens", s.text).groups()
                for s in shown if s.modality != TEXT]
        assert [(int(rows), int(tokens)) for rows, tokens in told] == list(zip(
            lengths.rows[media].tolist(), lengths.num_tokens[media].tolist(), strict=True))


def test_terminal(recipe, capsys):
    assert main(["preview", recipe, "--row", "6", "--count", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("--- ") == 3 and "[[no.<|im_end|>]]" in out and "\x1b" not in out
    assert re.search(r"<image 2.webp: \d+x\d+ pixels -> \d+ patches, \d+ tokens>", out)
    assert re.search(r"<clip 0.wav: [\d.]+ s at \d+ Hz -> \d+ mel frames, \d+ tokens>", out)
    assert main(["preview", recipe, "--row", "6"]) == 0
    one = capsys.readouterr().out
    assert one.count("--- ") == 1 and out.startswith(one)


def test_what_cannot_be_read_is_said(recipe, capsys):
    assert main(["preview", recipe, "--row", "13", "--count", "5"]) == 0
    out = capsys.readouterr().out
    assert "image broken.png: zeros are trained: " in out
    assert "cannot be used: " in out and "the file is missing" in out
    assert main(["preview", recipe, "--row", "15"]) == 2
    assert "--row 15: the sources have 14 rows" in capsys.readouterr().err


def test_colours_are_for_terminals(recipe):
    shown, _ = stretches(dataset_of(load_recipe(recipe)), 0)
    assert "\x1b[32ma red square.<|im_end|>\x1b[0m" in on_terminal(shown, True)
