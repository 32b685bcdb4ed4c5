"""`orchmllm report --compare` and `--score`: two runs, and a run beside its predictions; the table
of answers to held-out examples."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

from PIL import Image

from orchmllm.cli import dispatch
from orchmllm.config.recipe import load_recipe, to_yaml
from orchmllm.tools.report.svg import number
from tests.lib.recipes import RECIPES
from tests.lib.report_pages import Page, measured_row, write


def test_predictions_are_scored_by_what_a_run_measured(tmp_path, demo_corpus, capsys):
    rows = [measured_row(s, step_s=0.1 * s, tokens_per_s=50.0, mfu=0.4) for s in range(5)]
    folder = write(tmp_path / "run", rows)
    (folder / "recipe.yaml").write_text(to_yaml(load_recipe(
        RECIPES / "demo.yaml", [f"model.config={demo_corpus}/model"])))

    def scored() -> dict[str, list[str]]:
        assert dispatch(["report", str(folder), "--score", "--mix", "natural"]) == 0
        lines = capsys.readouterr().out.partition("error\n")[2].splitlines()
        return {line[:30].strip(): [line[30:40].strip(), line[40:51].strip(), line[51:].strip()]
                for line in lines}

    unmeasured = scored()
    assert unmeasured["gain of balancing, cost model"] == ["-", "-", ""]
    for step, measured in ((2, 0.2), (3, 0.4), (4, 0.1)):
        rows[step]["measured"]["gain"] = {"predicted": 0.25, "measured": measured}
    write(folder, rows)
    found = scored()
    assert found["gain of balancing, cost model"] == ["20.0%", "25.0%", "+5.0 points"]
    dispatch(["dry-run", str(folder / "recipe.yaml"), "--ranks", "2", "--mix", "natural",
              "--json", str(tmp_path / "tried.json")])
    tried = json.loads((tmp_path / "tried.json").read_text())
    gain = 1 - 1 / tried["ratio"]["none / balanced"]
    step_s = tried["predicted"]["balanced"]["step_s"]
    assert found["gain of balancing, dry run"] == [
        "20.0%", number(gain, "%"), f"{100 * (gain - 0.2):+.1f} points"]
    assert found["seconds a step, dry run"] == [
        "200 ms", number(step_s, "s"), f"{100 * (step_s / 0.2 - 1):+.1f}%"]
    assert found["tokens/s, dry run"][0] == "50"
    write(folder, [row | {"mfu": None} for row in rows])  # as on a CPU
    assert list(scored()) == ["gain of balancing, cost model", "gain of balancing, dry run"]


def compared(folder: Path, other: Path, capsys) -> list[str]:
    """What is said of two runs, in lines whose columns are two spaces apart."""
    assert dispatch(["report", str(folder), "--compare", str(other)]) == 0
    return [re.sub(" {2,}", "  ", line.strip()) for line in capsys.readouterr().out.splitlines()]


def test_two_runs(tmp_path, capsys):
    a = write(tmp_path / "a", [measured_row(s, loss=3.0) for s in range(6)])
    b = write(tmp_path / "b", [measured_row(s, loss=2.0) for s in range(4)])
    before = compared(a, b, capsys)[0]
    assert before.endswith("relative; settings are not recorded: attempts.jsonl is missing.")
    settings = {"run.dir": "a", "train.lr": 0.1, "balance.enabled": True}
    of_later = {"balance.measure_every": 0}  # of a version that has a key more
    for folder, changed in ((a, {}), (b, {"run.dir": "b", "train.lr": 0.2, **of_later})):
        (folder / "attempts.jsonl").write_text(json.dumps(
            {"attempt": 1, "settings": settings | changed}) + "\n")
    said = compared(a, b, capsys)
    assert said[0] == (
        "A step of a takes 100.0% of the time of one of b (medians 500 ms and 500 ms); in 4 steps "
        "that both did their losses differ by at most 5.0e-01 relative; settings that "
        "differ: 1, versions and facts of the machine: 0.")
    assert said[2] == "a  b  difference"
    assert "loss, mean of the last 5% of the steps  3  2  50.0%" in said
    assert "data wait  1.0%  1.0%" in said and "restarts  0  0" in said
    at = said.index("loss of step 3, the last of both  3  2  50.0%")
    assert said[at + 1:at + 5] == ["", "Settings, versions and host that differ:",
                                   "train.lr: 0.1 and 0.2", ""]


def test_a_loss_that_one_run_lacks_is_told(tmp_path, capsys):
    a, b = (write(tmp_path / name, [measured_row(s, loss=lost if s > 1 else 3.0)
                                    for s in range(4)]) for name, lost in (("a", 3.0), ("b", None)))
    for pair in ((a, b), (b, a)):
        assert ("differ by at most 0.0e+00 relative, and in 2 of them only one has a loss;"
                in compared(*pair, capsys)[0])


def test_versions_and_hosts_are_those_of_the_last_attempt(tmp_path, capsys):
    a, b = (write(tmp_path / name, [measured_row(0)]) for name in "ab")
    for folder, *hosts in ((a, "old", "n1"), (b, "n2")):
        starts = [{"attempt": i, "resumed_from": None, "settings": {
            "train.lr": 0.1, "versions.torch": "2.13", "world.host": host}}
            for i, host in enumerate(hosts)]
        ends = [{"attempt": i, "ended": "finished"} for i in range(len(hosts))]
        (folder / "attempts.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in starts + ends) + '{"attempt"')
    said = compared(a, b, capsys)
    assert said[said.index("Settings, versions and host that differ:") + 1] == (
        "world.host: 'n1' and 'n2'")
    assert "differ: 0, versions and facts of the machine: 1." in said[0]


def shown(folder: Path) -> str:
    assert dispatch(["report", str(folder)]) == 0
    html = (folder / "report.html").read_text(encoding="utf-8")
    Page(html)
    return html


def test_answers_are_shown_beside_their_media(demo_corpus, tmp_path):
    rows = [json.loads(line) for line in (demo_corpus / "data.jsonl").read_text().splitlines()]
    image, clip = (next(k for k, row in enumerate(rows) if row[key] and not row[other])
                   for key, other in (("images", "audios"), ("audios", "images")))
    write(tmp_path, [measured_row(step) for step in range(9)])
    assert "set train.sample_every" in shown(tmp_path)
    line = {"expected": "red <b>.", "answer": "blue.", "ended": True}
    lines = [{"step": step, "example": image, **line} for step in (2, 4, 6, 8)]
    lines += [{"step": 8, "example": image, **line, "answer": "<i> red", "ended": False},
              {"step": 8, "example": clip, "error": "MediaError: gone"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"data: {{path: {demo_corpus}}}\nmodel: {{config: {demo_corpus}/model}}\n")
    html = shown(tmp_path)
    [source] = re.findall(r'<img alt="[^"]*" src="data:image/jpeg;base64,([^"]*)" />', html)
    size = Image.open(BytesIO(b64decode(source))).size
    assert max(size) <= 240
    [sound] = re.findall(r'<audio controls src="data:audio/[\w-]+;base64,([^"]*)">', html)
    assert b64decode(sound) == (demo_corpus / rows[clip]["audios"][0]).read_bytes()
    question = rows[image]["conversations"][0]["value"].removeprefix("<image>\n")
    assert question in html and "red &lt;b&gt;." in html and "MediaError: gone" in html
    table = html.split("<th>the model says</th></tr>")[1].split("</table>")[0]
    assert sorted([image, clip]) == [  # as the log and samples.jsonl number them
        int(k) for k in re.findall(r"<tr><td>(\d+)</td>", table)]
    assert "step 8: &lt;i&gt; red ... (cut off)" in html and "step 2:" not in html
    recipe.write_text(f"data: {{path: gone.jsonl}}\nmodel: {{config: {demo_corpus}/model}}\n")
    assert "the data cannot be read: gone.jsonl" in shown(tmp_path)
