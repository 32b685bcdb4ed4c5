"""Whether a model of transformers may be trained in packed rows with planned encoders: proven on a
small model like it. A proof that was passed is kept on the disk, for each configuration, processor
and version."""

from __future__ import annotations

import copy
import hashlib
import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchmllm.batch import ProcessedExample
from orchmllm.comm.exchange import RowGather
from orchmllm.config.recipe import Recipe
from orchmllm.counts.kept import kept
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media.av_process import has_pyav
from orchmllm.data.text.processor import Processor
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import meta_model
from orchmllm.proof.compare import compare
from orchmllm.proof.examples import made_by
from orchmllm.proof.small import small
from orchmllm.sharding.build import agreed

_CURE = ("so its packed rows would not be trained as transformers trains examples; model.proof: "
         "false trains it without this comparison")


def prove_on_first_rank(recipe: Recipe, dataset: ConversationDataset, gather: RowGather,
                        log: Callable[[str], object]) -> None:
    """By the recipe's model. Collective; gather: of all ranks. Raises RemoteError on all of them
    for a model that is not trained exactly."""
    processor = getattr(dataset.reader, "processor", None)
    if not recipe.model.proof or not isinstance(processor, Processor):
        why = "the rows come from no processor" if recipe.model.proof else "model.proof is false"
        log(f"{why}: that this model is trained as transformers trains examples is not proven")
        return
    error = None
    if gather.rank == 0:
        try:
            prove(Path(recipe.model.folder), processor, log, compiled=recipe.fsdp.compile,
                  chunked=recipe.fsdp.loss_chunk_rows > 0)
        except Exception as e:  # the others wait
            error = e
    agreed(gather, error)


def prove(folder: Path, processor: Processor, log: Callable[[str], object], *,
          compiled: bool = False, chunked: bool = False) -> None:
    """Raises ValueError saying what differs, for a model that is not trained exactly. processor: of
    the folder. compiled, chunked: see orchmllm.proof.compare.compare."""
    asked = {"compiled": compiled, "chunked": chunked}
    config = read_config(folder)
    said = {name: value for name, value in config.to_diff_dict().items()
            if name not in ("_name_or_path", "transformers_version", "dtype")}
    started = time.process_time()
    try:  # what is raised is not kept: it may be of this machine, such as a disk that is full
        found = kept(["proof", repr(sorted(said.items())), processor.digest, _code(config),
                      has_pyav(), compiled, chunked],
                     lambda: _difference(config, processor, meta_model(str(folder)).generator,
                                         asked))
    except Exception as error:  # whatever the model's own code raises
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{folder}: {kind}{' '.join(str(error).split())}: {_CURE}") from error
    seconds = time.process_time() - started
    log(f"model.proof: a small {config.model_type} is trained as transformers trains examples\n"
        f"  to {found:.0e} of a gradient ({seconds:.1f} s of CPU)")


def _difference(config: Any, processor: Processor, generator: nn.Module | None,
                asked: Mapping[str, bool]) -> float:
    """The largest one, as a share of a gradient. Raises whatever the model's own code raises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sizes are small
    try:
        found = 0.0
        if generator is not None:
            found = generator.compared()
            config = copy.deepcopy(config)
            del config.generator_config
        return max(found, compare(*_small(config, processor), **asked))
    finally:
        torch.set_num_threads(threads)


def _small(config: Any, processor: Processor) -> tuple[nn.Module, list[ProcessedExample]]:
    """A small model and the most of the examples that transformers itself runs with it."""
    error = None
    for examples in made_by(processor):
        try:
            return small(config, examples)
        except ValueError as e:
            error = error or e
    raise error


def _code(config: Any) -> str:
    """Digest of the model's own code, where that is not of transformers, whose version is known."""
    module = inspect.getmodule(model_class(config))
    if module is None or module.__name__.startswith(("transformers.", "orchmllm.")):
        return ""
    return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
