"""One step of a model with its encoders balanced over real ranks, against the same model in one
process: a copy that is neither sharded nor balanced runs every rank's batch."""

from __future__ import annotations

import copy
import itertools
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from orchmllm import balance_encoders
from tests.lib.encoder_models import FAMILIES, Family, Item, batch

WRAPS, CHECKPOINTS = ("fsdp2", "ddp"), ("none", "reentrant", "non-reentrant")


def scenarios(family: Family) -> dict[str, list[list[Item]]]:
    """Name -> items of each of three ranks. kinds[0] is the family's first medium."""
    kinds = list(family.make)
    first, other = kinds[0], kinds[-1]
    many = [Item(first, s) for s in (5, 1, 4, 2)]
    # Transformers refuses both in one batch of GLM-4V.
    apart = first if family.name.startswith("glm4v") else other
    return {
        "uneven": [many, [Item(first, 3)], [Item(first, 2), Item(first, 0)]],
        "text only": [many, [], [Item(first, 1)]],
        "media apart": [[Item(first, 5), *(Item(k, 1) for k in kinds if k != first
                                           and apart != first), Item(first, 2)],
                        [Item(other, 2), Item(other, 0)], [Item(first, 4)]],
        "one item": [[], [Item(other, 3)], []],
        "no media": [[], [], []],
    }


def inner_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that one gives to fully_shard: those in lists of three or fewer levels."""
    return [layer for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1
            and not any(isinstance(c, nn.ModuleList) for layer in m for c in layer.modules())
            for layer in m]


def wrapped(model: nn.Module, wrap: str, checkpoint: str) -> nn.Module:
    """The model under FSDP2 or DDP, with activation checkpointing of transformers."""
    if checkpoint != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        model.enable_input_require_grads()
    if wrap == "ddp":
        # Reentrant checkpoints mark parameters twice, which only a static graph allows.
        static = checkpoint == "reentrant"
        return DistributedDataParallel(
            model, find_unused_parameters=not static, static_graph=static)
    for layer in inner_layers(model):
        fully_shard(layer)
    return fully_shard(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model = getattr(model, "module", model)
    return {name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).detach()
            for name, p in model.named_parameters() if p.grad is not None}


def reference(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of this rank and the mean gradient over the ranks, from a plain copy."""
    plain = copy.deepcopy(model)
    loss = plain(**inputs, use_cache=False).loss
    loss.backward()
    out = {}
    for name, p in plain.named_parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(grad)
            out[name] = grad / dist.get_world_size()
    return float(loss.detach()), out


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of a gradient; one that is missing counts as zeros."""
    return max(float((got.get(name, torch.zeros_like(g)) - g).abs().max())
               for name, g in want.items())


def one_step(
    family: Family, wrap: str, checkpoint: str, items: list[Item], seed: int, **arguments: Any
) -> dict[str, Any]:
    """difference: of the gradients; loss: of this rank's loss; steps: the handle's last. All of a
    step that ran under balance_encoders(model, **arguments)."""
    torch.manual_seed(0)
    model = family.build()
    inputs = batch(family, model, items, seed)
    want_loss, want = reference(model, inputs)
    model = wrapped(model, wrap, checkpoint)
    handle = balance_encoders(model, **arguments)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return {"difference": worst(gradients(model), want), "size": max(
        float(g.abs().max()) for g in want.values()), "loss": abs(float(loss.detach()) - want_loss),
        "moved": sum(step.moved for step in handle.last.values())}


class Wide(ModuleType):
    """torch for code that computes in float32 whatever the model's dtype: float64 there."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name == "float32" else getattr(torch, name)


def run_cells(world, cells: list[tuple[str, str, str, str]]) -> list[dict[str, Any]]:
    """one_step of each (family, wrap, checkpoint, scenario), in one world."""
    out = []
    for (name, wrap, checkpoint, scenario), seed in zip(cells, itertools.count(), strict=False):
        family = FAMILIES[name]
        if name.startswith("glm4v"):
            import_module(f"transformers.models.{name}.modeling_{name}").torch = Wide("torch")
        items = scenarios(family)[scenario][world.rank]
        try:
            out.append(one_step(family, wrap, checkpoint, items, 3 * seed + world.rank))
        except Exception as error:
            raise RuntimeError(f"{name}, {wrap}, {checkpoint}, {scenario}: {error}") from error
    return out


def mean_gradients(model: nn.Module, losses) -> dict[str, torch.Tensor]:
    """Over the ranks, of the sum of losses(model) of this rank."""
    return mean_gradients_of(copy.deepcopy(model), losses)


def mean_gradients_of(model: nn.Module, losses) -> dict[str, torch.Tensor]:
    """The same, of this model itself."""
    sum(losses(model)).backward()
    out = {}
    for name, p in model.named_parameters():
        out[name] = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(out[name])
        out[name] /= dist.get_world_size()
    return out


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)
