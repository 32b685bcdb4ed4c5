"""Every command that pages and help texts show runs here, or in the test that is named, or is
marked as needing GPUs; and what a page shows below a command is what it prints."""

from __future__ import annotations

import re
import shutil

import pytest

from orchmllm.cli import COMMANDS
from tests.lib.commands import ROOT
from tests.lib.shown_commands import (
    PAGES,
    Shown,
    examples,
    make_folder,
    shown,
    to_type,
    typed,
)

# What begins so -> what runs it.
ELSEWHERE = {
    "orchmllm compose": "tests/e2e/test_composed.py",
    "orchmllm dry-run recipes/mllm84b.yaml": "tests/docs/test_shown.py",
    "orchmllm init my/data.jsonl --model": "tests/tools/init/test_init.py",
    "orchmllm init my/data --model": "tests/tools/init/test_init.py",
    "orchmllm generate models/": "tests/tools/generate/test_whole_models.py",
    "orchmllm generate runs/mine --out": "tests/tools/generate/test_pictures.py",
    "orchmllm papers reproduce compare": "tests/papers/test_evidence.py",
    "orchmllm papers reproduce orchmllm|": "tests/papers/test_evidence.py",
    "make demo": "tests/e2e/test_demo.py",
    "make gpu": "tests/gpu_kit/test_bare.py",
    "python -m scripts.gpu": "tests/gpu_kit/test_bare.py",  # without a GPU it ends with 2
    "make setup": ".ci/run", "make test": ".ci/run", ". .venv/bin/activate": ".ci/run",
    "python scripts/bench_balance.py": "tests/plan/test_balance_hard.py",
    "python scripts/bench_gpu.py": "tests/tools/predict/test_bench_gpu.py",
    "orchmllm dry-run recipes/mllm_1gpu.yaml --measured": "tests/tools/predict/test_bench_gpu.py",
    "python scripts/make_paper_tables.py": "tests/papers/test_evidence.py",
}
# Figures of a clock, of a file's time, and of a machine.
VARIES = (r"\d+\.\d s\b", r"-[0-9a-f]{16}\b", r"\d+ tok/s.*", r"loss \d\.\d+")


def runs_elsewhere(one: Shown) -> str:
    return next((test for begin, test in ELSEWHERE.items() if one.command.startswith(begin)), "")


SHOWN = [one for page in PAGES for one in shown(page)]
HELP = [one for command in COMMANDS for one in examples(command)]
HERE, HELP_HERE = ([one for one in lines if not one.needs_gpus and not runs_elsewhere(one)]
                   for lines in (SHOWN, HELP))


def test_what_is_run_elsewhere_is():
    for test in {*ELSEWHERE.values()}:
        assert (ROOT / test).is_file(), test
    begins = {begin for begin in ELSEWHERE
              if not any(one.command.startswith(begin) for one in (*SHOWN, *HELP))}
    assert not begins, f"no page shows {begins}"
    assert len(HERE) > 40


def break_data(folder) -> None:
    """What docs/data.md says before `data lint`."""
    (folder / "images/000003.jpg").write_bytes(b"")
    photo = (folder / "images/000005.jpg").read_bytes()
    (folder / "images/000005.jpg").write_bytes(photo[:-200])
    with (folder / "data.jsonl").open("a", encoding="utf-8") as f:
        f.write("<html>\n")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_commands_run_and_print_what_is_shown(tmp_path):
    folder, done = make_folder(tmp_path), set()
    for one in (*HERE, *HELP_HERE):
        text = to_type(one.command)
        lints = one.output and text.startswith("orchmllm data lint")
        if lints:  # the last command on the page that reads these data as they are
            continue
        if one.output or text not in done:
            run(one, folder)
        done.add(text)
    break_data(folder / "demo_data")
    [lint] = [one for one in HERE if one.output and "data lint" in one.command]
    run(lint, folder, code=1)


def run(one: Shown, folder, code: int | None = None) -> None:
    """Types it. An output that begins with an error comes with exit code 2, and 1 is that of
    `diff`."""
    if one.command.startswith("orchmllm export"):  # several pages export there
        shutil.rmtree(folder / "exported", ignore_errors=True)
    if one.command.startswith("orchmllm init") and "--out" not in one.command:  # so do they
        (folder / "recipe.yaml").unlink(missing_ok=True)
    done = typed(one.command, folder)
    if code is None:
        code = 2 * one.output.startswith("error:") + one.command.startswith("diff ")
    if set(re.findall(r"^FAIL  ([a-z ]+?)  ", done.stdout, re.M)) == {"disk speed"}:
        code = 1  # the doctor's finding is right where other work keeps the disk busy
    assert done.returncode == code, f"{one.page.name}: {one.line}\n{done.stdout}"
    printed = plain(done.stdout)
    for line in plain(one.output):
        assert line == "..." or line in printed, f"{one.page.name}: {one.line}\n{line}\n" + (
            "\n".join(printed))


def plain(text: str) -> list[str]:
    """Lines without what varies."""
    for pattern in VARIES:
        text = re.sub(pattern, "#", text)
    return [line.rstrip() for line in text.splitlines()]
