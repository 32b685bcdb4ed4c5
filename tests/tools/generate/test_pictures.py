"""Models that make images, around training: composed, exported, and asked for pictures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm.batch import SequenceLengths
from orchmllm.cli import dispatch
from orchmllm.composition.codec import Codec
from orchmllm.composition.generator import Generator, draw
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.made import Made
from orchmllm.data.media.medium import Medium
from orchmllm.data.media.shapes import Size
from orchmllm.data.text.processor import Processor
from orchmllm.plan.layout import MADE, VISION
from orchmllm.tools.compose.write import _generator_config, compose
from orchmllm.tools.generate.pictures import write_pictures
from tests.lib import composed
from tests.lib.ranks import run_ranks
from tests.lib.training import train
from tests.sharding.test_generator import settings, write_folder

pytestmark = pytest.mark.whole


def config(**transformer) -> dict:
    return {"side": 4, "max_pixels": 400, "condition_dropout": 0.0, "token_id": 9, "transformer": {
        "_class_name": "LTXVideoTransformer3DModel", "in_channels": 48, "out_channels": 48,
        "num_attention_heads": 2, "attention_head_dim": 12, "cross_attention_dim": 24,
        "num_layers": 1, "caption_channels": 20, **transformer}}


def test_images_are_cut_into_squares_and_put_together_again():
    made = Made("<made>", 9, 4, 20 * 20)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (13, 27, 3), np.uint8))
    grid = made.grid(Size(image.height, image.width))
    assert grid == (3, 6) and made.grid(Size(400, 100)) == (10, 2)
    assert made.grid(Size(2, 900)) == (1, 25)  # no side vanishes
    codec = Codec(4)
    rows = codec.encoded(made.squares(image, grid)["squares"], np.array([[1, *grid]]),
                         torch.float32)
    assert rows.shape == (18, 48) and -1 <= rows.min() and rows.max() <= 1
    shown = image.resize((24, 12), Image.Resampling.LANCZOS)
    assert np.array_equal(codec.decoded(rows, grid), np.asarray(shown))


def test_images_of_turns_that_are_not_learnt_are_not_made():
    image = Medium(VISION, "a.png")
    turns = Made("<made>", 9, 4, 400).told(tuple(
        Turn(role, (image,), learnt) for role, learnt in (
            ("user", False), ("assistant", False), ("assistant", True))))
    assert [turn.parts[0].modality for turn in turns] == [VISION, VISION, MADE]


def test_a_vae_that_decodes_what_it_encodes(tmp_path):
    """Latents of several images are those of each, and go back to where they came from."""
    import diffusers

    parts = composed.write_parts("whisper_qwen3", tmp_path, generator=tmp_path / "generator",
                                 vae=tmp_path / "vae", side=4)
    assert parts.vae.is_dir()
    codec = Codec.of(tmp_path, 4, torch.device("cpu"), torch.float32)
    assert (codec.shrinks, codec.channels) == (2, 12)
    rng = torch.Generator().manual_seed(0)
    squares = torch.randint(0, 256, (7, 48), generator=rng, dtype=torch.uint8)
    grids = np.array([[1, 2, 3], [1, 1, 1]])
    both = codec.encoded(squares, grids, torch.float32)
    assert torch.equal(both[6:], codec.encoded(squares[6:], grids[1:], torch.float32))
    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae").eval()
    pixels = Codec(4).decoded(squares[:6].float() / 127.5 - 1, (2, 3))
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(image).latent_dist.mode()
        wanted = vae.decode(latents).sample[0].clamp(-1, 1)
    found = codec.decoded(both[:6], (2, 3))
    assert np.abs(found - ((wanted + 1) * 127.5).permute(1, 2, 0).numpy()).max() <= 0.51
    with pytest.raises(ValueError, match="side 5 is no multiple"):
        Codec.of(tmp_path, 5, torch.device("cpu"), torch.float32)


def test_attention_that_sees_another_image_is_noticed(monkeypatch):
    part = Generator(config(), 8)
    assert part.compared() < 1e-6
    from orchmllm.composition import generator

    whole = generator.packed_attention
    monkeypatch.setattr(generator, "packed_attention", lambda q, k, v, items, *, causal, keys:
                        whole(q, k, v, type(items).from_lengths([items.total]), causal=causal,
                              keys=keys and type(items).from_lengths([keys.total])))
    with pytest.raises(ValueError, match="makes something else of images in one row"):
        part.compared()


def test_transformers_that_take_no_packed_rows_are_refused(tmp_path):
    for name in ("FluxTransformer2DModel", "NoSuchModel", ""):
        with pytest.raises(ValueError, match="LTXVideoTransformer3DModel"):
            Generator(config(_class_name=name), 8)
    part = Generator(config(in_channels=12), 8)
    with pytest.raises(ValueError, match="has 48 numbers, and the generator takes 12"):
        part.load_codec(None, torch.device("cpu"), torch.float32)


def test_a_flow_to_one_image_ends_there():
    """Euler's method with the flow that is known for one image; without its condition that is an
    image of zeros, so guidance multiplies it."""
    part = Generator(config(), 8)
    target = torch.rand(6, 48) * 2 - 1
    part.flow = lambda rows, times, states, *_: (rows - target * states.any()) / times[:, None]
    for guidance in (1.0, 0.0, 2.5):
        found = part.made(torch.ones(3, 8), (2, 3), 20, 5, guidance)
        assert torch.allclose(found, guidance * target, atol=1e-4)


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_is_exported_and_makes_pictures(tmp_path, capsys):
    """The folder loads with the Auto classes, and its transformer alone in diffusers."""
    import diffusers
    from transformers import AutoModelForImageTextToText

    import orchmllm  # noqa: F401

    write_folder(tmp_path, vae=tmp_path / "vae")
    [run] = settings(tmp_path / "model", train={"num_steps": 2, "warmup_steps": 0})
    first, *_ = run_ranks(train, 1, run)[0]
    assert first["generator_loss"] > 0
    recipe = str(Path(run.run.dir) / "recipe.yaml")
    for command in (["data", "stats", recipe, "--ranks", "2"],
                    ["report", run.run.dir], ["dry-run", recipe, "--ranks", "4"]):
        assert not dispatch(command)
    said = capsys.readouterr().out
    assert re.search(r"\n  made +8 +12 ", said) and "generator, squares" in said
    assert re.search(r"generator, forward and backward +\d", said)
    page = (Path(run.run.dir) / "report.html").read_text()
    assert "Imbalance, generator" in page and "Loss of images" in page
    dispatch(["export", run.run.dir, "--out", str(tmp_path / "exported")])
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported").eval()
    own = model.generator.transformer.state_dict()
    alone = diffusers.LTXVideoTransformer3DModel.from_pretrained(
        tmp_path / "exported" / "generator", torch_dtype=torch.float64)
    assert own.keys() == alone.state_dict().keys() and all(
        torch.equal(own[name], value) for name, value in alone.state_dict().items())
    token, lines = model.config.generator_config["token_id"], []
    args = Namespace(out=tmp_path / "p.png", size=(30, 16), steps=2, seed=0, guidance=1.5)
    for name, seed in (("p", 0), ("q", 0), ("r", 1)):
        args.out, args.seed = tmp_path / f"{name}.png", seed
        write_pictures(model, tmp_path / "exported", {"input_ids": torch.tensor([[5, 6, 7]])},
                       [8, token], args, lines.append)
    pictures = [np.asarray(Image.open(tmp_path / f"{name}.png")) for name in "pqr"]
    assert pictures[0].shape == (16, 28, 3) and "28 x 16 pixels, 2 steps" in lines[0]
    assert np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[0], pictures[2])
    args.out = tmp_path / "none.png"
    write_pictures(model, tmp_path / "exported", {}, [8], args, lines.append)
    assert lines[-1] == f"the answer has 0 images, so {args.out} is not written"
    write_pictures(model, tmp_path / "exported", {"input_ids": torch.tensor([[5]])},
                   [token, 8, token], Namespace(**{**vars(args), "out": tmp_path / "two.png",
                                                   "size": None}), lines.append)
    assert (tmp_path / "two_1.png").is_file()
    assert Image.open(tmp_path / "two_2.png").size == (24, 24)  # as large as it learnt


@pytest.mark.slow
@pytest.mark.dist
def test_the_pictures_of_the_docs_are_made(tmp_path):
    done = subprocess.run([
        sys.executable, "scripts/make_pictures.py", "--folder", tmp_path, "--first", "2",
        "--second", "50", "--out", tmp_path / "sheet.png"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "sheet.png").size == (768, 128)


@pytest.fixture(scope="module")
def composition(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor], torch.nn.Module]:
    """(The folder of a model that makes images, the weights of its generator's folder, the model).
    """
    import diffusers
    from transformers import AutoModelForMultimodalLM

    folder = tmp_path_factory.mktemp("composition")
    parts = composed.write_parts("whisper_qwen3", folder / "parts", generator=folder / "generator",
                                 side=4)
    own = diffusers.LTXVideoTransformer3DModel.from_config(
        diffusers.LTXVideoTransformer3DModel.load_config(parts.generator)).double()
    own.save_pretrained(parts.generator, max_shard_size="50KB")
    assert len(list(parts.generator.glob("*.safetensors"))) > 1
    compose(parts, folder / "model")
    model = AutoModelForMultimodalLM.from_pretrained(folder / "model", dtype=torch.float64)
    return folder / "model", own.state_dict(), model


def test_weights_of_a_generator_are_read_from_its_folder(composition):
    """As diffusers names their files, beside those of the other parts; its connector is drawn."""
    _, own, model = composition
    found = model.generator.transformer.state_dict()
    assert all(torch.equal(found[name], value) for name, value in own.items())
    assert model.generator.connector.weight.std() > 0


def test_an_image_is_made_of_the_states_up_to_its_own_token(composition, tmp_path, monkeypatch):
    folder, _, model = composition
    settings, made, told = model.config.generator_config, model.generator.made, []
    assert settings["condition_dropout"] > 0  # --guidance needs what it makes of no condition
    monkeypatch.setattr(model.generator, "made", lambda states, *args: told.append(states) or made(
        states, *args))
    args = Namespace(out=tmp_path / "a.png", size=None, steps=1, seed=0, guidance=1.0)
    asked, answer = torch.tensor([[5, 6, 7]]), [8, settings["token_id"], 9]
    write_pictures(model, folder, {"input_ids": asked}, answer, args, lambda line: None)
    ids = torch.cat([asked, torch.tensor([answer[:2]])], 1)
    [states] = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    assert torch.allclose(told[0], states, rtol=0, atol=1e-12)
    args.size = (side := model.generator.codec.side) * 3, side * 2
    write_pictures(model, folder, {"input_ids": asked}, answer, args, lambda line: None)
    assert Image.open(args.out).size == args.size  # width and height


def test_a_token_that_the_tokenizer_has_not_is_told(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "model" / "config.json"
    said = json.loads(file.read_text())
    said["generator_config"]["token_id"] = 999_999
    file.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="model: its tokenizer does not have the token 999999"):
        Processor(tmp_path / "model")


def test_options_that_have_no_effect_are_refused(tmp_path, capsys):
    for words, told in (
            (["compose", "--llm", "a", "--vision", "b", "--out", "c", "--vae", "d"],
             "--vae has no effect"),
            (["compose", "--llm", "a", "--out", "c", "--generator", "d"], "--vision or --audio"),
            (["init", "x.jsonl", "--generate"], "--generate is of --demo"),
            (["generate", "x", "hm", "--size", "big"], "'big' is no size"),
            (["generate", "x", "hm", "--steps", "0"], "--steps: 0: must be at least 1"),
            (["generate", "x", "hm", "--seed", f"{2**63}"], "must be at least 0 and below 2**63"),
            (["generate", "x", "hm", "--guidance", "nan", "--out", "a.png"],
             "--guidance nan: must be a finite"),
            (["generate", "x", "hm", "--out", "a.xyz"], "--out a.xyz: .xyz is no format of images"),
            (["generate", "x", "hm", "--out", "a"], "no ending is no format of images")):
        with pytest.raises(SystemExit) as error:
            dispatch(words)
        assert error.value.code == 2 and told in capsys.readouterr().err.replace("\n", " ")
    assert dispatch(["generate", "x", "hm", "--out", "a.PNG"]) == 2
    assert capsys.readouterr().err.startswith("error: x")


def test_a_table_that_ends_before_the_token_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    parts, tokenizer = SimpleNamespace(llm=tmp_path), SimpleNamespace(
        convert_tokens_to_ids=lambda token: 20)
    with pytest.raises(ValueError, match="its table has 20 rows, and none for the token"):
        _generator_config(parts, SimpleNamespace(vocab_size=20), tokenizer)


@pytest.mark.slow
def test_a_table_without_a_row_for_the_token_is_refused(tmp_path):
    """Of an LLM with weights; without them the table is one row larger."""
    parts = composed.write_parts("whisper_qwen3", tmp_path / "parts")
    composed.write_generator(parts._replace(generator=tmp_path / "generator"))
    file = parts.llm / "config.json"
    settings = json.loads(file.read_text())
    settings["vocab_size"] = 20
    file.write_text(json.dumps(settings))
    out = subprocess.run(
        [sys.executable, "-m", "orchmllm", "compose", "--llm", str(parts.llm), "--audio",
         str(parts.audio), "--generator", str(tmp_path / "generator"), "--out",
         str(tmp_path / "model")],
        capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert out.returncode == 2 and re.search(
        "table has 20 rows, and none for the\\s+token <.image_made.>", out.stderr)


def test_times_are_told_apart_in_half_precision():
    """bfloat16 has numbers in steps of 4 between 512 and 1000."""
    part, told = Generator(config(), 8).to(torch.bfloat16), []
    part.transformer.time_embed.register_forward_pre_hook(lambda _, args: told.append(args[0]))
    rows = torch.randint(0, 256, (6, 48), dtype=torch.uint8)
    loss = part(rows, torch.randn(3, 8, dtype=torch.bfloat16), np.array([[1, 2, 3]]),
                SequenceLengths.from_lengths([3]), [7], torch.ones(1))
    time, _, _ = draw(7, 6, torch.empty(0, 48), 0.0)
    assert told[0].dtype == loss.dtype == torch.float32
    assert torch.equal(told[0], 1000 * time.expand(6))


@pytest.mark.slow
def test_a_generator_learns_what_its_condition_says():
    """Of three shades, each told by one of ten states, the one that is asked for is made."""
    torch.manual_seed(0)
    part = Generator({**config(num_layers=2, attention_head_dim=32, num_attention_heads=4,
                               cross_attention_dim=128), "condition_dropout": 0.1}, 64)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    common, told, shades = torch.randn(9, 64), torch.randn(3, 64), (20, 128, 235)
    states = [torch.cat([common, one[None]]) for one in told]
    rng, grids, lengths = np.random.default_rng(0), np.array([[1, 4, 4]] * 16), [10] * 16
    for step in range(400):
        kinds = rng.integers(0, 3, 16).tolist()
        squares = torch.cat([torch.full((16, 48), shades[k], dtype=torch.uint8) for k in kinds])
        loss = part(squares, torch.cat([states[k] for k in kinds]), grids,
                    SequenceLengths.from_lengths(lengths), [step * 16 + k for k in range(16)],
                    torch.ones(16)) / 256
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for state, shade in zip(states, shades, strict=True):
        made = part.made(state, (4, 4), 30, 5)
        assert float(made.mean()) == pytest.approx(shade / 127.5 - 1, abs=0.25)
        assert float(made.std()) < 0.2
