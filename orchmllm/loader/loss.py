"""What a loop needs to know of the batch last yielded: its facts, the scale of its loss, and a
warning for a loop that does without one."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from orchmllm.batch import Step
from orchmllm.loader.collator import count_labels
from orchmllm.plan.step import imbalance

log = logging.getLogger("orchmllm.loader")
PATIENCE = 3
MEND = ('loss = loader.scale_mean(loss, batch["labels"], shifted=True)  # False: the labels are '
        "shifted in collate")


@dataclass(frozen=True)
class StepInfo:
    """What balancing knows of a batch: `BalancedDataLoader.step`. The batch itself is untouched.

    num_examples: in this batch; 0 for a filler, whose loss must not count. example_ids: their
    dataset indices (of a stream: numbers within it). step, epoch: of the loader. microbatch: place
    of this batch in its step, from 0; num_microbatches: batches of a step. imbalance: (slowest
    rank's cost / mean as sampled, as planned). wait_s: seconds the loop waited for this step.
    num_ranks: ranks that share the step. num_targets: labels of the step on all ranks and
    microbatches, None if unknown; num_shifted_targets: those that a model predicts which shifts the
    labels itself (all but the first of each row). local_targets: both counts for this batch alone,
    -1 if unknown. num_global_examples: of the step on all ranks and microbatches, None with
    shard_size. labels_shape: of the batch's "labels", None without; counts_labels: whether they
    were counted, and not num_targets asked.

    A loop that fetches several batches before it trains on the first keeps the StepInfo of each,
    and scales the loss of a batch by its own: `info.scale_mean`, `info.scale_sum`.
    """

    num_examples: int
    example_ids: list[int]
    step: int
    epoch: int
    microbatch: int
    num_microbatches: int
    imbalance: tuple[float, float]
    wait_s: float
    num_ranks: int
    num_targets: int | None
    num_shifted_targets: int | None
    local_targets: tuple[int, int]
    num_global_examples: int | None = None
    labels_shape: tuple[int, ...] | None = None
    counts_labels: bool = True
    _watch: LossWatch | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, step: Step, k: int, epoch: int, num_ranks: int, counts_labels: bool, watch: LossWatch,
    ) -> StepInfo:
        """Of the k-th microbatch of a step. watch: ends when somebody asks for the targets."""
        micro, mine, layout = step.micro[k], step.micro[k].rank_plan, step.layout
        sees_all = len(layout.examples_per_rank) == num_ranks
        return cls(
            num_examples=len(mine.examples), example_ids=mine.example_ids.tolist(),
            step=step.index, epoch=epoch, microbatch=k, num_microbatches=len(step.micro),
            imbalance=tuple(map(imbalance, micro.plan.phase_cost("llm"))),
            wait_s=step.wait_s if k == 0 else 0.0,
            num_ranks=num_ranks, num_targets=step.num_global_targets,
            num_shifted_targets=step.num_shifted_targets, local_targets=micro.num_targets,
            num_global_examples=layout.num_examples if sees_all else None,
            labels_shape=micro.labels_shape, counts_labels=counts_labels, _watch=watch)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.microbatch == self.num_microbatches - 1

    @property
    def num_global_targets(self) -> int:
        """Labels of the step on all ranks and microbatches: the loss's denominator. Raises
        ValueError if they are not known."""
        return self.denominator(shifted=False)

    def denominator(self, *, shifted: bool) -> int:
        """num_targets or num_shifted_targets. Raises ValueError if they are not known."""
        if self._watch is not None:
            self._watch.done = self._watch.asked = True
        count = self.num_shifted_targets if shifted else self.num_targets
        if count is None:
            raise ValueError(
                "num_global_targets: the number of targets is not known, because the batch has no "
                'tensor "labels"; give BalancedDataLoader a num_targets function (collated batch '
                "-> int)")
        return count

    def scale_sum(
        self, loss_sum: Tensor, *, shifted: bool = False, gradients: str = "mean",
        num_ranks: int | None = None, divided_by: int | None = None,
    ) -> Tensor:
        """The loss to call backward on, for this batch: loss_sum * num_ranks / num_global_targets;
        0 for a filler.

        loss_sum: (), the sum of the loss over this rank's targets in the batch. shifted: whether
        the model shifts the labels itself, as those of transformers do, so that the first of each
        row is no target. FSDP and DDP average gradients over their ranks: the factor num_ranks
        undoes that, so the gradient is that of the mean over the targets of all ranks.
        gradients="sum" leaves the factor out, for a reduction that sums (FSDP2's
        set_gradient_divide_factor(1.0)). num_ranks: over which gradients are averaged (default: the
        ranks of the loader's group). With accumulation_steps the denominator is that of all
        microbatches of the step: do not divide by their number. divided_by: by what the caller's
        backward does (accelerator.gradient_accumulation_steps, or accumulate_grad_batches of
        Lightning's Trainer; default 1).
        Raises ValueError if the number of targets is not known, `gradients` is neither, or
        accelerate or Lightning may divide and divided_by is not given."""
        return scale(loss_sum, self, mean=False, shifted=shifted, gradients=gradients,
                     num_ranks=num_ranks, divided_by=divided_by)

    def scale_mean(
        self, loss: Tensor, labels: Tensor | None = None, *, shifted: bool, gradients: str = "mean",
        num_ranks: int | None = None, divided_by: int | None = None,
    ) -> Tensor:
        """As scale_sum, of a loss that is the mean over this rank's targets in the batch, such as
        `model(**batch).loss`: it is weighed by their number. labels: of the batch, for a check that
        it is this one: by their shape, and on the CPU by their number. Raises ValueError if it is
        not."""
        check_labels(labels, self, shifted=shifted)
        return scale(loss, self, mean=True, shifted=shifted, gradients=gradients,
                     num_ranks=num_ranks, divided_by=divided_by)


def scale(
    loss: Tensor, info: StepInfo, *, mean: bool, shifted: bool, gradients: str = "mean",
    num_ranks: int | None = None, divided_by: int | None = None,
) -> Tensor:
    """See StepInfo.scale_sum and scale_mean, which call it. loss: (). Raises what they say."""
    if gradients not in ("mean", "sum"):
        raise ValueError(f"gradients is {gradients!r}: use 'mean' or 'sum'")
    if divided_by not in (None, 1, info.num_microbatches):
        raise ValueError(f"divided_by is {divided_by}, but the loader plans steps of "
                         f"{info.num_microbatches} batches: give BalancedDataLoader "
                         f"accumulation_steps={divided_by}")
    factor = (num_ranks or info.num_ranks) if gradients == "mean" else 1
    factor *= _divisor(info) if divided_by is None else divided_by
    state = _accelerate() if info.is_last_microbatch and torch.is_grad_enabled() else None
    if state is not None and state.num_steps > 1 and not state.sync_gradients:
        raise ValueError(
            f"accelerate goes on accumulating after the last batch of step {info.step} of the "
            "loader, so the optimizer would step in the middle of the next one: leave a pass only "
            "after the last batch of a step, where loader.step.is_last_microbatch")
    denominator = max(info.denominator(shifted=shifted), 1)
    weight = info.local_targets[shifted] if mean else 1
    if not info.num_examples or not weight:
        return nothing_of(loss)
    return loss * (factor * weight / denominator)


def nothing_of(loss: Tensor) -> Tensor:
    """0, whose gradients are 0, in place of a loss of nothing, which may be nan. Every nan in its
    backward pass becomes 0: behind (ce * mask).sum() / mask.sum() the gradient is 0 / 0, whatever
    the loss is multiplied by. Where a nan is born it becomes 0, so gradients of other losses that
    come through the same nodes stay what they are."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node in seen or not getattr(node, "next_functions", ()):  # those of parameters stay
            continue
        seen.add(node)
        node.register_hook(lambda into, _: tuple(
            g if g is None else g.nan_to_num(0.0, torch.inf, -torch.inf) for g in into))
        nodes += [following for following, _ in node.next_functions]
    return loss.nan_to_num(posinf=0.0, neginf=0.0) * 0


def check_labels(labels: Tensor | None, info: StepInfo, *, shifted: bool) -> None:
    """Raises ValueError if these are not the labels of the batch that `info` is of, or if its
    targets are not known. On a device shapes alone are compared: the loop would wait for the
    labels. labels: (...), of any shape."""
    info.denominator(shifted=shifted)
    if labels is None:
        return
    cure = ("pass the labels of that batch as collate_fn returned them. A loop that fetches "
            "batches ahead keeps loader.step of each and calls its scale_mean")
    if info.labels_shape not in (None, tuple(labels.shape)):
        raise ValueError(f"scale_mean: these labels have the shape {tuple(labels.shape)}, those "
                         f"of the batch {info.labels_shape}: {cure}")
    if labels.device.type != "cpu" or not info.num_examples or not info.counts_labels:
        return
    held = count_labels(labels)[shifted]
    if held != info.local_targets[shifted]:
        raise ValueError(
            f"scale_mean: these labels have {held} targets, those of the batch "
            f"{info.local_targets[shifted]}: {cure}")


def _accelerate() -> Any:
    """Its GradientState, None where it is not used."""
    state = sys.modules.get("accelerate.state")
    used = state is not None and state.GradientState._shared_state
    return state.GradientState() if used else None


def _divisor(info: StepInfo) -> int:
    """What the caller's backward divides the loss by, where that is known. Raises ValueError where
    it is not."""
    if (state := _accelerate()) is not None and (steps := state.num_steps) > 1:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={steps}): accelerator.backward divides "
            f"the loss by {steps}; give the loader accumulation_steps={steps} and say "
            "divided_by=accelerator.gradient_accumulation_steps here, or divided_by=1 if you "
            "call loss.backward()")
    lightning = {"lightning.pytorch", "pytorch_lightning"} & set(sys.modules)
    if lightning and info.num_microbatches > 1:
        raise ValueError(
            "Lightning's Trainer divides the loss by its accumulate_grad_batches: say "
            "divided_by=trainer.accumulate_grad_batches, or divided_by=1 in other loops")
    return 1


def warn_of_rest(info: StepInfo) -> None:
    """Where a loop left a pass after the batch of `info`, within a step."""
    if info.is_last_microbatch:
        return
    log.warning("the loop left epoch %d after batch %d of the %d of step %d: if the optimizer "
                "steps now, the gradients lack the examples of the others (a limit on batches has "
                "to be a multiple of accumulation_steps)", info.epoch, info.microbatch + 1,
                info.num_microbatches, info.step)


class LossWatch:
    """Warns once if a loop never asks how to scale its loss although ranks hold unequally many
    targets. Batches may be fetched ahead, so it waits for PATIENCE steps; not where the targets are
    not known, since there no loop can ask. done: says no more. asked: whether the loop asked."""

    def __init__(self, done: bool) -> None:
        self.done, self.asked, self._unequal = done, False, 0

    def fetched(self, info: StepInfo) -> None:
        """Another batch was fetched after that of `info`."""
        local, everywhere = info.local_targets[0], info.num_targets
        if self.done or not torch.is_grad_enabled():
            return
        if everywhere is None:
            return self._fetched_without_targets(info)
        share = everywhere / (info.num_ranks * info.num_microbatches)
        self._unequal += abs(local - share) > 0.01 * share
        if self._unequal > PATIENCE * info.num_microbatches:
            self.done = True
            log.warning(
                "the loss was never scaled, and ranks hold unequally many targets (this one %d of "
                "%d in %d batches): a mean over each rank's own weighs targets by the plan. Write\n"
                "    %s\n(or loader.scale_sum for a sum; check_loss=False if your loop divides by "
                "the targets of all ranks itself)", local, everywhere,
                info.num_ranks * info.num_microbatches, MEND)

    def _fetched_without_targets(self, info: StepInfo) -> None:
        batches = info.num_ranks * info.num_microbatches
        if info.num_global_examples in (None, info.num_examples * batches):
            return
        self.done = True
        log.warning(
            'nothing checks how the loss is scaled, because the batch has no tensor "labels", and '
            "ranks hold unequally many examples (this one %d of %d in %d batches): a mean over "
            "each rank's own weighs examples by the plan, and a loss that compares examples with "
            'each other has to be computed over all ranks ("Losses over several examples" '
            "in docs/loader_cases.md). Give BalancedDataLoader num_targets (collated batch -> "
            "int) and write loss = loader.scale_mean(loss, shifted=False), or check_loss=False if "
            "your loop divides by the examples of all ranks itself",
            info.num_examples, info.num_global_examples, batches)
