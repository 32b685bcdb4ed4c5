"""A causal LM under FSDP2 with torch's DataLoader: the loop that most jobs have.

    torchrun --nproc_per_node 2 examples/fsdp_plain.py

fsdp_balanced.py is the same loop with the ranks' work balanced.
"""

import torch
import torch.distributed as dist
from common import TextDataset, collate, local_device, sum_loss, tiny_llm
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def main(num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    device = local_device()
    data, model = TextDataset(), tiny_llm().to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    losses = []
    for _, batch in zip(range(num_steps), loader, strict=False):
        batch = {k: v.to(device) for k, v in batch.items()}
        loss_sum, num_targets = sum_loss(model, batch), (batch["labels"] != -100).sum()
        dist.all_reduce(num_targets)
        loss = loss_sum * (dist.get_world_size() / num_targets)
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
