"""Whisper's encoder for packed clips: each is encoded as alone and as by transformers', and nothing
leaks between them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder, sinusoids

from orchmllm.composition.whisper import PackedWhisperEncoder
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.families import model_class, read_config
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.load_whole import load_whole
from tests.lib.composed import alone, stock_whisper, write_composed
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.whole
FRAMES = [13, 1, 6, 14, 2]  # odd, even, and shorter than a kernel
POSITIONS = 50


def encoder(dtype: torch.dtype = torch.float32) -> PackedWhisperEncoder:
    """Weights and biases of every parameter drawn, but not the positions."""
    tower = PackedWhisperEncoder._from_config(WhisperConfig(
        d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64,
        num_mel_bins=8, max_source_positions=POSITIONS)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in tower.named_parameters():
            if not name.startswith("embed_positions"):
                p.copy_(0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return tower


def batch(frames: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(Frames (n, 8, longest), random also where there is no clip; mask (n, longest))."""
    generator = torch.Generator().manual_seed(1)
    shape = len(frames), max(frames, default=4)
    mel = torch.randn(shape[0], 8, shape[1], generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.arange(shape[1]) < torch.tensor(frames, dtype=torch.int64)[:, None]
    return mel.requires_grad_(), mask.int()


def outputs(frames: list[int], dtype: torch.dtype, together: bool) -> dict[str, Tensor]:
    """Positions of all clips, and gradients of the frames and of the weights."""
    tower, (mel, mask) = encoder(dtype), batch(frames, dtype)
    if together:
        used, out = tower, tower(mel, mask).last_hidden_state
    else:
        used = stock_whisper(tower)
        out = torch.cat([alone(used, clip[:, :n]) for clip, n in zip(mel, frames, strict=True)])
    out.square().sum().backward()
    return {"output": out.detach(), "mel": mel.grad, **{
        name: p.grad for name, p in used.named_parameters() if p.requires_grad}}


def joined(tensors: dict[str, Tensor], names: set[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(names)])


@pytest.mark.parametrize("frames", [FRAMES, [5], [4, 4], [1, 1, 9]])
def test_packed_clips_equal_each_clip_alone(frames):
    """float64: each tensor to 1e-9; float32: output, and all gradients as one vector, to 1e-6."""
    got, want = (outputs(frames, torch.float64, together) for together in (True, False))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert float((got[name] - tensor).norm()) <= 1e-9 * float(tensor.norm()), name
    got, want = (outputs(frames, torch.float32, together) for together in (True, False))
    for part in ({"output"}, want.keys() - {"output"}):
        a, b = joined(got, part), joined(want, part)
        assert float((a - b).norm()) <= 1e-6 * float(b.norm())


def test_bfloat16_is_close_to_float32():
    exact, half = (outputs(FRAMES, dtype, True) for dtype in (torch.float32, torch.bfloat16))
    assert half["output"].dtype == torch.bfloat16
    error = (half["output"].float() - exact["output"]).abs().max()
    assert float(error / exact["output"].abs().max()) < 0.1
    assert all(g.isfinite().all() for g in half.values())


def test_clips_do_not_see_each_other():
    tower, (mel, mask) = encoder(), batch(FRAMES)
    out = tower(mel, mask).last_hidden_state.split([(n + 1) // 2 for n in FRAMES])
    for i, one in enumerate(out):
        (grad,) = torch.autograd.grad(one.square().sum(), mel, retain_graph=True)
        assert [bool(clip.any()) for clip in grad] == [i == j for j in range(len(FRAMES))]
        assert not grad[i, :, FRAMES[i]:].any()


def test_clips_of_a_window_are_encoded_as_by_whisper():
    tower, (mel, mask) = encoder(), batch([2 * POSITIONS] * 2)
    stock = WhisperEncoder._from_config(stock_whisper(tower).config).eval()
    stock.load_state_dict(tower.state_dict())
    with torch.no_grad():
        got, want = tower(mel, mask).last_hidden_state, stock(mel).last_hidden_state.flatten(0, 1)
    assert float((got - want).abs().max() / want.abs().max()) <= 1e-5


def drawn_positions(world, model: ModelConfig) -> np.ndarray:
    whole = load_whole(Path(model.folder), model, FsdpConfig(), torch.device("cpu"),
                       dict.fromkeys(PHASES, "none"))
    weight = whole.hf.model.audio_tower.embed_positions.weight
    return weight.full_tensor().detach().numpy()


@pytest.mark.dist
def test_positions_of_drawn_weights_are_whispers_sinusoids(tmp_path):
    """They do not learn: built alone, in a composition, and by rows on two ranks."""
    write_composed("qwen2_vl_packed_whisper_qwen2", tmp_path / "model")
    config = read_config(tmp_path / "model")
    composed = model_class(config)._from_config(config).model.audio_tower.embed_positions.weight
    by_rows = run_ranks(drawn_positions, 2, ModelConfig(config=str(tmp_path / "model")))[0]
    for found in (encoder().embed_positions.weight, composed, torch.from_numpy(by_rows)):
        assert not found.requires_grad
        assert torch.allclose(found.float(), sinusoids(*found.shape), rtol=0, atol=1e-5)


def test_what_cannot_be_encoded_is_refused():
    tower = encoder()
    with pytest.raises(ValueError, match="a clip has 51 positions, and the audio tower knows 50"):
        tower(*batch([2 * POSITIONS + 1, 4]))
    tower.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="another attention was chosen for packed clips"):
        tower(*batch([3, 4]))
