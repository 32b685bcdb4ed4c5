"""Media and tokens for a tiny model of any class of transformers whose encoders are inferred: the
shapes of the media are tried until the model's own method takes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from orchmllm import Encoder
from orchmllm.encoders.items import Cropped, Layout, Masked, Packed, Slots, Tiles
from tests.lib.tiny_models import FIRST_ID

_TYPES = {"image": 1, "video": 2, "audio": 3}


def _noise(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def _first(configs: list[Any], *names: str, default: Any) -> Any:
    return next((v for c in configs for n in names if isinstance(v := getattr(c, n, None), int)),
                default)


def _candidates(
    owner: nn.Module, kind: str, layout: Layout, sizes: list[int], g: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Arguments that hold items of these sizes, in the shapes that models of transformers take."""
    config = owner.config
    part = getattr(config, "audio_config" if kind == "audio" else "vision_config", None)
    configs = [c for c in (part, config) if c is not None]
    n, names = len(sizes), layout.arguments
    if kind == "audio":
        yield from _audio(configs, layout, sizes, g)
        return
    p = _first(configs, "patch_size", default=4)
    side = _first(configs, "image_size", default=4 * p)
    if isinstance(layout, Packed):
        frames = [1 + (s % 2 == 0) if kind == "video" else 1 for s in sizes]
        grid = torch.tensor([[t, 4, 4 + 4 * (s % 2)] for t, s in zip(frames, sizes, strict=True)])
        rows = int(grid.prod(1).sum())
        for t in (_first(configs, "temporal_patch_size", "patch_temporal", default=1), 1, 2):
            for shape in ((3 * t * p * p,), (3, p, p), (3, t, p, p), (t, 3, p, p), (t, p, p, 3),
                          (2 * p, 2 * p, 3)):
                yield {names[0]: _noise(g, rows, *shape), names[1]: grid}
    elif isinstance(layout, Slots):
        # The last slot is empty: the batch's longest example has one image more.
        pixels = torch.cat([_noise(g, 1, n, 3, side, side), torch.zeros(
            1, 1, 3, side, side, dtype=torch.float64)], 1)
        mask = torch.ones(1, n + 1, side, side, dtype=torch.bool)
        yield {names[0]: pixels, names[1]: mask}
    elif isinstance(layout, Tiles):
        shapes = [[12 + 5 * (s % 4), 12 + 7 * (s // 2 % 3)] for s in sizes]
        counts = [layout.count(owner, s) for s in shapes]
        pixels = torch.zeros(n, max(counts), 3, side, side, dtype=torch.float64)
        for out, k in zip(pixels, counts, strict=True):
            out[:k] = _noise(g, k, 3, side, side)
        yield {names[0]: pixels, names[1]: torch.tensor(shapes)}
    elif isinstance(layout, Cropped):
        shapes = torch.tensor([[16, 16 if s % 2 else 8] for s in sizes])
        pixels = _noise(g, n, 3, 16, 16)
        for image, (h, w) in zip(pixels, shapes.tolist(), strict=True):
            image[:, h:], image[:, :, w:] = 0, 0
        yield {names[0]: pixels, names[1]: shapes}
    else:
        yield from _rows(names, kind, n, p, side, g)


def _rows(
    names: tuple[str, ...], kind: str, n: int, p: int, side: int, g: torch.Generator
) -> Iterator[dict[str, Any]]:
    across = torch.arange(4)
    places = torch.stack(torch.meshgrid(across, across, indexing="xy"), -1).reshape(-1, 2)
    beside = {"image_position_ids": places.expand(n, -1, -1),
              "pixel_attention_mask": torch.ones(n, 2, dtype=torch.bool),
              "pixel_mask": torch.ones(n, side, side, dtype=torch.bool),
              "qformer_input_ids": torch.randint(3, 90, (n, 4), generator=g),
              "qformer_attention_mask": torch.ones(n, 4, dtype=torch.int64)}
    more = {name: beside[name] for name in names[1:] if name in beside}
    several = kind == "video" or "pixel_attention_mask" in more
    shapes = ([(2, 3, side, side)] if several else []) + [
        (3, side, side), (16, 3 * p * p), (16, 12 * p * p), (16, 27 * p * p), (1, 3, side, side),
        (2, p, p, 3)]
    for shape in shapes:
        yield {names[0]: _noise(g, n, *shape), **more}


def _audio(
    configs: list[Any], layout: Layout, sizes: list[int], g: torch.Generator
) -> Iterator[dict[str, Any]]:
    mels = _first(configs, "num_mel_bins", "n_mel_bins", "input_feat_size", "input_dim",
                  "feature_size", default=8) * _first(configs, "num_stacked_frames", default=1)
    most = 2 * _first(configs, "max_source_positions", default=16)
    for longest in (most, 2 * most, 200, 8 * most):
        lengths = torch.tensor([longest - 4 * (s % 3) for s in sizes])
        mask = torch.arange(longest) < lengths[:, None]
        value = _noise(g, len(sizes), mels, longest) * mask[:, None]
        masks = {name: mask.long() for name in layout.arguments[1:]}
        if isinstance(layout, Masked):
            masks = {layout.mask: mask.long()}
        yield {layout.value: value, **masks}
        yield {layout.value: value.transpose(1, 2).contiguous(),
               **{k: v.bool() for k, v in masks.items()}}


def _tokens(encoder: Encoder, owner: nn.Module, call: str, media: dict[str, Any]) -> int:
    """Tokens that these items become, as the model itself says."""
    if encoder.run:  # of Qwen2AudioModel, whose forward keeps what is inside the mask
        lengths = media["feature_attention_mask"].sum(-1)
        return int(owner.audio_tower._get_feat_extract_output_lengths(lengths)[1].sum())
    out = getattr(owner, call)(**media, **encoder.keywords)
    value = getattr(out, encoder.outputs[0])
    if value is None:  # (layer, list of images) for each layer that features are added to
        value = out.deepstack_features[0][1]
    values = [value] if isinstance(value, Tensor) else value
    return sum(v[..., 0].numel() for v in values)


@torch.no_grad()
def media_of(
    owner: nn.Module, encoders: tuple[Encoder, ...], seed: int, sizes: list[int]
) -> dict[str, tuple[dict[str, Any], list[int]]]:
    """kind -> (arguments that hold items of these sizes, tokens of each item), of the kinds whose
    shapes were found. Raises NotImplementedError if there are none."""
    found, problems = {}, []
    for encoder in encoders:
        for call, layout in encoder.calls.items():
            kind = "audio" if encoder.run else call.split("_")[1]
            for attempt in range(20):
                g = torch.Generator().manual_seed(seed)
                made = next((m for i, m in enumerate(_candidates(owner, kind, layout, sizes, g))
                             if i == attempt), None)
                if made is None:
                    break
                try:
                    counts = [_tokens(encoder, owner, call, dict(zip(
                        layout.arguments, layout.part(made, layout.describe(owner, made).meta,
                                                      slice(i, i + 1)), strict=True)))
                        for i in range(len(sizes))]
                    if sum(counts) == _tokens(encoder, owner, call, made):
                        found[kind] = made, counts
                        break
                except Exception as error:  # the next shape is tried
                    problems.append(f"{kind}: {type(error).__name__}: {error}")
    if not found:
        raise NotImplementedError(" / ".join(dict.fromkeys(problems)))
    return found


def _token_id(config: Any, kind: str) -> int:
    text = config.get_text_config()
    for part in (config, text):
        for name in (f"{kind}_token_id", f"{kind}_token_index", "image_token_id",
                     "image_token_index"):
            if isinstance(value := getattr(part, name, None), int):
                return value
    raise ValueError(f"{type(config).__name__} names no token of {kind}")


def _of_a_robot(
    model: nn.Module, media: dict[str, tuple[dict[str, Any], list[int]]], g: torch.Generator
) -> dict[str, Any]:
    """Arguments of PI0: one example with a camera for each image."""
    config = model.config
    arguments, counts = media["image"]
    ids = torch.full((1, sum(counts) + 4), config.vlm_config.image_token_id)
    ids[:, -4:] = torch.randint(3, 90, (1, 4), generator=g)
    actions = (1, config.chunk_size, config.max_action_dim)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids),
            "pixel_values": arguments["pixel_values"][None],
            "pixel_attention_mask": torch.ones(1, len(counts), dtype=torch.bool),
            "state": _noise(g, 1, config.max_state_dim), "actions": _noise(g, *actions),
            "noise": _noise(g, *actions), "timestep": torch.full((1,), 0.5, dtype=torch.float64)}


def batch(
    model: nn.Module, media: dict[str, tuple[dict[str, Any], list[int]]], seed: int
) -> dict[str, Any]:
    """Arguments of forward for one sequence with these media between pieces of text."""
    g = torch.Generator().manual_seed(seed)
    kind = model.config.model_type
    if media and kind == "pi0":
        return _of_a_robot(model, media, g)
    if media and kind == "voxtral_realtime":  # each clip is as long as the text that it is added to
        arguments, counts = media["audio"]
        ids = torch.randint(3, 90, (len(counts), counts[0]), generator=g)
        return {"input_ids": ids, "labels": ids, **arguments}
    accepted = inspect.signature(model.forward).parameters

    def text(n: int) -> Tensor:
        return torch.randint(3, 90, (n,), generator=g)

    ids, types, inputs = [text(6)], [torch.zeros(6)], {}
    start = getattr(model.config, "vision_start_token_id", None)
    for kind, (arguments, counts) in media.items():
        inputs |= arguments
        for n in counts:
            frames = 1
            ids += [torch.tensor([start if start is not None else 5]),
                    torch.full((n // frames,), _token_id(model.config, kind)), text(3)]
            types += [torch.zeros(1), torch.full((n,), _TYPES[kind]), torch.zeros(3)]
    row = torch.cat(ids)[None]
    kinds = torch.cat(types)[None].int()
    out = {"input_ids": row, "attention_mask": torch.ones_like(row),
           "labels": row.masked_fill(row >= FIRST_ID, -100), **inputs}
    owner_takes = {p for m in model.modules() if hasattr(m, "get_input_embeddings")
                   for p in inspect.signature(m.forward).parameters}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted or name in owner_takes and name == "mm_token_type_ids":
            out[name] = kinds
    return out
