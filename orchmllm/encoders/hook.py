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
import weakref
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from orchmllm.comm.exchange import RowGather, node_size, rank_list
from orchmllm.encoders import proof as proofs
from orchmllm.encoders import sharing, table
from orchmllm.encoders.answers import Answers, device_of
from orchmllm.encoders.infer import infer_encoders
from orchmllm.encoders.spec import (
    Encoder,
    check_encoder,
    check_sharding,
    check_towers,
    has_collectives,
    known_arguments,
    refuse_unknown,
    resolve,
)
from orchmllm.plan.cost import in_fine_unit

log = logging.getLogger("orchmllm.encoders")
_LOG_EVERY = 50


class EncoderHandle:
    """What balance_encoders returns. last: an EncoderStep by encoder that had items in the forward
    last balanced; remove(): the model is as before."""

    without_gradients = False  # whether a trainer looks at its loss, on all ranks
    inside: ClassVar[weakref.WeakSet] = weakref.WeakSet()  # handles of which a forward runs

    def __init__(
        self, owner: nn.Module, encoders: Sequence[Encoder], inferred: bool, *,
        group: dist.ProcessGroup | None, when: str, shadow: bool, min_gain: float, join: str,
        proof: bool, timeout_s: float,
    ) -> None:
        self._ranks = ranks = rank_list(group)
        self.encoders, self.group, self.shadow = tuple(encoders), group, shadow
        self.last: dict[str, sharing.EncoderStep] = {}
        self._inferred, self._when, self._join = inferred, when, join
        self._min_gain = min_gain
        self._unproved = {e.name for e in encoders} if proof else set()
        self.gather = RowGather(node_size(ranks, 0), timeout_s, ranks)
        self.rank = self.gather.rank
        table.same_on_all_ranks(self.gather, self.encoders)
        self._owner, self._owner_name = weakref.ref(owner), type(owner).__name__
        self._parameters = list(inspect.signature(owner.forward).parameters)
        self._known = known_arguments(self.encoders)
        self._tables = table.Tables(self.encoders, self.gather)
        self._costs = list(in_fine_unit({
            e.name: e.cost(owner) if not hasattr(e.cost, "linear") else e.cost
            for e in self.encoders}).values())
        self._patience_s: float | None = None
        self._wider: RowGather | None = None  # of ranks over which FSDP2 reduces, if not these
        self._timeout_s, self._count = timeout_s, 0  # forwards
        # Those of which no forward ended well on all ranks.
        self._unchecked, self._looked = {e.name for e in encoders}, False
        self._error: Exception | None = None  # of the forward before
        self._answers: dict[int, Answers] = {}  # of forwards that run, by module
        self._balanced = False  # whether a forward was
        self._sees_all = False  # see Answers
        self._hooks = [
            owner.register_forward_pre_hook(self._before, with_kwargs=True),
            owner.register_forward_hook(self._after, with_kwargs=True, always_call=True)]
        self._hooks += [tower.register_forward_pre_hook(self._outside) for tower in {
            t for e in self.encoders for _, t in e.tower_modules(owner)}]

    def __deepcopy__(self, memo: dict) -> EncoderHandle:
        return self  # a copy of the model uses the groups and the plan of the original

    def __getstate__(self) -> dict:
        return {"_hooks": [], "_answers": {}}  # a model that was saved whole is loaded unbalanced

    def remove(self) -> None:
        """Takes the hooks off; copies of the model are no longer balanced either."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _trains(self, module: nn.Module) -> bool:
        return EncoderHandle.without_gradients or module.training and torch.is_grad_enabled()

    @torch.compiler.disable
    def _outside(self, tower: nn.Module, args: tuple) -> None:
        """A tower that runs although no forward was balanced: the model does not give its media to
        the forward that is hooked. Other ranks may have no media, so the next forward tells. A
        model that shares the tower may run it."""
        if self._hooks and not (self.inside or self._balanced or self._error or self.shadow) and (
                self._trains(tower) and not _runs_in_another(tower, self._owner())):
            self._error = RuntimeError(
                f"a {type(tower).__name__} ran outside of the forward of {self._owner_name}, which "
                "was not given the media: balance_encoders has no effect on this model. Describe "
                "the encoders of the model that calls it with orchmllm.Encoder "
                "(docs/encoders.md)")
            log.warning("%s", self._error)

    @torch.compiler.disable
    def _before(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before the model's own forward: describe, gather, plan, move and encode, agree, return,
        answer."""
        if interrupted := self._answers.pop(id(module), None):  # by Ctrl-C: no hook ran after it
            interrupted.close()
            self.inside.discard(self)
        if not self._hooks or not (self._trains(module) or self._when == "always"):
            return None
        self._count += 1
        self.inside.add(self)
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        # What a dict among the arguments holds is an argument, too.
        inputs = ChainMap(given, *(v for v in given.values() if isinstance(v, Mapping)))
        items, error = self._describe(module, inputs)
        worlds = self._tables(self._count, items, self._error or error)
        shares = [
            sharing.assign(encoder, local, world, cost,
                           min_gain=self._min_gain, ranks_per_node=self.gather.per_node)
            for encoder, local, world, cost in zip(
                self.encoders, items, worlds, self._costs, strict=True) if len(world.meta)]
        self._report(shares)
        if self.shadow:
            return None
        self._meet_wider(worlds)
        if not shares:
            return None
        self._balanced = True
        return self._encode(module, shares, device_of(inputs, module)).join_zero(
            args, kwargs, inputs, self._parameters)

    def _encode(self, module: nn.Module, shares: Sequence[sharing.Share], device: torch.device
                ) -> Answers:
        """Moves and encodes media, agrees on what was made, moves the features back, and has the
        model's calls answered by them."""
        proof = proofs.Proof([s for s in shares if s.encoder.name in self._unproved])
        if proof.shares:
            proof.encode(module, self.rank, device)
            self._agree(proof.error)
        features, error = sharing.encode_all(shares, module, self.rank, device, self.group)
        error = error or proof.kept(module)
        returned = sharing.return_features(self.gather, self._count, shares, features, error,
                                           self.group, self._patience_s)
        answers = self._answers[id(module)] = Answers(module, self._join)  # _after closes them
        for share, encoded, (rows, sizes) in zip(shares, features, returned, strict=True):
            proof.compare(share, rows, sizes)
            answers.add(share.encoder, share.local, encoded, rows, sizes, may_join=(
                self._sees_all and share.encoder.name not in self._unchecked))
        if proof.shares:
            self._agree(proof.error)
            self._unproved -= {s.encoder.name for s in proof.shares}
        return answers

    def _agree(self, error: Exception | None) -> None:
        """Raises RemoteError on all ranks if one has an error."""
        sharing.agree(self.gather, self._count, np.zeros(1, np.int64), error, self._patience_s)

    def _describe(
        self, module: nn.Module, inputs: Mapping[str, Any]
    ) -> tuple[list[table.LocalItems], Exception | None]:
        """This rank's items by encoder, or why there are none: all ranks learn of it."""
        try:
            if self._inferred:
                refuse_unknown(self._known, inputs)
            else:
                self._refuse_missing(inputs)
            for encoder in self.encoders:
                check_towers(encoder, module)
            if not self._looked:
                self._look_at_sharding(module)
            return [table.describe_local(e, module, inputs) for e in self.encoders], None
        except Exception as error:
            return [], error

    def _refuse_missing(self, inputs: Mapping[str, Any]) -> None:
        """Raises ValueError for an argument of an Encoder that no forward can be given. One that is
        no tensor and no number, or left out, may be a dict that holds it."""
        given = map(inputs.get, self._parameters)
        if not all(isinstance(value, Tensor | int | float) for value in given):
            return
        for encoder in self.encoders:
            for layout in encoder.calls.values():
                if missing := set(layout.arguments).difference(self._parameters):
                    raise ValueError(
                        f"encoder {encoder.name!r}: {self._owner_name}.forward has no argument "
                        f"{min(missing)!r}, but {', '.join(self._parameters)}")

    def _look_at_sharding(self, module: nn.Module) -> None:
        """Once, as FSDP2 may be applied after balance_encoders. Raises ValueError."""
        wider = set().union(*(check_sharding(e, module, self._ranks) for e in self.encoders))
        if any(has_collectives(e, module) for e in self.encoders):
            self._patience_s = sharing.PATIENCE_S
        if wider:
            ranks = sorted(wider)
            self._wider = RowGather(node_size(ranks, 0), self._timeout_s, ranks)
        self._looked = True

    def _meet_wider(self, worlds: Sequence[table.GatheredItems]) -> None:
        """Raises ValueError on all ranks over which FSDP2 reduces an encoder's gradients if only
        some of them run it, for whom the others would wait for ever."""
        if self._wider is None:
            return
        rows = self._wider(np.array([len(world.meta) > 0 for world in worlds], np.int64))
        for encoder, has in zip(self.encoders, rows.T, strict=True):
            if has.any() and not has.all():
                raise ValueError(
                    f"step {self._count}: encoder {encoder.name!r} has media in some groups of "
                    "ranks and none in others, but FSDP2 reduces its gradients over all of them: "
                    "leave group= out of balance_encoders, so that all share their media")

    @torch.compiler.disable
    def _after(self, module: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        """Errors of a forward are raised on all ranks: at the end of the first one of an encoder,
        later in the next one's gather, which costs nothing."""
        answers = self._answers.pop(id(module), None)
        self.inside.discard(self)
        if answers is None:
            return
        raised = sys.exc_info()[1] if result is None else None
        error = answers.close()
        if fresh := self._unchecked & answers.encoders:
            self._agree(raised or error or answers.unused(result))
            self._unchecked -= fresh
            self._sees_all = answers.saw_all
        elif raised is None:
            self._error = error

    def _report(self, shares: Sequence[sharing.Share]) -> None:
        self.last = {share.encoder.name: share.step for share in shares}
        if self.shadow:
            self.last = {name: replace(step, moved=0) for name, step in self.last.items()}
        if shares and (self._count == 1 or self._count % _LOG_EVERY == 0) and self.rank == 0:
            log.info("forward %d%s: %s", self._count, " (shadow: nothing moves)" * self.shadow,
                     "; ".join(f"{name}: {s.num_items} items, imbalance {s.imbalance[0]:.2f}->"
                               f"{s.imbalance[1]:.2f}, {s.gain:.0%} of the slowest rank's time, "
                               f"{s.moved} moved" for name, s in self.last.items()))


def _runs_in_another(tower: nn.Module, owner: nn.Module | None) -> bool:
    """Whether a model that holds the tower, and neither is within `owner` nor holds it, calls the
    tower."""
    frame, own = sys._getframe(), set() if owner is None else set(owner.modules())
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module not in own:
            return tower in (parts := set(module.modules())) and owner not in parts
        frame = frame.f_back
    return False


def _check_owner(owner: nn.Module, join: str) -> None:
    """Raises ValueError if the model is balanced already, is a wrapper of FSDP1, or has nothing
    that features join."""
    hooks = (getattr(hook, "__self__", None) for hook in owner._forward_pre_hooks.values())
    if any(isinstance(h, EncoderHandle) and h._hooks for h in hooks):
        raise ValueError(f"the encoders of this {type(owner).__name__} are balanced already: call "
                         "remove() of the handle first")
    if isinstance(owner, FullyShardedDataParallel):
        raise ValueError("the model is wrapped in FullyShardedDataParallel: give balance_encoders "
                         "the module whose forward calls the encoders, which it wraps")
    if join:
        resolve(owner, join)
    elif not hasattr(owner, "get_input_embeddings"):
        raise ValueError(f"{type(owner).__name__} has no get_input_embeddings: name the submodule "
                         "whose output the features join in `join`")


def balance_encoders(
    model: nn.Module, encoders: Sequence[Encoder] | None = None, *,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None, when: str = "training",
    shadow: bool = False, min_gain: float = 0.0, join: str = "", proof: bool = True,
    timeout_s: float = 600.0,
) -> EncoderHandle:
    """Balances the encoders of `model` over the ranks in every forward; its code, its data and the
    loop around it stay as they are. Every rank of the group calls it at the same place, before or
    after fully_shard, DDP or PEFT wrap the model, and makes the same number of forwards.

    encoders: None for a model of transformers, whose encoders are inferred from its methods
    get_image_features, get_video_features and get_audio_features, else one Encoder for each encoder
    of `model`, which is then the module whose forward calls them. group: the
    ranks that share the media (default: all), or a mesh of one dimension: those over which the
    encoder's gradients are reduced, or a part of them if all parts have media, or none. when:
    "training" (train mode with gradients) or "always" (also evaluation; all ranks must then make
    the same forwards). shadow: plan, log and record the gain, move nothing. min_gain: move only if
    the slowest rank's cost falls by this share (0.02: 2%; 0: whenever it falls). join: submodule
    whose output the features join (default: the input embeddings). proof: in the first forward that
    has items of an encoder, each rank also encodes its own without gradients, and compares.
    timeout_s: of a gather that a rank never joins.

    Raises ValueError for a model that it cannot balance exactly: an unknown architecture, dropout
    or batch normalisation in the encoder, a tower whose hidden states fully_shard hides. In a
    forward: RemoteError or PlanMismatchError with the same text on all ranks, also for features
    that are not those of the items as sampled.
    """
    if isinstance(group, dist.DeviceMesh):
        if group.ndim > 1:
            raise ValueError(f"group is a mesh of {group.ndim} dimensions, {group}: give the one "
                             "whose ranks share the media, such as mesh['dp']")
        group = group.get_group()
    if when not in ("training", "always"):
        raise ValueError(f"when is {when!r}: use 'training' or 'always'")
    if min_gain is None or not 0.0 <= min_gain < 1.0:
        raise ValueError(f"min_gain is {min_gain}: must be in [0, 1) (0.02: 2%)")
    owner, inferred = model, encoders is None
    if inferred:
        owner, encoders = infer_encoders(model)
    if not encoders or len({e.name for e in encoders}) < len(encoders):
        raise ValueError("encoders: give at least one Encoder, each with a name of its own")
    for encoder in encoders:
        check_encoder(owner, encoder)
    _check_owner(owner, join)
    return EncoderHandle(
        owner, encoders, inferred, group=group, when=when, shadow=shadow, min_gain=min_gain,
        join=join, proof=proof, timeout_s=timeout_s)
