"""Rows of metrics.jsonl, held to their JSON Schema."""

from __future__ import annotations

from pathlib import Path

from jsonschema import Draft202012Validator

from orchmllm.plan.assign import PHASES
from orchmllm.runtime.log_schema import NUMBERS, STEP_ROW, VALIDATION_ROW
from orchmllm.runtime.metrics import read_rows


def row_problems(row: dict) -> list[str]:
    """Where a row departs from the schema; empty for a good one."""
    schema = VALIDATION_ROW if "validation_loss" in row else STEP_ROW
    return [f"{e.json_path}: {e.message}" for e in Draft202012Validator(schema).iter_errors(row)]


def a_row(step: int, loss: float = 2.0) -> dict:
    """A step of two ranks, of which nothing was measured; without its schema."""
    phases = {p: {"imbalance_before": 1.5 + i, "imbalance_after": 1.0 + i / 8,
                  "mean_cost_kflop": 100.0, "moved_bytes": 1500, "internode_bytes": 500}
              for i, p in enumerate(PHASES)}
    return {**dict.fromkeys(NUMBERS, 0), "step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1,
            "tokens_per_s": 1234.5, "mfu": None, "step_s": 0.5, "data_wait_s": 0.005,
            "core_wait_s": None, "num_global_targets": 7, "num_ranks": 2, "phases": phases,
            "costs": {p: {"linear": 6, "quadratic": 1} for p in PHASES},
            "cpu_s": {p: [0.1, 0.2] for p in (*PHASES, "exchange")},
            "grad_norms": {"connector": 0.5, "llm": 0.75}, "measured": None, "nonfinite": False,
            "as_sampled": False, "save_due": False, "generator_loss": None,
            "host_memory_gb": 1.25}


def losses(folder: Path) -> dict[int, float]:
    """By step, of a run's last attempt at each."""
    return {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl")
            if "loss" in row}


def scalars(folder: Path, name: str) -> list:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload().Scalars(name)
