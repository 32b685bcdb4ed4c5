"""The encoders of a model of transformers, from its methods get_image_features, get_video_features
and get_audio_features: what they are called with says how the media divide into items. What is
inferred is proved in the first forward that has items (proof.py)."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.encoders.items import Cropped, Layout, Masked, Packed, Rows, Slots, Tiles, Windows
from orchmllm.encoders.spec import EQUAL, HARMLESS, Encoder
from orchmllm.plan.cost import CostModel

_METHODS = {kind: f"get_{kind}_features" for kind in ("image", "video", "audio")}
# Arguments with one row for each row of the media.
_BESIDE = ("pixel_mask", "pixel_attention_mask", "image_position_ids", "qformer_input_ids",
           "qformer_attention_mask")
_AFTER = re.compile("projector|projection|connector|aligner|merger|adapter")
# Whose towers compute each frame of a video, or two that are merged in time, by itself.
_FRAMES_APART = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_SIZES = ((("embed_dim", "hidden_size", "d_model"), 1024),
          (("intermediate_size", "encoder_ffn_dim", "mlp_ratio"), 4096),
          (("depth", "num_hidden_layers", "encoder_layers"), 24))


def infer_encoders(model: nn.Module) -> tuple[nn.Module, tuple[Encoder, ...]]:
    """The inner model whose forward calls the encoders, and these. Raises ValueError if there is
    none, or more than one such model."""
    holding = [m for m in model.modules() if _methods(m)]
    owners = [m for m in holding if not any(c is not m and c in holding for c in m.modules())]
    kind = type(model).__name__
    if len(owners) > 1:
        raise ValueError(f"{kind} holds {len(owners)} models with encoders "
                         f"({', '.join(type(m).__name__ for m in owners)}): call balance_encoders "
                         "for one of them")
    for module in model.modules():
        if _is_qwen2_audio(module):
            return module, (_QWEN2_AUDIO,)
    if not owners:
        raise ValueError(
            f"balance_encoders does not know {kind}: its forward takes no media that a method "
            f"{' or '.join(_METHODS.values())} encodes. Describe its encoders with "
            "orchmllm.Encoder (docs/encoders.md); a model without encoders needs "
            "BalancedDataLoader or balance_trainer alone (docs/loader.md)")
    (owner,) = owners
    # A method of a medium that this configuration has no encoder for reads no submodule.
    found = {k: _encoder(owner, k, n) for k, n in _methods(owner) if any(_towers(owner, n, set()))}
    if not found:
        raise ValueError(f"no encoder was found in {type(owner).__name__}: describe what encodes "
                         "with orchmllm.Encoder (docs/encoders.md)")
    return owner, tuple(_joined(owner, found))


def has_encoders(model: nn.Module) -> bool:
    """Whether it is a model of transformers with media among the arguments of its forward."""
    return any(_methods(module) or _is_qwen2_audio(module) for module in model.modules())


def _is_qwen2_audio(module: nn.Module) -> bool:
    return any(c.__name__ == "Qwen2AudioModel" for c in type(module).__mro__)


def _methods(module: nn.Module) -> list[tuple[str, str]]:
    """(kind, method) of the media among the arguments of forward. The methods of a wrapper, which
    take anything and pass it on, do not count."""
    given = inspect.signature(module.forward).parameters
    return [(kind, name) for kind, name in _METHODS.items()
            if hasattr(type(module), name) and _parameters(module, name)
            and _parameters(module, name)[0] in given]


def _function(module: nn.Module, method: str) -> FunctionType:
    return inspect.unwrap(getattr(type(module), method))


def _parameters(module: nn.Module, method: str) -> list[str]:
    """Names of what a method may be given, without self."""
    return [p.name for p in inspect.signature(_function(module, method)).parameters.values()
            if p.kind == p.POSITIONAL_OR_KEYWORD][1:]


def _encoder(owner: nn.Module, kind: str, method: str) -> Encoder:
    names = _parameters(owner, method)
    towers = dict(_towers(owner, method, set()))
    main = max(towers, key=lambda path: sum(p.numel() for p in towers[path].parameters()))
    layout = _layout(owner, main, method, names)
    free = [n for n in names if n not in layout.arguments and n not in HARMLESS]
    _refuse(owner, method, free, towers)
    given = inspect.signature(owner.forward).parameters
    lengths = isinstance(layout, Masked) or isinstance(layout, Rows) and layout.length
    rows = None  # one entry of the result for each item
    if lengths and _output_lengths(towers[main]):
        rows = partial(_audio_rows, main)
    elif layout.arguments == (layout.value,):  # items of one shape
        rows = EQUAL
    return Encoder(
        kind, {method: layout}, outputs=_read(owner, method), rows=rows,
        layers=("deepstack_features",), optional=("deepstack_features",),
        cost=partial(_cost, main, -2 if lengths else 1), towers=tuple(towers), named=True,
        options=tuple(n for n in free if n in given and n != "batch_num_images"),
        keywords={"return_dict": True} | {
            n: getattr(owner.config, n) for n in free
            if n not in given and hasattr(owner.config, n)},
        captures="vision_feature_layer" in names, cast=True)


def _refuse(
    owner: nn.Module, method: str, free: list[str], towers: dict[str, nn.Module]
) -> None:
    """Raises ValueError if a method needs an argument that is in no layout, or if the forward
    encodes further what it returns. free: arguments that are in no layout."""
    parameters = inspect.signature(_function(owner, method)).parameters
    unknown = [n for n in free if parameters[n].default is inspect.Parameter.empty]
    if unknown:
        raise ValueError(
            f"{type(owner).__name__}.{method} needs {unknown[0]}, and what this says of each item "
            "is not known: describe the encoder with orchmllm.Encoder (docs/encoders.md)")
    after = [n for n in _names_in(_function(owner, "forward").__code__) if n not in towers
             and _AFTER.search(n) and isinstance(getattr(owner, n, None), nn.Module)]
    if after:
        raise ValueError(
            f"the forward of {type(owner).__name__} itself applies {after[0]} to the features of "
            f"{method}: a rank without media would not call it, and the others would wait in "
            "FSDP2. Describe the encoder with orchmllm.Encoder (docs/encoders.md)")


def _layout(owner: nn.Module, main: str, method: str, names: list[str]) -> Layout:
    value, *others = names
    beside = {n.rpartition("_")[2]: n for n in others}
    if "thw" in beside:
        return Packed(value, beside["thw"], frames=True,
                      apart=owner.config.model_type in _FRAMES_APART)
    if "feature_attention_mask" in others:
        return Masked(value, "feature_attention_mask")
    if "input_features_mask" in others:
        return Rows(value, ("input_features_mask",), length="input_features_mask")
    count = _function(owner, method).__globals__.get("image_size_to_num_patches")
    if "image_sizes" in others and count is not None:
        return Tiles(value, "image_sizes", partial(_num_tiles, count))
    pixtral = "Pixtral" in "".join(c.__name__ for c in type(owner.get_submodule(main)).__mro__)
    if "image_sizes" in others and pixtral:
        return Cropped(value, "image_sizes", partial(_patch_size, main))
    if others == ["pixel_attention_mask"]:
        return Slots(value, ("pixel_attention_mask",))
    return Rows(value, tuple(n for n in others if n in _BESIDE))


def _read(owner: nn.Module, method: str) -> tuple[str, ...]:
    """The fields of the method's result that forward reads: the first one after the call, and the
    features of several layers. One that is missed is None, and forward fails."""
    code = inspect.unwrap(type(owner).forward).__code__
    names = [i.argval for i in dis.get_instructions(code) if i.opname in _LOADS]
    after = names[names.index(method):] if method in names else []
    fields = [n for n in after if n in ("pooler_output", "last_hidden_state")]
    return (fields[0] if fields else "pooler_output", "deepstack_features")


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _towers(owner: nn.Module, method: str, seen: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the submodules that a method reads, and the methods that it calls."""
    seen.add(method)
    for name in _names_in(_function(owner, method).__code__):
        if isinstance(child := getattr(owner, name, None), nn.Module):
            yield name, child
        elif name.startswith("get_") and name.endswith("_features") and name not in seen:
            yield from _towers(owner, name, seen)


def _joined(owner: nn.Module, encoders: dict[str, Encoder]) -> Iterator[Encoder]:
    """Images and video as one Encoder, where the method for video does what that for images
    does."""
    image, video = encoders.get("image"), encoders.get("video")
    if image and video and isinstance(image.layout, Packed) and isinstance(video.layout, Packed):
        first, second = (_function(owner, _METHODS[k]).__code__ for k in ("image", "video"))
        same = (first.co_code, first.co_names) == (second.co_code, second.co_names)
        if same or _METHODS["image"] in second.co_names:
            yield replace(image, name="vision", calls={**image.calls, **video.calls})
            del encoders["image"], encoders["video"]
    yield from encoders.values()


def _cost(tower: str, per_row: int, owner: nn.Module) -> CostModel:
    """The cost of an item from the configuration of its tower: FLOP of the linear layers per
    position and of attention per pair. per_row: positions of a row; below 0: rows of a position
    (a convolution with a stride)."""
    config = getattr(owner.get_submodule(tower), "config", None)
    hidden, inner, layers = (
        next((int(v) for n in names if isinstance(v := getattr(config, n, 0), int | float) and v),
             default) for names, default in _SIZES)
    linear, quadratic = 6 * layers * (4 * hidden**2 + 2 * hidden * inner), 12 * layers * hidden
    if per_row < 0:
        return CostModel(linear // -per_row, max(1, quadratic // per_row**2))
    return CostModel(linear * per_row, quadratic * per_row**2)


def _num_tiles(count: Callable[..., int], owner: nn.Module, size: list[int]) -> int:
    return count(size, owner.config.image_grid_pinpoints, owner.config.vision_config.image_size)


def _patch_size(tower: str, owner: nn.Module) -> int:
    return owner.get_submodule(tower).config.patch_size


def _output_lengths(tower: nn.Module) -> Callable[[Tensor], Any] | None:
    """Lengths of clips -> rows of features, where transformers says how many."""
    name = "_get_feat_extract_output_lengths"
    if hasattr(tower, name):
        return getattr(tower, name)
    function = inspect.unwrap(type(tower).forward).__globals__.get(name)
    return function and partial(function, n_window=tower.n_window)


def _audio_rows(tower: str, owner: nn.Module, meta: np.ndarray) -> np.ndarray:
    out = _output_lengths(owner.get_submodule(tower))(torch.tensor(meta[:, 0]))
    return (out[1] if isinstance(out, tuple) else out).numpy()


def _qwen2_audio(owner: nn.Module, features: Tensor, mask: Tensor) -> Any:
    """What the forward of Qwen2AudioModel computes between its inputs and its features."""
    from transformers.masking_utils import create_bidirectional_mask

    tower = owner.audio_tower
    lengths, _ = tower._get_feat_extract_output_lengths(mask.sum(-1))
    positions = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device)
    inside = (positions < lengths[:, None]).long()
    embeds = torch.zeros((*inside.shape, 1), dtype=owner.get_input_embeddings().weight.dtype,
                         device=features.device)
    attention = create_bidirectional_mask(
        config=tower.config, inputs_embeds=embeds, attention_mask=inside)
    states = tower(features, attention_mask=attention).last_hidden_state
    return SimpleNamespace(last_hidden_state=owner.multi_modal_projector(states))


# It has no method: its forward itself calls the tower and the projector.
_QWEN2_AUDIO = Encoder(
    "audio", {"audio_tower": Windows(
        "input_features", ("feature_attention_mask",), length="feature_attention_mask")},
    outputs=("last_hidden_state",), rows=partial(_audio_rows, "audio_tower"), padded=True,
    towers=("audio_tower",), run=_qwen2_audio, passes=("multi_modal_projector",), cast=True)
