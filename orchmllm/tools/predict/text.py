"""The report of a dry run in words."""

from __future__ import annotations

from textwrap import wrap

SCHEMES = {"none": "unbalanced", "LLM only": "LLM only", "balanced": "balanced"}


def dry_run_text(r: dict) -> str:
    """The report as text, for a terminal of 80 columns."""
    why = f" ({r['world_size_from']})" if "world_size_from" in r else ""
    lines = [f"{_many(r['world_size'], 'rank')}{why}",
             f"{_many(r['batch_size'], 'example')} a rank and microbatch, "
             f"{_many(r['microbatches'], 'microbatch')} a step; "
             f"{_many(r['steps'], 'step')} planned",
             f"GPU assumed: {gpu_text(r['hardware'])}",
             *wrap(f"Lengths: {r['lengths']}.", 79, subsequent_indent="  "),
             "LLM only: the LLM phase alone is balanced."]
    lines += wrap(f"{r['caps']}.", 79, subsequent_indent="  ") * bool(r["caps"])
    if not r["balanced"]:
        lines.append("balance.enabled is false: the recipe runs unbalanced, in all columns below.")
    return "\n".join([
        *lines, "", *_memory_lines(r), "", *_parameter_lines(r["parameters"]), "",
        *_imbalance_lines(r), "", *_predicted_lines(r), "",
        *_exchange_lines(r["exchange"], r["world_size"]), "",
        *r["long_lines"], "",
        f"This took {r['elapsed_s']:.1f} s and "
        f"{r['peak_rss_bytes'] / 1e9:.2f} GB of memory."])


def gpu_text(h: dict) -> str:
    """The hardware of a prediction in words."""
    return (f"{h['name']}, {h['sheet']['memory_bytes'] / 1e9:.0f} GB; "
            f"{h['ranks_per_node']} a node, "
            f"{h['network_bandwidth'] * 8 / 1e9:.0f} Gbit/s each")


def _many(count: float, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    number = f"{count:.0f}" if count == round(count) else f"{count:.1f}"
    return f"{number} {noun}{'' if count == 1 else plural}"


def _table(label: str, *cells: str) -> str:
    return f"{label:42s}" + "".join(f"{c:>12s}" for c in cells)


def _memory_lines(r: dict) -> list[str]:
    memory, budget = r["memory"], r["memory_budget_bytes"]
    peak = memory["balanced"]["peak_bytes"]
    verdict, rest = (("It fits", "are left") if r["fits"] else ("It does not fit", "are missing"))
    moment = max(memory["balanced"]["moments"], key=memory["balanced"]["moments"].get)
    scale, unit = (1e9, "GB") if peak >= 1e10 else (1e6, "MB")
    return [
        f"{verdict}: the fullest rank needs {peak / 1e9:.1f} GB; tensors may take "
        f"{budget / 1e9:.1f} GB",
        f"({r['allowed_by']}). {abs(budget - peak) / 1e9:.1f} GB {rest} on its GPU.",
        f"The worst of {_many(r['steps'], 'step')} is at the moment `{moment}`.",
        f"Parameters, gradients and AdamW's moments of a rank: "
        f"{sum(r['state_bytes'].values()) / scale:.2f} {unit}",
        "Activation checkpointing: " + ", ".join(
            f"{p} {c}" for p, c in r["checkpointing"].items() if p not in r["without"]),
        f"Memory of the host for a save: {r['save_bytes'] / scale:.2f} {unit} a rank, "
        f"{r['save_bytes'] * r['writers_per_node'] / scale:.2f} {unit} a node",
        "", _table(f"Predicted peak memory of a rank, {unit}", *SCHEMES.values()),
        *(_table(f"  {moment}", *(f"{memory[n]['moments'][moment] / scale:.1f}" for n in SCHEMES))
          for moment in memory["balanced"]["moments"] if moment.split()[0] not in r["without"])]


def _parameter_lines(counts: dict[str, int]) -> list[str]:
    total = sum(counts.values())
    scale, unit = (1e9, "B") if total >= 1e9 else (1e6, "M")
    return ["Parameters", *(f"  {name:24s} {n / scale:9.3f} {unit}"
                            for name, n in {**counts, "total": total}.items())]


def _imbalance_lines(r: dict) -> list[str]:
    lines = [_table("Imbalance: slowest rank / mean rank", *SCHEMES.values())]
    for p in r["phases"]:
        lines.append(_table(f"  {p}", *(f"{r['phases'][p][n]:.3f}" for n in SCHEMES)))
    return [*lines, "", "FLOP of a step, without padding: " + ", ".join(
        f"{p} {r['flops'][p]:.3g}" for p in r["phases"])]


def _predicted_lines(r: dict) -> list[str]:
    """The step: how long, where the time goes, what it costs."""
    predicted = [r["predicted"][n] for n in SCHEMES]
    short = max(p["step_s"] for p in predicted) < 1
    scale = 1e3 if short else 1

    def row(label: str, key: str, form: str = ".2f", by: float = scale) -> str:
        return _table(f"  {label}", *(f"{by * p[key]:{form}}" for p in predicted))

    epoch = r["epoch"] or 1_000_000
    hours = epoch / r["examples_per_step"] * r["world_size"] / 3600
    whose = f"an epoch of {epoch:,} examples" if r["epoch"] else "a million examples"
    lines = [
        _table("Predicted step, " + ("milliseconds" if short else "seconds"), *SCHEMES.values()),
        row("whole", "step_s"),
        *(row(f"{p}, forward and backward", f"{p}_s") for p in r["phases"]),
        row("gathers and reductions not hidden", "traffic_s"),
        row("exchange of rows", "exchange_s", ".4f" if not short else ".2f"),
        row("optimizer", "update_s", ".3f" if not short else ".2f"),
        row("of it, waiting for the slowest rank", "waiting_s"),
        row("MFU, %", "mfu", ".1f", 100),
        row("tokens a second and GPU", "tokens_per_gpu", ".0f", 1),
        row("tokens a second", "tokens_per_gpu", ".4g", r["world_size"]),
        row(f"GPU-hours, {whose}"[:39], "step_s", ".4g", hours),
        _table("  planning, ms (in the background)", *(
            f"{r['plan_ms'][n]:.1f}" for n in SCHEMES)),
        *_assumed_lines(r), "",
        _table("Computing alone, relative to balanced", "unbalanced", "LLM only"),
        _table("  the slowest rank of each phase",
               *(f"{r['ratio'][f'{n} / balanced']:.3f}" for n in ("none", "LLM only")))]
    return lines


def _assumed_lines(r: dict) -> list[str]:
    """What the prediction rests on, and what it leaves out."""
    h = r["hardware"]
    shares = [f"  Assumed shares of the {r['dtype']} peak: products {h['product_efficiency']:g},",
              f"  attention {h['attention_efficiency']:g} n / (n + {h['attention_half']:g}) "
              "where a position attends to n;",
              f"  of the bandwidth: memory {h['memory_efficiency']:g}, network "
              f"{h['network_efficiency']:g}."]
    if h["measured"]:
        shares = [f"  Measured shares of the {r['dtype']} peak, products and attention:"] + [
            f"    {p}: {m['products']:.3f} and {m['attention']:.3f}" for p, m in
            h["measured"].items()]
    return [*shares, *wrap("Not modelled: " + ", ".join(r["not_modelled"]) + ".", 78,
                           initial_indent="  ", subsequent_indent="  ")]


def _exchange_lines(x: dict, world_size: int) -> list[str]:
    """What balancing moves."""
    mean, most, bound = x["peers"]
    lines = ["Exchange of a balanced microbatch",
             f"  A rank sends to {mean:.1f} other ranks on average, to {most} at most, of {bound}."]
    if x["ranks_per_node"] < world_size:
        lines += [f"  Between nodes: {x['internode_bytes_per_rank'] / 1e6:.2f} MB a rank on "
                  f"average, {x['busiest_send_bytes'] / 1e6:.1f} MB from the busiest."]
    else:
        lines.append("  All ranks are on one node: nothing moves between nodes.")
    if "imbalance_shard_groups" in x:
        phases = list(x["imbalance_world"])
        lines += ["", _table("Slowest rank / mean rank, by planned cost", *phases),
                  *(_table(label, *(f"{x[key][p]:.4f}" for p in phases)) for label, key in (
                      (f"  balanced among all {world_size} ranks", "imbalance_world"),
                      (f"  inside shard groups of {x['shard_size']}", "imbalance_shard_groups")))]
    return lines
