"""A check for a user's tests that balancing changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orchmllm.loader.loader import BalancedDataLoader

ROUNDINGS = 10  # in float32: of the whole gradient that a parameter's own may differ by
Gradients = dict[str, tuple[Tensor, float]]


def check_equivalence(
    step: Callable[[Any], None], parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    loader: Iterable[Any], *, encoders: Sequence[Any] = (), num_steps: int = 3,
    tolerance: float = 1e-5,
) -> float:
    """Runs `num_steps` steps of a loop with balancing and without, on the same parameters and the
    same global batches, and compares their gradients; for a user's tests:

        def step(batch):
            loader.scale_mean(model(**batch).loss, batch["labels"], shifted=True).backward()
        check_equivalence(step, model.named_parameters, loader)

    step: batch -> None, forward and backward (no optimizer); with accumulation_steps it is called
    for each batch, and gradients are compared after the last. parameters: the model's
    named_parameters. loader: a BalancedDataLoader, which stands afterwards where it stood, or any
    other that yields the same batches each time. encoders: handles of balance_encoders, which move
    nothing in the run for comparison (`shadow`). Every rank then encodes what it has: under FSDP
    each needs an item, as it would without balance_encoders.
    Returns the largest ||g - g_plain|| / ||g_plain|| over steps and parameters, and over the whole
    gradient. A difference is rounding, and counts as none, up to ten units in the last place of the
    model's whole gradient: some parameters' own gradient is 0 but for rounding (a bias of keys).
    In a type coarser than float32 that is one unit, as sums within a rank are made in float32.
    The loop without balancing runs twice; by how much its gradients differ is allowed for twice.
    Raises AssertionError naming the parameter where a difference exceeds `tolerance`, or if the two
    runs without balancing differ by more themselves (dropout); ValueError if there is nothing to
    switch off or the loader ends before num_steps. Collective: all ranks call it and see the same
    figures.
    """
    if not encoders and not (isinstance(loader, BalancedDataLoader) and loader.enabled):
        raise ValueError("check_equivalence: nothing is balanced; pass a BalancedDataLoader that "
                         "is enabled, or `encoders`")
    runs = []
    for balanced in (True, False, False):
        with _as_sampled(loader, () if balanced else encoders, not balanced):
            runs.append(_gradients(step, parameters, loader, num_steps))
    return max(_difference(k, *steps, tolerance) for k, steps in enumerate(
        zip(*runs, strict=True)))


def _difference(k: int, got: Gradients, want: Gradients, again: Gradients, tolerance: float
                ) -> float:
    """See check_equivalence. got: the gradients of step k with balancing; want, again: without."""
    scales = {name: float(gradient.norm()) for name, (gradient, _) in want.items()}
    errors, noises = ({name: float((run[name][0] - gradient).norm()) for name, (gradient, _)
                       in want.items()} for run in (got, again))
    rounding = {name: part for name, (_, part) in want.items()}
    whole = scales["the whole model"] = math.hypot(*scales.values())
    for figures, joined in ((errors, math.hypot), (noises, math.hypot), (rounding, max)):
        figures["the whole model"] = joined(*figures.values())
    worst = 0.0
    for name, scale in scales.items():
        floor, noise, error = rounding[name] * whole, noises[name], errors[name]
        if noise > floor + tolerance * whole:
            raise AssertionError(
                f"step {k}: without balancing, two runs over the same batches have gradients of "
                f"{name} that differ by {noise / (scale or 1.0):.1e} relative, so nothing can be "
                "compared: switch off dropout (p=0, or model.eval()) and other random numbers of "
                "the model and the data")
        relative = 0.0 if error <= floor + 2 * noise else error / scale if scale else error
        if not relative <= tolerance:  # nan fails too
            raise AssertionError(
                f"step {k}: the gradient of {name} differs by {relative:.1e} relative, more than "
                f"{tolerance:.0e}: is the loss scaled by loader.scale_sum or loader.scale_mean?")
        worst = max(worst, relative)
    return worst


@contextmanager
def _as_sampled(loader: Any, encoders: Sequence[Any], off: bool) -> Iterator[None]:
    """A run after which the loader stands where it stood; with nothing balanced if `off`."""
    with ExitStack() as after:
        for handle in encoders:
            after.callback(setattr, handle, "shadow", handle.shadow)
            handle.shadow = True
        if isinstance(loader, BalancedDataLoader):
            for name in ("_next", "_done", "enabled"):
                after.callback(setattr, loader, name, getattr(loader, name))
            loader.enabled = loader.enabled and not off
        yield


def _gradients(step, parameters, loader, num_steps: int) -> list[Gradients]:
    """Per step: name -> (gradient in float64, part of the whole gradient that its type rounds)."""
    out = []
    for batch in loader:
        info = getattr(loader, "step", None)
        if info is None or info.microbatch == 0:
            for _, p in parameters():
                p.grad = None
        step(batch)
        if info is not None and not info.is_last_microbatch:
            continue  # examples change their microbatch: gradients are equal in sum
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad
                 for n, p in parameters() if p.requires_grad}
        out.append({n: (_whole(g), _rounding(g)) for n, g in found.items()})
        if len(out) == num_steps:
            break
    if len(out) < num_steps:
        raise ValueError(f"the loader ended after {len(out)} of {num_steps} steps")
    return out


def _rounding(gradient: Tensor) -> float:
    unit = torch.finfo(gradient.dtype).eps
    return unit * (ROUNDINGS if unit <= torch.finfo(torch.float32).eps else 1)


def _whole(gradient: Tensor) -> Tensor:
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return gradient.detach().double().clone()
