"""Answers a question about images, clips and videos with a model that was trained here, or with any
model of transformers that could be. The answer goes to the standard output.

    orchmllm generate runs/mine --image cat.jpg "What is this?"
    orchmllm generate exported --image cat.jpg --audio purr.wav "What is it?"
    orchmllm generate models/Qwen2-VL-2B --image cat.jpg "What is this?"

FOLDER is the run.dir of a run, of which the newest checkpoint is taken, one of its checkpoints, an
export, or a folder of transformers' save_pretrained, whose code is never run. Media come before the
question, in their order. A model of text alone is asked without media. With a generator
(docs/generator.md) answers have images, which --out writes.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image

from orchmllm.cli.options import Parser, command_parser, in_one_line, new_file
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError, Medium, RowError, VideoSampling
from orchmllm.data.media.video import expand
from orchmllm.hf.tensors import DTYPES
from orchmllm.plan.layout import AUDIO, VISION


@in_one_line
def main(argv: list[str]) -> int:
    parser = command_parser("generate", __doc__, (
        ("--max-tokens", 256, "tokens of the answer at most"),
        ("--temperature", 0.0, "tokens are drawn; 0: the most likely is taken"),
        ("--top-p", 1.0, "tokens come from those of so much probability"),
        ("--seed", 0, "of what is drawn"),
        ("--out", new_file, "the answer's image; several are numbered"),
        ("--steps", 50, "steps in which an image is made"),
        ("--guidance", 2.0, "of an image by its condition; 1: as learnt"),
        ("--video-fps", 1.0, "frames that are read of a second of video"),
        ("--video-frames", 0, "frames that are read of a video; 0: by --video-fps"),
        ("--video-max-frames", 64, "most frames of a video"),
        ("--video-audio", False, "read the sound of a video after its frames")))
    parser.usage = "%(prog)s [options] FOLDER QUESTION"
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("question", metavar="QUESTION")
    for flag, read in (("--image", partial(_medium, VISION)), ("--audio", partial(_medium, AUDIO)),
                       ("--video", lambda path: [path])):
        parser.add_argument(flag, dest="media", action="extend", default=[], metavar="FILE",
                            type=read, help="any number of them")
    parser.add_argument("--dtype", choices=list(DTYPES), default="", metavar="DTYPE",
                        help=f"{', '.join(DTYPES)} (default: as saved)")
    parser.add_argument("--size", type=_size, metavar="WxH",
                        help="of an image, at most (default: a square, as large as those that "
                        "were learnt may be)")
    args = parser.parse_args(argv)
    if any("\ud800" <= character <= "\udfff" for character in args.question):
        parser.error(f"QUESTION {args.question!r} is no UTF-8")
    if not args.temperature >= 0 or not 0 < args.top_p <= 1:
        parser.error(f"--temperature {args.temperature} --top-p {args.top_p}: must be at least 0, "
                     "and above 0 and at most 1")
    if args.top_p < 1 and not args.temperature:
        parser.error("--top-p needs --temperature above 0: at 0 nothing is drawn")
    parser.refuse_without(args, "--out", "--steps", "--guidance", "--size")
    if not math.isfinite(args.guidance):
        parser.error(f"--guidance {args.guidance}: must be a finite number")
    if args.out and Image.registered_extensions().get(args.out.suffix.lower()) not in Image.SAVE:
        parser.error(f"--out {args.out}: {args.out.suffix or 'no ending'} is no format of images; "
                     "name a .png")
    _read_videos(parser, args)
    print(_answer(args, lambda text: print(text, file=sys.stderr, flush=True)))
    return 0


def _answer(args: Namespace, log: Callable[[str], None]) -> str:
    from orchmllm.tools.export.checkpoints import checkpoint_in
    from orchmllm.tools.generate.whole import ADAPTERS, answer_run, answer_whole

    if (args.folder / "state.json").is_file() or (args.folder / "checkpoints").is_dir():
        return answer_run(args, checkpoint_in(args.folder), log)
    if not any((args.folder / name).is_file() for name in ("config.json", ADAPTERS)):
        raise ValueError(f"{args.folder} is no run.dir with checkpoints, no checkpoint, no export "
                         "and no folder of a model")
    return answer_whole(args, log)


def _medium(modality: int, path: str) -> list[Medium]:
    """Raises ArgumentTypeError for what is none, before a model is loaded."""
    medium = Medium(modality, path, path)
    try:
        (image_header if modality == VISION else audio_header)(medium)
    except MediaError as error:
        raise ArgumentTypeError(f"{path}: {error.reason}") from error
    return [medium]


def _size(text: str) -> tuple[int, int]:
    width, found, height = text.partition("x")
    if not (found and width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ArgumentTypeError(f"{text!r} is no size: give pixels, such as 256x192")
    return int(width), int(height)


def _read_videos(parser: Parser, args: Namespace) -> None:
    """Puts the frames that training would read into args.media, in place of the videos' paths."""
    names = [f"video_{name}" for name in VideoSampling._fields]  # as the keys of a source
    args.video = any(isinstance(medium, str) for medium in args.media)
    parser.refuse_without(args, "--video", *("--" + name.replace("_", "-") for name in names))
    if not 0 < args.video_fps <= 240:
        parser.error(f"--video-fps {args.video_fps}: must be above 0 and at most 240")
    sampling, media = VideoSampling(*(getattr(args, name) for name in names)), []
    for medium in args.media:
        try:
            media += [medium] if isinstance(medium, Medium) else expand(
                Medium(VISION, medium, medium), sampling, {})
        except RowError as error:
            parser.error(f"argument --video: {medium}: {error.reason}")
    args.media = media
