"""FSDP1 (FullyShardedDataParallel): torchrun --nproc_per_node 2 examples/fsdp1.py"""

import torch
import torch.distributed as dist
from common import TextDataset, collate, local_device, sum_loss, tiny_llm
from torch.distributed.fsdp import FullyShardedDataParallel

from orchmllm import BalancedDataLoader


def main(balance: bool = True, num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    data = TextDataset()
    device = local_device()
    model = FullyShardedDataParallel(tiny_llm(), device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = BalancedDataLoader(data, batch_size=4, shuffle=True, collate_fn=collate,
                                lengths=data.lengths, enabled=balance)
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
    print(main())
    dist.destroy_process_group()
