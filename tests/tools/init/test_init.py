"""`orchmllm init`: a recipe for what the data are, which trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from orchmllm.cli import dispatch
from orchmllm.config.recipe import load_recipe
from orchmllm.tools.init import demo
from tests.lib.commands import TINY, make_demo_data, python
from tests.lib.composed import write_parts
from tests.lib.whole_folders import write_model, write_rows


@pytest.fixture
def data(demo_corpus, tmp_path) -> Path:
    """Rows and media without a tokenizer, in a folder of their own; a row cannot be used."""
    folder = tmp_path / "my data \U0001f600"
    shutil.copytree(demo_corpus, folder, ignore=lambda *_: [
        "tokenizer.json", "README.txt", "model"])
    with (folder / "data.jsonl").open("a") as file:
        file.write('{"conversations": [{"from": "nobody", "value": "?"}]}\n')
    return folder / "data.jsonl"


def init(capsys, *argv: object) -> tuple[int, str]:
    code = dispatch(["init", *map(str, argv)])
    return code, "".join(capsys.readouterr())


def test_a_recipe_for_rows_of_ones_own_can_be_trained(data, tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    code, said = init(capsys, data, "--out", out)
    assert code == 0 and "17 rows of llava in JSONL" in said
    assert "1 of 17 rows that were looked at cannot be used; the first: " in said
    assert "trained on their texts (" in said and f":\n  {tmp_path}/mine.tokenizer.json\n" in said
    assert "are audio.\n" in said and "are made" not in said  # the model has no generator
    assert said.endswith(f"next:\n  orchmllm data stats {out}\n  orchmllm train {out}\n")
    recipe = load_recipe(out)
    assert (recipe.data.path, recipe.model.config) == (str(data), f"{tmp_path}/mine.model")
    shapes = json.loads((tmp_path / "mine.model/config.json").read_text())
    assert shapes["vision_config"]["depth"] > 1 and shapes["audio_config"]["encoder_layers"] > 1
    assert recipe.train.sample_every
    assert dispatch(["train", str(out), "--validate", f"run.dir={tmp_path}/run"]) == 0
    capsys.readouterr()
    before = out.read_bytes()
    code, said = init(capsys, data, "--out", out)
    assert code == 2 and said.startswith(f"error: {out} exists already: name another recipe")
    assert out.read_bytes() == before
    out.unlink()
    for made in ("tokenizer.json", "model"):  # a run may need them
        assert init(capsys, data, "--out", out) == (
            2, f"error: {tmp_path}/mine.{made} exists already: name another recipe with --out, or "
            "remove it\n")
        (tmp_path / "mine.tokenizer.json").unlink(missing_ok=True)


def test_what_is_there_stays_and_what_fails_leaves_nothing(data, tmp_path, capsys):
    before = data.read_bytes()
    code, said = init(capsys, "--demo", data.parent)
    assert code == 2 and f"error: --demo {data.parent} is not empty: name a new folder" in said
    assert data.read_bytes() == before
    out = tmp_path / "new" / "mine.yaml"
    code, said = init(capsys, shutil.copy(data, data.with_name("two\nlines.jsonl")), "--out", out)
    assert code == 2 and said.endswith(": must be one line of printable characters\n")
    data.write_text('{"messages": [{"role": "user", "content": "No answer."}]}\n')
    code, said = init(capsys, data, "--out", out)
    assert code == 2 and "1 of 1 rows that were looked at cannot be used" in said.splitlines()[-1]
    assert not list(out.parent.iterdir())


def test_the_models_that_are_named_are_composed(data, tmp_path, capsys):
    parts = write_parts("siglip_whisper_qwen2", tmp_path / "m")
    rows = [json.loads(line) for line in data.read_text().splitlines()[:-1]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows if not row["audios"]))
    out = tmp_path / "r.yaml"
    argv = [data, "--out", out, "--model", parts.llm, "--model", parts.vision]
    code, said = init(capsys, *argv)
    assert code == 0 and f"parts composed in {tmp_path}/r.model" in said
    recipe = load_recipe(out)
    assert recipe.model.pretrained == f"{tmp_path}/r.model" and recipe.train.lr == 1e-5
    config = json.loads((tmp_path / "r.model/config.json").read_text())
    assert config["vision_config"]["model_type"] == "siglip_vision_model"
    assert config["text_config"]["model_type"] == "qwen2" and "audio_config" not in config
    other = [data, "--out", tmp_path / "x.yaml", "--model"]
    for models, text in (
            ((parts.llm, "--model", parts.llm), f"{parts.llm} is the second llm part"),
            ((parts.llm, "--model", parts.audio, "--model", parts.audio),
             f"{parts.audio} is the second audio part"),
            ((parts.vision,), "no --model is a causal LLM, which a composition needs: name one")):
        code, said = init(capsys, *other, *models)
        assert code == 2 and text in said and not list(tmp_path.glob("x.*"))
    for path in (tmp_path / "m").rglob("*.safetensors"):  # what is left are shapes
        path.unlink()
    code, said = init(capsys, *other, parts.llm, "--model", parts.vision)
    drawn = load_recipe(tmp_path / "x.yaml")
    assert code == 0 and drawn.model.config == f"{tmp_path}/x.model" and drawn.train.lr == 1e-3


def test_a_whole_model_is_trained_with_its_own_processor(tmp_path, capsys):
    model, out = tmp_path / "m", tmp_path / "r.yaml"
    model.mkdir()
    write_model("qwen2_5_vl", model)
    rows = write_rows(tmp_path, 12, "qwen2_5_vl")
    capsys.readouterr()  # a bar of transformers
    code, said = init(capsys, model, "--out", out)
    assert code == 2 and said == (
        f"error: {model} is the folder of a model: orchmllm init DATA --model {model}\n")
    argv = [rows, "--out", out, "--model", model]
    assert init(capsys, *argv)[0] == 0
    recipe = load_recipe(out)
    assert recipe.model.pretrained == str(model) and recipe.train.lr == 1e-5
    assert recipe.train.sample_every > 0 and recipe.data.num_validation > 0
    assert dispatch(["train", str(out), "--validate", f"run.dir={tmp_path}/run"]) == 0
    capsys.readouterr()
    out.unlink()
    code, said = init(capsys, *argv, "--model", model)
    assert code == 2 and f"--model {model} is a second whole model" in said
    settings = (model / "processor_config.json").rename(tmp_path / "settings.json")
    code, said = init(capsys, *argv)
    assert code == 2 and said.startswith(f"error: {model}: its processor cannot be read: ") and (
        said.endswith("give a folder that has the model's own, as its save_pretrained writes it\n"))
    settings.rename(model / "processor_config.json")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    code, said = init(capsys, *argv)
    assert code == 2 and said.startswith("error: ") and str(model) in said
    assert not out.exists()


@pytest.mark.parametrize("argv, text", [
    (["none.jsonl"], "none.jsonl: "), (["--demo", "x", "--model", "y"], "name DATA, or --demo DIR"),
    (["a.jsonl", "--model", "none"], "--model none: no such folder (nothing is downloaded)")])
def test_what_cannot_be_used_is_one_line_and_leaves_nothing(argv, text, tmp_path, capsys,
                                                            monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code, said = init(capsys, *argv)
    except SystemExit as stop:
        code, said = stop.code, "".join(capsys.readouterr())
    assert code == 2 and text in said.splitlines()[-1] and not list(tmp_path.iterdir())


def test_the_recipe_of_the_demo_names_its_folder_whatever_it_is_called(tmp_path, capsys,
                                                                      monkeypatch):
    monkeypatch.setattr(demo, "make_corpus", lambda out, generate: out.mkdir())
    folder = tmp_path / "\U0001f600"
    assert init(capsys, "--demo", folder)[0] == 0
    assert load_recipe(folder / "recipe.yaml").data.path == str(folder)


@pytest.mark.slow
def test_the_demo_is_trained_asked_and_exported(tmp_path):
    """From nothing to an answer, by the commands that are shown."""
    def run(*argv: object) -> str:
        done = python("-m", "orchmllm", *argv, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "next:\n  orchmllm data stats demo/recipe.yaml\n" in run("init", "--demo", "demo")
    same = make_demo_data(tmp_path / "same", 400)
    assert (same / "data.jsonl").read_bytes() == (tmp_path / "demo/data.jsonl").read_bytes()
    assert "Without balancing, a step takes" in run("data", "stats", "demo/recipe.yaml")
    run("train", "demo/recipe.yaml", *TINY, "data.num_validation=4", "train.sample_every=2")
    image = sorted((tmp_path / "demo/images").iterdir())[0]
    answer = run("generate", "demo/run", "--image", image, "What is drawn?", "--max-tokens", "5")
    exported = run("export", "demo/run", "--out", "exported")
    assert "AutoTokenizer gives other ids" not in exported
    assert run("generate", "exported", "--image", image, "What is drawn?", "--max-tokens",
               "5") == answer
    run("report", "demo/run")
    assert "data:image/jpeg" in (tmp_path / "demo/run/report.html").read_text()
