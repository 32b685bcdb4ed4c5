"""Tables and figures of OrchMLLM: the paper's values beside ours. Predicted for H100 SXM on drawn
lengths; the paper does not say what it recomputes, so it is what fits beside its own mini-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from orchmllm.config.recipe import FsdpConfig, Recipe, TrainConfig
from orchmllm.papers.ablations import Predicted, variants
from orchmllm.papers.fact import Fact, Printed
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.rearrange import sums_of
from orchmllm.sharding.choice import choose_checkpointing
from orchmllm.sharding.fits import joined
from orchmllm.sharding.memory import Choice
from orchmllm.tools.predict.examples import of_mix
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.transfers import moves_of
from orchmllm.tools.predict.whole import parameters
from orchmllm.tools.predict.workload import sample_layout

BATCHES = {"10B": (80, 65, 75), "18B": (60, 40, 50), "84B": (30, 15, 25)}  # 8.1, baseline, 8.3
SMALLER = (("Figure 10", "LLM only", 18), ("Figure 12", "all-gather", 20))  # what fits, of 84B
CLUSTER, MEMORY_GB = Hardware(), 74  # what tensors may take of 80 GB
SEEDS, FEW = 3, 2  # few examples a rank, for which permuting batches saves most


def predicted(model: str, ranks: int, batch: int, scheme: str, seeds: int = SEEDS) -> Predicted:
    """A model and scheme on some ranks in the paper's setting (section 8.1), over seeds."""
    fsdp = FsdpConfig(shard_size=min(256, ranks), compute_dtype="bfloat16", loss_chunk_rows=4096,
                      prefetch=1)
    recipe = Recipe(model=MODELS[model.lower()], fsdp=fsdp, train=TrainConfig(batch_size=batch))
    layouts = [of_mix(recipe).draw(ranks, batch, s) for s in range(seeds)]
    return Predicted(recipe, variants()[scheme], layouts, CLUSTER)


def recomputed(made: Predicted) -> Choice:
    """What a run of these batches recomputes: the least that fits, all layers of a phase alike."""
    return choose_checkpointing(made.memory, joined(made.loads), 1e9 * MEMORY_GB, by_layer=False)


def lines() -> Iterator[Fact]:
    """All rows."""
    printed = Printed("orchmllm")
    for model in BATCHES:
        counted = parameters(MODELS[model.lower()])
        for phase in PHASES:
            ours = sum(n for part, n in counted.items() if part.startswith(phase)) / 1e9
            yield printed.row("Table 1", f"{phase} parameters", f"MLLM-{model}", ours)
    drawn = sample_layout(MODELS["84b"], num_ranks=1, batch_size=20_000, seed=0)
    for phase, modality in ENCODERS.items():
        tokens = np.where(drawn.modality == modality, drawn.num_tokens, 0)
        share = sums_of(tokens, drawn.segments_per_example) / drawn.tokens_per_example
        yield printed.row("Figure 3", f"{phase} share of a sequence, deviation over mean", "",
                          100 * share.std() / share.mean())
    yield from overall(printed)
    yield from table_2(printed)
    yield from ablations(printed)
    yield from printed.rest()


def absolute(printed: Printed, where: str, case: str, made: Predicted, of: str = ""
             ) -> Iterator[Fact]:
    """MFU, and memory if the paper tells it. of: behind their names."""
    choice = recomputed(made)
    for what, scale, found, needs in (
            ("MFU", 100, made.mfu, "all time would have to be {down:.2f} times ours"),
            ("memory", 1e-9, made.peaks, "tensors would have to take {up:.2f} times ours")):
        if what == "MFU" or of:
            full = scale * found(dict.fromkeys(PHASES, "full")).mean()
            yield printed.seeds(where, what + of, case, scale * found(choice), needs=needs, note=(
                "recomputed: " + ", ".join(f"{p} {c}" for p, c in choice.items())
                + f"; with all recomputed {full:.1f}"))


def overall(printed: Printed) -> Iterator[Fact]:
    """Section 8.1: 2,560 GPUs, shard groups of 256."""
    for model, (batch, small, _) in BATCHES.items():
        made, base = (predicted(model, 2560, b, s, seeds=2)
                      for b, s in ((batch, "paper"), (small, "none")))
        if model == "84B":
            yield from absolute(printed, "Figure 8", f"MLLM-{model}", made)
        ours, other = made.times(recomputed(made)), base.times(recomputed(base))
        for where, what, of in (("Figure 8", "MFU", "mfu"),
                                ("Figure 9", "throughput", "tokens_per_gpu")):
            gain = [getattr(a, of) / getattr(b, of) for a, b in zip(ours, other, strict=True)]
            yield printed.seeds(where, f"{what} over no balancing", f"MLLM-{model}", np.array(gain),
                                needs="the unbalanced run would have to be slower by what grows "
                                "neither with loads nor with traffic")


def table_2(printed: Printed) -> Iterator[Fact]:
    """Section 8.2: MLLM-10B, mini-batch 60."""
    for ranks in (64, 128, 256, 512, 1024, 2560):
        made = predicted("10B", ranks, 60, "paper", seeds=1)
        exchange = sum(replace(move, times=1).seconds(CLUSTER) for move in moves_of(made.plans[0]))
        yield printed.row("Table 2", "overhead of the forward pass", f"{ranks} GPUs",
                          1e3 * exchange, note="ours: exchanges; planning is hidden in prefetching",
                          needs="they would have to take {up:.1f} times as long")
        [step] = made.times(dict.fromkeys(PHASES, "none"))
        yield printed.row("Table 2", "forward pass", f"{ranks} GPUs",
                          sum(f for f, _ in step.phases.values()) + exchange, needs=(
                              "our FLOP would have to run at {down:.2f} of the assumed speed"))


def ablations(printed: Printed) -> Iterator[Fact]:
    """Section 8.3: 128 GPUs."""
    for model, (_, _, batch) in BATCHES.items():
        name, made = f"MLLM-{model}", {s: predicted(model, 128, batch, s) for s in (
            "paper", "no node-wise", "LLM only", "all packed", "all padded", "all-gather")}
        choice = recomputed(made["paper"])
        mfu, peak = ({s: getattr(m, of)(choice) for s, m in made.items()}
                     for of in ("mfu", "peaks"))
        lower = {s: 100 * (1 - mfu[s] / mfu["paper"]) for s in made}
        for where, scheme, small in SMALLER:
            yield printed.seeds(where, f"MFU of {scheme} below OrchMLLM's by", name, lower[scheme])
            if model == "84B":
                yield printed.seeds(where, f"memory of {scheme}", f"{name} at {batch}",
                                    peak[scheme] / 1e9)
                yield from absolute(printed, where, f"{name} at {small}", predicted(
                    model, 128, small, scheme), f" of {scheme}")
            else:
                yield printed.seeds(where, f"memory of {scheme} above OrchMLLM's by", name,
                                    100 * (peak[scheme] / peak["paper"] - 1))
        for scheme in ("all packed", "all padded"):
            yield printed.seeds("Figure 11", f"MFU of {scheme} below OrchMLLM's by", name,
                                lower[scheme])
        few = {s: predicted(model, 128, FEW, s) for s in ("paper", "no node-wise")}
        for phase in PHASES:
            share, least = (1 - of["paper"].internode([phase]) / np.maximum(
                of["no node-wise"].internode([phase]), 1) for of in (made, few))
            yield printed.seeds("Figure 13", f"reduction between nodes, {phase}", name, share,
                                needs="ranks would have to hold few items: at mini-batch "
                                f"{FEW} it is {least.mean():.3f} here")
