"""AdamW on a sharded model: groups of parameters by submodule, and the norm of the gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchmllm.config.recipe import TRAIN_PARTS, TrainConfig
from orchmllm.models.whole_model import WholeModel


def learning_parts(model: WholeModel) -> dict[str, list[nn.Parameter]]:
    """part -> its parameters that learn, without parts that have none. Raises ValueError if nothing
    learns."""
    parts: dict[str, list[nn.Parameter]] = {part: [] for part in TRAIN_PARTS}
    for name, p in model.named_parameters():
        if p.requires_grad:
            parts[model.part_of(name.removeprefix("hf."))].append(p)
    learning = {part: found for part, found in parts.items() if found}
    if not learning:
        raise ValueError("model.*.frozen: every submodule is frozen, nothing would be trained")
    return learning


def describe_learning(model: WholeModel) -> str:
    """One line for the log."""
    counts = {part: sum(p.numel() for p in found)
              for part, found in learning_parts(model).items()}
    whole = sum(p.numel() for p in model.parameters())
    return (f"{sum(counts.values()):,} of {whole:,} parameters learn: "
            + ", ".join(f"{part} {count:,}" for part, count in counts.items()))


class _ShardAdamW(torch.optim.AdamW):
    """AdamW that computes on this rank's shards as plain tensors: DTensor's dispatch of every
    operation would take most of a small model's step, and leaves the same bits."""

    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:
        """Fills the lists: parameters, gradients, moments and counts of steps of a group."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = _local(tensors)
        return has_complex


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's parts, which share the tensors' memory."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def make_optimizer(model: WholeModel, config: TrainConfig
                   ) -> torch.optim.AdamW:
    """AdamW over learning_parts; with a GPU its fused kernel. Each group has `lr_share`, its
    learning rate over train.lr. Norms, biases and the token embedding are not decayed."""
    embedding = model.hf.get_input_embeddings().weight
    groups = []
    for part, parameters in learning_parts(model).items():
        lr, decay = config.lr_of(part), config.weight_decay_of(part)
        decayed = [p for p in parameters if p.dim() > 1 and p is not embedding]
        rest = [p for p in parameters if p.dim() <= 1 or p is embedding]
        groups += [{"params": members, "lr": lr, "weight_decay": by, "lr_share": lr / config.lr}
                   for members, by in ((decayed, decay), (rest, 0.0)) if members]
    fused = torch.cuda.is_available()  # also for parameters that are offloaded to the host
    return _ShardAdamW(groups, betas=(config.beta1, config.beta2), fused=fused or None)


def takes_flags(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer reads on the device, from its attribute `found_inf`, that it is to
    leave everything as it is: fused kernels of a GPU do."""
    first = optimizer.param_groups[0]["params"][0]
    return bool(optimizer.defaults["fused"]) and first.device.type == "cuda"


@torch.no_grad()
def clip_gradients(parts: Mapping[str, Sequence[nn.Parameter]], max_norm: float,
                   device: torch.device) -> Tensor:
    """Scales all gradients, in place, so that their norm is at most max_norm (0: leaves them).
    What no rank computed in the step, such as an encoder without media, gets zeros.

    Returns (1 + number of parts,) on `device`: the norm before, and that of each part, the same on
    all ranks. Collective, one all-reduce of a few numbers; nothing waits for the device."""
    for p in chain(*parts.values()):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = [_local([p.grad for p in parameters]) for parameters in parts.values()]
    squares = [torch.stack(torch._foreach_norm(g, 2, torch.promote_types(
        torch.float32, g[0].dtype))).square().sum() for g in grads]
    total = torch.stack(squares).to(device, non_blocking=True)
    first = next(iter(parts.values()))[0]
    if isinstance(first, DTensor):
        dist.all_reduce(total, group=first.device_mesh.get_group("shard"))
    norms = torch.cat([total.sum().reshape(1), total]).sqrt()
    if max_norm:
        scale = (max_norm / (norms[0] + 1e-6)).clamp(max=1.0)
        for g in grads:
            torch._foreach_mul_(g, scale.to(g[0].device, g[0].dtype))
    return norms


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of train.lr: linear warm-up, then by train.schedule to lr * min_lr_ratio at num_steps, which
    is one after the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay = config.num_steps - config.warmup_steps
    if config.schedule == "wsd":
        decay = min(decay, max(1, round(config.decay_ratio * config.num_steps)))
    done = (step - config.num_steps + decay) / max(decay, 1)
    done = min(max(done, 0.0), 1.0)
    left = 1 - done if config.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> float:
    """Sets that of a step, of each group its `lr_share`, and returns it."""
    lr = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_share"]
    return lr
