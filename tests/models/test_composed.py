"""Composed models in one process: against their parts called by hand, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.config.model import ModelConfig
from orchmllm.hf.folder import PARTS, open_folder
from orchmllm.models.flops import Lengths
from orchmllm.models.whole_flops import phase_work
from orchmllm.tools.compose.command import main
from orchmllm.tools.compose.write import compose
from orchmllm.tools.export.whole import save_model
from tests.lib import composed
from tests.lib.commands import python

pytestmark = pytest.mark.whole
TALK = [{"role": "user", "content": [{"type": "text", "text": "What is"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "the red row"}]}]


def given(processor, hears: bool, shows: bool) -> dict:
    """Two images of unlike sizes and two clips, of those that the model takes."""
    rng = np.random.default_rng(0)
    talk = json.loads(json.dumps(TALK))
    talk[0]["content"] = [*[{"type": "image"}] * 2 * shows, *talk[0]["content"],
                          *[{"type": "audio"}] * 2 * hears]
    text = processor.apply_chat_template(talk, tokenize=False)
    images = [Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8))
              for h, w in ((40, 90), (64, 50))]
    clips = [rng.standard_normal(n).astype(np.float32) for n in (9_000, 3_500)]
    out = processor(text=[text], images=[images] if shows else None, audio=clips if hears else None,
                    audio_kwargs={"sampling_rate": 16_000}, return_tensors="pt", padding=True,
                    max_length=1_000)  # which texts alone are to follow
    return {n: v.double() if v.is_floating_point() else v for n, v in out.items()}


def features(model, given: dict) -> dict[int, list[torch.Tensor]]:
    """token -> rows of features, by the parts, one medium and one square of patches at a time."""
    inner, config, found = model.model, model.config, {}
    if "image_grid_thw" in given:
        sizes = given["image_grid_thw"].prod(1).tolist()
        found[config.image_token_id] = [
            inner.vision_projector(inner.vision_tower(pixels, grid_thw=grid[None]).pooler_output)
            for pixels, grid in zip(given["pixel_values"].split(sizes), given["image_grid_thw"],
                                    strict=True)]
    elif "pixel_values" in given:
        found[config.image_token_id] = []
        for tile in given["pixel_values"]:
            states = inner.vision_tower(tile[None]).last_hidden_state[0]
            patches = states[len(states) - 16:].reshape(4, 4, -1)
            found[config.image_token_id] += [
                inner.vision_projector(torch.cat([
                    patches[2 * row + i, 2 * column + j] for i in (0, 1) for j in (0, 1)])[None])
                for row in (0, 1) for column in (0, 1)]
    if "input_features" in given:
        found[config.audio_token_id] = []
        mask_of = given["feature_attention_mask" if config.audio_packed else "input_features_mask"]
        for window, mask in zip(given["input_features"], mask_of, strict=True):
            positions = (int(mask.sum()) + 1) // 2
            states = (composed.alone(composed.stock_whisper(inner.audio_tower),
                                     window[:, : int(mask.sum())]) if config.audio_packed
                      else inner.audio_tower(window[None]).last_hidden_state[0])
            states = F.pad(states, (0, 0, 0, 1))
            found[config.audio_token_id] += [
                inner.audio_projector(states[k: k + 2].reshape(1, -1))
                for k in range(0, positions, 2)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", [
    "transformers import Qwen2ForCausalLM",
    "transformers.models.whisper.modeling_whisper import WhisperEncoder"])
def test_a_model_of_transformers_is_imported_after_orchmllm(first):
    """Its layers import the tables of classes, with ours, before they are there themselves."""
    done = python("-c", f"import orchmllm; from {first}; from transformers import "
                  "AutoModelForMultimodalLM; print([config.model_type for config in "
                  "AutoModelForMultimodalLM._model_mapping if 'orchmllm' in config.model_type])")
    assert done.stdout == "['orchmllm_composed']\n", done.stderr


@pytest.mark.parametrize("name", [
    name if "whisper" in name or "dinov2" in name else pytest.param(name, marks=pytest.mark.slow)
    for name in composed.COMPOSED])
def test_the_model_is_its_parts_called_by_hand(name, tmp_path):
    """After pickle, with which it goes to other processes. And generates by itself, with its cache,
    what it makes of whole sequences."""
    tower, hears, *_ = composed.COMPOSED[name]
    composed.write_composed(name, tmp_path / "model")
    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64, experts_implementation="eager")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model", backend="pil")
    model, processor = pickle.loads(pickle.dumps((model, processor)))
    inputs = given(processor, bool(hears), bool(tower))
    ids, config = inputs["input_ids"][0], model.config
    media = features(model, inputs)
    assert media.keys() == {t for t in (config.image_token_id, config.audio_token_id) if t}
    row = model.get_input_embeddings()(ids.clone().masked_fill_(
        sum(ids == token for token in media).bool(), 0))
    for token, rows in media.items():
        rows = torch.cat(rows)
        assert len(rows) == int((ids == token).sum()) > 2
        row = row.index_put(((ids == token).nonzero()[:, 0],), rows)
    states = model.model.language_model(inputs_embeds=row[None]).last_hidden_state
    wanted = states @ model.lm_head.weight.T
    found = model(**inputs).logits
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is (
        config.text_config.tie_word_embeddings)
    out = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    check_beams(model, inputs)
    for _ in range(3):
        longer = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        token = model(**longer).logits[:, -1:].argmax(-1)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], token], 1)
    assert torch.equal(out, inputs["input_ids"])


def check_beams(model, inputs: dict) -> None:
    """Two examples, of which the second has no media: all beams of each are given its own."""
    media = {n: v for n, v in inputs.items() if n not in ("input_ids", "attention_mask")}
    ids = torch.cat([inputs["input_ids"], torch.full_like(inputs["input_ids"], 5)])
    told = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media}
    seen = []
    with model.model.language_model.register_forward_pre_hook(
            lambda _, args, given: seen.append(given["inputs_embeds"]), with_kwargs=True):
        model(**told)
        model.generate(**told, num_beams=3, do_sample=False, max_new_tokens=1)
    assert torch.equal(seen[1], seen[0].repeat_interleave(3, 0))
    how = {"max_new_tokens": 3, "min_new_tokens": 3, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(**told, **how),
                       model.generate(**told, **how, use_cache=False))


def test_a_folder_that_got_weights_is_read_by_them(tmp_path):
    """Not by the links to the parts, which a save_pretrained leaves there; and it has a name."""
    composed.write_composed("whisper_qwen3", tmp_path / "model", linked=True)
    kind = transformers.AutoModelForMultimodalLM
    model, _ = kind.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert model.name_or_path == model.config.name_or_path == str(tmp_path / "model")
    torch.nn.init.ones_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "model")
    again = kind.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "model" / PARTS).is_file()
    stored = open_folder(tmp_path / "model")
    assert {tensor.file.parent for tensor in stored.values()} == {tmp_path / "model"}


def test_an_export_keeps_what_transformers_would_refuse_or_forget(tmp_path):
    """Settings of generate that do not suit each other, more chat templates, and the dtype."""
    composed.write_composed("whisper_qwen3", tmp_path / "model", linked=True)
    settings = {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/tools.jinja").write_text("tools")
    model = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    save_model(model.bfloat16(), 0, tmp_path / "model", 10**9, tmp_path / "out", print)
    for folder in (tmp_path / "out", tmp_path / "out/llm"):
        written = json.loads((folder / "generation_config.json").read_text())
        assert written["temperature"] == 0.6 and 2 in written["eos_token_id"]
        assert (folder / "additional_chat_templates/tools.jinja").read_text() == "tools"
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_links_are_followed_from_where_the_folder_is(tmp_path):
    parts = composed.write_parts("whisper_qwen3", tmp_path / "parts")
    (tmp_path / "far/away/disk").mkdir(parents=True)
    (tmp_path / "disk").symlink_to(tmp_path / "far/away/disk")
    compose(parts, tmp_path / "disk/model")
    assert len(open_folder(tmp_path / "disk/model")) > 20
    shutil.rmtree(parts.audio)
    with pytest.raises(ValueError, match=r"parts.json names .*audio: .*: put the part there again"):
        open_folder(tmp_path / "disk/model")


@pytest.mark.parametrize("name", [
    "siglip_whisper_qwen2", *(pytest.param(name, marks=pytest.mark.slow)
                              for name in composed.COMPOSED if name != "siglip_whisper_qwen2")])
def test_weights_are_those_in_the_folders_of_the_parts(name, tmp_path):
    parts = composed.write_composed(name, tmp_path / "model", linked=True)
    keys = {"dtype": torch.float64}
    model = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "model", **keys)
    inner = model.model
    assert not [*(tmp_path / "model").glob("*.safetensors")]
    llm = transformers.AutoModelForCausalLM.from_pretrained(parts.llm, **keys)
    pairs = [(inner.language_model, llm.model), (model.lm_head, llm.lm_head)]
    if parts.vision:
        whole = transformers.AutoModel.from_pretrained(parts.vision, **keys)
        pairs.append((inner.vision_tower, whole.get_encoder("image")))
    if parts.audio:
        whole = transformers.AutoModel.from_pretrained(parts.audio, **keys)
        pairs.append((inner.audio_tower, whole.get_encoder()))
    for found, wanted in pairs:
        found, wanted = found.state_dict(), wanted.state_dict()
        assert found.keys() == wanted.keys() and found
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_what_cannot_be_composed_is_one_line(tmp_path, capsys):
    parts = composed.write_parts("qwen2_vl_whisper_llama", tmp_path)
    capsys.readouterr()

    def told(*more: str, llm: Path = parts.llm) -> str:
        assert main(["--llm", str(llm), "--vision", str(parts.vision), "--audio", str(parts.audio),
                     "--out", str(tmp_path / "out"), *more]) == 2
        assert not (tmp_path / "out").exists()
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    assert "takes images of any size: leave --tiles out" in told("--tiles", "4")
    assert "is no causal LLM of transformers" in told(llm=parts.vision)
    template = parts.llm / "chat_template.jinja"
    saved = template.read_text()
    template.write_text(saved.replace("message.content", "(message | string)"))
    assert "its chat template cannot write a question and an answer" in told()
    template.unlink()
    assert "has no chat template" in told()
    template.write_text(saved)
    config = json.loads((parts.llm / "config.json").read_text())
    (parts.llm / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert f"{parts.llm} lacks weights of model.language_model, such as" in told()
    (parts.llm / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "but lm_head.weight and model.embed_tokens.weight differ" in told()
    (parts.llm / "config.json").write_text(json.dumps({**config, "hidden_size": "x"}))
    assert f"{parts.llm}: its Config cannot be read" in told()
    (parts.llm / "config.json").write_text(json.dumps(config))
    part = dict(vocab_size=99, num_hidden_layers=1, num_attention_heads=2)
    for kind, found in (("Phi", "phi with lm_head.bias"), ("GPT2", "gpt2"),
                        ("GPTNeoX", "gpt_neox")):
        getattr(transformers, f"{kind}Config")(**part).save_pretrained(tmp_path / "other")
        shutil.copytree(parts.llm, tmp_path / "other", dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("config.json"))
        assert f"is a {found}: a composition needs an LLM with a table" in told(
            llm=tmp_path / "other")
    weights = [folder / "model.safetensors" for folder in (parts.llm, parts.vision, parts.audio)]
    for path in weights:
        path.rename(path.with_name("pytorch_model.bin"))
    assert f"{parts.vision} has no weights in safetensors: copy" in told()
    for path in weights:
        path.with_name("pytorch_model.bin").rename(path)
    shutil.rmtree(parts.audio)
    assert f"{parts.audio}: no such folder (nothing is downloaded)" in told()
    compose(parts._replace(audio=None), tmp_path / "out")


@pytest.mark.slow
def test_a_tower_is_counted_at_the_size_of_image_that_it_gets(tmp_path):
    """Which is that of its image processor; a tower that takes only its own is refused with it."""
    composed.write_composed("dinov2_qwen2", tmp_path / "model")
    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model.model.get_image_features(torch.zeros(2, 3, 28, 28))
    lengths = Lengths(*np.array([[16, 16], [16, 16], [4, 4]]))
    work = phase_work("vision", ModelConfig(pretrained=str(tmp_path / "model")), lengths)
    assert work.forward.sum() == pytest.approx(counter.get_total_flops(), rel=1e-9)

    parts = composed.write_parts("clip_tiled_qwen3_moe", tmp_path)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 35}, crop_size={"height": 35, "width": 35}
    ).save_pretrained(parts.vision)
    with pytest.raises(ValueError, match="images of 35 x 35 pixels, which its tower refuses"):
        compose(parts, tmp_path / "out")
    assert not (tmp_path / "out").exists()
