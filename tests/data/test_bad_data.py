"""60 broken files and rows: training finishes, says each once, skips the same everywhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import DataConfig, RunConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media.medium import MediaError
from orchmllm.plan.layout import TEXT
from orchmllm.tools.data.command import main
from orchmllm.trainer import Trainer
from tests.lib.broken import write_broken_corpus
from tests.lib.drawn import drawn_model, shared_reader, write_recipe
from tests.lib.formats import llava_row, write_jsonl, write_media
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.synthetic import recipe
from tests.lib.training import watched

NO_LIMIT = dict(max_failed_in_a_row=0, max_failed_percent=100.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    return folder, write_broken_corpus(folder)


def opened(folder: Path, index_dir: Path | None = None, limit: int = 0) -> ConversationDataset:
    return ConversationDataset(
        folder, reader=shared_reader(limit), index_dir=index_dir or folder / "none")


def failures(dataset) -> dict[int, list]:
    """Line number -> errors of loading the row."""
    out: dict[int, list] = {}
    for i in range(len(dataset)):
        dataset.load(i, on_error=lambda s, e, i=i: out.setdefault(
            dataset.describe(i, s)["row"], []).append(e))
    return out


def test_every_broken_row_is_reported_once_with_its_reason(corpus):
    folder, expected = corpus
    assert len(expected) >= 60
    found = failures(opened(folder))
    assert found.keys() == expected.keys()
    for number, errors in found.items():
        assert len(errors) == 1 and isinstance(errors[0], MediaError)
        assert expected[number] in errors[0].reason, (number, errors[0].reason)
    assert not (folder / "SENTINEL").exists() and not Path("SENTINEL").exists()


def test_lint_lists_them_all(corpus, tmp_path, capsys, monkeypatch):
    folder, expected = corpus
    path = write_recipe(tmp_path, f"path: {folder}")
    assert main(["lint", path, "--workers", "1", "--decode"]) == 1
    said = capsys.readouterr().out
    for number, reason in expected.items():
        start = f"{folder}/data.jsonl, row {number}:"
        [line] = [x for x in said.splitlines() if x.startswith(start)]
        assert reason in line
    assert f"{len(expected)} problem(s) in" in said
    assert failures(opened(folder, tmp_path)).keys() == expected.keys()


def run_recipe(folder: Path, run_dir: Path, dispatch: str, **data):
    base = recipe(model=drawn_model(), balance=BalanceConfig(ranks_per_node=2, dispatch=dispatch),
                  data=DataConfig(path=str(folder), index_dir=str(folder / "none"), prefetch=2,
                                  max_lost_percent=100.0, **{**NO_LIMIT, **data}),
                  run=RunConfig(dir=str(run_dir)))
    return replace(base, train=replace(base.train, num_steps=11, batch_size=5),
                   checkpoint=replace(base.checkpoint, every_steps=4, asynchronous=False))


def failures_seen(world, run, stop_after: int = -1) -> list:
    """(step, examples, failures) of every step that this rank trained."""
    return watched(world, run, lambda step, row: (
        step.index, step.example_ids.tolist(),
        sorted((f.example, f.segment, f.reason) for f in step.failed)), stop_after)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("dispatch, num_workers", [("load", 2), ("tensors", 0), ("bytes", 2)])
def test_training_finishes_and_skips_alike(corpus, tmp_path, dispatch, num_workers):
    folder, expected = corpus
    run = run_recipe(folder, tmp_path / "a", dispatch, num_workers=num_workers)
    ranks = run_ranks(failures_seen, 2, run)
    assert ranks[0] == ranks[1] and len(ranks[0]) == 11  # 110 draws: all rows at least once
    lines = [json.loads(line) for line in (tmp_path / "a" / "quarantine.jsonl").open()]
    assert sorted(line["row"] for line in lines) == sorted(expected)
    for line in lines:
        assert line["source"] and line["file"] and expected[line["row"]] in line["reason"]
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").open()]
    assert sum(r.get("num_failed_media", 0) for r in rows) >= len(expected)
    # stopped in the middle and resumed on one rank: the same examples, the same skips, no new line
    again = run_recipe(folder, tmp_path / "b", dispatch)
    first = run_ranks(failures_seen, 2, again, 6)[0]
    assert first == ranks[0][:7]
    with (tmp_path / "b" / "quarantine.jsonl").open("a") as f:
        f.write('{"step": 6, "exam')  # what kill -9 leaves
    rest, = run_ranks(failures_seen, 1, again)
    assert rest == ranks[0][4:]
    resumed = [json.loads(line) for line in (tmp_path / "b" / "quarantine.jsonl").open()]
    assert sorted(line["row"] for line in resumed) == sorted(expected)


@pytest.fixture(scope="module")
def third(tmp_path_factory) -> Path:
    """Rows of which the media of every third cannot be decoded, though their headers can be
    read."""
    folder = tmp_path_factory.mktemp("third")
    write_media(folder)
    for name in ("0.png", "1.flac"):
        data = (folder / name).read_bytes()
        (folder / f"cut{name}").write_bytes(data[: len(data) * 3 // 4])
    kinds = [[("image", "0.png")], [("audio", "1.flac")], [("image", "0.png"), ("audio", "1.flac")],
             [("image", "1.jpg"), ("audio", "1.flac")]]
    return write_jsonl(folder / "data.jsonl", [llava_row(
        [*((kind, f"cut{name}" if i % 3 == 0 and name != "1.jpg" else name)
           for kind, name in kinds[i % 4]), ("text", "?" * (1 + i % 5))], f"answer {i}")
        for i in range(24)])


def labels_of_a_run(world, run) -> list[tuple]:
    """Of each step (labels of this rank, denominator, examples, positions of those that failed)."""
    trainer = Trainer(run, world)
    return [([label for micro in step.micro
              for label in trainer.orchestrator.dispatch(micro).targets.tolist()],
             step.num_global_targets, step.example_ids.tolist(),
             sorted({f.example for f in step.failed})) for step in trainer.loader()]


@pytest.mark.dist
@pytest.mark.parametrize("dispatch, accumulation", [
    ("tensors", 1), ("bytes", 2),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (("tensors", 2), ("load", 1), ("load", 2), ("bytes", 1)))])
def test_nothing_is_learnt_of_examples_that_failed_and_all_of_the_others(
        third, tmp_path, dispatch, accumulation):
    """Of all ranks and microbatches, label by label."""
    run = run_recipe(third, tmp_path / "run", dispatch)
    run = replace(run, train=replace(run.train, num_steps=3, batch_size=3,
                                     accumulation_steps=accumulation))
    data = opened(third)
    for steps in zip(*run_ranks(labels_of_a_run, 2, run), strict=True):
        _, denominator, examples, failed = steps[0]
        assert [examples[k] for k in failed] == [i for i in examples if i % 3 == 0] != []
        want = np.concatenate([data.load(i).labels for i in examples if i % 3])
        want = sorted(want[want != IGNORE_INDEX].tolist())
        assert sorted(label for labels, *_ in steps for label in labels) == want
        assert denominator == len(want)


@pytest.mark.dist
@pytest.mark.parametrize("limits, text", [
    pytest.param(dict(max_failed_in_a_row=2), "2 media in a row could not be decoded",
                 marks=pytest.mark.slow),
    (dict(max_failed_percent=10.0), "%) could not be decoded, over data.max_failed_percent=10.0"),
])
def test_limits(corpus, tmp_path, limits, text):
    folder, expected = corpus
    with pytest.raises(RankFailure) as failure:
        run_ranks(failures_seen, 2, run_recipe(folder, tmp_path, "load", **limits))
    said = {e[1] for e in failure.value.errors.values()}
    assert len(said) == 1 and len(failure.value.errors) == 2
    [message] = said
    assert text in message
    number = int(message.split("data.jsonl, row ")[1].split(" ")[0])
    assert expected[number] in message


@pytest.mark.dist
def test_held_out_rows_have_the_same_rules(corpus, tmp_path):
    folder, expected = corpus
    num_rows = len(opened(folder))
    held = {n for n in expected if n > num_rows // 2}

    def of(name: str, **data):
        run = run_recipe(folder, tmp_path / name, "load", num_validation=num_rows - num_rows // 2,
                         **data)
        return replace(run, train=replace(run.train, num_steps=1))

    run_ranks(failures_seen, 2, of("a"))
    lines = [json.loads(line) for line in (tmp_path / "a" / "quarantine.jsonl").open()]
    assert held and {x["row"] for x in lines if x["row"] > num_rows // 2} == held
    assert len(lines) == len({x["row"] for x in lines})  # two validations
    with pytest.raises(RankFailure) as failure:
        run_ranks(failures_seen, 2, of("b", strict=True))
    assert {e[1].split(":")[0] for e in failure.value.errors.values()} == {"data.strict"}


def test_cut_never_crosses_a_medium(corpus):
    folder, expected = corpus
    whole = opened(folder)
    good = [i for i in range(len(whole)) if whole.problem(i) is None]
    lengths = {i: whole.layout(i) for i in good}
    for limit in (20, 40, 60, 61, 62, 70, 80):
        dataset = opened(folder, limit=limit)
        for i in good:
            layout, full = dataset.layout(i), lengths[i]
            assert layout.num_tokens.sum() <= limit
            if dataset.problem(i) is not None:
                assert "nothing to learn" in str(dataset.problem(i))
                continue
            n = len(layout.modality)
            media = layout.modality != TEXT
            assert (layout.num_tokens[media] == full.num_tokens[:n][media]).all()
            assert (layout.modality == full.modality[:n]).all()
            labels = dataset.load(i, segments=[]).labels
            assert int((labels >= 0).sum()) == layout.num_targets > 0
