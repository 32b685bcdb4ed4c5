"""The ready recipes on small corpora in exactly the layouts that they name; the commands."""

from __future__ import annotations

import json

import numpy as np
import pytest

from orchmllm.config.recipe import load_recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.sampler import make_sampler
from orchmllm.plan.layout import AUDIO, TEXT, VISION
from orchmllm.tools.data.command import dataset_of, main
from tests.lib import ranks
from tests.lib.corpora import write_librispeech_hf, write_paper_mix
from tests.lib.drawn import with_processor
from tests.lib.recipes import RECIPES
from tests.lib.sources import same_example


def of_model() -> list[str]:
    return [f"model.config={with_processor()}"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("mix")
    write_paper_mix(root)
    return root


@pytest.fixture
def recipe(root, monkeypatch):
    monkeypatch.chdir(root)

    def load(name: str, *overrides: str):
        return load_recipe(RECIPES / f"{name}.yaml",
                           [f"data.index_dir={root / 'index'}", *of_model(), *overrides])

    return load


def check_whole(dataset) -> None:
    """Every example can be used, and decodes to its planned lengths."""
    for i in range(len(dataset)):
        assert dataset.problem(i) is None
        layout = dataset.layout(i)
        media = np.flatnonzero(layout.modality != TEXT).tolist()
        for s, tensors in dataset.load(i, segments=media).parts.items():
            frames = [n for name, rows in tensors.items() for n in (
                [len(rows)] if name == "pixel_values" else
                [rows.shape[-1]] if name == "input_features" else [])]
            assert frames == [layout.rows[s]]


def test_llava_mix(recipe):
    dataset = dataset_of(recipe("llava_v1_5_mix665k"))
    assert str(dataset.sources[0]).startswith("llava: 24 rows of llava in JSON array")
    check_whole(dataset)
    assert [VISION in dataset.layout(i).modality for i in range(24)] == [
        bool(i % 6) for i in range(24)]


def test_librispeech_folders(recipe):
    dataset = dataset_of(recipe("librispeech"))
    assert str(dataset.sources[0]).startswith("librispeech: 16 rows of asr in LibriSpeech folder")
    check_whole(dataset)
    question, answer = dataset.conversation(5)
    assert question.parts[0].name == "train-clean-100/100/1001/100-1001-0001.flac"
    assert question.parts[1] == "\nTranscribe the speech."
    assert answer.parts[0].isupper() and answer.supervised
    assert dataset.describe(5, 1) == {
        "source": "librispeech", "row": 2, "file": question.parts[0].name,
        "data_file": "data/LibriSpeech/train-clean-100/100/1001/100-1001.trans.txt"}
    with pytest.raises(ValueError, match="begins with 'test' .split.; there are: dev-clean, train"):
        dataset_of(recipe("librispeech", "data.sources=[{path: data/LibriSpeech, split: test}]"))


def test_librispeech_of_the_hub(recipe, tmp_path):
    path = write_librispeech_hf(tmp_path)
    dataset = dataset_of(recipe("librispeech",
                                f"data.sources=[{{path: {path}, split: train.100}}]"))
    assert "rows of asr in saved datasets folder" in str(dataset.sources[0])
    check_whole(dataset)
    assert len(dataset) == 5
    with pytest.raises(ValueError, match="name one of train.100"):
        dataset_of(recipe("librispeech", f"data.sources=[{{path: {path}}}]"))


def test_air_bench(recipe):
    dataset = dataset_of(recipe("air_bench"))
    assert "16 rows of air_bench in JSON array" in str(dataset.sources[0])
    check_whole(dataset)
    found = [dataset.conversation(i) for i in range(16)]
    chat = next(t for t in found if "Chat/" in t[0].parts[0].name)
    assert chat[0].parts[0].name.startswith("Chat/sound_QA_clotho/")
    foundation = [t for t in found if "Foundation/" in t[0].parts[0].name]
    assert {t[1].parts[0] for t in foundation} == {"A. red", "B. blue", "C. one", "D. two"}
    assert foundation[0][0].parts[1].endswith("\nWhich?\nA. red\nB. blue\nC. one\nD. two")
    assert any(t[0].parts[0].name.endswith("Audio_Grounding_AudioGrounding/1.flac")
               for t in foundation)


def test_mix_without_weights_is_every_example_once(recipe):
    mixed = recipe("paper_mix")
    dataset = dataset_of(mixed)
    assert len(dataset) == 24 + 16 + 16
    train, held = dataset.split(6)
    assert len(held) == 6 and len(np.unique([*train, *held])) == 56
    assert {dataset.where(i)[0] for i in held} == {0, 1, 2}
    sampler = make_sampler(dataset, train, 10, seed=3)
    assert sorted(np.concatenate([sampler.batch(s) for s in range(5)])) == sorted(train)


def test_commands(recipe, root, tmp_path, capsys):
    arguments = [str(RECIPES / "paper_mix.yaml"), f"data.index_dir={tmp_path}", *of_model(),
                 "--workers", "1"]
    assert main(["index", *arguments]) == 0
    said = capsys.readouterr().out
    assert "llava: 24 rows of llava in JSON array" in said and "24 rows read" in said
    assert main(["index", *arguments]) == 0
    assert "0 rows read" in capsys.readouterr().out
    assert main(["lint", *arguments, "--decode"]) == 0
    assert "0 problem(s) in 56 rows" in capsys.readouterr().out
    assert main(["stats", *arguments, "--ranks", "4"]) == 0
    said = capsys.readouterr().out
    assert "all" in said and "vision" in said and "Without balancing, a step takes" in said
    assert main(["lint", str(RECIPES / "paper_mix.yaml"), "data.sources=[{path: no}]"]) == 2


def test_index_is_used_and_knows_what_changed(recipe, root, tmp_path, capsys, monkeypatch):
    write_paper_mix(tmp_path, seed=1)
    monkeypatch.chdir(tmp_path)
    arguments = [str(RECIPES / "paper_mix.yaml"), "data.index_dir=index", *of_model(), "--workers",
                 "1"]
    assert main(["index", *arguments]) == 0
    mixed = load_recipe(RECIPES / "paper_mix.yaml", ["data.index_dir=index", *of_model()])
    indexed = dataset_of(mixed)
    monkeypatch.chdir(tmp_path)
    plain = ConversationDataset(mixed.data.sources, reader=indexed.reader, index_dir="none")
    assert all(indexed.indexes) and not any(plain.indexes)
    for i in range(len(plain)):
        a, b = indexed.layout(i), plain.layout(i)
        assert a.num_targets == b.num_targets and np.array_equal(a.grid, b.grid)
        assert np.array_equal(a.num_tokens, b.num_tokens) and np.array_equal(a.rows, b.rows)
        assert same_example(indexed.load(i), plain.load(i))
    capsys.readouterr()
    broken = next((tmp_path / "data" / "LibriSpeech" / "train-clean-100").rglob("*.flac"))
    whole = broken.read_bytes()
    broken.write_bytes(b"junk")
    assert main(["index", *arguments]) == 0
    assert capsys.readouterr().out.count(" 0 rows read") == 3
    assert main(["lint", *arguments]) == 1
    said = capsys.readouterr().out
    assert " 24 rows read" in said and f"{broken.name}: LibsndfileError" in said
    assert "1 problem(s) in 56 rows" in said
    broken.write_bytes(whole)
    assert main(["index", *arguments]) == 0
    said = capsys.readouterr().out
    assert said.count(" 1 rows read") == 1 and said.count(" 0 unusable rows; ") == 3
    rows = json.loads((tmp_path / "data/llava/llava_v1_5_mix665k.json").read_text())
    (tmp_path / "data/llava/llava_v1_5_mix665k.json").write_text(json.dumps(rows[:20]))
    assert main(["index", *arguments]) == 0
    assert "llava: 20 rows" in capsys.readouterr().out


def test_two_workers_build_the_same_index(recipe, monkeypatch, tmp_path):
    from orchmllm.tools.data import build_index as index

    dataset = dataset_of(recipe("paper_mix"))
    source, reader = dataset.sources[0], dataset.reader
    monkeypatch.setattr(index, "ALONE_BELOW", 1)
    monkeypatch.setattr(index, "CHUNK", 5)
    # Workers get all that they have from a pickle here, too; torch is imported already.
    monkeypatch.setattr(index, "get_context", lambda method: ranks._context)
    done: list[int] = []
    one, _ = index.build_index(source, reader, tmp_path / "1", num_workers=1)
    two, count = index.build_index(source, reader, tmp_path / "2", num_workers=2,
                                   progress=done.append)
    assert count == 24 == sum(done)
    for name in ("table", "start", "targets"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert AUDIO not in one.table[:, 0]
