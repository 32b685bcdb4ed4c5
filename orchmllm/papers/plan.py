"""Decisions before a run, modelled from a recipe's model, its lengths and a device's data sheet, or
from measured times (orchmllm profile).

    orchmllm papers plan units recipes/mllm10b.yaml --ranks 96 --mix natural
    orchmllm papers plan split|recompute RECIPE [section.key=value ...]

`orchmllm plan job` searches the batch size, sharding and checkpointing of a run.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.models.gpus import GPUS
from orchmllm.papers.advice import ratio, recipe_profiles, rows
from orchmllm.papers.profiles import ModuleProfile, interpolated
from orchmllm.papers.recompute import LayerKind, choose_recompute
from orchmllm.papers.simulate import lengths
from orchmllm.papers.split import METHODS, split_layers
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.hardware import Hardware, cluster
from orchmllm.tools.predict.options import lengths_parser

GBITS, IMAGES, EXAMPLES = (25, 100, 400), (0.5, 1, 2, 4), 2000


DEVICE = (("--profile", Path, "JSON of `orchmllm profile`: measured times"),
          ("--gpu", "h100-sxm", f"one of {', '.join(GPUS)}"))
NETWORK = ("--network", 400.0, "Gbit/s of each GPU between nodes")
OPTIONS = {
    "units": (*DEVICE, NETWORK, ("--ranks", 64, "GPUs of the job"),
              ("--gpu-gb", 74.0, "memory to use of a GPU"),
              ("--global-batch", 0, "samples of an iteration; 0: train.global_batch_size, or "
               "train.batch_size a GPU")),
    "split": (*DEVICE, NETWORK, ("--stages", 4, "of the pipeline"),
              ("--microbatches", 16, "of an iteration")),
    "recompute": (*DEVICE, ("--free-gb", 20.0,
                            "memory for activations beyond full recomputation"))}


def units(recipe: Recipe, profiles_of, args: argparse.Namespace, hardware: Hardware) -> None:
    """Both placements, and how the verdict depends on the link and on images per sample. Raises
    ValueError if neither fits."""
    batch = (args.global_batch or recipe.train.global_batch_size
             or args.ranks * recipe.train.batch_size)
    common = {"num_gpus": args.ranks, "global_batch": batch, "gpu_bytes": 1e9 * args.gpu_gb}
    found = rows(profiles_of(1), **common, hardware=hardware)
    if not found:
        raise ValueError(f"neither placement fits {args.ranks} GPUs of {args.gpu_gb} GB: give "
                         "more GPUs or a smaller model")
    print(f"{args.ranks} GPUs, {batch} samples an iteration; modelled, fastest first. Units are "
          "taken to run\nmicrobatches of one mean sample each: what varies makes them slower")
    for r in found:
        print(f"{r.kind:<10} {r.ms:>10.1f} ms  {r.bytes / 1e9:>6.1f} GB  "
              f"{'all activations recomputed' if r.recompute else 'no recomputation'}")
        for name, u in (r.plan.units if r.plan else {}).items():
            print(f"    {name:<8} {u.gpus:>5} GPUs: tp {u.tp}, dp {u.dp}, pp {u.pp}; stage "
                  f"{u.stage_ms:.2f} ms, {u.bytes / 1e9:.1f} GB")
    print(f"advice: {found[0].kind}\n\nunits over colocated, above 1 colocated wins\nmedia a sample"
          + "".join(f"{g:>9} Gbit/s" for g in GBITS))
    for scale in IMAGES:
        links = (replace(hardware, network_bandwidth=g * 1e9 / 8) for g in GBITS)
        print(f"{scale:>13}x" + "".join(
            f"{ratio(rows(profiles_of(scale), **common, hardware=h)):>16.2f}" for h in links))


def split(profiles: dict[str, ModuleProfile], args: argparse.Namespace) -> None:
    """Every method's stages."""
    forward, backward, moved, size = np.repeat(
        [(p.forward_ms(1) / p.layers, p.forward_ms(1) / p.layers * p.backward_units,
          p.rows * p.boundary_bytes_per_row, p.weight_bytes / p.layers)
         for p in profiles.values()], [p.layers for p in profiles.values()], axis=0).T
    for method in METHODS:
        made = split_layers(forward, backward, moved[:-1], num_stages=args.stages, method=method,
                            num_microbatches=args.microbatches, parameters=size,
                            bytes_per_s=args.network * 1e9 / 8)
        print(f"{method:<11} layers {list(made.layers)}, longest stage {made.stage_ms.max():.2f} "
              f"ms, iteration {made.simulated_ms:.1f} ms")


def recompute(memory: MemoryModel, profiles: dict[str, ModuleProfile], batch: int, args) -> None:
    """Layers that keep their activations, for a rank's mini-batch of `batch` examples."""
    kinds = []
    for name, p in profiles.items():
        kept = (memory.kept(name, "none") - memory.kept(name, "full")) / p.layers * p.rows * batch
        kinds.append(LayerKind(name, p.layers, kept, p.forward_ms(1) * batch / p.layers))
    chosen = choose_recompute(kinds, free_bytes=1e9 * args.free_gb)
    saved = sum(chosen[k.name] * k.recompute_ms for k in kinds)
    for k in kinds:
        print(f"{k.name:<8} {chosen[k.name]:>3} of {k.count} layers keep their activations "
              f"({k.kept_bytes / 1e9:.2f} GB and {k.recompute_ms:.2f} ms each)")
    print(f"saves {saved:.1f} of {sum(k.count * k.recompute_ms for k in kinds):.1f} ms a step in "
          f"{sum(chosen[k.name] * k.kept_bytes for k in kinds) / 1e9:.1f} of {args.free_gb} GB; "
          "in a run fsdp.activation_checkpointing=auto decides")


def with_times(profiles: dict[str, ModuleProfile], path: Path) -> dict[str, ModuleProfile]:
    """The profiles with the times that `orchmllm profile` wrote. Raises ValueError for another
    file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {n: replace(p, forward_ms=interpolated(table[n]["rows"], table[n]["ms"], p.rows))
                for n, p in profiles.items()}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"--profile {path}: not what `orchmllm profile` writes "
                         f"({type(e).__name__}: {e})") from e


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for GB that cannot be."""
    parser = command_parser("papers plan", __doc__)
    parser.add_argument("what", choices=OPTIONS, metavar="WHAT",
                        help="`orchmllm papers plan WHAT --help` says what it takes")
    what = parser.parse_args(argv[:1]).what
    args = lengths_parser(f"papers plan {what}", __doc__, OPTIONS[what]).parse_recipe(argv[1:])
    for flag, gb in (("--free-gb", vars(args).get("free_gb", 0)),
                     ("--gpu-gb", vars(args).get("gpu_gb", 0))):
        if not 0 <= gb < math.inf:
            raise ValueError(f"{flag} {gb:g}: must be a number of GB from 0 on")
    recipe = load_recipe(args.recipe, args.overrides)
    hardware = cluster(args.gpu, gbit=getattr(args, "network", 400.0))
    drawn = lengths(recipe, EXAMPLES, args.mix)
    memory = MemoryModel.of(resolve(replace(recipe, fsdp=replace(
        recipe.fsdp, compute_dtype="bfloat16")), 1, 1))

    def profiles_of(scale: float) -> dict[str, ModuleProfile]:
        made = recipe_profiles(memory, drawn, hardware, scale)
        return with_times(made, args.profile) if args.profile else made

    if what == "units":
        units(recipe, profiles_of, args, hardware)
    elif what == "split":
        split(profiles_of(1), args)
    else:
        recompute(memory, profiles_of(1), recipe.train.batch_size, args)
    return 0
