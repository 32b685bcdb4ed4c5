"""Integers of a batch that the host keeps beside the device, so that reading them does not wait.

Models of transformers read token ids, grids and lengths in their forwards: they count tokens of
images, choose rows by masks and cut sequences at their borders. On a GPU each of these reads waits
until all work that was queued before is done. The values come from the host, which knows them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from orchmllm.batch import on_device

_aten = torch.ops.aten


class Mirrored(Tensor):
    """A tensor of a device that is computed with on the host, as long as no other tensor of the
    device is involved: what a model makes of it alone (masks, borders, positions) is known there,
    too. Reading it, and choosing rows by it where it is a mask, then waits for nothing. It is
    copied to the device at its first use with another tensor.

    host: its values, of any shape and dtype, which nobody may change; device: any, the host
    included. Raises RuntimeError where it would be changed in place, but for what was made of
    others and not read yet (`is_new`)."""

    host: Tensor
    is_new = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device | str) -> Mirrored:
        out = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=device)
        out.host = host
        return out

    def __repr__(self) -> str:
        return f"Mirrored({self.tolist()}, device={self.device})"

    def tolist(self) -> Any:
        return on_host(self.host.tolist)

    def numpy(self, *, force: bool = False) -> Any:
        return on_host(self.host.numpy, force=force)

    @functools.cached_property
    def there(self) -> Tensor:
        """An ordinary tensor of the device. What is repeated (stride 0) is repeated there."""
        small = self.host
        for dim, stride in enumerate(small.stride()):
            if stride == 0 and small.shape[dim]:
                small = on_host(small.narrow, dim, 0, 1)
        return on_device(small, self.device).expand(self.shape)

    @functools.cached_property
    def positions(self) -> list[Mirrored]:
        """Of a mask: the index of each dimension of what it chooses."""
        return [Mirrored(at, self.device) for at in on_host(self.host.nonzero, as_tuple=True)]

    def rows(self, shape: torch.Size) -> tuple[Tensor, int]:
        """Of a mask for a tensor of `shape`: (k,) indices, on the device, of what it chooses of the
        tensor as (rows, width), and this width: 1, or the last dimension where a row is chosen as a
        whole."""
        mask = on_host(self.host.expand, shape)
        whole = mask.stride(-1) == 0
        found = on_host(lambda: (mask[..., 0] if whole else mask).flatten().nonzero()[:, 0])
        return on_device(found, self.device), shape[-1] if whole else 1

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = next(x.device for x in tensors if isinstance(x, cls))
        are_known = all(isinstance(x, cls) or (x.dim() == 0 and x.device.type == "cpu")
                        for x in tensors)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, cls) and argument.alias_info and argument.alias_info.is_write:
                if not (value.is_new and are_known):
                    raise RuntimeError(f"{func} would change integers of a batch in place, which "
                                       "the host and the device both keep")
                on_host(func, *tree_map_only(cls, lambda x: x.host, (args, kwargs))[0])
                return value
        for x in tensors:
            x.is_new = False
        if are_known:
            found = _known(func, args, kwargs, device)
            for x, told in zip(tree_leaves(found), func._schema.returns, strict=False):
                if isinstance(x, cls):
                    x.is_new = told.alias_info is None
            return found
        if func in _CHOOSING:
            return _CHOOSING[func](func, *args, **kwargs)
        args, kwargs = tree_map_only(cls, lambda x: x.there, (args, kwargs))
        return func(*args, **kwargs)


def mirrored(values: np.ndarray, device: torch.device | str) -> Mirrored:
    """values: of the host, of any shape, which nobody may change."""
    return Mirrored(on_host(torch.from_numpy, values), device)


def on_host(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without modes of the caller: fake tensors, for one, have no values."""
    with _disable_current_modes():
        return function(*args, **kwargs)


def _known(func: Any, args: tuple, kwargs: dict, device: torch.device) -> Any:
    """A function of mirrored tensors alone."""
    target = torch.device(kwargs.get("device") or device)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(Mirrored, lambda x: x.host, (args, kwargs))
    found = on_host(func, *args, **kwargs)
    if target.type != device.type:  # a copy to the host
        return found
    return tree_map_only(Tensor, lambda x: Mirrored(x, device), found)


def _by_position(func: Any, x: Tensor, indices: list, *rest: Any, **kwargs: Any) -> Any:
    """x[indices], or x[indices] = values: rows that a mask chooses are chosen by their indices."""
    places = []
    for at in indices:
        is_mask = isinstance(at, Mirrored) and at.dtype in (torch.bool, torch.uint8)
        places += at.positions if is_mask else [at]
    args = tree_map_only(Mirrored, lambda x: x.there, (x, places, *rest))
    return func(*args, **kwargs)


def _scattered(func: Any, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """x.masked_scatter(mask, source). Raises RuntimeError if source has too few values."""
    if not isinstance(mask, Mirrored):
        return func(*tree_map_only(Mirrored, lambda x: x.there, (x, mask, source)))
    at, width = mask.rows(x.shape)
    if source.numel() < len(at) * width:
        raise RuntimeError(f"a mask chooses {len(at) * width} values, of which there are "
                           f"{source.numel()}")
    values = source.flatten()[: len(at) * width].unflatten(0, (len(at), width))
    return x.reshape(-1, width).index_copy(0, at, values).view(x.shape)


def _gathered(func: Any, grad: Tensor, mask: Mirrored, sizes: list[int]) -> Tensor:
    """The gradient of such a source."""
    at, width = mask.rows(grad.shape)
    found = grad.reshape(-1, width).index_select(0, at).flatten()
    whole = grad.new_zeros(torch.Size(sizes).numel())
    whole[: len(found)] = found
    return whole.view(sizes)


_CHOOSING = {
    _aten.index.Tensor: _by_position, _aten.index_put.default: _by_position,
    _aten.index_put_.default: _by_position, _aten._index_put_impl_.default: _by_position,
    _aten.masked_scatter.default: _scattered,
    _aten.masked_scatter_backward.default: _gathered}


def compute_on_host(model: nn.Module) -> None:
    """Lets the functions of transformers that a model's towers call for borders, windows and
    positions compute them on the host, where they are given a Mirrored. They are those that can be
    computed before a forward: they take results that exist already in an argument `kwargs`."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for key, function in list(vars(module).items()):
            if (isinstance(function, FunctionType) and not hasattr(function, "on_host")
                    and function.__module__.startswith("transformers.")
                    and _takes_results(inspect.signature(function))):
                setattr(module, key, _computing_on_host(function))


def _takes_results(signature: inspect.Signature) -> bool:
    given = signature.parameters.get("kwargs")
    return given is not None and given.kind == given.POSITIONAL_OR_KEYWORD


@functools.cache
def _computing_on_host(function: FunctionType) -> Callable:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        device = next((x.device for x in given if isinstance(x, Mirrored)), None)
        if device is None:
            return function(*args, **kwargs)
        # `kwargs` among them stays the caller's: what is taken is taken out of it.
        args = tuple(x.host if isinstance(x, Mirrored) else x for x in args)
        kwargs = {k: x.host if isinstance(x, Mirrored) else x for k, x in kwargs.items()}
        alone = all(isinstance(x, Mirrored) for x in given)
        with _disable_current_modes() if alone else nullcontext():
            found = function(*args, **kwargs)
        return tree_map_only(
            Tensor, lambda x: Mirrored(x, device) if x.device.type == "cpu" else x, found)

    run.on_host = True
    return run
