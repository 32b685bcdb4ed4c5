"""Rows that could be read in more than one way: each is read as it says, or it is refused."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from orchmllm.data.formats.conversation import chat
from orchmllm.data.media.medium import RowError
from orchmllm.data.media.root import MediaRoot
from tests.lib.formats import write_jsonl
from tests.lib.sources import opened


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


def write_sample(path, sample: dict):
    """A webdataset tar of one row. Its writer sorts the members as text."""
    import webdataset

    with webdataset.TarWriter(str(path)) as tar:
        tar.write({"__key__": "000", **sample})
    return path


TWELVE = [f"{n}.png" for n in range(12)]
LISTS = {  # members -> what the row lists -> the members in the order in which they are read
    "numbers": (TWELVE, TWELVE, TWELVE),
    "names of elsewhere": (TWELVE, [f"cat{n}.png" for n in range(12)], TWELVE),
    "no names": (TWELVE, None, TWELVE),
    "numbers inside": ([f"a{n}.b.png" for n in (1, 9, 10)], None,
                       ["a1.b.png", "a9.b.png", "a10.b.png"]),
    "the row's order": (["after.png", "before.png"], ["before.png", "after.png"],
                        ["before.png", "after.png"]),
    "names with their key": (["after.png", "before.png"],
                             ["x/000.before.png", "x/000.after.png"],
                             ["before.png", "after.png"]),
    "numbers in an order of the row": (["0.png", "1.png"], ["1.png", "0.png"],
                                       ["1.png", "0.png"]),
}


@pytest.mark.parametrize("name", LISTS)
def test_members_of_a_tar_are_in_the_order_of_their_row(tokenizer, tmp_path, name):
    members, listed, expected = LISTS[name]
    row = {"conversations": [{"from": "human", "value": "<image>" * len(members)},
                             {"from": "gpt", "value": "x"}]}
    path = write_sample(tmp_path / "a.tar", {
        "json": row | ({"images": listed} if listed else {}),
        **{member: png(10 * k) for k, member in enumerate(members)}})
    dataset = opened(path, tokenizer, tmp_path)
    assert dataset.problem(0) is None, dataset.problem(0)
    assert [medium.name for _, _, medium in dataset.media_of(0)] == [
        f"000.{member} in {path}" for member in expected]
    shades = [int(rows[0, 0]) for _, rows in sorted(dataset.load(0).media.items())]
    assert shades == [10 * members.index(member) for member in expected]


def test_members_in_an_order_of_their_own_keep_it(tokenizer, tmp_path):
    from tests.data.test_safety import write_tar

    names = ["2.png", "10.png", "1.png"]
    path = write_tar(tmp_path / "a.tar", [
        ("000.txt", b"words"), *((f"000.{name}", png(0)) for name in names)])
    store = opened(path, tokenizer, tmp_path, row_format="caption").sources[0].store
    assert [m.name for m in store.row(0)["image"]] == [f"000.{name} in {path}" for name in names]


def test_two_texts_of_a_tar_row_are_refused(tokenizer, tmp_path):
    """The one that came last was learnt: the question."""
    path = write_sample(tmp_path / "a.tar", {
        "png": png(0), "answer.txt": "a cat", "question.txt": "What is it?"})
    said = "members '000.answer.txt' and '000.question.txt' are both the text of their row"
    assert said in str(opened(path, tokenizer, tmp_path, row_format="caption").problem(0))
    with pytest.raises(ValueError, match=f"no row that can be read .{said}"):
        opened(path, tokenizer, tmp_path)


MAPPED = {"columns": {"prompt": "question", "response": "answer"}}
TALK = {"formatting": "sharegpt", "columns": {"messages": "talk", "images": "shown"}}
TAGS = {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": {
    "role_tag": "role", "content_tag": "content", "user_tag": "user",
    "assistant_tag": "assistant"}}


def said(*texts: str, **last) -> list[dict]:
    turns = [{"role": ("user", "assistant")[k % 2], "content": text}
             for k, text in enumerate(texts)]
    return [*turns[:-1], turns[-1] | last]


LISTED = {  # name -> (entry of dataset_info.json, row, its turns as (text, learnt))
    "output after": (MAPPED, {"question": "q", "answer": "good", "output": "raw"},
                     [("q", False), ("good", True)]),
    "output before": (MAPPED, {"output": "raw", "question": "q", "answer": "good"},
                      [("q", False), ("good", True)]),
    "input that is not listed": (MAPPED, {"question": "q", "input": "raw", "answer": "good"},
                                 [("q", False), ("good", True)]),
    "no columns": ({}, {"instruction": "q", "input": "i", "output": "good"},
                   [("q\ni", False), ("good", True)]),
    "conversations": (TALK, {"talk": said("q", "good"), "conversations": said("q", "raw")},
                      [("q", False), ("good", True)]),
    "messages": (TALK, {"talk": said("q", "good"), "messages": said("q", "raw")},
                 [("q", False), ("good", True)]),
    "images": (TALK, {"talk": said("q", "good"), "shown": [], "images": ["a.png"]},
               [("q", False), ("good", True)]),
    "tags and weight": (TAGS, {"messages": [*said("q", "bad", weight=0), *said("q", "good")]},
                        [("q", False), ("bad", False), ("q", False), ("good", True)]),
}


@pytest.mark.parametrize("name", LISTED)
def test_the_columns_that_dataset_info_names_are_read(tokenizer, tmp_path, name):
    entry, row, turns = LISTED[name]
    write_jsonl(tmp_path / "rows.jsonl", [row])
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.jsonl", **entry}}))
    read = opened(tmp_path, tokenizer, tmp_path / "made").conversation(0)
    assert [("".join(turn.parts), turn.supervised) for turn in read] == turns


def test_tags_keep_the_calls_of_a_turn(tokenizer, tmp_path):
    calls = [{"name": "look", "arguments": {"at": "x"}}]
    row = {"messages": said("q", None, tool_calls=calls)}
    write_jsonl(tmp_path / "rows.jsonl", [row])
    (tmp_path / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.jsonl", **TAGS}}))
    turns = opened(tmp_path, tokenizer, tmp_path / "made").conversation(0)
    assert turns[1].calls == (calls[0],)


@pytest.mark.parametrize("marks, learnt", [
    (dict(weight=0), False), (dict(weight=0.0), False), (dict(train=False), False),
    (dict(loss=False), False), (dict(loss=0), False), (dict(weight=1, train=False), False),
    (dict(weight=0, train=True), False), (dict(train=False, loss=1), False),
    (dict(weight=1), True), (dict(train=True), True), (dict(loss=1.0), True),
    (dict(weight=None), True), (dict(), True)])
def test_marks_of_a_turn_say_whether_it_is_learnt(marks, learnt):
    turns = chat({"messages": [*said("q", "first", **marks), *said("q", "second")]}, MediaRoot(""))
    assert [turn.supervised for turn in turns] == [False, learnt, False, True]


@pytest.mark.parametrize("keys, text", [
    (dict(weight=0.5), '"weight" of a turn is 0.5: must be 0 or false'),
    (dict(weight="0"), "\"weight\" of a turn is '0': must be 0 or false"),
    (dict(train="no"), "\"train\" of a turn is 'no': must be 0 or false"),
    (dict(loss=[]), '"loss" of a turn is []: must be 0 or false'),
    (dict(reasoning_content="so"), '"reasoning_content" of a turn is not read: write it into'),
    (dict(reasoning="so"), '"reasoning" of a turn is not read: write it into'),
    (dict(thinking="so"), '"thinking" of a turn is not read: write it into')])
def test_what_a_turn_says_beside_its_text_is_not_ignored(keys, text):
    with pytest.raises(RowError) as error:
        chat({"messages": said("q", "a", **keys)}, MediaRoot(""))
    assert error.value.reason.startswith(text)


def test_empty_reasoning_is_none():
    turns = chat({"messages": said("q", "a", reasoning_content="", thinking=None)}, MediaRoot(""))
    assert turns[1].parts == ("a",)


@pytest.mark.parametrize("row", [
    {"messages": [], "conversations": said("q", "a")},
    {"messages": None, "conversations": said("q", "a")},
    {"messages": said("q", "a"), "conversations": []}])
def test_the_list_of_turns_that_is_not_empty_is_read(row):
    assert [turn.parts for turn in chat(row, MediaRoot(""))] == [("q",), ("a",)]
