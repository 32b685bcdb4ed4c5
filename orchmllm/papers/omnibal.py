"""Tables and figures of OmniBal, one row each: the paper's value beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from orchmllm.config.model import LLMConfig, ModelConfig, VisionConfig
from orchmllm.models.flops import Lengths, phase_work
from orchmllm.papers import grouping
from orchmllm.papers.disttrain import Fact, seconds
from orchmllm.papers.grouping import bias, isf
from orchmllm.papers.split import Split, split_layers
from orchmllm.plan.grouping import Groups
from orchmllm.tools.predict.workload import sample_headers

RANKS, TILE, LLM_TILE, TEXT = 16, 1025, 256, 3500  # ranks; ViT and LLM tokens of a tile; Qt used
CAPS = {"max_images": 9, "max_tokens": 4096}
# Layers, width, MLP width, heads; layers, width, MLP width, heads, key heads, words.
TOWERS = {"InternVL-6B": (45, 3200, 12800, 25), "EVA-CLIP-1B": (40, 1408, 6144, 16),
          "EVA-CLIP-8B": (32, 4096, 20480, 32), "EVA-CLIP-18B": (48, 5120, 25600, 40)}
BACKBONES = {"Llama3-8B": (32, 4096, 14336, 32, 8, 128256),
             "InternLM2-20B": (48, 6144, 16384, 48, 8, 92544),
             "Yi-34B": (60, 7168, 20480, 56, 8, 64000),
             "Llama3-70B": (80, 8192, 28672, 64, 8, 128256),
             "Qwen1.5-110B": (80, 8192, 49152, 64, 8, 152064)}
TABLE_8 = [("InternVL-6B", "Llama3-8B", [16, 17, 20, 24]),
           ("InternVL-6B", "InternLM2-20B", [22, 23, 24, 24]),
           ("InternVL-6B", "Yi-34B", [28, 29, 24, 24]),
           ("InternVL-6B", "Llama3-70B", [22, 23, 13, 14, 14, 14, 13, 12]),
           ("InternVL-6B", "Qwen1.5-110B", [21, 22, 13, 13, 14, 14, 14, 14]),
           ("EVA-CLIP-1B", "InternLM2-20B", [43, 16, 15, 14]),
           ("EVA-CLIP-8B", "InternLM2-20B", [17, 18, 23, 22]),
           ("EVA-CLIP-18B", "InternLM2-20B", [18, 19, 25, 34])]


def mix(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(tiles, tokens) of n samples like InternVL-Chat-1.2's: synthetic, calibrated to the baseline
    row of Table 3 alone (.31 .34 .30); longest text 4,096, about 430 tokens a tile."""
    rng = np.random.default_rng(seed)
    tiles = np.where(rng.random(n) < 0.06, 0, 1 + rng.choice(5, n, p=[.3, .32, .2, .13, .05]))
    text = np.maximum(rng.lognormal(5.55, 0.6, n), 20)
    return tiles, np.minimum(LLM_TILE * tiles + text, 4096).astype(np.int64)


def ratios(tiles: np.ndarray, tokens: np.ndarray, groups: Groups, padded: bool = False,
           ranks: int = RANKS, as_made: bool = False) -> tuple[float, float, float]:
    """(pad ratio, dist ratio of the ViT, of the LLM) of the groups in random order, or as made."""
    order = np.arange(len(groups)) if as_made else np.random.default_rng(1).permutation(len(groups))
    load = groups.largest(tokens) * groups.sizes if padded else groups.sums(tokens)
    return (grouping.pad_ratio(tokens, groups) * padded,
            grouping.dist_ratio(groups.sums(tiles)[order], ranks),
            grouping.dist_ratio(load[order], ranks))


def _shown(*values: float) -> str:
    return ", ".join(f"{v:.3f}" for v in values)


def grouping_lines(n: int) -> Iterator[Fact]:
    """Tables 3 and 6, Figure 4 and what ISF drops, on n synthetic samples."""
    tiles, tokens = mix(n, 0)
    dropping = {**CAPS, "leftovers": "drop"}
    kept = isf(tiles, tokens, **dropping)
    for name, paper, groups, options in (
            ("baseline", "4, .31, .34, .30", grouping.random_groups(n, 4, 0), {"padded": True}),
            ("length-group", "4, .20, .26, .13", grouping.length_group(
                tokens, 4, window=400, seed=0), {"padded": True}),
            ("device-group", "4, .378, .125, .15", grouping.device_group(
                tokens, 4, num_ranks=RANKS, window=6400, seed=0),
             {"padded": True, "as_made": True}),
            ("ISF", "4.6, 0, .02, .14", kept, {}),
            ("ISF with its leftovers packed", "-", isf(tiles, tokens, **CAPS), {})):
        yield Fact("Table 3", f"{name}: batch, pad, dist ViT, dist LLM", paper,
                   _shown(groups.sizes.mean(), *ratios(tiles, tokens, groups, **options)))
    share, lost, everything = bias(kept, tiles)
    yield Fact("Algorithm 1", "what ISF drops", "not told", f"{share:.2%} of the samples, with "
               f"{lost:.2f} tiles instead of {everything:.2f} and {bias(kept, tokens)[1]:.0f} "
               f"tokens instead of {tokens.mean():.0f}")
    yield Fact("section 5.4", f"ten rounds on {n:,} samples", "less than a minute",
               f"{seconds(lambda: isf(tiles, tokens, **dropping), 1):.2f} s, with leftovers packed "
               f"{seconds(lambda: isf(tiles, tokens, **CAPS), 1):.2f} s", "measured here")
    for images, words, paper in ((9, 64, ".0156, .145"), (9, 128, ".0159, .144"),
                                 (9, 256, ".018, .141"), (8, 128, ".0417, .20")):
        made = isf(tiles, tokens, **dropping, min_images=images, min_tokens=4096 - words)
        yield Fact("Table 6", f"Qv' {images}, Qt' Qt - {words}: dist ViT, LLM", paper,
                   _shown(*ratios(tiles, tokens, made)[1:]))
    for rounds in (1, 2, 5, 10):
        made = isf(tiles, tokens, **dropping, rounds=rounds)
        yield Fact("Figure 4", f"{rounds} rounds: dist ViT, LLM, samples left", "steady from 5",
                   _shown(*ratios(tiles, tokens, made)[1:], bias(made, tiles)[0]))


def layer_ms(tower: str, backbone: str, ratio: float = 1.0, tp: int = 2) -> dict[str, np.ndarray]:
    """Per layer of ViT and LLM: time (L,) in ms at 312 TFLOP/s times 0.6 on tp GPUs, parameters
    (L,), and bytes handed on (L - 1,). ratio: ViT time per FLOP over the LLM's. The head belongs
    to the last layer; the connector joins four tokens of the ViT's output."""
    v, l = TOWERS[tower], BACKBONES[backbone]  # noqa: E741
    model = ModelConfig(vision=VisionConfig(*v, merge_size=2, max_side=448), llm=LLMConfig(
        l[5], l[0], l[1], l[2], l[3], l[4]))
    tile, text = (Lengths(*(np.array([x]) for x in t)) for t in (
        (TILE, TILE, 0), (TEXT, TEXT, TEXT)))
    head = 2.0 * l[1] * l[5] * TEXT
    vit = 9 * phase_work("vision", model, tile).forward.sum() * ratio / v[0]
    llm = (phase_work("llm", model, text).forward.sum() - head) / l[0]
    flops = np.array([vit] * v[0] + [llm] * l[0])
    flops[-1] += head
    size = np.array([2 * v[1] * (2 * v[1] + v[2])] * v[0] + [
        2 * l[1]**2 * (1 + l[4] / l[3]) + 3 * l[1] * l[2]] * l[0])
    moved = np.array([2.0 * 9 * TILE * v[1]] * (v[0] - 1) + [2.0 * TEXT * l[1]] * l[0])
    return {"ms": 1e3 * flops / (312e12 * 0.6 * tp), "parameters": size, "bytes": moved}


def split(layers: Mapping[str, np.ndarray], stages: int, method: str, gbit: float = 100) -> Split:
    """Layers to stages by a method. layers: "ms", "bytes" and "parameters" -> (layers,)."""
    return split_layers(layers["ms"], 2 * layers["ms"], layers["bytes"], num_stages=stages,
                        num_microbatches=4 * stages, method=method,
                        parameters=layers["parameters"], bytes_per_s=gbit * 1e9 / 8)


def deviation(tower: str, backbone: str, paper: list[int], ratio: float) -> tuple[int, Split]:
    """(largest difference from the paper's layers in a stage, the exact split)."""
    made = split(layer_ms(tower, backbone, ratio), len(paper), "exact")
    return int(np.abs(np.array(made.layers) - paper).max()), made


def partition_lines() -> Iterator[Fact]:
    """Tables 4 and 8: partitions, at 100 Gbit/s between stages."""
    layers = layer_ms("InternVL-6B", "InternLM2-20B")
    for method, paper, what in (
            ("parameters", ".03, 13.4, 93.6", "(1) parameters"),
            ("even", ".64, 1.2, 20.1", "(2) layers"), ("profile", ".85, 2.1, 6.5", "(3) profile"),
            ("search", ".83, 1.5, 12.2", "(4) BMP; ours: search"), ("exact", "-", "exact min-max")):
        made = split(layers, 4, method)
        size = np.add.reduceat(layers["parameters"], [0, *made.cuts]) / 1e9
        comm = layers["bytes"][np.array(made.cuts) - 1].sum() / 1e6
        yield Fact("Table 4", f"{what}: VAR(parameters, layers, forward)", paper,
                   f"{size.var():.2f}, {np.var(made.layers):.1f}, {np.var(made.stage_ms / 3):.1f} "
                   f"ms^2; {comm:.0f} MB, layers {list(made.layers)}, iteration "
                   f"{made.simulated_ms:.0f} ms")
    for tower, backbone, paper in TABLE_8:
        plain = [deviation(tower, backbone, paper, r) for r in (1.0, 1.4)]
        fitted = min((deviation(tower, backbone, paper, r)[0], r) for r in np.arange(.6, 2.8, .02))
        yield Fact("Table 8", f"{tower} + {backbone}: layers", str(paper),
                   f"unfitted {list(plain[0][1].layers)}, off by {plain[0][0]} (ViT 1.4 times "
                   f"slower a FLOP: {plain[1][0]}); fitted to this row, ratio {fitted[1]:.2f}: off "
                   f"by {fitted[0]}")


def setting_lines(n: int) -> Iterator[Fact]:
    """Tables 11, 14, 15 and 16, as far as lengths and links decide them."""
    headers = sample_headers("natural", 2 * n, 0)  # images are those of LLaVA-665K
    owner = np.repeat(np.arange(2 * n), headers.media_per_example)
    spoken, patches = np.zeros(2 * n, bool), np.zeros(2 * n, np.int64)
    spoken[owner[~headers.is_image]] = True
    np.add.at(patches, owner[headers.is_image], 4 * (headers.size[headers.is_image] // 28).prod(1))
    keep = np.flatnonzero(~spoken)[:n]
    text = headers.text[keep] + headers.prefix[keep]
    for where, what, paper, images, each, share in (
            ("Table 11", "LLaVA-665K, one tile an image", ".02, .145",
             headers.media_per_example[keep], LLM_TILE, 1.0),
            ("Table 14", "images at their own resolution (LLaVA's)", ".12, .06", patches[keep],
             0.25, 0.97)):
        tokens = np.minimum(each * images + text, 4096).astype(np.int64)
        most = max(1, int(4096 * images.sum() / tokens.sum()))  # the paper's rule for Qv
        made = isf(images, tokens, max_images=most, max_tokens=4096, min_images=int(share * most),
                   leftovers="drop")
        plain = ratios(images, tokens, grouping.random_groups(len(keep), 4, 0), padded=True)
        yield Fact(where, f"{what}, Qv {most}: dist ViT, LLM", paper, _shown(
            *ratios(images, tokens, made)[1:]) + "; without balance " + _shown(*plain[1:]))
    layers = layer_ms("InternVL-6B", "InternLM2-20B")
    for name, gbit, paper in (("A100, 4x200G", 100, "21.3 days"), ("A100, 2x200G", 50, "24.8 days"),
                              ("H100, 8x400G", 400, "12.2 days, other GPUs")):
        even, best = (split(layers, 4, m, gbit).simulated_ms for m in ("even", "search"))
        yield Fact("Table 15", f"{name} a node: iteration", paper,
                   f"search {best:.0f} ms, even {even:.0f} ms, on the same GPUs")
    tiles, tokens = mix(n, 1)
    made = {"isf": isf(tiles, tokens, **CAPS, leftovers="drop"),
            "plain": grouping.random_groups(n, 4, 0)}
    for gpus in (64, 128, 256, 512):
        found = {k: ratios(tiles, tokens, g, k == "plain", ranks=gpus // 32)
                 for k, g in made.items()}
        time = {k: 1 / (1 - x[2]) / (1 - x[0]) for k, x in found.items()}
        yield Fact("Table 16", f"{gpus} GPUs, DP {gpus // 32}: dist LLM; LLM time over ISF's",
                   ".139; 2.48-2.76x in GPU days",
                   f"{found['isf'][2]:.3f}; {time['plain'] / time['isf']:.2f}x")


GPU = "GPU measurements, which are not claimed"
LEFT_OUT = (("Tables 1 5", "time and memory by stage", "-", GPU),
            ("Table 2", "accuracy and GPU days", "-", GPU),
            ("Table 7", "components", "61.8, 51.9, 21.3 days", GPU + "; rows are shifted there"),
            ("Table 8", "EVA-CLIP-4B + InternLM2-20B", "[39, 22, 21, 20]",
             "the row has 102 layers, the public tower and LLM fewer"),
            ("Table 8", "recomputed layers, GPU days", "-", "free memory is not told; " + GPU),
            ("Tables 9 10 12 13", "other resolutions, pretraining, LLaVA-1.6", "-",
             "lengths of these data are not here"),
            ("Figures 1 2 3", "method", "-", "drawings, without figures"))


def lines(n: int = 1_200_000) -> Iterator[Fact]:
    """All rows. n: samples of the synthetic mix of Tables 3 and 6."""
    yield from grouping_lines(n)
    yield from partition_lines()
    yield from setting_lines(min(n, 200_000))
    for where, what, paper, why in LEFT_OUT:
        yield Fact(where, what, paper, "-", f"not reproduced: {why}")
