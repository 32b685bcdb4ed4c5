"""All schemes on equal data: what must hold of each, on two mixes; the paper's ablations; and the
commands around them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.ablations import main, padded
from orchmllm.papers.mixes import MIXES, MODELS, headers_of
from orchmllm.papers.reproduce import main as reproduce
from orchmllm.papers.schemes import (
    ASSIGN,
    SCHEMES,
    run,
)
from orchmllm.papers.simulate import main as simulate
from orchmllm.plan.assign import PHASES, example_costs
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, ENCODERS, TEXT, VISION, BatchLayout
from orchmllm.plan.step import build_plan
from orchmllm.tools.predict.workload import batch_layout, sample_headers
from tests.lib.corpora import write_llava
from tests.lib.drawn import with_processor, write_recipe
from tests.plan.test_plan_schemes import spec

MODEL, RANKS, BATCH = MODELS["84b"], 64, 30


@pytest.fixture(scope="module", params=["natural", "omni"])
def results(request):
    pool = batch_layout(sample_headers(request.param, 2 * RANKS * BATCH, 3), MODEL, 1)
    return {name: run(scheme, pool, MODEL, num_ranks=RANKS, batch=BATCH)
            for name, scheme in SCHEMES.items() if name != "orchmllm"}


def test_a_plan_per_phase_is_near_perfect_and_no_other_is(results):
    best = {n: r for n, r in results.items() if "per-phase" in n}
    assert all(r.over_perfect <= 1.06 for r in best.values())
    assert all(r.over_perfect > 1.02 for n, r in results.items() if n not in best)
    for r in results.values():
        assert all(x >= 1 - 1e-9 for x in r.imbalance.values()) and r.steps >= 1


def test_what_each_scheme_is_known_for(results):
    r = results
    assert r["random-padded"].over_perfect > r["random"].over_perfect
    assert r["length-group"].over_perfect > r["random"].over_perfect  # unequal across ranks
    assert r["device-group"].length_cv > 1.5 * r["random"].length_cv  # randomness is lost
    assert r["intra"].imbalance["vision"] < 1.05 < r["intra"].imbalance["llm"]
    assert r["pre-balance"].imbalance["llm"] < 1.01 < r["pre-balance"].imbalance["vision"]
    grouped_before = ("random-padded", "random", "length-group", "device-group", "isf", "capped")
    for name, result in results.items():
        assert (result.moved_mb == 0) == (name in grouped_before), name
        assert (result.dropped > 0) == (name == "isf"), name


def test_examples_and_costs_survive_regrouping():
    pool = batch_layout(sample_headers("omni", 400, 0), MODEL, 1)
    spec = plan_spec(resolve(Recipe(model=MODEL), 8, 8))
    index = np.random.default_rng(0).permutation(400)
    sizes = np.array([100, 0, 250, 50])
    layout = pool.taken(index, sizes)
    assert layout.examples_per_rank.tolist() == sizes.tolist()
    assert (layout.example_id == index).all()
    before, after = example_costs(pool, spec), example_costs(layout, spec)
    assert (after == before[index]).all()
    for phase, cost in zip(PHASES, before.T, strict=True):
        for assign in ("none", "intra", "phase"):
            assert ASSIGN[assign](layout, spec).phase_cost(phase)[1].sum() == cost.sum()
    mine = layout.segments[ENCODERS["vision"]]
    assert layout.rows[mine].sum() == pool.rows[pool.segments[ENCODERS["vision"]]].sum()


def test_too_few_examples():
    pool = batch_layout(sample_headers("natural", 20, 0), MODEL, 1)
    with pytest.raises(ValueError, match="20 examples make 10 mini-batches, fewer than 64 ranks"):
        run(SCHEMES["random"], pool, MODEL, num_ranks=64, batch=2)


def test_simulate_command(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {{config: {MODELS['10b'].config}}}\ndata: {{path: none}}\n",
                      encoding="utf-8")
    command = [str(recipe), "--mix", "natural", "--ranks", "8", "train.batch_size=10"]
    assert simulate(["per-phase", *command]) == 0
    out = capsys.readouterr().out
    assert "8 ranks x 10 examples, 400 examples of natural" in out
    step = float(re.search(r"^per-phase +\S+ +\S+ +\S+ +(\S+)", out, re.M)[1])
    assert 1 <= step < 1.1
    assert simulate(["random", *command[:-1], "train.global_batch_size=24"]) == 0
    assert "8 ranks x 3 examples, 120 examples of natural" in capsys.readouterr().out
    steps = {}
    for limit in ("0", "300"):  # texts are cut there, as in training
        simulate(["random", *command, f"data.max_example_tokens={limit}"])
        steps[limit] = capsys.readouterr().out.splitlines()[-1]
    assert steps["0"] != steps["300"]
    with pytest.raises(SystemExit) as stop:
        simulate(["random", *command, "--steps", "0"])
    assert stop.value.code == 2 and "--steps: 0: must be at least 1" in capsys.readouterr().err
    own = [str(recipe), f"model.config={with_processor()}"]  # its own data, which is not there
    assert simulate(["random", *own]) == 2 and "none" in capsys.readouterr().err


def test_simulate_on_the_recipes_own_data(tmp_path, capsys):
    recipe = write_recipe(tmp_path, f"path: {write_llava(tmp_path / 'llava')}",
                          "train: {batch_size: 3}\n")
    assert simulate(["per-phase", recipe, "--ranks", "2", "--steps", "2"]) == 0
    assert "examples of the recipe" in capsys.readouterr().out


def test_the_mixes_are_what_they_are_called():
    for mix, many in (("documents", "pages"), ("video", "frames"), ("bimodal audio", "")):
        headers = headers_of(mix, 500, 0)
        owner = np.repeat(np.arange(500), headers.media_per_example)
        image = np.bincount(owner[headers.is_image], minlength=500)
        assert len(headers.size) == len(headers.is_image) == headers.media_per_example.sum()
        assert (image.max() > 15) == bool(many) and (image == 0).any(), mix
        seconds = headers.size[~headers.is_image, 0] / 16_000
        assert (set(seconds) == {1, 29}) == (mix == "bimodal audio"), mix
    pages, text = headers_of("documents", 500, 0), sample_headers("half", 500, 0).text
    scanned = pages.media_per_example > 1
    assert (pages.text[scanned] > text[scanned]).all()  # each page has its words


@pytest.mark.slow
def test_reproduce_compare(capsys):
    assert reproduce(["compare", "--ranks", "8", "16", "--batch-size", "6"]) == 0
    text = capsys.readouterr().out
    gains = [float(x) for x in re.findall(r"^pre-balance over per-phase: ([\d.]+)x$", text, re.M)]
    assert len(gains) == 2 * len(MIXES)
    for mix in MIXES:
        assert f"{mix} mix, 84b costs, 16 ranks" in text
    assert text.endswith(f"over pre-balancing: {min(gains):.3f}x to {max(gains):.3f}x\n")


def test_ablations_are_of_the_lengths_and_the_world_that_are_asked_for(tmp_path, capsys):
    recipe = write_recipe(tmp_path, "path: nowhere", "train: {batch_size: 2}\n")
    lines = tmp_path / "lengths.jsonl"
    lines.write_text('{"images": [[640, 480]], "text_tokens": 50}\n' * 30, encoding="utf-8")
    found = {}
    for name, args in (("drawn", ()), ("omni", ("--mix", "omni")),
                       ("file", ("--lengths", str(lines))),
                       ("twice", ("train.accumulation_steps=2",))):
        path = tmp_path / f"{name}.json"
        assert main([recipe, "--ranks", "2", "--json", str(path), *args]) == 0
        assert capsys.readouterr().out.startswith("Lengths: ")
        table = json.loads(path.read_text())["tables"][0]
        found[name] = [row["tokens_per_gpu"] for row in table["rows"].values()]
    assert len({tuple(f) for f in found.values()}) == 4
    assert found["file"][0] == pytest.approx(found["file"][-1])  # all alike: nothing to balance
    assert main([recipe, "--ranks", "9", "fsdp.shard_size=2"]) == 2
    assert "which does not divide the 9 ranks" in capsys.readouterr().err


def test_a_rank_pads_its_clips_to_its_longest_one():
    """Each clip is sampled on a rank of its own; the first and the last are encoded on rank 0."""
    clips = [SegmentLengths(rows, -(-rows // 2), 9, (1, 1, rows)) for rows in (100, 40, 31)]
    image = SegmentLengths(16, 16, 4, (1, 4, 4))
    layout = BatchLayout.concat([BatchLayout.from_segments(i, 1, [
        (TEXT, text_lengths(3)), (AUDIO, clip), (VISION, image)]) for i, clip in enumerate(clips)])
    plan = build_plan(layout, {"vision": np.arange(3), "audio": np.array([0, 1, 0])},
                      np.arange(3), spec())
    made, here = padded(plan).layout, layout.segments[AUDIO]
    assert made.rows[here].tolist() == [100, 40, 100]
    assert made.attn_len[here].tolist() == [50, 20, 50]
    assert layout.rows[here].tolist() == [100, 40, 31]  # the plan that moves them has their own
    others = layout.modality != AUDIO
    assert (made.rows == layout.rows)[others].all() and (made.num_tokens == layout.num_tokens).all()
