"""balance_encoders with tiny models of many families, against the same model in one process; and
the refusal of those whose encoders cannot be inferred.

The slow tests run every cell: families x scenarios x {FSDP2, DDP} x checkpointing. The table of
docs/encoders.md is counted by scripts/count_encoder_classes.py.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from orchmllm import Encoder, Rows, balance_encoders
from orchmllm.encoders import answers, sharing
from orchmllm.encoders.infer import infer_encoders
from orchmllm.encoders.table import describe_local
from scripts.count_encoder_classes import DOCS, RESULTS, table
from tests.lib.encoder_models import ALL, FAMILIES, Item, batch
from tests.lib.encoder_runs import CHECKPOINTS, WRAPS, one_step, run_cells, scenarios
from tests.lib.ranks import RankFailure, run_ranks

NAMES = list(FAMILIES)
SCENARIOS = list(scenarios(ALL[0]))
# It computes partly in float32 whatever the model's dtype, and one call of its encoder for all
# images differs from a call for each in the last bits of it.
FLOAT32 = {"gemma3"}


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
            assert cell[3] != "uneven" or seen["moved"] > 0, cell
    return max(seen["difference"] for rank in results for seen in rank)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_cells(name):
    cells = list(itertools.product([name], WRAPS, CHECKPOINTS, SCENARIOS))
    check(cells, run_ranks(run_cells, 3, cells))


def test_the_table_in_the_docs_is_what_was_counted():
    results = json.loads(RESULTS.read_text())
    assert "\n".join(table(results)) in DOCS.read_text()
    assert set(Counter(seen["state"] for seen in results.values())) <= {
        "exact", "refused", "not built", "not tried"}
    assert sum(seen["state"] == "exact" for seen in results.values()) >= 50


# The tests above can fail.

def swapped(world) -> tuple[str, float]:
    """Features of two items change places: what the proof says, and what the gradients show
    without it."""
    right = sharing.return_features

    def wrong(*arguments):
        return [(rows.flip(0), counts) for rows, counts in right(*arguments)]

    sharing.return_features = wrong
    items = scenarios(FAMILIES["llava"])["uneven"][world.rank]
    cell = FAMILIES["llava"], "fsdp2", "none", items, world.rank
    try:
        one_step(*cell)
        text = ""
    except RuntimeError as error:
        text = str(error)
    return text, one_step(*cell, proof=False)["difference"]


def without_deepstack(world) -> str:
    family = FAMILIES["qwen3_vl"]
    model = family.build()
    (encoder,) = infer_encoders(model)[1]
    encoder = replace(encoder, outputs=("pooler_output",))
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
    texts, differences = zip(*run_ranks(swapped, 3), strict=True)
    assert max(differences) > 1e-3
    assert len(set(texts)) == 1 and "of the same item encoded where it was sampled" in texts[0]


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
    "mllama": ("MllamaConfig", "MllamaForConditionalGeneration", dict(
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_global_layers=1, attention_heads=2, image_size=16, patch_size=8,
                           intermediate_layers_indices=[0], vision_output_dim=64),
        text_config=dict(TINY, vocab_size=64, num_key_value_heads=2, cross_attention_layers=[1],
                         pad_token_id=0))),
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
        (encoder,) = infer_encoders(model)[1]
        model.model.visual.to(tower)
        assert describe_local(encoder, model.model, both).values[0].dtype == moved


def test_what_depends_on_other_items_or_on_the_rank_is_refused():
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
