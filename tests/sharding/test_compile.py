"""fsdp.compile: attention as one operator, one graph a phase whatever the lengths, and the same
losses. Compiling is no stall."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from orchmllm.batch import SequenceLengths
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models import attention_op
from orchmllm.models.attention import packed_attention
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PHASES
from orchmllm.runtime.health import HangWatchdog
from orchmllm.sharding import compiled
from orchmllm.sharding.blocks import recompute
from tests.lib import whole_models as models
from tests.lib.drawn import build, model_of
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import MODEL, SHALLOW, SyntheticDataset, recipe
from tests.lib.training import train
from tests.lib.whole_models import Item

LENGTHS = ([3, 3, 1, 0, 7, 2], [5], [1, 1], [4, 4, 4])


def qkv(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    return [torch.randn(rows, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 1e-5),
                                         (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_equals_attention_per_sequence(dtype, rtol, causal):
    for lengths in LENGTHS:
        seqlens = SequenceLengths.from_lengths(lengths)
        inputs = qkv(seqlens.total, dtype)
        want = packed_attention(*inputs, seqlens, causal=causal)
        got = attention_op.packed(*inputs, seqlens.cu_seqlens, seqlens.host, causal)[0]
        grad = torch.randn_like(want)
        pairs = zip((want, *torch.autograd.grad(want, inputs, grad)),
                    (got, *torch.autograd.grad(got, inputs, grad)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(b, a, rtol=rtol, atol=rtol)


def test_the_operator_keeps_torchs_contract():
    seqlens = SequenceLengths.from_lengths(LENGTHS[0])
    for inputs in (qkv(seqlens.total, torch.float32), [  # as a block makes them, and as models do
            x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
            for x in qkv(seqlens.total, torch.float32)]):
        torch.library.opcheck(attention_op.packed, (
            *inputs, seqlens.cu_seqlens, seqlens.host, True))
        grad, out = torch.ones_like(inputs[0]), attention_op.packed(
            *inputs, seqlens.cu_seqlens, seqlens.host, True)
        found = attention_op.packed_backward(
            grad, *inputs, *out, seqlens.cu_seqlens, seqlens.host, True)
        assert [x.stride() for x in found] == [torch.empty_like(x).stride() for x in inputs]
    with pytest.raises(ValueError, match="seqlens covers 16 rows, but q has 15"):
        attention_op.packed(*qkv(15, torch.float32), seqlens.cu_seqlens, seqlens.host, True)


@pytest.mark.parametrize("choices", [
    ("none",), pytest.param(("full:1+selective:1", "full", "selective", "full:1+selective:1"),
                            marks=pytest.mark.slow)], ids=["kept", "recomputed"])
def test_blocks_of_a_phase_share_one_graph(choices):
    """Compiled without the code generator, which takes minutes; two blocks of the LLM and of the
    tower, many lengths. One graph more of each for blocks that recompute. Answers, whose cache
    grows with each token, need none."""
    torch._dynamo.reset()
    counters.clear()
    made = [build(MODEL, torch.float64) for _ in range(2)]
    compiled.compile_whole(made[0], torch.device("cpu"), "aot_eager")
    data = SyntheticDataset(kinds=("TVT", "T", "VVT", "TT"))
    for choice in choices:
        for whole in made:
            recompute(whole, dict.fromkeys(PHASES, choice))
        for examples in ([0, 1], [2], [3, 4, 5], [6, 7]):
            results = []
            for whole in made:
                whole.hf.zero_grad()
                loss = whole(whole.join([data.load(i) for i in examples]))
                loss.backward()
                results.append((float(loss.detach()), models.gradients(whole.hf)))
            (got, grads), (want, wanted) = results
            assert got == pytest.approx(want, rel=1e-12)
            assert models.difference(grads, wanted) <= 1e-10
    answers = [whole.eval()(whole.join([data.load(0)]), asked={
        "max_new_tokens": 4, "do_sample": False, "use_cache": True}) for whole in made]
    assert answers[0] == answers[1] and len(answers[0]) == 4
    assert counters["stats"]["unique_graphs"] == 2 * (1 + (len(choices) > 1))
    assert not counters["graph_break"]


@pytest.mark.whole
@pytest.mark.parametrize("name, graphs", [
    pytest.param(name, graphs, marks=pytest.mark.slow) for name, graphs in (
        ("qwen3_vl", 2), ("qwen2_5_vl", 2), ("internvl", 3), ("llava_onevision", 2), ("glm4v", 2),
        ("qwen2_5_omni", 2), ("gemma3", 0),
        ("qwen3_vl_moe", 0), ("qwen3_5", 0))])
def test_blocks_of_models_of_transformers_are_compiled_once(name, graphs):
    """Gradients are those of the same model eager, and new lengths compile nothing. graphs: of the
    blocks of the LLM and of a tower, and of one of tiles two, if an image may have one tile; 0:
    some of what a block does stays between graphs."""
    torch._dynamo.reset()
    counters.clear()
    made = [WholeModel(models.build(name).double(), torch.float64).train() for _ in range(2)]
    compiled.compile_whole(made[0], torch.device("cpu"), "aot_eager")
    kinds, seen = models.kinds_of(name), []
    for step, sizes in enumerate(([1], [], [2, 5], [3, 1, 4], [5])):
        items = [Item(kinds[0], size) for size in sizes]
        inputs = [models.sample(name, made[1].hf, own, 10 * step + k)  # which encodes them
                  for k, own in enumerate([items, [], items[:1]][: 1 + step])]
        losses, grads = [], []
        for whole in made:
            whole.hf.zero_grad()
            loss = whole(whole.join([models.as_example(i, x) for i, x in enumerate(inputs)]))
            loss.backward()
            losses.append(float(loss.detach()))
            grads.append(models.gradients(whole.hf))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        assert models.difference(*grads) <= 1e-10
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[-1] == seen[2] > 0
    if graphs:
        assert seen[-1] == graphs and not counters["graph_break"]


def test_what_cannot_be_compiled_is_refused_by_name():
    gpu, half = torch.device("cuda"), torch.bfloat16
    compiled.compile_whole(build(), torch.device("cpu"))
    compiled.compile_whole(build(dtype=half), gpu)
    with pytest.raises(ValueError, match="the llm phase .head size 8, torch.float32. has no"):
        compiled.compile_whole(build(), gpu)
    odd = build(model_of(text={"hidden_size": 48}), half)  # head size 12
    with pytest.raises(ValueError, match="the llm phase .head size 12"):
        compiled.compile_whole(odd, gpu)


def watched(world, folder: str, compiles: bool) -> str:
    """Rank 1 is busy for longer than launch.stall_timeout_s, in the compiler or not, rank 0 waits
    for it; what ended the run."""
    store = dist.FileStore(f"{folder}/store", world.world_size)
    ended: list[str] = []
    watch = HangWatchdog(store, world.rank, world.world_size, folder=Path(folder),
                         stall_timeout_s=2.0, exit_now=lambda code, text: ended.append(text),
                         poll_s=0.2)
    watch.clock = PhaseClock()

    def busy(graph, inputs):
        deadline = time.monotonic() + (5.0 if compiles else 120.0)
        while time.monotonic() < deadline and not ended:
            time.sleep(0.1)
        return graph.forward

    if world.rank:
        (torch.compile(lambda x: x + 1, backend=busy)(torch.ones(3)) if compiles
         else busy(torch.nn.Identity(), ()))
    else:
        dist.barrier()
    if world.rank:
        dist.barrier()
    deadline = time.monotonic() + 60.0
    while not compiles and not ended and time.monotonic() < deadline:  # exit_now would not return
        time.sleep(0.1)
    watch.close()
    return "".join(ended)


@pytest.mark.slow
@pytest.mark.dist
def test_compiling_is_no_stall(tmp_path):
    for compiles in (True, False):
        folder = tmp_path / str(compiles)
        folder.mkdir()
        told = run_ranks(watched, 2, str(folder), compiles)
        assert [bool(text) for text in told] == [not compiles] * 2, told


def losses(world, one, folder: str) -> tuple:
    one = replace(one, run=replace(one.run, dir=f"{folder}/{one.fsdp.compile}"),
                  train=replace(one.train, num_steps=20, batch_size=3))
    counters.clear()
    rows = train(world, one, SyntheticDataset(size=160))
    return [[row[key] for row in rows] for key in ("loss", "grad_norm")], dict(counters["stats"])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)  # the code generator takes 20 CPU seconds a graph and rank, or more
@pytest.mark.parametrize("fsdp, model, tolerance", [
    (FsdpConfig(activation_checkpointing="selective"), MODEL, 1e-5),
    (FsdpConfig(shard_size=1, compute_dtype="bfloat16"), SHALLOW, 2e-3)],
    ids=["selective", "hybrid, bfloat16"])
def test_twenty_compiled_steps(tmp_path, fsdp, model, tolerance):
    """Some without images or audio; validation compiles nothing more than a forward graph."""
    one = recipe(model=model, fsdp=fsdp)
    want = run_ranks(losses, 2, one, str(tmp_path))
    got = run_ranks(losses, 2, replace(one, fsdp=replace(fsdp, compile=True)), str(tmp_path),
                    timeout_s=1700.0)
    for (values, stats), (expected, _) in zip(got, want, strict=True):
        np.testing.assert_allclose(values, expected, rtol=tolerance)
        assert stats["unique_graphs"] == 3  # of the LLM, of the tower of images and of Whisper
