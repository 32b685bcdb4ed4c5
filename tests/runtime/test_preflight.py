"""What must fail fails before there are ranks: --validate and every start name each problem and end
with exit code 2."""

from __future__ import annotations

import importlib.util
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchmllm.cli import dispatch
from orchmllm.config.recipe import RunConfig, TrainConfig
from orchmllm.runtime import preflight
from orchmllm.train import main
from tests.lib.commands import ROOT, TINY, demo_of
from tests.lib.synthetic import recipe

DEMO = str(ROOT / "recipes" / "demo.yaml")
PROBLEMS = {
    "data.path=FOLDER/nowhere": "nowhere: no such file or folder",
    "model.config=FOLDER/nowhere": "nowhere has no config.json: give a local copy",
    "model.config=FOLDER/few": "few/config.json: vocab_size is 20, but the tokenizer has ",
    "run.dir=FOLDER/file/run": "file/run cannot be written",
    "model.config=FOLDER/wide checkpoint.every_steps=1": "but 3 more checkpoints of ",
    "fsdp.llm_checkpointing=full:99": "fsdp.llm_checkpointing=full:99: names 99 layers, but there ",
    "data.path=FOLDER/shard-{0..2}.tar": "shard-0.tar is missing",
    f"data.path=FOLDER/{'x' * 300}.jsonl": "File name too long",
    "run.trackers=[tensorboard]": "run.trackers = ('tensorboard',): the package tensorboard is "
                                  "not installed: pip install tensorboard, or leave it out",
    "run.trackers=[wandb,wandb]": "run.trackers = ('wandb', 'wandb'): wandb is there twice: ",
    "run.trackers=[wand]": "run.trackers = ('wand',): did you mean 'wandb'? choose of tensorboard",
}


@pytest.fixture
def folder(tmp_path, demo_corpus, monkeypatch) -> Path:
    """A file where no folder can be made, a package that is missing, and models whose text model is
    other than that of the demo."""
    (tmp_path / "file").write_text("")
    for name, values in {"few": {"vocab_size": 20}, "wide": {"hidden_size": 1 << 20}}.items():
        shutil.copytree(demo_corpus / "model", tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        config["text_config"] |= values
        path.write_text(json.dumps(config))
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: (
        None if name == "tensorboard" else real(name, *a)))
    return tmp_path


def arguments(folder: Path, data: Path, *changes: str) -> list[str]:
    return [DEMO, "--validate", *demo_of(data), f"run.dir={folder / 'run'}", *TINY,
            *(change.replace("FOLDER", str(folder)) for change in changes)]


@pytest.mark.parametrize("change", PROBLEMS)
def test_validate_names_what_is_missing(folder, demo_corpus, change, capsys):
    assert main(arguments(folder, demo_corpus, *change.split())) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and PROBLEMS[change] in error, error
    assert not (folder / "run").exists()


def test_every_source_is_checked(folder, demo_corpus, capsys):
    """Two of them may read the same file."""
    sources = f"data.sources=[{{path: {demo_corpus}, media_root: {folder}/gone}}, {{path: " \
              f"{demo_corpus}}}]"
    assert main([*arguments(folder, demo_corpus, "data.path=", sources)]) == 2
    assert "gone' is not a folder" in capsys.readouterr().err
    assert dispatch(["doctor", DEMO, *demo_of(demo_corpus), "data.path=", sources,
                     f"run.dir={folder / 'run'}"]) == 1
    assert "gone' is not a folder" in capsys.readouterr().out


def test_validate_is_silent_where_nothing_is(folder, demo_corpus, capsys):
    assert main(arguments(folder, demo_corpus, "train.lr=1e-3")) == 0
    assert "no problems" in capsys.readouterr().out and not (folder / "run").exists()


@pytest.mark.parametrize("under", ["nothing", "torchrun"])
def test_a_start_is_refused_with_all_problems(folder, demo_corpus, under, monkeypatch, capsys):
    """Also by a rank of another launcher, which has no folder to lock. In a process of its own:
    tests/e2e/test_scale_launch.py."""
    for name, value in () if under == "nothing" else {
            "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([DEMO, *demo_of(demo_corpus), f"run.dir={folder / 'file'}",
                 f"data.path={folder / 'nowhere'}"]) == 2
    out, error = capsys.readouterr()
    assert "file cannot be written" in error and "nowhere: no such file" in error
    assert out.endswith(f"run folder {folder / 'file'}\n") and out.count("\n") == 1


def test_a_start_names_a_file_that_cannot_be_read(folder, demo_corpus, capsys):
    """So does --validate."""
    (folder / "bad.jsonl").symlink_to("/proc/self/mem")  # an error of the disk to every reader
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "links").mkdir()
    (folder / "links" / "data.jsonl").symlink_to(folder / "gone.jsonl")
    for change, said in (
            (f"data.path={folder / 'bad.jsonl'}", "bad.jsonl: [Errno 5] Input/output"),
            (f"data.path={folder / 'empty.jsonl'}", "empty.jsonl: it is empty"),
            (f"data.path={folder / 'links'}", "links/data.jsonl: a link to a file that is gone: "),
            ("data.num_validation=16", "data.num_validation = 16: the data have 16 rows"),
            ("data.batching=capped data.max_batch_tokens=500",
             "'capped', which needs the lengths of all rows: source")):
        for args in (arguments(folder, demo_corpus), [DEMO, *demo_of(demo_corpus), *TINY,
                                                      f"run.dir={folder / 'run'}"]):
            assert main([*args, *change.split()]) == 2  # before ranks start
            error = capsys.readouterr().err
            assert error.startswith("error: ") and said in error, error


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_log_of_another_program_stays_as_it_is(resume, tmp_path):
    run, path = recipe(run=RunConfig(dir=str(tmp_path), resume=resume)), tmp_path / "metrics.jsonl"
    for text, said in (("", ""), ('{"sch', ""), ('{"loss": 1.0}', "no log"), ("loss\n", "no log")):
        path.write_text(text)
        found = preflight.problems([partial(preflight.check_run_folder, run, 0)])
        assert bool(found) == bool(said and resume != "never")
        assert all("metrics.jsonl is no log of a run: move it away" in line for line in found)
        assert path.read_text() == text


def test_what_a_cut_off_save_left_takes_no_room(folder, monkeypatch):
    """It is deleted by the next one."""
    left = folder / "run/checkpoints/.staged_step_00000002"
    left.mkdir(parents=True)
    run = recipe(run=RunConfig(dir=str(folder / "run")), train=TrainConfig(num_steps=1))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(
        free=preflight.SPARE_BYTES))
    with pytest.raises(ValueError, match="but 1 more checkpoint of 1.00kB and logs need"):
        preflight.check_run_folder(run, 1000)
    (left / "shard").write_bytes(bytes(1000))
    preflight.check_run_folder(run, 1000)
