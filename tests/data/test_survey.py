"""What is never learnt is said before training: text that the template leaves out, ends of answers,
keys that nothing reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from orchmllm.config.recipe import DataConfig, load_recipe
from orchmllm.data.formats.conversation import chat
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.survey import survey
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.runtime.build import build_dataset, look_at_data
from orchmllm.runtime.metrics import open_log
from orchmllm.tools.data.command import main
from orchmllm.tools.report.log import read_run
from orchmllm.tools.report.page import page
from tests.data.test_templates import THINK
from tests.lib.drawn import reader_in
from tests.lib.formats import write_jsonl
from tests.lib.recipes import RECIPES
from tests.lib.rows import a_row
from tests.lib.sources import opened
from tests.lib.tokenizers import write_tokenizer

NO_END = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n"
          "{% endfor %}<|endoftext|>")
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def said(*texts: str, **keys) -> dict:
    return {"messages": [{"role": "assistant" if k % 2 else "user", "content": text,
                          **(keys if k % 2 else {})} for k, text in enumerate(texts)]}


def lines(folder, template: str | None, rows: list[dict], **keys) -> list[str]:
    write_tokenizer(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    write_jsonl(folder / "data.jsonl", rows)
    out: list[str] = []
    dataset = opened(folder / "data.jsonl", reader_in(folder), folder)
    dataset.reader.max_example_tokens = keys.get("max_example_tokens", 0)
    survey(dataset.sources, dataset.reader, DataConfig(**keys), out.append)
    assert out.pop(0).startswith(f"data.jsonl: {len(rows)} rows\n")
    return out


def test_text_that_is_left_out_is_counted(tmp_path):
    """Reasoning of all answers but the last, and that of a key which the template does not read."""
    kept = [said("What?", "red square"), said("What?", "<think>low</think>one")]
    lost = said("What?", "<think>warm</think>one", "two", "<think>low</think>one")
    assert lines(tmp_path, THINK, kept) == []
    [line] = lines(tmp_path, THINK, [*kept * 4, lost])
    share = 19 / (4 * (9 + 21) + 22 + 21)  # <think>warm</think> of all letters
    assert line == (f"data.jsonl: warning: the chat template leaves out {share:.1%} of what the "
                    "assistant says: take one that keeps it")
    with pytest.raises(ValueError, match="leaves out 44.2%.*set data.max_lost_percent"):
        lines(tmp_path, THINK, [lost])
    assert len(lines(tmp_path, THINK, [lost], max_lost_percent=45)) == 1
    with pytest.raises(ValueError, match="leaves out 50.0% of what the assistant says"):
        lines(tmp_path, PLAIN, [said("What?", "a red", reasoning_content="It is")])


def test_rows_that_cannot_be_used_are_told_before_training(tmp_path):
    good, bad = said("What?", "red"), {**said("<image>?", "red"), "images": ["a.png", "b.png"]}
    told = "{} of {} rows that were looked at cannot be used; the first: .*, row {}: 1 <image> "
    [line] = lines(tmp_path, PLAIN, [good] * 4 + [bad])
    assert re.match("data.jsonl: warning: " + told.format(1, 5, 5), line)
    with pytest.raises(ValueError, match=told.format(1, 4, 4) + ".*set data.max_lost_percent"):
        lines(tmp_path, PLAIN, [good] * 3 + [bad])
    for most in (20, 100):
        with pytest.raises(ValueError, match=told.format(2, 2, 1)):
            lines(tmp_path, PLAIN, [bad] * 2, max_lost_percent=most)


def test_what_is_cut_is_counted(tmp_path):
    """In targets, of rows of which nothing is left, too."""
    rows = [said("What?", "red " * n) for n in (1, 1, 40, 400)]
    assert lines(tmp_path, PLAIN, rows) == []
    with pytest.raises(ValueError, match="=60 cuts 1 of 4.*set data.max_lost_percent, which is 20"):
        lines(tmp_path, PLAIN, rows, max_example_tokens=60)
    [line] = lines(tmp_path, PLAIN, rows, max_example_tokens=60, max_lost_percent=90)
    tokenizer = ChatTokenizer(tmp_path)
    counts = [tokenizer.tokenize(chat(row, MediaRoot("")))[1] for row in rows]
    there, learnt = sum(c.sum() for c in counts), sum(c[:60].sum() for c in counts)
    assert line == ("data.jsonl: warning: data.max_example_tokens=60 cuts 1 of 4 rows that were "
                    f"looked at, and leaves out {1 - learnt / there:.1%} of what is learnt from "
                    "all of them: raise it")
    with pytest.raises(ValueError, match="leaves out 100.0%"):
        lines(tmp_path, PLAIN, [said("What? " * 100, "red")], max_example_tokens=60)


def test_answers_that_end_with_no_special_token_are_warned_of(tmp_path):
    rows = [said("What?", "red")]
    assert lines(tmp_path, PLAIN, rows) == []
    [line] = lines(tmp_path, NO_END.replace("<|endoftext|>", ""), rows)
    assert line.startswith("data.jsonl: warning: no special token is learnt")


@pytest.mark.parametrize("row, unread", [
    (said("q", "a") | {"id": 7, "meta": {"by": "me"}, "empty": "", "tools": None}, "id, meta"),
    (said("q", "a", name="me", weight=1), "name of a turn"),
    ({"conversations": [{"from": "human", "value": "q", "score": 1},
                        {"from": "gpt", "value": "a"}]}, "score of a turn"),
    ({"instruction": "q", "output": "a", "input": "", "system": "s", "license": "MIT"}, "license"),
    (said([{"type": "text", "text": "q", "detail": 0}], "a") | {"label": 0},
     "detail of a part of a turn, label"),
    (said("q", "a") | {"system": "s", "label": True}, "")])
def test_keys_that_nothing_reads_are_named(tmp_path, row, unread):
    found = lines(tmp_path, None, [row])
    assert found == ([f"data.jsonl: keys that nothing reads: {unread}"] if unread else [])


def test_lint_and_a_run_say_it(tmp_path, capsys):
    lost = said("What?", "<think>warm</think>one", "two", "<think>low</think>one")
    lines(tmp_path, THINK, [lost | {"id": 1}], max_lost_percent=45)
    told: list[str] = []
    recipe = {"data": {"path": str(tmp_path), "index_dir": str(tmp_path / "index")},
              "model": {"config": str(tmp_path / "model")}}
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    assert main(["lint", str(tmp_path / "r.yaml"), "--workers", "1"]) == 1
    shown = capsys.readouterr().out
    assert "keys that nothing reads: id" in shown and "set data.max_lost_percent" in shown
    assert main(["lint", str(tmp_path / "r.yaml"), "data.max_lost_percent=45"]) == 0
    assert "leaves out 44.2%" in capsys.readouterr().out
    written = load_recipe(tmp_path / "r.yaml")
    with pytest.raises(ValueError, match="leaves out 44.2%.*set data.max_lost_percent"):
        build_dataset(written)
    build_dataset(replace(written, data=replace(written.data, max_lost_percent=45.0)), told.append)
    assert [line.split(": ", 1)[1][:24] for line in told[1:]] == [
        "keys that nothing reads:", "warning: the chat templa"]


def test_what_was_seen_before_the_ranks_is_kept_for_the_report(tmp_path, monkeypatch):
    """By rows that went the whole way: one medium ends before its header says."""
    monkeypatch.delenv("ORCHMLLM_LEDGERS", raising=False)
    noise = np.random.default_rng(0).integers(0, 255, (60, 60, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:-900])
    rows = [{**said("What?", "red"), "image": name} for name in ("a.png",) * 5 + ("b.png",)]
    lines(tmp_path, None, rows)
    recipe = load_recipe(RECIPES / "demo.yaml", [
        f"data.path={tmp_path}/data.jsonl", f"model.config={tmp_path}/model",
        f"data.index_dir={tmp_path}/index", f"run.dir={tmp_path}/run", "data.num_validation=0",
        "train.validate_every_steps=0", "train.sample_every=0"])
    told: list[str] = []
    ledgers = look_at_data(recipe, told.append)
    assert os.environ["ORCHMLLM_LEDGERS"] == ledgers and "6 rows" in told[0]
    assert "1 of 6 rows" in told[1] and "b.png" in told[1] and "truncated" in told[1]
    recipe.run.folder.mkdir()
    log = open_log(recipe, told.append, ledgers)
    log.write(a_row(1))
    log.close()
    shown = page(read_run(tmp_path / "run"))
    name = recipe.data.path.rpartition("/")[2]
    assert f"<td>{name}</td><td>6</td><td>media</td><td class=n>6</td>" in shown.replace(
        " class=n>6</td><td>media", ">6</td><td>media")
    assert "in refused rows" in shown and "83.3%" in shown


def test_ledgers_of_many_sources_fit_into_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("ORCHMLLM_LEDGERS", raising=False)
    lines(tmp_path, None, [said("What?", "red")])
    sources = ", ".join(f"{{path: {tmp_path}/data.jsonl, name: {'源' * 60}{i}}}"
                        for i in range(300))
    recipe = load_recipe(RECIPES / "demo.yaml", [
        "data.path=", f"data.sources=[{sources}]", f"model.config={tmp_path}/model",
        "data.num_validation=0", f"data.index_dir={tmp_path}/index", f"run.dir={tmp_path}/run"])
    assert 200 < len(json.loads(look_at_data(recipe, lambda line: None))) < 300
    subprocess.run(["true"], check=True)  # else: Argument list too long
