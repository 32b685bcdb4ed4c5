"""What balancing gains on a real device: every simulated rank's mini-batch of a global batch, run
phase by phase on one GPU, as sampled and balanced.

    python scripts/bench_gpu.py [--device cuda] [--model 10b] [--ranks 8] [--batch-size 24]
        [--mix natural,omni] [--batches 2] [--repeat 2] [--seed 0] [--json FILE] [--out FILE]

On a GPU the defaults are 11 PFLOP, half a minute at 35% of an H100's peak.

Real: lengths (orchmllm/tools/predict/workload.py), plans, the composition's own code at full width,
forward and backward (scripts/whole_runner.py): what is around the blocks, and one
block, which counts for all. A step is the sum over phases of the slowest rank. Not there: other
ranks, and so FSDP's and the exchanges' traffic. MFU: useful FLOPs (orchmllm/models/whole_flops.py),
nothing recomputed, over rank batches of at least 8192 packed positions.

Also: alpha and beta of a layer fitted to half of the batches and their error on the other half
(--out writes them as the dry run reads them); the attention kernel beside one call per sequence;
the loss plain and in chunks, its peak memory beside orchmllm.sharding.memory. Without a GPU it runs
at small shapes on a CPU and says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from orchmllm.config.balance import BalanceConfig  # noqa: E402
from orchmllm.config.job import resolve  # noqa: E402
from orchmllm.config.model import ModelConfig  # noqa: E402
from orchmllm.config.recipe import DataConfig, Recipe, RunConfig  # noqa: E402
from orchmllm.models.families import read_config  # noqa: E402
from orchmllm.models.flops import Lengths, peak_flops  # noqa: E402
from orchmllm.models.gpus import kind_of  # noqa: E402
from orchmllm.models.whole_flops import part_counts, phase_work, plan_spec  # noqa: E402
from orchmllm.papers.mixes import MODELS  # noqa: E402
from orchmllm.plan.assign import PHASES, PhasePolicy  # noqa: E402
from orchmllm.plan.step import StepPlan, plan_step  # noqa: E402
from orchmllm.tools.predict.workload import MIXES, batch_layout, sample_headers  # noqa: E402
from scripts.gpu.drawn import write_composition  # noqa: E402
from scripts.gpu_parts import (  # noqa: E402
    TimeModel,
    Work,
    compare_attention,
    compare_loss,
    fit,
    rank_work,
)
from scripts.whole_runner import Clock, WholeRunner  # noqa: E402
from tests.lib.tokenizers import write_byte_tokenizer  # noqa: E402

MIN_POSITIONS = 8192  # of a rank's packed batch, below which it does not count for MFU
DEFAULTS = {  # on a GPU, on a CPU
    "model": ("10b", "small"), "ranks": (8, 4), "batch_size": (24, 10), "batches": (2, 2),
    "repeat": (2, 2), "chunk_rows": (1024, 128)}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench_gpu.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)

    def number(name: str, what: str) -> None:
        gpu, cpu = DEFAULTS[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=int, metavar="N",
                            help=f"{what} (default: {gpu} on a GPU, {cpu} on a CPU)")

    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="default: auto, a GPU if there is one")
    parser.add_argument("--model", choices=(*MODELS, "small"),
                        help="shapes (default: 10b on a GPU, small on a CPU)")
    number("ranks", "simulated ranks")
    number("batch-size", "examples per rank")
    number("batches", "global batches per mix; half of them fit the cost model")
    number("repeat", "runs of each measurement, the shortest counts")
    number("chunk-rows", "rows of a chunk of the loss")
    parser.add_argument("--mix", default="natural,omni",
                        help=f"comma-separated, of {', '.join(MIXES)} (default: natural,omni)")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights (default: 0)")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--out", type=Path,
                        help="write what `orchmllm dry-run --measured` reads")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; use --device cpu")
    args.mix = args.mix.split(",")
    if unknown := sorted(set(args.mix) - set(MIXES)):
        parser.error(f"--mix: {', '.join(unknown)}: choose of {', '.join(MIXES)}")
    args.device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available()
                               else "cpu")
    for name, (gpu, cpu) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, gpu if args.device.type == "cuda" else cpu)
        elif name != "model" and getattr(args, name) < (2 if name == "batches" else 1):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: too few")
    return args


def recipe_of(model: ModelConfig, balanced: bool, seed: int = 0) -> Recipe:
    phase = PhasePolicy("least_move")
    return Recipe(run=RunConfig(dir="unused", seed=seed), data=DataConfig(path="unused"),
                  model=model,
                  balance=BalanceConfig(balanced, "load", **dict.fromkeys(PHASES, phase)))


def plans_of(args, model: ModelConfig) -> dict[tuple[str, int, str], StepPlan]:
    """(mix, batch, scheme) -> plan; both schemes plan the same examples."""
    out = {}
    for mix in args.mix:
        for b in range(args.batches):
            headers = sample_headers(mix, args.ranks * args.batch_size, args.seed + b)
            layout = batch_layout(headers, model, args.ranks)
            for scheme in ("none", "balanced"):
                job = resolve(recipe_of(model, scheme == "balanced"), args.ranks, 8)
                out[mix, b, scheme] = plan_step(layout, plan_spec(job))
    return out


def step_of(runner: WholeRunner, work: Work, values: int, device: torch.device, dtype: torch.dtype
            ) -> Callable[[], torch.Tensor]:
    """Forward of a rank's items, whose inputs are on the device before. values: of a patch or a
    frame."""
    if work.phase == "llm":
        return partial(runner.whole, runner.text(work.lengths.tokens.tolist()))
    media = []
    for rows, grid in zip(work.lengths.rows.tolist(), work.lengths.grid.tolist(), strict=True):
        if work.phase == "vision":
            media.append({"pixel_values": torch.randn(rows, values, device=device, dtype=dtype),
                          "image_grid_thw": torch.tensor([grid])})
        else:
            media.append({
                "input_features": torch.randn(1, values, rows, device=device, dtype=dtype),
                "feature_attention_mask": torch.ones(1, rows, dtype=torch.int64)})
    return partial(runner.encoders.features, work.phase, media)


def measure(args, model: ModelConfig, plans: dict, dtype: torch.dtype) -> list[dict]:
    """A row per mix, batch, scheme, phase and rank with its seconds, of them those of the blocks.
    """
    rows, parts = [], part_counts(model)
    runner = WholeRunner(recipe_of(model, False, args.seed), args.device, dtype, args.chunk_rows)
    for phase in PHASES:
        work = {(key, rank): rank_work(plan, phase, rank)
                for key, plan in plans.items() for rank in range(args.ranks)}

        def seconds(w: Work, repeat: int, phase=phase) -> tuple[float, float]:
            if not len(w.lengths.positions):
                return 0.0, 0.0
            return runner.seconds(
                step_of(runner, w, parts[phase].row_values, args.device, dtype), repeat)

        # Kernels are loaded, memory is taken.
        seconds(max(work.values(), key=lambda w: w.lengths.positions.sum()), 1)
        for ((mix, batch, scheme), rank), w in work.items():
            around, blocks = seconds(w, args.repeat)
            rows.append({"mix": mix, "batch": batch, "scheme": scheme, "phase": phase, "rank": rank,
                         "work": w, "flop": w.useful_flop(model), "blocks_s": blocks,
                         "seconds": around + blocks})
    return rows


def mix_report(rows: list[dict], plans: dict, mix: str, args, peak: float | None) -> dict:
    """Slowest and mean rank of each phase, step times and MFU of one mix, over its batches."""
    table = {s: {p: np.array([[r["seconds"] for r in rows if (
        r["mix"], r["batch"], r["scheme"], r["phase"]) == (mix, b, s, p)]
        for b in range(args.batches)]) for p in PHASES} for s in ("none", "balanced")}
    out: dict = {"phases": {}}
    for phase in PHASES:
        out["phases"][phase] = {s: {
            "max_s": float(t[phase].max(axis=1).mean()), "mean_s": float(t[phase].mean()),
            "max_over_mean": float((t[phase].max(axis=1) / t[phase].mean(axis=1)).mean()),
            "predicted_max_cost": float(np.mean(
                [plans[mix, b, s].phase_cost(phase)[1].max() for b in range(args.batches)])),
        } for s, t in table.items()}
        mine = [r for r in rows if r["mix"] == mix and r["phase"] == phase]
        large = speed_of([r for r in mine if r["work"].lengths.positions.sum() >= MIN_POSITIONS])
        out["phases"][phase] |= {"flop_per_s": speed_of(mine),
                                 "mfu": large / peak if peak and large else None}
    step, even = ({s: sum(float(getattr(t[p], how)(axis=1).mean()) for p in PHASES)
                   for s, t in table.items()} for how in ("max", "mean"))
    tokens = [r["work"].lengths.tokens.sum() for r in rows
              if r["mix"] == mix and r["phase"] == "llm"]
    return out | {
        "step_s": step, "none_over_balanced": step["none"] / step["balanced"],
        "balanced_over_mean": step["balanced"] / even["balanced"],
        "tokens_per_rank": {"min": int(min(tokens)), "mean": float(np.mean(tokens))}}


def speed_of(rows: list[dict]) -> float:
    """Useful FLOP per second of these rows; 0 if there are none."""
    return sum(r["flop"] for r in rows) / sum(r["seconds"] for r in rows) if rows else 0.0


def fit_of(rows: list[dict], layers: int) -> tuple[TimeModel, TimeModel]:
    """The models of a layer and of the rest, which has no squares."""
    lengths = [r["work"].lengths.positions for r in rows]
    blocks, both = (np.array([r[k] for r in rows]) for k in ("blocks_s", "seconds"))
    return fit(lengths, blocks / layers), fit(lengths, both - blocks, terms=2)


def fit_report(rows: list[dict], phase: str, layers: int) -> dict | None:
    """alpha, beta and the constant of a layer, and those of the rest, fitted to the even batches;
    relative error of the odd ones' seconds, of ranks that have items. None if there are fewer than
    three to fit, or none to predict."""
    mine = [r for r in rows if r["phase"] == phase and len(r["work"].lengths.positions)]
    known, held_out = ([r for r in mine if r["batch"] % 2 == odd] for odd in (0, 1))
    if len(known) < 3 or not held_out:
        return None
    layer, rest = fit_of(known, layers)
    lengths = [r["work"].lengths.positions for r in held_out]
    seconds = np.array([r["seconds"] for r in held_out])
    error = np.abs(layers * layer.seconds(lengths) + rest.seconds(lengths) - seconds) / seconds
    return {"layer": _coefficients(layer), "rest": _coefficients(rest),
            "num_held_out": len(held_out), "error_p50": float(np.percentile(error, 50)),
            "error_p95": float(np.percentile(error, 95))}


def _coefficients(fitted: TimeModel) -> dict[str, float]:
    return {"constant_ms": 1e3 * fitted.constant, "alpha_ns": 1e9 * fitted.alpha,
            "beta_ns": 1e9 * fitted.beta}


def for_dry_run(report: dict, model: ModelConfig) -> dict:
    """What `orchmllm dry-run --measured` reads: of each phase the shares of the peak that products
    and attention of its layers reach, and the seconds that a layer and the rest take without rows.
    Without a known peak the fastest products are it. Raises ValueError for a phase without fit."""
    speeds, phases, some = {}, {}, 1024
    for phase in PHASES:
        if report["fit"][phase] is None:
            raise ValueError(f"--out: too few ranks had items of {phase}: raise --batch-size")
        layer, rest = (report["fit"][phase][k] for k in ("layer", "rest"))
        work = phase_work(phase, model, Lengths(*np.full((3, 1), some)), "full").recompute[:, 0]
        flop = 3 * work / len(part_counts(model)[phase].blocks) / [some, some**2]
        speeds[phase] = flop / np.maximum([layer["alpha_ns"], layer["beta_ns"]], 1e-9) * 1e9
        phases[phase] = {"fixed": rest["constant_ms"] / 1e3, "layer": layer["constant_ms"] / 1e3}
    peak = report["peak_flop_per_s"] or max(float(s[0]) for s in speeds.values())
    for phase, (products, attention) in speeds.items():
        phases[phase] |= {"products": float(products / peak), "attention": float(attention / peak)}
    return {"gpu": kind_of(report["device"]) or "cpu", "device": report["device"],
            "dtype": report["dtype"], "command": report["command"], "peak_flop_per_s": peak,
            "phases": phases}


def opened(name: str, folder: Path) -> ModelConfig:
    """The model of a name; a small one is written to the folder."""
    if name in MODELS:
        return MODELS[name]
    write_composition(folder / "model", name, write_byte_tokenizer(folder))
    return ModelConfig(config=str(folder / "model"))


def run(args: argparse.Namespace, command: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return report_of(args, command, opened(args.model, Path(folder)))


def report_of(args: argparse.Namespace, command: str, model: ModelConfig) -> dict:
    gpu = args.device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(args.seed)
    name = torch.cuda.get_device_name(args.device) if gpu else "CPU, 1 thread"
    if not gpu:
        torch.set_num_threads(1)
        print(f"no GPU used: {args.model} shapes on a CPU, {dtype}; ratios only hint at a GPU's",
              flush=True)
    peak, plans = peak_flops(name), plans_of(args, model)
    rows = measure(args, model, plans, dtype)
    layers = {p: len(counts.blocks) for p, counts in part_counts(model).items()}
    report = {
        "command": command, "device": name, "measured": Clock(args.device).unit,
        "dtype": str(dtype),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "settings": {k: getattr(args, k) for k in (*DEFAULTS, "mix", "seed")},
        "shapes": json.loads((Path(model.folder) / "config.json").read_text(encoding="utf-8")),
        "peak_flop_per_s": peak, "mfu_needs_positions": MIN_POSITIONS,
        "mixes": {mix: mix_report(rows, plans, mix, args, peak) for mix in args.mix},
        "fit": {p: fit_report(rows, p, layers[p]) for p in PHASES},
        "attention": [attention_of(args, model, dtype, rank_work(plans[args.mix[0], 0, scheme],
                                                                 phase, 0))
                      for phase, scheme in (("llm", "none"), ("vision", "balanced"))],
        "loss": compare_loss(model, args.chunk_rows, loss_rows(rank_work(
            plans[args.mix[0], 0, "none"], "llm", 0)), args.device, dtype, args.repeat),
        "ranks": ranks_report(rows),
    }
    if args.out:
        write(args.out, for_dry_run(report, model))
    return report


def attention_of(args: argparse.Namespace, model: ModelConfig, dtype: torch.dtype, work: Work
                 ) -> dict:
    config = read_config(Path(model.folder))
    llm, vision = config.get_text_config(decoder=True), config.vision_config
    heads, kv_heads, width = vision.num_heads, vision.num_heads, vision.embed_dim
    if work.phase == "llm":
        heads, kv_heads, width = (
            llm.num_attention_heads, llm.num_key_value_heads, llm.hidden_size)
    return {"phase": work.phase, **compare_attention(
        heads, kv_heads, width // heads, work.phase == "llm", work.lengths.positions, args.device,
        dtype, args.repeat)}


def loss_rows(work: Work) -> int:
    return min(int(work.lengths.tokens.sum()), MIN_POSITIONS)


def ranks_report(rows: list[dict]) -> dict:
    """phase -> `mix/batch/scheme` -> seconds of each rank, of all layers."""
    out: dict = {p: defaultdict(list) for p in PHASES}
    for r in rows:
        out[r["phase"]][f"{r['mix']}/{r['batch']}/{r['scheme']}"].append(r["seconds"])
    return out


def show(report: dict) -> None:
    print(f"{report['device']}, {report['measured']}, {report['dtype']}")
    for mix, found in report["mixes"].items():
        print(f"{mix}: step none / balanced {found['none_over_balanced']:.2f}, balanced step / "
              f"mean of ranks {found['balanced_over_mean']:.3f}, "
              f"{found['tokens_per_rank']['mean']:.0f} LLM tokens a rank")
        for phase, p in found["phases"].items():
            mfu = f", MFU {p['mfu']:.1%}" if p["mfu"] else ""
            print(f"  {phase:6s} slowest / mean {p['none']['max_over_mean']:.2f} -> "
                  f"{p['balanced']['max_over_mean']:.2f}, {p['flop_per_s'] / 1e9:.1f} GFLOP/s{mfu}")
    for phase, f in report["fit"].items():
        print(f"fit {phase}: " + (f"a layer {f['layer']['alpha_ns']:.4g} ns a position, "
                                  f"{f['layer']['beta_ns']:.3g} a pair; " if f else "") + (
            f"error on held-out batches p50 {f['error_p50']:.1%}, p95 {f['error_p95']:.1%}"
            if f else "too few ranks with items"))
    for a in report["attention"]:
        print(f"attention {a['phase']}: {1e3 * a['kernel_s']:.2f} ms ({a['kernel']}), per sequence "
              f"{1e3 * a['per_sequence_s']:.2f} ms")
    for entry in report["loss"]:
        print(f"loss, chunk {entry['chunk_rows']} of {entry['rows']} rows: "
              f"{1e3 * entry['seconds']:.1f} ms, peak {entry['peak_bytes'] / 1e6:.1f} MB "
              f"(predicted {entry['predicted_bytes'] / 1e6:.1f})")


def write(path: Path, found: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    args = parse(argv)
    report = run(args, shlex.join(["python", "scripts/bench_gpu.py", *argv]))
    show(report)
    if args.json:
        write(args.json, report)


if __name__ == "__main__":
    main(sys.argv[1:])
