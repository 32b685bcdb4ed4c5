"""What the examples share: a data set of random sentences of uneven length and a tiny model."""

import os

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB = 64


def local_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


class TextDataset(Dataset):
    """Example i is a function of i: 8 to 71 tokens."""

    def __init__(self, size: int = 256) -> None:
        self.lengths = [8 + i * i * 37 % 64 for i in range(size)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(1, VOCAB, (self.lengths[i],), generator=generator)
        labels = torch.cat([ids[1:], torch.tensor([-100])])  # shifted here, not in the model
        return {"input_ids": ids, "labels": labels}


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-padded (B, T); a causal model needs no mask for padding on the right."""
    fill = {"input_ids": 0, "labels": -100}
    return {key: torch.nn.utils.rnn.pad_sequence(
        [e[key] for e in examples], batch_first=True, padding_value=fill[key]) for key in fill}


def tiny_llm() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)).double()


def sum_loss(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy summed over this rank's labels: the caller divides by those of all ranks."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100,
                           reduction="sum")
