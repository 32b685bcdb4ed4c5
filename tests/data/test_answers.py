"""Answers, choices and contexts of rows: numbers are read, what is empty or could be two things is
refused; and where media of rows with and without questions go."""

from __future__ import annotations

import pytest

from orchmllm.data.formats.row_formats import choose
from orchmllm.data.media.medium import RowError
from tests.lib.sources import read_row

FOUR = ["red", "blue", "3", "white"]


@pytest.mark.parametrize("choices, answer, right", [
    (FOUR, "blue", "B. blue"), (FOUR, "C", "C. 3"), (FOUR, "(D).", "D. white"), (FOUR, 0, "A. red"),
    (FOUR, "1", "B. blue"), (FOUR, 3, "D. white"), (FOUR, "3", "C. 3"),
    ({"text": ["a", "b"], "label": ["1", "2"]}, "2", "2. b"), ([1, 2], 1, "B. 2")])
def test_the_answer_is_found_among_its_choices(choices, answer, right):
    lines, found = choose(choices, answer)
    assert found == right and found in lines


@pytest.mark.parametrize("choices, answer, said", [
    (FOUR, "green", "none of the 4"), (FOUR, 4, "none"), (FOUR, -1, "none"), (FOUR, "", "none"),
    (["B", "A"], "A", "several"), (["x", "x"], "x", "several"), ("red, blue", 0, "must be a list"),
    ([], 0, "must be a list"), ({"text": ["a"]}, 0, "must be a list"), (["a"] * 27, 0, "must be")])
def test_an_answer_that_is_not_one_of_its_choices_is_refused(choices, answer, said):
    with pytest.raises(RowError, match=said):
        choose(choices, answer)


def asked(**keys) -> dict:
    return {"image": {"bytes": b"x"}, "question": "What?", "answer": "red", **keys}


@pytest.mark.parametrize("answer", [7, 0, 2.5])
def test_a_number_is_an_answer(answer):
    assert read_row(asked(answer=answer))[1].parts == (str(answer),)


@pytest.mark.parametrize("answer", ["", " \n", [""]])
def test_an_empty_answer_is_refused(answer):
    with pytest.raises(RowError, match="an answer is empty|there is nothing in"):
        read_row(asked(answer=answer))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]
    with pytest.raises(RowError, match="an answer is empty"):
        read_row({"messages": turns})
    assert len(read_row({"messages": [turns[0], turns[1] | {"train": False}]})) == 2
    called = turns[1] | {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert read_row({"messages": [turns[0], called]})[1].calls


def test_a_context_may_be_a_list_of_texts():
    row = {"instruction": "What?", "input": ["One.", "Two."], "output": "red"}
    assert read_row(row)[0].parts == ("What?\nOne.\nTwo.",)
    for context in (7, [7], {"a": "b"}):
        with pytest.raises(RowError, match="a question and its context must be texts"):
            read_row(row | {"input": context})


@pytest.mark.parametrize("row, parts", [
    ({"caption": "red"}, ["m", "\nDescribe the image."]),
    ({"question": "What?", "answer": "red"}, ["m", "\nWhat?"]),
    ({"question": "Is <image> red?", "answer": "red"}, ["Is ", "m", " red?"]),
    ({"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "red"}]},
     ["m", "\nWhat?"])])
def test_media_of_all_rows_go_where_one_rule_says(row, parts):
    """To their placeholders, or before the first question."""
    question, answer = read_row({"image": {"bytes": b"x"}, **row})
    assert [p if isinstance(p, str) else "m" for p in question.parts] == parts
    assert answer.parts == ("red",) and answer.supervised


def test_a_placeholder_in_a_caption_is_its_text():
    answer = read_row({"image": {"bytes": b"x"}, "caption": "the word <image>"})[1]
    assert answer.parts == ("the word <image>",)
