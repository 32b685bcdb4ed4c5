"""balance_encoders with tiny models of every family that it knows, against the same model in one
process; and the refusal of those that it does not know.

The slow tests run every cell: families x scenarios x {FSDP2, DDP} x checkpointing, and hold the
table of docs/encoders.md against what they measured (WRITE_TABLES=1 writes it).
"""

from __future__ import annotations

import itertools
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from orchmllm import Encoder, Rows, balance_encoders
from orchmllm.encoders import answers, sharing
from orchmllm.encoders.table import describe_local
from tests.lib.commands import ROOT
from tests.lib.encoder_models import ALL, FAMILIES, Item, batch
from tests.lib.encoder_runs import CHECKPOINTS, WRAPS, one_step, run_cells, scenarios
from tests.lib.ranks import RankFailure, run_ranks

NAMES = list(FAMILIES)
SCENARIOS = list(scenarios(ALL[0]))
MEASURED = ROOT / "tests/golden/encoder_families.json"
# These compute partly in float32 whatever the model's dtype, and one call of their encoder for all
# images differs from a call for each in the last bits of it.
FLOAT32 = {"gemma3", "glm4v"}
FAST = [("qwen3_vl", "fsdp2", "non-reentrant", "media apart"),
        ("qwen2_5_omni", "fsdp2", "none", "media apart"),
        ("llava_onevision", "ddp", "none", "text only"), ("idefics3", "fsdp2", "none", "one item"),
        ("mistral3", "ddp", "non-reentrant", "uneven"),
        ("qwen2_audio", "fsdp2", "none", "uneven"),
        ("audioflamingo3", "ddp", "reentrant", "text only"),
        ("audioflamingo3", "fsdp2", "reentrant", "no media")]


def installed(name: str) -> bool:
    """Whether transformers is new enough for the family."""
    have, need = ([int(n) for n in v.split(".")[:2]] for v in (
        version("transformers"), families.FAMILIES[name].since))
    return have >= need


def bound(name: str, size: float) -> float:
    """How far gradients, of which the largest is `size`, may differ."""
    return size * (1e-8 if name in FLOAT32 else 1e-14)


def check(cells, results) -> float:
    """Largest difference of a gradient over cells and ranks, each within its bound."""
    for rank in results:
        for cell, seen in zip(cells, rank, strict=True):
            assert seen["difference"] <= bound(cell[0], max(seen["size"], 0.01)), (cell, seen)
            assert seen["loss"] <= 1e-7 if cell[0] in FLOAT32 else seen["loss"] <= 1e-13, cell
            assert cell[3] == "no media" or seen["size"] > 1e-3, cell
    return max(seen["difference"] for rank in results for seen in rank)


@pytest.mark.slow
@pytest.mark.dist
def test_gradients_of_some_cells():
    cells = [cell for cell in FAST if installed(cell[0])]
    results = run_ranks(run_cells, 3, cells)
    check(cells, results)
    for cell, seen in zip(cells, results[0], strict=True):
        assert seen["moved"] > 0 or cell[3] != "uneven", cell


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_cells(name):
    if not installed(name):
        pytest.skip("needs a newer transformers")
    cells = list(itertools.product([name], WRAPS, CHECKPOINTS, SCENARIOS))
    worst = check(cells, run_ranks(run_cells, 3, cells))
    recorded = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    if os.environ.get("WRITE_TABLES"):
        recorded[name] = {"cells": len(cells), "difference": float(f"{worst:.0e}")}
        MEASURED.write_text(json.dumps({n: recorded[n] for n in NAMES if n in recorded},
                                       indent=1) + "\n")
        write_table()
    assert recorded[name]["cells"] == len(cells)


def table() -> list[str]:
    """The table of docs/encoders.md."""
    recorded = json.loads(MEASURED.read_text())
    lines = ["| family | transformers | encoder: calls it answers | reads | cells | largest "
             "difference |", "|---|---|---|---|---|---|"]
    for name, family in families.FAMILIES.items():
        calls = "; ".join(f"{e.name}: {', '.join(f'`{c}`' for c in e.calls)}"
                          for e in family.encoders)
        reads = ", ".join(sorted({f"`{f}`" for e in family.encoders for f in e.outputs}))
        seen = recorded[name]
        lines.append(f"| {name} | {family.since} | {calls} | {reads} | {seen['cells']} | "
                     f"{seen['difference']:.0e} |")
    return lines


DOCS = ROOT / "docs/encoders.md"


def write_table() -> None:
    if not all(n in json.loads(MEASURED.read_text()) for n in NAMES):
        return
    lines = DOCS.read_text().splitlines()
    rows = [i for i, line in enumerate(lines) if line.startswith("| ") and "`get_" in line
            or line.startswith("| qwen2_audio")]
    lines[rows[0] - 2: rows[-1] + 1] = table()
    Path(DOCS).write_text("\n".join(lines) + "\n")


def test_the_table_in_the_docs_is_that_of_the_tests():
    assert list(families.FAMILIES) == NAMES
    text = DOCS.read_text()
    assert "\n".join(table()) in text


# The tests above can fail.

def swapped(world) -> float:
    """Features of two items change places."""
    right = sharing.return_features

    def wrong(*arguments):
        return [(rows.flip(0), counts) for rows, counts in right(*arguments)]

    sharing.return_features = wrong
    items = scenarios(FAMILIES["llava"])["uneven"][world.rank]
    return one_step(FAMILIES["llava"], "fsdp2", "none", items, world.rank)["difference"]


def without_deepstack(world) -> str:
    encoder = families._QWEN
    family = FAMILIES["qwen3_vl"]
    model = family.build()
    inputs = batch(family, model, [Item("image", 2)], world.rank)
    balance_encoders(model.model, [encoder])
    try:
        model(**inputs)
    except TypeError as error:
        return str(error)
    return ""


def without_zero(world) -> float:
    answers.Answers.join_zero = lambda *arguments: None
    items = scenarios(FAMILIES["llava"])["text only"][world.rank]
    return one_step(FAMILIES["llava"], "fsdp2", "none", items, world.rank)["difference"]


@pytest.mark.dist
def test_swapped_features_are_seen():
    assert max(run_ranks(swapped, 3)) > 1e-3


@pytest.mark.dist
def test_a_field_left_out_fails_loudly():
    assert all("NoneType" in text for text in run_ranks(without_deepstack, 2))


@pytest.mark.dist
@pytest.mark.slow
def test_without_the_zero_term_ranks_wait_for_each_other():
    with pytest.raises((RankFailure, AssertionError)):
        run_ranks(without_zero, 3, timeout_s=20)


# Models that cannot be balanced exactly are refused at the call.

def _tiny(config: str, model: str, **arguments) -> nn.Module:
    import transformers

    with torch.device("meta"):
        return getattr(transformers, model)(getattr(transformers, config)(**arguments))


TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
UNKNOWN = {
    "blip_2": ("Blip2Config", "Blip2ForConditionalGeneration", dict(
        vision_config=dict(TINY, image_size=16, patch_size=8), qformer_config=dict(
            TINY, vocab_size=64), text_config=dict(
            model_type="opt", hidden_size=32, ffn_dim=48, num_hidden_layers=2,
            num_attention_heads=2, vocab_size=64, word_embed_proj_dim=32))),
    "mllama": ("MllamaConfig", "MllamaForConditionalGeneration", dict(
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_global_layers=1, attention_heads=2, image_size=16, patch_size=8,
                           intermediate_layers_indices=[0], vision_output_dim=64),
        text_config=dict(TINY, vocab_size=64, num_key_value_heads=2, cross_attention_layers=[1],
                         pad_token_id=0))),
    "llama4": ("Llama4Config", "Llama4ForConditionalGeneration", dict(
        vision_config=dict(TINY, image_size=16, patch_size=8, vision_output_dim=32),
        text_config=dict(TINY, vocab_size=64, num_key_value_heads=2, num_local_experts=2,
                         intermediate_size_mlp=48, head_dim=16))),
    "ovis2": ("Ovis2Config", "Ovis2ForConditionalGeneration", dict(
        vision_config=dict(TINY, image_size=16, patch_size=8, vocab_size=32),
        text_config=dict(TINY, model_type="qwen2", vocab_size=64, num_key_value_heads=2))),
    "phi4_multimodal": ("Phi4MultimodalConfig", "Phi4MultimodalForCausalLM", dict(
        TINY, vocab_size=64, num_key_value_heads=2, pad_token_id=0,
        vision_config=dict(TINY, image_size=28, crop_size=28, patch_size=14),
        audio_config=dict(hidden_size=32, intermediate_size=48, num_blocks=1,
                          num_attention_heads=2))),
    "kimi_k25": ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration", dict(
        text_config=dict(num_hidden_layers=1))),
    "a text model": ("Qwen2Config", "Qwen2ForCausalLM", dict(
        TINY, vocab_size=64, num_key_value_heads=2)),
}


@pytest.mark.parametrize("name", list(UNKNOWN))
def test_an_unknown_architecture_is_refused(name):
    config, model, arguments = UNKNOWN[name]
    made = _tiny(config, model, **arguments)
    with pytest.raises(ValueError, match="does not know .*orchmllm.Encoder"):
        balance_encoders(made)


def test_media_move_in_the_dtype_of_the_tower():
    """Of a model in bfloat16 that is given float32, as processors return it; never in a larger."""
    family = FAMILIES["qwen2_vl"]
    model = family.build()
    inputs = batch(family, model, [Item("image", 2), Item("video", 1)], 0)
    for given, tower, moved in [(torch.float32, torch.bfloat16, torch.bfloat16),
                                (torch.bfloat16, torch.float32, torch.bfloat16)]:
        both = {k: v.to(given) if k.startswith("pixel") else v for k, v in inputs.items()}
        (encoder,) = families.FAMILIES["qwen2_vl"].encoders
        model.model.visual.to(tower)
        assert describe_local(encoder, model.model, both).values[0].dtype == moved


def test_gemma3n_is_refused():
    """Its tower needs timm, which is not installed: the model without its weights."""
    from transformers import Gemma3nForConditionalGeneration, Gemma3nModel

    model, inner = (object.__new__(kind) for kind in (
        Gemma3nForConditionalGeneration, Gemma3nModel))
    for module in (model, inner):
        nn.Module.__init__(module)
    model.model = inner
    with pytest.raises(ValueError, match="does not know Gemma3nFor"):
        balance_encoders(model)


def test_what_depends_on_other_items_or_on_the_rank_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="visual.config.attention_dropout is 0.1"):
        model = FAMILIES["qwen2_vl"].build()
        model.model.visual.config.attention_dropout = 0.1
        balance_encoders(model)
    model = FAMILIES["llava"].build()
    model.model.vision_tower.extra = nn.BatchNorm2d(3)
    with pytest.raises(ValueError, match="vision_tower.extra is a BatchNorm2d"):
        balance_encoders(model)
    model.model.vision_tower.extra = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="vision_tower.extra has dropout 0.5"):
        balance_encoders(model)
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(ValueError, match="of transformers 4.57.1: .* tested with 5.17 and newer"):
        balance_encoders(FAMILIES["qwen2_vl"].build())
    with pytest.raises(ValueError, match="holds 2 models with encoders"):
        balance_encoders(nn.ModuleList([FAMILIES["llava"].build(), FAMILIES["llava"].build()]))


def test_arguments_are_checked():
    model = nn.Sequential(nn.Linear(2, 2))
    spec = Encoder("photo", {"tower": Rows("photos")})
    for arguments, text in [
            (dict(when="ever"), "when is 'ever'"), (dict(min_gain=2.0), "min_gain is 2.0"),
            (dict(min_gain=None), "min_gain is None"),
            (dict(encoders=[]), "at least one Encoder"), (dict(encoders=[spec]), "has no 'tower'"),
            (dict(encoders=[Encoder("a", {"0": Rows("x")})]), "no get_input_embeddings"),
            (dict(encoders=[Encoder("a", {"0": Rows("x")})], join="embed"), "has no 'embed'")]:
        with pytest.raises(ValueError, match=text):
            balance_encoders(model, **arguments)
    with pytest.raises(ValueError, match="layouts of one kind"):
        Encoder("none", {})


def hidden_and_given(world) -> list[str]:
    """A tower that fully_shard renamed before the call and after it; features given."""
    texts = []
    for when in ("before", "after"):
        model = FAMILIES["llava"].build()
        inputs = batch(FAMILIES["llava"], model, [Item("image", 1)], world.rank)
        try:
            if when == "before":
                fully_shard(model.model.vision_tower)
            balance_encoders(model)
            fully_shard(model.model.vision_tower)
            fully_shard(model)(**inputs)
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
    model = FAMILIES["qwen2_vl"].build()
    inputs = batch(FAMILIES["qwen2_vl"], model, [Item("image", 1)], world.rank)
    balance_encoders(model)
    if world.rank == 1:
        inputs["image_embeds"] = inputs["pixel_values"]
    try:
        model(**inputs)
    except RuntimeError as error:
        texts.append(str(error))
    return texts


@pytest.mark.dist
def test_towers_that_are_hidden_and_features_that_are_given_are_refused():
    for texts in run_ranks(hidden_and_given, 2):
        assert len(texts) == 3
        assert all("give the layers of the tower to fully_shard" in text for text in texts[:2])
        assert "rank 1 failed: ValueError: the argument image_embeds is not understood" in texts[2]
