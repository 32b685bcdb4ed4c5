"""A model on one packed row with planned encoders, compared with stock transformers, one example
after the other, and its compiled blocks with those that are not: the loss and the gradient of every
parameter."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from orchmllm.batch import IGNORE_INDEX, Microbatch, PackedExamples, ProcessedExample
from orchmllm.comm.pieces import Media
from orchmllm.data.media_tensors import is_content
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PHASES, BalancePolicy, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.compiled import compile_whole

SPEC = PlanSpec(
    costs=dict.fromkeys(PHASES, CostModel(1, 0)), row_bytes={}, feature_bytes=1, ranks_per_node=1,
    balance=BalancePolicy(dispatch="load"), fills=True)
EXACT = 1e-10  # of a gradient's largest value, in float64
MOST = 1e-5  # that rounding explains where a model computes a part in float32
_TIMES = 10  # the difference that is allowed, in differences that rounding made
_SMALL = 1e-3  # of the largest gradient: smaller ones are compared with this
_ROUNDING = 1e-15

Gradients = dict[str, Tensor]


def compare(hf: nn.Module, examples: Sequence[ProcessedExample], *, compiled: bool = False,
            chunked: bool = False) -> float:
    """The largest difference of the gradient of a parameter, or of the loss, as a share of its
    largest value. hf: in float64 and train mode. examples: with the tensors of all media, and with
    the parts of each. compiled: whether blocks will be. chunked: whether the logits of a long row
    will be made in chunks. Raises ValueError naming the parameter if rounding does not explain it,
    and the key if the loss cannot be made so."""
    examples = [*map(in_float64, examples)]
    with InFloat64():
        found = _compare(hf, examples, chunked)
    return max(found, _compare_compiled(hf, examples)) if compiled else found


def _compare(hf: nn.Module, examples: Sequence[ProcessedExample], chunked: bool) -> float:
    loss, wanted = stock(hf, examples)
    again = stock(nudged(hf), examples)
    (noise, where), largest = difference(again, (loss, wanted)), max(map(_size, wanted.values()))
    if noise > MOST:
        raise ValueError(f"transformers itself computes another {where} when it is asked again "
                         f"(by {noise:.1e}): it draws random numbers, or keeps something of the "
                         "examples before")
    if not largest > 0:
        raise ValueError("nothing has a gradient")
    check_loss(hf, examples)
    found, name = difference(packed(hf, examples), (loss, wanted))
    if not found <= max(EXACT, _TIMES * noise):
        raise ValueError(f"the {name} differs by {found:.1e} of its size from what transformers "
                         f"computes example by example, where rounding explains {noise:.1e}")
    return max(found, _compare_chunked(hf, examples, (loss, wanted), noise) if chunked else 0.0)


def _compare_chunked(hf: nn.Module, examples: Sequence[ProcessedExample],
                     wanted: tuple[float, Gradients], noise: float) -> float:
    try:
        found, name = difference(packed(hf, examples, chunk_rows=1), wanted)
        told = f"the {name} differs by {found:.1e} of its size"
    except Exception as error:  # of the model's own code, whose head answers with the loss
        found, told = float("inf"), f"{type(error).__name__}: {error}"
    if not found <= max(EXACT, _TIMES * noise):
        raise ValueError(f"with its loss in chunks, {told} (fsdp.loss_chunk_rows=0 makes all "
                         "logits at once)")
    return found


def _compare_compiled(hf: nn.Module, examples: Sequence[ProcessedExample]) -> float:
    """What torch makes of the blocks before it generates code, which no mode changes."""
    try:
        found, name = difference(packed(hf, examples, "aot_eager"), packed(hf, examples))
    finally:
        torch.compiler.reset()  # else numbers in which models differ are no constants
    if not found <= MOST:
        raise ValueError(f"the {name} differs by {found:.1e} of its size where torch "
                         f"{torch.__version__} compiles the blocks (fsdp.compile=false does not)")
    return found


def packed(hf: nn.Module, examples: Sequence[ProcessedExample], backend: str | None = None,
           chunk_rows: int = 0) -> tuple[float, Gradients]:
    """As `stock`, of one packed row with planned encoders. backend: of torch.compile; None: nothing
    is compiled. chunk_rows: of the loss; 0: all."""
    whole = WholeModel(copy.deepcopy(hf), torch.float64)
    whole.loss_chunk_rows = chunk_rows
    whole.encoders = PlannedEncoders(whole.hf)
    if backend is not None:
        compile_whole(whole, torch.device("cpu"), backend)
    loss = whole(planned_row(whole, examples))
    loss.backward()
    return float(loss.detach()), gradients(whole.hf)


@torch.no_grad()
def check_loss(hf: nn.Module, examples: Sequence[ProcessedExample]) -> None:
    """Raises ValueError for a model whose own loss is more than the cross entropy of its logits,
    such as one of its routers, and for one that sees a token before it is learnt."""
    for example in examples:
        labels, logits = example.labels, logits_of(hf, example)
        wanted = float(F.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORE_INDEX))
        if "labels" in inspect.signature(hf.forward).parameters:
            found = float(asked(hf, example, labels=labels[None]).loss)
            if abs(found - wanted) > EXACT * abs(wanted):
                raise ValueError(f"its own loss is {found:.6g} where the cross entropy of its "
                                 f"logits is {wanted:.6g}: the difference, such as a loss of "
                                 "routers, would depend on how examples are balanced")
        learnt = (labels != IGNORE_INDEX).nonzero()[:, 0]
        at = int(learnt[-1])
        ids = example.input_ids.clone()
        ids[at] = int(ids[learnt[ids[learnt] != ids[at]][0]])
        other = logits_of(hf, replace(example, input_ids=ids))
        if at and _size(other[:at] - logits[:at]) > EXACT * _size(logits):
            raise ValueError(f"what it says of the tokens before one that is learnt (token {at} of "
                             f"{len(ids)}) depends on that token: it sees what it should learn")


def stock(hf: nn.Module, examples: Sequence[ProcessedExample]) -> tuple[float, Gradients]:
    """The sum of the loss, and its gradient by parameter."""
    hf.zero_grad()
    total = 0.0
    for example in examples:
        logits = logits_of(hf, example)
        loss = F.cross_entropy(logits[:-1], example.labels[1:], ignore_index=IGNORE_INDEX,
                               reduction="sum")
        loss.backward()
        total += float(loss.detach())
    found = gradients(hf)
    hf.zero_grad()
    return total, found


def in_float64(example: ProcessedExample) -> ProcessedExample:
    def wider(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: v.double() if v.is_floating_point() else v for n, v in tensors.items()}

    return replace(example, media=wider(example.media),
                   parts={at: wider(part) for at, part in example.parts.items()})


def asked(hf: nn.Module, example: ProcessedExample, **more: Any) -> Any:
    """What the model itself answers to one example."""
    ids = example.input_ids[None]
    return hf(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **example.media,
              **more)


def logits_of(hf: nn.Module, example: ProcessedExample) -> Tensor:
    """(n, V) of an example of n tokens."""
    return asked(hf, example).logits[0]


class InFloat64(TorchFunctionMode):
    """Within it what asks for a floating dtype gets float64: many models compute a part in float32
    whatever their dtype is, and rounding would hide differences."""

    _WIDER = {torch.Tensor.float: torch.Tensor.double}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
                           ) -> Any:
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return self._WIDER.get(func, func)(*map(_wider, args), **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if type(value) is torch.dtype and value.is_floating_point else value


def nudged(hf: nn.Module) -> nn.Module:
    """A copy whose weights differ by as little as rounding does."""
    other = copy.deepcopy(hf)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + _ROUNDING * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return other


def gradients(hf: nn.Module) -> Gradients:
    """Zeros where a parameter has none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in hf.named_parameters()}


def difference(found: tuple[float, Gradients], wanted: tuple[float, Gradients]
               ) -> tuple[float, str]:
    """(The largest difference as a share of the size of what differs, its name)."""
    (loss, got), (wanted_loss, want) = found, wanted
    least = _SMALL * max(map(_size, want.values()))
    shares = {f"gradient of {name}": _size(got[name] - grad) / max(_size(grad), least)
              for name, grad in want.items()} if least else {}
    shares["loss"] = abs(loss - wanted_loss) / max(abs(wanted_loss), 1e-300)
    # What is no number is the largest.
    name = max(shares, key=lambda name: float("inf") if shares[name] != shares[name]
               else shares[name])
    return shares[name], name


def _size(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def planned_row(whole: WholeModel, examples: Sequence[ProcessedExample]) -> PackedExamples:
    """The batch of one rank, whose encoders are planned. examples: with the parts of their
    media."""
    layout = BatchLayout.concat([e.lengths for e in examples], [len(examples)])
    plan = plan_step(layout, SPEC)
    micro = Microbatch(plan, plan.for_rank(0), positions=np.arange(len(examples)))
    media = {phase: Media.here([
        whole.encoders.described(phase, examples[e].parts[s])
        for e, s in micro.rank_plan.media[phase].tolist()])
        for phase, moves in plan.encode.items() if len(moves.order)}
    return whole.join([replace(e, parts={}, media={
        n: v for n, v in e.media.items() if not is_content(n)})
        for e in map(examples.__getitem__, micro.rank_plan.examples)], media, micro)
