"""The generator of a composed model: a diffusion transformer of diffusers, which makes images from
the states of the LLM. It learns by flow matching, and all images of a rank are one packed row, each
with a time and a condition of its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.batch import SequenceLengths, on_device
from orchmllm.composition.codec import Codec
from orchmllm.models.attention import packed_attention

EXACT = 1e-5  # diffusers rotates in float32
WAVES = 2.0 ** np.arange(4)  # half periods over a side of an image, which tell a row its place
TIMES = 1000  # transformers of diffusers count from 0 to 1000 what flows from 0 to 1
TAKES = ("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask",
         "video_coords")  # what a transformer for packed rows is told


class Generator(nn.Module):
    """config: see ComposedConfig.generator_config; width: of the LLM's states. Raises ValueError
    for a transformer that cannot be told the time and the place of each row of a packed one."""

    def __init__(self, config: Mapping[str, Any], width: int) -> None:
        super().__init__()
        self._kind, self._settings = transformer_class(config), dict(config["transformer"])
        self.transformer = self._kind.from_config(self._settings)
        self.norm = nn.LayerNorm(width)
        self.connector = nn.Linear(width, self.transformer.config.caption_channels)
        # The transformer sees how far rows are from each other, and not where the image ends.
        entrance = self.transformer.proj_in
        self.place = nn.Linear(4 * len(WAVES), entrance.out_features, bias=False)
        entrance.register_forward_hook(self._placed)
        self.codec = Codec(config["side"])
        self.dropout = config["condition_dropout"]
        self.attention = PackedAttention()
        self.transformer.set_attn_processor(self.attention)

    def _placed(self, _: nn.Module, given: tuple, rows: Tensor) -> Tensor:
        return rows + self.place(self.waves)

    def load_codec(self, folder: Path | None, device: torch.device, dtype: torch.dtype) -> None:
        """That of the model's folder. Raises ValueError where it does not fit."""
        self.codec = Codec.of(folder, self.codec.side, device, dtype)
        if self.codec.channels != self.transformer.config.in_channels:
            raise ValueError(f"{folder}: a row of an image has {self.codec.channels} numbers, and "
                             f"the generator takes {self.transformer.config.in_channels} "
                             "(in_channels): give it another side, or another VAE")

    @torch.no_grad()
    def compared(self) -> float:
        """The largest difference between images in one row and what diffusers makes of each alone,
        as a share of the largest number: of one block, in float64. Raises ValueError where
        rounding does not explain it."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            alone = self._kind.from_config(self._settings | {"num_layers": 1}).double()
            packed, settings = copy.deepcopy(alone), alone.config
            attention = PackedAttention()
            packed.set_attn_processor(attention)
            grids, lengths = np.array([[1, 2, 3], [1, 1, 2]]), [4, 7]
            rows = torch.randn(8, settings.in_channels).double()
            states = torch.randn(11, settings.caption_channels).double()
        times = torch.tensor([100.0, 700.0]).repeat_interleave(torch.tensor([6, 2]))
        coordinates = places(grids, self.codec.side)

        def flow(model: nn.Module, own: slice, of: slice) -> Tensor:
            return model(hidden_states=rows[None, own], encoder_hidden_states=states[None, of],
                         timestep=times[None, own], encoder_attention_mask=None,
                         video_coords=coordinates[None, :, own], return_dict=False)[0][0]

        attention.items = SequenceLengths.from_lengths(grids.prod(1))
        attention.conditions = SequenceLengths.from_lengths(lengths)
        found = flow(packed, slice(0, 8), slice(0, 11))
        wanted = torch.cat([flow(alone, slice(0, 6), slice(0, 4)),
                            flow(alone, slice(6, 8), slice(4, 11))])
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        if not difference <= EXACT:
            raise ValueError(f"{self._kind.__name__} makes something else of images in one row "
                             f"than of each alone, by {difference:.1e}")
        return difference

    def forward(self, squares: Tensor, states: Tensor, grids: np.ndarray, conditions:
                SequenceLengths, keys: Sequence[int], weights: Tensor) -> Tensor:
        """Sum over the rows of all images of the squared error of the flow, the mean over a row's
        numbers; a scalar in max(float32, the states' dtype). squares: (R, 3 * side**2) uint8; grids
        (n, 3): rows and columns of squares are the last two; states (S, width) of the LLM, of which
        each image has its `conditions`. keys: all that is drawn for an image follows from its own,
        on whichever rank it is. weights: (n,) of each image."""
        wide = torch.promote_types(torch.float32, states.dtype)  # of times and of what is learnt
        latents = self.codec.encoded(squares, grids, wide)
        lengths = grids.prod(1).tolist()
        drawn = [draw(key, n, latents, self.dropout) for key, n in zip(keys, lengths, strict=True)]
        times, noise, kept = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        of_row = on_device(np.repeat(np.arange(len(lengths)), lengths), latents.device)
        time = times[of_row, None]
        states = states * torch.cat([k.expand(n) for k, n in zip(
            kept.to(states.dtype), conditions.lengths, strict=True)])[:, None]
        flow = self.flow(latents + time * (noise - latents), times[of_row], states, grids,
                         conditions)
        errors = (flow - (noise - latents)).square().mean(1)
        return (errors * weights.to(wide)[of_row]).sum()

    def flow(self, rows: Tensor, times: Tensor, states: Tensor, grids: np.ndarray,
             conditions: SequenceLengths) -> Tensor:
        """(R, channels) in the dtype of rows: where these (R, channels) at times (R,), from 0 (an
        image) to 1 (noise), come from. It is computed in the dtype of states. Others: see
        forward."""
        self.attention.items = SequenceLengths.from_lengths(grids.prod(1), rows.device)
        self.attention.conditions = conditions
        self.waves = on_device(waves(grids), rows.device).to(states.dtype)
        states = self.connector(self.norm(states))
        return self.transformer(
            hidden_states=rows[None].to(states.dtype), encoder_hidden_states=states[None],
            timestep=TIMES * times[None], encoder_attention_mask=None,
            video_coords=on_device(places(grids, self.codec.side), rows.device)[None],
            return_dict=False)[0][0].to(rows.dtype)

    @torch.no_grad()
    def made(self, states: Tensor, grid: tuple[int, int], steps: int, key: int,
             guidance: float = 1.0) -> Tensor:
        """(h * w, channels) of one image, in `steps` steps of Euler's method. states: (S, width).
        guidance: how much further than without its condition the flow goes; 1: no further."""
        grids, conditions = np.array([[1, *grid]]), SequenceLengths.from_lengths(
            [len(states)], states.device)
        like = states.new_empty(0, self.codec.channels, dtype=torch.promote_types(
            torch.float32, states.dtype))
        _, x, _ = draw(key, grids.prod(), like, 0.0)
        ends = torch.linspace(1, 0, steps + 1, device=x.device, dtype=x.dtype)
        for now, then in zip(ends, ends[1:], strict=False):
            time = now.expand(len(x))
            flow = self.flow(x, time, states, grids, conditions)
            if guidance != 1:
                bare = self.flow(x, time, torch.zeros_like(states), grids, conditions)
                flow = bare + guidance * (flow - bare)
            x = x + (then - now) * flow
        return x


def draw(key: int, rows: int, like: Tensor, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """(The time (1,), the noise (rows, channels), whether the condition is kept (1,)) of an image,
    on the device and in the dtype of `like` (..., channels): numbers that follow from its key
    alone."""
    generator = torch.Generator(like.device).manual_seed(key)
    options = {"generator": generator, "device": like.device}
    time = torch.randn(1, **options).sigmoid()
    kept = torch.rand(1, **options) >= dropout
    noise = torch.randn(rows, like.shape[-1], **options)
    return time.to(like), noise.to(like), kept.to(like)


def waves(grids: np.ndarray) -> Tensor:
    """(R, 4 * WAVES) float64: sines and cosines of where each row is in its image, from the top and
    from the left, as a share of its sides."""
    found = []
    for _, h, w in grids.tolist():
        at = (np.indices((h, w)).reshape(2, -1, 1) + 0.5) / [[[h]], [[w]]] * np.pi * WAVES
        found.append(np.concatenate([*np.sin(at), *np.cos(at)], 1))
    return torch.from_numpy(np.concatenate(found))


def places(grids: np.ndarray, side: int) -> Tensor:
    """(3, R) float32: frame, and pixels from the top and from the left, of each row."""
    found = [np.indices(grid).reshape(3, -1) for grid in grids.tolist()]
    return torch.from_numpy(np.concatenate(found, 1) * np.array([[1], [side], [side]])).float()


def transformer_class(config: Mapping[str, Any]) -> type[nn.Module]:
    """Of diffusers. Raises ValueError where there is none, or it takes no packed rows."""
    try:
        import diffusers
    except ImportError as error:
        raise ValueError("the model makes images, for which diffusers is needed: "
                         "pip install 'orchmllm[generator]'") from error
    name = config["transformer"].get("_class_name", "")
    kind = getattr(diffusers, name, None)
    takes = inspect.signature(inspect.unwrap(kind.forward)).parameters if kind else ()
    missing = [argument for argument in TAKES if argument not in takes]
    if missing:
        raise ValueError(f"{name or 'a model'} of diffusers does not take {missing[0]}, so images "
                         "of several sizes cannot be one row: choose a transformer of the kind of "
                         "LTXVideoTransformer3DModel")
    return kind


class PackedAttention:
    """Attention of the transformer's blocks: of each image to itself, and to its condition.
    diffusers calls it with the module that has the weights."""

    items: SequenceLengths
    conditions: SequenceLengths
    _counted: Callable | None = None

    @contextmanager
    def by(self, attention: Callable) -> Iterator[None]:
        """Within it an attention function of transformers computes that of one image."""
        self._counted = attention
        try:
            yield
        finally:
            self._counted = None

    def __call__(
        self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """hidden_states: (1, R, D); encoder_hidden_states: (1, S, D'). Returns (1, R, D)."""
        itself = encoder_hidden_states is None
        seen = hidden_states if itself else encoder_hidden_states
        query = attn.norm_q(attn.to_q(hidden_states))
        key, value = attn.norm_k(attn.to_k(seen)), attn.to_v(seen)
        if image_rotary_emb is not None:
            query, key = (rotated(x, *image_rotary_emb) for x in (query, key))
        q, k, v = (x[0].unflatten(1, (attn.heads, -1)) for x in (query, key, value))
        if self._counted is not None:
            out = self._counted(attn, *(x.transpose(0, 1)[None] for x in (q, k, v)), None)[0][0]
        else:
            out = packed_attention(q, k, v, self.items, causal=False,
                                   keys=None if itself else self.conditions)
        return nn.Sequential.forward(attn.to_out, out.flatten(1)[None])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (1, R, D) turned by angles of which cos and sin are (1, R, D), as diffusers does it, in x's
    precision where that is higher than float32."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    real, imaginary = wide.unflatten(2, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], -1).flatten(2)
    return (wide * cos + turned * sin).to(x.dtype)
