"""The dry run and the ablations on the command line: run, print, write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from orchmllm.config import Recipe
from orchmllm.estimate.step_time import Hardware
from orchmllm.plan.assign import PHASES

# Hidden size of the LLM -> (name, mini-batches at 128 ranks and at 2,560): the paper's own.
PAPER_BATCHES = {3584: ("10B", 75, 80), 5120: ("18B", 50, 60), 8192: ("84B", 25, 30)}


def run(recipe: Recipe, world_size: int, *, ablations: bool, json_path: Path | None) -> int:
    """Exit code: 2 if the recipe cannot run on this world, as `train` itself answers."""
    from orchmllm.estimate.ablations import ablate, overhead
    from orchmllm.estimate.dry_run import dry_run

    hardware = Hardware()
    try:
        if ablations:
            found = {"tables": [ablate(recipe, d, b, hardware, steps)
                                for d, b, steps in _sizes(recipe, world_size)],
                     "overhead": overhead(recipe, hardware, [64, 128, 256, 512, 1024, 2560])}
            text = ablation_text(found)
        else:
            found = dry_run(recipe, world_size or 1, hardware)
            text = dry_run_text(found)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(text)
    if json_path:
        json_path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _sizes(recipe: Recipe, world_size: int) -> list[tuple[int, int, int]]:
    """(ranks, mini-batch, steps) of the tables: the paper's two, or the one asked for."""
    _, small, large = PAPER_BATCHES.get(recipe.model.llm.hidden_size, ("", 0, 0))
    batch = recipe.train.batch_size
    if world_size:
        return [(world_size, small or batch if world_size == 128 else batch, 3)]
    return [(128, small or batch, 5), (2560, large or batch, 1)]


def dry_run_text(r: dict) -> str:
    """The report as text."""
    model, memory, names = r["model"], r["memory"], ("none", "LLM only", "balanced")
    lines = [f"{r['world_size']} ranks, mini-batch {r['batch_size']}, {r['steps']} steps planned; "
             f"{r['hardware']['name']}", "", "parameters"]
    lines += [f"  {name:24s} {n / 1e9:9.3f} B" for name, n in model["parameters"].items()]
    lines += [f"  {'total':24s} {model['total'] / 1e9:9.3f} B",
              f"  rank 0's shards: {model['state_bytes'] / 1e9:.2f} GB with gradients and AdamW "
              f"(predicted {sum(r['state_bytes_predicted'].values()) / 1e9:.2f}); built on meta in "
              f"{model['build_s']:.1f} s", "",
              "activation checkpointing: " + ", ".join(
                  f"{p} {c}" for p, c in r["checkpointing"].items()),
              f"predicted peak memory, GB (budget {r['memory_budget_bytes'] / 1e9:.0f})",
              f"  {'':16s}" + "".join(f"{n:>12s}" for n in names)]
    lines += [f"  {moment:16s}" + "".join(
        f"{memory[n]['moments'][moment] / 1e9:12.1f}" for n in names)
        for moment in memory["balanced"]["moments"]]
    lines += ["", "FLOP per step, without padding: " + ", ".join(
        f"{p} {r['flops'][p]:.3g}" for p in PHASES), "",
        "imbalance, slowest rank / mean rank", f"  {'':8s}" + "".join(
            f"{n:>12s}" for n in (*names, "padded none"))]
    lines += [f"  {p:8s}" + "".join(f"{r['phases'][p][n]:12.3f}" for n in (*names, "padded none"))
              for p in PHASES]
    return "\n".join([*lines, "", *_predicted_lines(r), "", *_exchange_lines(r["exchange"]), "",
                      *_batch_lines(r["largest_batch"]), "",
                      f"{r['elapsed_s']:.1f} s, peak RSS {r['peak_rss_bytes'] / 1e9:.2f} GB"])


def _predicted_lines(r: dict) -> list[str]:
    h, lines = r["hardware"], []
    lines.append(f"predicted step (efficiency: products {h['product_efficiency']:g}, attention "
                 f"{h['attention_efficiency']:g}, network {h['network_efficiency']:g})")
    for name, p in r["predicted"].items():
        lines.append(f"  {name:10s} {p['step_s']:7.2f} s  MFU {100 * p['mfu']:5.1f}%  "
                     f"{p['tokens_per_gpu']:7.0f} tokens/s/GPU  exchange "
                     f"{1e3 * p['exchange_s']:6.2f} ms  plan {r['plan_ms'][name]:6.1f} ms")
    for kind, label in (("slowest_padded_s", "audio padded where it is not balanced"),
                        ("slowest_s", f"audio {r['audio_mode']} everywhere")):
        lines.append(f"  {label}: " + ", ".join(
            f"{name} {value:.3f} (reference {r['reference'][name]}, "
            f"{100 * (value / r['reference'][name] - 1):+.1f}%)"
            for name, value in r["ratio"][kind].items()))
    return lines


def _exchange_lines(x: dict) -> list[str]:
    lines = [f"between nodes: {x['internode_bytes_per_rank'] / 1e6:.2f} MB a rank, busiest sender "
             f"{x['busiest_send_bytes'] / 1e6:.1f} MB"]
    for kind in ("flat", "two_hop"):
        mean, most, bound = x[f"peers_{kind}"]
        lines.append(f"peers a rank sends to, {kind}: mean {mean:.1f}, most {most}, at most "
                     f"{bound} possible")
    if "imbalance_shard_groups" in x:
        lines.append("balancing among all ranks / inside shard groups, max / mean cost: "
                     + ", ".join(f"{p} {x['imbalance_world'][p]:.4f} / "
                                 f"{x['imbalance_shard_groups'][p]:.4f}" for p in PHASES))
    return lines


def _batch_lines(b: dict) -> list[str]:
    return [f"largest mini-batch in {label}: " + ", ".join(
        f"{name} {batch}" for name, batch in b[key].items())
        for key, label in (("budget", "the budget"), ("same_memory", "what this one takes"))]


def ablation_text(found: dict) -> str:
    """All tables as text."""
    lines = []
    for table in found["tables"]:
        lines += [f"{table['ranks']} ranks, mini-batch {table['batch_size']}, sharded over "
                  f"{table['shards']}, checkpointing "
                  + ", ".join(f"{p} {c}" for p, c in table["checkpointing"].items()),
                  f"  {'':15s}{'MFU':>7s}{'ratio':>7s}{'tok/s/GPU':>11s}{'peak GB':>9s}"
                  f"{'between MB':>12s}{'exchange ms':>13s}  figure"]
        for name, row in table["rows"].items():
            note = "" if row["fits"] else f"  does not fit; {row['fitting_batch']} would"
            lines.append(
                f"  {name:15s}{100 * row['mfu']:6.1f}%{row['mfu_ratio']:7.3f}"
                f"{row['tokens_per_gpu']:11.0f}{row['peak_bytes'] / 1e9:9.1f}"
                f"{row['internode_mb_per_rank']:12.2f}{row['exchange_ms']:13.1f}  "
                f"{row['figure']}{note}")
        lines += [f"  {'agrees' if holds else 'DIFFERS'}: {claim}"
                  for claim, holds in table["order"].items()] + [""]
    lines.append("Table 2, mini-batch 60: ranks, paper's overhead, our plan (hidden), our exchange")
    lines += [f"  {o['ranks']:5d} {o['paper_ms']:7.2f} ms {o['plan_ms']:7.1f} ms "
              f"{o['exchange_ms']:7.2f} ms" for o in found["overhead"]]
    return "\n".join(lines)
