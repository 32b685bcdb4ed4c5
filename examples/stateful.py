"""torchdata's StatefulDataLoader, wrapped: its state is kept per rank.

    torchrun --nproc_per_node 2 examples/stateful.py
"""

import torch
import torch.distributed as dist
from common import TextDataset, collate, local_device
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from orchmllm import BalancedDataLoader


def make_loader(balance: bool) -> BalancedDataLoader:
    data = TextDataset()
    wrapped = StatefulDataLoader(data, batch_size=4, collate_fn=collate,
                                 sampler=DistributedSampler(data, shuffle=True))
    return BalancedDataLoader(wrapped, length_fn=lambda e: len(e["input_ids"]),
                              enabled=balance)


def main(balance: bool = True) -> list[float]:
    """Sums of the global batches, with a stop and a resume after the tenth."""
    loader, sums, device = make_loader(balance), [], local_device()
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        sums.append(batch["input_ids"].sum())
        if len(sums) == 10:
            break
    state = loader.state_dict()  # e.g. torch.save of one file per rank
    loader = make_loader(balance)
    loader.load_state_dict(state)
    sums += [batch["input_ids"].to(device).sum() for batch in loader]
    total = torch.stack(sums)
    dist.all_reduce(total)
    return total.tolist()


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
