"""From Hugging Face folders over two sharded steps back to Hugging Face folders: every tensor is
the trained one, and transformers' own models compute what ours do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import LLMConfig, ModelConfig
from orchmllm.config.recipe import (
    CheckpointConfig,
    DataConfig,
    FsdpConfig,
    Recipe,
    RunConfig,
    TrainConfig,
)
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.sources import PretrainedError, find_sources
from orchmllm.hf.tensors import read_sharded, renamed
from orchmllm.models.attention import packed_attention
from orchmllm.models.audio import packed_conv1d
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.names import named
from orchmllm.sharding.pretrained import load_pretrained
from orchmllm.tools.export import export
from orchmllm.tools.export.command import main
from orchmllm.trainer import Trainer
from tests.lib.commands import ROOT
from tests.lib.hf_models import (
    FRAMES,
    HF_MODEL,
    from_folders,
    register_packed_attention,
    write_checkpoint,
    write_models,
)
from tests.lib.ranks import run_ranks
from tests.lib.submodules import logits
from tests.lib.synthetic import SyntheticDataset
from tests.lib.tokenizers import write_tokenizer

pytestmark = pytest.mark.dist


def recipe_of(model: ModelConfig, run_dir: Path, **changes) -> Recipe:
    base = Recipe(
        run=RunConfig(dir=str(run_dir)), data=DataConfig(path="unused", prefetch=0), model=model,
        train=TrainConfig(num_steps=2, batch_size=2, warmup_steps=0, lr=1e-2),
        fsdp=FsdpConfig(activation_checkpointing="selective"), checkpoint=CheckpointConfig())
    return replace(base, **changes)


def trained_parameters(world, recipe: Recipe) -> dict[str, np.ndarray] | None:
    """Runs the recipe on synthetic examples; returns the gathered parameters on rank 0."""
    data = SyntheticDataset(vision=recipe.model.vision.geometry, audio=recipe.model.audio.geometry)
    trainer = Trainer(recipe, world, dataset=data)
    try:
        trainer.run()
        full = {n: p.detach().full_tensor().numpy()
                for n, p in trainer.model.named_parameters()}
    finally:
        trainer.close()
    return full if world.rank == 0 else None


class Trip:
    """root/start: the folders that training on 4 ranks starts from; parameters: gathered after
    it; out: the export."""

    def __init__(self, root: Path, start: ModelConfig, ranks: int = 4,
                 fsdp: FsdpConfig | None = None, **options) -> None:
        recipe = recipe_of(start, root / "run", **({"fsdp": fsdp} if fsdp else {}))
        self.model, self.out = start, root / "exported"
        self.parameters = run_ranks(trained_parameters, ranks, recipe)[0]
        self.checkpoint = root / "run" / "checkpoints" / "step_00000002"
        self.lines: list[str] = []
        self.note = export.export(self.checkpoint, self.out, log=self.lines.append, **options)

    def exported(self, part: str) -> dict[str, Tensor]:
        folder = self.out if part == "connectors" else self.out / part
        return {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}

    def ours(self) -> MultimodalModel:
        model = MultimodalModel(replace(self.model))
        model.load_state_dict({k: torch.from_numpy(v) for k, v in self.parameters.items()})
        return model.eval()


@pytest.fixture(scope="module")
def trip(tmp_path_factory) -> Trip:
    root = tmp_path_factory.mktemp("trip")
    return Trip(root, write_models(root / "start"), max_file_bytes=40_000)


def check_tensors(trip: Trip) -> None:
    parts = {part: trip.exported(part) for part in ("vision", "audio", "llm", "connectors")}
    for part, tensors in parts.items():
        for n in named(part, trip.model):
            want = torch.from_numpy(trip.parameters[n.name]).reshape(n.shape)
            assert torch.equal(tensors.pop(n.hf), want), n
    assert set(parts["audio"]) == {"embed_positions.weight"}
    assert not (parts["vision"] or parts["llm"] or parts["connectors"])


def test_every_tensor_is_the_trained_one(trip):
    start = {k: v for f in (trip.out.parent / "start").glob("*/*.safetensors")
             for k, v in load_file(f).items()}
    check_tensors(trip)
    trained = trip.parameters["llm.hf.model.layers.0.mlp.up_proj.weight"]
    moved = np.abs(trained - start["model.layers.0.mlp.up_proj.weight"].numpy()).max()
    assert 0 < moved < 0.1  # it started there, and learnt
    assert len(list((trip.out / "llm").glob("model-*-of-*.safetensors"))) > 1
    assert not [p for p in trip.out.rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]


def test_values_that_a_dtype_does_not_have_are_refused(tmp_path):
    save_file({"w": torch.tensor([1.0, 70_000.0])}, tmp_path / "w.safetensors")
    tensor = read_sharded(tmp_path)["w"]
    assert renamed(tensor, "w", (2,), "BF16").load().dtype == torch.bfloat16
    with pytest.raises(ValueError, match="w has values that float16 does not have: export bf"):
        renamed(tensor, "w", (2,), "F16").load()


@torch.no_grad()
def test_the_llm_computes_the_same_in_transformers(trip):
    from transformers import AutoModelForCausalLM

    n = 23
    ids = torch.randint(0, 64, (1, n), generator=torch.Generator().manual_seed(1))
    seqlens = SequenceLengths.from_lengths(np.array([n]))
    ours = trip.ours().llm
    want = logits(ours, ours.embed_tokens(ids[0]), torch.arange(n), seqlens)
    hf = AutoModelForCausalLM.from_pretrained(trip.out / "llm",
                                              attn_implementation=register_packed_attention())
    assert (hf.config.bos_token_id, hf.config.eos_token_id) == (3, 5)  # of the start's folder
    assert torch.equal(hf(ids, packed_seqlens=seqlens).logits[0], want)
    stock = AutoModelForCausalLM.from_pretrained(trip.out / "llm", attn_implementation="sdpa")
    torch.testing.assert_close(stock(ids).logits[0], want, rtol=0, atol=1e-5)


class Convolution(nn.Module):
    """A convolution of Whisper as ours computes it. x: (1, channels, frames)."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.conv, self.weight, self.stride = conv, conv.weight, conv.stride

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = packed_conv1d(x[0].T, self.conv, np.array([x.shape[2]]))
        return rows.T.contiguous().unsqueeze(0)  # GELU of a transposed view has other last bits


def _unscaled(module, query, key, value, mask, *, packed_seqlens, scaling, **_):
    """packed_attention for Whisper, which scales its queries before (by 1/4 here: exact)."""
    assert scaling == 1.0
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query * query.shape[-1] ** 0.5, key, value))
    return packed_attention(q, k, v, packed_seqlens, causal=False).unsqueeze(0), None


@torch.no_grad()
def test_the_audio_encoder_computes_the_same_in_transformers(trip):
    from transformers import AttentionInterface
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    AttentionInterface.register("test_unscaled", _unscaled)
    mel = torch.randn(FRAMES, 8, generator=torch.Generator().manual_seed(1))
    want, lengths = trip.ours().audio.encode(mel, np.array([FRAMES]))
    hf = WhisperEncoder.from_pretrained(trip.out / "audio").eval()
    stock = hf(mel.T.unsqueeze(0)).last_hidden_state[0]
    torch.testing.assert_close(stock, want, rtol=0, atol=1e-5)
    hf.conv1, hf.conv2 = Convolution(hf.conv1), Convolution(hf.conv2)
    hf.set_attn_implementation("test_unscaled")
    same = hf(mel.T.unsqueeze(0), packed_seqlens=SequenceLengths.from_lengths(lengths))
    assert torch.equal(same.last_hidden_state[0], want)


def test_the_mel_extractor_is_that_of_training(trip):
    from transformers import WhisperFeatureExtractor

    from orchmllm.data.media.decode import log_mel

    extractor = WhisperFeatureExtractor.from_pretrained(trip.out / "audio")
    clip = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    want = extractor(clip, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    got = log_mel(clip, HF_MODEL.audio.geometry)
    np.testing.assert_allclose(got, want[:, :100].T, atol=1e-6)


def loaded(model: ModelConfig) -> dict[str, Tensor]:
    built = MultimodalModel(model)
    load_pretrained(built, find_sources(model))
    return {k: v.detach() for k, v in built.named_parameters()}


def test_a_run_starts_from_an_export_with_its_connectors(trip):
    model = from_folders(replace(HF_MODEL, connectors=str(trip.out / "connectors.safetensors")),
                         trip.out)
    for name, value in loaded(model).items():
        assert torch.equal(value, torch.from_numpy(trip.parameters[name])), name


def test_connectors_of_another_model_are_refused(trip):
    other = replace(HF_MODEL, vision=replace(HF_MODEL.vision, merge_size=1),
                    connectors=str(trip.out / "connectors.safetensors"))
    with pytest.raises(PretrainedError, match=r"vision.connector.norm.weight has shape \(96,\), "
                       r"expected \(24,\)"):
        find_sources(other)


def test_a_model_from_scratch_comes_back(tmp_path):
    """Replicated on two ranks (hybrid sharding); orchmllm.json describes the vision encoder, which
    has no class."""
    trip = Trip(tmp_path, HF_MODEL, ranks=2, fsdp=FsdpConfig(shard_size=1))
    check_tensors(trip)
    assert trip.note["parts"]["vision"]["class"] is None
    assert any("VisionEncoder (no class in transformers)" in x for x in trip.lines)
    model = from_folders(replace(HF_MODEL, connectors=str(trip.out / "connectors.safetensors")),
                         trip.out)
    for name, value in loaded(model).items():
        assert torch.equal(value, torch.from_numpy(trip.parameters[name])), name


def test_the_note_and_the_lines(trip):
    note = json.loads((trip.out / "orchmllm.json").read_text())
    assert note["step"] == 2 and note["model"]["llm"]["num_layers"] == 2
    assert note["parts"]["llm"]["class"] == "transformers.Qwen2ForCausalLM"
    assert trip.lines[0].endswith("every file is what was saved (SHA-256)")
    assert trip.lines[-1] == f"written: {trip.out}"
    assert any(x.startswith("warning: the export has no tokenizer") for x in trip.lines)


def run(capsys, *argv: object) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    return code, *capsys.readouterr()


def test_the_command_line(trip, tmp_path, capsys):
    """bfloat16, a tokenizer; an export is replaced only on demand, anything else never."""
    (tmp_path / "tok").mkdir()
    tokenizer = write_tokenizer(tmp_path / "tok")
    argv = [trip.checkpoint, "--out", tmp_path / "a", "--dtype", "bfloat16",
            "--tokenizer", tokenizer]
    code, out, _ = run(capsys, *argv)
    assert code == 0 and "tokenizer/ and llm/ have the tokenizer of" in out
    got = load_file(tmp_path / "a" / "llm" / "model.safetensors")["lm_head.weight"]
    want = torch.from_numpy(trip.parameters["llm.hf.lm_head.weight"])
    assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())
    code, _, error = run(capsys, *argv)
    assert code == 2 and error == (f"error: --out {tmp_path / 'a'} is an export already: add "
                                   "--overwrite to replace it\n")
    assert run(capsys, *argv, "--overwrite")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    argv[2] = tmp_path / "mine"
    code, _, error = run(capsys, *argv, "--overwrite")
    assert code == 2 and "exists and is no export: give another folder" in error
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_tokenizer_speaks_the_template_of_training(trip, tmp_path, capsys):
    from transformers import AutoTokenizer

    from orchmllm.data.formats.conversation import Turn

    (tmp_path / "tok").mkdir()
    tokenizer = write_tokenizer(tmp_path / "tok")
    run(capsys, trip.checkpoint, "--out", tmp_path / "a", "--tokenizer", tokenizer)
    hf = AutoTokenizer.from_pretrained(tmp_path / "a" / "llm")
    exact = AutoTokenizer.from_pretrained(tmp_path / "a" / "tokenizer")
    turns = [Turn("user", ("What is it?",), False), Turn("assistant", ("A circle.",), True)]
    token_ids, _, [_] = ChatTokenizer(tokenizer).tokenize(turns)
    messages = [{"role": t.role, "content": t.parts[0]} for t in turns]
    for found in (hf, exact):
        assert found.apply_chat_template(messages, return_dict=False) == token_ids.tolist()
    text = "don't, 12345 \n\n caf\u00e9 e\u0301  \u4e2d"  # not normalised as Qwen2's would be
    ours = ChatTokenizer(tokenizer).tokenizer
    assert exact.encode(text, add_special_tokens=False) == ours.encode(text).ids


def test_the_audio_encoder_is_loaded_as_the_docs_say(trip, monkeypatch):
    text = (ROOT / "docs/weights.md").read_text(encoding="utf-8")
    [code] = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "WhisperEncoder" in c]
    monkeypatch.chdir(trip.out.parent)
    names: dict = {}
    exec(code, names)
    assert names["audio"].config.d_model == trip.model.audio.hidden_size


def test_what_is_said_about_checkpoints_that_cannot_be_exported(trip, tmp_path, capsys):
    out = tmp_path / "out"

    def said(checkpoint: Path, *argv: str) -> str:
        code, _, error = run(capsys, checkpoint, "--out", out, *argv)
        assert code == 2 and not out.exists() and not (tmp_path / ".staged_out").exists()
        return error

    assert "or a folder run.dir/checkpoints/step_..." in said(trip.checkpoint.parent)
    broken = tmp_path / "step_00000002"
    shutil.copytree(trip.checkpoint, broken)
    shard = next(broken.glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert f"{shard.name} is not what was saved (size or SHA-256 differs): export" in said(broken)
    shard.unlink()
    assert "the checkpoint is not complete" in said(broken, "--no-verify")
    state = json.loads((broken / "state.json").read_text())
    state["model"]["llm"]["num_experts"] = 8
    (broken / "state.json").write_text(json.dumps(state))
    assert "newer version of orchmllm: LLMConfig.__init__() got an unexpected keyword argument " \
        "'num_experts'" in said(broken, "--no-verify")


def peak_mb(checkpoint: Path, out: Path) -> float:
    """Peak resident memory of an export in a process of its own."""
    argv = [checkpoint, "--out", out, "--no-verify", "--dtype", "bfloat16",
            "--max-file-gb", "0.3"]
    code = ("import sys; from orchmllm.tools.export.command import main; "
            "from tests.lib.process import memory_kb; "
            "code = main(sys.argv[1:]); print(memory_kb('VmHWM')); sys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code, *map(str, argv)], check=True,
                          capture_output=True, text=True, cwd=ROOT)
    return int(done.stdout.splitlines()[-1]) / 1e3


@pytest.mark.slow
def test_export_has_one_file_in_memory(tmp_path):
    """A model of more than a gigabyte takes no more memory than two files beyond a tiny one."""
    write_checkpoint(tmp_path / "tiny", HF_MODEL, 4)
    large = replace(HF_MODEL, llm=LLMConfig(
        vocab_size=32_000, num_layers=18, hidden_size=1024, intermediate_size=3072, num_heads=16,
        num_kv_heads=8))
    size = write_checkpoint(tmp_path / "large", large, 4)
    base, peak = (peak_mb(tmp_path / name, tmp_path / f"out_{name}") for name in ("tiny", "large"))
    print(f"checkpoint {size:.0f} MB: export takes {peak:.0f} MB, of a tiny one {base:.0f} MB")
    assert size > 1000 and peak - base < 600
    assert len(list((tmp_path / "out_large" / "llm").glob("model-*"))) > 1
