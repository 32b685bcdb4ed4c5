"""Writes the reference pages that are made from the code: docs/recipe.md (every key of a recipe)
and docs/metrics.md (every key of a row of metrics.jsonl) with its JSON Schema beside it, and
docs/formats.md (rows, images and clips that are read). docs/balancing.md has one table that is made
here.

    python scripts/make_recipe_reference.py [--check]

--check: writes nothing; exit code 1 if a page is not what would be written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path

from orchmllm.config import strict_yaml
from orchmllm.config.recipe import Recipe
from orchmllm.config.schema import Key, Leaf, leaves, sections
from orchmllm.data.formats.row_formats import FORMATS, RowFormat
from orchmllm.data.media.containers import AUDIO_NAMES, VIDEO_NAMES
from orchmllm.data.media.frames import MAX_VIDEO_FRAMES, MAX_VIDEO_PIXELS, MAX_VIDEO_S
from orchmllm.data.media.headers import (
    MAX_ASPECT,
    MAX_AUDIO_S,
    MAX_IMAGE_PIXELS,
    MIN_AUDIO_HZ,
)
from orchmllm.data.media.kinds import CONTAINERS, KINDS, REFUSED, VIDEO, Kind
from orchmllm.data.media.medium import MAX_MEMBER_BYTES
from orchmllm.data.media.parts import KEYS, Meaning
from orchmllm.plan.balance import POLICIES
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.runtime.log_schema import ROW_SCHEMA, SCHEMA_VERSION

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- Made by scripts/make_recipe_reference.py from the code: change that. -->\n"
RECIPE_HEAD = """# Recipe

A recipe is a YAML file of sections. It has to name its data (`data.path` or `data.sources`) and its
model (`model.pretrained` or `model.config`); all other keys have defaults. A value on the command
line (`train.lr=1e-4`) replaces one of the file. Errors are listed all at once, each with its line,
key, value and cure.

    orchmllm train R.yaml --validate       # check it, start nothing
    orchmllm train R.yaml --print-config   # every key and where it comes from

Numbers are those of YAML 1.2: `1e-4` is a number, while `010`, `1:30` and `2024-01-01` are text.
Below, the default of a key stands in parentheses, with its limits or the other choices; without
parentheses it is an empty text. It shows the type: `0` is a whole number, `0.0` a number, `''`
text, `[]` a list. No number is negative unless its limits say so. The merged recipe of a run is
saved as `recipe.yaml` in `run.dir`, and is a recipe itself.
"""
EMPTY = "`''`"
POLICIES_BEGIN = "<!-- The table is made by scripts/make_recipe_reference.py. -->\n"
POLICIES_END = "<!-- End of the table. -->\n"
METRICS_HEAD = f"""# metrics.jsonl

Rank 0 writes one JSON object a line into `run.dir`. `schema` is the version of the format, now
{SCHEMA_VERSION}: it grows when a key changes its meaning or goes away. A number that is not finite
is `null`. A run that resumes appends: where a step comes twice, the later row counts.
[metrics.schema.json](metrics.schema.json) has the types as JSON Schema.
"""


def recipe_page() -> str:
    parts = [MADE, RECIPE_HEAD]
    for paths, cls in _alike():
        name = _braces(paths)
        keys = [leaf for leaf in leaves(cls, name) if leaf.path.rpartition(".")[0] == name]
        if not name or not keys:
            continue
        parts += [f"## {name}\n", " ".join((cls.__doc__ or "").split()) + "\n"]
        parts += [_line([*same]) for _, same in itertools.groupby(keys, key=lambda leaf: leaf[1:])]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _alike() -> list[tuple[list[str], type]]:
    """(paths, dataclass) of all sections. Those of one class that follow one another are shown
    once: `balance.{vision,audio,llm}`."""
    return [([where for where, _ in group], cls)
            for cls, group in itertools.groupby(sections(Recipe), key=lambda section: section[1])]


def _braces(paths: Sequence[str]) -> str:
    """The paths as one: `balance.{vision,audio}`, `train.{vision,audio}_lr`."""
    begin = paths[0].rpartition(".")[0]
    last = [path.rpartition(".")[2] for path in paths]
    end = os.path.commonprefix([name[::-1] for name in last])[::-1]
    inner = ",".join(name.removesuffix(end) for name in last)
    return f"{begin}.{{{inner}}}{end}" if len(paths) > 1 else paths[0]


def _line(same: Sequence[Leaf]) -> str:
    """Of keys that differ in their name alone."""
    _, _, default, about = same[0]
    shown = "required" if default is MISSING else f"`{_yaml(default)}`"
    limits = " and ".join(bound for bound in about.bounds.split(" and ") if bound != ">= 0")
    values = ", ".join(filter(None, [shown, limits, _other_choices(default, about)]))
    return (f"- `{_braces([leaf.path for leaf in same])}`{f' ({values})' * (values != EMPTY)}: "
            f"{about.doc}")


def _yaml(value: object) -> str:
    return strict_yaml.dump({"x": value})[3:].rstrip("\n")


def _other_choices(default: object, about: Key) -> str:
    if about.auto is not None:
        return f"or `auto` ({about.auto})"
    others = ", ".join(f"`{choice}`" for choice in about.choices if choice != default)
    return f"or {others}" if others else ""


def metrics_page() -> str:
    parts = [MADE, METRICS_HEAD]
    for kind in ROW_SCHEMA["oneOf"]:
        parts += [f"## {kind['title']}\n", kind["description"] + "\n"]
        parts += _lines(kind, "")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _lines(schema: dict, where: str) -> list[str]:
    lines = []
    for name, value in schema["properties"].items():
        lines.append(f"- `{where}{name}`: {value['description']}")
        if value.get("properties"):
            first = next(iter(value["properties"]))
            inner = value["properties"][first]
            if inner.get("properties"):  # the same keys for every phase
                lines += _lines(inner, f"{where}{name}.PHASE.")
            elif any(x.get("properties") for x in value["properties"].values()):
                lines += _lines(value, f"{where}{name}.")
    return lines


def formats_page() -> str:
    parts = [MADE, FORMATS_HEAD, ROWS_HEAD, "| `row_format` | of | columns |", "|---|---|---|"]
    for name, known in FORMATS.items():
        parts.append(f"| `{name}` | {known.of}{'' if known.auto else ' (not by `auto`)'} | "
                     f"{_columns(known)}{'<br>(one medium at least)' * known.media} |")
    parts += ["", KEYS_HEAD]
    parts += [f"- {_names(meaning)} of {meaning.of}: {meaning.done}"
              for meaning in KEYS.values() if not meaning.refused]
    parts += ["", REFUSED_HEAD]
    parts += [f"- {_names(meaning)} of {meaning.of.replace('<', '&lt;')}"
              f"{REFUSED_WHERE.get(meaning.refused, '')}"
              for meaning in KEYS.values() if meaning.refused]
    parts.append("")
    for title, modality in (("Images", VISION), ("Clips", AUDIO), ("Videos", VIDEO)):
        parts += [f"## {title}\n", *_kinds(KINDS, modality, ""), *_kinds(
            CONTAINERS, modality, "with PyAV"), ""]
    parts += [CONTAINERS_HEAD, "## Not read as media\n",
              f"{', '.join(name for name, *_ in REFUSED)}. The error says what helps."]
    return "\n".join(parts).rstrip() + "\n"


def _columns(known: RowFormat) -> str:
    """Its fields with their columns, of which USUAL and those called as the field are left out."""
    specs = {field: spec.text for field, spec in known.columns.specs.items()}
    usual = [field for field, text in specs.items() if USUAL.get(field, field) == text]
    cells = [f"{field}: `{text}`".replace("|", "\\|") for field, text in specs.items()
             if field not in usual]
    return "<br>".join([*cells, *filter(None, [", ".join(usual)])])


def _kinds(kinds: Mapping[str, Kind], modality: int, how: str) -> list[str]:
    """A line for each kind of a modality. how: it is read."""
    return [f"- {name} ({_suffixes(kind.suffixes)})"
            f"{': ' * bool(how or kind.note)}{'; '.join(filter(None, (how, kind.note)))}"
            for name, kind in kinds.items() if kind.modality == modality]


def _names(meaning: Meaning) -> str:
    return ", ".join(f"`{key}`" for key in meaning.keys)


def _suffixes(suffixes: tuple[str, ...]) -> str:
    return ", ".join(f".{s}" for s in suffixes)


def balancing_page() -> str:
    """The page as it is, with the table of policies made anew."""
    before, _, rest = (DOCS / "balancing.md").read_text(encoding="utf-8").partition(POLICIES_BEGIN)
    after = rest.partition(POLICIES_END)[2]
    options = ("tolerance", "cost", "move_cost", "max_rank_tokens", "padded_cost")
    lines = [f"| policy | cost of a rank that it keeps low | {' | '.join(options)} | nodewise |",
             "|---" * (len(options) + 3) + "|"]
    for name, policy in POLICIES.items():
        cells = ["needed" if option == policy.needs else "yes" * (option in policy.options)
                 for option in options]
        lines.append(f"| `{name}` | {policy.minimises} | {' | '.join(cells)} | "
                     f"{'yes' * policy.node_blind} |")
    return before + POLICIES_BEGIN + "\n".join([*lines, ""]) + POLICIES_END + after


def pages() -> dict[str, str]:
    """File name in docs/ -> text."""
    return {"balancing.md": balancing_page(), "recipe.md": recipe_page(),
            "metrics.md": metrics_page(),
            "formats.md": formats_page(),
            "metrics.schema.json": json.dumps(ROW_SCHEMA, indent=1) + "\n"}


USUAL = {field: spec.text for field, spec in FORMATS["openai"].columns.specs.items()
         if field != "messages"}
REFUSED_WHERE = {"false": ", if it is false", "unsaid": ", unless a text has its value"}
FORMATS_HEAD = f"""# Rows, images, clips and videos that are read

The content of a file decides, not its name; in a tar the suffix of a member tells whether it is an
image or a clip. A file whose length is not what its header says is refused ([bad
data](data.md#bad-data)).

Limits: images of {MAX_IMAGE_PIXELS:,} pixels, sides that differ by {MAX_ASPECT} times; clips of
{MAX_AUDIO_S} s, of {MIN_AUDIO_HZ} Hz or more; videos of {MAX_VIDEO_PIXELS:,} pixels a frame,
{MAX_VIDEO_S} s and {MAX_VIDEO_FRAMES:,} frames; {MAX_MEMBER_BYTES >> 20} MiB a file.
"""
ROWS_HEAD = f"""\
## Rows

A row has the first of these formats that it fits ([data.md](data.md#formats)); `columns` of a
source names other columns. Where only the name of a field stands, its column is
{", ".join(f"`{text}` ({field})" for field, text in USUAL.items())},
or has the field's name.
"""
KEYS_HEAD = """\
### Keys that change what is learnt

Other keys are not read, and a run lists them when it starts. These are read:
"""
REFUSED_HEAD = """\
A row with one of these is refused, and the error says how to mend it:
"""
CONTAINERS_HEAD = f"""\
PyAV comes with `pip install '.[video]'` in the clone. Video: {', '.join(VIDEO_NAMES)}.
Sound: {', '.join(AUDIO_NAMES)}. The size and rotation of a video are those of its first frame.
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args(argv).check
    stale = [name for name, text in pages().items()
             if not (DOCS / name).is_file()
             or (DOCS / name).read_text(encoding="utf-8") != text]
    for name in stale:
        if check:
            print(f"docs/{name} is not what the code says: run "
                  "python scripts/make_recipe_reference.py", file=sys.stderr)
        else:
            DOCS.mkdir(exist_ok=True)
            (DOCS / name).write_text(pages()[name], encoding="utf-8")
            print(f"written: docs/{name}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
