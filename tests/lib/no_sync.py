"""Operators of a step that would wait for the device, or that mix it with the host."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from orchmllm.encoders.mirrored import Mirrored

WAITING = ("local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.",
           "repeat_interleave.Tensor", "assert_async", "masked_scatter_backward")
COPIES = ("_to_copy", "copy_", "_foreach_copy_", "set_")
# Of fsdp.compile: they take a batch's lengths on both sides, and read those of the host.
BOTH_SIDES = ("packed_attention.", "packed_attention_backward.")
READING = ("cpu", "numpy", "tolist")  # on the host they are no operators


class Waits(AssertionError):
    """A step would have waited for its device."""


class Mixes(AssertionError):
    """An operator was given tensors of the host and of the device."""


class NoSync(TorchDispatchMode):
    """Raises Waits for operators whose result's size or Python value depends on the data, for
    blocking copies to another device, and for reading a tensor in Python. device: the one that is
    computed on; what is on another is not watched. `paused`: for what a step may wait for.

    Raises Mixes for an operator that takes tensors of several devices and is no copy between them,
    an index on the host included: CUDA refuses some of these and waits in others. Numbers (tensors
    without a dimension) of the host are no mix.

    noted: where everything of this is noted instead of raised."""

    def __init__(self, device: str = "cpu", noted: list[Exception] | None = None) -> None:
        super().__init__()
        self.device, self.paused, self.noted = device, False, noted
        self._methods = {name: getattr(torch.Tensor, name) for name in READING}

    def __enter__(self):
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, self._guarded(name, method))
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def _guarded(self, name: str, method):
        def read(tensor, *args, **kwargs):
            # What Mirrored reads of the host it reads without modes.
            watched = self in _get_current_dispatch_mode_stack()
            self._watch(f"Tensor.{name}", watched and tensor.device.type == self.device)
            return method(tensor, *args, **kwargs)
        return read

    def _watch(self, name: str, waits: bool) -> None:
        if waits and not self.paused:
            self._tell(Waits(f"{name} waits for the device"))

    def _tell(self, error: Exception) -> None:
        if self.noted is None:
            raise error
        self.noted.append(error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, Mirrored) for t in types):
            return NotImplemented  # it calls what it needs of the device
        kwargs, name = kwargs or {}, func.__name__
        if name.startswith("to."):
            # Below autograd, as where Mirrored is called, it is no copy yet, which is what is
            # watched; and FakeTensorMode would compute it of what is no fake tensor.
            super().__enter__()
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        if not name.startswith((*COPIES, *BOTH_SIDES)):
            devices = {x.device.type for x in tree_leaves((args, kwargs))
                       if isinstance(x, torch.Tensor) and (x.dim() or x.device.type != "cpu")}
            if len(devices) > 1:
                self._tell(Mixes(f"{name} takes tensors of {' and '.join(sorted(devices))}"))
        if name.lstrip("_").startswith(WAITING):
            self._watch(name, args[0].device.type == self.device)
        elif name.startswith(("index.", "index_put")):
            self._watch(f"{name} by a mask", any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]))
        elif name.startswith("_to_copy"):
            to = torch.device(kwargs.get("device") or args[0].device)
            blocking = not kwargs.get("non_blocking")
            self._watch("a copy", to.type != args[0].device.type and blocking)
        elif name.startswith("copy_"):
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            self._watch("a copy", args[0].device.type != args[1].device.type and blocking)
        return func(*args, **kwargs)
