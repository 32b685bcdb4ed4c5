"""Rows that could be read in more than one way: each is read as it says, or it is refused."""

from __future__ import annotations

import io

import pytest
from PIL import Image

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
