"""An attribute of the model answers its call with features that are there already."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from orchmllm.dropin.encoders.spec import Encoder, parent_of


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


class Playback:
    """Stands for a method or a submodule; its attributes are those of the original. A call with
    other rows than it was given raises RuntimeError."""

    def __init__(
        self, encoder: Encoder, owner: nn.Module, call: str, result: Any, num_items: int, lead: int
    ) -> None:
        parent, name = parent_of(owner, call)
        self._original = getattr(parent, name)
        self._what = f"encoder {encoder.name!r}: {type(owner).__name__}.forward"
        self._call, self._result, self._num_items, self._lead = call, result, num_items, lead
        self._called = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        if tensors and len(tensors[0]) != self._lead:
            raise RuntimeError(
                f"{self._what} called {self._call} with {len(tensors[0])} rows, but was given "
                f"{self._lead}: it encodes its media in parts, which cannot be balanced")
        self._called = True
        return self._result

    def check_called(self) -> None:
        """Raises RuntimeError if there were items and the model did not ask for them."""
        if self._num_items and not self._called:
            raise RuntimeError(f"{self._what} was given {self._num_items} items but never called "
                               f"{self._call}: their features were not used")
