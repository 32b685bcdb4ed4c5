"""The gradients of one step on the device, plain and compiled, beside those of the same weights and
the same batch in float64 on the CPU.

    python -m scripts.gpu.gradients --result FILE [--tiny]

Exit code 1 if one is further away than its dtype allows. TF32 is off, which torch would use in the
convolutions of the audio encoder.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from orchmllm.batch import Microbatch
from orchmllm.config.job import resolve
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.flops import plan_spec
from orchmllm.models.mllm import MultimodalModel
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PlanSpec
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.fsdp import build_model
from orchmllm.tools.doctor.synthetic import SyntheticDataset, recipe
from scripts.gpu_parts import one_rank, random_inputs

# Head sizes that flash attention has, and the vocabulary of recipes/mllm_1gpu.yaml: the loss works
# in place, and torch has another kernel for rows of at most 1,024 logits.
MODEL = ModelConfig(
    VisionConfig(2, 256, 512, 4, max_side=224), AudioConfig(2, 256, 512, 4, num_mels=80),
    LLMConfig(151_936, 2, 256, 512, 4, 2))
TINY = ModelConfig(
    VisionConfig(2, 64, 128, 4, max_side=112), AudioConfig(2, 64, 128, 4, num_mels=80),
    LLMConfig(512, 2, 64, 128, 4, 2))
EXAMPLES, SEED = 24, 0
# Name -> (settings, the largest relative error of a submodule's gradient that is right). Compiled
# attention is in half precision alone on a GPU.
KINDS = {
    "float32": (FsdpConfig(), 1e-4),
    "bfloat16": (FsdpConfig(compute_dtype="bfloat16"), 0.05),
    "bfloat16 compiled": (FsdpConfig(compute_dtype="bfloat16", compile=True), 0.05),
}
Gradients = dict[str, torch.Tensor]


def microbatch(model: ModelConfig) -> tuple[PlanSpec, Microbatch]:
    """A batch of one rank with images, clips and text."""
    data = SyntheticDataset(vision=model.vision.geometry, audio=model.audio.geometry,
                            size=EXAMPLES)
    spec = plan_spec(resolve(recipe(model=model), 1, 1))
    layout = BatchLayout.concat([data.layout(i) for i in range(EXAMPLES)], [EXAMPLES])
    return spec, random_inputs(model, plan_step(layout, spec), SEED)


def build(device: torch.device, model: ModelConfig, fsdp: FsdpConfig) -> MultimodalModel:
    """The model on the device, with weights that are the same on all devices. The loss is computed
    in chunks, as in a recipe for a GPU."""
    return build_model(model, replace(fsdp, meta_init=True, loss_chunk_rows=64), device, SEED)


def backward(built: MultimodalModel, device: torch.device, spec: PlanSpec, micro: Microbatch
             ) -> None:
    """Forward and backward of the batch, whose inputs are on the host."""
    planner = Orchestrator(spec, SimpleNamespace(rank=0, world_size=1), device=device)
    tokens = int(micro.plan.layout.tokens_per_example.sum())
    (built(planner.dispatch(micro, tokens)) / tokens).backward()


def gradients(device: torch.device, model: ModelConfig, fsdp: FsdpConfig, spec: PlanSpec,
              micro: Microbatch) -> Gradients:
    """Parameter -> its gradient on the device, in float64 on the host."""
    built = build(device, model, fsdp)
    backward(built, device, spec, micro)
    return {name: p.grad.full_tensor().double().cpu()
            for name, p in built.named_parameters()}


def largest_error(got: Gradients, want: Gradients) -> float:
    """Over the submodules, ||got - want|| / ||want|| of all their parameters as one vector. Raises
    ValueError for other parameters."""
    if got.keys() != want.keys():
        raise ValueError(f"other parameters: {sorted(got.keys() ^ want.keys())[:5]}")
    errors = []
    for part in sorted({name.split(".")[0] for name in want}):
        names = [name for name in want if name.split(".")[0] == part]
        ours, exact = (torch.cat([g[n].flatten() for n in names]) for g in (got, want))
        errors.append(float((ours - exact).norm() / exact.norm()))
    return max(errors)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    torch.backends.cudnn.allow_tf32 = False
    model, wrong, errors = TINY if args.tiny else MODEL, [], {}
    spec, micro = microbatch(model)
    with one_rank(torch.device("cpu")):
        exact = gradients(torch.device("cpu"), model, FsdpConfig(param_dtype="float64"), spec,
                          micro)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with one_rank(device):
        for name, (fsdp, most) in KINDS.items():
            got = gradients(device, model, fsdp, spec, micro)
            errors[name] = largest_error(got, exact)
            args.result.write_text(json.dumps({"errors": errors}), encoding="utf-8")
            print(f"{name}: {errors[name]:.1e} (at most {most:g})", flush=True)
            if not errors[name] <= most:
                wrong.append(name)
    if wrong:
        print(f"error: other gradients than float64 on the CPU: {', '.join(wrong)}",
              file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
