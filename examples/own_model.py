"""The encoders of a model of one's own, balanced without a change to its code: photos and audio
clips, each with an encoder of its own, under FSDP2.

    torchrun --nproc_per_node 2 examples/own_model.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import local_device
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from orchmllm import CostModel, Encoder, Packed, Rows, balance_encoders

DIM, VOCAB, PHOTO, CLIP = 32, 64, 62, 63


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)


class PhotoTower(nn.Module):
    """(n, 3, 16, 16) -> (n, 4, DIM): a photo becomes 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = nn.Conv2d(3, DIM, 8, 8), block()

    def forward(self, photos: Tensor) -> Tensor:
        return self.block(self.patches(photos).flatten(2).transpose(1, 2))


class ClipTower(nn.Module):
    """Frames of all clips, one after the other (R, 8), and frames per clip (n,) -> a tuple of
    (n, DIM), one token per clip, and a statistic that the model does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(8, DIM), block()

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        clips = self.embed(frames).split(lengths.tolist())
        pooled = torch.stack([self.block(clip[None])[0].mean(0) for clip in clips])
        return pooled, pooled.detach().norm()


class TwoTowers(nn.Module):
    """Its own model: the features replace the tokens that stand for them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.photo_tower, self.clip_tower = PhotoTower(), ClipTower()
        self.layers = nn.ModuleList([block() for _ in range(2)])

    def forward(self, ids: Tensor, photos: Tensor | None = None, clips: Tensor | None = None,
                clip_lengths: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if photos is not None:
            x = x.masked_scatter((ids == PHOTO)[..., None], self.photo_tower(photos))
        if clips is not None:
            x = x.masked_scatter((ids == CLIP)[..., None], self.clip_tower(clips, clip_lengths)[0])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def balanced(model: TwoTowers, **options):
    return balance_encoders(model, [
        Encoder("photo", {"photo_tower": Rows("photos")}),
        Encoder("clip", {"clip_tower": Packed("clips", "clip_lengths")}, outputs=(0,),
                cost=CostModel(linear=40_000, quadratic=400)),
    ], join="embed", **options)


def inputs_of(rank: int, step: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """One sequence a rank: rank 0 holds most of the media, some ranks hold none."""
    g = torch.Generator().manual_seed(97 * step + rank)
    num_photos, num_clips = (4, 3) if rank == 0 else (step % 2, (step + rank) % 3)
    ids = [torch.randint(1, 60, (12,), generator=g), torch.full((4 * num_photos,), PHOTO),
           torch.full((num_clips,), CLIP), torch.randint(1, 60, (8,), generator=g)]
    out = {"ids": torch.cat(ids)[None]}
    if num_photos:
        out["photos"] = torch.randn(num_photos, 3, 16, 16, generator=g, dtype=torch.float64)
    if num_clips:
        lengths = torch.randint(2, 30, (num_clips,), generator=g)
        out["clips"] = torch.randn(int(lengths.sum()), 8, generator=g, dtype=torch.float64)
        out["clip_lengths"] = lengths
    return {name: value.to(device) for name, value in out.items()}


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(**inputs)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), inputs["ids"][0, 1:] % 60)


def main(num_steps: int = 20) -> dict:
    torch.manual_seed(0)
    device = local_device()
    model = TwoTowers().double().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    handle = balanced(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, imbalance = [], []
    for step in range(num_steps):
        loss = loss_of(model, inputs_of(dist.get_rank(), step, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        imbalance.append({name: s.imbalance for name, s in handle.last.items()})
    return {"losses": losses, "imbalance": imbalance}


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
