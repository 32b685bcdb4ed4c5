"""Writes a checkpoint as Hugging Face folders.

    orchmllm export runs/x --out exported
    orchmllm export runs/x/checkpoints/step_00001000 --out exported

exported/llm is a Qwen2 model, exported/tokenizer its tokenizer, exported/audio a Whisper encoder,
exported/vision our own encoder; connectors.safetensors has the layers between, orchmllm.json says
what is what. `orchmllm generate exported` answers with all of it, and a run starts from it:
docs/weights.md. Of a run with model.pretrained or model.config, exported is the model and its
processor, with model.lora an adapter folder for peft: docs/models.md.
"""

from __future__ import annotations

from pathlib import Path

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.hf.tensors import DTYPES
from orchmllm.tools.export.export import NOTE, export


def check_out(out: Path, overwrite: bool) -> None:
    """Raises ValueError if nothing may be written to `out`."""
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
        ("--tokenizer", Path, "tokenizer.json or its folder (default: that of the run)"),
        ("--no-verify", False, "do not compare the checkpoint's files with its manifest")))
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="FOLDER",
                        help="run.dir, whose newest checkpoint is taken, or one of its checkpoints")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER",
                        help="folder to write; it appears when it is complete")
    parser.add_argument("--dtype", choices=list(DTYPES), default="",
                        help="convert the weights (default: as saved)")
    args = parser.parse_args(argv)
    if not args.max_file_gb > 0:
        parser.error(f"--max-file-gb {args.max_file_gb}: must be above 0")
    if not args.checkpoint:
        parser.error("FOLDER is missing: name the run.dir of a run, or a checkpoint")
    check_out(args.out, args.overwrite)
    export(args.checkpoint, args.out, dtype=args.dtype, tokenizer=args.tokenizer,
           max_file_bytes=int(args.max_file_gb * 1e9), verify=not args.no_verify,
           merged=args.merged)
    return 0
