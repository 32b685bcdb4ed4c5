"""Properties of the submodules: packed equals alone, nothing leaks between sequences, 0 rows keep
every parameter attached, and the parts that mirror a stock module equal it."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import AudioConfig, LLMConfig, VisionConfig
from orchmllm.models.audio import AudioEncoder, packed_conv1d
from orchmllm.models.llm import PackedQwen2
from orchmllm.models.parts import init_parameters
from orchmllm.models.vision import VisionEncoder, patch_positions, rotary_2d
from tests.lib.submodules import (
    AUDIO,
    GRIDS,
    MODULES,
    OUT,
    RELATIVE,
    VISION,
    build,
    inputs,
    loss_of,
    out_rows,
    relative,
    rows_of,
    run,
)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("name", MODULES)
def test_packed_equals_alone(name, dtype):
    module, x = build(name, dtype), inputs(name, dtype)
    packed = run(name, module, x, [0, 1, 2]).split(out_rows(name))
    for i, rows in enumerate(x.split(rows_of(name, [0, 1, 2]).tolist())):
        assert relative(packed[i], run(name, module, rows, [i])) < RELATIVE[dtype]


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("name", MODULES)
def test_parameter_gradients_of_packed_equal_the_sum_over_sequences(name, dtype):
    x, together, alone = inputs(name, dtype), build(name, dtype), build(name, dtype)
    run(name, together, x, [0, 1, 2]).square().sum().backward()
    for i, rows in enumerate(x.split(rows_of(name, [0, 1, 2]).tolist())):
        run(name, alone, rows, [i]).square().sum().backward()
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        if q.grad is not None:  # the LLM's embedding has none here
            assert float((p.grad - q.grad).abs().max()) < RELATIVE[dtype] * (
                float(q.grad.abs().max()) + 1e-3
            )


@pytest.mark.parametrize("name", MODULES)
def test_no_gradient_leaks_between_sequences(name):
    module, x = build(name), inputs(name).requires_grad_()
    output = run(name, module, x, [0, 1, 2]).split(out_rows(name))
    for i in range(3):
        (grad,) = torch.autograd.grad(output[i].square().sum(), x, retain_graph=True)
        for j, part in enumerate(grad.split(rows_of(name, [0, 1, 2]).tolist())):
            assert bool(part.any()) == (i == j)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_rows_give_zero_gradients_to_every_parameter(name, dtype):
    module, x = build(name, dtype), inputs(name, dtype)[:0]
    if name == "llm":
        x = module.embed_tokens(torch.zeros(0, dtype=torch.int32))
    output = loss_of(name, module, x, [])
    assert output.item() == 0.0 and output.requires_grad
    output.backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert not parameter.grad.any(), key


@pytest.mark.parametrize("name", MODULES)
def test_bfloat16_is_close_to_float32(name):
    x = inputs(name)
    exact = run(name, build(name), x, [0, 1, 2])
    half = run(name, build(name, torch.bfloat16), x.bfloat16(), [0, 1, 2])
    assert half.dtype == torch.bfloat16
    assert relative(half.float(), exact) < 0.1
    loss_of(name, module := build(name, torch.bfloat16), x.bfloat16(), [0, 1, 2]).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_meta_build_then_init_equals_a_direct_build(name):
    with torch.device("meta"):
        module = build(name)
    assert not list(module.buffers())  # nothing that to_empty could lose
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.fill_(math.nan)
    direct = build(name)
    for one in (module, direct):
        generator = torch.Generator().manual_seed(5)
        init_parameters(one, lambda _, weight, g=generator: nn.init.normal_(weight, generator=g))
    for p, q in zip(module.parameters(), direct.parameters(), strict=True):
        assert torch.equal(p, q)
    x = inputs(name)
    assert torch.equal(run(name, module, x, [0, 1, 2]), run(name, direct, x, [0, 1, 2]))


# vision


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_patch_positions_follow_the_merge_group_order(merge):
    grid = np.array([[1, 2, 3], [2, 4, 1], [1, 1, 1]]) * [1, merge, merge]
    expected = [
        (gr * merge + r, gc * merge + c)
        for t, h, w in grid.tolist()
        for _ in range(t)
        for gr in range(h // merge)
        for gc in range(w // merge)
        for r in range(merge)
        for c in range(merge)
    ]
    result = patch_positions(grid, merge)
    assert result.dtype == np.int64 and result.tolist() == [list(p) for p in expected]
    assert patch_positions(np.zeros((0, 3)), merge).shape == (0, 2)


def test_patch_positions_refuse_a_grid_that_does_not_merge():
    with pytest.raises(ValueError, match="multiples of 2"):
        patch_positions(np.array([[1, 3, 4]]), 2)


def test_vision_depends_on_the_shape_of_the_grid():
    module = build("vision")
    x, seqlens = inputs("vision")[:16], SequenceLengths.from_lengths([16])
    wide, tall = (module(x, np.array([g]), seqlens) for g in ([1, 2, 8], [1, 8, 2]))
    assert relative(wide, tall) > 1e-4


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 22), (torch.bfloat16, 8)])
def test_pixels_are_normalised_before_they_are_rounded_to_the_weights(dtype, bits):
    """Against NumPy in float64: the result is rounded to the dtype of the weights, once. (A
    bfloat16 of 255 / 127.5 loses every pixel near the middle.)"""
    module, seen = build("vision", dtype), []
    module.patch_embed.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    side = VISION.geometry.patch_size
    pixels = np.arange(12 * side * side * 3).reshape(12, 3, -1) % 256
    module(torch.from_numpy(pixels.astype(np.uint8)).flatten(1), np.array([[1, 2, 6]]),
           SequenceLengths.from_lengths([12]))
    want = ((pixels - 127.5) / 127.5).reshape(12, -1)
    got = seen[0].double().numpy()
    assert (np.abs(got - want) <= np.abs(want) * 2.0**-bits + 2e-7).all()


def test_rotary_angles_of_patches_are_not_rounded():
    """Of a bfloat16 tower, against NumPy in float64: row, then column."""
    at = np.array([[0, 0], [1, 300], [299, 2]])
    angle = (at[:, :, None] / 10_000 ** (np.arange(0, 16, 2) / 16)).reshape(3, -1)
    for table, wave in zip(rotary_2d(torch.from_numpy(at), 32, torch.bfloat16), (np.cos, np.sin),
                           strict=True):
        want = torch.from_numpy(wave(np.concatenate([angle, angle], 1)))
        assert float((table[:, 0].double() - want).abs().max()) < 2**-8


# audio


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 7, 1, 4], [5, 5]])
def test_packed_convolution_equals_conv1d_per_clip(lengths, stride):
    torch.manual_seed(0)
    conv = nn.Conv1d(3, 5, 3, stride=stride, padding=1).double()
    x = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    out, out_lengths = packed_conv1d(x, conv, np.array(lengths))
    clips = [conv(clip.T[None])[0].T for clip in x.split(lengths)]
    assert out_lengths.tolist() == [len(clip) for clip in clips]
    expected = torch.cat(clips)
    assert torch.allclose(out, expected, atol=1e-12)
    weight = torch.randn_like(out)
    given = torch.autograd.grad((out * weight).sum(), [x, *conv.parameters()])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *conv.parameters()])
    for g, w in zip(given, wanted, strict=True):
        assert torch.allclose(g, w, atol=1e-12)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="4 \\* num_heads"):
        VisionEncoder(VisionConfig(hidden_size=30, num_heads=3), OUT)
    with pytest.raises(ValueError, match="multiple of num_heads"):
        AudioEncoder(AudioConfig(hidden_size=32, num_heads=5), OUT)
    with pytest.raises(ValueError, match="num_kv_heads"):
        PackedQwen2(LLMConfig(num_heads=4, num_kv_heads=3))
    with pytest.raises(ValueError, match="seqlens"):
        build("audio")(torch.zeros(3, AUDIO.num_mels), SequenceLengths.from_lengths([2]))
    with pytest.raises(ValueError, match="seqlens"):
        build("vision")(inputs("vision"), GRIDS[:1], SequenceLengths.from_lengths([24]))


def test_package_import_is_light():
    code = "import orchmllm.models, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
