"""What shares of a GPU's peaks the kernels of a traced step reach: the rates that predictions of
time assume.

    python -m scripts.gpu.rates OUT/trace_train-none.json.gz [--gpu h200]

The trace is that of the part `train-none`, whose last step is planned here once more, from the same
rows, which are written to a temporary folder: FLOP and
bytes are those that the dry run counts, times those of the kernels by what launched them.
"""

from __future__ import annotations

import argparse
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orchmllm.config.recipe import Recipe
from orchmllm.models.whole_flops import moved_by, plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.units import by_role
from orchmllm.tools.predict.collectives import unit_traffic
from orchmllm.tools.predict.examples import dataset_of
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.step_time import head_bytes, update_seconds, work_of
from scripts.gpu import trace
from scripts.gpu.drawn import layouts_of, predicted, sized, write
from scripts.gpu.parts import TOKENS
from scripts.gpu.steps import WARM_UP, recipe_of

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
STEPS = 14


def kind_of(stack: list[str]) -> str:
    """Of a kernel, by the operators that were running when it was launched."""
    last = stack[-1] if stack else ""
    if last in PRODUCTS or "attention" in last:
        return "products" if last in PRODUCTS else "attention"
    if any("FSDP::" in name for name in stack):
        return "FSDP's copies"
    if any("Optimizer" in name for name in stack) or "foreach" in last:
        return "optimizer"
    return "loss" if any("_ChunkedLoss" in name for name in stack) else "others"


def seconds_of(path: Path) -> Counter[str]:
    """Kind -> seconds of its kernels."""
    events, threads = trace.events(path), {}
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if e.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(e["tid"], []).append(e)
    starts = {tid: [e["ts"] for e in found] for tid, found in threads.items()}
    parents = {tid: _parents(found) for tid, found in threads.items()}
    out = Counter()
    for kernel, launch in trace.of_last_step(events):
        stack = []
        if launch["tid"] in threads:
            tid = launch["tid"]
            at = bisect_right(starts[tid], launch["ts"]) - 1
            while at >= 0:
                e = threads[tid][at]
                if e["ts"] + e["dur"] >= launch["ts"]:
                    stack.insert(0, e["name"])
                at = parents[tid][at]
        out[kind_of(stack)] += kernel["dur"] / 1e6
    return out


def _parents(found: list[dict]) -> list[int]:
    """Of each event of a thread the one around it, -1: none."""
    out, around = [], []
    for index, e in enumerate(found):
        while around and found[around[-1]]["ts"] + found[around[-1]]["dur"] <= e["ts"]:
            around.pop()
        out.append(around[-1] if around else -1)
        around.append(index)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--gpu", default="h200")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(["fsdp.memory_gb=0", "fsdp.loss_chunk_rows=2048",
                            "fsdp.activation_checkpointing=none"], STEPS, True,
                           *write(Path(folder), "7b", tiny=False))
        dataset = dataset_of(recipe)
        recipe = sized(recipe, dataset, TOKENS)
        report(args, recipe, layouts_of(recipe, dataset))


def report(args: argparse.Namespace, recipe: Recipe, layouts: Sequence[BatchLayout]) -> None:
    job, hardware = cluster(args.gpu, per_node=1).job(recipe, 1)
    memory = MemoryModel.of(job)
    work = work_of(plan_step(layouts[-1], plan_spec(job)), recipe.model)
    flop = {p: (work.forward[p] + work.backward[p])[:, 0] for p in PHASES}
    products, attention = sum(flop.values())
    assumed = sum(flop[p] / hardware.rates(p, "bfloat16", work.attended[p])[:, 0] for p in PHASES)
    others = sum(float(moved.sum(0) @ [1, work.rows[p][0], work.positions[p][0]])
                 for p, moved in moved_by(recipe.model, memory.fsdp.forward_dtype).items())
    copies = sum(u.copies * sum(unit_traffic(u, memory, hardware, 1).copies)
                 for p in PHASES for u in by_role(recipe.model, p).values())
    peak, bandwidth = hardware.sheet.bfloat16, hardware.sheet.memory_bandwidth
    of = {"products": (products, peak), "attention": (attention, peak),
          "others": (others, bandwidth),
          "loss": (float(np.sum(head_bytes(work, memory))), bandwidth),
          "FSDP's copies": (copies * hardware.memory_rate, bandwidth),
          "optimizer": (update_seconds(memory, hardware) * hardware.memory_rate, bandwidth)}
    spent = seconds_of(args.trace)
    print(f"the last of {STEPS} steps, {int(work.tokens):,} LLM tokens, on {args.gpu}")
    for kind, (amount, rate) in of.items():
        unit, size = ("TFLOP", 1e12) if rate == peak else ("GB", 1e9)
        print(f"{kind:<14}{1e3 * spent[kind]:>7.1f} ms{amount / size:>8.1f} {unit:<6}"
              f"{amount / spent[kind] / rate:>6.3f} of {rate / 1e12:g}e12/s")
    moved = [kind for kind, (_, rate) in of.items() if rate == bandwidth]
    share = sum(of[kind][0] for kind in moved) / sum(spent[kind] for kind in moved) / bandwidth
    print(f"all that is no product: {share:.3f} of the bandwidth; no kernel runs for "
          f"{trace.read(args.trace)['idle_share']:.1%} of this step, which was recorded")
    print(f"attention of these lengths is assumed to reach {attention / assumed[1] / peak:.3f}")
    said = predicted(recipe, layouts[WARM_UP:-1], args.gpu.upper())
    print(f"predicted, mean of steps {WARM_UP} to {STEPS - 2}: {said['predicted_step_s']:.3f} s, "
          f"MFU {100 * said['predicted_mfu']:.1f}%")


if __name__ == "__main__":
    main()
