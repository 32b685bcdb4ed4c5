"""The gradients of one step of a composition on the device, plain and compiled, beside those of the
same weights and the same batch in float64 on the CPU.

    python -m scripts.gpu.gradients --result FILE [--tiny]

Exit code 1 if one is further away than its dtype allows. TF32 is off, which torch would use in the
convolutions of the audio encoder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.launch import process_group
from orchmllm.tools.doctor.self_test import largest_error, recipe_of, step_gradients
from orchmllm.tools.doctor.synthetic import MODEL as TINY
from orchmllm.tools.doctor.synthetic import SyntheticDataset
from scripts.gpu.drawn import one_rank
from tests.lib.drawn import model_of

EXAMPLES = 24
# Name -> (settings, the largest relative error of a part's gradient that is right). Compiled
# attention is in half precision alone on a GPU.
KINDS = {
    "float32": (FsdpConfig(), 1e-4),
    "bfloat16": (FsdpConfig(compute_dtype="bfloat16"), 0.3),
    "bfloat16 compiled": (FsdpConfig(compute_dtype="bfloat16", compile=True), 0.3),
}
Gradients = dict[str, torch.Tensor]


def model(tiny: bool) -> ModelConfig:
    """Of head sizes that flash attention has, and the vocabulary of recipes/mllm_1gpu.yaml: the
    loss works in place, and torch has another kernel for rows of at most 1,024 logits."""
    return TINY if tiny else model_of(
        text={"vocab_size": 151_936, "hidden_size": 256, "intermediate_size": 512},
        vision={"embed_dim": 256, "hidden_size": 256, "num_heads": 4},
        audio={"d_model": 256, "encoder_ffn_dim": 512, "encoder_attention_heads": 4})


def gradients(model: ModelConfig, fsdp: FsdpConfig) -> Gradients:
    """Parameter -> its gradient in a step on the device of this process, in float64 on the host.
    The weights are the same on all devices. The loss is computed in chunks, as in a recipe for a
    GPU."""
    torch.backends.cudnn.allow_tf32 = False
    how = recipe_of(model=replace(model, proof=False), fsdp=replace(fsdp, loss_chunk_rows=64))
    how = replace(how, train=replace(how.train, batch_size=EXAMPLES))
    world = one_rank()
    with process_group(world, how.launch.timeout_s):
        return step_gradients(world, how, in_order=True, dataset=SyntheticDataset(size=EXAMPLES))


def exact(path: Path, tiny: bool) -> Gradients:
    """Those in float64, by a process that sees no GPU and writes them to `path`."""
    subprocess.run([sys.executable, "-m", "scripts.gpu.gradients", "--exact", str(path),
                    *["--tiny"] * tiny], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    found = torch.load(path)
    path.unlink()
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--exact", type=Path, help="write those in float64 here, and no more")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if not (args.result or args.exact):
        parser.error("--result: name a file")
    used, wrong, errors = model(args.tiny), [], {}
    if args.exact:
        torch.save(gradients(used, FsdpConfig(param_dtype="float64")), args.exact)
        return 0
    want = exact(args.result.with_suffix(".pt"), args.tiny)
    for name, (fsdp, most) in KINDS.items():
        errors[name], worst = largest_error(gradients(used, fsdp), want)
        args.result.write_text(json.dumps({"errors": errors}), encoding="utf-8")
        print(f"{name}: {errors[name]:.1e} (at most {most:g}), of {worst}", flush=True)
        if not errors[name] <= most:
            wrong.append(name)
    if wrong:
        print(f"error: other gradients than float64 on the CPU: {', '.join(wrong)}",
              file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
