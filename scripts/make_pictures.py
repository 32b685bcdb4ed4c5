"""Learns the drawings of the demo corpus in two stages, and writes docs/pictures.png, in which the
model has drawn what it was asked for. About 15 minutes on a core.

    python scripts/make_pictures.py [--folder FOLDER] [--out docs/pictures.png]

The first stage is the demo's run on all of its corpus. In the second the drawings alone are learnt,
and the LLM a thirtieth as fast as the generator: its words stay apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent.parent / "docs"
ASKED = ("red circle on a white", "blue square on a grey", "yellow triangle on a black",
         "green circle on a black", "green triangle on a white", "red square on a grey")
PIXELS = 128  # of the side of a picture, as it is shown


def orchmllm(*args: str) -> None:
    print("orchmllm", *args, flush=True)
    subprocess.run([sys.executable, "-m", "orchmllm", *args], check=True)


def learn(folder: Path, first: int, second: int) -> Path:
    """The folder of a run that has learnt drawings in so many steps of each stage."""
    demo, run = folder / "demo", folder / "drawn"
    recipe, rank = str(demo / "recipe.yaml"), "launch.nproc_per_node=1"
    orchmllm("init", "--demo", str(demo), "--generate")
    orchmllm("train", recipe, rank, "train.batch_size=20", f"train.num_steps={first}",
             "train.warmup_steps=10")
    rows = (demo / "data.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    drawings = [row for row in rows if '"Draw a' in row]
    (demo / "drawings.jsonl").write_text("".join(drawings), encoding="utf-8")
    orchmllm("train", recipe, rank, f"run.init_from={demo / 'run'}", f"run.dir={run}",
             f"data.path={demo / 'drawings.jsonl'}", "data.num_validation=13",
             "train.batch_size=16", f"train.num_steps={second}", "train.lr=1.5e-3",
             "train.llm_lr=5e-5", "train.warmup_steps=50")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of corpus and runs (default: one that goes)")
    parser.add_argument("--out", type=Path, default=DOCS / "pictures.png")
    parser.add_argument("--first", type=int, default=120, help="steps of the first stage")
    parser.add_argument("--second", type=int, default=1200, help="steps of the second stage")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as removed:
        folder = args.folder or Path(removed)
        run = learn(folder, args.first, args.second)
        sheet = Image.new("RGB", (PIXELS * len(ASKED), PIXELS))
        for k, what in enumerate(ASKED):
            path = folder / f"{k}.png"
            orchmllm("generate", str(run), "--out", str(path), f"Draw a {what} background.")
            made = Image.open(path).resize((PIXELS, PIXELS), Image.Resampling.NEAREST)
            sheet.paste(made, (PIXELS * k, 0))
        sheet.save(args.out)


if __name__ == "__main__":
    main()
