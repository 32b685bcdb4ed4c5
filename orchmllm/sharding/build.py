"""From a recipe to its sharded model: the three parts of this package, or a model of
transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.batch import Step
from orchmllm.comm.agree import describe, raise_first
from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.encoders.hook import balance_encoders
from orchmllm.encoders.sharing import EncoderStep
from orchmllm.hf.sources import WeightSource
from orchmllm.models.families import read_config
from orchmllm.models.hf import WholeModel
from orchmllm.models.mllm import MultimodalModel
from orchmllm.sharding.fsdp import build_model
from orchmllm.sharding.hf import load_whole


def build(
    recipe: Recipe, device: torch.device, checkpointing: Mapping[str, str],
    sources: Sequence[WeightSource], gather: RowGather, ranks_per_node: int,
    group: dist.ProcessGroup | None,
) -> tuple[MultimodalModel | WholeModel, Callable[[Step], AbstractContextManager]]:
    """The model, and what has to be around the microbatches of each of its training steps.
    Collective; gather: of all ranks. group: for what moves in a forward (default: the default
    group). The rest as in orchmllm.sharding.fsdp.build_model."""
    if not recipe.model.folder:
        return build_model(recipe.model, recipe.fsdp, device, recipe.run.seed, checkpointing,
                           sources, ranks_per_node=ranks_per_node, group=group), nullcontext
    error = None
    with starting_weights(recipe.model, recipe.run.seed, recipe.run.folder, gather) as folder:
        try:
            model = load_whole(folder, recipe.model, recipe.fsdp, device, checkpointing,
                               ranks_per_node)
        except Exception as e:  # the others wait
            error = e
        agreed(gather, error)
    return model, MovedEncoders(model, recipe, group)


class MovedEncoders:
    """balance_encoders in the forwards of a run: validation and unbalanced steps too, because a
    rank without media has to take part in what an encoder gathers."""

    def __init__(self, model: WholeModel, recipe: Recipe, group: dist.ProcessGroup | None) -> None:
        self.handle = balance_encoders(
            model.hf, group=group, when="always", min_gain=recipe.balance.min_gain,
            timeout_s=recipe.launch.timeout_s)
        self._balances = recipe.balance.enabled and recipe.balance.vision.policy != "none"
        self.handle.moves = self._balances
        self._seen: list[EncoderStep] = []
        model.register_forward_hook(lambda *_: self._seen.extend(self.handle.last.values()))

    @contextmanager
    def __call__(self, step: Step) -> Iterator[None]:
        """Around the microbatches of a training step, whose figures then get the imbalance and the
        movement of what was encoded in place of those that its plan predicts."""
        self.handle.moves = self._balances and not step.as_sampled
        self._seen.clear()
        yield
        self.handle.moves = self._balances
        if self._seen:
            step.phases["vision"]["imbalance_after"] = sum(
                encoded.imbalance[1] for encoded in self._seen) / len(self._seen)
            step.phases["vision"]["moved_bytes"] = sum(e.moved_bytes for e in self._seen)


@contextmanager
def starting_weights(
    model: ModelConfig, seed: int, run: Path, gather: RowGather
) -> Iterator[Path]:
    """The folder that the model starts from: model.pretrained; or one in the run folder, which
    lasts as long as this context, with weights that one rank draws from `seed`. Collective. Raises
    RemoteError on all ranks if they cannot be written."""
    if model.pretrained:
        yield Path(model.folder)
        return
    folder, error = run / "initial_weights", None
    if gather.rank == 0:
        try:
            _draw(Path(model.folder), seed, folder)
        except Exception as e:  # the others wait
            error = e
    agreed(gather, error)
    yield folder
    agreed(gather, None)  # all have read it
    if gather.rank == 0:
        shutil.rmtree(folder)


def _draw(config: Path, seed: int, folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForImageTextToText.from_config(read_config(config)).save_pretrained(folder)


def agreed(gather: RowGather, error: Exception | None) -> None:
    """Waits for all ranks. Raises RemoteError on all of them if one has an error."""
    text = describe(error)
    sizes = gather(np.array([len(text.encode())], np.int64))[:, 0]
    raise_first(0, gather_texts(gather, text, sizes), error)
