"""Lightning's Trainer: give it the loader. It moves the batches itself, and its checkpoints hold
the loader's state. Fabric takes the loader, too: fabric.setup_dataloaders(loader).

    torchrun --nproc_per_node 2 examples/with_lightning.py
"""

import os
import tempfile

import lightning
import torch
from common import TextDataset, collate, sum_loss, tiny_llm
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from orchmllm import BalancedDataLoader


class Model(lightning.LightningModule):
    def __init__(self, balance: bool) -> None:
        super().__init__()
        self.model, self.balance, self.losses = tiny_llm(), balance, []

    def train_dataloader(self) -> BalancedDataLoader:
        """Made here, where the process group exists."""
        data = TextDataset()
        self.loader = BalancedDataLoader(data, batch_size=4, shuffle=True, collate_fn=collate,
                                         lengths=data.lengths, enabled=self.balance)
        return self.loader

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loader.scale_sum(sum_loss(self.model, batch),
                                     divided_by=self.trainer.accumulate_grad_batches)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(balance: bool = True, num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = Model(balance)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="auto" if torch.cuda.is_available() else "cpu", strategy="ddp",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]), plugins=[TorchElasticEnvironment()],
            max_steps=num_steps, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(model)
    return model.losses


if __name__ == "__main__":
    print(main())
