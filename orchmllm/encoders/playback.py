"""An attribute of the model answers its call with features that are there already."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from orchmllm.encoders.spec import Encoder, parent_of


def shadow(undo: ExitStack, owner: nn.Module, name: str, value: Any) -> None:
    """Until `undo` is closed, `owner.name` is `value`. A method or a submodule alike: an entry of
    the instance comes before both, and the submodule itself, with the hooks of FSDP, is not called.
    """
    parent, name = parent_of(owner, name)
    if name in parent.__dict__:
        undo.callback(parent.__dict__.__setitem__, name, parent.__dict__[name])
    else:
        undo.callback(parent.__dict__.pop, name)
    parent.__dict__[name] = value


def _facts(value: Any) -> tuple:
    """What tells a tensor from every other one, and from itself after a change in place."""
    if not isinstance(value, Tensor):
        return ()
    version = 0 if value.is_inference() else value._version
    return value.data_ptr(), value.shape, value.stride(), value.dtype, version


class Playback:
    """Stands for a method or a submodule; its attributes are those of the original. A call with
    other rows than it was given raises RuntimeError. given: the argument (n, ...) of the forward
    that was encoded; strict: whether the call has to get it as it is, and once. error: what the
    forward did so far that makes gradients wrong."""

    def __init__(
        self, encoder: Encoder, owner: nn.Module, call: str, result: Any, num_items: int,
        given: Tensor | None, strict: bool,
    ) -> None:
        parent, name = parent_of(owner, call)
        self._original = getattr(parent, name)
        self._what = f"encoder {encoder.name!r}: {type(owner).__name__}.forward"
        self._call, self._result, self._called = call, result, False
        self._given = given
        self._strict = strict and num_items > 0 and not given.is_inference()  # has no _version
        self._version = given._version if self._strict else 0
        self.error = RuntimeError(
            f"{self._what} was given {num_items} items but never called {call}: their features "
            "were not used") if num_items else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        lead = 0 if self._given is None else len(self._given)
        if tensors and len(tensors[0]) != lead:
            raise RuntimeError(
                f"{self._what} called {self._call} with {len(tensors[0])} rows, but was given "
                f"{lead}: it encodes its media in parts, which cannot be balanced")
        if not self._called:
            self.error = None
        if self._strict and (self._called or self._given._version != self._version or not any(
                t is self._given for t in tensors)):
            self.error = RuntimeError(
                f"{self._what} called {self._call} twice, or with another tensor than its argument,"
                " whose features it would get: what happens to media in the forward belongs into "
                "the encoder or the data set")
        self._called = True
        return self._result
