"""What a row of metrics.jsonl holds, as JSON Schema (draft 2020-12): the source of
docs/metrics.md and of docs/metrics.schema.json, and what the tests hold real rows to.

A key that is added needs a line here. A key that goes away or changes its meaning raises
SCHEMA_VERSION.
"""

from __future__ import annotations

from typing import Any

from orchmllm.config.recipe import TRAIN_PARTS
from orchmllm.plan.assign import PHASES

SCHEMA_VERSION = 1


def _number(doc: str, least: float | None = None) -> dict:
    return {"type": "number", "description": doc, **({} if least is None else {"minimum": least})}


def _count(doc: str) -> dict:
    return {"type": "integer", "minimum": 0, "description": doc}


def _counts(doc: str) -> dict:
    return {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": doc}


def _measured(doc: str) -> dict:
    return {"type": ["number", "null"], "description": doc}


def _object(doc: str, properties: dict, optional: tuple[str, ...] = ()) -> dict:
    return {"type": "object", "description": doc, "properties": properties,
            "required": [k for k in properties if k not in optional],
            "additionalProperties": False}


_PHASE = _object("One phase of the step, by the cost model.", {
    "imbalance_before": _number("slowest rank / mean rank, as sampled (1: nobody waits)", 0),
    "imbalance_after": _number("the same, as processed", 0),
    "mean_cost_kflop": _number("cost of the mean rank in kFLOP", 0),
    "moved_bytes": _count("bytes of inputs and features that changed rank, all ranks"),
    "internode_bytes": _count("those of them that changed node"),
})
_COSTS = _object("The phase's cost model.", {
    "linear": _count("of a position, in FLOP"),
    "quadratic": _count("of a position that attends to another, in FLOP"),
})
_SLOWEST = _object("The slowest rank of a phase.", {
    "rank": _count("which one"),
    "positions": _count("that it processed"),
    "example_ids": _counts("dataset indices of its longest items, at most three"),
    "lengths": _counts("their positions"),
})
_CPU = {"type": "array", "items": {"type": "number"}}
_VERSION = {"schema": {"type": "integer", "const": SCHEMA_VERSION,
                       "description": "version of this format"}}
STEP_ROW = {"title": "A step", **_object("One optimizer step of all ranks.", {
    **_VERSION,
    "step": _count("index of the step, from 0"),
    "loss": _measured("cross entropy per target, over the whole step; null where the step has no "
                      "target (num_global_targets is 0) or the loss is not finite"),
    "grad_norm": _measured("norm of the gradient before clipping"),
    "grad_norms": _object("the same by submodule; those that do not learn are left out", {
        p: _measured(f"{p} parameters") for p in TRAIN_PARTS}, optional=TRAIN_PARTS),
    "lr": _number("learning rate of train.lr", 0),
    "tokens_per_s": _number("LLM tokens of all ranks per second", 0),
    "mfu": _measured("share of the GPUs' dense bf16 peak spent on useful FLOPs (no padding, "
                     "nothing recomputed); null where the peak is unknown, as on a CPU"),
    "step_s": _number("seconds of the step on rank 0, waiting for data included", 0),
    "data_wait_s": _number("seconds the slowest rank waited for its data", 0),
    "plan_ms": _number("milliseconds to plan the step; hidden behind the step before when "
                       "data.prefetch > 0", 0),
    "exchange_ms": _number("milliseconds of moving rows and features, slowest rank; on a GPU "
                           "as the device needed in the step before", 0),
    "num_global_targets": _count("labels the loss is a mean of"),
    "skipped_steps": _count("steps so far that did not update the parameters"),
    "phases": _object("per phase", dict.fromkeys(PHASES, _PHASE)),
    "costs": _object("per phase, what the step was planned by: derived from the model, or fitted "
                     "(balance.calibrate_steps)", dict.fromkeys(PHASES, _COSTS)),
    "cpu_s": _object("per phase, CPU seconds of each rank's thread, forward and backward", {
        p: {**_CPU, "description": "one number a rank"} for p in (*PHASES, "exchange")}),
    "measured": _object("the phases as all ranks measured them, forward and backward; on a GPU "
                        "those of the step before, and null where there is none", {
        "step": _count("the step that was measured"),
        "imbalance": _object("slowest rank / mean rank, beside phases.*.imbalance_after", {
            p: _number(f"{p} phase", 0) for p in PHASES}),
        "slowest_s": _object("seconds of the slowest rank: CPU time of its thread, or time on the "
                             "GPU, waiting for parameters included", {
            p: _number(f"{p} phase" if p in PHASES else "moving rows and features", 0)
            for p in (*PHASES, "exchange")}),
        "slowest": _object("what the slowest rank had to do", dict.fromkeys(PHASES, _SLOWEST)),
    }) | {"type": ["object", "null"]},
    "preprocessed": _object("where data.preprocess is set: what all ranks asked for in the step", {
        "remote": _count("examples that servers read and decoded"),
        "local": _count("examples that ranks read themselves, because no server answered"),
    }),
    "num_failed_media": _count("media of the step that could not be decoded"),
    "nonfinite": {"type": "boolean", "description": "loss or gradient was not finite"},
    "stop_signal": _count("signal that asked a rank to stop after this step, 0: none, "
                          "128: another run has taken the run folder"),
}, optional=("preprocessed",))}
VALIDATION_ROW = {"title": "A validation", **_object(
    "The held-out rows (data.num_validation), before the first and after the last step, and as "
    "train.validate_every_steps says.", {
        **_VERSION,
        "step": _count("steps done"),
        "validation_loss": _measured("mean cross entropy per target; null without targets"),
    })}
ROW_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "A line of metrics.jsonl", "oneOf": [STEP_ROW, VALIDATION_ROW],
}
