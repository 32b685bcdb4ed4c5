"""Predicted beside measured on a CPU, term by term: products by their FLOP, and all that is no
product by the bytes that it reads and writes.

    python scripts/check_bytes.py [--recipes mllm_1gpu,qwen3_vl_8b] [--json FILE]

Three rates are measured between the runs of each part: of a product, of some kernels that write
new tensors, and of one that changes its argument in place, for which a CPU reads no line twice. By
these are predicted, in float32 and with the real widths of a recipe's model: a block of each of its
parts forward and backward, the loss of its head, norm, clipping and AdamW, and FSDP2's copies. Each
operator is timed by itself, in CPU seconds of one thread, the shortest of some runs, and counted by
the rules of the dry run. Exit code 1 if the products of a recipe, or all that is no product
together, are more than 10% off.

What the CPU runs is counted: it computes RMSNorm by several kernels, where a GPU has one. Attention
is left out: its rate depends on lengths (scripts/gpu/attention.py).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from orchmllm.config.recipe import Recipe, load_recipe  # noqa: E402
from orchmllm.counts.counted import WRITING, flop_of, moved_of, product_of  # noqa: E402
from orchmllm.models.loss import LossHead  # noqa: E402
from orchmllm.models.whole_flops import moved_by_head  # noqa: E402
from orchmllm.sharding.optimizer import clip_gradients  # noqa: E402
from orchmllm.tools.predict.step_time import UPDATE_PASSES  # noqa: E402
from scripts.whole_runner import Alike, WholeRunner  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RECIPES = "mllm_1gpu,pretrained_7b,internvl3_8b,qwen3_vl_8b"
TOLERANCE = 0.1  # relative
LENGTH = 256  # of an example of text
NUMBERS = 2**22  # that a block of the LLM gets
CHUNK, TARGETS = 256, 512  # rows of the loss
TERMS = {"norm": "norms", "attention": "rotations, heads", "mlp": "activations"}  # by class names
COPIES, UPDATE = "FSDP2's copies", "norm, clipping, AdamW"


class Timed(TorchDispatchMode):
    """Times and counts operators, in their order: (term, FLOP of `products` or bytes of all others,
    seconds, whether what is written was read). Operators of the backward pass belong to the
    term of those of the forward pass. term: of what no module that `watch` knows runs."""

    def __init__(self, term: str) -> None:
        super().__init__()
        self.found: list[tuple[str, float, float, bool]] = []
        self._stack, self._starts, self._terms = [term], [0], [term]
        self._ranges: list[str] = []

    def watch(self, block: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Tells the terms of a block's modules apart."""
        def entering(term: str) -> Callable:
            return lambda *_: self._now([*self._stack, term])

        for module in block.modules():
            kind = type(module).__name__.lower()
            if module is not block and (name := next(filter(kind.__contains__, TERMS), "")):
                yield module.register_forward_pre_hook(entering(TERMS[name]))
                yield module.register_forward_hook(lambda *_: self._now(self._stack[:-1]))

    def _now(self, stack: list[str]) -> None:
        self._stack = stack
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._terms.append(stack[-1])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        started = time.thread_time()
        out = func(*args, **kwargs)
        seconds = time.thread_time() - started
        node, packet = torch._C._current_autograd_node(), product_of(func)
        if "record_function_enter" in str(func):
            self._ranges.append(args[0])
        elif "record_function_exit" in str(func):
            self._ranges.pop()
        if "attention" in str(func) or func.namespace == "c10d":
            return out
        if packet is not None:
            self.found.append(("products", flop_of(packet, args, kwargs, out), seconds, False))
        elif moved := moved_of(func, args, kwargs, out):
            in_place = (func._schema.is_mutable and func.namespace == "aten"
                        and not func._schema.name.endswith(WRITING))
            term = self._stack[-1] if node is None else self._terms[
                bisect_right(self._starts, node._sequence_nr()) - 1]
            if any(name.startswith("FSDP::") for name in self._ranges):
                term = COPIES
            self.found.append((term, moved, seconds, in_place))
        return out


def reuse_memory() -> None:
    """Memory is taken once and used again, as a GPU's allocator does: else the kernel would hand
    out zeroed pages for each large tensor."""
    if not (ctypes.CDLL(None).mallopt(-4, 0) and ctypes.CDLL(None).mallopt(-1, -1)):
        raise OSError("mallopt refuses M_MMAP_MAX or M_TRIM_THRESHOLD: this needs glibc")


def best(call: Callable[[], object], repeat: int) -> float:
    """CPU seconds of the shortest call, after one that takes the memory."""
    def seconds() -> float:
        started = time.thread_time()
        call()
        return time.thread_time() - started

    call()
    return min(seconds() for _ in range(repeat))


class Rates:
    """How fast a CPU is at its best: FLOP a second of a product; bytes a second of some kernels
    that write new tensors, together, and in place."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(2048, 2048), torch.randn(2048, 4096)
        self._x, self._y = torch.randn(2, 2048, 4096)

    def measure(self) -> tuple[float, float, float]:
        a, b, x, y = self._a, self._b, self._x, self._y
        kernels = [(lambda: x * y, 3), (lambda: x + y, 3), (lambda: F.silu(x), 2),
                   (lambda: torch.ops.aten.silu_backward(x, y), 3), (lambda: x.sum(-1), 1),
                   (lambda: torch.cat([x[:, :2048], y[:, :2048]], 1), 2)]
        moved = sum(passes for _, passes in kernels) * x.nbytes
        return (2 * a.numel() * b.shape[1] / best(lambda: a @ b, 1),
                moved / sum(best(call, 3) for call, _ in kernels),
                2 * x.nbytes / best(lambda: x.mul_(1.0), 3))


def least(run: Callable[[], Timed], repeat: int, rates: Rates) -> dict[str, list[float]]:
    """Term -> [amount, seconds predicted and measured]: of each operator the shortest of `repeat`
    runs, and of each rate the highest one between them."""
    run()  # which takes the memory
    runs, measured = zip(*((run().found, rates.measure()) for _ in range(repeat)), strict=True)
    flop, new, old = map(max, zip(*measured, strict=True))
    terms: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for calls in zip(*runs, strict=True):
        term, amount, _, in_place = calls[0]
        rate = flop if term == "products" else old if in_place else new
        for at, value in enumerate((amount, amount / rate, min(call[2] for call in calls))):
            terms[term][at] += value
    return terms


def text(runner: WholeRunner, count: int) -> list[Alike]:
    """The kinds of blocks of the LLM, called with so many examples."""
    return runner.blocks.called_in(lambda: runner.whole(runner.text([LENGTH] * count)))


def media(runner: WholeRunner, part: str) -> list[Alike]:
    """Those of a tower, called with four images or a clip."""
    blank = runner.encoders.blank(part)
    grid = (1, 1, 1500) if part == "audio" else (4, *(blank.tile or (32, 32)))
    return runner.blocks.called_in(lambda: blank.run(*grid, torch.float32)[0])


def timed_block(one: Alike, block: nn.Module, forward: Callable) -> Timed:
    """Forward and backward of a block, called with what `one` was."""
    args, options = one.rest
    timed = Timed("residuals")
    hooks = [*timed.watch(block)]
    with timed:
        out = forward(one.x.detach().requires_grad_(), *args, **options)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
    for hook in hooks:
        hook.remove()
    block.zero_grad(set_to_none=True)
    return timed


def timed_loss(head: LossHead) -> Timed:
    x = torch.randn(TARGETS, head.in_features, requires_grad=True)
    labels = torch.randint(head.out_features, (TARGETS,))
    with Timed("loss") as timed:
        head(x, labels, CHUNK).backward()
    head.weight.grad = None
    return timed


def timed_update(block: nn.Module, optimizer: torch.optim.Optimizer) -> Timed:
    parameters = [*block.parameters()]
    for p in parameters:
        p.grad = torch.full_like(p, 1e-3)
    with Timed(UPDATE) as timed:
        clip_gradients({"llm": parameters}, 1.0, torch.device("cpu"))
        optimizer.step()
    block.zero_grad(set_to_none=True)
    return timed


def terms_of(recipe: Recipe, repeat: int) -> Iterator[tuple[str, str, list[float]]]:
    """(Part, term, [amount, seconds predicted and measured]). Raises RuntimeError where the loss
    does not move what the dry run says."""
    runner, rates = WholeRunner(recipe, torch.device("cpu"), torch.float32, CHUNK), Rates()
    width, vocab = runner.whole.hf.get_input_embeddings().weight.shape[::-1]
    kinds = {part: media(runner, part) for part in runner.whole.blocks() if part != "llm"}
    kinds["llm"] = text(runner, NUMBERS // width // LENGTH)
    for part, one in [(part, one) for part, found in kinds.items() for one in found]:
        block = one.forward.__self__
        for term, found in least(partial(timed_block, one, block, one.forward), repeat,
                                 rates).items():
            yield part, term, found
    (few,), size = text(runner, 1), sum(p.numel() for p in block.parameters())  # the LLM's
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-9, fused=True)  # as on a GPU
    found = least(partial(timed_update, block, optimizer), repeat, rates)[UPDATE]
    passes = 4.0 * UPDATE_PASSES * size / found[0]  # its kernels return nothing
    yield part, UPDATE, [found[0] * passes, found[1] * passes, found[2]]
    del optimizer, block.forward, runner, kinds, one
    fully_shard(block, reshard_after_forward=True).set_gradient_divide_factor(1.0)  # as in training
    yield part, COPIES, least(partial(timed_block, few, block, block), repeat, rates)[COPIES]
    del few, block
    said = (moved_by_head(recipe.model, "float32", CHUNK).sum(0) * [1, TARGETS]).sum()
    terms = least(partial(timed_loss, LossHead(width, vocab)), repeat, rates)
    if abs(terms["loss"][0] / said - 1) > 0.01:
        raise RuntimeError(f"the loss moves {terms['loss'][0]:.4g} bytes; the dry run: {said:.4g}")
    for term, found in terms.items():
        yield part, term, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=RECIPES, help=f"comma-separated ({RECIPES})")
    parser.add_argument("--repeat", type=int, default=5, help="runs of which the shortest counts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    reuse_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    report, wrong = [], False
    for name in args.recipes.split(","):
        recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [
            "fsdp.compute_dtype=float32", "fsdp.param_dtype=float32"])
        sums = {"products": [0.0, 0.0], "all that is no product": [0.0, 0.0]}
        for part, term, (amount, said, real) in terms_of(recipe, args.repeat):
            report.append({"recipe": name, "part": part, "term": term, "amount": amount,
                           "predicted_s": said, "measured_s": real})
            kind = "GFLOP" if term == "products" else "GB"
            print(f"{name:<14} {part:<11} {term:<22}{amount / 1e9:>9.2f} {kind:<6}"
                  f"{1e3 * said:>9.1f} ms predicted {1e3 * real:>9.1f} measured"
                  f"{said / real - 1:>+8.1%}", flush=True)
            total = sums["products" if kind == "GFLOP" else "all that is no product"]
            total[:] = total[0] + said, total[1] + real
        for kind, (said, real) in sums.items():
            wrong |= abs(said / real - 1) > TOLERANCE
            print(f"{name:<14} {kind}: {said / real - 1:+.1%}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
