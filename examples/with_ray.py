"""Ray Train, with a checkpoint that a new start goes on from: the loader's state beside the model.

    python examples/with_ray.py
"""

import os
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from common import TextDataset, collate, sum_loss, tiny_llm
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import DataLoader, DistributedSampler

from orchmllm import BalancedDataLoader


def train_loop(config: dict) -> None:
    """One worker. config: balance; save_at and lost_at, numbers of steps."""
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(tiny_llm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TextDataset()
    loader = BalancedDataLoader(
        DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collate),
        lengths=data.lengths, enabled=config["balance"])
    losses = []
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / f"{dist.get_rank()}.pt")
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
        losses = state["losses"]
    prepared = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False)
    for batch in prepared:
        loss = prepared.scale_sum(sum_loss(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())
        if len(losses) in (config["save_at"], len(loader)):
            save({"model": model.state_dict(), "loader": loader.state_dict(), "losses": losses})
        if len(losses) == config["lost_at"] and dist.get_rank() == 1 and not checkpoint:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has what was reported
            os._exit(1)  # as a worker whose node is gone


def save(state: dict) -> None:
    """Each worker adds a file of its own to the checkpoint, whose metrics Ray keeps."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / f"{dist.get_rank()}.pt")
        ray.train.report({"losses": state["losses"]}, checkpoint=Checkpoint.from_directory(folder))


def main(folder: str, balance: bool = True, lost_at: int = 0) -> list[float]:
    """Losses of the steps of an epoch. lost_at: step after which a worker is lost once."""
    trainer = ray.train.torch.TorchTrainer(
        train_loop, train_loop_config={"balance": balance, "save_at": 5, "lost_at": lost_at},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, name=f"{balance}{lost_at}",
                             failure_config=FailureConfig(max_failures=1)))
    return trainer.fit().metrics["losses"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        print(main(where))
