"""attempts.jsonl: what is recorded of a start, and how a resume decides by it."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchmllm.comm.exchange import RowGather
from orchmllm.config.job import resolve
from orchmllm.config.model import LoraConfig, ModelConfig
from orchmllm.config.recipe import Recipe, RemoteConfig, RemoteRoot, SourceConfig, load_recipe
from orchmllm.config.schema import leaves
from orchmllm.data.formats.scanned import BLOCK_BYTES, SAMPLED_BLOCKS, SAMPLED_FILES, sampled
from orchmllm.runtime.attempts import read_attempts, recorded, settings_of
from orchmllm.runtime.build import build_dataset
from orchmllm.runtime.checkpoint import CheckpointError
from orchmllm.runtime.resumable import check_resumable
from orchmllm.runtime.run_checkpoints import RunCheckpoints, attempt_of
from orchmllm.runtime.run_state import Progress
from tests.lib.commands import TINY, demo_of
from tests.lib.ranks import run_ranks
from tests.lib.resume import run_recipe, settings
from tests.lib.synthetic import SyntheticDataset, recipe

RUN = recipe()
RUN = replace(RUN, data=replace(
    RUN.data, path="", sources=(SourceConfig(path="a.jsonl"),), preprocess="ray",
    remote=RemoteConfig(roots=(RemoteRoot(url="s3://a"),))))
ALLOW = {"init": "another run with another run.dir",
         "model": "another run.dir or run.resume=never",
         "order": "run.allow_data_change=true", "batch": "train.global_batch_size=4"}
# Keys of a recipe that mean more for a run that goes on than a line that says their change.
MORE = {
    "start": ("run.dir", "run.resume", "run.allow_data_change", "launch.nproc_per_node"),
    "init": ("run.init_from",),
    "order": ("run.seed", "data.num_validation", "data.streaming", "data.shuffle_window",
              "data.batching", "data.max_batch_tokens", "data.max_batch_images",
              "data.sources.repeats"),
    "batch": ("train.batch_size", "train.accumulation_steps", "train.global_batch_size"),
    "model": ("model.connectors_frozen", "model.vision.frozen", "model.audio.frozen",
              "model.llm.frozen", "model.generator.frozen", "model.lora.rank", "model.lora.alpha",
              "model.lora.target_modules", "model.lora.dropout", "model.lora.use_rslora",
              "model.lora.connector", "fsdp.param_dtype")}
LISTS = {"data.sources", "data.remote.roots"}  # of sections, whose keys are there
MEANS = {leaf.path: "said" for leaf in leaves(Recipe) if leaf.path not in LISTS} | {
    key: means for means, keys in MORE.items() for key in keys}
NUM_SAID = 140


@pytest.fixture(scope="module")
def was() -> dict:
    return settings(RUN)


def another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 77 if isinstance(value, int | float) else "other"


@pytest.mark.parametrize("key", MEANS)
def test_a_changed_key_is_refused_with_what_allows_it_or_is_said(was, key):
    means = MEANS[key]
    key = key.replace("data.sources.", "data.sources[0].").replace("roots.", "roots[0].")
    value = another(was[key])
    now = {**was, key: value}
    if means not in ALLOW:
        said = check_resumable(was, now, kept=4)
        assert said == ({key: [was[key], value]} if means == "said" else {})
        return
    with pytest.raises(ValueError, match=f"^{key.replace('[0]', '.0.')} is ") as refused:
        check_resumable(was, now, kept=4)
    assert ALLOW[means] in str(refused.value)
    allowed = {**now, "run.allow_data_change": True}
    if means == "order":
        assert check_resumable(was, allowed, kept=4) == {key: [was[key], value]}
    else:
        with pytest.raises(ValueError, match=f"^{key.replace('[0]', '.0.')} is "):
            check_resumable(was, allowed, kept=4)


def test_what_a_new_key_means_is_looked_at():
    """It has to be put among MORE and among CLASSES, or to be counted here."""
    assert MEANS.keys() == {leaf.path for leaf in leaves(Recipe)} - LISTS
    assert [*MEANS.values()].count("said") == NUM_SAID


def test_the_examples_a_step_may_be_written_in_other_ways(was):
    """4 ranks of one example, then 2 with two microbatches, or the number itself."""
    for now in ({"train.batch_size": 1, "train.accumulation_steps": 2},
                {"train.global_batch_size": 8, "train.batch_size": 5}):
        assert check_resumable(was, {**was, **now}, kept=8).keys() == now.keys()
    with pytest.raises(ValueError, match="train.global_batch_size is 0, the checkpoint has 8"):
        check_resumable({**was, "train.global_batch_size": 8}, was, kept=8)


def opened(folder: Path, *overrides: str) -> dict:
    """The settings of a run on the data in `folder`."""
    model = folder if folder.is_dir() else folder.parent
    run = load_recipe("recipes/demo.yaml", [
        *TINY, *demo_of(model), f"data.path={folder}", *overrides])
    return settings(run, build_dataset(run))


def mixture(folder: Path, *weights: float, names=("data", "more")) -> dict:
    """Of two sources with weights."""
    run = load_recipe("recipes/demo.yaml", [*TINY, *demo_of(folder)])
    sources = tuple(SourceConfig(path=str(folder / f"{name}.jsonl"), weight=weight)
                    for name, weight in zip(names, weights, strict=True))
    run = replace(run, data=replace(run.data, path="", sources=sources))
    return settings(run, build_dataset(run))


def rewritten(path: Path, **how) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()), **how))


def renamed(path: Path, name: str) -> None:
    path.rename(path.with_name(name))


def test_what_changes_nothing_is_accepted(demo_corpus, tmp_path):
    """And what is said of it."""
    folder = tmp_path / "data"
    shutil.copytree(demo_corpus, folder)
    rows = (folder / "data.jsonl").read_text().splitlines(True)
    (folder / "more.jsonl").write_text("".join(rows[:9]))
    mixed = mixture(folder, 1, 3)
    same = {"weights times 10": check_resumable(mixed, mixture(folder, 10, 30), 4)}
    (folder / "more.jsonl").rename(tmp_path / "others.jsonl")  # a folder has none beside data.jsonl
    was = opened(folder)
    tokens = folder / "model" / "tokenizer.json"
    changes = {
        "tokenizer indented": lambda: rewritten(tokens, indent=3),
        "tokenizer sorted": lambda: rewritten(tokens, sort_keys=True),
        "tokenizer in ASCII": lambda: rewritten(tokens, ensure_ascii=True),
        "times": lambda: os.utime(folder / "data.jsonl", (1, 1)),
        "copied": lambda: shutil.copytree(folder, tmp_path / "copy"),
    }
    for name, change in changes.items():
        change()
        same[name] = check_resumable(was, opened(
            tmp_path / "copy" if name == "copied" else folder), 4)
    (tmp_path / "link").symlink_to(folder)
    same["linked"] = check_resumable(was, opened(tmp_path / "link"), 4)
    same["as a source"] = check_resumable(was, settings_of_source(folder / "data.jsonl"), 4)
    renamed(folder / "data.jsonl", "rows.jsonl")
    same["file renamed"] = check_resumable(was, opened(folder / "rows.jsonl"), 4)
    (tmp_path / "others.jsonl").rename(folder / "others.jsonl")
    same["sources renamed"] = check_resumable(
        mixed, mixture(folder, 1, 3, names=("rows", "others")), 4)
    folder.rename(tmp_path / "elsewhere")
    same["folder renamed"] = check_resumable(
        was, opened(tmp_path / "elsewhere" / "rows.jsonl"), 4)
    other_shards = opened(tmp_path / "elsewhere" / "rows.jsonl", "data.num_shards=9")
    same["shards of no stream"] = check_resumable(was, other_shards, 4)
    assert len(same) == 12
    assert {name: list(said) for name, said in same.items()} == {
        **dict.fromkeys(same, ["data.path"]), **dict.fromkeys(
            [name for name in changes if name != "copied"], []),
        **dict.fromkeys(("copied", "linked", "folder renamed"), ["data.path", "model.config"]),
        "weights times 10": ["data.sources[0].weight", "data.sources[1].weight"],
        "as a source": ["data.path", "data.sources[0].path"],
        "sources renamed": ["data.sources[0].path", "data.sources[1].path"],
        "shards of no stream": ["data.path", "data.num_shards", "model.config"]}
    with pytest.raises(ValueError, match=r"^content.sources\[0\].share is 0.4, the checkpoint has"):
        check_resumable(mixed, {**mixed, "content.sources[0].share": 0.4}, 4)


def test_a_model_of_transformers_with_another_configuration_is_refused(tmp_path):
    """Its folder may move; what its config.json says of the model may not change."""
    def now(folder: Path, **keys) -> dict:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({
            "model_type": "llava", "text_config": {"rope_theta": 1e4}, "dtype": "float32"} | keys))
        return settings(replace(load_recipe("recipes/demo.yaml", TINY),
                                model=ModelConfig(pretrained=str(folder))))

    was = now(tmp_path / "model")
    moved = check_resumable(was, now(tmp_path / "moved", dtype="bfloat16"), 4)
    assert list(moved) == ["model.pretrained"]
    with pytest.raises(ValueError, match="^model.config_json is .* those of another model"):
        check_resumable(was, now(tmp_path / "model", text_config={"rope_theta": 1e6}), 4)
    lora = replace(load_recipe("recipes/demo.yaml", TINY), model=ModelConfig(
        pretrained=str(tmp_path / "model"), lora=LoraConfig(rank=2)))
    mine, others = (settings_of(resolve(lora, 1, 1), SyntheticDataset(), weights)
                    for weights in (5, 6))
    with pytest.raises(ValueError, match="^model.weights is '0+6', the checkpoint has '0+5'"):
        check_resumable(mine, others, 4)  # which its adapters were learnt beside


def settings_of_source(path: Path) -> dict:
    run = load_recipe("recipes/demo.yaml", [*TINY, *demo_of(path.parent)])
    run = replace(run, data=replace(run.data, path="", sources=(SourceConfig(path=str(path)),)))
    return settings(run, build_dataset(run))


def test_a_shuffled_or_edited_file_is_refused(demo_corpus, tmp_path):
    """At the same size; the 20 files are too short for anything to be left unread."""
    rng = random.Random(0)
    rows = (demo_corpus / "data.jsonl").read_text().splitlines(True)
    folder = tmp_path / "data"
    shutil.copytree(demo_corpus, folder)
    for k in range(20):
        (folder / f"part-{k:02d}.jsonl").write_text("".join(rows[k % (len(rows) - 1):][:2]))
    run = load_recipe("recipes/demo.yaml", [
        *TINY, *demo_of(folder), f"data.path={folder}/part-{{00..19}}.jsonl"])
    dataset = build_dataset(run)  # reads the files anew for each of its fingerprints
    was = settings(run, dataset)
    for path in sorted(folder.glob("part-*")):
        data = path.read_text()
        lines = data.splitlines(True)
        at = rng.choice([k for k, c in enumerate(data) if c in "aeiou"])
        path.write_text(rng.choice(["".join(reversed(lines)), data[:at] + "x" + data[at + 1:]]))
        with pytest.raises(ValueError, match=r"^content.sources\[0\].content is .*allow_data_chan"):
            check_resumable(was, settings(run, dataset), 4)
        path.write_text(data)
    assert check_resumable(was, settings(run, dataset), 4) == {}
    renamed(folder / "part-00.jsonl", "part-20.jsonl")  # now it is the last
    with pytest.raises(ValueError, match=r"^content.sources\[0\].content is "):
        check_resumable(was, opened(folder / "part-{01..20}.jsonl"), 4)


def test_what_is_read_of_large_and_of_many_files(tmp_path, monkeypatch):
    """The head, the tail and a block in each of 16 parts of a large file; 64 of many files."""
    path, length = tmp_path / "large", (SAMPLED_BLOCKS + 2) * BLOCK_BYTES * 2
    data = bytearray(random.Random(0).randbytes(length))
    path.write_bytes(data)
    was, seen = sampled([path]), []
    for start in range(0, length, BLOCK_BYTES // 4):
        path.write_bytes(data[:start] + bytes(16) + data[start + 16:])
        seen.append(sampled([path]) != was)
    assert seen[0] and seen[-1] and sum(seen) > 3 * (SAMPLED_BLOCKS + 2)
    assert all(any(seen[k: k + 15]) for k in range(len(seen) - 15))
    many = [tmp_path / f"{k:04d}" for k in range(300)]
    for k, file in enumerate(many):
        file.write_bytes(b"x" * (k + 1))
    was, opens, real = sampled(many), [], Path.open
    monkeypatch.setattr(Path, "open", lambda *args, **how: [
        opens.append(1), real(*args, **how)][1])
    assert sampled(many) == was and len(opens) == SAMPLED_FILES
    for k in range(20):  # whichever are read: the sizes of all are compared, in their order
        assert sampled([*many[:k], many[k + 1], many[k], *many[k + 2:]]) != was


FIRST = {"attempt": 1, "resumed_from": None, "changed": {}, "settings": {"train.lr": 1.0}}


def test_a_write_that_is_cut_off_anywhere_loses_its_line_alone(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with recorded(tmp_path, FIRST) as end:
        end("no progress")  # by the watchdog; what its end makes of the run is not written
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path, {**FIRST, "attempt": 2}):
        raise KeyboardInterrupt
    assert len(synced) == 8  # the file and its folder, for each line
    path = tmp_path / "attempts.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(True)
    assert [a["ended"] for a in read_attempts(tmp_path)] == ["no progress", "KeyboardInterrupt: "]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        assert len(read_attempts(tmp_path)) == (kept + 1) // 2
        with recorded(tmp_path, {**FIRST, "attempt": 3}):
            assert path.read_bytes().startswith(b"".join(lines[:kept]) + b'{"attempt": 3, ')
            assert read_attempts(tmp_path)[-1]["attempt"] == 3
    path.write_bytes(lines[0] + lines[1][:9] + b"\n" + lines[2])
    with pytest.raises(ValueError, match="attempts.jsonl: line 2 is damaged .* delete that line"):
        read_attempts(tmp_path)


def attempted(run: Recipe, step: int) -> dict:
    """What is recorded of an attempt on one rank that saves at `step`, random numbers that are
    `drawn` after it, and what is `said` of a recipe that is not that of the checkpoint."""
    said: list[str] = []
    weight = torch.nn.Parameter(torch.zeros(3))
    keeper = RunCheckpoints(
        resolve(run, 1, 1), RowGather(8), SyntheticDataset(), lambda: torch.optim.AdamW([weight]),
        lambda: {"model.weight": weight.detach()}, log=said.append)
    progress = keeper.resume() or Progress(6)
    with keeper.attempt(trains=True):
        progress.step = step
        keeper.save_run(progress)
        keeper.wait()
    return {**read_attempts(run.run.folder)[-1], "drawn": torch.rand(3).tolist(),
            "said": [line for line in said if "changed since" in line or "recorded no" in line]}


def attempts(world, folder: Path) -> None:
    run = run_recipe(folder / "run", keep_last=9)
    faster = replace(run, train=replace(run.train, lr=5e-3))
    lr, saved = {"train.lr": [0.01, 5e-3]}, folder / "run" / "checkpoints"
    first, second = attempted(run, 1), attempted(faster, 2)
    assert first["attempt"] == 1 and not first["changed"] and first["resumed_from"] is None
    assert second["drawn"] == first["drawn"]  # a run goes on with the checkpoint's generator
    assert second["attempt"] == 2 and second["changed"] == lr == second["resumed_from"]["changed"]
    assert second["said"] == ["changed since the checkpoint: train.lr 0.01 -> 0.005"]
    state = json.loads((saved / "step_00000002" / "state.json").read_text())
    assert state["attempt"].items() <= second.items() and "started" not in state["attempt"]
    assert attempted(faster, 3)["changed"] == {} == read_attempts(
        run.run.folder)[-1]["resumed_from"]["changed"]
    copy = shutil.copytree(saved / "step_00000003", folder / "copy")
    older = attempted(replace(faster, run=replace(
        run.run, resume=str(saved / "step_00000001"))), 2)
    assert older["attempt"] == 4 and older["changed"].keys() == {"run.resume"}
    assert older["resumed_from"] == {"checkpoint": str(saved / "step_00000001"), "step": 1,
                                     "attempt": 1, "changed": lr}
    other = attempted(replace(faster, run=replace(
        run.run, dir=str(folder / "other"), resume=str(copy))), 4)
    assert other["attempt"] == 4 and other["resumed_from"]["attempt"] == 3
    assert other["changed"] == {} and other["said"] == []
    again = replace(run, run=replace(run.run, dir=str(folder / "again"), resume=str(copy)))
    with pytest.raises(ValueError, match="^run.seed is 5, the checkpoint has 0"):
        attempted(replace(again, run=replace(again.run, seed=5)), 4)  # whose folder has no attempts
    with pytest.raises(CheckpointError, match="checkpoint old: .* no attempt, .*run.resume=never"):
        attempt_of(Path("old"), {})
    with pytest.raises(CheckpointError, match="no/such/folder.*manifest.json"):
        attempted(replace(run, run=replace(run.run, resume="no/such/folder")), 4)


@pytest.mark.dist
def test_an_attempt_is_compared_with_the_one_before_and_with_that_of_its_checkpoint(tmp_path):
    """Its number is above both."""
    run_ranks(attempts, 1, tmp_path)
