"""Writes a checkpoint as the folder of a model that transformers reads.

    orchmllm export runs/x --out exported
    orchmllm export runs/x/checkpoints/step_00001000 --out exported

exported has the model with its processor, and orchmllm.json, which says what it is of; of a run
with model.lora it is an adapter folder for peft. Of a composed model exported/llm, exported/vision
and exported/audio can be read alone. `orchmllm generate exported` asks it, and model.pretrained of
another run starts from it: docs/weights.md.
"""

from __future__ import annotations

from pathlib import Path

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.hf.tensors import DTYPES
from orchmllm.tools.export.export import NOTE, export


def check_out(out: Path, overwrite: bool) -> None:
    """Raises ValueError if nothing may be written to `out`."""
    for folder in out.resolve().parents:
        if folder.name == "checkpoints" and (folder.parent / "recipe.yaml").is_file():
            raise ValueError(f"--out {out} lies among the checkpoints of a run, which deletes old "
                             "ones: give another folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / NOTE).is_file():
        raise ValueError(f"--out {out} exists and is no export: give another folder")
    if not overwrite:
        raise ValueError(f"--out {out} is an export already: add --overwrite to replace it")


@in_one_line
def main(argv: list[str]) -> int:
    parser = command_parser("export", __doc__, (
        ("--overwrite", False, "replace an earlier export"),
        ("--merged", False, "of a run with model.lora: the whole model, adapters merged into it"),
        ("--max-file-gb", 5.0, "larger models are split into files of at most so many 1e9 bytes"),
        ("--no-verify", False, "do not compare the checkpoint's files with its manifest")))
    parser.add_argument("checkpoint", type=Path, metavar="FOLDER",
                        help="run.dir, whose newest checkpoint is taken, or one of its checkpoints")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER",
                        help="folder to write; it appears when it is complete")
    parser.add_argument("--dtype", choices=list(DTYPES), default="",
                        help="convert the weights (default: as saved)")
    args = parser.parse_args(argv)
    if not args.max_file_gb > 0:
        parser.error(f"--max-file-gb {args.max_file_gb}: must be above 0")
    check_out(args.out, args.overwrite)
    export(args.checkpoint, args.out, dtype=args.dtype, merged=args.merged,
           max_file_bytes=int(args.max_file_gb * 1e9), verify=not args.no_verify)
    return 0
