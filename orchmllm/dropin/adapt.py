"""What a training loop needs besides the loader: the right loss scale, and a check that balancing
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def scale_loss(
    loss_sum: Tensor, batch: Any, *, gradients: str = "mean", num_ranks: int | None = None
) -> Tensor:
    """The loss to call backward on: loss_sum / batch.num_global_targets, times the number of ranks
    where gradients are averaged over them (FSDP's and DDP's default). BalancedDataLoader.scale_sum
    does the same and also works for a batch that was moved to a device.

    loss_sum: sum of the loss over this rank's targets. batch: as the loader yielded it, or
    loader.step. gradients: what the reduction does, mean or sum. num_ranks: over which it averages
    (default: all). A mean per rank instead would weigh the targets of a rank with few of them more
    than others. Raises ValueError, TypeError for a batch that was moved or rebuilt."""
    if not hasattr(batch, "num_global_targets"):
        raise TypeError(f"this {type(batch).__name__} has no num_global_targets: it was moved or "
                        "rebuilt after the loader yielded it; use loader.scale_sum(loss_sum)")
    if gradients not in ("mean", "sum"):
        raise ValueError(f"gradients is {gradients!r}: use 'mean' or 'sum'")
    factor = (num_ranks or dist.get_world_size()) if gradients == "mean" else 1
    return loss_sum * (factor / max(batch.num_global_targets, 1))


def check_equivalence(
    step: Callable[[Any], None], parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    balanced: Iterable[Any], plain: Iterable[Any], *, num_steps: int = 3, tolerance: float = 1e-5,
) -> float:
    """Runs `num_steps` steps of a loop with balancing and without, on the same parameters and the
    same global batches, and compares their gradients; for a user's tests.

    step: batch -> None, forward and backward (no optimizer). parameters: the model's
    named_parameters. balanced, plain: loaders of the same data in the same order, e.g. one
    BalancedDataLoader as used and one with enabled=False.
    Returns the largest ||g - g_plain|| / ||g_plain|| over steps and parameters. Raises
    AssertionError naming the parameter where it exceeds `tolerance`, ValueError if a loader ends
    before num_steps. Collective: all ranks call it and see the same figures.
    """
    gradients = [_gradients(step, parameters, loader, num_steps) for loader in (balanced, plain)]
    worst = 0.0
    for k, (got, want) in enumerate(zip(*gradients, strict=True)):
        for name, reference in want.items():
            scale = float(reference.norm())
            error = float((got[name] - reference).norm())
            relative = error / scale if scale else error
            if not relative <= tolerance:  # nan fails too
                raise AssertionError(
                    f"step {k}: the gradient of {name} differs by {relative:.1e} relative, more "
                    f"than {tolerance:.0e}: is the loss a sum divided by num_global_targets?")
            worst = max(worst, relative)
    return worst


def _gradients(step, parameters, loader, num_steps: int) -> list[dict[str, Tensor]]:
    out = []
    for batch in loader:
        for _, p in parameters():
            p.grad = None
        step(batch)
        out.append({n: _whole(p.grad) for n, p in parameters() if p.grad is not None})
        if len(out) == num_steps:
            break
    if len(out) < num_steps:
        raise ValueError(f"the loader ended after {len(out)} of {num_steps} steps")
    return out


def _whole(gradient: Tensor) -> Tensor:
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return gradient.detach().double().clone()
