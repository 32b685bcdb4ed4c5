"""Rows that could be read in more than one way: each is read as it says, or it is refused. Answers,
choices and contexts: numbers are read, what is empty or could be two things is refused; and where
media of rows with and without questions go."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from orchmllm.data.formats.conversation import chat
from orchmllm.data.formats.row_formats import choose
from orchmllm.data.media.medium import RowError
from orchmllm.data.media.root import MediaRoot
from orchmllm.plan.layout import VISION
from orchmllm.tools.data.command import main
from tests.lib.drawn import write_recipe
from tests.lib.formats import write_jsonl
from tests.lib.sources import opened, read_row


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
    "another case": (["after.png", "before.png"], ["before.PNG", "after.PNG"],
                     ["before.png", "after.png"]),
    "objects": (["a.png", "b.png"], [{"path": "b.png"}, {"path": "a.png"}], ["b.png", "a.png"]),
    "numbers in an order of the row": (["0.png", "1.png"], ["1.png", "0.png"],
                                       ["1.png", "0.png"]),
}


@pytest.mark.parametrize("name", LISTS)
def test_members_of_a_tar_are_in_the_order_of_their_row(reader, tmp_path, name):
    members, listed, expected = LISTS[name]
    row = {"conversations": [{"from": "human", "value": "<image>" * len(members)},
                             {"from": "gpt", "value": "x"}]}
    path = write_sample(tmp_path / "a.tar", {
        "json": row | ({"images": listed} if listed else {}),
        **{member: png(10 * k) for k, member in enumerate(members)}})
    dataset = opened(path, reader, tmp_path)
    assert dataset.problem(0) is None, dataset.problem(0)
    assert [medium.name for _, _, medium in dataset.media_of(0)] == [
        f"000.{member} in {path}" for member in expected]
    part = dataset.load(0, segments=[s for s, _, _ in dataset.media_of(0)], raw=["pixel_values"])
    shades = [int(part.parts[s]["pixel_values"][0, 0]) for s in sorted(part.parts)]
    assert shades == [10 * members.index(member) for member in expected]


def tar_row(reader, path, row: dict | list, *members: str) -> list:
    """The parts of a tar's row, media by their members."""
    dataset = opened(write_sample(path, {"json": row, **{m: png(0) for m in members}}), reader,
                     path.parent)
    return [part if isinstance(part, str) else part.name.removeprefix("000.").split(" in ")[0]
            for turn in dataset.conversation(0) for part in turn.parts]


def asks(question: object, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": question},
                         {"role": "assistant", "content": "a"}], **more}


def test_members_stand_where_the_row_names_them(reader, tmp_path):
    assert tar_row(reader, tmp_path / "between.tar", {
        "texts": ["Look:", None, "and that."], "images": [None, "000.b.png", None]}, "b.png") == [
        "Look:", "b.png", "and that."]
    assert tar_row(reader, tmp_path / "parts.tar", asks([
        {"type": "text", "text": "Is"}, {"type": "image", "image": "b.png"},
        {"type": "text", "text": "like x/a.png"}, {"type": "image", "image": "a.png"}]),
        "a.png", "b.png") == ["Is", "b.png", "like x/a.png", "a.png", "a"]
    assert tar_row(reader, tmp_path / "mask.tar", {"image": "000.png", **asks("<image>?")},
                   "png", "mask.png") == ["png", "?", "a"]
    assert tar_row(reader, tmp_path / "url.tar", {
        "coco_url": "http://images/000.png", "caption": "c"}, "png")[-2:] == [
        "\nDescribe the image.", "c"]
    assert tar_row(reader, tmp_path / "list.tar", [
        {"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "a"}], "png") == [
        "png", "?", "a"]
    with pytest.raises(ValueError, match=r"lists \['b', 'a'\], and its members are 000.a.png, 000"):
        tar_row(reader, tmp_path / "stems.tar", asks("<image><image>", images=["b", "a"]),
                "a.png", "b.png")


def test_what_macos_adds_to_a_tar_is_no_member(reader, tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("._0.png", b"x"), ("0.png", png(0)), ("._0.txt", b"x"),
                           ("0.txt", b"words")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    dataset = opened(tmp_path / "a.tar", reader, tmp_path)
    assert len(dataset) == 1 and dataset.conversation(0)[1].parts == ("words",)


ROWS = {  # of the hub -> what is read of them, by role
    "roles in capitals": ({"conversations": [{"from": "Human", "value": "q"},
                                             {"from": "Assistant", "value": "a"}]},
                          [("user", "q"), ("assistant", "a")]),
    "a list of objects in columns": ({"conversations": {"from": ["human", "gpt"],
                                                        "value": ["q", "a"]}},
                                     [("user", "q"), ("assistant", "a")]),
    "Dolly": ({"instruction": "q", "context": "c", "response": "a"},
              [("user", "q\nc"), ("assistant", "a")]),
    "no image": ({"image": {"bytes": None, "path": None}, **asks("q")},
                 [("user", "q"), ("assistant", "a")]),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_as_the_hub_has_them(name, reader, tmp_path):
    row, read = ROWS[name]
    write_jsonl(tmp_path / "a.jsonl", [row])
    turns = opened(tmp_path / "a.jsonl", reader, tmp_path).conversation(0)
    assert [(turn.role, "".join(turn.parts)) for turn in turns] == read


LINES = {  # row -> the columns that are proposed for it, or none
    "turns with a mark too many": ({"image": "a.png", "conversations": [
        {"from": "human", "value": "<image> <image> What?"}, {"from": "gpt", "value": "a b"}]}, ""),
    "choices in a text": ({"question": "q is", "options": "['$6', '$7']", "answer": "B"}, ""),
    "tools": ({"query": "q is", "answers": "[a b]", "tools": [{"name": "f"}]},
              'question: "query", answer: "answers", tools: "tools"}'),
    "an answer that is no text": ({"image": "a.png", "question": "is it?", "answer": True}, ""),
}


@pytest.mark.parametrize("name", LINES)
def test_no_line_is_proposed_that_learns_something_else(name, reader, tmp_path):
    row, line = LINES[name]
    (tmp_path / "a.png").write_bytes(png(0))
    write_jsonl(tmp_path / "a.jsonl", [row])
    source = opened(tmp_path / "a.jsonl", reader, tmp_path, row_format="text").sources[0]
    said = source.proposal([(row, tmp_path / "a.jsonl")])
    assert line in said and bool(line) == bool(said), said


def test_bytes_in_place_of_a_name_are_no_content():
    root = MediaRoot("/")
    assert root.medium(VISION, {"bytes": png(0), "path": b"a.png"}).data == png(0)
    with pytest.raises(RowError, match="a medium is b'a.png'"):
        root.medium(VISION, {"path": b"a.png"})


@pytest.mark.parametrize("mark", ["<image_1>", "<|image_2|>", "<ImageHere>", "<Image>"])
def test_marks_of_other_programs_are_refused_where_no_medium_is_placed(mark):
    row = {"images": ["a.png"], **asks(f"Compare {mark}.")}
    with pytest.raises(RowError, match="stands for no medium here: write <image>"):
        chat(row, MediaRoot("/"))
    with pytest.raises(RowError, match="stands for no medium here"):
        chat(row | asks([{"type": "text", "text": mark}]), MediaRoot("/"))
    assert chat(row | {"images": []}, MediaRoot("/"))[0].parts == (f"Compare {mark}.",)


def test_members_in_an_order_of_their_own_keep_it(reader, tmp_path):
    from tests.data.test_safety import write_tar

    names = ["2.png", "10.png", "1.png"]
    path = write_tar(tmp_path / "a.tar", [
        ("000.txt", b"words"), *((f"000.{name}", png(0)) for name in names)])
    store = opened(path, reader, tmp_path, row_format="caption").sources[0].store
    assert [m.name for m in store.row(0)["image"]] == [f"000.{name} in {path}" for name in names]


def test_two_texts_of_a_tar_row_are_refused(reader, tmp_path):
    """The one that came last was learnt: the question."""
    path = write_sample(tmp_path / "a.tar", {
        "png": png(0), "answer.txt": "a cat", "question.txt": "What is it?"})
    said = "members '000.answer.txt' and '000.question.txt' are both the text of their row"
    assert said in str(opened(path, reader, tmp_path, row_format="caption").problem(0))
    with pytest.raises(ValueError, match=f"no row that can be read .{said}"):
        opened(path, reader, tmp_path)


def test_two_json_members_of_a_tar_row_are_refused(reader, tmp_path):
    """The keys of the one that came last were learnt."""
    path = write_sample(tmp_path / "a.tar", {
        "json": CHAT, "detail.json": {"messages": said("q", "another")}})
    said_of_it = str(opened(path, reader, tmp_path, row_format="openai").problem(0))
    assert "'000.detail.json' and '000.json' are both the json of their row; join" in said_of_it


def said(*texts: str, **last) -> list[dict]:
    turns = [{"role": ("user", "assistant")[k % 2], "content": text}
             for k, text in enumerate(texts)]
    return [*turns[:-1], turns[-1] | last]


@pytest.mark.parametrize("marks, learnt", [
    (dict(weight=0), False), (dict(weight=0.0), False), (dict(train=False), False),
    (dict(loss=False), False), (dict(loss=0), False), (dict(weight=1, train=False), False),
    (dict(weight=0, train=True), False), (dict(train=False, loss=1), False),
    (dict(weight=1), True), (dict(train=True), True), (dict(loss=1.0), True),
    (dict(weight=None), True), (dict(), True), (dict(training=False), False),
    (dict(trainable=0), False), (dict(train_on_turn=False), False), (dict(training=True), True)])
def test_marks_of_a_turn_say_whether_it_is_learnt(marks, learnt):
    turns = chat({"messages": [*said("q", "first", **marks), *said("q", "second")]}, MediaRoot(""))
    assert [turn.supervised for turn in turns] == [False, learnt, False, True]


@pytest.mark.parametrize("keys, text", [
    (dict(weight=0.5), '"weight" of a turn is 0.5: must be 0 or false'),
    (dict(weight="0"), "\"weight\" of a turn is '0': must be 0 or false"),
    (dict(train="no"), "\"train\" of a turn is 'no': must be 0 or false"),
    (dict(loss=[]), '"loss" of a turn is []: must be 0 or false'),
    (dict(reasoning=["so"]), "the reasoning of a turn must be a text, got ['so']")])
def test_what_a_turn_says_beside_its_text_is_not_ignored(keys, text):
    with pytest.raises(RowError) as error:
        chat({"messages": said("q", "a", **keys)}, MediaRoot(""))
    assert error.value.reason.startswith(text)


@pytest.mark.parametrize("keys, reasoning", [
    (dict(reasoning_content="", thinking=None), ""), (dict(reasoning_content="so"), "so"),
    (dict(reasoning="so", thinking=""), "so"), (dict(thinking="so"), "so")])
def test_reasoning_is_read(keys, reasoning):
    turns = chat({"messages": said("q", "a", **keys)}, MediaRoot(""))
    assert turns[1].parts == ("a",) and turns[1].reasoning == reasoning


AUDIO, IMAGE = {"audio": "0.wav", "text": "low"}, {"image": "0.png", "text": "red"}  # 9/16 s
CHAT = {"messages": said("q", "a")}
LOOK = {"images": ["0.png", "3.png"]}


def test_pairs_of_answers_are_refused_when_they_are_opened(reader, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [CHAT | {"chosen": "a", "rejected": "b"}])
    with pytest.raises(ValueError, match="is for preference tuning"):
        opened(path, reader, tmp_path)


def parts(*images: dict) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": "image", **i} for i in images]},
                         {"role": "assistant", "content": "a"}]}


IGNORED = {  # file -> rows, each with what is said of it (nothing: it is read)
    "clips": [
        (AUDIO | {"start_time": "0:01", "end_time": "0:02"}, "they must be numbers of seconds"),
        (AUDIO | {"start": 0.4, "end": 0.3}, "the start must be from 0 to below the end"),
        (AUDIO | {"start": 0.4, "end": 3}, "'start': 0.4, 'end': 3.0: the file has 0.5625 s"),
        (AUDIO | {"start": 0.1}, "'start': 0.1: a start alone does not say whether"),
        (AUDIO | {"start": 0.1, "end": 0.3}, ""), (AUDIO | {"offset": 0.1, "duration": 0.2}, ""),
        ({"audio": {"path": "0.wav", "start_time": 3.0, "end_time": 3.5625}, "text": "low"}, ""),
        (AUDIO | {"begin_time": 12.25, "end_time": 12.81}, ""),  # cut out, as in GigaSpeech
        (AUDIO | {"start": 12250, "end": 12810}, ""), (AUDIO | {"start_time": 30}, ""),
        (AUDIO | {"start": 0, "end": None}, ""), (AUDIO | {"duration": 100, "id": 7}, ""),
        (AUDIO | {"label": 0, "offset": 0.0, "duration": 0.56}, ""),
        (AUDIO | {"question": "Who?", "answer": "she"}, '"question" is \'Who?\', and is not read')],
    "pictures": [
        (IMAGE | {"question": "Which?", "answer": "red"}, "is not read: name the columns that are"),
        (IMAGE | {"answers": ["red"]}, '"answers" is [\'red\'], and is not read'),
        (IMAGE | {"question": "", "answers": None, "objects": {"bbox": [[1, 2, 3, 4]]}}, "")],
    "turns": [
        (CHAT | {"rejected_response": "b"}, "is for preference tuning"),
        (CHAT | {"label": False}, "the answer is marked as a bad one; leave the row out"),
        (CHAT | {"objects": {"bbox": [[1, 2, 3, 4]]}, "messages": said("q", "<bbox>")},
         "write the names and boxes into the text"),
        (CHAT | {"system_prompt": "Be brief."}, "is 'Be brief.', and is not read"),
        (CHAT | {"images": ["0.png"]} | parts({"resized_height": 28}), '"resized_height" is 28'),
        ({"images": ["0.png"], "audios": ["0.wav", "1.flac"], "start": 0.1, "end": 0.2,
          "messages": said("<image><audio><audio>", "low")}, "of 2 clips and videos: give"),
        ({"messages": said("<image>", "a"), "images": [{"path": "0.png", "start": 1, "end": 2}]},
         "an image has no start and no end"),
        (LOOK | parts({"index": 1}, {"index": 0}), '"index" of a content part is 1'),
        (LOOK | parts({"index": 0}, {"index": 1}), ""),
        (CHAT | {"start": "2020-01-01", "end": "2020-01-02"}, ""),
        (CHAT | {"label": True, "objects": {"bbox": [1]}, "system_prompt": " ", "start": 3}, ""),
        (CHAT | {"system_prompt": "Be brief.", "system": "Be brief.", "question": "q"}, "")],
}


def test_keys_that_would_change_what_is_learnt_are_not_ignored(folder, reader, tmp_path, capsys):
    for name, rows in IGNORED.items():
        write_jsonl(folder / f"{name}.jsonl", [row for row, _ in rows])
    sources = ", ".join(f"{{path: {folder}/{name}.jsonl}}" for name in IGNORED)
    assert main(["lint", write_recipe(tmp_path, f"sources: [{sources}]"), "--workers", "1"]) == 1
    told = {line.partition(": ")[0]: line for line in capsys.readouterr().out.splitlines()}
    for name, rows in IGNORED.items():
        for k, (row, reason) in enumerate(rows, 1):
            line = told.get(f"{folder}/{name}.jsonl, row {k}", "")
            assert reason in line and bool(reason) == bool(line), (row, line)


@pytest.mark.parametrize("row", [
    {"messages": [], "conversations": said("q", "a")},
    {"messages": None, "conversations": said("q", "a")},
    {"messages": said("q", "a"), "conversations": []}])
def test_the_list_of_turns_that_is_not_empty_is_read(row, reader, tmp_path):
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", [row]), reader, tmp_path)
    assert [turn.parts for turn in dataset.conversation(0)] == [("q",), ("a",)]


FOUR = ["red", "blue", "3", "white"]


@pytest.mark.parametrize("choices, answer, right", [
    (FOUR, "blue", "B. blue"), (FOUR, "C", "C. 3"), (FOUR, "(D).", "D. white"), (FOUR, 0, "A. red"),
    (FOUR, "1", "B. blue"), (FOUR, 3, "D. white"), (FOUR, "3", "C. 3"),
    ({"text": ["a", "b"], "label": ["1", "2"]}, "2", "2. b"), ([1, 2], 2, "B. 2"),
    ([0, 1], 1, "B. 1")])
def test_the_answer_is_found_among_its_choices(choices, answer, right):
    lines, found = choose(choices, answer)
    assert found == right and found in lines


@pytest.mark.parametrize("choices, answer, said", [
    (FOUR, "green", "none of the 4"), (FOUR, 4, "none"), (FOUR, -1, "none"), (FOUR, "", "none"),
    (["B", "A"], "A", "several"), (["x", "x"], "x", "several"), ([1, 2], 1, "several"),
    (["10", "20"], 20, "none"), ({"text": ["a", "b"], "label": ["1", "2"]}, 1, "several"),
    ("red, blue", 0, "must be a list"),
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
