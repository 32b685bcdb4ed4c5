"""The metrics of a run, a row each in METRICS: what a line of metrics.jsonl holds, in which unit,
what it means, and where it is shown. docs/metrics.md and docs/metrics.schema.json are made of this
table, the line of a run's progress and the report read it, and the tests hold real rows to it.

A new metric of a step needs its row here and its value in a row (orchmllm.runtime.measured). A key
that goes away or changes its meaning raises SCHEMA_VERSION.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from orchmllm.config.recipe import TRAIN_PARTS
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.layout import GENERATOR

SCHEMA_VERSION = 1
NUMBER = {"type": "number"}
SIZE = {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
COUNTS = {"type": "array", "items": COUNT}
MEASURED = {"type": ["number", "null"]}
FLAG = {"type": "boolean"}
ALL_RANKS_UP_TO = 64  # ranks whose numbers every row has ...
ALL_RANKS_EVERY = 100  # ... and the steps after which a row has those of more ranks


class Metric(NamedTuple):
    """A key of a row. kind: its values, as JSON Schema (draft 2020-12). line: how the line of a
    run's progress shows the value, as a format string; chart: the title of its chart in the report;
    each is empty where the metric is not shown there."""

    kind: dict[str, Any]
    meaning: str
    unit: str = ""
    line: str = ""
    chart: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the key."""
        return {**self.kind, "description": self.meaning + f" ({self.unit})" * bool(self.unit)}


def _keys(metrics: Mapping[str, Metric], optional: tuple[str, ...] = (GENERATOR,)
          ) -> dict[str, Any]:
    """The kind of an object with these keys and no others."""
    return {"type": "object", "properties": {name: m.schema for name, m in metrics.items()},
            "required": [name for name in metrics if name not in optional],
            "additionalProperties": False}


PHASE_METRICS = {
    "imbalance_before": Metric(SIZE, "slowest rank / mean rank, as sampled (1: nobody waits)"),
    "imbalance_after": Metric(SIZE, "the same, as processed"),
    "mean_cost_kflop": Metric(SIZE, "cost of the mean rank", "kFLOP"),
    "moved_bytes": Metric(COUNT, "inputs and features that changed rank", "bytes"),
    "internode_bytes": Metric(COUNT, "those of them that changed node", "bytes"),
}
_PHASE = Metric(_keys(PHASE_METRICS), "One phase of the step, by the cost model.")
_COSTS = Metric(_keys({
    "linear": Metric(COUNT, "of a position", "FLOP"),
    "quadratic": Metric(COUNT, "of a position that attends to another", "FLOP"),
}), "The phase's cost model.")
_SLOWEST = Metric(_keys({
    "rank": Metric(COUNT, "its number"),
    "positions": Metric(COUNT, "how many it processed"),
    "example_ids": Metric(COUNTS, "data set indices of its longest items, at most three"),
    "lengths": Metric(COUNTS, "their positions"),
}), "The slowest rank of a phase.")
_MEASURED = {
    "step": Metric(COUNT, "the step that was measured"),
    "imbalance": Metric(_keys({p: Metric(SIZE, f"{p} phase") for p in EVERY_PHASE}),
                        "slowest rank / mean rank, by its time in all microbatches together"),
    "slowest_s": Metric(_keys({
        p: Metric(SIZE, f"{p} phase" if p in EVERY_PHASE else "moving rows and features")
        for p in (*EVERY_PHASE, "exchange")}), "time of the slowest rank: CPU time of its thread, "
        "or on the GPU, waiting for parameters included", "s"),
    "slowest": Metric(_keys(dict.fromkeys(EVERY_PHASE, _SLOWEST)),
                      "what the slowest rank had to do"),
    "slow_ranks": Metric(_keys(dict.fromkeys((*EVERY_PHASE, "exchange"), Metric(_keys({
        "ranks": Metric(COUNTS, "at most eight, the slowest first"),
        "s": Metric({"type": "array", "items": SIZE}, "their times", "s"),
    }), "The slowest ranks of a phase."))), "the ranks that took longest, as slowest_s"),
    "gain": Metric(_keys({
        "predicted": Metric(NUMBER, "by the cost model"),
        "measured": Metric(NUMBER, "by the times of the slowest ranks (slowest_s), each divided by "
                           "its predicted cost as sampled"),
    }) | {"type": ["object", "null"]}, "where that step is as_sampled: share of time that "
        "balancing saved in the balanced steps since the last such one; else null"),
}
_SCHEMA = {"schema": Metric({"type": "integer", "const": SCHEMA_VERSION}, "version of this format")}
METRICS = {
    "step": Metric(COUNT, "index of the step, from 0"),
    "as_sampled": Metric(FLAG, "the step ran unbalanced, for balance.measure_every"),
    "loss": Metric(MEASURED, "cross entropy per target of the whole step; null without targets, "
                   "and where it is not finite", line="loss {:.4f}"),
    "generator_loss": Metric(MEASURED, "mean squared error per number of the images that are made; "
                             "null in steps without any; only of models with a generator",
                             line="images {:.4f}", chart="Loss of images"),
    "grad_norm": Metric(MEASURED, "norm of the gradient before clipping"),
    "grad_norms": Metric(_keys({p: Metric(MEASURED, f"{p} parameters") for p in TRAIN_PARTS},
                               optional=TRAIN_PARTS),
                         "the same of each submodule that learns"),
    "lr": Metric(SIZE, "learning rate of train.lr"),
    "tokens_per_s": Metric(SIZE, "LLM tokens of all ranks", "tokens/s", line="{:.0f} tok/s",
                           chart="Throughput"),
    "mfu": Metric(MEASURED, "share of the GPUs' dense bf16 peak spent on useful FLOPs (no padding, "
                  "nothing recomputed); null where the peak is unknown"),
    "step_s": Metric(SIZE, "duration on rank 0, waiting for data included; on a GPU by "
                     "its own clock, from one report to the next", "s"),
    "update_s": Metric(SIZE, "CPU time of the slowest rank's thread to clip gradients, and to "
                       "update parameters in the step before; on a GPU the device's time, a step "
                       "later", "s"),
    "waiting_s": Metric(SIZE, "how long rank 0's thread waited for a core, for other ranks or for "
                        "its GPU; waiting for data is left out", "s"),
    "core_wait_s": Metric(MEASURED, "the part of waiting_s that it waited for a core; null where "
                          "unknown", "s"),
    "logging_s": Metric(SIZE, "time to write and show the row of the step before, on rank 0; not "
                        "part of step_s", "s"),
    "data_wait_s": Metric(SIZE, "how long the slowest rank waited for data", "s",
                          line="wait {:.3f} s"),
    "plan_ms": Metric(SIZE, "time to plan the step, hidden where data.prefetch > 0", "ms"),
    "exchange_ms": Metric(SIZE, "time of the slowest rank to move rows and features; on a GPU the "
                          "device's, of the step before", "ms"),
    "host_memory_gb": Metric(MEASURED, "host memory of the largest rank's process, without data "
                             "workers; null where unknown", "GB",
                             chart="Host memory"),
    "num_global_targets": Metric(COUNT, "labels the loss is a mean of"),
    "skipped_steps": Metric(COUNT, "steps so far that did not update the parameters"),
    "num_ranks": Metric(COUNT, "ranks of the run"),
    "phases": Metric(_keys(dict.fromkeys(EVERY_PHASE, _PHASE)), "per phase"),
    "costs": Metric(_keys(dict.fromkeys(EVERY_PHASE, _COSTS)),
                    "per phase, what the step was planned by"),
    "cpu_s": Metric(_keys(dict.fromkeys((*EVERY_PHASE, "exchange"), Metric(
        {"type": "array", "items": NUMBER}, "one number a rank"))),
        "per phase, CPU time of each rank's thread, forward and backward; above "
        f"{ALL_RANKS_UP_TO} ranks only in every {ALL_RANKS_EVERY}th step", "s"),
    "measured": Metric(_keys(_MEASURED) | {"type": ["object", "null"]}, "the phases as all ranks "
                       "measured them, forward and backward; on a GPU those of the step before, "
                       "or null"),
    "num_failed_media": Metric(COUNT, "rows and media of the step that could not be used"),
    "nonfinite": Metric(FLAG, "loss or gradient was not finite"),
    "stop_signal": Metric(COUNT, "signal to stop after this step; 0: none, 128: another run has "
                          "taken the run folder"),
    "save_due": Metric(FLAG, "the step was saved because of checkpoint.every_minutes"),
}
# Metrics that are one number, beside the step's index.
NUMBERS = tuple(name for name, metric in METRICS.items()
                if metric.kind in (SIZE, COUNT, MEASURED, FLAG) and name != "step")
STEP_ROW = {"title": "A step", "description": "One optimizer step of all ranks.",
            **_keys(_SCHEMA | METRICS, optional=("cpu_s", "generator_loss"))}
VALIDATION_ROW = {
    "title": "A validation",
    "description": "The held-out rows (data.num_validation), before the first and after the last "
                   "step, and as train.validate_every_steps says.",
    **_keys(_SCHEMA | {
        "step": Metric(COUNT, "steps done"),
        "validation_loss": Metric(MEASURED, "mean cross entropy per target; null without targets"),
        "validation_generator_loss": Metric(
            MEASURED, "mean squared error per number of the images that are made"),
    }, optional=("validation_generator_loss",))}
ROW_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A line of metrics.jsonl", "oneOf": [STEP_ROW, VALIDATION_ROW],
}
