"""Every preset of presets.yaml, in the layout of its public description, against a reference that
does not read rows with this package; what columns, splits and parts refuse; and layouts of public
corpora: read as what they say, or refused with a line that reads them so."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import soundfile
import yaml

from orchmllm.config.recipe import load_recipe
from orchmllm.data.formats.row_formats import FORMATS
from orchmllm.data.loading.rank_messages import packed
from orchmllm.data.media_tensors import KINDS
from orchmllm.tools.compose.write import TOKENS
from orchmllm.tools.data.command import dataset_of
from scripts.check_layouts import verdict
from tests.lib.drawn import with_processor
from tests.lib.layouts import LAYOUTS
from tests.lib.presets import CORPORA, pieces
from tests.lib.ranks import run_ranks
from tests.lib.training import train

FAST = ("commonvoice", "mmc4")
ELSEWHERE = {"air_bench", "llama_factory", "openai", "llava", "sharegpt", "caption", "asr",
             "llama_factory (alpaca)"}  # tests of formats and corpora


def test_every_preset_is_tested():
    assert {*CORPORA, *ELSEWHERE} >= set(FORMATS)


def recipe(folder, source: dict):
    (folder / "r.yaml").write_text(yaml.safe_dump({
        "run": {"dir": f"{folder}/run", "resume": "never"},
        "data": {"sources": [source | {"path": str(source["path"])}],
                 "index_dir": f"{folder}/ix"},
        "model": {"config": str(with_processor())},
        "train": {"num_steps": 3, "batch_size": 2}, "balance": {"ranks_per_node": 2},
        "checkpoint": {"every_steps": -1}}))
    return load_recipe(folder / "r.yaml")


def reference(example: list) -> tuple[list[int], list[int], list]:
    """Ids, labels (-100: not learnt) and (first position, medium)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(with_processor() / "tokenizer.json"))
    ids, targets, media = [], [], []
    for piece in pieces(example):
        if piece[0] in ("image", "clip", "frames") and not isinstance(piece[1], list):
            count = {"image": 1, "frames": 8}.get(piece[0])
            if count is None:
                frames = math.ceil((piece[3] - piece[2]) / 160)
                count = math.ceil(math.ceil(frames / 2) / 2)
            media.append((len(ids), piece))
            token = TOKENS["audio" if piece[0] == "clip" else "image"]
            ids += [tokenizer.token_to_id(token)] * count
            targets += [-100] * count
            continue
        encoded = tokenizer.encode(piece[0], add_special_tokens=False)
        learnt = [any(a < end and b > start for start, end in piece[1]) for a, b in encoded.offsets]
        ids += encoded.ids
        targets += [i if yes else -100 for i, yes in zip(encoded.ids, learnt, strict=True)]
    return ids, targets, media


def check_rows(rows: np.ndarray, medium: tuple) -> None:
    """That the bytes of an image, or the frames of a clip, are those of a medium."""
    from transformers import WhisperFeatureExtractor

    if medium[0] == "image":
        assert (rows == medium[1]).all()
    elif medium[0] == "frames":  # see tests.lib.videos.picture: 8 frames a second
        assert abs(rows[0].mean() - (70 + 7 * (int(medium[1] * 8) % 25))) < 6
    else:
        samples, rate = soundfile.read(medium[1], dtype="float32")
        part = np.pad(samples[medium[2]: medium[3]], (0, 480))
        mel = WhisperFeatureExtractor(feature_size=8)(
            part, sampling_rate=rate, padding=False, truncation=False,
            return_tensors="np")["input_features"][0][:, : rows.shape[-1]]
        np.testing.assert_allclose(rows[0], mel, atol=1e-5)


def losses(world, path: str) -> list[float]:
    return [row["loss"] for row in train(world, load_recipe(path))]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CORPORA])
def test_a_preset_is_read_as_its_reference(name, tmp_path):
    """Ids, labels, where media are and which ones; then three steps on two ranks."""
    corpus = CORPORA[name](tmp_path)
    dataset = dataset_of(recipe(tmp_path, corpus.source))
    if name in FORMATS and not name.startswith("energon"):
        assert dataset.sources[0].layout == name
    assert len(dataset) == len(corpus.examples)
    for i, example in enumerate(corpus.examples):
        assert dataset.problem(i) is None, dataset.problem(i)
        ids, labels, media = reference(example)
        found, layout = dataset.load(i), dataset.layout(i)
        assert found.input_ids.tolist() == ids
        assert found.labels.tolist() == labels
        first = np.concatenate([[0], np.cumsum(layout.num_tokens)])
        at = np.flatnonzero(layout.modality).tolist()
        assert [int(first[s]) for s in at] == [start for start, _ in media]
        parts = dataset.load(i, segments=at, raw=["pixel_values"]).parts
        for s, (_, medium) in zip(at, media, strict=True):
            content = KINDS[int(layout.modality[s])].content
            check_rows(parts[s][content].numpy(), medium)
    told = run_ranks(losses, 2, f"{tmp_path}/r.yaml")[0]
    assert len(told) == 3
    assert all(map(math.isfinite, told))
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()


CASES = {  # keys of the source of a CommonVoice folder -> what is said
    "absent": ({"columns": {"text": "words"}, "row_format": "commonvoice", "split": "train"},
               "columns.text is 'words', which none of the first 3 rows has; their columns are "
               "client_id, path, sentence, up_votes, down_votes, locale"),
    "not read": ({"columns": {"text": "sentence", "history": "age"}, "split": "train"},
                 "columns.history is 'age', which rows with 'text' do not read; they read text, "
                 "images, audios, videos, id"),
    "no field": ({"columns": {"audios": "path"}, "split": "train"},
                 "columns has no messages, texts, completion, answer or text, so there is nothing "
                 "to read; it has audios"),
    "no list": ({"split": "train", "columns": {"rows": "audios"}},
                "columns.rows is 'audios', which is not read of .tsv files: leave it out"),
    "no such value": ({"split": "5", "columns": {"split": "up_votes"}},
                      "split is '5', which no row has; set split of the source to one of 2"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_named_and_not_there_is_said_in_one_line(case, tmp_path):
    keys, said = CASES[case]
    run = recipe(tmp_path, CORPORA["commonvoice"](tmp_path).source | {"split": ""} | keys)
    with pytest.raises(ValueError) as error:
        dataset_of(run)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_field_that_does_not_exist_is_an_error_of_the_recipe(tmp_path):
    with pytest.raises(ValueError, match=r"columns.imagse: unknown key; did you mean "
                                         r"'data.sources.columns.images'"):
        recipe(tmp_path, {"path": "a.csv", "columns": {"imagse": "x"}})


def key_of(folder, source: dict) -> tuple:
    from orchmllm.data.index import index_folder

    dataset = dataset_of(recipe(folder, source))
    return (index_folder(dataset.sources[0], dataset.reader, folder).name,
            json.dumps(dataset.fingerprint(), sort_keys=True))


def test_an_index_is_of_the_columns_and_of_the_parts(tmp_path):
    source = CORPORA["nemo"](tmp_path).source
    keys = [key_of(tmp_path, source | more) for more in (
        {}, {"columns": {"start": "-"}, "row_format": "nemo"}, {"learn_documents": False})]
    source["path"].write_text(source["path"].read_text().replace('"offset": 0.5', '"offset": 0.6'))
    keys.append(key_of(tmp_path, source))
    assert len({key for key, _ in keys}) == len({print_ for _, print_ in keys}) == 4


def test_a_part_that_is_sent_is_the_part_that_is_read(tmp_path):
    corpus = CORPORA["gigaspeech"](tmp_path)
    dataset = dataset_of(recipe(tmp_path, corpus.source))
    [s] = dataset.load(1).arguments
    sent = dataset.load(1, segments=[s], encoded=[s]).parts[s]
    assert len(packed(sent)) < 5600 * 4 + 2000  # 0.35 s, and not the file
    here, there = (dataset.load(1, segments=[s], text=False, **row).parts[s]
                   for row in ({}, {"row": sent}))
    assert here.keys() == there.keys() and all(here[n].equal(there[n]) for n in here)


LOOKED_AT = {  # -> how it is read
    "ScienceQA": "no key", "TRL vision": "no key", "SQuAD": "one line", "MMLU": "one line",
    "SEED-Bench": "one line", "LJSpeech": "one line", "COCO captions": "one line",
    "M3IT": "one line", "Recap-DataComp": "one line", "HellaSwag": "one line", "ESC-50": "one line",
    "OASST": "refused", "CC3M": "refused"}


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_layout_is_read_as_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how, more = verdict(LAYOUTS[name], tmp_path)
    assert how == LOOKED_AT[name], more


@pytest.mark.slow
def test_no_layout_is_read_silently_as_something_else(tmp_path, monkeypatch):
    counts: Counter[str] = Counter()
    for name, layout in LAYOUTS.items():
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        monkeypatch.chdir(folder)
        how, more = verdict(layout, folder)
        assert how in ("no key", "one line", "refused"), (name, more)
        counts[how] += 1
    assert counts["no key"] + counts["one line"] >= 63, counts
