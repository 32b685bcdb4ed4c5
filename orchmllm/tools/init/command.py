"""Writes a recipe for a data file or folder, from what its rows are and what this machine has.

    orchmllm init my/data.jsonl
    orchmllm init my/data.jsonl --model models/Qwen3-VL-8B-Instruct
    orchmllm init my/data --model models/Qwen2-0.5B --model models/whisper-tiny
    orchmllm init --demo demo    # makes a small corpus, too

A --model is a folder of transformers' save_pretrained. That of a multimodal model is trained as it
is (docs/models.md has the families), with its own processor. Any other one is what a part of the
model starts from, and parts without one start from random weights; where neither the data nor a
model has a tokenizer, one is trained on the texts of the data.
"""

from __future__ import annotations

import json
from pathlib import Path

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.config.checkpoint_shapes import MODEL_TYPES
from orchmllm.hf.folder import read_json

RECIPES = next(path for path in (Path(__file__).parents[2] / "recipes",
                                 Path(__file__).parents[3] / "recipes") if path.is_dir())


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for what a recipe cannot be written of."""
    parser = command_parser("init", __doc__, (
        ("--out", Path, "the recipe (default: recipe.yaml, of the demo DIR/recipe.yaml)"),))
    parser.add_argument("data", nargs="?", metavar="DATA",
                        help="what data.path of a recipe names: a file, a pattern or a folder")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="FOLDER",
                        help="a whole multimodal model, or pretrained weights of one part")
    parser.add_argument("--demo", type=Path, metavar="DIR", help="folder of a new demo corpus")
    args = parser.parse_args(argv)
    if bool(args.data) == bool(args.demo) or (args.demo and args.model):
        parser.error("name DATA, or --demo DIR without --model")
    out = args.out or (args.demo / "recipe.yaml" if args.demo else Path("recipe.yaml"))
    tokenizer = out.with_name(f"{out.stem}.tokenizer.json")
    for path in (out, tokenizer):
        if path.exists():  # a run may need it
            raise ValueError(f"{path} exists already: name another recipe with --out, or remove it")
    if args.data and (Path(args.data) / "config.json").is_file():
        raise ValueError(f"{args.data} is the folder of a model: orchmllm init DATA --model "
                         f"{args.data}")
    if args.demo:
        write_demo(args.demo, out)
    else:
        from orchmllm.tools.init.recipe import write_recipe

        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_recipe(args.data, parts_of(args.model), out, tokenizer)
        except BaseException:  # also a Ctrl-C: what is there is not whole
            for path in (out, tokenizer):
                path.unlink(missing_ok=True)
            raise
    print(f"written: {out}; other recipes to start from are in {RECIPES}\nnext:\n"
          f"  orchmllm data stats {out}\n  orchmllm train {out}")
    return 0


def write_demo(folder: Path, out: Path) -> None:
    """The demo corpus and its recipe. Raises OSError, and ValueError for a folder that holds
    something."""
    from orchmllm.tools.init.demo import make_corpus

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--demo {folder} is not empty: name a new folder")
    print(make_corpus(folder))
    text = (RECIPES / "demo.yaml").read_text(encoding="utf-8")
    for key, value, own in (("dir", "runs/demo", folder / "run"), ("path", "demo_data", folder)):
        text = text.replace(f"  {key}: {value}\n", f"  {key}: {json.dumps(str(own))}\n")
    out.write_text(text, encoding="utf-8")


def parts_of(models: list[Path]) -> dict[str, Path]:
    """part of the model -> folder, or "" -> that of a whole model. Raises ValueError for folders
    that do not go together, or that nothing can start from."""
    found: dict[str, Path] = {}
    for folder in models:
        try:
            type_ = read_json(folder / "config.json").get("model_type")
        except ValueError as error:
            raise ValueError(f"--model {folder}: {error}") from error
        part = next((kind for kind, types in MODEL_TYPES.items() if type_ in types), "")
        if part in found:
            raise ValueError(f"--model {folder}: its model_type {type_!r} is of " + (
                f"model.{part} again" if part else "a second whole model"))
        found[part] = folder
    if "" in found:
        _check_whole(found[""], alone=len(found) == 1)
    return found


def _check_whole(folder: Path, alone: bool) -> None:
    """Raises ValueError if the folder has no model that can be trained as it is."""
    from orchmllm.config.model import ModelConfig
    from orchmllm.hf.sources import find_sources

    try:
        find_sources(ModelConfig(pretrained=str(folder)))
    except ValueError as error:
        known = "; ".join(f"{kind}: {', '.join(types)}" for kind, types in MODEL_TYPES.items())
        raise ValueError(f"--model {folder} is of no part of the model, for which there are "
                         f"{known}; and as a whole model: {error}") from error
    if not alone:
        raise ValueError(f"--model {folder} is a whole model, which has all parts: name it alone")
