"""What a run needs of the machine that it starts on: files, packages, a folder, room on its disk.
Checked without torch, before there are ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tqdm import tqdm

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.data.formats.open import check_source, sources_of
from orchmllm.data.storage.remote import Storage
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.models.described import check_parts, vocabulary
from orchmllm.runtime.lineage import START_CURE, leftovers, list_saved, start_of
from orchmllm.runtime.metrics import METRICS

SPARE_BYTES = 64 << 20  # for logs and the state of a checkpoint


def problems(checks: Iterable[Callable[[], object]]) -> list[str]:
    """What each check says that raises ValueError or OSError, once."""
    found = []
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as e:
            found.append(str(e))
    return list(dict.fromkeys(found))


def checks(recipe: Recipe, state_bytes: int) -> list[tuple[str, Callable[[], object]]]:
    """(what it looks at, a check that raises ValueError). state_bytes: size of a checkpoint of this
    recipe."""
    storage = Storage(recipe.data.remote)
    return [("run folder", partial(check_run_folder, recipe, state_bytes)),
            ("learning rates", partial(check_parts, recipe)),
            ("run.init_from", partial(check_start, recipe)),
            *((f"data {source.path}", partial(check_source, source, storage))
              for source in sources_of(recipe.data)),
            ("tokenizer", partial(_check_tokenizer, recipe.model)),
            *[("shared examples", partial(_check_shares, recipe.model))] * (
                recipe.balance.llm.max_shares > 1)]


def _check_shares(model: ModelConfig) -> None:
    from orchmllm.models.whole_model import meta_model  # with torch

    meta_model(model.folder).check_shares()


def _check_tokenizer(model: ModelConfig) -> None:
    from orchmllm.data.text.processor import Processor  # with torch

    check_vocabulary(Processor(model.folder).tokenizer, model)


def check_vocabulary(tokenizer: ChatTokenizer, model: ModelConfig) -> None:
    """Raises ValueError if the model has no row for some token."""
    size, key = vocabulary(model)
    if tokenizer.vocab_size > size:
        raise ValueError(f"{key} is {size}, but the tokenizer has "
                         f"{tokenizer.vocab_size} tokens: raise it")


def check_start(recipe: Recipe) -> None:
    """Raises ValueError if a new run would find no checkpoint at run.init_from. What is in its
    files is not looked at."""
    run = recipe.run
    goes_on = run.resume != "never" and (
        run.resume != "auto" or bool(list_saved(run.folder / "checkpoints")))
    if run.init_from and not goes_on and (start := start_of(Path(run.init_from))).sequence < 0:
        raise ValueError(f"run.init_from: {start.path} is no complete checkpoint: {START_CURE}")


def check_run_folder(recipe: Recipe, state_bytes: int) -> None:
    """Raises ValueError if run.dir cannot be written, has a log of another program, or its disk has
    no room for the checkpoints that will be there at the same time, those that are there already
    not counted. What a save that was cut off left behind is deleted by the next one."""
    folder = recipe.run.folder.absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(f"run.dir: {recipe.run.dir} cannot be written (see {there}); choose "
                         "another folder")
    begin, log = b'{"schema"', folder / METRICS
    with suppress(FileNotFoundError), log.open("rb") as f:
        if recipe.run.resume != "never" and not begin.startswith(f.read(len(begin))):
            raise ValueError(f"run.dir: {log} is no log of a run: move it away, or choose another "
                             "folder")
    keep = recipe.checkpoint
    if keep.every_steps < 0:
        return
    saves = -(-recipe.train.num_steps // keep.every_steps) if keep.every_steps else 1
    # One is written before the oldest goes.
    most = min(saves, keep.keep_last + 1)
    more = max(most - len(list(folder.glob("checkpoints/step_*"))), 1)
    needed = more * state_bytes + SPARE_BYTES
    free = shutil.disk_usage(there).free + sum(
        file.stat().st_size for left in leftovers(folder / "checkpoints")
        for file in left.rglob("*") if file.is_file())
    if free < needed:
        raise ValueError(
            f"run.dir: {recipe.run.dir} has {tqdm.format_sizeof(free, 'B')} free, but {more} more "
            f"checkpoint{'s' * (more > 1)} of {tqdm.format_sizeof(state_bytes, 'B')} and logs need "
            f"{tqdm.format_sizeof(needed, 'B')}: choose another disk, or lower "
            "checkpoint.keep_last")
