"""What the model's own forward gets in place of its encoders: calls that answer with features."""

from __future__ import annotations

import inspect
import logging
import reprlib
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchmllm.encoders.results import Features, rebuild
from orchmllm.encoders.spec import HARMLESS, Encoder
from orchmllm.encoders.table import LocalItems

log = logging.getLogger("orchmllm.encoders")


class Answer:
    """Stands for a method or a submodule; its attributes are those of the original. A call with
    other rows than it was given raises RuntimeError. error: what the forward did so far that makes
    its features or gradients wrong."""

    def __init__(
        self, encoder: Encoder, owner: nn.Module, call: str, result: Any, num_items: int,
        local: LocalItems, learns: bool,
    ) -> None:
        self._original = attrgetter(call)(owner)
        self._what = f"encoder {encoder.name!r}: {type(owner).__name__}.forward"
        self._encoder, self._call, self._owner = encoder, call, owner
        self._result, self._local, self._called = result, local, False
        self._learns = learns  # whether the features have a gradient
        self._device = device_of(local.inputs, owner).type
        self._grad, self._autocast = torch.is_grad_enabled(), self._autocasts()
        layout = encoder.calls[call]
        names = layout.arguments if encoder.named else (layout.value,)
        self._lead = len(local.inputs[layout.value]) if num_items else 0
        # What the call has to get; a tensor of inference mode has no _version.
        self._given = {n: value for n in names if num_items and isinstance(
            value := local.inputs.get(n), Tensor)}
        self._versions = {n: value._version for n, value in self._given.items()
                          if not value.is_inference()}
        self.error = RuntimeError(
            f"{self._what} was given {num_items} items but never called {call}: their features "
            "were not used: balance the module that calls it") if num_items else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        media = self._given.get(self._encoder.calls[self._call].value)
        if tensors and not any(t is media for t in tensors) and len(tensors[0]) != self._lead:
            raise RuntimeError(
                f"{self._what} called {self._call} with {len(tensors[0])} rows, but was given "
                f"{self._lead}: it encodes its media in parts, which cannot be balanced" if media
                is not None else
                f"{self._what} called {self._call} on {len(tensors[0])} rows without being given "
                "media: leave such a call out, since a rank without media needs none")
        if not self._called:
            self.error = None
        if self._given and (wrong := self._differs(tensors, args, kwargs)):
            self.error = RuntimeError(
                f"{self._what} called {self._call} {wrong}, but gets the features of its argument: "
                "what happens to media in the forward belongs into the encoder or the data set")
        self._called = True
        return self._result

    def _autocasts(self) -> torch.dtype | None:
        """To what it casts on the device of the inputs; None: it is off."""
        on = torch.is_autocast_enabled(self._device)
        return torch.get_autocast_dtype(self._device) if on else None

    def _differs(self, tensors: list[Tensor], args: tuple, kwargs: dict) -> str:
        """How this call is another than the one that was answered before the forward; "" if it
        is the same."""
        if self._called:
            return "twice"
        if torch.is_grad_enabled() != self._grad and self._learns:
            return "without gradients"
        if self._encoder.run is None:  # which may switch autocast itself
            if self._autocast not in (None, self._autocasts()):
                return f"where autocast is off or casts to another dtype than {self._autocast}"
            if self._autocasts() != self._autocast:  # the features are more precise
                _warn_of_autocast(self._what, self._call)
        for name, value in self._given.items():
            if name in self._versions and value._version != self._versions[name]:
                return f"with {name} changed in place"
            if not any(_is(t, value) for t in tensors):
                return f"with another tensor than its argument {name}"
        if self._encoder.named and inspect.ismethod(self._original) and (
                hasattr(self._owner, "config")):  # as models of transformers have it
            return self._other_option(args, kwargs)
        return self._other_argument(args, kwargs)

    def _other_argument(self, args: tuple, kwargs: dict) -> str:
        """The same of an encoder that was declared by its layout: an argument that is neither of
        the layout, nor its default, nor among `keywords`."""
        original = self._original
        signature = inspect.signature(getattr(original, "forward", original))
        of_layout = [self._local.inputs.get(n) for n in self._encoder.calls[self._call].arguments]
        used = self._encoder.keywords | self._local.options
        given: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind == parameter.VAR_KEYWORD:
                given |= value
            elif parameter.kind == parameter.VAR_POSITIONAL:  # as a wrapper of a tower has it
                given |= {f"{name}[{i}]": v for i, v in enumerate(value)}
            else:
                given[name] = value
        for name, value in given.items():
            if any(_is(value, v) if isinstance(value, Tensor) and isinstance(v, Tensor)
                   else value is v for v in of_layout):
                continue
            if isinstance(value, Tensor) and self._encoder.run is not None:
                continue  # which computes itself what the forward makes of its inputs
            parameter = signature.parameters.get(name)
            default = parameter.default if parameter is not None else None
            if isinstance(value, Tensor) or value != used.get(name, default):
                return (f"with {name}={_short(value)} (an option that does not change the features "
                        "belongs into Encoder(keywords=...))")
        return ""

    def _other_option(self, args: tuple, kwargs: dict) -> str:
        """An option of the call that is not the one that was encoded with."""
        signature = _signature(self._original.__func__)
        used = self._encoder.keywords | self._local.options
        for name, value in signature.bind(self._owner, *args, **kwargs).arguments.items():
            parameter = signature.parameters[name]
            if (name in self._given or name in HARMLESS or value is None or value is self._owner
                    or parameter.kind == parameter.VAR_KEYWORD):
                continue
            default = getattr(self._owner.config, name, parameter.default)
            if isinstance(value, Tensor) or value != used.get(name, default):
                return f"with {name}={_short(value)}"
        return ""


_signature = lru_cache(inspect.signature)


@lru_cache
def _warn_of_autocast(what: str, call: str) -> None:
    """Once for each call."""
    log.warning("%s called %s under autocast, but its media are encoded before, where it is off: "
                "call the model within autocast (accelerate: accelerator.autocast())", what, call)


def _is(tensor: Tensor, given: Tensor) -> bool:
    """Whether it is the same tensor, a view of all of it, or the same in another dtype."""
    if tensor is given:
        return True
    if tensor.requires_grad or tensor.shape != given.shape or tensor.device != given.device:
        return False
    if tensor.dtype == given.dtype:
        return tensor.data_ptr() == given.data_ptr() and tensor.stride() == given.stride()
    return torch.equal(tensor, given.to(tensor.dtype))


def device_of(inputs: Mapping[str, Any], owner: nn.Module) -> torch.device:
    """Of the arguments of a forward: an accelerator, if one is there; of the parameters, which FSDP
    may keep on the CPU, only where no argument is a tensor."""
    devices = [v.device for v in inputs.values() if isinstance(v, Tensor)] or [
        next(owner.parameters()).device]
    return next((d for d in devices if d.type != "cpu"), devices[0])


def _short(value: Any) -> str:
    return (f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor)
            else reprlib.repr(value))


class Answers:
    """Those of one forward of `owner`, until `close`. join: submodule whose output the features of
    a rank without media join ("": the input embeddings)."""

    def __init__(self, owner: nn.Module, join: str) -> None:
        self._owner, self._join = owner, join
        self._answers: list[Answer] = []
        self.encoders: set[str] = set()  # whose calls are answered
        self._undo = ExitStack()
        self._zero: Tensor | None = None  # of features that the forward may leave unread
        self._must_join = False  # as this rank has no media
        self._nodes: dict[Any, str] = {}  # of features that it reads, in the graph; the encoder
        # Whether the graph of the result was looked at, and has no part that hides what it reads.
        self.saw_all = False

    def add(
        self, encoder: Encoder, local: LocalItems, features: Features, rows: Tensor,
        counts: np.ndarray, may_join: bool = False,
    ) -> None:
        """Lets the calls of an encoder return the features of this rank's own items: rows (R, W),
        counts (n,) of each. features: what the encoder returned here, for some items. may_join:
        whether features of a rank that has media join the embeddings, too, if these are there."""
        start, first = 0, 0
        self.encoders.add(encoder.name)
        for call, n in zip(encoder.calls, local.counts, strict=True):
            sizes = counts[start: start + n].tolist()
            part = rows[first: first + sum(sizes)]
            start, first = start + n, first + sum(sizes)
            result = rebuild(encoder, features, part, sizes)
            answer = Answer(encoder, self._owner, call, result, n, local, rows.requires_grad)
            self._answers.append(answer)
            self._replace(call, answer)
        for name in encoder.passes:
            self._replace(name, lambda x, *a, **k: x)
        if rows.grad_fn is not None and any(local.counts):
            self._nodes[rows.grad_fn] = encoder.name
        if rows.requires_grad and (may_join or not all(local.counts)):
            self._must_join |= not all(local.counts)
            zero = rows[:0].sum()
            self._zero = zero if self._zero is None else self._zero + zero.to(self._zero.dtype)

    def _replace(self, name: str, value: Any) -> None:
        """Until `close` the owner's attribute is `value`. A method or a submodule alike: an entry
        of the instance comes before both, and the submodule itself, with the hooks of FSDP, is not
        called. A ModuleDict, ModuleList or Sequential looks among its submodules alone."""
        path, _, name = name.rpartition(".")
        parent = self._owner.get_submodule(path)
        holds = isinstance(parent, nn.ModuleDict | nn.ModuleList | nn.Sequential)
        held = parent._modules if holds else parent.__dict__
        if name in held:
            self._undo.callback(held.__setitem__, name, held[name])
        else:
            self._undo.callback(held.pop, name)
        held[name] = value

    def join_zero(
        self, args: tuple, kwargs: dict, inputs: Mapping[str, Any], parameters: list[str]
    ) -> tuple[tuple, dict] | None:
        """Adds 0 to the embeddings, so that the backward pass of a rank whose forward reads no
        features reaches their exchange at the same place as that of the others. Returns the
        arguments of the forward, whose `parameters` are these, where they change."""
        if self._zero is None:
            return None
        given = inputs.get("inputs_embeds")
        if given is not None and not self._join:
            joined = self._with_zero(given)
            if "inputs_embeds" in parameters[:len(args)]:
                place = parameters.index("inputs_embeds")
                return (*args[:place], joined, *args[place + 1:]), kwargs
            return args, {**kwargs, "inputs_embeds": joined}
        try:
            embedding = (self._owner.get_submodule(self._join) if self._join
                         else self._owner.get_input_embeddings())
        except NotImplementedError:
            if self._must_join:
                raise
            return None

        def joins(module: nn.Module, inputs: tuple, out: Any) -> Tensor | None:
            joinable = self._must_join or type(out) is Tensor
            return self._with_zero(out) if joinable and self._zero is not None else None

        hook = embedding.register_forward_hook(joins)
        self._undo.callback(hook.remove)
        return None

    @torch.compiler.disable
    def _with_zero(self, embeddings: Tensor) -> Tensor:
        """Once: from then on nothing is left to join."""
        joined = embeddings + self._zero.to(embeddings.dtype)
        if joined.requires_grad:  # else it is called under no_grad
            self._zero = None
        return joined

    def unused(self, result: Any) -> Exception | None:
        """Why ranks would wait for each other in the backward pass of `result`, what the forward
        returned: it does not reach the exchange of these features, but that of others does."""
        leaves = tree_leaves(result)
        nodes, seen = [x.grad_fn for x in leaves if isinstance(x, Tensor) and x.grad_fn], set()
        if not nodes or any(hasattr(x, "__dict__") and not isinstance(x, Tensor) for x in leaves):
            return None  # what else it returned may hold the rest
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                if type(node).__name__ == "CheckpointFunctionBackward":  # reads more than it says
                    return None
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
        self.saw_all = True
        name = next((name for node, name in self._nodes.items() if node not in seen), None)
        return name and RuntimeError(
            f"encoder {name!r}: {type(self._owner).__name__}.forward stops the gradient of its "
            "features (by detach or no_grad), for which other ranks would wait: freeze the encoder "
            "by requires_grad_(False) instead")

    def close(self) -> Exception | None:
        """The model calls its encoders again. Returns what the forward did that makes gradients
        wrong."""
        self._undo.close()
        if self._zero is not None and self._must_join:
            return RuntimeError(
                f"{type(self._owner).__name__}.forward did not call its embedding with gradients, "
                "to which the features of a rank without media are joined: name the module whose "
                "output the features join in balance_encoders(..., join=)")
        return next((answer.error for answer in self._answers if answer.error), None)
