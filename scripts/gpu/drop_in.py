"""The drop-in around a model of transformers: Qwen2-VL with random weights under FSDP2, one rank,
with BalancedDataLoader and balance_encoders and without.

    python -m scripts.gpu.drop_in --result FILE [--tiny]

One rank moves nothing: what is tried is that loader, encoders and their copies work on the device
and change no loss, and what they cost. Exit code 1 if a loss differs by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from scripts.gpu.drawn import one_rank
from scripts.gpu.setup import ROOT

sys.path.append(str(ROOT / "examples"))

import qwen2_vl as example  # noqa: E402

from orchmllm import BalancedDataLoader, CostModel, balance_encoders  # noqa: E402
from orchmllm.launch import process_group  # noqa: E402

STEPS, WARM_UP, SEED = 8, 3, 0
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of a loss


def model_of(tiny: bool) -> Qwen2VLForConditionalGeneration:
    """Of about 0.3 billion parameters, or of a hundred thousand, in float32."""
    width, layers = (64, 2) if tiny else (1024, 12)
    torch.manual_seed(SEED)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(
        text_config=dict(
            vocab_size=example.VOCAB, hidden_size=width, intermediate_size=4 * width,
            num_hidden_layers=layers, num_attention_heads=8 if not tiny else 4,
            num_key_value_heads=2, bos_token_id=0, eos_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                             "mrope_section": [16, 24, 24] if not tiny else [2, 3, 3]}),
        vision_config=dict(depth=layers, embed_dim=width, hidden_size=width, num_heads=4,
                           patch_size=example.PATCH, spatial_merge_size=example.MERGE,
                           temporal_patch_size=example.TEMPORAL),
        image_token_id=example.IMAGE, vision_start_token_id=example.VISION_START,
        vision_end_token_id=62, video_token_id=63, tie_word_embeddings=False))


def run(loader: Iterable, device: torch.device, dtype: torch.dtype, tiny: bool, balanced: bool
        ) -> tuple[list[float], float, int]:
    """(loss of each step, median seconds of a step, parameters) of a loop with AdamW."""
    model = model_of(tiny).to(device, dtype)
    parameters = sum(p.numel() for p in model.parameters())
    for unit in (*model.model.visual.blocks, *model.model.language_model.layers,
                 model.model.visual):
        fully_shard(unit)
    fully_shard(model)
    handle = balance_encoders(model) if balanced else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, seconds, last = [], [], time.perf_counter()
    for batch in loader:
        batch = {k: v.to(device, dtype if v.is_floating_point() else None, non_blocking=True)
                 for k, v in batch.items()}
        loss = example.sum_loss(model, batch)
        targets = (batch["labels"] != -100).sum()
        (loader.scale_sum(loss) if balanced else loss / targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach() / targets))  # waits for the device
        seconds.append(time.perf_counter() - last)
        last = time.perf_counter()
    if handle is not None and "vision" not in handle.last:
        raise RuntimeError(f"no encoder was balanced: {handle.last}")
    return losses, median(seconds[WARM_UP:]), parameters


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    batch_size = 2 if args.tiny else 16
    data, common = example.Pictures(STEPS * batch_size), {
        "batch_size": batch_size, "collate_fn": example.collate, "pin_memory": cuda}
    with process_group(one_rank(), 120.0):
        plain, plain_s, parameters = run(torch.utils.data.DataLoader(data, **common), device,
                                         dtype, args.tiny, balanced=False)
        ours, ours_s, _ = run(BalancedDataLoader(
            data, length_fn=lambda e: len(e["input_ids"]),
            phases=CostModel(linear=100_000, quadratic=400), **common), device, dtype, args.tiny,
            balanced=True)
    difference = max(abs(a / b - 1) for a, b in zip(ours, plain, strict=True))
    figures = {"loss_difference": difference, "plain_step_s": plain_s, "balanced_step_s": ours_s,
               "parameters": parameters}
    args.result.write_text(json.dumps(figures), encoding="utf-8")
    print(json.dumps(figures))
    if not difference <= TOLERANCE[dtype]:
        print(f"error: losses differ by {difference:.1e}: {ours} and {plain}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
