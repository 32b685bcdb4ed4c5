"""Tables and figures of DistTrain and MMScale: the papers' values beside ours. What they leave open
of their models and machines is an argument or stands in ASSUMED."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from orchmllm.config.recipe import load_recipe
from orchmllm.models.gpus import GPUS
from orchmllm.papers.fact import MEASURED, Fact, Printed
from orchmllm.papers.grouping import intra_reorder
from orchmllm.papers.pipeline import inter_reorder, simulate
from orchmllm.papers.profiles import ModuleProfile, analytic, state_of, with_frozen
from orchmllm.papers.shapes import Backbone, Tower
from orchmllm.papers.units import UnitsPlan, plan_units
from orchmllm.plan.balance import core
from orchmllm.tools.init.command import RECIPES
from orchmllm.tools.predict.dry_run import dry_run
from orchmllm.tools.predict.hardware import Hardware

A800 = Hardware("A800, 8 a node, 4 x 200 Gbit/s per node", network_bandwidth=12.5e9,
                sheet=replace(GPUS["a800"], memory_bytes=80e9, node=150e9))
# Share of the peak that forward and backward reach; patches of 16 pixels; Stable Diffusion 2.1 with
# its frozen image encoder: forward FLOP and kept bytes of an image by its side.
ASSUMED = {"llm": 0.62, "vision": 0.45, "generator": 0.33}
GENERATOR = {512: (1.9e12, 1e9), 1024: (9.2e12, 4e9)}
SEQUENCE = 8192
# Table 1; image side of generation; Megatron's pipeline size.
LLMS = {"9B": (Backbone(32, 4096, 11008, 32, 32, 128256), 512, 1),
        "15B": (Backbone(40, 5120, 13824, 40, 40, 128256), 512, 2),
        "72B": (Backbone(80, 8192, 28672, 64, 8, 128256), 1024, 10)}
VIT = Tower(32, 1280, 5120, 16, patch=16)


def disttrain_profiles(name: str, *, images: float = 5) -> dict[str, ModuleProfile]:
    """ViT-Huge, Llama 3 and Stable Diffusion 2.1 of MLLM-9B, -15B or -72B. images: of a sample of
    8,192 tokens; the papers do not say how many."""
    llm, side, _ = LLMS[name]
    patches, width = (side / VIT.patch)**2, llm.width
    # The connector: two products, of each patch, with biases and a norm.
    joined = VIT.width * width + width**2
    made = {"vision": analytic(
        "vision", VIT.layers, VIT.width, rows=patches * images, flops=images * (
            VIT.front_flops(patches) + VIT.layers * VIT.layer_flops(patches)
            + 2.0 * joined * patches),
        parameters=VIT.parameters + joined + 2 * VIT.width + 2 * width, kept=VIT.kept,
        hardware=A800, efficiency=ASSUMED["vision"]), "llm": analytic(
        "llm", llm.layers, width, rows=SEQUENCE, flops=(
            llm.layers * llm.layer_flops(SEQUENCE) + llm.head_flops(SEQUENCE)),
        parameters=llm.parameters, kept=llm.kept, hardware=A800, efficiency=ASSUMED["llm"])}
    flops, kept = GENERATOR[side]
    rate = A800.sheet.bfloat16 * ASSUMED["generator"]
    made["generator"] = ModuleProfile(
        "generator", 4, images, lambda tp: 1e3 * images * flops / (rate * tp), *state_of(1e9),
        kept, kept / 8, forward_flops=images * flops)
    return made


METHODS = {"megatron": "Megatron-like", "ratio": "GPUs by FLOPs"}
FROZEN = {"all modules": ("vision", "llm", "generator"),
          "all but the encoder": ("llm", "generator"), "all but the LLM": ("vision", "generator"),
          "all but the generator": ("vision", "llm")}
ROOM = 0.9 * A800.sheet.memory_bytes  # the rest is CUDA's context, NCCL and fragments
SCALES = ((1296, 1920), (648, 960), (324, 480), (112, 240))  # of Table 2: GPUs, batch
BATCHES = {"9B": 128, "15B": 64, "72B": 40}  # section 8.2, on 96 GPUs here
SIZES = ((128, 8, 3), (240, 6, 6), (1920, 30, 12), (1920, 120, 12))  # batch, DP, stages


def seconds(call: Callable[[], object], repeat: int = 5) -> float:
    """CPU seconds of the quickest of several calls."""
    return min(timeit.repeat(call, number=1, repeat=repeat, timer=time.process_time))


def plan(name: str, num_gpus: int, batch: int, images: float = 5,
         frozen: tuple[str, ...] = (), **options) -> UnitsPlan:
    """Units of one of the papers' models on A800s."""
    profiles = with_frozen(disttrain_profiles(name, images=images), frozen)
    return plan_units(profiles, num_gpus=num_gpus, global_batch=batch, gpu_bytes=ROOM, **options)


def over(method: str, name: str, num_gpus: int, batch: int, images: float = 5,
         frozen: tuple[str, ...] = ()) -> tuple[float, float] | None:
    """MFU and throughput of the exact plan over those of a baseline; None if that does not fit."""
    peak, ours = A800.sheet.bfloat16, plan(name, num_gpus, batch, images, frozen)
    try:
        other = plan(name, num_gpus, batch, images, frozen, method=method, llm_pp=LLMS[name][2])
    except ValueError:
        return None
    return ours.mfu(peak) / other.mfu(peak), other.simulated_ms / ours.simulated_ms


def gains(printed: Printed, figures: Sequence[str], method: str, frozen: str, name: str,
          *setting) -> Iterator[Fact]:
    """A row of MFU and one of throughput, with 5 images a sample; the papers tell no number."""
    found = {images: over(method, name, *setting, images, FROZEN.get(frozen, ()))
             for images in (5, 10, 20)}
    what = METHODS[method] + f", frozen: {frozen}" * bool(frozen)
    for k, quantity in enumerate(("MFU", "throughput")):
        _, *more = (f"{x[k]:.2f}x" if x else "nothing that fits" for x in found.values())
        yield printed.row(figures[k], f"{quantity} over {what}", f"MLLM-{name}",
                          found[5] and found[5][k],
                          note=f"with 10 and 20 images a sample {' and '.join(more)}")


def sample_times(n: int, seed: int, cv: float = 0.6) -> np.ndarray:
    """(2, n) encoder and generator times of n samples: log-normal, mean 1, correlation 0.7."""
    rng, sigma = np.random.default_rng(seed), np.sqrt(np.log(1 + cv * cv))
    z = rng.normal(size=(2, n))
    z[1] = 0.7 * z[0] + np.sqrt(0.51) * z[1]
    return np.exp(sigma * z - sigma * sigma / 2)


def stage_times(times: np.ndarray, p: int) -> tuple[np.ndarray, np.ndarray]:
    """(p, l) forward and backward of an encoder stage, p - 2 LLM stages of 1, a generator stage."""
    forward = np.ones((p, times.shape[1]))
    forward[0], forward[-1] = times
    return forward, 2 * forward


def reordering(batch: int, dp: int, p: int, seeds: int = 3) -> dict[str, float]:
    """Scheme -> iteration over 3 * (p + l - 1), where nothing varies, averaged over seeds: the
    slowest of dp groups that run a sample a microbatch. Pooled: a slot's images are spread over all
    encoder and generator GPUs, so that a slot takes its samples' mean."""
    slots, out = batch // dp, {}
    for seed in range(seeds):
        times = sample_times(batch, seed)
        size = np.round(1e6 * times.sum(axis=0)).astype(np.int64)
        equal = intra_reorder(size, dp, equal_counts=True)
        pooled = {"pooled slots, random": np.arange(batch) % slots,
                  "pooled slots, longest first": intra_reorder(size, slots, equal_counts=True)}

        def slowest(group: np.ndarray, order=None, times=times) -> float:
            total = 0.0
            for g in range(dp):
                # Within a group in random order: the division itself is sorted.
                mine = np.random.default_rng(g).permutation(np.flatnonzero(group == g))
                stages = stage_times(times[:, mine], p)
                chosen = order(*stages) if order else None
                total = max(total, simulate(*stages, order=chosen))
            return total

        found = {"random": slowest(np.arange(batch) % dp),
                 "Algorithm 2 as printed": slowest(intra_reorder(size, dp)),
                 "descending, equal counts": slowest(equal),
                 "+ Algorithm 3 repaired": slowest(equal, inter_reorder)}
        for name, slot in pooled.items():
            mean = np.stack([np.bincount(slot, weights=t) for t in times]) / dp
            found[name] = simulate(*stage_times(mean, p))
        for name, value in found.items():
            out[name] = out.get(name, 0.0) + value / (3 * (p + slots - 1)) / seeds
    return out


def table_2(printed: Printed) -> Iterator[Fact]:
    """Units of 72B on four scales."""
    for gpus, batch in SCALES:
        exact, relaxed = (plan("72B", gpus, batch, method=m) for m in ("exact", "convex"))
        yield printed.row(
            "Table 2", "planning", f"MLLM-72B on {gpus} GPUs, batch {batch}",
            1e3 * seconds(lambda g=gpus, b=batch: plan("72B", g, b)), kind=MEASURED,
            note="exact; the convex plan, rounded, takes "
            f"{relaxed.iteration_ms / exact.iteration_ms:.3f}x as long and its relaxation is "
            f"{exact.iteration_ms / relaxed.relaxed_ms:.3f}x too short; " + ", ".join(
                f"{n} {u.gpus} GPUs (tp {u.tp}, dp {u.dp}, pp {u.pp})"
                for n, u in exact.units.items()))


def table_3(printed: Printed) -> Iterator[Fact]:
    """MMScale, on one core: the division of 1,920 samples, the order of one group."""
    for dp in (30, 60, 120):
        times = sample_times(1920, dp)
        size, home = np.round(1e6 * times.sum(axis=0)).astype(np.int64), np.zeros(1920, np.int64)
        stages = stage_times(times[:, :1920 // dp], 12)
        for what, call in (("intra", lambda s=size, h=home, d=dp: core().greedy(s, h, d)),
                           ("inter", lambda s=stages: inter_reorder(*s))):
            yield printed.row("Table 3", f"{what}-microbatch reordering", f"DP {dp}",
                              1e3 * seconds(call, 20), kind=MEASURED)


def figures(printed: Printed) -> Iterator[Fact]:
    """Figures 15 to 20. MFU is that of the shares of the peak in ASSUMED."""
    assumed = ", ".join(f"{n} {x:.0%}" for n, x in ASSUMED.items())
    for name, batch in BATCHES.items():
        mfu = plan(name, 1296, 1920).mfu(A800.sheet.bfloat16)
        yield printed.row("Figure 15", "MFU", f"MLLM-{name}", 100 * mfu,
                          note=f"assumed shares of the peak: {assumed}",
                          needs="they would have to be {up:.2f} times as large")
        yield from gains(printed, ("Figure 15", "Figure 16"), "megatron", "", name, 1296, 1920)
        for method in METHODS:
            yield from gains(printed, ("Figure 17",) * 2, method, "", name, 96, batch)
        for frozen in FROZEN:
            yield from gains(printed, ("Figure 19", "Figure 20"), "megatron", frozen, name, 96,
                             batch)
    for size in SIZES:
        found = reordering(*size)
        pooled = found["random"] / found["pooled slots, longest first"]
        yield printed.row(
            "Figure 18", "random over reordered", "batch {}, DP {}, {} stages".format(*size),
            found["random"] / found["+ Algorithm 3 repaired"], note=(
                f"over pooled slots {pooled:.2f}x; over ideal: " + ", ".join(
                    f"{n} {v:.3f}" for n, v in found.items())))


def trained(printed: Printed) -> Fact:
    """MLLM-72B as this project trains it, all parts on every rank: predicted."""
    found = dry_run(load_recipe(RECIPES / "disttrain_72b.yaml"), 1296, A800, 4)
    mfu = {name: 100 * figures["mfu"] for name, figures in found["predicted"].items()}
    even = (f"{p} {x['none']:.2f} -> {x['balanced']:.2f}" for p, x in found["phases"].items())
    note = f"without balancing {mfu['none']:.1f}; slowest rank over the mean {', '.join(even)}"
    return printed.row("Figure 15", "MFU of recipes/disttrain_72b.yaml", "MLLM-72B",
                       mfu["balanced"], note=note)


def lines(paper: str) -> Iterator[Fact]:
    """All rows of `disttrain` or `mmscale`."""
    printed = Printed(paper)
    for name in LLMS:
        yield printed.row("Table 1", "LLM parameters", f"MLLM-{name}",
                          disttrain_profiles(name)["llm"].weight_bytes / 2e9)
    yield from table_2(printed)
    if paper == "mmscale":
        yield from table_3(printed)
    yield from figures(printed)
    if paper == "disttrain" and find_spec("diffusers"):
        yield trained(printed)
    yield printed.row("Figure 21", "preprocessing a step, in the trainer and elsewhere",
                      kind=MEASURED, note="`data.preprocess: ray` does it elsewhere; "
                      "scripts/bench_preprocess.py measures what a step then waits")
    yield from printed.rest()
