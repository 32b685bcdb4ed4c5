"""The chunked loss in bfloat16: no factor common to all gradients, and the memory of one chunk."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.flops import Lengths
from orchmllm.models.loss import LossHead, answers_with_loss
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import MemoryModel
from tests.lib.drawn import model_of
from tests.lib.synthetic import recipe


def gradients(dtype: torch.dtype, num_targets: int, device: str = "cpu") -> list[Tensor]:
    """On the CPU, gradients of hidden (512, 32) and weight (16384, 32) from values that bfloat16
    holds exactly, of the summed loss / num_targets."""
    generator = torch.Generator().manual_seed(0)
    head = LossHead(32, 16384).to(device, dtype)
    values = torch.randn(16896, 32, generator=generator).mul(0.2).bfloat16()
    with torch.no_grad():
        head.weight.copy_(values[512:])
    hidden = values[:512].to(device, dtype).requires_grad_()
    labels = torch.randint(0, 16384, (512,), generator=generator)
    labels[::3] = IGNORE_INDEX
    (head(hidden, labels.to(device), 128) / num_targets).backward()
    return [hidden.grad.cpu(), head.weight.grad.cpu()]


@pytest.mark.parametrize("num_targets", [10_007, 1_003, 64])
def test_no_factor_is_common_to_the_gradients_in_bfloat16(num_targets):
    """The gain is the slope of the regression of the gradients on exact ones."""
    for got, want in zip(gradients(torch.bfloat16, num_targets),
                         gradients(torch.float64, num_targets), strict=True):
        gain = float((got.double() * want).sum() / (want * want).sum())
        assert abs(gain - 1) < 2e-4
        assert got.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sums_in_float32():
    """What rounds to bfloat16 are the logits' gradients and the results alone."""
    for got, want in zip(gradients(torch.bfloat16, 1_003, "cuda"),
                         gradients(torch.float64, 1_003), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 3e-3


@pytest.mark.parametrize("dtype, frozen", [("float32", False), ("bfloat16", True)])
def test_the_loss_takes_the_memory_of_one_chunk(dtype, frozen):
    """By the allocator's own events, and as the memory model predicts it. A chunk that outlives its
    turn would add its logits to those of the next. A weight that learns is float32 here, because
    the matrix product of a CPU copies operands in bfloat16."""
    rows, chunk, vocab, size = 512, 128, 4096, 128
    head = LossHead(size, vocab).to(getattr(torch, dtype)).requires_grad_(not frozen)
    hidden = torch.randn(rows, size, dtype=head.weight.dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,))
    head(hidden, labels, chunk)  # whatever the libraries keep is there from now on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        assert torch.isfinite(head(hidden, labels, chunk))
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events()
                    if e.name() == "[memory]")
    peak = float(np.cumsum([size for _, size in events]).max())
    model = model_of(num_layers=1, text={"vocab_size": vocab, "hidden_size": size})
    one = recipe(model=replace(model, llm=replace(model.llm, frozen=frozen)), fsdp=FsdpConfig(
        compute_dtype=dtype, loss_chunk_rows=chunk))
    lengths = Lengths(*[np.array([rows])] * 3)
    predicted = float(MemoryModel.of(resolve(one, 1, 1)).loss_bytes(Loads({"llm": lengths}, {}))[0])
    assert peak == pytest.approx(predicted, rel=0.03)


class Live(TorchDispatchMode):
    """The bytes of all storages that were made and exist at once, at most; of tensors without
    memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._see((args, kwargs), counts=False)  # what was there before
        out = func(*args, **(kwargs or {}))
        self._see(out, counts=True)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out

    def _see(self, tensors: object, counts: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and (key := id(storage := tensor.untyped_storage())
                                               ) not in self.sizes:
                self.sizes[key] = storage.nbytes() * counts
                weakref.finalize(storage, self.sizes.pop, key)


@pytest.mark.parametrize("size, dtype, share", [
    (64, torch.float32, 0.1), (3584, torch.float32, 0.17),
    pytest.param(3584, torch.bfloat16, 0.23, marks=pytest.mark.slow)])
def test_the_loss_of_a_large_vocabulary_takes_a_tenth_in_chunks(size, dtype, share):
    """8,192 targets, and the head of a model of transformers, which answers with the loss. The
    gradients of its weight and of its input are counted, which any loss makes: at width 3,584 they
    are most of it, in bfloat16 with the sum in float32 of which they are rounded."""
    rows, vocab, peaks = 8192, 152_064, []
    with FakeTensorMode():
        head = torch.nn.Linear(size, vocab, bias=False, dtype=dtype)
        hidden = torch.empty(1, rows, size, dtype=dtype, requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64)
        for chunk in (rows, 256):
            head.weight.grad = hidden.grad = None
            with Live() as live:
                if chunk == rows:
                    loss = F.cross_entropy(head(hidden)[0].float(), targets, reduction="sum")
                else:
                    with answers_with_loss(head, targets, chunk):
                        loss = head(hidden).squeeze()
                (loss / rows).backward()
            peaks.append(live.peak)
    print(f"width {size}, {dtype}: whole {peaks[0] / 1e9:.2f} GB, chunks of 256 "
          f"{peaks[1] / 1e9:.2f} GB")
    assert peaks[0] == pytest.approx(3 * 4 * rows * vocab, rel=0.02)  # 14.9 GB
    assert peaks[1] <= share * peaks[0]
