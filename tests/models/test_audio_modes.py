"""The audio encoder's modes: `padded` equals `packed`, `fixed` equals transformers' Whisper
encoder, and lengths, costs, FLOPs, memory and recipes know which one it is."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from orchmllm.batch import SequenceLengths
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.model import WHISPER_FRAMES, AudioConfig, LLMConfig, ModelConfig
from orchmllm.config.recipe import FsdpConfig, SourceConfig, load_recipe
from orchmllm.data.formats.open import open_source
from orchmllm.data.index import index_folder
from orchmllm.data.lengths import LengthReader
from orchmllm.data.media.decode import decode_audio
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.models import audio
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.flops import (
    Lengths,
    cost_model,
    item_rank,
    padded_lengths,
    padded_phases,
    phase_work,
    plan_spec,
)
from orchmllm.plan.assign import PhasePolicy
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import AUDIO
from orchmllm.plan.step import plan_step
from orchmllm.tools.predict.workload import batch_layout, sample_headers
from tests.lib.gradients import Case, all_gradients, reference_gradients, worst_difference
from tests.lib.memory import WIDE, measured
from tests.lib.ranks import run_ranks
from tests.lib.sources import medium_at
from tests.lib.synthetic import MODEL, SyntheticDataset, recipe
from tests.lib.tokenizers import write_tokenizer

CONFIG = AudioConfig(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_mels=8,
                     stack=3)
OUT = 24
FRAMES = [13, 1, 6, 14, 2]


def encoder(mode: str, dtype: torch.dtype = torch.float32) -> AudioEncoder:
    """Weights and biases of every parameter drawn, the same in all modes."""
    module = AudioEncoder(replace(CONFIG, mode=mode), OUT).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * 0.2)
    return module


def clips(frames: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    mel = torch.randn(sum(frames), CONFIG.num_mels, generator=generator, dtype=torch.float64)
    return mel.to(dtype).requires_grad_()


def outputs_and_gradients(mode: str, dtype: torch.dtype, frames: list[int]) -> dict:
    module, mel = encoder(mode, dtype), clips(frames, dtype)
    out = module(mel, SequenceLengths.from_lengths(frames))
    out.square().sum().backward()
    return {"output": out.detach(), "mel": mel.grad,
            **{name: p.grad for name, p in module.named_parameters()}}


def joined(tensors: dict) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tensors.values()])


@pytest.mark.parametrize("frames", [FRAMES, [5], [4, 4], [1, 1, 9]])
def test_padded_equals_packed(frames):
    """float64: each tensor to 1e-9; float32: output, and all gradients as one vector, to 1e-6."""
    want, got = (outputs_and_gradients(m, torch.float64, frames) for m in ("packed", "padded"))
    for name, tensor in want.items():
        assert float((got[name] - tensor).norm()) <= 1e-9 * float(tensor.norm()), name
    want, got = (outputs_and_gradients(m, torch.float32, frames) for m in ("packed", "padded"))
    for part in ({"output"}, want.keys() - {"output"}):
        a, b = (joined({k: x[k] for k in sorted(part)}) for x in (got, want))
        assert float((a - b).norm()) <= 1e-6 * float(b.norm())


@pytest.mark.parametrize("mode", ["padded", "fixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_clips_keep_every_parameter_attached(mode, dtype):
    module = encoder(mode, dtype)
    out = module(torch.zeros(0, CONFIG.num_mels), SequenceLengths.from_lengths([]))
    assert out.shape == (0, OUT) and out.requires_grad
    out.float().square().sum().backward()
    for name, p in module.named_parameters():
        assert p.grad is not None and not p.grad.any(), name


@pytest.mark.parametrize("mode, frames", [("padded", [13, 1, 6]), ("fixed", [WHISPER_FRAMES] * 2)])
def test_clips_do_not_see_each_other(mode, frames):
    module, mel = encoder(mode), clips(frames)
    tokens = [-(-((n + 1) // 2) // CONFIG.stack) for n in frames]
    out = module(mel, SequenceLengths.from_lengths(frames)).split(tokens)
    for i in range(len(frames)):
        (grad,) = torch.autograd.grad(out[i].square().sum(), mel, retain_graph=True)
        for j, part in enumerate(grad.split(frames)):
            assert bool(part.any()) == (i == j)


@pytest.mark.parametrize("skipped", ["after the first convolution", "in attention"])
def test_each_mask_is_needed(skipped, monkeypatch):
    real, calls = audio._real, []

    def all_real(lengths, longest):
        calls.append(longest)
        mask = real(lengths, longest)
        return mask | (len(calls) == (1 if skipped.startswith("after") else 2))

    want = outputs_and_gradients("packed", torch.float32, FRAMES)["output"]
    monkeypatch.setattr(audio, "_real", all_real)
    got = outputs_and_gradients("padded", torch.float32, FRAMES)["output"]
    assert calls == [14, 7] and float((got - want).abs().max() / want.abs().max()) > 1e-3


def whisper() -> WhisperEncoder:
    torch.manual_seed(0)
    stock = WhisperEncoder(WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
        num_mel_bins=CONFIG.num_mels, max_source_positions=WHISPER_FRAMES // 2)).eval()
    with torch.no_grad():
        for p in stock.parameters():
            if p is not stock.embed_positions.weight:
                p.normal_(std=0.2)
    return stock


@pytest.mark.parametrize("mode", ["packed", "fixed"])
def test_clips_of_a_window_are_encoded_as_by_whisper(mode):
    stock, module = whisper(), encoder(mode)
    weights = {k.replace("self_attn.", "").replace("layers.", "blocks."): v
               for k, v in stock.state_dict().items() if k != "embed_positions.weight"}
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected and all(k.startswith("connector.") for k in missing)
    frames = [WHISPER_FRAMES] * 2
    mel = clips(frames).detach()
    with torch.no_grad():
        features, positions = module.encode(mel, np.array(frames))
        want = stock(mel.view(2, WHISPER_FRAMES, -1).transpose(1, 2)).last_hidden_state
    assert positions.tolist() == [1500, 1500]
    error = (features - want.flatten(0, 1)).abs().max() / want.abs().max()
    assert float(error) <= 1e-5


def test_a_clip_that_is_no_window_is_refused():
    with pytest.raises(ValueError, match=r"must have 3000 frames, got \[2999\]"):
        encoder("fixed")(clips([2999]), SequenceLengths.from_lengths([2999]))


def test_a_decoded_clip_is_what_whisper_gets(tmp_path):
    geometry = replace(AudioConfig(), mode="fixed").geometry
    samples = np.random.default_rng(0).normal(0, 0.1, 50_000).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    want = WhisperFeatureExtractor()(samples, sampling_rate=16000, return_tensors="np")
    got = decode_audio(medium_at(tmp_path / "a.wav"), geometry).numpy()
    assert got.shape == (WHISPER_FRAMES, 80)
    np.testing.assert_array_equal(got.T, want["input_features"][0])


# lengths


def test_lengths_of_a_window():
    geometry = AudioGeometry(stack=4, window_frames=WHISPER_FRAMES)
    assert geometry == AudioConfig(stack=4, mode="fixed").geometry
    for samples in (1, 16_000, 480_000):
        lengths = geometry.segment_lengths(samples, 16_000)
        assert lengths == (3000, 1500, 375, (1, 1, 3000))
    with pytest.raises(ValueError, match=r"30.5 s is longer than the window of 30 s: .*packed"):
        geometry.segment_lengths(8 * 61_000, 16_000)
    packed = AudioConfig(stack=4).geometry
    assert packed == AudioConfig(stack=4, mode="padded").geometry  # one index serves both
    assert packed.segment_lengths(488_000, 16_000).rows == 3050


def test_a_long_clip_is_quarantined_and_the_index_knows_the_mode(tmp_path):
    write_tokenizer(tmp_path)
    for name, seconds in (("short", 1.0), ("long", 30.5)):
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(int(seconds * 16000)), 16000)
    turns = [{"from": "human", "value": "<audio>"}, {"from": "gpt", "value": "silence"}]
    (tmp_path / "data.jsonl").write_text("".join(
        json.dumps({"audios": [f"{name}.wav"], "conversations": turns}) + "\n"
        for name in ("short", "long")))
    source = open_source(SourceConfig(path=str(tmp_path)), tmp_path / "index")
    planners = {mode: LengthReader(ChatTokenizer(tmp_path), MODEL.vision.geometry,
                              replace(MODEL.audio, mode=mode).geometry)
                for mode in ("packed", "padded", "fixed")}
    short, long = planners["fixed"].plan(source.conversation, [0, 1])
    assert short.problem is None and short.layout.rows.max() == WHISPER_FRAMES
    assert "longer than the window of 30 s" in long.problem.reason
    assert long.problem.path.endswith("long.wav") and long.media == []
    assert planners["packed"].plan(source.conversation, [1])[0].problem is None
    folders = {m: index_folder(source, p, tmp_path) for m, p in planners.items()}
    assert folders["packed"] == folders["padded"] != folders["fixed"]
    with pytest.raises(MediaError, match="longer than the window"):
        decode_audio(Medium(AUDIO, str(tmp_path / "long.wav"), path=str(tmp_path / "long.wav")),
                     planners["fixed"].audio)


# cost, FLOPs, memory


def model(mode: str) -> ModelConfig:
    return ModelConfig(audio=AudioConfig(2, 64, 192, 4, stack=2, mode=mode),
                       llm=LLMConfig(300, 2, 128, 320))


def test_cost_of_a_padded_rank():
    cost = CostModel(1000, 500, padded=True)
    lengths, rank = np.array([4, 10, 3, 3]), np.array([0, 0, 2, 2])
    assert cost.of_ranks(lengths, rank, 3).tolist() == [2 * (10 + 50), 0, 2 * int(3 + 4.5)]
    assert replace(cost, padded=False).of_ranks(lengths, rank, 3).tolist() == [
        (4 + 8) + (10 + 50), 0, 2 * int(3 + 4.5)]
    assert [cost_model("audio", model(m)).padded for m in ("packed", "padded", "fixed")] == [
        False, True, False]
    frozen = replace(model("padded"), audio=replace(model("padded").audio, frozen=True))
    assert cost_model("audio", frozen).padded
    assert [sorted(padded_phases(model(m))) for m in ("packed", "padded", "fixed")] == [
        [], ["audio"], []]


@pytest.mark.parametrize("mode", ["padded", "fixed"])
def test_flops_of_a_rank_are_counted(mode):
    config = model(mode)
    frames = np.array([40, 120, 8]) if mode == "padded" else np.full(2, WHISPER_FRAMES)
    module = AudioEncoder(config.audio, config.llm.hidden_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(torch.zeros(frames.sum(), 80), SequenceLengths.from_lengths(frames))
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items()
                  if str(op).split(".")[-1] in ("mm", "addmm", "bmm", "convolution"))
    padded = np.full_like(frames, frames.max())  # the connector reads real positions alone
    work = phase_work("audio", config, Lengths(padded, padded // 2, frames // 4))
    assert work.forward[0].sum() == pytest.approx(counted, rel=1e-6)
    cost = cost_model("audio", config).of_ranks(frames // 2, np.zeros(len(frames), int), 1)
    whole = phase_work("audio", config, Lengths(padded, padded // 2, padded // 4))
    assert cost[0] * 1000 == pytest.approx(whole.useful.sum(), rel=1e-3)


def spec(mode: str, policy: str):
    return plan_spec(resolve(
        recipe(model=replace(MODEL, audio=replace(MODEL.audio, mode=mode)),
               balance=BalanceConfig(audio=PhasePolicy(policy))), 4, 4))


def test_the_padded_policy_is_the_one_for_padded_audio():
    layout = batch_layout(sample_headers("natural", 240, 0), MODEL, 4)
    slowest = {}
    for policy in ("none", "least_move", "padded"):
        plan = plan_step(layout, spec("padded", policy))
        after = plan.phase_cost("audio")[1]
        slowest[policy] = after.max()
        items = plan.spec.costs["audio"](padded_lengths(plan, "audio").positions)
        want = np.bincount(item_rank(plan, "audio"), weights=items, minlength=4)
        np.testing.assert_array_equal(after, want.astype(np.int64))
    assert slowest["padded"] < 0.9 * min(slowest["none"], slowest["least_move"])


def memory_of(world, fsdp: FsdpConfig) -> list[tuple[float, float]]:
    return [measured(world, fsdp, ("TAT",), replace(WIDE, audio=replace(WIDE.audio, mode=mode)), n)
            for mode, n in (("padded", 24), ("fixed", 2))]


@pytest.mark.slow
@pytest.mark.dist
def test_predicted_memory_is_the_measured_one():
    [results] = run_ranks(memory_of, 1, FsdpConfig(compute_dtype="bfloat16"))
    for peak, predicted in results:
        assert predicted == pytest.approx(peak, rel=0.10)


# recipes


def test_policies_that_do_not_fit_the_mode(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\n")
    for fitting in ("balance.audio.policy=padded", "balance.enabled=false"):
        load_recipe(path, ["model.audio.mode=padded", fitting])
    with pytest.raises(ValueError, match=r"set balance\.audio\.policy=padded"):
        load_recipe(path, ["model.audio.mode=padded", "balance.audio.policy=greedy"])


# invariance


def case(mode: str, policy: str | None) -> Case:
    changed = replace(MODEL, audio=replace(MODEL.audio, mode=mode, num_layers=1))
    phase = PhasePolicy(policy or "none")
    balance = BalanceConfig(enabled=policy is not None, ranks_per_node=2, vision=phase,
                            audio=phase, llm=phase)
    return Case(recipe(model=changed, balance=balance),
                SyntheticDataset(kinds=("TVT", "TAT", "T"), audio=changed.audio.geometry))


CASES = {f"{mode}/{policy}": case(mode, policy)
         for mode, policy in (("padded", None), ("padded", "padded"),
                              ("padded", "conv_transformer"),
                              ("fixed", None), ("fixed", "least_move"))}


@pytest.mark.dist
def test_balancing_does_not_change_gradients_in_any_mode():
    """float64, three ranks, against one example at a time: losses to 1e-12, gradients to 1e-9."""
    results = run_ranks(all_gradients, 3, CASES)
    references = {mode: reference_gradients(case(mode, None)) for mode in ("padded", "fixed")}
    packed = reference_gradients(replace(CASES["padded/None"], recipe=case(
        "packed", None).recipe))
    assert worst_difference(references["padded"][1], packed[1])[0] <= 1e-9
    for name in CASES:
        loss, grads = references[name.split("/")[0]]
        assert results[0][name][0] == pytest.approx(loss, rel=1e-12), name
        error, where = worst_difference(results[0][name][1], grads)
        assert error <= 1e-9, f"{name}: {where} differs by {error:.1e}"
