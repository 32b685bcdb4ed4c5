"""The comparison of a run without and with balancing: its figures and table."""

from __future__ import annotations

import math
import statistics

import numpy as np

from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.gain import slowest_costs


# The exchange is what balancing costs, so it counts in the critical path.
def summarize(rows: dict[str, list[dict]]) -> dict:
    """The figures of comparison.json. rows: of metrics ("off", "on"), see orchmllm.tools.compare.
    Times in seconds of CPU time unless called wall.

    critical path: sum over steps and phases of the slowest rank's time in that phase, because FSDP
    gathers parameters phase by phase and every rank waits for the slowest. The times of a step's
    microbatches are known together alone, so what ranks wait in one and not in another is left out.
    """
    steps = {name: [r for r in found if "loss" in r] for name, found in rows.items()}
    validation = {name: [r["validation_loss"] for r in found if "validation_loss" in r]
                  for name, found in rows.items()}
    phases = [p for p in EVERY_PHASE if p in steps["on"][0]["phases"]]
    cpu_s = {name: np.array([[r["cpu_s"][p] for p in (*phases, "exchange")] for r in found])
             for name, found in steps.items()}  # (steps, phases, ranks)
    path = {name: float(x.max(axis=2).sum()) for name, x in cpu_s.items()}
    cost = {"off": sum(slowest_costs(r["phases"])[0] for r in steps["off"]),
            "on": sum(slowest_costs(r["phases"])[1] for r in steps["on"])}
    return {
        "loss_off": [r["loss"] for r in steps["off"]], "loss_on": [r["loss"] for r in steps["on"]],
        "critical_path_ratio": path["off"] / path["on"],
        "predicted_ratio": cost["off"] / cost["on"],
        "on_over_mean": path["on"] / float(cpu_s["on"].mean(axis=2).sum()),
        "wall_ratio": statistics.median(
            on["wall_s"] / off["wall_s"]
            for on, off in zip(steps["on"], steps["off"], strict=True)),
        # None without rows to validate on
        "validation_loss_first": (validation["on"] or [None])[0],
        "validation_loss_last": (validation["on"] or [None])[-1],
        "validation_loss_last_off": (validation["off"] or [None])[-1],
        "wall_s": {name: [r["wall_s"] for r in found] for name, found in steps.items()},
        "num_ranks": cpu_s["on"].shape[2], "num_steps": len(steps["on"]),
        "critical_path_s": path,
        "imbalance": {p: {"off": _phase_ratio(steps["off"], p, "imbalance_before"),
                          "on": _phase_ratio(steps["on"], p, "imbalance_after")} for p in phases},
        "moved_bytes_per_step": {p: statistics.fmean(
            r["phases"][p]["moved_bytes"] for r in steps["on"]) for p in phases},
        # (phase, rank): what each rank waits for the slowest, over all steps
        "waiting_s": {name: (x.max(axis=2, keepdims=True) - x).sum(axis=0).tolist()
                      for name, x in cpu_s.items()},
    }


def _phase_ratio(rows: list[dict], phase: str, when: str) -> float:
    """Slowest rank / mean rank of one phase over all steps, by the cost model."""
    cost = [(r["phases"][phase][when], r["phases"][phase]["mean_cost_kflop"]) for r in rows]
    total = sum(mean for _, mean in cost)
    return sum(ratio * mean for ratio, mean in cost) / total if total else 1.0


def comparison_table(result: dict, recipe: Recipe) -> str:
    """The figures in words, for a terminal of 80 columns."""
    r, ranks, steps = result, result["num_ranks"], result["num_steps"]
    first, last = r["validation_loss_first"], r["validation_loss_last"]
    path = {name: s / steps for name, s in r["critical_path_s"].items()}
    waiting = {name: sum(map(sum, x)) / ranks / steps for name, x in r["waiting_s"].items()}
    wall = {name: statistics.median(seconds) for name, seconds in r["wall_s"].items()}
    title = f"Balancing off and on: {ranks} ranks, {steps} steps, same seed and batches"
    validated = [] if first is None else [
        _line(f"  validation loss on {recipe.data.num_validation} held-out examples",
              r["validation_loss_last_off"], last, ".4f"),
        f"  validation loss before training {first:.3f} (ln(vocabulary) is "
        f"{math.log(r['vocab_size']):.3f}), after {last:.3f}: {100 * (last / first - 1):+.0f}%"]
    lines = [
        "", "=" * 79, title, "=" * 79, "",
        _line("Same result", "off", "on"),
        _line("  training loss, first step", r["loss_off"][0], r["loss_on"][0], ".4f"),
        _line("  training loss, last step", r["loss_off"][-1], r["loss_on"][-1], ".4f"),
        f"  largest difference of a step's loss: {r['loss_difference']:.1e} relative", *validated,
        "", _line("Less waiting", "off", "on") + "   moved a step",
        *(_line(f"  {p}: slowest / mean rank, predicted", r["imbalance"][p]["off"],
                r["imbalance"][p]["on"], ".2f") + f"{_bytes(r['moved_bytes_per_step'][p]):>15}"
          for p in r["imbalance"]),
        _line("  waiting, CPU seconds a step and rank", waiting["off"], waiting["on"], ".3f"),
        _line("  critical path, CPU seconds a step (*)", path["off"], path["on"], ".3f"),
        _line("  wall time of a step, s (median)", wall["off"], wall["on"], ".3f"),
        "",
        f"  critical path, off / on            {r['critical_path_ratio']:.2f}   "
        f"(cost model: {r['predicted_ratio']:.2f})",
        f"  critical path on / mean rank       {r['on_over_mean']:.2f}   (1.00: nobody waits)",
        f"  wall time, on / off                {r['wall_ratio']:.2f}   "
        "(median; needs a core a rank)",
        "",
        "(*) All ranks wait for the slowest one in each phase: encoders, LLM. The",
        "    critical path adds up the slowest rank's CPU time of each phase and of",
        "    moving rows: how long a step of one microbatch takes with a core for each.",
    ]
    return "\n".join(lines)


def _line(label: str, off: float | str, on: float | str, form: str = "") -> str:
    return f"{label:<46}{off:>9{form}} {on:>9{form}}"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
