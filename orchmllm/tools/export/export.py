"""Writes a checkpoint as the folder of a model (the command is orchmllm.tools.export.command).

Tensors are read from the checkpoint's shard files, those of one file at a time: neither ranks nor
memory for the model are needed, and nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from orchmllm.data.storage.replaced import put_in_place
from orchmllm.hf import tensors as hf_tensors
from orchmllm.hf.folder import read_json
from orchmllm.tools.export.adapters import write_model
from orchmllm.tools.export.checkpoints import check_files, checkpoint_in, model_of

NOTE = "orchmllm.json"


def export(checkpoint: Path, out: Path, *, dtype: str = "", max_file_bytes: int = 5 * 10**9,
           verify: bool = True, merged: bool = False, log: Callable[[str], None] = print) -> dict:
    """Writes the folder and returns the contents of orchmllm.json. checkpoint: its folder, or that
    of a run, whose newest one is taken. dtype: float32, bfloat16, ...; empty: as saved. merged:
    adapters become part of the weights. Raises ValueError or OSError; `out` is then what it was."""
    checkpoint = checkpoint_in(checkpoint)
    if verify:
        check_files(checkpoint, "export an earlier one, or see what is left with --no-verify")
    state = read_json(checkpoint / "state.json")
    log(f"checkpoint {checkpoint}: " + ("every file is what was saved (SHA-256)" if verify else
                                        "not compared with its manifest"))
    model, saved = model_of(state), hf_tensors.read_sharded(checkpoint)
    if merged and not model.lora.rank:
        raise ValueError(f"--merged: {checkpoint} has no adapters (model.lora): leave it out")
    staged = out.with_name(f".staged_{out.name}")
    shutil.rmtree(staged, ignore_errors=True)  # left by an export that was cut off
    staged.mkdir(parents=True)
    try:
        note = {"version": 1, "step": state["step"], "model": state["model"]}
        note |= write_model(
            model, state, saved, dtype=hf_tensors.DTYPES.get(dtype, ""), folder=staged,
            max_file_bytes=max_file_bytes, merged=merged, log=log)
        (staged / NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")
        put_in_place(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    log(f"written: {out}")
    return note
