"""The ledger: every character and every medium of a source's rows has one fate, and it is the right
one. What is there is counted here anew, by code that reads nothing with this package."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.recipe import DataConfig
from orchmllm.data.ledger import Ledger
from orchmllm.data.media.medium import RowError
from orchmllm.data.survey import survey
from orchmllm.tools.predict.examples import dataset_of
from tests.data.test_presets import recipe
from tests.data.test_templates import THINK
from tests.lib.drawn import reader_in
from tests.lib.formats import (
    FORMATS,
    QUESTIONS,
    alpaca_row,
    llava_row,
    openai_row,
    write_jsonl,
    write_media,
)
from tests.lib.presets import CORPORA
from tests.lib.sources import opened
from tests.lib.tokenizers import write_byte_tokenizer, write_tokenizer

# Corpora whose rows hold parts of the names of their media.
FAST = ("cauldron", "mmc4", "commonvoice", "vqa", "format llava", "format openai embedded")
MADE_NAMES = ("commonvoice", "audiocaps", "own columns")


NONE: Counter = Counter()


def ledger_of(dataset, **keys) -> Ledger:
    """Of all rows."""
    dataset.reader.max_example_tokens = keys.pop("max_example_tokens", 0)
    [ledger] = survey(dataset.sources, dataset.reader, DataConfig(max_lost_percent=100, **keys),
                      lambda line: None, 10_000, decode=True)
    return ledger


def there(value, media: set[str], names: Counter = NONE, said: str = "") -> tuple[int, int]:
    """(Characters without white space, media) of what a row holds. media: ends of names; a text
    with such an end is a medium unless it is part of what is said, as one that gives its content,
    and so many others as names has."""
    if isinstance(value, dict) and "bytes" in value or isinstance(value, bytes):
        return 0, 1
    if isinstance(value, dict) and "data" in value:
        return len(value["format"]), 1
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        found = [there(one, media, names, said) for one in value]
        return sum(c for c, _ in found), sum(m for _, m in found)
    if value is None or isinstance(value, bool):
        return 0, 0
    if isinstance(value, str) and names[value] > 0:
        names[value] -= 1
        return 0, 1
    if hasattr(value, "_fields") or isinstance(value, str) and (
            value.startswith(("data:", "file:"))
            or any(map(value.endswith, media)) and value not in said):
        return 0, 1
    return len("".join(str(value).split())), 0


def check(ledger: Ledger, rows: list, media: set[str]) -> None:
    chars, count = np.sum([there(row, media) for row in rows], axis=0).tolist()
    assert (ledger.chars.total(), ledger.media.total()) == (chars, count), (ledger, rows[:2])
    assert min([*ledger.chars.values(), *ledger.media.values(), 0]) == 0
    for column in (1, 2):
        total = sum(share[column] for share in ledger.shares())
        assert total == pytest.approx(1) or total == 0


def test_each_fate_of_a_row_that_was_counted_by_hand(tmp_path):
    write_media(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINK)
    row = {"id": 7, "mask": "2.webp", "images": ["0.png"], "note": "a word", "messages": [
        {"role": "user", "content": "<image> What is it?"},
        {"role": "assistant", "content": "<think>warm</think>one"},
        {"role": "user", "content": "And?"}, {"role": "assistant", "content": "blue"}]}
    bad = {**row, "images": ["0.png", "1.jpg"]}
    write_jsonl(tmp_path / "a.jsonl", [row, bad])
    ledger = ledger_of(opened(tmp_path / "a.jsonl", reader_in(tmp_path), tmp_path))
    roles = len("user" "assistant") * 2 + len("<image>")
    learnt, read, lost = len("one" "blue"), len("Whatisit?" "And?"), len("<think>warm</think>")
    unread = len("7" "aword")
    assert ledger.chars == {"learnt": learnt, "read": read, "left out": lost, "names": roles,
                            "unread": unread, "cut": 0,
                            "refused": learnt + read + lost + roles + unread}
    assert ledger.media == {"read": 1, "unread": 1, "refused": 3}
    [(reason, (place, count))] = ledger.refused.items()
    assert reason.startswith("1 <image> placeholders but 2") and place.endswith("row 2")
    assert count == 1 and ledger.unread == {"id", "mask", "note"}
    total = 2 * (learnt + read + lost + roles + unread)
    assert str(ledger).startswith(f"a.jsonl: 2 rows\n  {total} characters: {learnt / total:.1%} "
                                  f"learnt, {read / total:.1%} read, ")
    assert max(map(len, str(ledger).splitlines())) <= 100


def test_what_a_limit_cuts_is_counted_where_it_stands(tmp_path):
    """To the character, with a tokenizer of one token a byte; an image behind the cut, too."""
    write_media(tmp_path)
    write_byte_tokenizer(tmp_path)
    rows = [{"images": ["0.png"], "messages": [
        {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "x" * 100},
        {"role": "user", "content": "<image>Why?"}, {"role": "assistant", "content": "no"}]}]
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", rows), reader_in(tmp_path), tmp_path)
    whole = ledger_of(dataset)
    before = dataset.tokenizer.tokenize(dataset.conversation(0)[:1])[0]
    limit = len(before) + 8 + 30
    cut = ledger_of(dataset, max_example_tokens=limit)
    check(cut, rows, {"0.png"})
    assert whole.chars["learnt"] == 102 and whole.media == {"read": 1}
    assert abs(cut.chars["learnt"] - 30) <= 4, cut.chars
    assert cut.chars["cut"] == 102 + 4 - cut.chars["learnt"] and cut.media == {"cut": 1}
    nothing = ledger_of(dataset, max_example_tokens=len(before))
    assert nothing.chars["cut"] == 110 and not nothing.chars["learnt"] and not nothing.refused


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in (*CORPORA, *(f"format {name}" for name in FORMATS))])
def test_the_shares_of_a_corpus_add_up(name, tmp_path):
    if name in CORPORA:
        corpus = CORPORA[name](tmp_path)
        source = {**corpus.source}
    else:
        write_media(tmp_path)
        source = {"path": str(FORMATS[name.removeprefix("format ")][0](tmp_path))}
    dataset = dataset_of(recipe(tmp_path, source))
    if name == "learnt not":
        with pytest.raises(ValueError, match="3 of 3 rows .* nothing to learn"):
            ledger_of(dataset)
        return
    ledger = ledger_of(dataset)
    store = dataset.sources[0].store
    rows = [store.row(i) for i in range(len(store))]
    if name in MADE_NAMES:
        check(ledger, [*rows, *[{"bytes": b""}] * len(rows)], set())
    else:
        check(ledger, rows, {p.name for p in tmp_path.rglob("*.*")
                             if p.is_file() and p.suffix not in (".jsonl", ".json")})
    assert ledger.chars["learnt"] and not ledger.refused and not ledger.media["unread"]


DAMAGE = ("", 0, 3.5, True, None, [], {}, "[1]]", "two words", ["0.png"], "[1", {"path": "0.png"},
          {"role": "user", "content": "x"}, "<image>", "\ud800", [[]])


def damaged(value, draw, depth: int = 0):
    """A row of which something is another thing, gone, twice or in another place."""
    if draw.random() < 0.06 * depth:
        return DAMAGE[draw.integers(len(DAMAGE))]
    if isinstance(value, dict):
        items = [(k, damaged(v, draw, depth + 1)) for k, v in value.items() if draw.random() > 0.04]
        return dict(items + [("extra", DAMAGE[draw.integers(len(DAMAGE))])] * (draw.random() < 0.1))
    if isinstance(value, list):
        found = [damaged(v, draw, depth + 1) for v in value if draw.random() > 0.06]
        return found * 2 if draw.random() < 0.03 else found
    return value[: draw.integers(len(value) + 1)] if isinstance(value, str) and (
        draw.random() < 0.04) else value


def followed(source, reader, row: dict, folder) -> tuple[Ledger, tuple[int, int]]:
    """The ledger of one row, and the characters and media that it must have."""
    ledger, taken, said = Ledger("a"), [], ""
    ledger.follow(source, reader, row, folder / "a.jsonl", "here", decode=True)
    with suppress(RowError):
        turns = replace(source, root=replace(source.root, taken=taken)).parse(
            row, folder / "a.jsonl")
        said = "" if ledger.refused else "\n".join(
            part for turn in turns for part in turn.parts if isinstance(part, str))
    given = [value for one, _ in taken for value in (
        [one.get("path"), one.get("url")] if isinstance(one, dict) else [one])]
    names = Counter(value for value in given if isinstance(value, str) and value)
    return ledger, there(row, {".png", ".jpg", ".webp", ".wav", ".flac"}, names, said)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_shares_of_damaged_rows_add_up(count, reader, tmp_path):
    """Whatever becomes of a row, all of it is somewhere: no character is counted twice or never."""
    write_media(tmp_path)
    good = [make(*q) for q in QUESTIONS for make in (llava_row, openai_row, alpaca_row)]
    draw = np.random.default_rng(count)
    rows = [damaged(good[k % len(good)], draw) for k in range(count)]
    rows = good + [row if isinstance(row, dict) else {"a": row} for row in rows]
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", good), reader, tmp_path)
    [source] = dataset.sources
    fates = set()
    for row in rows:
        row = json.loads(json.dumps(row))
        ledger, wanted = followed(source, dataset.reader, row, tmp_path)
        assert (ledger.chars.total(), ledger.media.total()) == wanted, (row, ledger)
        fates |= {fate for fate in ledger.chars if ledger.chars[fate]}
    assert {"learnt", "read", "refused", "unread", "names"} <= fates
