"""What balancing gains on a real device: every simulated rank's mini-batch of a global batch, run
phase by phase on one GPU, as sampled and balanced.

    python scripts/bench_gpu.py [--device cuda] [--model 10b] [--ranks 8] [--batch-size 24]
        [--mix natural,omni] [--layers 1] [--batches 2] [--repeat 2] [--seed 0] [--json FILE]
        [--out FILE]

On a GPU the defaults are 38 PFLOP, 2 minutes at 35% of an H100's peak.

Real: lengths (orchmllm/tools/predict/workload.py), plans, modules at full width with --layers
layers each and with twice as many, their forward and backward passes. The difference is the time of
the layers; what is left of the first is the head and fixed costs. A rank's time of a phase is that
plus the time of all layers; a step is the sum over phases of the slowest rank. Not
there: other ranks, and so FSDP's and the exchanges' traffic. MFU: useful FLOPs
(orchmllm/models/flops.py), nothing recomputed, over rank batches of at least 8192 packed positions.

Also: alpha and beta of a layer fitted to half of the batches and their error on the other half
(--out writes them as the dry run reads them); encoders
without rows; the attention kernel beside one call per sequence; audio by mode, on the clips of the
rank that has most; the loss plain and in chunks; peak memory beside orchmllm.sharding.memory.
Without a GPU it runs at small shapes on a CPU and says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers
from gpu_parts import (
    TimeModel,
    compare_attention,
    compare_audio_modes,
    compare_loss,
    fit_depths,
    no_work,
    rank_work,
    step_memory,
)

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.flops import Lengths, cost_model, peak_flops, phase_work
from orchmllm.models.gpus import kind_of
from orchmllm.plan.assign import PHASES, PhasePolicy, PlanSpec
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.tools.predict.phase_runner import Clock, PhaseRunner, Work, shortened
from orchmllm.tools.predict.workload import MIXES, MODELS, batch_layout, sample_headers

SMALL = ModelConfig(
    VisionConfig(45, 64, 256, 4, merge_size=2, max_side=448),
    AudioConfig(48, 64, 256, 4, stack=4), LLMConfig(2048, 80, 128, 464, 8, 1))
MIN_POSITIONS = 8192  # of a rank's packed batch, below which it does not count for MFU
DEFAULTS = {  # on a GPU, on a CPU
    "model": ("10b", "small"), "ranks": (8, 4), "batch_size": (24, 10), "layers": (1, 1),
    "batches": (2, 2), "repeat": (2, 2), "chunk_rows": (1024, 128)}


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
    number("layers", "layers of each submodule that run, and twice as many")
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


def make_spec(model: ModelConfig, balanced: bool) -> PlanSpec:
    phase = PhasePolicy("least_move")
    balance = BalanceConfig(balanced, "load", **dict.fromkeys(PHASES, phase))
    return PlanSpec(costs={p: cost_model(p, model) for p in PHASES},
                    row_bytes={p: getattr(model, p).geometry.row_bytes for p in ENCODERS},
                    feature_bytes=2 * model.llm.hidden_size, ranks_per_node=8, balance=balance)


def plans_of(args, model: ModelConfig) -> dict[tuple[str, int, str], StepPlan]:
    """(mix, batch, scheme) -> plan; both schemes plan the same examples."""
    out = {}
    for mix in args.mix:
        for b in range(args.batches):
            headers = sample_headers(mix, args.ranks * args.batch_size, args.seed + b)
            layout = batch_layout(headers, model, args.ranks)
            for scheme in ("none", "balanced"):
                out[mix, b, scheme] = plan_step(layout, make_spec(model, scheme == "balanced"))
    return out


def measure(args, model: ModelConfig, plans: dict, dtype: torch.dtype) -> tuple[list[dict], dict]:
    """(a row per mix, batch, scheme, phase and rank; seconds of encoders without rows). seconds: at
    both depths, measured one after the other; scaled_s: what was measured at the larger depth,
    times what the fits say of all layers over those."""
    rows, empty = [], {}
    for phase in PHASES:
        work = {(key, rank): rank_work(plan, phase, rank)
                for key, plan in plans.items() for rank in range(args.ranks)}
        largest = max(work.values(), key=lambda w: w.lengths.positions.sum())
        layers = getattr(model, phase).num_layers
        runners = {d: PhaseRunner(shortened(model, d), phase, args.device, dtype, args.seed,
                                  args.chunk_rows) for d in depths(args.layers, layers)}
        for runner in runners.values():
            runner.seconds(largest, 1)  # kernels are loaded, memory is taken
        mine = [{"mix": mix, "batch": batch, "scheme": scheme, "phase": phase, "rank": rank,
                 "work": w, "flop": w.useful_flop(model),
                 "seconds": {d: r.seconds(w, args.repeat) for d, r in runners.items()}}
                for ((mix, batch, scheme), rank), w in work.items()]
        layer, rest = fit_of(mine)
        for row in mine:
            lengths = [row["work"].lengths.positions]
            deep, each, other = max(runners), layer.seconds(lengths), rest.seconds(lengths)
            row["scaled_s"] = row["seconds"][deep] * float(
                ((other + layers * each) / np.maximum(other + deep * each, 1e-12))[0])
        rows += mine
        if phase in ENCODERS:
            empty[phase] = runners[min(runners)].seconds(no_work(phase), max(args.repeat, 5))
        del runners, runner  # their memory goes before the next phase takes its own
    return rows, empty


def fit_of(rows: list[dict]) -> tuple[TimeModel, TimeModel]:
    """The models of a layer and of the rest, fitted to both depths of the rows that have items."""
    full = [(r["work"].lengths.positions, d, s) for r in rows for d, s in r["seconds"].items()
            if len(r["work"].lengths.positions)]
    lengths, at, seconds = zip(*full, strict=True)
    return fit_depths(lengths, np.array(at), np.array(seconds))


def depths(few: int, layers: int) -> tuple[int, int]:
    """The two depths that are measured, at most the model's. Raises ValueError for a model of one
    layer."""
    few = min(few, max(layers // 2, 1))
    if few >= layers:
        raise ValueError(f"two depths are measured, and the model has {layers} layer")
    return few, min(2 * few, layers)


def mix_report(rows: list[dict], plans: dict, mix: str, args, peak: float | None) -> dict:
    """Slowest and mean rank of each phase, step times and MFU of one mix, over its batches."""
    table = {s: {p: np.array([[r["scaled_s"] for r in rows if (
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
    return sum(r["flop"] for r in rows) / sum(r["scaled_s"] for r in rows) if rows else 0.0


def fit_report(rows: list[dict], phase: str) -> dict | None:
    """alpha, beta and the constant of a layer, and those of the rest, fitted to the even batches;
    relative error on both depths of the odd ones, of ranks that have items. None if there are fewer
    than three to fit, or none to predict."""
    mine = [r for r in rows if r["phase"] == phase and len(r["work"].lengths.positions)]
    known, held_out = ([r for r in mine if r["batch"] % 2 == odd] for odd in (0, 1))
    if len(known) < 3 or not held_out:
        return None
    layer, rest = fit_of(known)
    lengths = [r["work"].lengths.positions for r in held_out]
    error = np.concatenate([np.abs(d * layer.seconds(lengths) + rest.seconds(lengths) - s) / s
                            for d in held_out[0]["seconds"]
                            for s in [np.array([r["seconds"][d] for r in held_out])]])
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
        flop = 3 * work / getattr(model, phase).num_layers / [some, some**2]
        speeds[phase] = flop / np.maximum([layer["alpha_ns"], layer["beta_ns"]], 1e-9) * 1e9
        phases[phase] = {"fixed": rest["constant_ms"] / 1e3, "layer": layer["constant_ms"] / 1e3}
    peak = report["peak_flop_per_s"] or max(float(s[0]) for s in speeds.values())
    for phase, (products, attention) in speeds.items():
        phases[phase] |= {"products": float(products / peak), "attention": float(attention / peak)}
    return {"gpu": kind_of(report["device"]) or "cpu", "device": report["device"],
            "dtype": report["dtype"], "command": report["command"], "peak_flop_per_s": peak,
            "phases": phases}


def run(args: argparse.Namespace, command: str) -> dict:
    gpu, model = args.device.type == "cuda", MODELS.get(args.model, SMALL)
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(args.seed)
    name = torch.cuda.get_device_name(args.device) if gpu else "CPU, 1 thread"
    if not gpu:
        torch.set_num_threads(1)
        print(f"no GPU used: {args.model} shapes on a CPU, {dtype}; ratios only hint at a GPU's",
              flush=True)
    peak, plans = peak_flops(name), plans_of(args, model)
    rows, empty = measure(args, model, plans, dtype)
    short = shortened(model, args.layers)
    fsdp = FsdpConfig(param_dtype=str(dtype).removeprefix("torch."), meta_init=gpu,
                      loss_chunk_rows=args.chunk_rows)
    first = rank_work(plans[args.mix[0], 0, "none"], "llm", 0), rank_work(
        plans[args.mix[0], 0, "balanced"], "vision", 0)
    mean = {p: np.mean([min(r["seconds"].values()) for r in rows if r["phase"] == p])
            for p in ENCODERS}
    return {
        "command": command, "device": name, "measured": Clock(args.device).unit,
        "dtype": str(dtype),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "settings": {k: getattr(args, k) for k in (*DEFAULTS, "mix", "seed")},
        "shapes": asdict(model), "peak_flop_per_s": peak, "mfu_needs_positions": MIN_POSITIONS,
        "mixes": {mix: mix_report(rows, plans, mix, args, peak) for mix in args.mix},
        "fit": {p: fit_report(rows, p) for p in PHASES},
        "no_rows": {p: {"seconds": s, "share_of_mean": float(s / mean[p])}
                    for p, s in empty.items()},
        "attention": [compare_attention(model, work.phase, work.lengths.positions, args.device,
                                        dtype, args.repeat) for work in first],
        "audio_modes": compare_audio_modes(short, most_clips(rows), args.device, dtype, args.seed,
                                           args.repeat),
        "loss": compare_loss(model, fsdp, loss_rows(first[0]), args.device, dtype, args.repeat),
        "memory": step_memory(short, fsdp, make_spec(model, False),
                              plans[args.mix[0], 0, "none"].layout, args.device, args.seed),
        "ranks": ranks_report(rows),
    }


def most_clips(rows: list[dict]) -> Work:
    """Of all ranks as sampled."""
    return max((r["work"] for r in rows if r["phase"] == "audio" and r["scheme"] == "none"),
               key=lambda w: len(w.lengths.rows))


def loss_rows(work: Work) -> int:
    return min(int(work.lengths.tokens.sum()), MIN_POSITIONS)


def ranks_report(rows: list[dict]) -> dict:
    """phase -> `mix/batch/scheme` -> seconds of each rank, of all layers."""
    out: dict = {p: defaultdict(list) for p in PHASES}
    for r in rows:
        out[r["phase"]][f"{r['mix']}/{r['batch']}/{r['scheme']}"].append(r["scaled_s"])
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
    for phase, e in report["no_rows"].items():
        print(f"{phase} without rows: {1e3 * e['seconds']:.2f} ms, {e['share_of_mean']:.1%} of a "
              "mean rank")
    for a in report["attention"]:
        print(f"attention {a['phase']}: {1e3 * a['kernel_s']:.2f} ms ({a['kernel']}), per sequence "
              f"{1e3 * a['per_sequence_s']:.2f} ms")
    print("audio by mode: " + ", ".join(f"{mode} {1e3 * s:.1f} ms"
                                        for mode, s in report["audio_modes"].items()))
    for entry in report["loss"]:
        print(f"loss, chunk {entry['chunk_rows']} of {entry['rows']} rows: "
              f"{1e3 * entry['seconds']:.1f} ms, peak {entry['peak_bytes'] / 1e6:.1f} MB "
              f"(predicted {entry['predicted_bytes'] / 1e6:.1f})")
    m = report["memory"]
    print(f"step of {m['tokens']} tokens: peak {m['peak_bytes'] / 1e6:.1f} MB above parameters "
          f"(predicted {m['predicted_bytes'] / 1e6:.1f})")


def main(argv: list[str]) -> None:
    args = parse(argv)
    report = run(args, shlex.join(["python", "scripts/bench_gpu.py", *argv]))
    show(report)
    for path, found in ((args.json, lambda: report),
                        (args.out, lambda: for_dry_run(report, MODELS.get(args.model, SMALL)))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
