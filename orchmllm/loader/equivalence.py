"""A check for a user's tests that balancing changes nothing."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.comm.exchange import RowGather, gather_texts, node_size, rank_list
from orchmllm.loader import loss as losses
from orchmllm.loader.loader import BalancedDataLoader

ROUNDINGS = 10  # in float32: of the whole gradient that a parameter's own may differ by
WHOLE = "the whole model"
Gradients = dict[str, tuple[Tensor, float]]
Run = Callable[..., list[Gradients]]  # (balanced, *, moves) -> per step
Shared = Callable[[Any], list[Any]]  # a value -> those of all ranks


def check_equivalence(
    step: Callable[[Any], None] | Any,
    parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]] | None = None,
    loader: Iterable[Any] | None = None, *, encoders: Sequence[Any] = (), num_steps: int = 3,
    tolerance: float = 1e-5,
) -> float:
    """Runs `num_steps` steps of a loop, or of a Trainer, with balancing and without, on the same
    parameters and the same global batches, and compares their gradients; for a user's tests:

        def step(batch):
            loader.scale_mean(model(**batch).loss, batch["labels"], shifted=True).backward()
        check_equivalence(step, model.named_parameters, loader)

        check_equivalence(balance_trainer(trainer))

    Prints one line on rank 0, `gradients equal to 3e-16`: by how much the whole gradient differs.
    step: batch -> None, forward and backward (no optimizer); with accumulation_steps it is called
    for each batch, and gradients are compared after the last. parameters: the model's
    named_parameters, which have no gradient afterwards. loader: a BalancedDataLoader, which stands
    afterwards where it stood, or any other that yields the same batches each time. encoders:
    handles of balance_encoders, which move nothing in the run for comparison (`shadow`). Every rank
    then encodes what it has: under FSDP each needs an item, as it would without balance_encoders. A
    Trainer alone brings all of these; its train() is called, with no gradient left for its
    optimizer, and it writes nothing.
    Returns the largest ||g - g_plain|| / ||g_plain|| over steps and parameters, and over the whole
    gradient. A difference is rounding, and counts as none, up to ten units in the last place of the
    model's whole gradient: some parameters' own gradient is 0 but for rounding (a bias of keys).
    In a type coarser than float32 that is one unit, as sums within a rank are made in float32.
    The loop without balancing runs twice; by how much its gradients differ is allowed for twice.
    Raises AssertionError naming the parameter where a difference exceeds `tolerance`, with the
    likely cause, or if the two runs without balancing differ by more themselves (dropout);
    ValueError if there is nothing to switch off, nothing changes its rank, the loader ends before
    num_steps, or no step leaves a gradient. Collective: all ranks call it and see the same figures.
    What does not depend on the plan, as a factor of the whole loss, is not found out.
    """
    trainer = step if hasattr(step, "_balance_steps") else None
    if trainer is not None:
        encoders = [handle for handle in [trainer._balance_encoders] if handle]
    elif not encoders and not (isinstance(loader, BalancedDataLoader) and loader.enabled):
        raise ValueError("check_equivalence: nothing is balanced; pass a BalancedDataLoader that "
                         "is enabled, `encoders`, or a Trainer of balance_trainer")

    gather = RowGather(node_size(rank_list(None), 0))

    def of_all_ranks(value: Any) -> list[Any]:
        return [json.loads(text) for text in gather_texts(gather, json.dumps(value))]

    places: list[list] = []  # by run and batch: this rank's examples, and how many items moved

    def run(balanced: bool, *, moves: bool = True) -> list[Gradients]:
        places.append([])

        def look(loader: Any) -> None:
            info = getattr(loader, "step", None)
            places[-1].append((info and info.example_ids, [
                step.moved for handle in encoders for step in handle.last.values()]))

        with _as_sampled(loader, () if balanced and moves else encoders, not balanced):
            return (_gradients(step, parameters, loader, num_steps, look) if trainer is None
                    else _of_trainer(trainer, balanced, num_steps, look))

    watch = getattr(loader, "_watch", None) or losses.LossWatch(done=True)
    watch.asked = trainer is not None
    plain, again = run(False), run(False)
    forwards = [handle._count for handle in encoders]
    balanced = run(True)  # which plans by what was seen
    idle = bool(encoders) and forwards == [handle._count for handle in encoders]
    idle, still = map(all, zip(*of_all_ranks([idle, places[1] == places[2]]), strict=True))
    if idle or still:
        raise ValueError("check_equivalence: " + (
            "the encoders were not balanced: that needs train mode (dropout has p=0 then)" if idle
            else "nothing changed its rank in these steps, so they show nothing: take several "
            "ranks, several examples or media for each, of lengths that differ, and no shadow"))
    try:
        worst, whole = _differences(balanced, plain, again, tolerance, of_all_ranks)
    except _Differs as error:
        model = trainer.model if trainer is not None else getattr(parameters, "__self__", None)
        asked = watch.asked or not isinstance(loader, BalancedDataLoader)
        raise AssertionError(f"{error}; likely cause: " + _cause(
            run, plain, tolerance, of_all_ranks, model, asked, bool(encoders))) from None
    if dist.get_rank() == 0:
        print(f"gradients equal to {whole:.0e}")
    return worst


class _Differs(AssertionError):
    """The gradients with balancing are others."""


def _cause(run: Run, plain: list[Gradients], tolerance: float, of_all_ranks: Shared,
           model: nn.Module | None, asked: bool, moves: bool) -> str:
    """What would make the gradients equal, or what the model has that balancing changes."""
    def equal(want: list[Gradients] | None = None, **how: bool) -> bool:
        try:
            want = want or run(False)
            _differences(run(True, **how), want, want, tolerance, of_all_ranks)
        except (AssertionError, ValueError):  # the change may not fit the loop
            return False
        return True

    if moves and equal(plain, moves=False):
        return "the encoders, which are encoded otherwise on another rank"
    if not asked:
        return f"the loss is never scaled: {losses.MEND}"
    for change, text in _CHANGES.items():
        with _scaled_otherwise(change):
            if equal():
                return text
    for name, module in () if model is None else model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f"{name} is a {type(module).__name__}, which averages over a rank's examples"
        if getattr(getattr(module, "config", None), "output_router_logits", False):
            return ("the auxiliary loss of routed experts (output_router_logits), which is "
                    "computed on a rank's examples")
    return ("what an example gives depends on those beside it: padding that no mask hides, an "
            "average over a rank's batch, or a loss that compares examples "
            '("Losses over several examples" in docs/loader_cases.md)')


_CHANGES = {
    "shifted": "`shifted` is the wrong way round in loader.scale_mean or scale_sum: True where the "
               "model shifts the labels itself, as transformers does",
    "mean": "loader.scale_sum is for a sum of the loss over targets, loader.scale_mean for a mean: "
            "it is the other one",
    "examples": "the loss is a mean over examples, not over targets: give BalancedDataLoader "
                "num_targets=, which counts the examples of a batch"}


@contextmanager
def _scaled_otherwise(change: str) -> Iterator[None]:
    """Within it loader.scale_sum and scale_mean do not scale as the loop says."""
    scale = losses.scale

    def changed(loss: Tensor, info: losses.StepInfo, **how: Any) -> Tensor:
        if change != "examples":
            return scale(loss, info, **{**how, change: not how[change]})
        n = info.num_global_examples
        return scale(loss, replace(info, num_targets=n, num_shifted_targets=n,
                                   local_targets=(info.num_examples,) * 2), **how)

    losses.scale = changed
    try:
        yield
    finally:
        losses.scale = scale


def _differences(got: list[Gradients], want: list[Gradients], again: list[Gradients],
                 tolerance: float, of_all_ranks: Shared) -> tuple[float, float]:
    """Over the steps: (the largest difference that is no rounding, that of the whole gradient)."""
    found = [_difference(k, *steps, tolerance, of_all_ranks) for k, steps in enumerate(
        zip(got, want, again, strict=True))]
    return tuple(map(max, zip(*found, strict=True)))


def _difference(k: int, got: Gradients, want: Gradients, again: Gradients, tolerance: float,
                of_all_ranks: Shared) -> tuple[float, float]:
    """See _differences. got: the gradients of step k with balancing; want, again: without. FSDP1
    leaves a rank its shard of them, so the figures are those of all ranks."""
    ranks = of_all_ranks({name: [*(float(x.norm()) for x in (
        gradient, got[name][0] - gradient, again[name][0] - gradient)), part]
        for name, (gradient, part) in want.items()})
    names = dict.fromkeys(name for of_rank in ranks for name in of_rank)
    scales, errors, noises = ({name: math.hypot(*(r[name][i] for r in ranks if name in r))
                               for name in names} for i in range(3))
    rounding = {name: max(r[name][3] for r in ranks if name in r) for name in names}
    rounding[WHOLE] = max(rounding.values(), default=0.0)
    for figures in (scales, errors, noises):
        figures[WHOLE] = math.hypot(*figures.values())
    whole = scales[WHOLE]
    if not whole:
        raise ValueError(f"step {k} leaves no gradient: `step` calls backward, and no optimizer, "
                         "nor zero_grad")
    worst = 0.0
    for name, scale in scales.items():
        floor, noise, error = rounding[name] * whole, noises[name], errors[name]
        if noise > floor + tolerance * whole:
            raise AssertionError(
                f"step {k}: without balancing, two runs over the same batches have gradients of "
                f"{name} that differ by {noise / (scale or 1.0):.1e} relative, so nothing can be "
                "compared: switch off dropout (p=0; model.eval() would switch off the balancing of "
                "encoders, too) and other random numbers of the model and the data")
        relative = 0.0 if error <= floor + 2 * noise else error / scale if scale else error
        if not relative <= tolerance:  # nan fails too
            raise _Differs(f"step {k}: the gradient of {name} differs by {relative:.1e} relative, "
                           f"more than {tolerance:.0e}")
        worst = max(worst, relative)
    return worst, errors[WHOLE] / whole


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


def _gradients(step, parameters, loader, num_steps: int, look: Callable[[Any], None]
               ) -> list[Gradients]:
    """Per step: name -> (gradient in float64, part of the whole gradient that its type rounds). No
    gradient is left. look: is called after each batch, with the loader."""
    def clear() -> None:
        for _, p in parameters():
            p.grad = None

    out: list[Gradients] = []
    clear()
    for batch in loader:
        info = getattr(loader, "step", None)
        step(batch)
        look(loader)
        if info is not None and not info.is_last_microbatch:
            continue  # examples change their microbatch: gradients are equal in sum
        out.append(_held(parameters()))
        clear()
        if len(out) == num_steps:
            break
    if len(out) < num_steps:
        raise ValueError(f"the loader ended after {len(out)} of {num_steps} steps")
    return out


def _held(parameters: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad
             for n, p in parameters if p.requires_grad}
    return {n: (_whole(g), _rounding(g)) for n, g in found.items()}


def _of_trainer(trainer: Any, balanced: bool, num_steps: int, look: Callable[[Any], None]
                ) -> list[Gradients]:
    """The same of a Trainer, by its own train(). Its state, arguments, optimizer and random numbers
    are then what they were."""
    from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

    class Recorder(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if before is not None:  # whose batches were seen
                trainer._balance_loader._planning = before._planning

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            out.append(_held(trainer.model.named_parameters()))
            look(getattr(trainer, "_balance_loader", None))
            for p in trainer.model.parameters():
                p.grad = None  # the optimizer has nothing to do

    out: list[Gradients] = []
    before = getattr(trainer, "_balance_loader", None)
    args = copy.copy(trainer.args)
    args.max_steps, args.max_grad_norm, args.load_best_model_at_end = num_steps, 0.0, False
    args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
    with ExitStack() as after, torch.random.fork_rng():
        for name in ("args", "state", "control", "optimizer", "lr_scheduler", "_balance"):
            after.callback(setattr, trainer, name, getattr(trainer, name))
        callbacks = trainer.callback_handler.callbacks
        after.callback(setattr, trainer.callback_handler, "callbacks", callbacks)
        trainer.callback_handler.callbacks = [DefaultFlowCallback(), Recorder()]
        trainer.args, trainer._balance = args, {**trainer._balance, "enabled": balanced}
        trainer.lr_scheduler = None
        torch.manual_seed(args.seed)
        trainer.train()
    return out


def _rounding(gradient: Tensor) -> float:
    unit = torch.finfo(gradient.dtype).eps
    return unit * (ROUNDINGS if unit <= torch.finfo(torch.float32).eps else 1)


def _whole(gradient: Tensor) -> Tensor:
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return gradient.detach().double().clone()
