"""Writes a recipe for a data file or folder, from what its rows are and what this machine has.

    orchmllm init my/data.jsonl
    orchmllm init my/data.jsonl --model models/Qwen3-VL-8B-Instruct
    orchmllm init my/data --model models/Qwen2-0.5B --model models/whisper-tiny
    orchmllm init --demo demo    # makes a small corpus, too

A --model is a folder of transformers' save_pretrained. That of a multimodal model is trained as it
is (docs/models.md has the families), with its own processor. A causal LLM, a vision tower and an
audio tower are composed to one model (see orchmllm compose). Without --model a small one is
composed that starts from random weights; where no tokenizer lies beside the data, one is trained on
their texts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.config.strict_yaml import quoted

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
                        help="a whole multimodal model, or one of the parts of a composition")
    parser.add_argument("--demo", type=Path, metavar="DIR", help="folder of a new demo corpus")
    parser.add_argument("--generate", action="store_true", help="of the demo: some answers are "
                        "images, and the model has a generator, which learns to make them")
    args = parser.parse_args(argv)
    if bool(args.data) == bool(args.demo) or (args.demo and args.model):
        parser.error("name DATA, or --demo DIR without --model")
    if args.generate and not args.demo:
        parser.error("--generate is of --demo; of other data, name a model with a generator "
                     "(orchmllm compose --generator)")
    out = args.out or (args.demo / "recipe.yaml" if args.demo else Path("recipe.yaml"))
    made = [out.with_name(f"{out.stem}.{name}") for name in ("tokenizer.json", "model")]
    for path in (out, *made):
        if path.exists():  # a run may need it
            raise ValueError(f"{path} exists already: name another recipe with --out, or remove it")
    if args.data and (Path(args.data) / "config.json").is_file():
        raise ValueError(f"{args.data} is the folder of a model: orchmllm init DATA --model "
                         f"{args.data}")
    if args.demo:
        write_demo(args.demo, out, args.generate)
    else:
        from orchmllm.tools.init.recipe import write_recipe

        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_recipe(args.data, parts_of(args.model), out, *made)
        except BaseException:  # also a Ctrl-C: what is there is not whole
            for path in (out, made[0]):
                path.unlink(missing_ok=True)
            shutil.rmtree(made[1], ignore_errors=True)
            raise
    print(f"written: {out}\nother recipes to start from: {RECIPES}\nnext:\n"
          f"  orchmllm data stats {out}\n  orchmllm train {out}")
    return 0


def write_demo(folder: Path, out: Path, generate: bool) -> None:
    """The demo corpus and its recipe. Raises OSError, and ValueError for a folder that holds
    something."""
    from orchmllm.tools.init.demo import make_corpus

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--demo {folder} is not empty: name a new folder")
    print(make_corpus(folder, generate=generate))
    text = (RECIPES / "demo.yaml").read_text(encoding="utf-8")
    for key, value, own in (("dir", "runs/demo", folder / "run"), ("path", "demo_data", folder),
                            ("config", "demo_data/model", folder / "model")):
        text = text.replace(f"  {key}: {value}", f"  {key}: {quoted(str(own))}")
    out.write_text(text, encoding="utf-8")


def parts_of(models: list[Path]) -> dict[str, Path]:
    """part of a composition -> folder, or "" -> that of a whole model. Raises ValueError for
    folders that do not go together, or that nothing can start from."""
    found: dict[str, Path] = {}
    for folder in models:
        try:
            part = _part_of(folder)
        except ValueError as e:
            raise ValueError(f"--model {folder}: {str(e).removeprefix(f'{folder}: ')}") from e
        if part in found:
            raise ValueError(f"--model {folder} is " + (
                f"the second {part} part" if part else "a second whole model"))
        found[part] = folder
    if "" in found and len(found) > 1:
        raise ValueError(f"--model {found['']} is a whole model, which has all parts: name it "
                         "alone")
    if found and not found.keys() & {"", "llm"}:
        raise ValueError("no --model is a causal LLM, which a composition needs: name one")
    return found


def _part_of(folder: Path) -> str:
    """llm, audio or vision; empty: a whole model. Raises ValueError."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    from orchmllm.tools.compose.write import read_part

    config = read_part(AutoConfig, folder)
    if type(config) not in AutoModelForMultimodalLM._model_mapping:
        if hasattr(config, "num_mel_bins"):  # first: Whisper's decoder counts as a causal LLM
            return "audio"
        return "llm" if type(config) in AutoModelForCausalLM._model_mapping else "vision"
    from orchmllm.config.model import ModelConfig
    from orchmllm.hf.sources import find_sources

    find_sources(ModelConfig(pretrained=str(folder)))
    return ""
