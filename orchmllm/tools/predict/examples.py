"""The examples that a prediction is made for: a recipe's own, by the length index of its data,
those of a statistics file, or a mix drawn from published statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from orchmllm.config.recipe import Recipe
from orchmllm.data.formats.open import DataSource, check_source, sources_of
from orchmllm.data.index import LengthIndex, joined_layouts, usable, usable_rows
from orchmllm.data.sampler import make_sampler, split_rows
from orchmllm.data.storage.remote import Storage
from orchmllm.models.families import read_config
from orchmllm.plan.layout import AUDIO, GENERATOR, MADE, TEXT, VISION, BatchLayout
from orchmllm.tools.predict.whole import absent, parts
from orchmllm.tools.predict.workload import SAMPLE_RATE, Headers, batch_layout, sample_headers

if TYPE_CHECKING:
    from orchmllm.data.dataset import ConversationDataset


@dataclass(frozen=True)
class Examples:
    """What global batches are drawn from. what: in words. draw(num_ranks, batch_size, seed): a
    global batch in equal shares. epoch: examples of an epoch, 0 if nobody knows, and of weighted
    sources, which have epochs of their own. capped: the draws are capped mini-batches, one a rank
    where batch_size is the recipe's train.batch_size. rows(): all that may be drawn, in parts,
    none if that is not known; place(dataset index): where one is."""

    what: str
    draw: Callable[[int, int, int], BatchLayout]
    epoch: int = 0
    capped: bool = False
    rows: Callable[[], Iterable[BatchLayout]] = lambda: ()
    place: Callable[[int], str] = lambda i: ""


def _cut(layout: BatchLayout, limit: int) -> BatchLayout:
    """The layout with its examples' last texts cut to `limit` tokens an example (0: as it is)."""
    if not limit:
        return layout
    tokens, ends = layout.num_tokens.copy(), np.cumsum(layout.segments_per_example)
    texts = np.where(layout.modality == TEXT, np.arange(len(tokens)), 0)
    last = np.maximum.reduceat(texts, ends - layout.segments_per_example)
    excess = np.maximum(layout.tokens_per_example - limit, 0)
    tokens[last] = np.maximum(tokens[last] - excess, 1)
    return replace(layout, num_tokens=tokens,
                   num_targets=np.minimum(layout.num_targets, tokens[last]))


def of_mix(recipe: Recipe, mix: str = "", why: str = "") -> Examples:
    """A mix of orchmllm.tools.predict.workload (default: `made` of a model that makes images, else
    `natural`). why: said behind its name."""
    without, mix = absent(recipe.model), mix or (
        "made" if GENERATOR in parts(recipe.model) else "natural")
    media = [name for p, name in (("vision", "images"), ("audio", "audio")) if p not in without]
    kinds = f"{', '.join(media)} and text" if media else "text"

    def draw(num_ranks: int, batch_size: int, seed: int) -> BatchLayout:
        headers = sample_headers(mix, num_ranks * batch_size, seed, without)
        return _cut(batch_layout(headers, recipe.model, num_ranks), recipe.data.max_example_tokens)

    return Examples(f"drawn from the paper's {kinds} (mix {mix}){why}", draw)


def dataset_of(recipe: Recipe) -> ConversationDataset:
    """The map-style dataset of a recipe's sources. Raises ValueError naming what cannot be read."""
    read_config(Path(recipe.model.folder))  # other versions of transformers lack what reads rows
    from orchmllm.data.stream import open_dataset  # with torch

    return open_dataset(replace(recipe.data, streaming=False), recipe.model.folder,
                        seed=recipe.run.seed)


def of_recipe(recipe: Recipe) -> Examples | None:
    """The recipe's own examples by the indexes that are there, or None if one is missing. Raises
    ValueError for data that cannot be read."""
    for source in sources_of(recipe.data):
        check_source(source, Storage(recipe.data.remote))  # before torch is imported
    rows = dataset_of(recipe)
    return None if None in rows.indexes else of_indexes(recipe, rows.sources, rows.indexes)


def of_indexes(recipe: Recipe, sources: Sequence[DataSource],
               indexes: Sequence[LengthIndex]) -> Examples:
    """The rows of the recipe's sources that are trained on, in the global batches of a run (of a
    stream: without its order): seeds are steps. Raises ValueError if none of them is usable."""
    held_out = recipe.data.num_validation
    learnt, _ = split_rows(sources, held_out)
    rows = usable(indexes, learnt)
    if not len(rows):
        raise ValueError("the data of the recipe have no usable row")
    bounds = np.cumsum([0, *map(len, indexes)])
    dataset = SimpleNamespace(sources=sources, indexes=indexes)

    @cache
    def sampler_of(per_step: int):
        return make_sampler(dataset, learnt, per_step, seed=recipe.run.seed,
                            data=recipe.data, per_rank=recipe.train.batch_size)

    def draw(num_ranks: int, batch_size: int, step: int) -> BatchLayout:
        sampler = sampler_of(num_ranks * batch_size)
        shares = [s.stop - s.start for s in sampler.shares(step, num_ranks)]
        return joined_layouts(indexes, bounds, sampler.batch(step), shares)

    capped = recipe.data.batching == "capped"
    weighted = len(sources) > 1 and any(s.config.weight for s in sources)
    epoch = np.diff(np.searchsorted(rows, bounds)) @ [s.config.repeats for s in sources]

    def place(i: int) -> str:
        source = int(np.searchsorted(bounds, i, side="right")) - 1
        return "{}, row {}".format(*sources[source].store.place(i - int(bounds[source])))

    return Examples(
        f"the recipe's own, {len(rows)} rows by the length index of its data"
        + f", without the {held_out} of data.num_validation" * bool(held_out)
        + (", in its capped mini-batches" if capped else ""),
        draw, 0 if weighted else int(epoch), capped, partial(usable_rows, indexes, rows), place)


Size = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(ge=1 / SAMPLE_RATE, lt=2**31 / SAMPLE_RATE)]


class Row(BaseModel, extra="forbid"):
    """A line of a statistics file."""

    images: list[tuple[Size, Size]] = []
    audio_s: list[Seconds] = []
    made: list[tuple[Size, Size]] = []
    text_tokens: int = Field(0, ge=0, lt=2**31)


def of_file(recipe: Recipe, path: Path) -> Examples:
    """The examples of a statistics file, a JSON object a line: {"images": [[width, height], ...],
    "audio_s": [seconds, ...], "made": [[width, height], ...], "text_tokens": n}, each key optional.
    Raises ValueError naming the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--lengths {path}: cannot be read ({e})") from e
    rows, size, modality = [], [], []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(row := Row.model_validate_json(line))
        except ValidationError as e:
            wrong = e.errors()[0]
            raise ValueError(
                f'--lengths {path}, line {number}: not {{"images": [[width, height]], "audio_s": '
                f'[seconds], "made": [[width, height]], "text_tokens": n}} with sizes below 2**31: '
                f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from e
        clips = [(int(s * SAMPLE_RATE), SAMPLE_RATE) for s in row.audio_s]
        for kind, sizes in ((VISION, row.images), (AUDIO, clips), (MADE, row.made)):
            size += sizes
            modality += [kind] * len(sizes)
    if not lines:
        raise ValueError(f"--lengths {path}: it is empty")
    tokens = np.array([max(row.text_tokens, 1) for row in rows])
    headers = Headers(
        np.zeros_like(tokens), tokens, tokens,
        np.array([len(row.images) + len(row.audio_s) + len(row.made) for row in rows]),
        np.array(modality, int), np.array(size, np.int64).reshape(-1, 2))
    try:
        pool = _cut(batch_layout(headers, recipe.model, 1), recipe.data.max_example_tokens)
    except ValueError as e:  # longer than the model takes
        raise ValueError(f"--lengths {path}: {e}") from e
    def draw(num_ranks: int, batch_size: int, seed: int) -> BatchLayout:
        count = num_ranks * batch_size
        chosen = np.random.default_rng(seed).choice(len(lines), count, replace=count > len(lines))
        return pool.taken(chosen, np.full(num_ranks, batch_size))

    return Examples(f"{len(lines)} examples of {path}", draw, len(lines), False, lambda: [pool],
                    lambda i: f"{path}, line {i + 1}")


def examples_of(recipe: Recipe, mix: str = "", path: Path | None = None) -> Examples:
    """What --mix or --lengths asks for; else the recipe's own examples if their index is there;
    else the paper's mix, which says why."""
    if mix or path:
        return of_file(recipe, path) if path else of_mix(recipe, mix)
    try:
        own, why = of_recipe(recipe), "`orchmllm data index` was not run"
    except (ValueError, OSError) as e:
        own, why = None, str(e).splitlines()[0]
    return own or of_mix(recipe, why=f"; the recipe's own could not be used: {why}")
