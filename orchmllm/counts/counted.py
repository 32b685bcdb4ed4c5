"""What a module computes, counted while it runs on tensors without memory: the FLOP of every matrix
product and every attention, forward and backward, by the stages that its caller names.

Weights and activations are on the meta device. Integers that say how an input is divided, such as
grids and masks, stay real tensors on the CPU, because modules read them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

EXACT = 1e-9  # of a count that a fit has to predict
WRITING = ("::copy_", "::fill_", "::zero_")  # operators that do not read what they change
_aten = torch.ops.aten
running: ContextVar[Counted | None] = ContextVar("counted", default=None)


class Seen(NamedTuple):
    """What the positions of a sequence of so many attend to: all, or, if it is causal, themselves
    and those before; reach: so many of them at most, 0: all."""

    length: int
    causal: bool = False
    reach: int = 0


@dataclass
class StageWork:
    """Of a stage. forward, backward: FLOP of products. pairs: by what attention saw, FLOP of a pair
    of positions in the forward pass; backward_pairs: the same of the backward pass.
    Bytes of the forward pass: saved, of all that autograd keeps; hidden, of what a module that was
    counted by itself gets, and products, of the outputs of products and attention in it; largest,
    of one tensor that is saved; moved, of what other operators read and write until the last of
    it. repeated: FLOP of products until then. width: columns of what it gets.
    forward_bytes, backward_bytes: what operators but products and attention read and write."""

    forward: int = 0
    backward: int = 0
    pairs: Counter[Seen] = field(default_factory=Counter)
    backward_pairs: Counter[Seen] = field(default_factory=Counter)
    saved: int = 0
    hidden: int = 0
    products: int = 0
    largest: int = 0
    moved: int = 0
    repeated: int = 0
    width: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0


class Counted(TorchDispatchMode):
    """Counts what runs within it, in `stages`: what is inside of a module that `inside` names, and
    `front` and `behind`, what comes before the first of these and after it. Operators of the
    backward pass belong to the stage of those of the forward pass. Bytes are counted once, and not
    those of weights of `model`, nor of what a module gets beside its first argument. reaches: what
    the masks that will be made allow, see orchmllm.counts.masks.reaches_of; by default they are
    asked, within their rows."""

    def __init__(self, inside: Mapping[Hashable, nn.Module],
                 reaches: Sequence[int | None] | None = None, model: nn.Module | None = None
                 ) -> None:
        super().__init__()
        weights = [] if model is None else [*model.parameters(), *model.buffers()]
        for weight in weights:
            weight.grad = None  # else that of an earlier count would be read, and added to
        self._apart = {_storage(t) for t in weights}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda keeper: keeper())
        self._keepers: Counter[int] = Counter()  # by storage, what keeps it
        self._is_used = False
        self.moved = self._flop = 0
        self.stages: dict[Hashable, StageWork] = {}
        self.reaches: list[int | None] = []
        self._inside, self._known = inside, reaches
        self._first: dict[Hashable, tuple[Hashable, bool]] = {}
        self._twins: dict[Hashable, Hashable] = {}
        self._passed: set[Hashable] = set()
        self._held: list[Tensor] = []
        self._attended: dict[int, tuple[Seen | None, int]] = {}
        self.reach: int | None = None
        self.attended = 0  # numbers in the keys and values of a position
        self._starts, self._order = [], []
        self._begin("front")

    def __enter__(self) -> Counted:
        self._token = running.set(self)
        for stage, module in self._inside.items():
            module.forward = partial(self._call, stage, module, module.forward)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)
        for module in self._inside.values():
            del module.forward
        running.reset(self._token)
        for stage, twin in self._twins.items():
            work = self.stages[twin]
            self.stages[stage] = work if stage in self._passed else replace(
                work, backward=0, backward_pairs=Counter(), backward_bytes=0)

    def reach_of_next(self, ask: Callable[[], int | None]) -> int | None:
        """What the next mask allows, by `ask` if it is not known. Raises ValueError."""
        if self._known is not None and len(self.reaches) == len(self._known):
            raise ValueError("masks are made where the first block does not know them")
        self.reaches.append(ask() if self._known is None else self._known[len(self.reaches)])
        return self.reaches[-1]

    def _begin(self, stage: Hashable) -> None:
        self._order.append(stage)
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self.stages.setdefault(stage, StageWork())
        self.moved = self._flop = 0

    def _save(self, tensor: Tensor) -> Callable[[], Tensor]:
        work, size = self.stages[self._order[-1]], tensor.untyped_storage().nbytes()
        work.moved, work.repeated = self.moved, self._flop
        storage, keeper = _storage(tensor), partial(self._used, tensor)
        if storage not in self._apart:
            work.saved += size * (not self._keepers[storage])
            work.largest = max(work.largest, size)
            self._keepers[storage] += 1
            weakref.finalize(keeper, self._gone, work, storage, size)
        return keeper

    def _gone(self, work: StageWork, storage: int, size: int) -> None:
        """What goes before the backward pass is not kept for it."""
        self._keepers[storage] -= 1
        if not self._keepers[storage] and not self._is_used:
            work.saved -= size

    def _used(self, tensor: Tensor) -> Tensor:
        self._is_used = True
        return tensor

    def _call(self, stage: Hashable, module: nn.Module, forward: Callable, *args: Any,
              **kwargs: Any) -> Any:
        """Runs a module once of all that are called alike."""
        kind = _kind(module, args, kwargs)
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if kind in self._first:
            self._twins[stage], alone = self._first[kind]
            out = _Pass.apply(hidden, partial(self._passed.add, stage))
            return out if alone else (out,)
        self._begin(stage)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self._held += given  # so that no other storage gets their addresses
        self._apart |= {_storage(t) for t in given} - {_storage(hidden)}
        work = self.stages[stage]
        work.hidden, work.width = hidden.untyped_storage().nbytes(), hidden.shape[-1]
        out = forward(*args, **kwargs)
        self._begin("behind")
        made = tree_leaves(out)
        if len(made) == 1 and made[0].shape == hidden.shape and (
                made[0].requires_grad == hidden.requires_grad) and isinstance(out, Tensor | tuple):
            self._first[kind] = stage, isinstance(out, Tensor)
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out, packet = _run(func, args, kwargs), product_of(func)
        node = torch._C._current_autograd_node()  # of the backward pass
        work = self.stages[self._order[-1] if node is None else self._order[
            bisect_right(self._starts, node._sequence_nr()) - 1]]
        attends = any(name in str(func) for name in ("attention", "attn"))
        moved = 0 if attends else moved_of(func, args, kwargs, out)
        if node is None and (packet is None or packet is _aten.convolution):
            self.moved += moved
        if packet is None:
            if node is None:
                work.forward_bytes += moved
            else:
                work.backward_bytes += moved
            return out
        if packet is _aten._scaled_dot_product_flash_attention:
            self._attend(work, args, out[0])
        elif packet is _aten._scaled_dot_product_flash_attention_backward:
            seen, flop = self._attended[_storage(args[4])]
            if seen is None:
                work.backward += 2 * flop
            else:
                work.backward_pairs[seen] += 2 * flop
        elif node is None:
            work.forward += flop_of(packet, args, kwargs, out)
            self._flop += flop_of(packet, args, kwargs, out)
        else:
            work.backward += flop_of(packet, args, kwargs, out)
        if node is None and packet is not _aten.convolution:
            work.products += sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
        return out

    def _attend(self, work: StageWork, args: tuple, out: Tensor) -> None:
        """That of positions to others than themselves, or outside of the modules that were named,
        is products: of all pairs."""
        query, key, value = args[:3]
        batch, heads, length, size = query.shape
        flop, seen = 2 * batch * heads * (size + value.shape[-1]), None
        if length == key.shape[2] and self._order[-1] in self._inside:
            seen = Seen(length) if self.reach is None else Seen(length, True, self.reach)
            work.pairs[seen] += flop
        else:
            flop *= length * key.shape[2]
            work.forward += flop
        self._attended[_storage(out)] = seen, flop


class _Pass(torch.autograd.Function):
    """Its input, and a note if a gradient comes back."""

    @staticmethod
    def forward(ctx, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return grad, None


def _kind(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """What two calls have in common if they compute the same: classes, settings, shapes, and
    arguments."""
    def of(value: Any) -> Hashable:
        if not isinstance(value, Tensor):
            return repr(value)
        known = not (value.is_meta or value.is_floating_point())
        return (tuple(value.shape), value.dtype, value.requires_grad,
                getattr(value, "reach", ""), tuple(value.flatten().tolist()) if known else ())

    settings = tuple((name, type(m).__name__, *(
        (key, value) for key, value in sorted(vars(m).items())
        if isinstance(value, int | float | str) and not key.endswith(("layer_idx", "layer_index"))))
        for name, m in module.named_modules())
    leaves, form = tree_flatten((args, dict(kwargs)))
    weights = tuple((name, of(p)) for name, p in module.named_parameters())
    return settings, weights, tuple(map(of, leaves)), str(form)


def product_of(func: Any) -> Any:
    """Of which an operator is a product; None: it is none."""
    packet = _aten.addmm if func._overloadpacket is _aten.addmm_ else func._overloadpacket
    return packet if packet in flop_registry or packet is _aten._grouped_mm else None


def flop_of(packet: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Of a product. Of those of all experts each row is in one."""
    if packet is _aten._grouped_mm:
        return 2 * args[0].numel() * args[1].shape[-1]
    args = [x for x in args if not isinstance(x, torch.dtype)]  # of what the product is written in
    return flop_registry[packet](*args, **kwargs, out_val=out)


def moved_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Bytes that an operator reads and writes, of what it indexes as much as it makes of it; none
    for a view and for memory that nothing is written to."""
    name = func._schema.name
    read, made = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in (
        (args, {k: v for k, v in kwargs.items() if k != "out"}), out))
    shared = {_storage(t) for t in made} & {_storage(t) for t in read}
    if "empty" in name or shared and not func._schema.is_mutable:
        return 0
    if name.endswith(WRITING):
        read = read[1:]
    if name.endswith("_like"):  # memory that is filled
        read = []
    indexes = sum(t.nbytes for t in read if t.dtype is torch.int64 and t.dim())
    others = [t.nbytes for t in read if t.dtype is not torch.int64]
    if indexes and func._schema.is_mutable:  # elements of the first argument
        return indexes + 3 * sum(others[1:])
    written = sum(t.nbytes for t in made)
    return indexes + written + sum(min(n, written) if indexes else n for n in others)


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator: without memory where any argument is, but integers that do not come from such a
    tensor are real, wherever they are asked for."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    places = {t.is_meta for t in tensors}
    if len(places) == 2 and not (
            func._overloadpacket in (_aten.index, _aten.index_put) and args[0].is_meta):
        args, kwargs = tree_map_only(
            Tensor, lambda t: t.to("meta") if t.dim() else t, (args, kwargs))
    if func is _aten._grouped_mm.default and True in places:  # in bfloat16 alone
        x, weight, *ends = args
        ends = ends[0] if ends else kwargs["offs"]
        return x.new_empty(*([len(ends), len(x)] if weight.dim() == 2 else [len(x)]),
                           weight.shape[-1])
    if kwargs.get("device") is None:
        return func(*args, **kwargs)
    out = func(*args, **kwargs | {"device": torch.device("meta")})
    if True in places or out.is_floating_point() and kwargs["device"].type == "meta":
        return out
    return func(*args, **kwargs | {"device": torch.device("cpu")})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def fitted(sizes: Sequence[int], values: Sequence[int]) -> list[Fraction]:
    """Coefficients of 1, n and n * n through the first three of the values at sizes n. Raises
    ValueError if they do not predict the others."""
    known = list(zip(map(Fraction, sizes), map(Fraction, values), strict=True))[:3]
    out = [Fraction(0)] * 3
    for at, (x, y) in enumerate(known):  # by Lagrange
        terms, below = [y], Fraction(1)
        for k, (other, _) in enumerate(known):
            if k != at:
                terms = [a - other * b for a, b in zip([0, *terms], [*terms, 0], strict=True)]
                below *= x - other
        out = [a + b / below for a, b in zip(out, terms, strict=True)]
    for n, value in zip(sizes, values, strict=True):
        if abs(sum(c * n**k for k, c in enumerate(out)) - value) > EXACT * abs(value):
            raise ValueError(f"{list(values)} FLOP for {list(sizes)} positions are not linear and "
                             "quadratic in the length")
    return out
