"""Accelerate: `prepare` returns the loader as it is, and save_state and load_state keep its place.
The loop moves the batches to the device itself.

    torchrun --nproc_per_node 2 examples/with_accelerate.py    # or accelerate launch, on GPUs
"""

import torch
from accelerate import Accelerator
from common import TextDataset, collate, sum_loss, tiny_llm

from orchmllm import BalancedDataLoader

ACCUMULATION = 2


def main(balance: bool = True, num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    data = TextDataset(512)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    model = tiny_llm()
    loader = BalancedDataLoader(
        data, batch_size=4, shuffle=True, collate_fn=collate, lengths=data.lengths,
        accumulation_steps=ACCUMULATION, enabled=balance)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    losses, total = [], torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for batch in loader:
        batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        with accelerator.accumulate(model):
            # Over all microbatches already: what backward divides by is undone.
            loss = loader.scale_sum(sum_loss(model, batch),
                                    divided_by=accelerator.gradient_accumulation_steps)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / ACCUMULATION
        if loader.step.is_last_microbatch:
            losses.append(accelerator.reduce(total, "mean").item())
            total = torch.zeros_like(total)
        if len(losses) == num_steps:
            break
    return losses


if __name__ == "__main__":
    print(main())
    Accelerator().end_training()
