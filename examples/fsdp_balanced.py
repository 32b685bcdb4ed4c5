"""The loop of fsdp_plain.py with the ranks' work balanced: the same losses, less waiting.

    torchrun --nproc_per_node 2 examples/fsdp_balanced.py
"""

import torch
import torch.distributed as dist
from common import TextDataset, collate, local_device, sum_loss, tiny_llm
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

from orchmllm import BalancedDataLoader


def main(num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    device = local_device()
    data, model = TextDataset(), tiny_llm().to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data, shuffle=True)
    loader = BalancedDataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate,
                                lengths=data.lengths)
    losses = []
    for _, batch in zip(range(num_steps), loader, strict=False):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss = loader.scale_sum(sum_loss(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    losses = main()
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()
