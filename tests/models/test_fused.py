"""Norms and rotations of models of transformers: which are replaced, and the kernels that a block
then runs. Gradients of whole models: test_packed_models.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4v import modeling_glm4v as glm4v
from transformers.models.glm4v_moe import modeling_glm4v_moe as glm4v_moe
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as turn
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from orchmllm.models.fused import fuse, rotation_like
from orchmllm.proof.compare import InFloat64
from scripts.count_kernels import count_block
from tests.lib.recipes import read

pytestmark = pytest.mark.whole
MOST = 80


def test_a_block_of_text_runs_few_kernels():
    """Of Qwen3-VL, which normalises queries and keys too; transformers' own code runs more. Of
    Qwen2: test_kernels.py."""
    found, stock = (sum(sum(kernels.count.values()) for kernels in count_block(
        read("qwen3_vl_8b").model, 4096, stock)) for stock in (False, True))
    assert found <= MOST and stock > 110, (found, stock)


class Other(llama.LlamaRMSNorm):
    """Multiplies before it rounds."""

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(x.dtype)


class Scaling(llama.LlamaRMSNorm):
    """Has the number for something else."""

    def forward(self, x):
        return self.weight * (x * self.variance_epsilon)


def results(function: Callable, learn: list[Tensor], fixed: tuple = ()) -> list[Tensor]:
    """What it makes, and gradients."""
    given = [x.clone().requires_grad_() for x in learn]
    out = function(*given, *fixed)
    out = out if isinstance(out, tuple) else (out,)
    return [*out, *torch.autograd.grad(sum(x.sin().sum() for x in out), given)]


@pytest.mark.parametrize("kind, replaced", [
    (llama.LlamaRMSNorm, True), (Gemma3RMSNorm, True), (Other, False), (Scaling, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_norm_that_is_replaced_keeps_its_bits(kind, replaced, dtype):
    norm = kind(24, 1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    fused, x = copy.deepcopy(norm), torch.randn(3, 7, 24, dtype=dtype) / 100
    fuse(fused)
    assert (type(fused) is not kind) == replaced and type(fused).__name__ == kind.__name__
    both = [results(lambda x, w, one=one: functional_call(one, {"weight": w}, (x,)),
                    [x, norm.weight.detach()]) for one in (norm, fused)]
    assert all(map(torch.equal, *both))


def test_norms_of_one_class_keep_their_own_numbers():
    x, fused = torch.randn(3, 8) / 1000, nn.ModuleList(
        llama.LlamaRMSNorm(8, eps) for eps in (1e-5, 1e-6, 1e-5))
    wanted = [norm(x) for norm in fused]
    fuse(fused)
    assert type(fused[0]) is type(fused[2]) is not type(fused[1])
    assert all(torch.equal(norm(x), y) for norm, y in zip(fused, wanted, strict=True))


@pytest.mark.parametrize("own, width, replaced", [
    (llama.apply_rotary_pos_emb, 16, True), (qwen3_vl.apply_rotary_pos_emb_vision, 16, True),
    (glm4v_moe.apply_rotary_pos_emb, 16, True), (glm4v_moe.apply_rotary_pos_emb, 8, True),
    (glm4v.apply_rotary_pos_emb, 16, False), (llama.rotate_half, 16, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_rotation_that_is_replaced_keeps_its_bits(own, width, replaced, dtype):
    """Whatever the halves of its tables are, and where it turns a part of a head. GLM-4V's text
    turns neighbours."""
    found = rotation_like(own)
    assert (found is not None) == replaced
    if replaced:
        q, k = torch.randn(7, 3, 16, dtype=dtype), torch.randn(7, 2, 16, dtype=dtype)
        tables = torch.randn(2, 7, width, dtype=dtype)
        assert all(map(torch.equal, results(own, [q, k], tables), results(found, [q, k], tables)))


class Turning(nn.Module):
    def forward(self, q, k, cos, sin):
        return turn(q, k, cos, sin)


def decorated(forward: Callable) -> Callable:
    """As transformers decorates a forward whose argument got another name."""
    @wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


def test_what_decorates_a_forward_stays_around_its_rotation():
    model = type("Twice", (Turning,), {"forward": decorated(decorated(Turning.forward))})()
    fuse(model)
    q, k = torch.randn(1, 3, 7, 16, requires_grad=True), torch.randn(1, 2, 7, 16)
    tables = torch.randn(2, 1, 7, 16)
    found, wanted = model(q, k, *tables), turn(q, k, *tables)
    assert type(found[0].grad_fn).__name__ == "RotateBackward"
    assert all(map(torch.equal, found, wanted))
    assert signature(model.forward) == signature(Turning().forward)


def test_a_model_keeps_its_classes_where_nothing_is_replaced():
    """What has parameters of other forms, and what calls no rotation."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.PReLU(4))
    before = [type(m) for m in model.modules()]
    fuse(model)
    assert [type(m) for m in model.modules()] == before


@pytest.mark.parametrize("own", [qwen3_vl.apply_rotary_pos_emb_vision, llama.apply_rotary_pos_emb])
def test_what_is_replaced_does_not_depend_on_a_mode_of_the_caller(own):
    """A proof computes in float64 what asks for float32, and what it finds is kept."""
    wanted = rotation_like.__wrapped__(own).__kwdefaults__
    with InFloat64():
        assert rotation_like.__wrapped__(own).__kwdefaults__ == wanted


def test_a_rotation_without_a_dimension_to_choose_turns_a_part():
    """MiniMax-M3's turns a part of each head of its tower."""
    def own(q, k, cos, sin):
        turned = llama.apply_rotary_pos_emb(q[..., :8], k[..., :8], cos[..., :8], sin[..., :8])
        return tuple(torch.cat([a, b[..., 8:]], -1) for a, b in zip(turned, (q, k), strict=True))

    def whole(q, k, cos, sin):
        if cos.shape[-1] == q.shape[-1]:
            return llama.apply_rotary_pos_emb(q, k, cos, sin)
        return own(q, k, cos, sin)

    q, k, tables = torch.randn(7, 3, 16), torch.randn(7, 2, 16), torch.randn(2, 7, 8)
    assert all(map(torch.equal, whole(q, k, *tables), rotation_like(whole)(q, k, *tables)))
