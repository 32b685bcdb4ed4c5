"""`orchmllm dry-run` of one's own recipe: what it prints is about this recipe, and readable."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.job import default_world
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import build_plan
from orchmllm.tools.predict.dry_run import exchange_report
from orchmllm.tools.predict.dry_run_command import main
from orchmllm.tools.predict.workload import sample_layout
from tests.lib.drawn import write_recipe
from tests.lib.recipes import read, small_spec


@pytest.fixture
def path(tmp_path) -> str:
    return write_recipe(tmp_path, "path: nowhere", "train: {batch_size: 2}\n")


@pytest.fixture
def dry_run(path, capfd):
    """What a dry run in this process prints."""
    def run(*args: str) -> str:
        code = main([path, *args])
        stdout, stderr = capfd.readouterr()
        assert code == 0 and stderr == "", stderr  # no warnings
        assert "nan" not in stdout
        assert [x for x in stdout.splitlines() if len(x) > 80] == []
        return stdout

    return run


def test_a_recipe_without_a_number_of_ranks(dry_run):
    """One node, and said so; a verdict with the GB that are left; no figures of the paper."""
    text = dry_run()
    assert text.startswith("8 ranks (one node")
    assert re.search(r"It fits: the fullest rank needs \d+\.\d GB; tensors may take 74\.0 GB", text)
    assert re.search(r"fsdp.memory_gb is not set\)\. \d+\.\d GB are left", text)
    assert "h100-sxm, 85 GB; 8 a node" in text
    assert "of 7." in text and "Between nodes" not in text


def test_one_example_draws_steps_without_audio(dry_run):
    text = dry_run("--ranks", "1", "train.batch_size=1")
    assert text.startswith("1 rank (--ranks)\n1 example a rank")
    assert re.search(r"^  audio +1\.000 +1\.000 +1\.000$", text, re.MULTILINE)


def test_the_global_batch_decides_what_a_rank_holds(dry_run):
    text = dry_run("--ranks", "2", "train.global_batch_size=34",
                   "train.accumulation_steps=3")
    assert "6 examples a rank and microbatch" in text  # 34 / (2 * 3), rounded up


def test_it_does_not_fit_by_so_much(path, capfd):
    assert main([path, "fsdp.memory_gb=0.0005"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert re.match(r"error: the recipe does not fit: .* needs 0\.\d+ GB a rank at least, 0\.\d+ "
                    r"GB more than the 0\.\d+ GB that are allowed \(fsdp.memory_gb\); .* would "
                    r"help \(a GPU of 85 GB is assumed: h100-sxm", said.err)


@pytest.mark.parametrize("name, ranks", [
    ("demo", 4), ("mllm84b", 256), ("pretrained_7b", 8)])
def test_ranks_of_a_recipe(name, ranks):
    assert default_world(read(name), 8)[0] == ranks


def test_ranks_fill_nodes_and_shard_groups():
    recipe = read("mllm84b")
    for size, ranks in ((12, 24), (4, 8), (6, 24), (16, 16)):
        assert default_world(replace(recipe, fsdp=replace(
            recipe.fsdp, shard_size=size)), 8)[0] == ranks


@pytest.mark.parametrize("ranks, node", [(8, 8), (12, 4)])
def test_peers_are_the_ranks_that_a_rank_sends_rows_to(ranks, node):
    """Counted item by item, of a plan that gives no example to a rank without one."""
    layout = sample_layout(MODELS["84b"], num_ranks=ranks, batch_size=2, seed=0)
    rng = np.random.default_rng(0)
    encode = {m: rng.integers(0, ranks, len(layout.segments[code])) for m, code in ENCODERS.items()}
    llm = rng.integers(0, ranks, layout.num_examples)
    peers = {r: set() for r in range(ranks)}
    for example, target in enumerate(llm):
        peers[example // 2].add(int(target))
    for m, code in ENCODERS.items():
        for segment, encoder in zip(layout.segments[code], encode[m], strict=True):
            example = int(layout.example_of_segment[segment])
            peers[example // 2].add(int(encoder))
            peers[int(encoder)].add(int(llm[example]))
    flat = [len(met - {r}) for r, met in peers.items()]
    spec = replace(small_spec(MODELS["84b"]), ranks_per_node=node, fills=False)
    report = exchange_report(build_plan(layout, encode, llm, spec), ranks)
    assert report["peers"] == [pytest.approx(np.mean(flat)), max(flat), ranks - 1]
