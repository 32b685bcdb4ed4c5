"""Everything that a recipe or the command line says has its effect on the dry run, in the right
direction, or is named as not modelled."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.models.gpus import GPUS, kind_of
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import MADE, TEXT, VISION
from orchmllm.plan.step import plan_step
from orchmllm.tools.data.command import main as data_command
from orchmllm.tools.predict.dry_run import dry_run
from orchmllm.tools.predict.dry_run_command import main
from orchmllm.tools.predict.examples import of_file, of_mix, of_recipe
from orchmllm.tools.predict.hardware import Hardware, cluster
from orchmllm.tools.predict.transfers import moves_of
from tests.lib.corpora import write_llava
from tests.lib.drawn import shortened, write_recipe
from tests.lib.recipes import read

BASE = read("mllm10b")
SECTIONS = ("train", "fsdp", "balance", "data", "model")


def report(ranks: int = 16, gpu: dict | None = None, mix: str = "natural", **changes) -> dict:
    """The dry run of three layers at the widths of 10B; changes: section__key=value."""
    return _report(ranks, json.dumps(gpu or {}), mix, json.dumps(changes, sort_keys=True))


@cache
def _report(ranks: int, gpu: str, mix: str, changes: str) -> dict:
    recipe = replace(BASE, model=shortened(BASE.model, 3), train=replace(BASE.train, batch_size=4),
                     fsdp=replace(BASE.fsdp, shard_size=0, activation_checkpointing="none",
                                  loss_chunk_rows=256))
    for path, value in json.loads(changes).items():
        section, key = path.split("__", 1)
        if "__" in key:  # model__llm__frozen
            part, key = key.split("__")
            inner = replace(getattr(getattr(recipe, section), part), **{key: value})
            key, value = part, inner
        recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{key: value})})
    options = json.loads(gpu)
    return dry_run(recipe, ranks, cluster(options.pop("gpu", "h100-sxm"), **options), steps=1,
                   examples=of_mix(recipe, mix))


def figure(r: dict, key: str) -> float:
    memory = r["memory"]["balanced"]
    found = {"memory": memory["peak_bytes"], **memory["moments"], **r["predicted"]["balanced"]}
    return found[key]


@pytest.mark.parametrize("changes, less, more", [
    ({"fsdp__reshard_after_forward": False}, ["step_s"], ["memory"]),
    ({"fsdp__llm_reshard": "node"}, ["step_s"], ["memory"]),
    ({"fsdp__compute_dtype": "float32"}, ["tokens_per_gpu"], ["memory", "llm_s"]),
    ({"fsdp__param_dtype": "bfloat16", "fsdp__compute_dtype": ""}, ["memory", "update_s"], []),
    ({"train__accumulation_steps": 2}, [], ["step_s", "memory", "llm_s"]),
    ({"train__batch_size": 8}, [], ["step_s", "memory"]),
    ({"train__global_batch_size": 40}, ["step_s", "memory"], []),
    ({"fsdp__reduce_dtype": "bfloat16"}, ["llm backward", "traffic_s"], []),
    ({"fsdp__prefetch": 2}, [], ["llm forward"]),
    ({"fsdp__shard_size": 8}, [], ["memory", "update_s"]),
    ({"fsdp__activation_checkpointing": "full"}, ["memory"], ["llm_s"]),
    ({"fsdp__activation_checkpointing": "selective"}, ["memory"], ["llm_s"]),
    ({"fsdp__cpu_offload": True}, ["memory"], ["update_s", "traffic_s"]),
    ({"model__llm__frozen": True}, ["memory", "llm_s", "update_s"], []),
    ({"model__audio__frozen": True}, ["audio_s", "memory"], []),
    ({"model__vision__frozen": True, "model__audio__frozen": True,
      "model__connectors_frozen": True}, ["exchange_s", "vision_s", "vision backward"], []),
    ({"balance__dispatch": "tensors"}, ["exchange_s"], []),  # homes are where they were sampled
    ({"balance__group": "shard", "fsdp__shard_size": 8}, ["internode_bytes"], []),
    ({"balance__ranks_per_node": 4}, [], ["traffic_s"]),
    ({"balance__enabled": False}, ["exchange_s"], ["waiting_s"]),
    ({"balance__min_gain": 0.9}, ["exchange_s"], ["waiting_s"]),
    ({"balance__whole_examples": True}, [], ["waiting_s"]),
    ({"data__max_example_tokens": 200}, ["llm_s", "memory"], []),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_a_key_of_the_recipe_has_its_effect(changes, less, more):
    base, other = report(), report(**changes)
    for key in less:
        assert figure(other, key) < figure(base, key), key
    for key in more:
        assert figure(other, key) > figure(base, key), key


def test_a_loss_by_chunks_takes_less_memory_where_much_is_learnt():
    """Of few targets the float32 gradient of the head, which chunks add up, is more than logits."""
    few, many = ([figure(report(train__batch_size=b, fsdp__loss_chunk_rows=rows), "memory")
                  for rows in (256, 0)] for b in (4, 16))
    assert few[0] > few[1] and many[0] < many[1]


def test_hybrid_sharding_pays_for_its_all_reduce():
    """Two replicas against one group of the same size on half as many ranks."""
    one, two = report(8, fsdp__shard_size=8), report(16, fsdp__shard_size=8)
    assert figure(two, "traffic_s") > figure(one, "traffic_s") + 0.01


def test_smaller_nodes_send_more_to_each_other():
    """With 4 examples a rank it is a matter of chance which of them change their node."""
    large, *small = (figure(report(train__batch_size=8, **how), "internode_bytes") for how in (
        {}, {"balance__ranks_per_node": 4}, {"gpu": {"per_node": 4}}))
    assert min(small) > 1.2 * large


@pytest.mark.parametrize("gpu, less, more", [
    ({"gbit": 50}, ["mfu"], ["traffic_s", "exchange_s"]),
    ({"per_node": 4}, ["mfu"], ["traffic_s"]),
    ({"gpu": "h100-pcie"}, ["tokens_per_gpu"], ["llm_s", "update_s"]),
    ({"gpu": "b200"}, ["llm_s", "update_s"], ["tokens_per_gpu"]),
], ids=str)
def test_an_option_of_the_cluster_has_its_effect(gpu, less, more):
    test = report(gpu=gpu)
    for keys, sign in ((less, -1), (more, 1)):
        for key in keys:
            assert sign * (figure(test, key) - figure(report(), key)) > 0, key


def test_how_rows_travel_has_its_effect():
    """In the background with `bytes`; the longer the more a message takes."""
    tensors, stored = (report(balance__dispatch=d) for d in ("tensors", "bytes"))
    assert figure(stored, "exchange_s") < figure(tensors, "exchange_s")
    plan = plan_step(of_mix(BASE).draw(64, 30, 0), plan_spec(resolve(BASE, 64, 8)))
    quick, slow = (sum(move.seconds(Hardware(message_s=s)) for move in moves_of(plan))
                   for s in (0.0, 1e-3))
    assert 0 < quick < slow


def test_a_mix_has_its_effect_and_the_global_batch_is_what_counts():
    assert figure(report(mix="omni"), "vision_s") != figure(report(), "vision_s")
    whole = report(train__global_batch_size=40)  # 3 a rank, for 48 of which 40 are there
    assert whole["examples_per_step"] == 40 and whole["batch_size"] == 3
    full = report(train__batch_size=3)
    assert figure(whole, "tokens_per_gpu") == pytest.approx(
        figure(full, "tokens_per_gpu") * 40 / 48)


def test_a_step_is_the_sum_of_its_parts():
    p = report()["predicted"]["balanced"]
    assert p["step_s"] == pytest.approx(sum(p[k] for k in (
        "vision_s", "audio_s", "llm_s", "traffic_s", "exchange_s", "update_s")))
    assert 0 < p["waiting_s"] < report()["predicted"]["none"]["waiting_s"]


def test_what_is_not_modelled_is_named():
    said = " ".join(report(fsdp__compile=True, balance__dispatch="bytes")["not_modelled"])
    for what in ("waiting for data", "saving", "fsdp.compile", "bytes"):
        assert what in said
    assert "fsdp.compile" not in " ".join(report()["not_modelled"])


@pytest.mark.parametrize("gpu, gigabytes", [("l40s", 48), ("h100-sxm", 85), ("h200", 150)])
def test_memory_of_the_gpu_is_what_counts(gpu, gigabytes):
    """No shipped recipe names a number that would leave a part of a larger GPU unused."""
    budget = report(gpu={"gpu": gpu})["memory_budget_bytes"]
    assert budget == pytest.approx(0.87e9 * gigabytes)
    smaller = report(gpu={"gpu": gpu}, fsdp__memory_gb=90.0)["memory_budget_bytes"]
    assert smaller == (90e9 if gigabytes > 90 else budget)


@pytest.mark.parametrize("name, kind", [
    ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", "h200-nvl"),
    ("NVIDIA H20", "h20"), ("NVIDIA B200", "b200"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100 80GB PCIe", "a100-pcie"), ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
    ("NVIDIA L40S", "l40s"), ("NVIDIA GeForce RTX 4090", "4090"), ("Radeon", None)])
def test_variants_of_a_gpu_are_told_apart(name, kind):
    assert kind_of(name) == kind


@pytest.fixture
def own(tmp_path, capsys):
    """The command on a small recipe -> (exit code, stdout, stderr)."""
    path = write_recipe(tmp_path, "path: nowhere", "train: {batch_size: 2}\n")

    def run(*args: str) -> tuple[int, str, str]:
        code = main([path, "--ranks", "2", *args])
        return code, *capsys.readouterr()

    return run


def test_wrong_options_are_one_line(tmp_path, own):
    code, _, told = own("--gpu", "h10")
    assert code == 2 and all(name in told for name in GPUS)
    assert told.startswith("error: --gpu h10: choose one of h100-sxm, ")
    lines = tmp_path / "lengths.jsonl"
    lines.write_text('{"text_tokens": 3}\n{"pictures": 1}\n', encoding="utf-8")
    code, _, told = own("--lengths", str(lines))
    assert code == 2 and "line 2" in told and "pictures" in told
    code, _, told = own("--measured", str(lines))
    assert code == 2 and "--measured" in told and told.count("\n") == 1
    for args in (("--mix", "made"), ("--lengths", str(lines))):
        lines.write_text('{"made": [[64, 64]]}', encoding="utf-8")
        code, _, told = own(*args)
        assert code == 2 and "the model makes no images" in told and told.count("\n") == 1
    for row, says in (('{"audio_s": [1e999]}', "line 1"), ('{"text_tokens": 1e30}', "line 1"),
                      ('{"images": [[1e12, 9]]}', "2**31"), ('{"audio_s": [1000]}', "too long")):
        lines.write_text(row, encoding="utf-8")
        code, _, told = own("--lengths", str(lines))
        assert code == 2 and f"--lengths {lines}" in told and says in told, told


def test_a_measured_file_is_whole_and_replaces_the_assumed_shares(tmp_path, own):
    path, shares = tmp_path / "m.json", {"products": 0.3, "attention": 0.2, "layer": 0, "fixed": 0}
    phases = dict.fromkeys(PHASES, shares)
    for wrong in ({}, {"audio": {}}, {"llm": shares | {"products": 0}},
                  {"llm": shares | {"fixed": -1}}):
        path.write_text(json.dumps({"gpu": "h100-sxm", "phases": wrong and phases | wrong}))
        code, _, told = own("--measured", str(path))
        assert code == 2 and f"--measured {path}" in told and told.count("\n") == 1
    path.write_text(json.dumps({"gpu": "h100-sxm", "phases": phases}))
    code, said, _ = own("--measured", str(path))
    assert code == 0 and "llm: 0.300 and 0.200" in said
    path.write_text(json.dumps({"gpu": "a100", "phases": phases}))
    code, _, told = own("--measured", str(path))
    assert code == 2 and "it was measured on a100: say --gpu a100" in told


def test_lengths_of_a_statistics_file(tmp_path, own):
    lines = tmp_path / "lengths.jsonl"
    lines.write_text('{"images": [[640, 480]], "text_tokens": 50}\n{"text_tokens": 9}\n' * 30,
                     encoding="utf-8")
    found = tmp_path / "r.json"
    code, said, told = own("--lengths", str(lines), "--json", str(found), "--gpu", "a100")
    assert code == 0, told
    r = json.loads(found.read_text())
    assert r["epoch"] == 60 and r["flops"]["vision"] > 0 and r["flops"]["audio"] == 0
    assert "60 examples of" in said and "an epoch of 60 examples" in said
    assert "a100, 85 GB" in said


def test_images_that_are_made_are_behind_the_text_that_they_are_made_from(tmp_path):
    recipe = read("disttrain_72b")
    recipe = replace(recipe, data=replace(recipe.data, max_example_tokens=300))
    lines = tmp_path / "lengths.jsonl"
    lines.write_text('{"text_tokens": 500, "made": [[640, 480], [4096, 4096]], "images": [[28, 56]]'
                     '}\n{"text_tokens": 9}\n', encoding="utf-8")
    [found] = of_file(recipe, lines).rows()
    assert found.modality.tolist() == [TEXT, VISION, TEXT, MADE, MADE, TEXT]
    assert found.grid[found.segments[MADE]].tolist() == [[1, 30, 40], [1, 64, 64]]
    assert found.tokens_per_example.tolist() == [300, 9]  # the text is cut, and no image
    assert found.conditions.tolist() == [299, 300]
    drawn = of_mix(recipe, "made").draw(4, 100, 0)
    items, read_ = (drawn.items_per_example[m] for m in (MADE, VISION))
    assert 0.8 < items.sum() / read_.sum() < 1.25 and not items[read_ > 0].any()
    ends = np.cumsum(drawn.segments_per_example)[items > 0] - 1
    assert (drawn.modality[ends] == MADE).all()
    assert (drawn.conditions == drawn.tokens_per_example[items > 0]).all()


def test_the_recipes_own_lengths_once_they_are_indexed(tmp_path, capsys):
    path = write_recipe(tmp_path, f"path: {write_llava(tmp_path / 'llava')}",
                        "train: {batch_size: 2}\n")
    assert main([path, "--ranks", "2"]) == 0
    assert "orchmllm data index" in " ".join(capsys.readouterr().out.split())
    assert data_command(["index", path, "--workers", "1"]) == 0
    assert main([path, "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "the recipe's own" in said and "an epoch of" in said
    examples, fewer = (of_recipe(load_recipe(path, x)) for x in ((), ["data.num_validation=1"]))
    assert fewer.epoch == examples.epoch - 1 > 0  # held-out rows are not trained on
    assert examples.draw(2, 3, 0).examples_per_rank.tolist() == [3, 3]
