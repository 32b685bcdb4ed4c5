"""`orchmllm plan job`: its choice against exhaustive search, what it writes, and that it fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from orchmllm.config.fsdp import CHOICES
from orchmllm.config.recipe import load_recipe
from orchmllm.plan.assign import PHASES
from orchmllm.tools.predict.dry_run_command import main as dry_run_command
from orchmllm.tools.predict.examples import of_mix
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.plan_job import main
from orchmllm.tools.predict.search import KEEPS, Found, Search, Setting
from tests.lib.drawn import shortened, with_processor
from tests.lib.recipes import RECIPES, read


def search(batch: int = 0, memory_gb: float = 20.0, **options) -> Search:
    recipe = read("mllm10b")
    recipe = replace(recipe, model=shortened(recipe.model, 6), fsdp=replace(
        recipe.fsdp, memory_gb=memory_gb, loss_chunk_rows=512))
    return Search(recipe, 16, cluster(gbit=options.pop("gbit", 400)), of_mix(recipe),
                  16 * batch, steps=1)


@cache
def best(batch: int, memory_gb: float, gbit: float) -> Found:
    return search(batch, memory_gb, gbit=gbit).best()[0]


@pytest.mark.parametrize("memory_gb, gbit", [
    pytest.param(9, 400, marks=pytest.mark.slow),
    pytest.param(13, 100, marks=pytest.mark.slow), (40, 25)])
def test_the_choice_is_that_of_exhaustive_search(memory_gb, gbit):
    """All settings with one choice of what stays gathered for all phases, and one for the encoders'
    checkpointing, each timed as a whole."""
    made, chosen = search(4, memory_gb, gbit=gbit), best(4, memory_gb, gbit)
    assert chosen.peak_bytes <= 1e9 * memory_gb
    top = 0.0
    for (b, m), group, keep, tower, llm in product(
            made.batches(), made.groups(), KEEPS, CHOICES, CHOICES):
        if keep == "node" and group <= 8:
            continue
        found = made.found(Setting(b, m, group, (keep,) * 3, (tower, tower, llm)))
        if found.peak_bytes <= made.budget:
            top = max(top, found.tokens_per_s)
    assert chosen.tokens_per_s >= 0.98 * top > 0


def test_a_slower_link_and_less_memory_cost_throughput():
    speed = {(gb, gbit): best(4, gb, gbit).tokens_per_s
             for gb, gbit in ((9, 400), (40, 400), (40, 25))}
    assert speed[9, 400] < speed[40, 400] > speed[40, 25]


def test_another_link_also_carries_the_exchange():
    recipe = read("mllm10b")
    fast, slow = (Search(replace(recipe, model=shortened(recipe.model, 2), balance=replace(
        recipe.balance, dispatch="tensors")), 16, cluster(gbit=g), of_mix(recipe), 64, steps=1)
        for g in (400, 25))
    setting = Setting(4, 1, 16, ("full",) * 3, ("full",) * 3)
    assert slow.found(setting).time.exchange > 5 * fast.found(setting).time.exchange


def test_groups_are_parts_of_nodes_or_whole_nodes():
    """A group of 3 GPUs would lie on two nodes of 8; no node is kept over where it is one GPU."""
    recipe = read("mllm10b")
    of = [Search(recipe, ranks, cluster(per_node=node), of_mix(recipe), ranks, steps=1)
          for ranks, node in ((24, 8), (6, 8), (4, 1))]
    assert [s.groups() for s in of] == [[1, 2, 4, 8, 24], [1, 2, 3, 6], [1, 2, 4]]
    kept = {k for setting in of[2].ranked() for k in setting.reshard}
    assert kept == {"full", "none"}  # fsdp.*_reshard=node is refused there


def test_what_the_recipe_says_is_what_it_would_do():
    """With `auto` decided, and the mini-batch that train.global_batch_size leaves a rank."""
    recipe = read("mllm10b")
    recipe = replace(recipe, model=shortened(recipe.model, 6), fsdp=replace(
        recipe.fsdp, memory_gb=60, activation_checkpointing="auto"), train=replace(
        recipe.train, global_batch_size=64))
    found = {}
    for gb in (60, 16, 4):
        made = Search(replace(recipe, fsdp=replace(recipe.fsdp, memory_gb=gb, shard_size=0)), 16,
                      cluster(), of_mix(recipe), 64, steps=1)
        found[gb] = made.given()
        assert found[gb].setting.batch_size == 4
        assert (found[gb].peak_bytes <= made.budget) == (gb > 4)
    assert found[60].setting.checkpointing == ("none",) * 3
    assert found[4].setting.checkpointing == ("full",) * 3 != found[16].setting.checkpointing
    made = replace(made, recipe=replace(recipe, fsdp=replace(recipe.fsdp, shard_size=5)))
    assert made.given() is None


def test_any_batch_is_at_least_as_good():
    kept, free = best(4, 40, 25), best(0, 40, 25)
    assert kept.setting.batch_size * kept.setting.microbatches == 4
    assert free.tokens_per_s >= kept.tokens_per_s


def test_the_command(tmp_path, capsys):
    path, out = RECIPES / "mllm_1gpu.yaml", tmp_path / "job.txt"
    code = main([str(path), "--ranks", "8", "--steps", "1", "--gpu", "a100", "--mix",
                 "natural", "--out", str(out)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "as the recipe says" in said.out and "a100" in said.out
    overrides = out.read_text().split()
    recipe = load_recipe(path, overrides)  # as train takes them
    assert recipe.train.batch_size * recipe.train.accumulation_steps == 16
    assert "\n  ".join(overrides) in said.out
    table = said.out.partition("(vision/audio/llm):\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) > 3 and len(set(table)) == len(table)
    choices = [row.split()[5] for row in table[1:-1]]
    assert max(map(len, table)) <= 61 + max(map(len, choices))


def test_one_shard_of_all_ranks_is_named_where_shards_balance(tmp_path):
    path, out = RECIPES / "mllm_1gpu.yaml", tmp_path / "job.txt"
    shard = ["balance.group=shard", "fsdp.shard_size=4"]
    assert main([str(path), "--ranks", "8", "--steps", "1", "--mix", "natural", "--out",
                 str(out), "fsdp.memory_gb=9.5", *shard]) == 0
    assert load_recipe(path, [*shard, *out.read_text().split()]).fsdp.shard_size == 8


@pytest.mark.parametrize("args, says", [
    (["--ranks", "8", "--global-batch", "12"], "--global-batch 12 is no multiple of 8 GPUs: say "),
    (["--ranks", "4", "train.global_batch_size=30"],
     "train.global_batch_size 30 is no multiple of 4 GPUs: say 28"),
    (["--ranks", "1", "fsdp.memory_gb=5"], "nothing fits 1 GPUs of 5 GB (fsdp.memory_gb)"),
    (["--ranks", "8", "--gpu", "h1"], "choose one of h100-sxm"),
    (["--ranks", "8", "--network", "nan"], "--network nan"),
])
def test_what_cannot_be_is_one_line(args, says, capsys):
    assert main([str(RECIPES / "mllm_1gpu.yaml"), "--steps", "1", *args]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and says in told and told.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks", [("mllm84b", 256), ("mllm10b", 64)])
def test_the_chosen_setting_fits_by_tracking(name, ranks):
    """At three layers, within what the model predicts for as many: full widths, rank 0."""
    from tests.lib.tracked import tracked

    recipe = read(name)
    made = Search(recipe, ranks, cluster(), of_mix(recipe),
                  recipe.train.batch_size * ranks, steps=1)
    best = made.best()[0]
    short = best.setting.of(replace(recipe, train=replace(recipe.train, global_batch_size=0)))
    words = {f"{p}_checkpointing": short.fsdp.checkpointing(p).partition(":")[0] for p in PHASES}
    short = replace(short, model=shortened(recipe.model, 3), fsdp=replace(short.fsdp, **words))
    peak, moments = tracked(short, ranks)
    assert max(moments.values()) == pytest.approx(peak, rel=0.05)
    assert best.peak_bytes <= made.budget and peak <= made.budget


def test_a_batch_that_breaks_a_cap_does_not_fit(capsys):
    """Its own batch is within the cap of the dry run, and breaks that of the search."""
    demo, cap = str(RECIPES / "demo.yaml"), "balance.llm.max_rank_tokens"
    model = f"model.config={with_processor()}"
    assert dry_run_command([demo, "--ranks", "4", f"{cap}=4000", model]) == 0
    capsys.readouterr()
    job = [demo, "--ranks", "4", "--global-batch", "0", model]
    assert main([*job, f"{cap}=2000"]) == 0
    out = capsys.readouterr().out
    assert "Overrides:\n  train.batch_size=4\n" in out and "as the recipe says" not in out
    assert main([*job, f"{cap}=10"]) == 2
    assert "or a larger balance.*.max_rank_tokens" in capsys.readouterr().err
