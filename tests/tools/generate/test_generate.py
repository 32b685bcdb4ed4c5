"""`orchmllm generate`: a run, its checkpoint, its export and transformers give the same tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm.batch import SequenceLengths
from orchmllm.cli import dispatch
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.data.media.decode import decode_audio, decode_image
from orchmllm.data.media.medium import Medium
from orchmllm.models.generate import prompt_of
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.runtime.build import build_dataset
from orchmllm.runtime.metrics import read_rows
from orchmllm.tools.generate.own import open_trained, read_prompt
from orchmllm.trainer import Trainer
from tests.lib.commands import ROOT, TINY
from tests.lib.ranks import run_ranks
from tests.lib.tokenizers import write_tokenizer

pytestmark = pytest.mark.dist
TEXT = "Say red."


def learnt(world, recipe: Recipe) -> dict[str, np.ndarray]:
    """Runs the recipe; returns the weights."""
    trainer = Trainer(recipe, world)
    try:
        trainer.run()
        return {n: p.detach().full_tensor().numpy() if hasattr(p, "full_tensor")
                else p.detach().numpy() for n, p in trainer.model.named_parameters()}
    finally:
        trainer.close()


class Trained:
    """A run that has learnt its examples by heart. rows: of the data; run, exported: folders."""

    def __init__(self, root: Path, demo: Path) -> None:
        rows = [json.loads(line) for line in (demo / "data.jsonl").read_text().splitlines()]
        picked = [next(r for r in rows if len(r["images"]) == i and len(r["audios"]) == a)
                  for i, a in ((1, 0), (0, 1), (1, 1))]
        for row in picked:
            row["conversations"] = row["conversations"][:2]
        both = picked[2]
        both["conversations"][0]["value"] = "<image>\n<audio>\nWhat is this?"
        said = [{"from": "human", "value": TEXT}, {"from": "gpt", "value": "red red."}]
        self.rows = [{"images": [], "audios": [], "conversations": said}, *picked, both]
        data = root / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.run, self.exported, self.demo = root / "run", root / "exported", demo
        self.recipe = load_recipe("recipes/demo.yaml", [
            *TINY, f"run.dir={self.run}", "train.num_steps=36", "train.batch_size=4",
            "train.lr=1e-2", "data.num_validation=1", "train.sample_every=36",
            f"data.tokenizer={demo / 'tokenizer.json'}", "launch.nproc_per_node=1",
            f"data.sources=[{{path: {data}, media_root: {demo}}}]", "data.path="])
        [self.weights] = run_ranks(learnt, 1, self.recipe)
        assert dispatch(["export", str(self.run), "--out", str(self.exported)]) == 0

    def asked(self, row: dict) -> list[str]:
        """The arguments that ask what a row asks."""
        media = [(f"--{kind}", str(self.demo / name)) for kind in ("image", "audio")
                 for name in row[f"{kind}s"]]
        return [*(word for pair in media for word in pair), row["conversations"][0]["value"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_corpus) -> Trained:
    return Trained(tmp_path_factory.mktemp("generate"), demo_corpus)


def answered(capsys, folder: Path, *argv: str) -> tuple[str, str]:
    """(answer, what is said beside it) of `orchmllm generate`."""
    capsys.readouterr()
    assert dispatch(["generate", str(folder), *argv]) == 0
    said = capsys.readouterr()
    return said.out.removesuffix("\n"), said.err


def test_a_run_answers_what_it_has_learnt_and_stops(trained, capsys):
    [checkpoint] = (trained.run / "checkpoints").glob("step_*")
    for row in trained.rows:
        expected = row["conversations"][1]["value"]
        for folder in (trained.run, checkpoint, trained.exported):
            answer, said = answered(capsys, folder, *trained.asked(row))
            assert answer == expected and "cut off" not in said
    assert answered(capsys, trained.run, TEXT)[1].startswith(f"checkpoint {checkpoint}\n")
    answer, said = answered(capsys, trained.run, TEXT, "--max-tokens", "1")
    assert answer == "red" and "1 in it: cut off at --max-tokens 1" in said
    [line] = read_rows(trained.run / "samples.jsonl")  # without a cache, in training
    row = trained.rows[-1]["conversations"]
    assert (line["answer"], line["expected"], line["ended"]) == (
        row[1]["value"], row[1]["value"], True)


@torch.no_grad()
def test_the_export_answers_the_same_in_transformers(trained, capsys):
    """With AutoTokenizer and its chat template for text; with media by embeddings made by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    llm = AutoModelForCausalLM.from_pretrained(trained.exported / "llm")
    tokenizer, of_llm = (AutoTokenizer.from_pretrained(trained.exported / name)
                         for name in ("tokenizer", "llm"))

    def told(**given) -> str:
        ids = llm.generate(**given, do_sample=False, max_new_tokens=50)[0].tolist()
        assert ids[-1] == llm.config.eos_token_id == llm.generation_config.eos_token_id
        return tokenizer.decode(ids, skip_special_tokens=True)

    for question in (TEXT, "Count from one to two."):
        messages = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                              return_dict=True, return_tensors="pt")
        assert of_llm.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == (
            given["input_ids"][0].tolist())
        by_hand = told(inputs_embeds=llm.get_input_embeddings()(given["input_ids"]),
                       attention_mask=given["attention_mask"])
        assert answered(capsys, trained.run, question)[0] == by_hand
        assert answered(capsys, trained.exported / "llm", question, "--tokenizer",
                        str(trained.exported / "tokenizer"))[0] == by_hand
    model = MultimodalModel(trained.recipe.model)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in trained.weights.items()})
    row = trained.rows[-1]
    image, clip = (str(trained.demo / row[key][0]) for key in ("images", "audios"))
    geometry = trained.recipe.model.vision.geometry
    pixels = decode_image(Medium(VISION, image, image), geometry)
    grid = [1, *(side // geometry.patch_size for side in geometry.resized(
        *upright(image))[::-1])]
    mel = decode_audio(Medium(AUDIO, clip, clip), trained.recipe.model.audio.geometry)
    features = [model.vision(pixels, np.array([grid]), SequenceLengths.from_lengths([len(pixels)])),
                model.audio(mel, SequenceLengths.from_lengths([len(mel)]))]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "@@\n@@\nWhat is heard?"}], add_generation_prompt=True,
        tokenize=False)
    pieces = [llm.get_input_embeddings()(torch.tensor(tokenizer.encode(
        piece, add_special_tokens=False))) for piece in text.split("@@")]
    x = torch.cat([pieces[0], features[0], pieces[1], features[1], pieces[2]]).unsqueeze(0)
    argv = ["--image", image, "--audio", clip, "What is heard?"]
    answer, said = answered(capsys, trained.run, *argv)
    assert f"{x.shape[1]} tokens before the answer, " in said
    assert answer == told(
        inputs_embeds=x, attention_mask=torch.ones(x.shape[:2], dtype=torch.long))


def test_a_question_becomes_what_training_sees(trained):
    dataset, known = build_dataset(trained.recipe), open_trained(trained.run, None, print)
    for k, row in enumerate(trained.rows):
        want, _ = prompt_of(dataset.load(k), dataset.layout(k))
        media = [Medium(modality, name, str(trained.demo / name))
                 for modality, key in ((VISION, "images"), (AUDIO, "audios")) for name in row[key]]
        written = row["conversations"][0]["value"]
        for question in {written, re.sub("^(<image>\n)?(<audio>\n)?", "", written)}:
            if "<" in question and question != written:
                continue  # its media are not before it
            got = read_prompt(question, media, known)
            assert torch.equal(got.token_ids, want.token_ids)
            assert (got.segments == want.segments).all() and got.media.keys() == want.media.keys()
            assert all(torch.equal(got.media[s], want.media[s]) for s in want.media)


def test_the_llm_answers_as_the_docs_say(trained, monkeypatch):
    text = (ROOT / "docs/weights.md").read_text(encoding="utf-8")
    [code] = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "AutoTokenizer" in c]
    monkeypatch.chdir(trained.exported.parent)
    names: dict = {}
    exec(code, names)
    assert TEXT in code and names["answer"] == "red red."
    assert names["ids"][0, -1] == names["llm"].config.eos_token_id


def upright(path: str) -> tuple[int, int]:
    from PIL import ImageOps

    return ImageOps.exif_transpose(Image.open(path)).size


@pytest.mark.slow
def test_drawn_tokens_depend_on_the_seed_alone(trained, capsys):
    drawn = [answered(capsys, trained.run, "Repeat: blue.", "--temperature", "5", "--seed", seed,
                      "--max-tokens", "12")[0] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy, certain = (answered(capsys, trained.run, "Repeat: blue.", "--max-tokens", "12", *more)
                       for more in ((), ("--temperature", "5", "--top-p", "1e-6")))
    assert greedy == certain


@pytest.mark.parametrize("argv, text", [
    (["--image", "none.jpg", "What?"], "none.jpg (segment 1): the file is missing"),
    (["--image", "{data}", "What?"], "data.jsonl (segment 1): "),
    (["<image> What?"], "1 <image> placeholders but 0 paths"),
    (["--tokenizer", "none", "What?"], "none: no such tokenizer file")])
def test_what_cannot_be_answered_is_one_line(trained, argv, text, capsys):
    argv = [a.format(data=trained.run.parent / "data.jsonl") for a in argv]
    assert dispatch(["generate", str(trained.run), *argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and text in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("error: ")


def test_another_tokenizer_than_that_of_the_training_is_warned_of(trained, tmp_path, capsys):
    given = write_tokenizer(tmp_path)
    said = answered(capsys, trained.run, TEXT, "--tokenizer", str(given), "--max-tokens", "1")[1]
    assert f"warning: --tokenizer {given} differs from the one of the training" in said


def test_a_folder_without_a_model_names_what_can_be_given(tmp_path, capsys):
    assert dispatch(["generate", str(tmp_path), "What?"]) == 2
    assert f"error: {tmp_path} is no run.dir with checkpoints, no" in capsys.readouterr().err
