"""Mistakes on a command line, in a recipe and in data: each is answered with its place, the
value and the cure, without a traceback, and with exit code 2. Where a cure can be typed, it is."""

from __future__ import annotations

import shlex

import pytest

from orchmllm.cli import dispatch
from tests.lib.commands import ROOT

RECIPE = "recipes/demo.yaml"
TRAIN = f"train {RECIPE} --validate data.path=DEMO data.num_validation=4 run.dir=TMP/run"
# (what is typed, what the answer contains, what is typed then: it is accepted)
COMMANDS = [
    ("trian x.yaml", "did you mean train?", f"{TRAIN}"),
    ("plan jobs x.yaml", "did you mean plan job?", f"plan job {RECIPE} --ranks 8"),
    ("plan x.yaml", "did you mean plan job?", ""),
    ("--verison", "did you mean --version?", "--version"),
    ("train", "RECIPE is missing", TRAIN),
    ("train nowhere.yaml", "nowhere.yaml: No such file", ""),
    (f"train {RECIPE} other.yaml", "'other.yaml': an override has the form section.key=value", ""),
    (f"train {RECIPE} train.lr", "'train.lr': an override has the form", f"{TRAIN} train.lr=1e-4"),
    (f"train {RECIPE} --valdate", "did you mean --validate?", TRAIN),
    (f"train {RECIPE} --validate --print-config", "not allowed with", ""),
    (f"train {RECIPE} --validate --ranks 3", "start 2 or 4", f"{TRAIN} --ranks 4"),
    (f"dry-run {RECIPE} --ranks 0.5", "'0.5'", f"dry-run {RECIPE} --ranks 4"),
    (f"dry-run {RECIPE} --ranks -4", "-4: must be at least 0", ""),
    (f"dry-run {RECIPE} --gpu h1000", "choose one of h100-sxm", f"dry-run {RECIPE} --gpu h200"),
    (f"dry-run {RECIPE} --mix natual", "did you mean natural?", f"dry-run {RECIPE} --mix natural"),
    (f"dry-run {RECIPE} --lengths nowhere.jsonl", "--lengths nowhere.jsonl: cannot be read", ""),
    (f"dry-run {RECIPE} --network 0", "--network 0: must be above 0", ""),
    (f"dry-run {RECIPE} --json nowhere/x.json", "nowhere is no folder", ""),
    (f"plan job {RECIPE} --ranks 7", "start 6 or 8", f"plan job {RECIPE} --ranks 8"),
    (f"data {RECIPE}", "choose from", ""),
    (f"data stat {RECIPE}", "did you mean stats?", ""),
    ("data lint", "RECIPE is missing", f"data lint {RECIPE} data.path=DEMO"),
    (f"data lint {RECIPE} data.path=hf:nobody/nothing", "hf:nobody/nothing: `datasets` cannot", ""),
    ("data stats nowhere.jsonl --model DEMO/model", "nowhere.jsonl: no such file or folder",
     "data stats DEMO --model DEMO/model"),
    (f"data preview {RECIPE} data.path=DEMO --row 1000", "the sources have 16 rows",
     f"data preview {RECIPE} data.path=DEMO --row 16"),
    (f"data preview {RECIPE} data.path=DEMO --row 0", "--row: 0: must be at least 1", ""),
    ("report nowhere", "nowhere: no such folder; give the run.dir", ""),
    ("report TMP", "no metrics.jsonl in it", ""),
    (f"report {RECIPE}", "a file; give the run.dir", ""),
    ("report TMP --gpu h1000 --score", "TMP", ""),
    ("export nowhere --out TMP/x", "nowhere is no checkpoint and no run folder with one", ""),
    ("generate DEMO/model wh\udcffat", "QUESTION 'wh\\udcffat' is no UTF-8", ""),
    (f"doctor {RECIPE} --self-tst", "did you mean --self-test?", ""),
    (f"compare {RECIPE} train.num_steps=0", "must be greater than or equal to 1", ""),
    ("papers reproduce orchmlm", "'orchmlm'", ""),
    ("papers ablations", "RECIPE is missing", ""),
]
# (what is set, what the answer contains, what is set then: it is accepted); more are in
# tests/golden/recipes.yaml.
OVERRIDES = [
    ("train.warmup_steps=1000", "at most train.num_steps (20)", "train.warmup_steps=20"),
    ("balance.policy=greedy", "did you mean 'balance.vision.policy'",
     "balance.vision.policy=greedy"),
    ("balance.llm.tolerance=5", "must be less than or equal to 1", "balance.llm.tolerance=0.05"),
    ("fsdp.shard_size=3", "or set it to 0 (all ranks)", "fsdp.shard_size=0"),
    ("fsdp.activation_checkpointing=yes", "choose one of none, selective, full, auto",
     "fsdp.activation_checkpointing=full"),
    ("run.seed=-1", "must be greater than or equal to 0", "run.seed=1"),
    (f"run.dir={RECIPE}", "cannot be written", ""),
    ("run.resume=nowhere", "choose auto, never or the path of a checkpoint", "run.resume=never"),
    ("model.config=Qwen/Qwen2-7B", "nothing is downloaded", ""),
    ("model.config=TMP", "has no config.json", ""),
    ("data.path=nowhere", "nowhere: no such file or folder", ""),
    ("data.path=TMP/empty", "nothing to read", ""),
    ("data.path=TMP/rows.csv2", ".csv2 is not read", ""),
    ("data.path=s3://nobody/x.jsonl", "add its host and folder to data.remote.roots", ""),
]
ROWS = [  # (a data file, what the answer contains)
    ("", "it is empty, without a row to read"),
    ('{"conversations": [\n', "name the columns (columns: in the source)"),
    ("[1, 2]\n3\n", "more follows the JSON array that ends at byte 5"),
    ('{"foo": 1}\n', "foo"),
]


@pytest.fixture
def typed(tmp_path, demo_corpus, capsys, monkeypatch):
    """Runs what is typed where the demo's recipe finds its data; returns (exit code, what it
    said)."""
    (tmp_path / "there").mkdir()
    for name, there in (("recipes", ROOT / "recipes"), ("demo_data", demo_corpus)):
        (tmp_path / "there" / name).symlink_to(there)
    monkeypatch.chdir(tmp_path / "there")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv2").write_text("x")

    def run(line: str) -> tuple[object, str]:
        line = line.replace("TMP", str(tmp_path)).replace("DEMO", str(demo_corpus))
        try:
            code = dispatch(shlex.split(line))
        except SystemExit as stop:
            code = stop.code
        return code, "".join(capsys.readouterr()).replace(str(tmp_path), "TMP")
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "answer", "cure"), [
    *COMMANDS, *((f"{TRAIN} {wrong}", answer, cure and f"{TRAIN} {cure}")
                 for wrong, answer, cure in OVERRIDES)])
def test_a_mistake_has_a_cure(wrong: str, answer: str, cure: str, typed, tmp_path) -> None:
    code, said = typed(wrong)
    assert code == 2 and answer in said and "Traceback" not in said
    if cure:
        code, said = typed(cure)
        assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize(("text", "answer"), ROWS)
def test_wrong_rows(text: str, answer: str, typed, tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    code, said = typed("data stats TMP/data.jsonl --model DEMO/model")
    assert code == 2 and "error: TMP/data.jsonl" in said and answer in said
