"""Norms and rotations of a model of transformers by fewer kernels of a GPU.

What is replaced is found by its form and not by its name, and only where it computes on the host
what the model's own code does: the same bits in bfloat16, and the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from types import CellType, FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

ROUNDING = 1e-5  # of the largest gradient, in float32


class Rotate(torch.autograd.Function):
    """Rotary embedding of x (..., D), in whose value i and value i + D / 2 turn together. cos, sin:
    (..., D) without gradients, no wider than x; swapped: sin with its halves exchanged. The
    backward pass keeps cos and sin alone."""

    @staticmethod
    def forward(ctx, x, cos, sin, swapped):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, swapped, 1.0)

    @staticmethod
    def backward(ctx, grad):
        return _turned(grad, *ctx.saved_tensors, -1.0), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    out, across = x * cos, x * sin
    (out_a, out_b), (a, b) = out.chunk(2, dim=-1), across.chunk(2, dim=-1)
    # Not addcmul_, which rounds once where transformers rounds product and sum: equal bits.
    out_a.add_(b, alpha=-direction)
    out_b.add_(a, alpha=direction)
    return out


def _narrow(x: Tensor) -> Tensor:
    """transformers computes some parts in float32, also those of a model in float64."""
    return x.float() if x.dtype is torch.float64 else x


def _scaled_after(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that is rounded to x's dtype before it is multiplied by the weight."""
    return weight * F.rms_norm(_narrow(x), weight.shape, eps=eps).to(x.dtype)


def _scaled_within(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm that is multiplied by the weight plus one before it is rounded to x's dtype."""
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).type_as(x)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In the wider dtype of x and tables."""
    swapped = torch.cat(sin.chunk(2, -1)[::-1], -1)
    wide = [x.to(torch.promote_types(x.dtype, cos.dtype)) for x in (q, k)]
    return tuple(Rotate.apply(x, cos, sin, swapped) for x in wide)


def _rotated_in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.float(), sin.float()
    swapped = torch.cat(sin.chunk(2, -1)[::-1], -1)
    return tuple(Rotate.apply(_narrow(x), cos, sin, swapped).to(x.dtype) for x in (q, k))


NORMS = (_scaled_after, _scaled_within)
ROTATIONS = (_rotated, _rotated_in_float32)


def fuse(model: nn.Module) -> None:
    """Replaces the forwards of norms, and the rotations that attention calls, in a model whose
    weights need no memory. Results on a CPU keep their bits."""
    norms: dict[tuple[type, float], type] = {}
    for module in model.modules():
        cls, eps = type(module), _number_of_norm(module)
        if cls.__module__.startswith("torch."):  # a kernel of its own
            continue
        if eps is None:
            module.__class__ = _rotating(cls)
            continue
        if (cls, eps) not in norms:
            norms[cls, eps] = _normalising(module, eps)
        module.__class__ = norms[cls, eps]


def _number_of_norm(module: nn.Module) -> float | None:
    """Of a module that has one vector of weights, one number, and one argument."""
    weights = [*module.named_parameters(), *module.named_buffers()]
    numbers = [v for v in vars(module).values() if isinstance(v, float)]
    if len(weights) == len(numbers) == len(signature(module.forward).parameters) == 1 and (
            weights[0][0] == "weight" and weights[0][1].dim() == 1):
        return numbers[0]
    return None


def _normalising(module: nn.Module, eps: float) -> type:
    """The class of a norm, with that of NORMS which computes what it does, if one does."""
    def own(x: Tensor, weight: Tensor) -> Tensor:
        return functional_call(module, {"weight": weight}, (x,))

    x, weight = _drawn(8, 16), _drawn(16)
    x *= torch.logspace(-4, 1, 8, device="cpu")[:, None]  # of the smallest rows the number is most
    for norm in NORMS:
        if _agree(own, partial(norm, eps=eps), [x, weight]):
            return _with_forward(
                type(module), lambda self, x, norm=norm: norm(x, self.weight, eps))
    return type(module)


@cache
def _rotating(cls: type) -> type:
    """A class whose forward calls one of ROTATIONS in the place of functions of transformers that
    compute the same; they are found by their arguments."""
    copied = _rotated_copy(cls.forward)
    return cls if copied is None else _with_forward(cls, copied)


def _rotated_copy(forward: object) -> FunctionType | None:
    """A copy of a function and of what decorates it; None if it calls no rotation that is known."""
    if not isinstance(forward, FunctionType):
        return None
    names, closure = forward.__globals__, forward.__closure__
    if (inner := getattr(forward, "__wrapped__", None)) is not None:
        if (copied := _rotated_copy(inner)) is None:
            return None
        closure = tuple(CellType(copied) if cell.cell_contents is inner else cell
                        for cell in closure or ())
    else:
        found = {name: rotated for name in forward.__code__.co_names
                 if isinstance(names.get(name), FunctionType)
                 and (rotated := rotation_like(names[name])) is not None}
        if not found:
            return None
        names = names | found
        del names["__name__"]  # by which torch.compile looks into the module for what is replaced
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__, copy.__module__ = forward.__kwdefaults__, forward.__module__
    vars(copy).update(vars(forward))  # by which its signature is found
    return copy


@cache
def rotation_like(own: FunctionType) -> Callable | None:
    """That of ROTATIONS which computes what `own` does, if one does."""
    names = signature(own).parameters
    dim = names.get("unsqueeze_dim")
    if [*names][:4] != ["q", "k", "cos", "sin"] or dim is not None and dim.default != 1:
        return None
    most = 3 if dim is None else 4  # dimensions, of which the tables lack the second one
    q, k, cos, sin = _drawn(8, 3, 16), _drawn(8, 2, 16), _drawn(8, 16), _drawn(8, 16)
    for turned in ROTATIONS:
        def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: object,
                    turned: Callable = turned, **keys: object) -> tuple[Tensor, Tensor]:
            is_tried = not (more or keys) and q.dim() == cos.dim() + 1 <= most
            if not is_tried or cos.shape[-1] != q.shape[-1]:  # a part of q is not turned
                return own(q, k, cos, sin, *more, **keys)
            return turned(q, k, cos.unsqueeze(1), sin.unsqueeze(1))

        if _agree(own, rotated, [q, k], [cos, sin]):
            return rotated
    return None


def _agree(own: Callable, other: Callable, learn: list[Tensor], fixed: list[Tensor] = ()) -> bool:
    """Whether two functions have the same bits in bfloat16, and the same gradients in float32 but
    for their rounding; also where a mode of the caller changes what functions of torch do, as that
    of a proof does."""
    for dtype in (torch.bfloat16, torch.float32):
        made = []
        for function in (own, other):
            with DisableTorchFunction(), torch.enable_grad():
                given = [x.to(dtype, copy=True).requires_grad_() for x in learn]
                out = tree_leaves(function(*given, *(x.to(dtype) for x in fixed)))
                grads = torch.autograd.grad(out, given, [x.detach().cos() for x in out])
            made.append((out, grads))
        (wanted, slopes), (found, steeps) = made
        if any(a.dtype != b.dtype for a, b in zip(wanted, found, strict=True)):
            return False
        if dtype is torch.bfloat16:
            if not all(map(torch.equal, wanted, found)):
                return False
        elif any(float((a - b).abs().max()) > ROUNDING * float(a.abs().max())
                 for a, b in zip(slopes, steeps, strict=True)):
            return False
    return True


def _drawn(*shape: int) -> Tensor:
    """Normal numbers on the host, whatever the global generator and device are."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(sum(shape)),
                       dtype=torch.float32, device="cpu")


def _with_forward(cls: type, forward: Callable) -> type:
    """transformers looks at names of classes, and at their modules."""
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
