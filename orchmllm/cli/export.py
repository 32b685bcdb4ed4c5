"""Writes a checkpoint as Hugging Face folders.

    orchmllm export --checkpoint runs/x/checkpoints/step_00001000 --out exported

exported/llm is a Qwen2 model with its tokenizer, exported/audio a Whisper encoder, exported/vision
the vision tower of Qwen2-VL (or our own encoder, which has no class in transformers);
connectors.safetensors has the layers between, orchmllm.json says what is what. A run starts from
them with model.llm.pretrained=exported/llm and so on: docs/weights.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from orchmllm.hf.export import NOTE, export
from orchmllm.hf.writer import DTYPES


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchmllm export", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="FOLDER",
                        help="run.dir/checkpoints/step_...")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER",
                        help="folder to write; it appears when it is complete")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--dtype", choices=list(DTYPES), default="",
                        help="convert the weights (default: as saved)")
    parser.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB",
                        help="larger models are split into files of at most so many 1e9 bytes "
                        "(default 5)")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH",
                        help="tokenizer.json or its folder (default: that of the run)")
    parser.add_argument("--no-verify", action="store_true",
                        help="do not compare the checkpoint's files with its manifest")
    args = parser.parse_args(argv)
    if args.max_file_gb <= 0:
        parser.error(f"--max-file-gb {args.max_file_gb}: must be above 0")
    return args


def _refusal(out: Path, overwrite: bool) -> str:
    """Why nothing may be written to `out`; empty if it may."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return ""
    if not (out / NOTE).is_file():
        return f"--out {out} exists and is no export: give another folder"
    return "" if overwrite else f"--out {out} is an export already: add --overwrite to replace it"


def main(argv: list[str]) -> int:
    args = parse(argv)
    refusal = _refusal(args.out, args.overwrite)
    if refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    try:
        export(args.checkpoint, args.out, dtype=args.dtype, tokenizer=args.tokenizer,
               max_file_bytes=int(args.max_file_gb * 1e9), verify=not args.no_verify)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    return 0
