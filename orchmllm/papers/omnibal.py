"""Tables and figures of OmniBal: the paper's values beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from orchmllm.papers import grouping
from orchmllm.papers.disttrain import seconds
from orchmllm.papers.fact import CALIBRATED, MEASURED, Fact, Printed
from orchmllm.papers.grouping import bias, isf
from orchmllm.papers.shapes import Backbone, Tower
from orchmllm.papers.split import Split, split_layers
from orchmllm.plan.grouping import Groups
from orchmllm.tools.predict.workload import sample_headers

RANKS, TILE, LLM_TILE, TEXT = 16, 1025, 256, 3500  # ranks; ViT and LLM tokens of a tile; Qt used
CAPS = {"max_images": 9, "max_tokens": 4096}
TOWERS = {"InternVL-6B": Tower(45, 3200, 12800, 25), "EVA-CLIP-1B": Tower(40, 1408, 6144, 16),
          "EVA-CLIP-8B": Tower(32, 4096, 20480, 32), "EVA-CLIP-18B": Tower(48, 5120, 25600, 40)}
BACKBONES = {"Llama3-8B": Backbone(32, 4096, 14336, 32, 8, 128256),
             "InternLM2-20B": Backbone(48, 6144, 16384, 48, 8, 92544),
             "Yi-34B": Backbone(60, 7168, 20480, 56, 8, 64000),
             "Llama3-70B": Backbone(80, 8192, 28672, 64, 8, 128256),
             "Qwen1.5-110B": Backbone(80, 8192, 49152, 64, 8, 152064)}
RATIOS = ("pad", "dist ViT", "dist LLM")
PARTITIONS = {"(1) parameter-based": "parameters", "(2) layer-based": "even",
              "(3) profile-based": "profile", "(4) BMP": "search"}  # of Table 4


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


def shares(printed: Printed, where: str, case: str, ours: Sequence[float],
           kind: str = "") -> Iterator[Fact]:
    """A row for each ratio. ours: the last of RATIOS."""
    for what, value in zip(RATIOS[-len(ours):], ours, strict=True):
        yield printed.row(where, what, case, value, kind=kind)


def grouping_lines(printed: Printed, n: int) -> Iterator[Fact]:
    """Tables 3 and 6, Figure 4 and section 5.4, on n synthetic samples."""
    tiles, tokens = mix(n, 0)
    dropping = {**CAPS, "leftovers": "drop"}
    kept, packed = isf(tiles, tokens, **dropping), isf(tiles, tokens, **CAPS)
    plain = ratios(tiles, tokens, grouping.random_groups(n, 4, 0), padded=True)
    yield from shares(printed, "Table 3", "baseline", plain, CALIBRATED)
    yield from shares(printed, "Table 3", "length-group", ratios(
        tiles, tokens, grouping.length_group(tokens, 4, window=400, seed=0), padded=True))
    yield from shares(printed, "Table 3", "device-group", ratios(
        tiles, tokens, grouping.device_group(tokens, 4, num_ranks=RANKS, window=6400, seed=0),
        padded=True, as_made=True))
    yield from shares(printed, "Table 3", "ISF", ratios(tiles, tokens, kept))
    dropped, lost, everything = bias(kept, tiles)
    yield printed.row("Table 3", "average batch", "ISF", kept.sizes.mean(), note=(
        f"{dropped:.2%} of the samples are dropped, with {lost:.2f} tiles instead of "
        f"{everything:.2f}; with these packed, too, {packed.sizes.mean():.3f}, dist ViT and LLM "
        "{:.3f} and {:.3f}".format(*ratios(tiles, tokens, packed)[1:])))
    yield printed.row("section 5.4", "ten rounds of ISF", "1.2 M samples",
                      seconds(lambda: isf(tiles, tokens, **dropping), 1), kind=MEASURED)
    for images, words in ((0, 64), (0, 128), (0, 256), (1, 128)):
        made = isf(tiles, tokens, **dropping, min_images=CAPS["max_images"] - images,
                   min_tokens=CAPS["max_tokens"] - words)
        yield from shares(printed, "Table 6", f"Qv - {images}, Qt - {words}",
                          ratios(tiles, tokens, made)[1:])
    after = {k: ratios(tiles, tokens, isf(tiles, tokens, **dropping, rounds=k)) for k in (1, 5, 10)}
    for k, what in enumerate(RATIOS[1:], 1):
        yield printed.row("Figure 4", f"{what}, fall in one round", "",
                          100 * (1 - after[1][k] / plain[k]))
        yield printed.row("Figure 4", f"{what} after ten rounds over that after five", "",
                          after[10][k] / after[5][k])


def layer_ms(tower: str, backbone: str, ratio: float = 1.0, tp: int = 2) -> dict[str, np.ndarray]:
    """Per layer of ViT and LLM: time (L,) in ms at 312 TFLOP/s times 0.6 on tp GPUs, parameters
    (L,), and bytes handed on (L - 1,). ratio: ViT time per FLOP over the LLM's. The head belongs
    to the last layer; the connector joins four tokens of the ViT's output."""
    vit, llm = TOWERS[tower], BACKBONES[backbone]
    tile = 9 * (vit.front_flops(TILE) / vit.layers + vit.layer_flops(TILE)) * ratio
    flops = np.array([tile] * vit.layers + [llm.layer_flops(TEXT)] * llm.layers)
    flops[-1] += llm.head_flops(TEXT)
    size = np.array([2 * vit.width * (2 * vit.width + vit.mlp)] * vit.layers + [
        2 * llm.width**2 * (1 + llm.kv_heads / llm.heads) + 3 * llm.width * llm.mlp] * llm.layers)
    moved = np.array([2.0 * 9 * TILE * vit.width] * (vit.layers - 1)
                     + [2.0 * TEXT * llm.width] * llm.layers)
    return {"ms": 1e3 * flops / (312e12 * 0.6 * tp), "parameters": size, "bytes": moved}


def split(layers: Mapping[str, np.ndarray], stages: int, method: str, gbit: float = 100) -> Split:
    """Layers to stages by a method. layers: "ms", "bytes" and "parameters" -> (layers,)."""
    return split_layers(layers["ms"], 2 * layers["ms"], layers["bytes"], num_stages=stages,
                        num_microbatches=4 * stages, method=method,
                        parameters=layers["parameters"], bytes_per_s=gbit * 1e9 / 8)


def deviation(tower: str, backbone: str, paper: Sequence[int], ratio: float) -> tuple[int, Split]:
    """(largest difference from the paper's layers in a stage, the exact split)."""
    made = split(layer_ms(tower, backbone, ratio), len(paper), "exact")
    return int(np.abs(np.array(made.layers) - paper).max()), made


def table_8(printed: Printed) -> dict[tuple[str, str], list[int]]:
    """(tower, LLM) -> the paper's layers of each stage, of towers with known shapes."""
    return {tuple(case.split(" + ")): json.loads(row["value"])
            for (where, _, case), row in printed.left.items()
            if where == "Table 8" and case.startswith(tuple(TOWERS))}


def partition_lines(printed: Printed) -> Iterator[Fact]:
    """Tables 4 and 8: partitions, at 100 Gbit/s between stages."""
    layers = layer_ms("InternVL-6B", "InternLM2-20B")
    for name, method in PARTITIONS.items():
        made = split(layers, 4, method)
        size = np.add.reduceat(layers["parameters"], [0, *made.cuts]) / 1e9
        comm = layers["bytes"][np.array(made.cuts) - 1].sum() / 1e6
        note = f"ours: {method}, layers {list(made.layers)}, {comm:.0f} MB between stages"
        for what, values in (("param", size), ("num_layer", made.layers),
                             ("fwd_time", made.stage_ms / 3)):
            yield printed.row("Table 4", f"VAR({what})", name, np.var(values), note=note)
    for (tower, backbone), paper in table_8(printed).items():
        (off, plain), (slow, _) = (deviation(tower, backbone, paper, r) for r in (1.0, 1.4))
        fitted = min((deviation(tower, backbone, paper, r)[0], r) for r in np.arange(.6, 2.8, .02))
        yield printed.row(
            "Table 8", "layers of the stages", f"{tower} + {backbone}", plain.layers,
            note=f"off by {off} layers (with a ViT 1.4 times slower a FLOP: {slow}); with a ratio "
            f"fitted to this row, {fitted[1]:.2f}: {fitted[0]}")


def setting_lines(printed: Printed, n: int) -> Iterator[Fact]:
    """Tables 11, 14 and 16, as far as lengths decide them."""
    headers = sample_headers("natural", 2 * n, 0)  # images are those of LLaVA-665K
    owner = np.repeat(np.arange(2 * n), headers.media_per_example)
    spoken, patches = np.zeros(2 * n, bool), np.zeros(2 * n, np.int64)
    spoken[owner[~headers.is_image]] = True
    np.add.at(patches, owner[headers.is_image], 4 * (headers.size[headers.is_image] // 28).prod(1))
    keep = np.flatnonzero(~spoken)[:n]
    text = headers.text[keep] + headers.prefix[keep]
    for where, case, images, each, share in (
            ("Table 11", "LLaVA-665K", headers.media_per_example[keep], LLM_TILE, 1.0),
            ("Table 14", "ISF", patches[keep], 0.25, 0.97)):  # LLaVA's at their own resolution
        tokens = np.minimum(each * images + text, 4096).astype(np.int64)
        most = max(1, int(4096 * images.sum() / tokens.sum()))  # the paper's rule for Qv
        made = isf(images, tokens, max_images=most, max_tokens=4096, min_images=int(share * most),
                   leftovers="drop")
        yield from shares(printed, where, case, ratios(images, tokens, made)[1:])
    yield from shares(printed, where, "without balance", ratios(
        images, tokens, grouping.random_groups(len(keep), 4, 0), padded=True))
    tiles, tokens = mix(n, 1)
    made = isf(tiles, tokens, **CAPS, leftovers="drop")
    for gpus in (64, 128, 256, 512):
        ours = ratios(tiles, tokens, made, ranks=gpus // 32)
        pad, _, idle = ratios(tiles, tokens, grouping.random_groups(n, 4, 0), True, gpus // 32)
        yield from shares(printed, "Table 16", f"{gpus} GPUs", ours[1:])
        yield printed.row("Table 16", "times faster than without balance", f"{gpus} GPUs",
                          (1 - ours[2]) / (1 - idle) / (1 - pad), note="ours: of the LLM's phase "
                          "alone")


def lines(n: int = 1_200_000) -> Iterator[Fact]:
    """All rows. n: samples of the synthetic mix of Tables 3 and 6."""
    printed = Printed("omnibal")
    yield from grouping_lines(printed, n)
    yield from partition_lines(printed)
    yield from setting_lines(printed, min(n, 200_000))
    yield from printed.rest()
