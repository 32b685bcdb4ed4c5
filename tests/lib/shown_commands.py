"""What docs/*.md show to type, and a folder in which it can be typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import yaml

from orchmllm.cli import dispatch
from tests.lib.commands import ROOT, TINY, make_demo_data
from tests.lib.whole_folders import write_model, write_rows

# In a reader's order: the tasks make the runs that other pages name.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"),
                                     key=lambda page: (page.name != "tasks.md", page))]
PROGRAMS = ("orchmllm ", "python", "torchrun", "make", "sbatch", "diff", "pip", "scripts/", ". ")
# What the pages leave open, and what is made small.
INSTEAD = (
    (r"\b(RECIPE|R\.yaml|R)(?=\s|$)", "small.yaml"), (r"YOUR\.jsonl", "demo_data/data.jsonl"),
    (r"^(?!orchmllm data)(.*)recipes/demo\.yaml", r"\1small.yaml"),  # docs/data.md shows its data
    (r"my/data\.jsonl", "demo_data/data.jsonl"),
    (r"data\.path=\S+", "data.path=demo_data"), (r"stats DATA", "stats demo_data/data.jsonl"),
    (r"--model FOLDER", "--model recipe.model"),  # which `orchmllm init` has written by then
    (r"--nproc-per-node 8", "--nproc-per-node 2"), (r"num_steps=\d+", "num_steps=4"),
    (r"\[--ranks 64\]", "--ranks 64"),
    (r"runs/x/checkpoints/step_\d+", "runs/mine/checkpoints/step_00000002"),
    (r"runs/x(?=\s|$)", "runs/mine"),
    (r"runs/default/checkpoints/step_\d+", "runs/mine/checkpoints/step_00000002"),
    (r"runs/plain", "runs/mine"), (r"train recipe\.yaml$", "train recipe.yaml train.num_steps=4"),
    (r"(?<![\w/])\w+\.jpg", "demo_data/images/000003.jpg"),
    (r"(?<![\w/])\w+\.wav", "demo_data/audio/000002.wav"),
    (r"plan (units\|)?split\|recompute small\.yaml", "plan recompute small.yaml --mix natural"),
)


class Shown(NamedTuple):
    """A line that a page shows. output: what it shows below, "" for nothing."""

    page: Path
    line: str
    output: str

    @property
    def command(self) -> str:
        """Without its comment."""
        return re.sub(r"\s+#.*", "", self.line)

    @property
    def needs_gpus(self) -> bool:
        return bool(re.search(r"#.*\bneeds (a GPU|GPUs)\b", self.line))


def shown(page: Path) -> list[Shown]:
    """All commands in the blocks of a page, in their order."""
    found = []
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M):
        if "$ " in block:
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                line, _, output = part.partition("\n")
                found.append(Shown(page, line, output.rstrip()))
        else:
            found += [Shown(page, line.strip(), "") for line in block.splitlines()
                      if re.match(r"([A-Z_]+=\S+ )*(" + "|".join(map(re.escape, PROGRAMS))
                                  + r")", line) and " " in line]
    return found


def examples(command: str) -> list[Shown]:
    """Those of the help text of a command."""
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        dispatch([*command.split(), "--help"])
    lines = re.findall(r"^ +(orchmllm .*?)(?: \[section.*| {2,}.*)?$", said.getvalue(), re.M)
    return [Shown(Path(f"{command} --help"), line, "") for line in lines
            if line.startswith(f"orchmllm {command} ")]


def to_type(command: str) -> str:
    """The command as it can be typed in the folder of `make_folder`."""
    for pattern, text in INSTEAD:
        command = re.sub(pattern, text, command)
    return command


def make_folder(folder: Path) -> Path:
    """The demo's corpus, a small recipe of it, a tiny model with rows of its own, and
    what the repository has."""
    for name in ("recipes", "examples", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").mkdir()
    make_demo_data(folder / "demo_data", 400)
    small = yaml.safe_load((ROOT / "recipes/demo.yaml").read_text(encoding="utf-8"))
    for override in (*TINY, "checkpoint.every_steps=2", "data.index_dir=small_index"):
        key, _, value = override.partition("=")
        section = small
        *path, last = key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = yaml.safe_load(value)
    (folder / "small.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
    write_model("llava", folder / "models/whole")
    write_rows(folder / "models/whole")
    (folder / "lora.yaml").write_text(yaml.safe_dump({
        "run": {"dir": "runs/lora"}, "data": {"path": "models/whole/data.jsonl"}, "model": {
            "pretrained": "models/whole", "lora": {"rank": 4}},
        "train": {"num_steps": 2, "batch_size": 2}, "launch": {"nproc_per_node": 2}}),
        encoding="utf-8")
    return folder


def typed(command: str, folder: Path) -> subprocess.CompletedProcess:
    """A shell's result of the command in the folder; its output and errors are one text."""
    return subprocess.run(
        ["bash", "-c", to_type(command)], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT), "COLUMNS": "80", "PIP_NO_INDEX": "1"})
