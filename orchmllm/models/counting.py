"""What the parts of a model of transformers compute, counted on the model without memory: its
encoders as its forward pass calls them, its LLM with text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from orchmllm.batch import UNKNOWN, ProcessedExample, SequenceLengths
from orchmllm.counts import masks
from orchmllm.counts.counted import EXACT, Counted, Seen, StageWork, fitted
from orchmllm.counts.kept import kept
from orchmllm.counts.on_a_gpu import fused
from orchmllm.encoders.blank import FRAMES, BlankMedia
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.models.counted_parts import Attention, BlockCounts, PartCounts, pairs
from orchmllm.models.flops import Lengths
from orchmllm.models.shapes import description
from orchmllm.models.whole_model import WholeModel, meta_model
from orchmllm.plan.layout import GENERATOR, NO_EXAMPLES

TOKENS = (64, 128, 192, 320)  # of texts: whole chunks of linear attention
SIDE = 12  # patches of an image: a multiple of what is usually merged
POSITIONS = 960  # of a clip
STATES = (80, 240)  # that an image is made from; no number of TOKENS, as which they would count
FAR = 6  # times as many rows and columns show windows, and FAR times as many again larger ones


def count(folder: str, learns: Container[str], adapters: bool, dtype: str
          ) -> dict[str, dict]:
    """Phase -> what it computes (PartCounts.as_json), of those that the model of a folder has.
    learns: those of them, and connector, that do; adapters: beside the weights of parts, which do
    not; dtype: of forward and backward. A part is counted once for all that the others may do.
    Raises ValueError where the FLOP of a part are not those of its lengths."""
    out = {}
    for part in meta_model(folder).blocks():
        what = (dtype, part, part in learns and not adapters,
                part in ("llm", GENERATOR) or adapters and part in learns,
                part != "llm" and "connector" in learns)
        out[part] = kept(["part", description(folder), *what], partial(_count, folder, *what))
    return out


def _count(folder: str, dtype: str, part: str, weights: bool, inputs: bool, connector: bool
           ) -> dict:
    """weights, connector: whether these learn; inputs: whether what is before the blocks does."""
    whole, fixed = _prepared(folder, dtype)
    learns = {part: weights, "connector": connector}
    for name, p in whole.hf.named_parameters():
        p.requires_grad_(name not in fixed and learns.get(whole.part_of(name), False))
    first = whole.blocks()[part][0]
    hook = first.register_forward_pre_hook(masks.with_gradient, with_kwargs=True) if (
        inputs) else None
    try:
        with fused():
            of = {"llm": _llm, GENERATOR: _generator}.get(part, partial(_encoder, part=part))
            return of(whole).as_json()
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(f"{folder}: what its {part} computes cannot be counted: {error!r}"
                         ) from error
    finally:
        if hook is not None:
            hook.remove()


@lru_cache(maxsize=1)
def _prepared(folder: str, dtype: str) -> tuple[WholeModel, frozenset[str]]:
    """The model, and the parameters that its class fixes."""
    whole = meta_model.__wrapped__(folder).to(getattr(torch, dtype))
    whole.dtype = getattr(torch, dtype)
    for config in {id(m.config): m.config for m in whole.modules() if hasattr(m, "config")
                   }.values():
        config._attn_implementation = masks.NAME
        config._experts_implementation = "grouped_mm"  # each row to its experts
    return whole, frozenset(n for n, p in whole.hf.named_parameters() if not p.requires_grad)


def _llm(whole: WholeModel) -> PartCounts:
    stack, head = whole.blocks()["llm"], whole.hf.get_output_embeddings()

    def run(n: int) -> int:
        ids = torch.zeros(n, dtype=torch.int64)
        row = whole.join([ProcessedExample(UNKNOWN, ids, ids, {}, NO_EXAMPLES)])
        _backward(whole.outputs(row.inputs, row.kept).logits)
        return len(row.kept)

    reaches, runs, rows = masks.reaches_of(stack[0], run), [], []
    for n in TOKENS:
        with Counted({**dict(enumerate(stack)), "head": head}, reaches, whole) as found:
            rows.append(run(n))
        runs.append(found)
    _, row, _ = _products(rows, runs, ["head"])
    item, position, square = _products(TOKENS, runs, [*range(len(stack)), "front", "behind"])
    attention: dict[Attention, np.ndarray] = defaultdict(lambda: np.zeros(3))
    if square.any():  # attention that is made of products
        attention[Attention("all")] += square
    for block in range(len(stack)):
        for seen, flop in _attended(runs[0].stages[block]).items():
            attention[Attention("causal", seen.reach) if seen.causal else Attention("all")] += flop
    moved = _moved(TOKENS, runs, [*range(len(stack)), "front", "behind"])
    return PartCounts(item, row, position, attention, moved, _blocks(TOKENS, runs, len(stack)),
                      _saved(rows, runs, ["head"]), _saved(TOKENS, runs, ["front", "behind"]),
                      _saved(TOKENS, runs, ["behind"]), runs[0].stages[0].width,
                      len(head.weight), attended=runs[0].attended)


def _generator(whole: WholeModel) -> PartCounts:
    part, stack = whole.generator, whole.blocks()[GENERATOR]
    width = whole.hf.get_input_embeddings().weight.shape[1]

    def run(n: int, states: int) -> Counted:
        rows, times, seen = (torch.empty(*size, dtype=whole.dtype, device="meta") for size in (
            (n, part.transformer.config.in_channels), (n,), (states, width)))
        with Counted(dict(enumerate(stack)), model=whole) as found:
            flow = part.flow(rows, times, seen, np.array([[1, 1, n]]),
                             SequenceLengths.from_lengths([states], "meta"))
            if flow.requires_grad:
                _backward(flow)
        return found

    with part.attention.by(masks.attention):
        (few, more) = ([run(n, states) for n in TOKENS] for states in STATES)
    blocks, between = [*range(len(stack))], STATES[1] - STATES[0]
    item, position, square = _products(TOKENS, few, [*blocks, "front", "behind"])
    row, crossed, _ = (_products(TOKENS, more, [*blocks, "front", "behind"])
                       - [item, position, square]) / between
    attention: dict[Attention, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for block in blocks:
        for flop in _attended(few[0].stages[block]).values():
            attention[Attention("all")] += flop
    attention[Attention("crossed")] += crossed
    kept_row = sum(_saved(STATES, [few[0], more[0]], [stage])
                   for stage in [*blocks, "front", "behind"])
    return PartCounts(
        item - row * STATES[0], row, position - crossed * STATES[0], attention,
        _moved(TOKENS, few, [*blocks, "front", "behind"]), _blocks(TOKENS, few, len(stack)),
        kept_row, _saved(TOKENS, few, ["front", "behind"]), _saved(TOKENS, few, ["behind"]),
        few[0].stages[0].width, part.transformer.config.in_channels,
        *[3 * part.codec.side**2] * 2)


def _encoder(whole: WholeModel, part: str) -> PartCounts:
    media, stack = PlannedEncoders(whole.hf).blank(part), whole.blocks()[part]

    def run(*grid: int) -> tuple[Counted, int, int]:
        with Counted(dict(enumerate(stack)), model=whole) as found:
            features, positions = media.run(*grid, whole.dtype)
            if features.requires_grad:
                _backward(features)
        return found, positions, features.shape[1]

    def windows(*grid: int) -> set[int]:
        with torch.no_grad():
            works = run(*grid)[0].stages.values()
        return {seen.length for work in works for seen in work.pairs}

    grids = _grids(part, media, windows)
    runs, positions, widths = zip(*(run(*grid) for grid in grids), strict=True)
    blocks, around = [*range(len(stack))], {"front", "behind"}
    row, kept, moved = np.zeros(3), 0.0, np.zeros((2, 3))
    if part == "audio" and not media.tile:  # each frame is computed, the last one too
        frames = [FRAMES * n for n in positions]
        _, row, _ = _products(frames, runs, ["front"])
        kept = _saved(frames, runs, ["front"])
        moved = _moved(frames, runs, ["front"])[:, [0, 2, 1]]  # by frames
        around.remove("front")
    moved = moved + _moved(positions, runs, [*blocks, *around])
    item, position, square = _products(positions, runs, [*blocks, *around])
    attention: dict[Attention, np.ndarray] = defaultdict(lambda: np.zeros(3))
    if square.any():  # attention that is made of products
        attention[Attention("all")] += square
    of_all = Lengths(*[np.array(positions)] * 3, np.array(grids))
    for block in blocks:
        found = np.stack([sum((_pairs_of(seen) * flop for seen, flop in _attended(
            run.stages[block]).items()), np.zeros(3)) for run in runs])
        if found.any():
            kind, flop = _kind(media.tile is not None, of_all, runs[-1].stages[block], found)
            attention[kind] += flop
    return PartCounts(item, row, position, attention, moved, _blocks(positions, runs, len(stack)),
                      kept, _saved(positions, runs, around), _saved(positions, runs, ["behind"]),
                      runs[0].stages[0].width, widths[0], media.row_bytes, media.row_values)


def _backward(out: torch.Tensor) -> None:
    """From a gradient that is there: a sum would read what is made, which the loss does."""
    out.backward(torch.empty_like(out))


def _grids(part: str, media: BlankMedia, windows: Callable[..., set[int]]
           ) -> list[tuple[int, int, int]]:
    """(tiles, rows, columns) of positions: of items that are cut into whole windows. windows: how
    long the sequences are that attend in an item with such a grid."""
    if media.tile is not None:
        return [(t, *media.tile) for t in (1, 2, 3, 5)]
    if part == "audio":
        unit = _unit(POSITIONS, lambda n: windows(1, 1, n))
        return [(1, 1, k * unit) for k in (1, 2, 3, 5)]
    unit = _unit(SIDE, lambda n: map(math.isqrt, windows(1, n, n)))
    return [(1, k * unit, n * unit) for k, n in ((1, 1), (1, 2), (2, 2), (1, 3))]


def _unit(least: int, windows: Callable[[int], Iterable[int]]) -> int:
    """A multiple of `least` and of the largest window. windows: sides of what attends in an item
    with sides of so many positions, of which some blocks may see all."""
    for far in (FAR * least, FAR**2 * least):
        if found := [side for side in windows(far) if side < far]:
            return math.lcm(max(found), least)
    return least


def _products(sizes: Sequence[int], runs: Sequence[Counted], stages: Iterable[Hashable]
              ) -> np.ndarray:
    """(3, 3) FLOP of an item, of n and of n * n, by sizes n, of the products of stages: forward,
    backward, and what blocks that have a backward pass compute again."""
    def of(run: Counted) -> Iterator[tuple[int, int, int]]:
        for stage in stages:
            work = run.stages.get(stage, StageWork())
            again = isinstance(stage, int) and (work.backward or work.backward_pairs)
            yield work.forward, work.backward, work.forward if again else 0

    totals = [[sum(column) for column in zip(*of(run), strict=True)] for run in runs]
    return np.array([[float(c) for c in fitted(sizes, column)]
                     for column in zip(*totals, strict=True)]).T


def _saved(sizes: Sequence[int], runs: Sequence[Counted], stages: Iterable[Hashable]) -> float:
    """Bytes that stages keep for one of the sizes more."""
    short, long = (sum(run.stages.get(stage, StageWork()).saved for stage in stages)
                   for run in runs[:2])
    return (long - short) / (sizes[1] - sizes[0])


def _moved(sizes: Sequence[int], runs: Sequence[Counted], stages: Iterable[Hashable]
           ) -> np.ndarray:
    """(2, 3) bytes that stages move forward and backward: once, 0, and for one of the sizes more.
    """
    works = [[run.stages.get(stage, StageWork()) for stage in stages] for run in runs[:2]]
    few, many = (np.array([[sum(work.forward_bytes for work in of)],
                           [sum(work.backward_bytes for work in of)]], float) for of in works)
    each = (many - few) / (sizes[1] - sizes[0])
    return np.hstack([few - each * sizes[0], np.zeros((2, 1)), each])


def _blocks(sizes: Sequence[int], runs: Sequence[Counted], number: int) -> list[BlockCounts]:
    """Of each block, for a position more."""
    out, more = [], sizes[1] - sizes[0]
    for short, long in zip(*([run.stages[k] for k in range(number)] for run in runs[:2]),
                           strict=True):
        each = {name: (getattr(long, name) - getattr(short, name)) / more for name in (
            "saved", "hidden", "products", "largest", "moved", "repeated", "forward")}
        learns = bool(long.saved)
        out.append(BlockCounts(
            each["saved"], learns * (each["hidden"] + each["products"]), learns * each["hidden"],
            each["largest"], each["moved"], each["repeated"] / (each["forward"] or 1)))
    return out


def _attended(work: StageWork) -> dict[Seen, np.ndarray]:
    """(3,) FLOP of a pair: forward, backward, and again."""
    return {seen: np.array([flop, work.backward_pairs[seen], flop * bool(work.backward_pairs)])
            for seen, flop in work.pairs.items()}


def _pairs_of(seen: Seen) -> int:
    n, most = seen.length, seen.reach or seen.length
    return most * (2 * n - most + 1) // 2 if seen.causal else n * n


def _kind(is_tiled: bool, lengths: Lengths, work: StageWork, found: np.ndarray
          ) -> tuple[Attention, np.ndarray]:
    """Which pairs of positions attend to each other, and the FLOP of one. found: (n, 3) FLOP of
    items. Raises ValueError for other ones."""
    longest = max(seen.length for seen in work.pairs)
    side = math.isqrt(longest)
    kinds = [Attention("tile", int(lengths.positions[0]))] if is_tiled else [
        Attention("frame"), Attention("square", side) if side * side == longest
        and lengths.grid[0, 1] > 1 else Attention("run", longest)]
    for kind in kinds:
        each = found / pairs(kind, lengths)[:, None]
        if np.allclose(each, each[0], rtol=EXACT, atol=0):
            return kind, each[0]
    raise ValueError(f"attention of {found[:, 0].tolist()} FLOP for items of "
                     f"{lengths.grid.tolist()} positions sees neither all of an item or a frame "
                     "nor windows of one size")
