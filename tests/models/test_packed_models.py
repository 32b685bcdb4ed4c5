"""Models of transformers on a packed row against stock transformers, example by example: losses and
the gradients of all parameters, in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from orchmllm.batch import SequenceLengths
from orchmllm.config.recipe import DataConfig
from orchmllm.data.stream import open_dataset
from orchmllm.models import packing, towers
from orchmllm.models.families import refusals
from orchmllm.models.whole_model import WholeModel
from orchmllm.sharding.load_whole import freeze
from tests.lib import whole_models as models
from tests.lib.encoder_models import IMAGE
from tests.lib.recipes import frozen
from tests.lib.whole_folders import write_model, write_rows
from tests.lib.whole_models import Item

pytestmark = pytest.mark.whole
FAST = ("internvl", "mistral3", "qwen3_5_moe", "qwen3_vl")


def difference(name: str, model, examples: list[dict], lengths: list[int] | None = None,
               rows: int = 0) -> float:
    """Of the gradients, over the largest; the losses are compared, too. lengths: of the examples,
    as packing is told. rows: of the loss's chunks."""
    loss, wanted = models.stock(model, examples)
    whole = WholeModel(copy.deepcopy(model), torch.float64)
    whole.loss_chunk_rows = rows
    packed = whole.join([models.as_example(i, inputs) for i, inputs in enumerate(examples)])
    if lengths is not None:
        packed = replace(packed, seqlens=SequenceLengths.from_lengths(lengths))
    got = whole(packed)
    got.backward()
    if lengths is None:
        assert float(got.detach()) == pytest.approx(loss, rel=1e-8)
    return models.difference(models.gradients(whole.hf), wanted)


def several(name: str, model) -> list[dict]:
    """Images of several sizes, no media, one image and one other, one token."""
    kinds = models.kinds_of(name)
    first, last = kinds[0], kinds[-1]
    sets = [[Item(first, 5), Item(last, 2)], [], [Item(last, 1), Item(first, 3)], []]
    examples = [models.sample(name, model, items, 7 + i) for i, items in enumerate(sets)]
    examples[-1] = {k: v[:, :1] for k, v in examples[-1].items()}
    return examples


def test_no_label_of_a_lost_example_stays_and_all_of_the_others_do():
    """Where examples are learnt from their first token on, which is none of the example before."""
    model = models.build("internvl")
    examples = [models.as_example(i, models.sample("internvl", model, [], 7 + i))
                for i in range(3)]
    examples = [replace(e, labels=e.input_ids) for e in examples]
    row = WholeModel(model, torch.float64).join(examples)
    for lost in ([True, False, False], [False, True, False], [False, False, True]):
        stays = [e.labels[1:] for e, is_lost in zip(examples, lost, strict=True) if not is_lost]
        assert row.without_labels(np.array(lost)).targets.tolist() == torch.cat(stays).tolist()


@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in models.ADMITTED])
def test_a_packed_row_is_its_examples_and_would_not_be_if_they_saw_each_other(name):
    model = models.build(name)
    examples = several(name, model)
    exact = models.LOOSE.get(name, models.EXACT)
    assert difference(name, model, examples) <= exact
    assert difference(name, model, examples, rows=3) <= exact
    whole_row = sum(inputs["input_ids"].shape[1] for inputs in examples)
    assert difference(name, model, examples, [whole_row]) > 1000 * exact


@pytest.mark.parametrize("name", [
    name if name == "llava_onevision" else pytest.param(name, marks=pytest.mark.slow)
    for name in models.ADMITTED])
def test_rows_of_the_model_s_own_processor_are_packed_exactly(name, tmp_path):
    """What the processor makes of conversations, against stock transformers with the same
    tensors."""
    model = write_model(name, tmp_path, torch.float64).train()
    data = write_rows(tmp_path, 9, name)
    rows = open_dataset(DataConfig(path=str(data), index_dir=str(tmp_path / "index")),
                        str(tmp_path), seed=0)
    examples = [rows.load(i) for i in range(9)]
    loss, wanted = models.stock(model, [
        {"input_ids": e.input_ids[None], "labels": e.labels[None],
         "attention_mask": torch.ones_like(e.input_ids)[None],
         **{k: v.double() if v.is_floating_point() else v for k, v in e.media.items()}}
        for e in examples])
    whole = WholeModel(copy.deepcopy(model), torch.float64)
    got = whole(whole.join(examples))
    got.backward()
    exact = models.LOOSE.get(name, models.EXACT)
    assert float(got.detach()) == pytest.approx(loss, rel=exact)
    assert models.difference(models.gradients(whole.hf), wanted) <= exact


@pytest.mark.parametrize("name", [
    "mistral3", *(pytest.param(name, marks=pytest.mark.slow)
                  for name in ("gemma3", "aya_vision"))])
def test_sliding_windows_stay_inside_of_an_example(name):
    model = models.build(name)
    text = model.config.get_text_config()
    text.sliding_window = 4
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 4
    examples = several(name, model)[:2]
    narrow = models.stock(model, examples)[0]
    assert abs(narrow - models.stock(models.build(name), examples)[0]) > 1e-3  # it has an effect
    assert difference(name, model, examples) <= models.LOOSE.get(name, models.EXACT)


def touching(model) -> list[dict]:
    """One example ends with its image, the next one begins with one."""
    first, second = (models.sample("gemma3", model, [Item("image", n)], n) for n in (1, 2))
    at = [(inputs["input_ids"][0] == IMAGE).nonzero()[:, 0] for inputs in (first, second)]
    return [{k: v if k == "pixel_values" else v[:, cut] for k, v in inputs.items()}
            for inputs, cut in ((first, slice(int(at[0].max()) + 1)),
                                (second, slice(int(at[1].min()), None)))]


def test_images_at_the_border_of_two_examples_stay_two():
    """Gemma 3's images see themselves in both directions."""
    model = models.build("gemma3")
    assert difference("gemma3", model, touching(model)) <= models.LOOSE["gemma3"]


def test_a_scale_of_the_model_s_own_is_that_of_its_attention():
    """Where all masks are causal, so that the whole row is one call."""
    lengths = [3, 5]
    query, key, value = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    with packing.packed(SequenceLengths.from_lengths(lengths), num_layers=1):
        got, _ = packing.attention_of_row(torch.nn.Identity(), query, key, value,
                                          packing.mask_of_row(1, 8, 8), scaling=0.3)
    examples = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    wanted = [scaled_dot_product_attention(*one, is_causal=True, scale=0.3) for one in examples]
    torch.testing.assert_close(got.transpose(1, 2), torch.cat(wanted, 2), rtol=1e-12, atol=1e-12)


def test_a_forward_without_our_masks_is_an_error():
    """The name of the attention is in a configuration that other code can reach."""
    model = models.build("internvl")
    examples = [models.as_example(i, inputs)
                for i, inputs in enumerate(several("internvl", model)[1:3])]
    whole = WholeModel(model, torch.float64)
    whole(whole.join(examples))
    model.config.get_text_config()._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="0 of 2 layers kept the examples of the row apart"):
        whole(whole.join(examples))


def test_logits_that_are_changed_after_the_head_have_no_loss_by_chunks():
    """As some models of transformers limit them."""
    model = models.build("llava")
    whole = WholeModel(model, torch.float64)
    packed = whole.join([models.as_example(i, inputs)
                         for i, inputs in enumerate(several("llava", model))])
    limited, stock = "changes what its head computes", type(model).forward

    class Limited(type(model)):
        def forward(self, **inputs):
            out = stock(self, **inputs)
            out.logits = out.logits.tanh()
            return out

    whole.hf.__class__ = Limited
    assert torch.isfinite(whole(packed))
    whole.loss_chunk_rows = 3
    with pytest.raises(RuntimeError, match=f"Limited {limited}.*set fsdp.loss_chunk_rows to 0"):
        whole(packed)


@pytest.mark.parametrize("keys, told", [
    ({}, "was given another mask"), ({"softcap": 30.0}, "with softcap, which packing"),
    ({"dropout": 0.1}, "with dropout or sinks, which packing")])
def test_attention_that_cannot_be_packed_is_an_error(keys, told):
    """Some models make a mask of their own in place of the one that they are given."""
    x = torch.zeros(1, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    if keys:
        with packing.packed(SequenceLengths.from_lengths([1, 2]), 0):
            mask = packing.mask_of_row(1, 3, 3)
    with pytest.raises(RuntimeError, match=told):
        packing.attention_of_row(torch.nn.Linear(1, 1), x, x, x, mask, **keys)


@pytest.mark.parametrize("keys, told", [
    ({"cu_seq_lens_k": None}, "does not say where its media end"),
    ({"cu_seq_lens_q": None}, "does not say where its media end"),
    ({"is_causal": None}, "in one direction"), ({"dropout": 0.1}, "with dropout"),
    ({"attention_mask": torch.ones(1, 1, 3, 3)}, "a mask")])
def test_a_tower_whose_media_would_see_each_other_is_an_error(keys, told):
    x, borders = torch.zeros(1, 2, 3, 4), torch.tensor([0, 1, 3], dtype=torch.int32)
    given = {"attention_mask": None, "is_causal": False, "cu_seq_lens_q": borders,
             "cu_seq_lens_k": borders}
    towers.attention_of_tower(torch.nn.Identity(), x, x, x, **given)
    with pytest.raises(RuntimeError, match=told):
        towers.attention_of_tower(torch.nn.Identity(), x, x, x, **given | keys)


def test_a_row_without_targets_gives_every_parameter_of_the_text_a_gradient():
    model = models.build("internvl")
    example = models.as_example(0, several("internvl", model)[1])
    whole = WholeModel(model, torch.float64)
    loss = whole(whole.join([replace(example, labels=torch.full_like(example.labels, -100))]))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert model.lm_head.weight.grad is not None


def test_a_row_without_media_has_a_backward_pass_where_the_text_model_is_frozen():
    """No rank has media, so nothing that learns was computed; FSDP2 relies on a backward pass."""
    model = models.build("internvl")
    whole = WholeModel(model, torch.float64)
    freeze(whole, frozen("llm", "connector"))
    loss = whole(whole.join([models.as_example(0, several("internvl", model)[1])]))
    loss.backward()
    assert loss.item() > 0 and not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("changed, told", [
    ({"distributed_config": {"ep_size": 2}}, "experts are sharded by FSDP2 here"),
    ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised"),
])
def test_what_no_model_is_built_of_is_refused(changed, told):
    config = models.family_of("internvl").build().config
    assert refusals(config) == []
    for name, value in changed.items():
        setattr(config, name, value)
    assert any(told in why for why in refusals(config)), refusals(config)
