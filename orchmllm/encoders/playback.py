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
    that was encoded, None where it is known that the model passes it on as it is."""

    def __init__(
        self, encoder: Encoder, owner: nn.Module, call: str, result: Any, num_items: int, lead: int,
        given: Tensor | None,
    ) -> None:
        parent, name = parent_of(owner, call)
        self._original = getattr(parent, name)
        self._what = f"encoder {encoder.name!r}: {type(owner).__name__}.forward"
        self._call, self._result, self._num_items, self._lead = call, result, num_items, lead
        self._given, self._argument = _facts(given), encoder.calls[call].arguments[0]
        self._called, self._misuse = False, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if tensors and len(tensors[0]) != self._lead:
            raise RuntimeError(
                f"{self._what} called {self._call} with {len(tensors[0])} rows, but was given "
                f"{self._lead}: it encodes its media in parts, which cannot be balanced")
        if self._given and self._called:
            self._misuse = (f"{self._what} called {self._call} twice: what it returned the first "
                            "time would be returned again; call it once")
        elif self._given and self._given not in map(_facts, tensors):
            self._misuse = (
                f"{self._what} called {self._call} with another tensor than its argument "
                f"{self._argument}, which is encoded before the forward: what is done to it in "
                f"between would be lost; do it in the data set or in {self._call}")
        self._called = True
        return self._result

    @property
    def error(self) -> RuntimeError | None:
        """What the forward did that makes gradients wrong; also if there were items and it did not
        ask for them."""
        if self._num_items and not self._called:
            return RuntimeError(f"{self._what} was given {self._num_items} items but never called "
                                f"{self._call}: their features were not used")
        return RuntimeError(self._misuse) if self._misuse else None


def _facts(value: Tensor | None) -> tuple:
    """What tells a tensor from every other one, and from itself after a change in place."""
    if value is None:
        return ()
    version = 0 if value.is_inference() else value._version
    return value.data_ptr(), value.shape, value.stride(), value.dtype, version
