"""Writes the folder of a model that is composed of a vision tower, an audio tower and an LLM.

    orchmllm compose --vision models/siglip2 --audio models/whisper-large-v3 \\
        --llm models/Qwen3-8B --out models/mine
    orchmllm init my/data.jsonl --model models/mine

Each is a folder of transformers' save_pretrained, and --vision or --audio may be left out. Weights
are not copied: they are read from these folders when a run starts, and the connectors between the
parts start from run.seed. If none of the folders has weights, the model is one for model.config.
"""

from __future__ import annotations

from pathlib import Path

from orchmllm.cli.options import command_parser, in_one_line


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for parts that cannot be used."""
    parser = command_parser("compose", __doc__, (
        ("--llm", Path, "folder of the causal LLM, with its tokenizer and chat template"),
        ("--vision", Path, "folder of the vision tower, or of a model that has one, with its image "
         "processor"),
        ("--audio", Path, "folder of a Whisper model, with its feature extractor"),
        ("--generator", Path, "folder of what makes images (docs/generator.md)"),
        ("--vae", Path, "folder of its VAE (default: it makes pixels)"),
        ("--out", Path, "the folder, which must not exist")))
    parser.add_argument("--tiles", type=int, default=0, metavar="N", help="cut an image into at "
                        "most N tiles of the tower's size (default: it is resized to that size)")
    parser.add_argument("--audio-stack", type=int, default=2, metavar="N", help="positions of a "
                        "clip, of 20 ms, that become one of the LLM (default: 2)")
    parser.add_argument("--audio-packed", action="store_true", help="encode the clips of a Whisper "
                        "model without the silence after them, which it has seen while it was "
                        "trained (default: as windows of 30 s)")
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="a Jinja template that "
                        "writes <|image_pad|> and <|audio_pad|> for media, instead of the LLM's")
    parser.add_argument("--side", type=int, default=16, metavar="N",
                        help="N x N pixels are one of its rows (default: 16)")
    parser.add_argument("--max-pixels", type=int, default=512**2, metavar="N",
                        help="of an image (default: 262144)")
    args = parser.parse_args(argv)
    if not args.llm or not args.out or not (args.vision or args.audio):
        parser.error("name --llm, --out, and --vision or --audio")
    if args.tiles < 0 or min(args.audio_stack, args.side, args.max_pixels) < 1:
        parser.error("--tiles cannot be below 0, nor --audio-stack, --side or --max-pixels below 1")
    parser.refuse_without(args, "--vision", "--tiles")
    parser.refuse_without(args, "--audio", "--audio-stack", "--audio-packed")
    parser.refuse_without(args, "--generator", "--vae", "--side", "--max-pixels")
    if args.out.exists():
        raise ValueError(f"--out {args.out} exists already: name a new folder")
    from orchmllm.hf.folder import PARTS
    from orchmllm.tools.compose.write import Parts, compose

    template = args.chat_template.read_text(encoding="utf-8") if args.chat_template else ""
    config = compose(Parts(args.llm, args.vision, args.audio, args.tiles, args.audio_stack,
                           template, args.audio_packed, args.generator, args.vae, args.side,
                           args.max_pixels), args.out)
    key = "pretrained" if (args.out / PARTS).is_file() else "config"
    parts = [f"{kind}: {part.model_type}" for kind in ("vision", "audio", "text")
             if (part := getattr(config, f"{kind}_config", None))]
    print(f"written: {args.out} ({', '.join(parts)}); in a recipe:\n"
          f"model:\n  {key}: {args.out}")
    return 0
