"""fsdp.compile: attention as one operator, one graph a phase whatever the lengths, and the same
losses. Compiling is no stall."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from orchmllm.batch import SequenceLengths
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models import attention_op
from orchmllm.models.attention import packed_attention
from orchmllm.models.hf import WholeModel
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.plan.assign import PHASES, PhasePolicy
from orchmllm.runtime.health import HangWatchdog
from orchmllm.sharding import compiled
from orchmllm.sharding.blocks import recompute, stacks
from orchmllm.sharding.compiled import check_compiles, compile_block
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import MODEL, SHALLOW, SyntheticDataset, recipe
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
    torch.library.opcheck(attention_op.packed, (
        *qkv(seqlens.total, torch.float32), seqlens.cu_seqlens, seqlens.host, True))
    with pytest.raises(ValueError, match="seqlens covers 16 rows, but q has 15"):
        attention_op.packed(*qkv(15, torch.float32), seqlens.cu_seqlens, seqlens.host, True)


def run_block(block, first: bool, phase: str, lengths: list[int], padded: bool
              ) -> list[torch.Tensor]:
    """Output, and gradients of input and parameters. first: of the LLM, it is given a view."""
    seqlens = SequenceLengths.from_lengths(lengths)
    rows, size = seqlens.total, getattr(MODEL, phase).hidden_size
    torch.manual_seed(rows)
    if padded:
        rows = len(lengths) * max(lengths)
        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    x = torch.randn(rows, size, requires_grad=True)
    head = size // getattr(MODEL, phase).num_heads
    if phase == "llm":
        tables = torch.randn(2, 1, rows, head).unbind(0)
        rows_of_llm = x.unsqueeze(0) if first else x.unsqueeze(0).clone()
        out = block(rows_of_llm, attention_mask=None, position_embeddings=tables,
                    packed_seqlens=seqlens)
    elif phase == "vision":
        out = block(x, torch.randn(2, rows, 1, head).unbind(0), seqlens)
    else:
        out = block(x, real if padded else seqlens)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


@pytest.mark.parametrize("phase, padded", [
    ("vision", False), pytest.param("audio", False, marks=pytest.mark.slow), ("audio", True),
    pytest.param("llm", False, marks=pytest.mark.slow)])
def test_blocks_of_a_phase_share_one_graph(phase, padded):
    """Compiled without the code generator, which takes minutes; two blocks, many lengths."""
    torch._dynamo.reset()
    counters.clear()
    blocks = stacks(MultimodalModel(MODEL))[phase]
    same = copy.deepcopy(blocks)
    for block in blocks:
        compile_block(block, backend="aot_eager")
    for lengths in ([4, 4], [7, 2, 1, 0, 3], [16], [1], [8, 8]):
        lengths = [n for n in lengths if n] if padded else lengths
        for i, pair in enumerate(zip(blocks, same, strict=True)):
            got, want = (run_block(b, i == 0, phase, lengths, padded) for b in pair)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["vision", "llm"])
def test_blocks_that_recompute_the_same_share_one_graph(phase):
    """One that recomputes everything and one that does not, then both the other way round."""
    torch._dynamo.reset()
    counters.clear()
    model, same = (MultimodalModel(MODEL) for _ in range(2))
    same.load_state_dict(model.state_dict())
    blocks = stacks(model)[phase]
    for choice in ("full:1+selective:1", "full", "selective", "full:1+selective:1"):
        recompute(model, dict.fromkeys(PHASES, choice))
        if choice == "full:1+selective:1" and not counters["stats"]["unique_graphs"]:
            for block in blocks:
                compile_block(block, backend="aot_eager")
        for lengths in ([4, 4], [7, 2, 1, 3], [1]):
            for i, pair in enumerate(zip(blocks, stacks(same)[phase], strict=True)):
                got, want = (run_block(b, i == 0, phase, lengths, False) for b in pair)
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.whole
@pytest.mark.parametrize("name, graphs", [
    pytest.param(name, graphs, marks=pytest.mark.slow) for name, graphs in (
        ("qwen3_vl", 1), ("qwen2_5_vl", 1), ("internvl", 3), ("llava_onevision", 3), ("gemma3", 0),
        ("qwen3_vl_moe", 0), ("qwen3_5", 0))])
def test_blocks_of_models_of_transformers_are_compiled_once(name, graphs):
    """Gradients are those of the same model eager, and new lengths compile nothing. graphs: of the
    blocks of the LLM, and of a tower of tiles, one of them and several; 0: some of what a block
    does stays between graphs."""
    torch._dynamo.reset()
    counters.clear()
    made = [WholeModel(models.build(name).double(), torch.float64).train() for _ in range(2)]
    with mock.patch.object(compiled, "compile_block", partial(compile_block, backend="aot_eager")):
        compiled.compile_whole(made[0], torch.device("cpu"))
    kinds, seen = models.kinds_of(name), []
    for step, sizes in enumerate(([1], [], [2, 5], [3, 1, 4], [5])):
        items = [Item(kinds[0], size) for size in sizes]
        inputs = [models.sample(name, made[0].hf, own, 10 * step + k)
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
    check_compiles(MODEL, torch.device("cpu"), torch.float64)
    check_compiles(MODEL, gpu, half)
    with pytest.raises(ValueError, match="the vision phase .head size 8, torch.float32. has no"):
        check_compiles(MODEL, gpu, torch.float32)
    odd = replace(MODEL, llm=replace(MODEL.llm, hidden_size=48))  # head size 12
    with pytest.raises(ValueError, match="the llm phase .head size 12"):
        check_compiles(odd, gpu, half)


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
    trainer = Trainer(one, world, dataset=SyntheticDataset(size=160))
    rows: list[dict] = []
    trainer.run(rows)
    trainer.close()
    return [[row[key] for row in rows] for key in ("loss", "grad_norm")], dict(counters["stats"])


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)  # the code generator takes 20 CPU seconds a graph and rank, or more
@pytest.mark.parametrize("name", ["selective", "hybrid, padded, bfloat16"])
def test_twenty_compiled_steps(tmp_path, name):
    """Some without images or audio; validation compiles nothing more than a forward graph."""
    fsdp, model, balance = FsdpConfig(activation_checkpointing="selective"), MODEL, BalanceConfig()
    tolerance = 1e-5
    if name != "selective":
        fsdp = FsdpConfig(shard_size=1, compute_dtype="bfloat16")
        model = replace(SHALLOW, audio=replace(SHALLOW.audio, mode="padded"))
        balance, tolerance = BalanceConfig(audio=PhasePolicy("padded")), 2e-3
    one = recipe(model=model, fsdp=fsdp, balance=balance)
    want = run_ranks(losses, 2, one, str(tmp_path))
    got = run_ranks(losses, 2, replace(one, fsdp=replace(fsdp, compile=True)), str(tmp_path),
                    timeout_s=1700.0)
    for (values, stats), (expected, _) in zip(got, want, strict=True):
        np.testing.assert_allclose(values, expected, rtol=tolerance)
        assert stats["unique_graphs"] == 3
