"""Rows of metrics.jsonl, held to their JSON Schema."""

from __future__ import annotations

from jsonschema import Draft202012Validator

from orchmllm.runtime.log_schema import STEP_ROW, VALIDATION_ROW


def row_problems(row: dict) -> list[str]:
    """Where a row departs from the schema; empty for a good one."""
    schema = VALIDATION_ROW if "validation_loss" in row else STEP_ROW
    return [f"{e.json_path}: {e.message}" for e in Draft202012Validator(schema).iter_errors(row)]
