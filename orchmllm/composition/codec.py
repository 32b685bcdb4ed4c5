"""Images as the generator of a composed model makes them: squares of pixels, or what a VAE of
diffusers makes of these. A VAE is frozen and is no part of the model: it has no gradients, is whole
on every rank, and stays in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.hf.folder import VAE


class Codec:
    """side: pixels of the side of a square, which is a row of the generator. vae: an AutoencoderKL
    of diffusers; None: a row is the colours of its pixels, from -1 to 1."""

    def __init__(self, side: int, vae: Any = None) -> None:
        self.side, self.vae = side, vae

    @classmethod
    def of(cls, folder: Path | None, side: int, device: torch.device, dtype: torch.dtype) -> Codec:
        """That of a model's folder. Raises ValueError for a VAE that does not fit."""
        if folder is None or not (folder / VAE).is_dir():
            return cls(side)
        from diffusers import AutoencoderKL

        vae = AutoencoderKL.from_pretrained(folder / VAE, torch_dtype=dtype).to(device).eval()
        codec = cls(side, vae.requires_grad_(False))
        if side % codec.shrinks:
            raise ValueError(f"{folder / VAE}: it makes one latent of {codec.shrinks} pixels, of "
                             f"which generator_config's side {side} is no multiple")
        return codec

    @property
    def shrinks(self) -> int:
        """Pixels of a side that become one latent."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def channels(self) -> int:
        """Numbers of a row."""
        if self.vae is None:
            return 3 * self.side**2
        return self.vae.config.latent_channels * (self.side // self.shrinks)**2

    @torch.no_grad()
    def encoded(self, squares: Tensor, grids: np.ndarray, dtype: torch.dtype) -> Tensor:
        """(R, channels) in dtype of squares (R, 3 * side**2) uint8, those of one image after the
        other. grids: (n, 3), rows and columns of squares of an image are the last two. A latent is
        the mode of its distribution: nothing is drawn."""
        pixels = squares.to(dtype) / 127.5 - 1
        if self.vae is None:
            return pixels
        settings, out = self.vae.config, []
        for image, (_, h, w) in zip(pixels.split(grids.prod(1).tolist()), grids.tolist(),
                                    strict=True):
            latents = self.vae.encode(_whole(image, h, w, self.side)[None].to(
                self.vae.dtype)).latent_dist.mode()[0].to(dtype)
            out.append(_squares((latents - (settings.shift_factor or 0.0))
                                * settings.scaling_factor, h, w))
        return torch.cat(out)

    @torch.no_grad()
    def decoded(self, rows: Tensor, grid: tuple[int, int]) -> np.ndarray:
        """(H, W, 3) uint8 of an image's rows (h * w, channels). grid: (h, w)."""
        if self.vae is None:
            image = _whole(rows, *grid, self.side)
        else:
            settings = self.vae.config
            latents = _whole(rows, *grid, self.side // self.shrinks) / settings.scaling_factor
            image = self.vae.decode((latents + (settings.shift_factor or 0.0))[None].to(
                self.vae.dtype)).sample[0]
        pixels = ((image.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return pixels.permute(1, 2, 0).cpu().numpy()


def _whole(rows: Tensor, h: int, w: int, side: int) -> Tensor:
    """(C, h * side, w * side) of rows (h * w, side * side * C)."""
    return rows.reshape(h, w, side, side, -1).permute(4, 0, 2, 1, 3).reshape(
        -1, h * side, w * side)


def _squares(image: Tensor, h: int, w: int) -> Tensor:
    """The inverse of _whole."""
    channels, side = image.shape[0], image.shape[1] // h
    return image.reshape(channels, h, side, w, side).permute(1, 3, 2, 4, 0).reshape(h * w, -1)
