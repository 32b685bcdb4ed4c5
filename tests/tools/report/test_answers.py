"""The report's table of answers to held-out examples."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

from PIL import Image

from orchmllm.cli import dispatch
from tests.lib.report_pages import Page, measured_row, write


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
