"""Accelerate: the loader is not given to `prepare`, which would shard the data a second time.

    accelerate launch --num_processes 2 examples/with_accelerate.py
"""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from common import TextDataset, collate, sum_loss, tiny_llm

from orchmllm import BalancedDataLoader

ACCUMULATION = 2


def main(balance: bool = True, num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    data = TextDataset(512)
    accelerator = Accelerator()
    model = tiny_llm()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = BalancedDataLoader(
        data, batch_size=4, shuffle=True, collate_fn=collate, lengths=data.lengths,
        accumulation_steps=ACCUMULATION, enabled=balance)
    losses, total = [], torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for batch in loader:
        batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        with nullcontext() if loader.step.is_last_microbatch else accelerator.no_sync(model):
            loss = loader.scale_sum(sum_loss(model, batch))  # over all microbatches already
            accelerator.backward(loss)
        total += loss.detach()
        if loader.step.is_last_microbatch:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(total, "mean").item())
            total = torch.zeros_like(total)
        if len(losses) == num_steps:
            break
    return losses


if __name__ == "__main__":
    print(main())
    Accelerator().end_training()
