"""Qwen2-VL from transformers under FSDP2, both of its phases balanced, with no change to the
model's code: the loader places whole examples for the LLM, and `balance_encoders` moves single
images between the ranks inside the forward.

    torchrun --nproc_per_node 2 examples/qwen2_vl.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import local_device
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from orchmllm import BalancedDataLoader, CostModel, balance_encoders

PATCH, MERGE, TEMPORAL = 4, 2, 2
ROW = 3 * TEMPORAL * PATCH**2
VISION_START, IMAGE, VOCAB = 60, 61, 64


def tiny_model() -> Qwen2VLForConditionalGeneration:
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config=dict(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                             "mrope_section": [1, 1, 2]}),
        vision_config=dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, patch_size=PATCH,
                           spatial_merge_size=MERGE, temporal_patch_size=TEMPORAL),
        image_token_id=IMAGE, vision_start_token_id=VISION_START, vision_end_token_id=62,
        video_token_id=63, tie_word_embeddings=False)).double()


class Pictures(Dataset):
    """Example i: 0 to 3 images of 4 to 64 patches between pieces of text."""

    def __init__(self, size: int = 256) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict:
        g = torch.Generator().manual_seed(i)
        ids = [torch.randint(1, 50, (4,), generator=g)]
        rows, grids = [torch.zeros(0, ROW, dtype=torch.float64)], []
        for _ in range(int(torch.randint(0, 4, (1,), generator=g))):
            h, w = (MERGE * torch.randint(1, 5, (2,), generator=g)).tolist()
            rows.append(torch.randn(h * w, ROW, generator=g, dtype=torch.float64))
            grids.append([1, h, w])
            ids += [torch.tensor([VISION_START]), torch.full((h * w // MERGE**2,), IMAGE),
                    torch.randint(1, 50, (int(torch.randint(2, 24, (1,), generator=g)),),
                                  generator=g)]
        return {"input_ids": torch.cat(ids), "pixel_values": torch.cat(rows), "grids": grids}


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    """As for any loop: padded text, and the images, if there are any."""
    ids = torch.nn.utils.rnn.pad_sequence(
        [e["input_ids"] for e in examples], batch_first=True, padding_value=0)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    labels = labels.masked_fill((labels == 0) | (labels == IMAGE), -100)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long(),
             "mm_token_type_ids": (ids == IMAGE).int()}
    grids = [g for e in examples for g in e["grids"]]
    if grids:
        batch["pixel_values"] = torch.cat([e["pixel_values"] for e in examples])
        batch["image_grid_thw"] = torch.tensor(grids)
    return batch


def sum_loss(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy summed over this rank's labels."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100,
                           reduction="sum")


def main(balance: bool = True, num_steps: int = 20) -> dict:
    torch.manual_seed(0)
    device = local_device()
    model = tiny_model().to(device)
    for unit in (*model.model.visual.blocks, *model.model.language_model.layers,
                 model.model.visual):
        fully_shard(unit)
    fully_shard(model)
    encoders = balance_encoders(model, shadow=not balance)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = BalancedDataLoader(
        Pictures(), batch_size=12, shuffle=True, collate_fn=collate,
        length_fn=lambda e: len(e["input_ids"]),
        phases=CostModel(linear=100_000, quadratic=400), enabled=balance)
    losses, seen = [], []
    while len(losses) < num_steps:
        for batch in loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            loss = loader.scale_sum(sum_loss(model, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
            seen.append({"vision": encoders.last["vision"].imbalance,
                         "llm": loader.step.imbalance})
            if len(losses) == num_steps:
                break
    mean = {phase: tuple(sum(s[phase][i] for s in seen) / len(seen) for i in range(2))
            for phase in ("vision", "llm")}
    return {"losses": losses, "imbalance": mean}


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
