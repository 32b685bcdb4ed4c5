"""`orchmllm generate` of a folder of transformers: a model of images and text, its processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from orchmllm.cli import dispatch
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe, RunConfig, SourceConfig, TrainConfig
from orchmllm.data.stream import open_dataset
from orchmllm.data.text.model_folder import load_processor
from orchmllm.data.text.tokenizer import ChatTokenizer
from tests.lib.composed import write_composed
from tests.lib.ranks import run_ranks
from tests.lib.resume import flip
from tests.lib.tiny_models import shrink
from tests.lib.tokenizers import SPECIAL, write_tokenizer
from tests.lib.training import train
from tests.lib.videos import write_video
from tests.lib.whole_folders import write_clip
from tests.lib.whole_folders import write_model as write_folder
from tests.sharding.test_composed import write_rows

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write_model(folder: Path) -> None:
    """A tiny random LLaVA with its processor."""
    from transformers import (
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(write_tokenizer(folder, (*SPECIAL, "<image>"))),
        eos_token="<|im_end|>", pad_token="<|endoftext|>")
    side = {"height": 16, "width": 16}
    LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=side), tokenizer, patch_size=4,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
        image_token="<image>", chat_template=TEMPLATE).save_pretrained(folder)
    config = shrink(LlavaConfig(), {"text_config.vocab_size": 400})
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.5)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


@pytest.mark.slow
@torch.no_grad()
def test_a_model_of_transformers_answers_as_it_does_there(tmp_path, capsys, monkeypatch):
    """Also with the adapters of a folder of peft's."""
    import peft
    from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2AudioConfig

    write_model(tmp_path)
    path = tmp_path / "image.png"
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    given = processor.apply_chat_template([{"role": "user", "content": [
        {"type": "image", "image": Image.open(path)}, {"type": "text", "text": "What is drawn?"}]}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    ids = model.generate(**given, do_sample=False, max_new_tokens=16)
    answers = []
    for media in (["--image", str(path)], []):
        capsys.readouterr()
        assert dispatch(["generate", str(tmp_path), *media, "What is drawn?", "--max-tokens",
                         "16"]) == 0
        answers.append(capsys.readouterr().out.removesuffix("\n"))
    want = processor.decode(ids[0, given["input_ids"].shape[1]:], skip_special_tokens=True)
    assert answers[0] == want != answers[1]
    tuned = peft.get_peft_model(model, peft.LoraConfig(
        target_modules=["q_proj"], lora_alpha=64, init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapters")
    ids = tuned.generate(**given, do_sample=False, max_new_tokens=16)
    assert dispatch(["generate", str(tmp_path / "adapters"), "--image", str(path), "What is drawn?",
                     "--max-tokens", "16"]) == 0
    found = capsys.readouterr().out.removesuffix("\n")
    assert found == processor.decode(
        ids[0, given["input_ids"].shape[1]:], skip_special_tokens=True) != want
    monkeypatch.setitem(sys.modules, "peft", None)
    assert dispatch(["generate", str(tmp_path / "adapters"), "What is drawn?"]) == 2
    assert "need the package peft, which is not installed: pip" in capsys.readouterr().err
    clip = str(tmp_path / "a.wav")
    soundfile.write(clip, np.zeros(1600), 16000)
    assert dispatch(["generate", str(tmp_path), "--audio", clip, "What is heard?"]) == 2
    assert "the model takes images alone" in capsys.readouterr().err
    Qwen2AudioConfig().save_pretrained(tmp_path)
    (tmp_path / "orchmllm.json").write_text("{}")  # as in an export
    assert dispatch(["generate", str(tmp_path), "What is heard?"]) == 2
    assert "its processor cannot be read" in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.whole
@pytest.mark.parametrize("family, flag", [
    ("qwen2_5_vl", "--image"), pytest.param("qwen2_audio", "--audio", marks=pytest.mark.slow),
    pytest.param("qwen2_5_omni", "--audio", marks=pytest.mark.slow),
    pytest.param("qwen3_vl", "--video", marks=pytest.mark.slow)])
def test_media_are_read_as_in_training(family, flag, tmp_path, capsys):
    """A row of data with the same question has the same ids and tensors before its answer. Where
    videos are taken, too, the processor of the folder would need torchvision."""
    model = write_folder(family, tmp_path)
    kind = flag.removeprefix("--")
    path = tmp_path / {"video": "v.mp4", "audio": "a.wav", "image": "i.png"}[kind]
    if kind == "video":
        write_video(path, count=12, rate=8, size=(56, 56))
    elif kind == "audio":
        write_clip(path, 0.7, np.random.default_rng(0))
    else:  # with transparent pixels
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 84, 4), np.uint8)).save(path)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [
        {"role": "user", "content": [{"type": kind, kind: path.name},
                                     {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "b"}]}) + "\n")
    chosen = ["--video-fps", "4", "--video-max-frames", "5"] if kind == "video" else []
    assert dispatch(["generate", str(tmp_path), flag, str(path), "What is it?",
                     "--max-tokens", "6", *chosen]) == 0
    answer = capsys.readouterr().out.removesuffix("\n")
    source = SourceConfig(path=str(tmp_path / "data.jsonl"), video_fps=4.0, video_max_frames=5)
    example = open_dataset(DataConfig(sources=(source,)), str(tmp_path), seed=0).load(0)
    first = int((example.labels != -100).nonzero()[0])
    ids = example.input_ids[None, :first]
    media = {n: v[:, :first] if n.endswith("type_ids") else v for n, v in example.media.items()}
    assert media
    out = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **media,
                                do_sample=False, max_new_tokens=6)
    processor, _ = load_processor(tmp_path)
    assert answer == processor.decode(out[0, first:], skip_special_tokens=True)
    assert dispatch(["generate", str(tmp_path), "What is a <end>?"]) == 2  # without media, too
    assert "its text contains the special token <end>" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        sys.exit(dispatch(["generate", str(tmp_path), flag, "none", "What is it?"]))
    assert stop.value.code == 2 and "the file is missing" in capsys.readouterr().err


def trained(world, folder: Path) -> None:
    """One step on the rows of test_composed."""
    train(world, Recipe(
        run=RunConfig(dir=str(folder / "run")), model=ModelConfig(pretrained=str(folder / "model")),
        data=DataConfig(path=str(folder / "data.jsonl"), index_dir=str(folder / "index")),
        train=TrainConfig(num_steps=1, batch_size=2)))


@pytest.mark.dist
def test_a_run_answers_as_its_export_does(tmp_path, capsys):
    """The export keeps what its folder says of generating, and tells of another tokenizer."""
    name = "siglip_whisper_qwen2"
    write_composed(name, tmp_path / "model")
    write_rows(tmp_path, name)
    model = tmp_path / "model"
    settings = model / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()),
                                    "renormalize_logits": True, "eos_token_id": 3,
                                    "repetition_penalty": 9.0}))
    run_ranks(trained, 1, tmp_path)
    media = ["--image", str(next(tmp_path.glob("*.png"))), "--audio", str(next(
        tmp_path.glob("*.wav")))]
    assert dispatch(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    end = ChatTokenizer(model).end_id
    for folder in (tmp_path / "out", tmp_path / "out/llm"):
        written = json.loads((folder / "generation_config.json").read_text())
        assert written["renormalize_logits"] and written["eos_token_id"] == [3, end]
    answers = []
    for folder in ("run", "out"):
        capsys.readouterr()
        assert dispatch(["generate", str(tmp_path / folder), "What is it?", "--max-tokens", "9",
                         *media]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and len(answers[0]) > 5
    asked = ["generate", str(tmp_path / "out/llm"), "What is it?", "--max-tokens", "1"]
    assert dispatch(asked) == 0  # of text alone
    assert "1 in it: cut off at" in capsys.readouterr().err
    assert dispatch([*asked, *media]) == 2
    assert "is a qwen2: only text is given to it" in capsys.readouterr().err

    export = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "again")]
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("<turn>", "<end><turn>"))
    assert dispatch(export) == 0
    assert "is not the one that the checkpoint was trained with" in capsys.readouterr().out
    asked = ["generate", str(tmp_path / "run"), "What is it?", "--max-tokens", "1"]
    dispatch(asked)
    assert "is not the one that the checkpoint was trained with" in capsys.readouterr().err

    model.rename(tmp_path / "moved")
    for command in (asked, [*export, "--overwrite"]):
        assert dispatch(command) == 2
        told = f"error: {model}, the folder of the model that the checkpoint is of, is not there"
        assert told in capsys.readouterr().err
    (tmp_path / "moved").rename(model)
    flip(next((tmp_path / "run").rglob("*.safetensors")))
    assert dispatch(asked) == 2
    assert ".safetensors is not what was saved" in capsys.readouterr().err
