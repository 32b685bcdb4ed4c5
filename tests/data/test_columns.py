"""Columns of a recipe, and what decides which rows a file has: what is named is read, and what
could be read in two ways is refused."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext

import pyarrow.parquet
import pytest

from orchmllm.config.data import ColumnsConfig
from orchmllm.data.formats import scanned
from orchmllm.data.formats.columns import DEEPEST, Columns, from_json
from orchmllm.data.formats.rows import parse_json
from orchmllm.data.media.medium import RowError
from tests.lib.formats import write_jsonl
from tests.lib.sources import opened

ASKED = {"question": "q", "answer": "a"}
PAIRS = [{"q": "one", "a": "1", "s": "train"}, {"q": "two", "a": "2", "s": "test"}]


@pytest.fixture
def read(reader, tmp_path):
    """read(path, columns, **keys): the dataset of one source."""
    return lambda path, columns=ASKED, **keys: opened(
        path, reader, tmp_path, columns=ColumnsConfig(**columns), **keys)


def parts(dataset) -> list:
    return [[turn.parts for turn in dataset.conversation(i)] for i in range(len(dataset))
            if dataset.problem(i) is None]


def test_rows_and_segments_of_a_file_are_those_that_the_recipe_names(read, tmp_path):
    """Not a list of the same name inside another object."""
    rows = [{"q": "all", "parts": PAIRS}, {"q": "none", "parts": []}, {"q": "lacks them"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"of": {"räws": [{"q": "wrong", "a": "wrong"}]}, "räws": rows},
                               ensure_ascii=False))
    dataset = read(path, ASKED | {"rows": "räws", "segments": "parts"})
    assert parts(dataset) == [[("one",), ("1",)], [("two",), ("2",)]] and len(dataset) == 3
    assert "there is nothing in 'parts' (segments) of q; in columns" in str(dataset.problem(2))
    for columns, said in (({"rows": "räws", "segments": "prts"}, "there is nothing in 'prts'"),
                          ({"rows": "of"}, "no list 'of' .rows of columns. in its first")):
        with pytest.raises(ValueError, match=said):
            read(path, ASKED | columns)
    lines = write_jsonl(tmp_path / "b.jsonl", [{"path": "0.wav", "text_tn": "low", **{
        time: 0.1 * k for k, time in enumerate(("begin_time", "end_time"), 1)}}])
    none = {"rows": "-", "segments": "-", "split": "-"}
    assert len(read(lines, none, row_format="gigaspeech")) == 1
    with pytest.raises(ValueError, match="columns.rows is 'räws', which is not read of JSON files"):
        read(write_jsonl(tmp_path / "a.jsonl", rows), ASKED | {"rows": "räws"})


def test_a_name_is_made_of_columns_with_zeros_in_front():
    row = {"a": "x", "b": 7, "q": "?", "t": "said"}
    for spec, name in (("{a}_{b:05}.wav", "x_00007.wav"), ("{b:01}{a}.wav", "7x.wav")):
        assert Columns({"audios": spec, "text": "t"}).pick(row)["audios"] == [name]


@pytest.mark.parametrize("column, asks", [
    ("description", "Describe the sound."), ("long_caption", "Describe the sound."),
    ("words", "Transcribe the speech.")])
def test_what_a_clip_is_asked_for_is_told_by_the_name_of_its_text(read, tmp_path, column, asks):
    path = write_jsonl(tmp_path / "a.jsonl", [{"path": "0.wav", column: "low"}])
    question, answer = read(path, {"audios": "path", "text": column}).conversation(0)
    assert question.parts[1] == f"\n{asks}" and answer.parts == ("low",)


def test_a_split_of_rows_is_that_of_all_files(read, tmp_path):
    (tmp_path / "d").mkdir()
    for k, row in enumerate(PAIRS):
        write_jsonl(tmp_path / "d" / f"{k}.jsonl", [row])
    columns = ASKED | {"split": "s"}
    with pytest.raises(ValueError, match="it holds several splits; set split of the source to one "
                                         "of train, test"):
        read(tmp_path / "d", columns)
    train, test = (read(tmp_path / "d", columns, split=split) for split in ("train", "test"))
    assert parts(train) == [[("one",), ("1",)]] and parts(test) == [[("two",), ("2",)]]
    assert train.fingerprint() != test.fingerprint()


def test_a_file_that_is_read_in_order_is_one_piece_whatever_its_rows(read, tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS * 2), path)
    train = read(path, ASKED | {"split": "s"}, split="train")
    assert len(train) == 2 and len(train.sources[0].store.units(4)) == 1


def test_what_was_kept_of_a_file_is_of_its_rows_and_limits(read, tmp_path, monkeypatch):
    """A file of which that takes long is scanned once."""
    monkeypatch.setattr(scanned, "LONG_S", 0.0)
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"x": [{"p": PAIRS}], "y": [{"p": PAIRS[:1]}]}))
    keys = {"segments": "p"}
    assert len(read(path, ASKED | keys | {"rows": "x"})) == 2
    assert len(read(path, ASKED | keys | {"rows": "y"})) == 1
    keys |= {"rows": "x", "split": "s"}
    train, test = (read(path, ASKED | keys, split=split) for split in ("train", "test"))
    assert parts(train) == [[("one",), ("1",)]] and parts(test) == [[("two",), ("2",)]]


REFUSED = {  # row -> columns, what is said
    "an answer for each letter": ({"q": ["a", "b", "c"], "a": "yes"}, ASKED,
                                  "a list of questions needs a list of answers"),
    "no place for the context": ({"q": ["a"], "a": ["b"], "c": "Once."}, ASKED | {"context": "c"},
                                 "needs a list of answers, and neither a context nor choices"),
    "a bad answer": ({"q": "a", "a": "b", "label": "False"}, ASKED, '"label" is \'False\''),
    "two starts": ({"q": "<audio>", "a": "b", "audio": "0.wav", "start": 0.1, "offset": 0.2,
                    "end": 0.3}, ASKED | {"audios": "audio"}, "keys of one meaning have other"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_be_read_in_two_ways_is_refused(name, read, folder):
    row, columns, said = REFUSED[name]
    dataset = read(write_jsonl(folder / "a.jsonl", [row]), columns)
    assert said in str(dataset.problem(0)), dataset.problem(0)


def test_a_duration_needs_a_start(read, folder):
    path = write_jsonl(folder / "a.jsonl", [{"audio": "0.wav", "text": "low", "seconds": 0.2}])
    with pytest.raises(ValueError, match="columns.duration is 'seconds', which is read together"):
        read(path, {"audios": "audio", "text": "text", "duration": "seconds"})


def test_a_part_of_a_clip_in_base64_is_cut(read, folder):
    clip = {"type": "input_audio", "input_audio": {
        "data": base64.b64encode((folder / "0.wav").read_bytes()).decode(), "format": "wav"}}
    row = {"messages": [{"role": "user", "content": [clip]},
                        {"role": "assistant", "content": "low"}]}
    clip_alone = {"start": 0.1, "end": 0.3}
    path = write_jsonl(folder / "a.jsonl", [row, row | clip_alone])
    rows = read(path, {})
    for i, frames in enumerate((57, 20)):
        assert int(rows.load(i).media["feature_attention_mask"].sum()) == frames


def test_a_video_of_a_list_says_how_many_frames_are_read(read, videos):
    row = {"messages": [{"role": "user", "content": "<video>"},
                        {"role": "assistant", "content": "grey"}]}
    path = write_jsonl(videos / "a.jsonl", [row | {"videos": [{"path": "plain.mp4", "fps": n}]}
                                            for n in (1, 2)])
    assert [len(read(path, {}).load(i).media["image_grid_thw"]) for i in range(2)] == [3, 6]


TABLES = {  # file -> what is said of its first row, or its texts
    "quoted.tsv": ('q\ta\n"say ""no"" to it"\tb\n', "with the quotes of CSV, which a TSV has not"),
    "spoken.tsv": ('q\ta\n"Yes," he said, "I do."\tb\n', '"Yes," he said, "I do."'),
    "cut.tsv": ('a\tq\nb\t"first ""line""\nsecond"\n', "with the quotes of CSV, which a TSV has"),
    "said.tsv": ('q\ta\n"Yes," he said.\tb\n', '"Yes," he said.'),
    "inch.csv": ('q,a\n5" wide,b\nx,y\n', '5" wide'),
    "closed.csv": ('q,a\n"5" wide,b\n', "must stand in quotes, with each of its quotes"),
    "long.csv": ("q,a\n" + "x" * 200_000 + ",b\n", "x" * 200_000),
}


@pytest.mark.parametrize("name", TABLES)
def test_quotes_and_long_cells_of_tables(name, read, tmp_path):
    text, said = TABLES[name]
    (tmp_path / name).write_text(text)
    try:
        dataset = read(tmp_path / name)
        assert dataset.problem(0) is None and dataset.conversation(0)[0].parts == (said,)
    except ValueError as error:
        assert said in str(error)


def test_images_of_a_table_stand_before_the_texts_that_it_numbers(read, folder):
    (folder / "p.csv").write_text('t,p,i\n"[""a"", ""b""]","[1]","[""0.png""]"\n')
    dataset = read(folder / "p.csv", {"texts": "t", "places": "p", "images": "i"})
    assert [part if isinstance(part, str) else "image" for part in dataset.conversation(0)[0].parts
            ] == ["a", "image", "b"]


@pytest.mark.parametrize("split, dataset, said", [
    ("{train: [../other/a.tar]}", "", "'../other/a.tar' leaves the folder of the dataset"),
    ("[a.tar]", "", "split_parts is .*: must have a list of tars for each split"),
    ("{train: a.tar, val: null}", "", "split_parts is .*: must have a list of tars"),
    ("{train: [a.tar]}\nexclude: [a.tar/7]", "", "exclude names samples, which are not left out"),
    ("{train: [a.tar]}", "sample_type: CaptioningSample", "samples of no class")])
def test_files_of_energon_name_tars_in_its_folder(split, dataset, said, read, tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "split.yaml").write_text(f"split_parts: {split}\n")
    if dataset:
        (tmp_path / ".nv-meta" / "dataset.yaml").write_text(f"{dataset}\n")
    with pytest.raises(ValueError, match=said):
        read(tmp_path, {})


def test_json_that_is_nested_too_deeply_is_refused_by_every_python():
    for depth, fits in ((DEEPEST, True), (DEEPEST + 1, False), (5000, False)):
        value = "[" * depth + "]" * depth
        with nullcontext() if fits else pytest.raises(RowError, match="is not JSON"):
            from_json(value)
        with nullcontext() if fits else pytest.raises(RowError, match="nested too deeply"):
            parse_json(f'{{"a": {value[1:-1]}}}'.encode())
