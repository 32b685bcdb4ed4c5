"""Writes a checkpoint as Hugging Face folders (the command is orchmllm.tools.export.command).

Tensors are read from the checkpoint's shard files, those of one file at a time: neither ranks nor
memory for the model are needed, and nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from orchmllm.config.model import ModelConfig
from orchmllm.hf import tensors as hf_tensors
from orchmllm.hf.folder import read_json
from orchmllm.hf.sources import POSITIONS
from orchmllm.models.names import PARTS, named
from orchmllm.models.spec import spec_of
from orchmllm.tools.export.checkpoints import checkpoint_in, is_other, model_of, tokenizer_of

VERSION = 1  # of orchmllm.json
NOTE = "orchmllm.json"


def export(checkpoint: Path, out: Path, *, dtype: str = "", max_file_bytes: int = 5 * 10**9,
           tokenizer: Path | None = None, verify: bool = True, merged: bool = False,
           log: Callable[[str], None] = print) -> dict:
    """Writes the folders and returns the contents of orchmllm.json. checkpoint: its folder, or that
    of a run, whose newest one is taken. dtype: float32, bfloat16, ...; empty: as saved. tokenizer:
    instead of the run's. merged: adapters become part of the weights. Raises ValueError or
    OSError; `out` is then what it was."""
    from orchmllm.runtime.checkpoint import problem_of

    checkpoint = checkpoint_in(checkpoint)
    state = read_json(checkpoint / "state.json")
    if verify and (problem := problem_of(checkpoint)):
        raise ValueError(f"checkpoint {checkpoint}: {problem}: export an earlier one, or see what "
                         "is left with --no-verify")
    log(f"checkpoint {checkpoint}: " + ("every file is what was saved (SHA-256)" if verify else
                                        "not compared with its manifest"))
    model, saved = model_of(state), hf_tensors.read_sharded(checkpoint)
    short = hf_tensors.DTYPES[dtype] if dtype else ""
    if merged and not model.lora.rank:
        raise ValueError(f"--merged: {checkpoint} has no adapters (model.lora): leave it out")
    staged, old = (out.parent / f".{what}_{out.name}" for what in ("staged", "old"))
    for folder in (staged, old):  # left by an export that was cut off
        shutil.rmtree(folder, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        note = {"version": VERSION, "step": state["step"], "model": state["model"]}
        note |= spec_of(model).export(
            model, state, saved, dtype=short, max_file_bytes=max_file_bytes, folder=staged,
            tokenizer=tokenizer, merged=merged, log=log)
        (staged / NOTE).write_text(json.dumps(note, indent=1), encoding="utf-8")
        _publish(staged, out, old)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    log(f"written: {out}")
    return note


def _publish(staged: Path, out: Path, old: Path) -> None:
    """Renames `out` to `old`, if it is there, and `staged` to `out`. Raises OSError; `out` is then
    what it was."""
    if out.exists():
        out.rename(old)
    try:
        staged.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise


def _tensors(part: str, model: ModelConfig, saved: dict[str, hf_tensors.FileTensor],
             dtype: str) -> list[hf_tensors.FileTensor]:
    """Those of a part. dtype: safetensors' name, empty: as saved. Raises ValueError naming one that
    the checkpoint lacks."""
    out = []
    for n in named(part, model):
        if f"model.{n.name}" not in saved:
            raise ValueError(f"the checkpoint lacks model.{n.name}: it is of another model "
                             "than its state.json says")
        out.append(hf_tensors.renamed(saved[f"model.{n.name}"], n.hf, n.shape, dtype))
    return [*out, _positions(model, out[0].dtype)] if part == "audio" else out


def write_parts(
    model: ModelConfig, state: dict, saved: dict[str, hf_tensors.FileTensor], *, dtype: str,
    max_file_bytes: int, folder: Path, tokenizer: Path | None, merged: bool,
    log: Callable[[str], None],
) -> dict:
    """Writes the three parts, the connectors and the tokenizer to `folder`; returns what
    orchmllm.json says of them. saved: of the checkpoint, whose state.json is `state`. The rest as
    in `export`."""
    from orchmllm.hf.describe import CLASSES, part_json, started_from

    tensors = {part: _tensors(part, model, saved, dtype) for part in (*PARTS, "connectors")}
    note: dict = {}
    for part in PARTS:
        _, problem = started_from(part, model)
        if problem:
            log(f"warning: {problem}")
        (folder / part).mkdir()
        written = hf_tensors.TORCH_DTYPES[tensors[part][0].dtype]
        for name, contents in part_json(part, model, written).items():
            (folder / part / name).write_text(json.dumps(contents, indent=1), encoding="utf-8")
        files = hf_tensors.write_folder(folder / part, tensors[part], max_file_bytes)
        name = CLASSES[part]
        note[part] = {"class": f"transformers.{name}" if name else None,
                      "tensors": len(tensors[part]), "files": files}
        what = name or "orchmllm.models.vision.VisionEncoder (no class in transformers)"
        log(_line(f"{part}/", tensors[part], files, what))
    hf_tensors.write_file(folder / "connectors.safetensors", tensors["connectors"])
    log(_line("connectors.safetensors", tensors["connectors"], 1, "names of orchmllm"))
    return {"parts": note, "tokenizer": _write_tokenizer(state, tokenizer, folder, log)}


def _line(name: str, tensors: list[hf_tensors.FileTensor], files: int, what: str) -> str:
    size = sum(t.num_bytes for t in tensors) / 1e6
    return (f"{name:<24}{len(tensors):>5} tensors {size:>10.1f} MB in {files} "
            f"file{'s' if files > 1 else ' '}  {what}")


def _positions(model: ModelConfig, dtype: str) -> hf_tensors.FileTensor:
    """Whisper's position table, which is computed here and stored there."""
    import torch

    from orchmllm.hf.describe import positions_of
    from orchmllm.models.audio import sinusoids

    table = sinusoids(torch.arange(positions_of(model)), model.audio.hidden_size,
                      getattr(torch, hf_tensors.TORCH_DTYPES[dtype]))
    return hf_tensors.FileTensor(POSITIONS, dtype, tuple(table.shape), lambda: table)


def _write_tokenizer(state: dict, given: Path | None, folder: Path,
                     log: Callable[[str], None]) -> str | None:
    """Copies the tokenizer to `folder`/llm, and to a folder of its own; returns where it is from,
    None if it is not known. state: of the checkpoint, which says where its run read the tokenizer,
    and its digest."""
    from orchmllm.hf.tokenizer import copy_tokenizer, write_ends

    try:
        path = given or tokenizer_of(state)
        names = copy_tokenizer(path, folder / "llm")
        (folder / "tokenizer").mkdir()
        copy_tokenizer(path, folder / "tokenizer", plain=True)
    except ValueError as e:
        if given is not None:
            raise
        log(f"warning: the export has no tokenizer: {str(e).splitlines()[-1].strip()}")
        return None
    log(f"tokenizer/ and llm/ have the tokenizer of {path}: {', '.join(names)}")
    try:
        if told := write_ends(path, folder / "llm"):
            log(f"warning: llm/: {told}")
    except Exception as error:  # transformers raises many types on a tokenizer that it cannot load
        log(f"warning: llm/: eos_token_id and pad_token_id are not written: {error}")
    if given is not None and is_other(given, state):
        log(f"warning: --tokenizer {given} differs from the one that the checkpoint was trained "
            "with (tokenizer.json, chat template or special tokens): the same text may be other "
            "token ids")
    return str(path)
