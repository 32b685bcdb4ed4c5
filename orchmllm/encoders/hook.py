"""`balance_encoders`: hooks on the inner model that encode each rank's planned share.

One forward, on all ranks together: describe this rank's media, gather the descriptions, plan, move
the media, encode, agree on the results, move the features back, run the model's own forward with
its encoder calls answered. Every rank takes part in every exchange; an error of one is raised on
all. A rank that encodes nothing runs each encoder on a placeholder, and a rank that has no media of
its own adds 0 rows of features to its embeddings, so that forward and backward issue the same
collectives everywhere.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.comm.exchange import RowGather
from orchmllm.comm.ranks import node_size, rank_list
from orchmllm.encoders import families, sharing
from orchmllm.encoders.assignment import Assignment, assign
from orchmllm.encoders.checks import check_capture, check_encoder, check_norms
from orchmllm.encoders.playback import Playback, shadow
from orchmllm.encoders.results import rebuild
from orchmllm.encoders.spec import Encoder, bind, resolve
from orchmllm.encoders.table import Local, Tables, describe_local, same_on_all_ranks
from orchmllm.plan.cost import in_fine_unit
from orchmllm.plan.step import imbalance

log = logging.getLogger("orchmllm.encoders")
_LOG_EVERY = 50


@dataclass(frozen=True)
class EncoderStep:
    """One encoder in the forward last balanced. num_items: in the world; imbalance: cost of the
    slowest rank / mean, as sampled and as planned; moved: items that changed rank; gain: share by
    which the slowest rank's encoder time falls, by the plan."""

    num_items: int
    imbalance: tuple[float, float]
    moved: int
    gain: float


@dataclass
class _Forward:
    """What one forward has to undo and to check."""

    undo: ExitStack = field(default_factory=ExitStack)
    playbacks: list[Playback] = field(default_factory=list)
    zero: Tensor | None = None


class EncoderHandle:
    """What balance_encoders returns. last: an EncoderStep by encoder that had items in the forward
    last balanced; remove(): the model is as before."""

    without_gradients = False  # whether a trainer looks at its loss, on all ranks

    def __init__(
        self, owner: nn.Module, encoders: Sequence[Encoder], family: families.Family | None, *,
        group: dist.ProcessGroup | None, when: str, shadow: bool, min_gain: float, join: str,
        timeout_s: float,
    ) -> None:
        ranks = rank_list(group)
        self.encoders, self.group, self.shadow = tuple(encoders), group, shadow
        self.last: dict[str, EncoderStep] = {}
        self._family, self._when, self._join = family, when, join
        self._options = {"min_gain": min_gain, "ranks_per_node": node_size(ranks, 0)}
        self.gather = RowGather(self._options["ranks_per_node"], timeout_s, ranks)
        self.rank = self.gather.rank
        same_on_all_ranks(self.gather, self.encoders)
        self._tables = Tables(self.encoders, self.gather)
        self._costs = list(in_fine_unit({
            e.name: e.cost(owner) if not hasattr(e.cost, "linear") else e.cost
            for e in self.encoders}).values())
        self._count, self._checked = 0, False  # forwards; whether one ended well on all ranks
        self._error: Exception | None = None  # of the forward before
        self._forwards: dict[int, _Forward] = {}
        self._hooks = [
            owner.register_forward_pre_hook(self._before, with_kwargs=True),
            owner.register_forward_hook(self._after, with_kwargs=True, always_call=True)]

    def __deepcopy__(self, memo: dict) -> EncoderHandle:
        return self  # a copy of the model uses the groups and the plan of the original

    def remove(self) -> None:
        """Takes the hooks off; copies of the model are no longer balanced either."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.compiler.disable
    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        active = self._when == "always" or (
            module.training and (torch.is_grad_enabled() or EncoderHandle.without_gradients))
        if not self._hooks or not active:
            return None
        self._count += 1
        inputs, error = bind(module, args, kwargs), self._error
        try:
            locals_ = [self._describe(module, e, inputs) for e in self.encoders]
        except Exception as e:
            error, locals_ = error or e, []
        worlds = self._tables(self._count, locals_, error)
        plans = {i: assign(e, world, self._costs[i], **self._options)
                 for i, (e, world) in enumerate(zip(self.encoders, worlds, strict=True))
                 if len(world.meta)}
        self._report(plans)
        if self.shadow or not plans:
            return None
        state = self._forwards[id(module)] = _Forward()
        # Not a parameter's: FSDP may keep those on the CPU.
        device = next((v.device for v in inputs.values() if isinstance(v, Tensor)), None) or next(
            module.parameters()).device
        encoded = []
        for i, plan in plans.items():
            encoded.append(sharing.encode_share(
                self.encoders[i], module, locals_[i], worlds[i], plan, self.rank, device,
                self.group))
        features = sharing.return_features(self.gather, self.group, self._count, self.rank,
                                            encoded)
        for share, rows in zip(encoded, features, strict=True):
            self._answer(module, state, share, *rows)
        return self._attach(module, state, args, kwargs, inputs)

    def _describe(self, module: nn.Module, encoder: Encoder, inputs: dict[str, Any]) -> Local:
        if self._family:
            families.refuse_unknown(self.encoders, inputs)
        towers = encoder.tower_modules(module)
        for path, tower in towers:
            check_norms(encoder, path, tower)
            if self._family and self._family.captures:
                check_capture(encoder, path, tower)
        dtype = next((p.dtype for p in towers[0][1].parameters() if p.is_floating_point()), None)
        return describe_local(encoder, module, inputs, dtype if encoder.cast else None)

    def _answer(
        self, module: nn.Module, state: _Forward, share: sharing.Encoded, rows: Tensor,
        counts: np.ndarray,
    ) -> None:
        """Lets the calls of this rank's forward return its own items' features."""
        encoder, local, start, first = share.encoder, share.local, 0, 0
        for call, n, given in zip(encoder.calls, local.counts, local.given, strict=True):
            sizes = counts[start: start + n].tolist()
            part = rows[first: first + sum(sizes)]
            start, first = start + n, first + sum(sizes)
            result = rebuild(encoder, share.result, share.features.leaves, part, sizes)
            state.playbacks.append(Playback(encoder, module, call, result, n, given,
                                            strict=self._family is None))
            shadow(state.undo, module, call, state.playbacks[-1])
        for name in encoder.passes:
            shadow(state.undo, module, name, lambda x, *a, **k: x)
        if rows.requires_grad and not all(local.counts):
            zero = rows[:0].sum()
            state.zero = zero if state.zero is None else state.zero + zero.to(state.zero.dtype)

    def _attach(
        self, module: nn.Module, state: _Forward, args: tuple, kwargs: dict, inputs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        """Adds 0 to the embeddings, so that the backward pass of a rank without media reaches the
        features' exchange at the same place as that of the others."""
        if state.zero is None:
            return None
        given = inputs.get("inputs_embeds")
        if given is not None and not self._join:
            joined = given + state.zero.to(given.dtype)
            state.zero = None
            place = list(inspect.signature(module.forward).parameters).index("inputs_embeds")
            if place < len(args):
                return (*args[:place], joined, *args[place + 1:]), kwargs
            return args, {**kwargs, "inputs_embeds": joined}

        def join(embedding: nn.Module, inputs: tuple, out: Tensor) -> Tensor | None:
            if state.zero is None:
                return None
            zero, state.zero = state.zero, None
            return out + zero.to(out.dtype)

        embedding = (module.get_submodule(self._join) if self._join
                     else module.get_input_embeddings())
        state.undo.callback(embedding.register_forward_hook(join).remove)
        return None

    @torch.compiler.disable
    def _after(self, module: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        """Errors of a forward are raised on all ranks: at the end of the first one, later in the
        next one's gather, which costs nothing."""
        state = self._forwards.pop(id(module), None)
        if state is None:
            return
        state.undo.close()
        error = sys.exc_info()[1] if result is None else None
        raised = error is not None
        if not raised and state.zero is not None:
            error = RuntimeError(
                f"{type(module).__name__}.forward did not call its embedding, to which the "
                "features of a rank without media are joined: name the module whose output the "
                "features join in balance_encoders(..., join=)")
        error = next((e for e in (error, *(p.error for p in state.playbacks)) if e), None)
        if not self._checked:
            self._checked = True
            sharing.agree_on_forward(self.gather, self._count, error)
        elif not raised:
            self._error = error

    def _report(self, plans: Mapping[int, Assignment]) -> None:
        self.last = {}
        for i, plan in plans.items():
            top = max(int(plan.before.max()), 1)
            gain = 1 - int(plan.after.max()) / top if plan.moves or self.shadow else 0.0
            moved = 0 if self.shadow else int(
                (plan.move.source_rank[plan.move.order] != plan.move.target_rank).sum())
            self.last[self.encoders[i].name] = EncoderStep(
                len(plan.cost), (imbalance(plan.before), imbalance(plan.after)), moved, gain)
        if plans and (self._count == 1 or self._count % _LOG_EVERY == 0) and self.rank == 0:
            log.info("forward %d%s: %s", self._count, " (shadow: nothing moves)" * self.shadow,
                     "; ".join(f"{name}: {s.num_items} items, imbalance {s.imbalance[0]:.2f}->"
                               f"{s.imbalance[1]:.2f}, {s.gain:.0%} of the slowest rank's time, "
                               f"{s.moved} moved" for name, s in self.last.items()))


def _check_owner(owner: nn.Module, join: str) -> None:
    """Raises ValueError if the model is balanced already, or has nothing that features join."""
    hooks = (getattr(hook, "__self__", None) for hook in owner._forward_pre_hooks.values())
    if any(isinstance(h, EncoderHandle) and h._hooks for h in hooks):
        raise ValueError(f"the encoders of this {type(owner).__name__} are balanced already: call "
                         "remove() of the handle first")
    if join:
        resolve(owner, join)
    elif not hasattr(owner, "get_input_embeddings"):
        raise ValueError(f"{type(owner).__name__} has no get_input_embeddings: name the submodule "
                         "whose output the features join in `join`")


def balance_encoders(
    model: nn.Module, encoders: Sequence[Encoder] | None = None, *,
    group: dist.ProcessGroup | None = None, when: str = "training", shadow: bool = False,
    min_gain: float = 0.0, join: str = "", timeout_s: float = 600.0,
) -> EncoderHandle:
    """Balances the encoders of `model` over the ranks in every forward; its code, its data and the
    loop around it stay as they are. Every rank of the group calls it at the same place, before or
    after fully_shard, DDP or PEFT wrap the model, and makes the same number of forwards.

    encoders: None for a family of transformers that was tested (docs/encoders.md), else one Encoder
    for each encoder of `model`, which is then the module whose forward calls them. group: ranks
    that share the media (default: all); those that shard the encoder must all be in it. when:
    "training" (train mode with gradients) or "always" (also evaluation; all ranks must then make
    the same forwards). shadow: plan, log and record the gain, move nothing. min_gain: move only if
    the slowest rank's cost falls by this share (0.02: 2%; 0: whenever it falls). join: submodule
    whose output the features join (default: the input embeddings). timeout_s: of a gather that a
    rank never joins.

    Raises ValueError for a model that it cannot balance exactly: an unknown architecture, dropout
    or batch normalisation in the encoder, a tower whose hidden states fully_shard hides. In a
    forward, before media move: RemoteError or PlanMismatchError with the same text on all ranks.
    """
    if when not in ("training", "always"):
        raise ValueError(f"when is {when!r}: use 'training' or 'always'")
    if min_gain is None or not 0.0 <= min_gain < 1.0:
        raise ValueError(f"min_gain is {min_gain}: must be in [0, 1) (0.02: 2%)")
    owner, family = model, None
    if encoders is None:
        owner, family = families.find_family(model)
        encoders = family.encoders
    if not encoders or len({e.name for e in encoders}) < len(encoders):
        raise ValueError("encoders: give at least one Encoder, each with a name of its own")
    for encoder in encoders:
        check_encoder(owner, encoder, family is not None and family.captures)
    _check_owner(owner, join)
    return EncoderHandle(
        owner, encoders, family, group=group, when=when, shadow=shadow, min_gain=min_gain,
        join=join, timeout_s=timeout_s)
