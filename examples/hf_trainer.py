"""Hugging Face Trainer: one call. Its sampler, its collator, its checkpoints and its loss stay.

    torchrun --nproc_per_node 2 examples/hf_trainer.py
"""

import tempfile

import torch
from common import TextDataset, collate, tiny_llm
from transformers import Trainer, TrainingArguments

from orchmllm import balance_trainer


def unshifted(examples: list[dict]) -> dict[str, torch.Tensor]:
    """Hugging Face models shift the labels themselves."""
    batch = collate(examples)
    labels = torch.cat([torch.full_like(batch["labels"][:, :1], -100), batch["labels"][:, :-1]], 1)
    return {"input_ids": batch["input_ids"], "labels": labels}


def main(balance: bool = True, num_steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    data = TextDataset()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=tiny_llm(), train_dataset=data, data_collator=unshifted,
            args=TrainingArguments(
                folder, max_steps=num_steps, per_device_train_batch_size=4, logging_steps=1,
                learning_rate=1e-3, use_cpu=not torch.cuda.is_available(), report_to=[],
                save_strategy="no", disable_tqdm=True, average_tokens_across_devices=True))
        if balance:
            balance_trainer(trainer, lengths=data.lengths)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    print(main())
