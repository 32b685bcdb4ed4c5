"""FLOP and costs of models of transformers, against torch's FlopCounterMode."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.batch import ProcessedExample, SequenceLengths
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.models.counted_parts import Attention
from orchmllm.models.families import model_class, read_config
from orchmllm.models.flops import Lengths, phase_lengths
from orchmllm.models.whole_flops import part_counts, phase_work, plan_spec, step_flops
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PHASES
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import ENCODERS, TEXT, BatchLayout
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.load_whole import freeze
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.recomputed import phase_flop, recomputed
from tests.lib import pairs
from tests.lib import whole_models as models
from tests.lib.composed import write_composed
from tests.lib.recipes import frozen

pytestmark = pytest.mark.whole

# Left out of the count: images of gemma3 that see themselves in both directions, and what mistral3
# computes of pairs of images.
ABOUT = {"gemma3": 0.02, "mistral3": 0.01}
REACH = 7  # positions of a sliding window


def made_of(config):
    torch.manual_seed(0)
    model = model_class(config)._from_config(config).float().train()
    if "moe" in config.model_type:
        model.set_experts_implementation("eager")
    return model


def with_windows(config):
    """A sliding window in the last layer of the text model, or in all if they are alike."""
    text = config.get_text_config()
    text.sliding_window, text.use_sliding_window = REACH, True
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention", "sliding_attention"]
    return config


def made_row(name: str, tmp_path):
    """(A model with sliding windows, if its family knows them; a packed row for it, with images of
    several windows and clips; its lengths; part -> the shape that its blocks get, and `frames` ->
    that of clips)."""
    tiny, seen = models.build(name), {}
    with_windows(tiny.config).save_pretrained(tmp_path)
    model = made_of(read_config(tmp_path))
    model.set_attn_implementation("eager")
    whole = WholeModel(model, torch.float32)
    one = [models.Item(kind, 5) for kind in models.kinds_of(name)]
    two = [models.Item(kind, 2) for kind in models.kinds_of(name)]
    # mistral3's mask has all images of a rank.
    texts = (one, [], []) if name == "mistral3" else (one + two, [], two)
    examples = [models.as_example(k, models.sample(name, tiny, some, 7 + k))
                for k, some in enumerate(texts)]

    def note(part):
        return lambda _, args, keys: seen.update(
            {part: (args or [*keys.values()])[0].shape})

    for part, stack in whole.blocks().items():
        stack[0].register_forward_pre_hook(note(part), with_kwargs=True)
    if "audio" in whole.blocks():
        next(m for name, m in whole.named_modules() if "audio" in name and isinstance(
            m, nn.Conv1d)).register_forward_pre_hook(note("frames"), with_kwargs=True)
    return whole, whole.join(examples), BatchLayout.concat([e.lengths for e in examples]), seen


def as_computed(part: str, lengths: Lengths, seen: dict) -> Lengths:
    """With the tiles that are blank, and the silence that convolutions of clips get; windows and
    tiles are none of this."""
    *tiles, n, _ = seen[part]
    more = np.prod(tiles) * (n - n % 2) / lengths.positions.sum()  # class tokens belong to tiles
    if part == "audio":
        assert more == 1
        frames = seen["frames"][0] * seen["frames"][2] / lengths.rows.sum()
        return replace(lengths, rows=frames * lengths.rows)
    if more == 1:
        return lengths
    return replace(lengths, rows=more * lengths.rows, positions=more * lengths.positions)


# Linear attention pads an example to whole chunks.
@pytest.mark.parametrize("name", [
    name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.slow)
    for name in models.ADMITTED if not name.startswith("qwen3_5")])
def test_flop_of_forward_and_backward_are_those_that_torch_counts(name, tmp_path, monkeypatch):
    """Whatever is frozen, with attention of every window as far as it reaches."""
    pairs.use(monkeypatch)
    whole, row, layout, seen = made_row(name, tmp_path)
    encoders = [part for part in whole.blocks() if part in ENCODERS]
    parts = (*encoders, "connector", "llm")
    for fixed in (p for n in range(len(parts)) for p in combinations(parts, n)):
        config = frozen(*fixed, model=ModelConfig(config=str(tmp_path)))
        whole.requires_grad_(True)
        freeze(whole, config)
        with FlopCounterMode(display=False) as counter:
            whole(row).backward()
        got = step_flops(config, layout)
        for part in encoders:
            computed = as_computed(part, phase_lengths(layout, part), seen)
            got[part] = phase_work(part, config, computed).useful.sum()
        assert sum(got.values()) == pytest.approx(
            counter.get_total_flops(), rel=ABOUT.get(name, 1e-9)), fixed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_flop_of_linear_attention_are_those_that_torch_counts(name, tmp_path, monkeypatch):
    """Of texts of whole chunks."""
    pairs.use(monkeypatch)
    tiny = models.build(name)
    tiny.config.save_pretrained(tmp_path)
    whole = WholeModel(made_of(read_config(tmp_path)), torch.float32)
    texts = [ProcessedExample(i, ids, ids, {}, BatchLayout.from_segments(
        i, len(ids) - 1, [(TEXT, text_lengths(len(ids)))])) for i, ids in enumerate(
            torch.zeros(n, dtype=torch.int64) for n in (64, 192))]
    with FlopCounterMode(display=False) as counter:
        whole(whole.join(texts)).backward()
    got = step_flops(ModelConfig(config=str(tmp_path)), BatchLayout.concat(
        [text.lengths for text in texts]))
    assert got["llm"] == pytest.approx(counter.get_total_flops(), rel=1e-9)


@pytest.mark.parametrize("side", [80, pytest.param(30, marks=pytest.mark.slow)])
def test_windows_are_found_beside_blocks_that_see_all(side, tmp_path):
    """Of more patches a side than images are first counted with."""
    config = models.build("qwen2_5_vl").config
    config.vision_config.window_size = side * config.vision_config.patch_size
    config.save_pretrained(tmp_path)
    counts = part_counts(ModelConfig(config=str(tmp_path)))["vision"]
    assert counts.attention.keys() == {Attention("square", side), Attention("frame")}


def test_bytes_that_are_moved_are_those_of_one_pass(tmp_path):
    """No gradient of a pass that was counted before is read or added to: one position does not move
    less than nothing, and how much more two move does not depend on the size of the table."""
    found = []
    for size in (1000, 3000):
        config = models.build("qwen2_5_vl").config
        config.get_text_config().vocab_size = size
        config.save_pretrained(tmp_path / f"{size}")
        found.append(part_counts(ModelConfig(config=str(tmp_path / f"{size}"))))
    for part, counts in found[0].items():
        assert (counts.moved.sum(axis=1) >= 0).all(), part
        assert np.array_equal(counts.moved[:, 1:], found[1][part].moved[:, 1:]), part


def test_what_is_balanced_costs_what_its_windows_do(tmp_path):
    """A line in the length: of images that are cut into whole windows exactly, of text at one and
    at four times as many positions as a window has."""
    config = with_windows(models.build("qwen2_5_vl").config)
    config.save_pretrained(tmp_path)
    model, n = ModelConfig(config=str(tmp_path)), REACH * np.array([1, 4])
    sides = np.array([4, 8, 20])  # patches
    images = Lengths(sides**2, sides**2, sides**2 // 4, np.stack([sides**0, sides, sides], 1))
    costs = plan_spec(resolve(Recipe(model=model), 1, 1)).costs
    for part, lengths in (("vision", images), ("llm", Lengths(0 * n, n, n))):
        wanted = phase_work(part, model, lengths).useful / costs[part].unit
        assert costs[part](lengths.positions) == pytest.approx(wanted, abs=1), part


def test_what_a_rank_repeats_is_that_of_its_items(tmp_path, monkeypatch):
    """Of texts of one length, longer than a window, not of one text as long as all of them."""
    with_windows(models.build("qwen2_5_vl").config).save_pretrained(tmp_path)
    memory = MemoryModel.of(resolve(Recipe(model=ModelConfig(config=str(tmp_path))), 1, 1))
    each = np.full(5, 4 * REACH)
    texts, total = Lengths(0 * each, each, each), each[:1] * len(each)
    loads = Loads({"llm": Lengths(0 * total, total, total)}, {}, {"llm": total * each[0]})
    monkeypatch.setattr("orchmllm.sharding.recomputed.FLOP_PER_BYTE", 0)
    again = phase_flop(memory, "llm", loads, memory.counts("llm", "full"))
    products, attention = phase_work("llm", memory.model, texts, "full").recompute.sum(axis=1)
    repeated = memory.blocks("llm")[0].repeated  # of equal layers
    assert again == pytest.approx([repeated * products + attention], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "internvl", "llava", "qwen3_vl"])
def test_blocks_repeat_what_torch_repeats(name, tmp_path, monkeypatch):
    """FLOP of products by torch's counter, of the first block and of all: nothing reads the output
    of the last block of LLaVA's tower, so that it is not computed again."""
    pairs.use(monkeypatch)
    whole, row, layout, seen = made_row(name, tmp_path)
    memory = MemoryModel.of(resolve(Recipe(model=ModelConfig(config=str(tmp_path))), 1, 1))

    def products(**choice: str) -> int:
        recompute(whole, {**dict.fromkeys(PHASES, "none"), **choice})
        with FlopCounterMode(display=False) as counter:
            whole(row).backward()
        counted = counter.get_flop_counts()["Global"]
        return counted[torch.ops.aten.mm] + counted[torch.ops.aten.addmm]

    nothing = products()
    for part, stack in whole.blocks().items():
        weights = sum(m.weight.numel() for m in stack[0].modules() if isinstance(m, nn.Linear))
        wanted = memory.blocks(part)[0].repeated * 2 * weights * seen[part][:-1].numel()
        assert products(**{part: "full:1"}) - nothing == pytest.approx(wanted, rel=1e-9), part
        lengths = phase_lengths(layout, part)
        if part in ENCODERS:
            lengths = as_computed(part, lengths, seen)
        work = phase_work(part, memory.model, lengths, "full").recompute[0].sum() / len(stack)
        wanted = recomputed(memory, part, memory.counts(part, "full"), work, 0, 0)
        assert products(**{part: "full"}) - nothing == pytest.approx(wanted, rel=1e-9), part


def test_flop_of_a_generator_are_those_that_torch_counts(tmp_path):
    """Of images of several sizes, each made from another number of states."""
    write_composed("whisper_qwen3", tmp_path / "model", generator=tmp_path / "generator", side=4)
    model = ModelConfig(config=str(tmp_path / "model"))
    part = model_class(read_config(tmp_path / "model"))._from_config(
        read_config(tmp_path / "model")).generator.float()
    squares, states = np.array([96, 35, 200]), np.array([50, 300, 17])
    work = phase_work("generator", model, Lengths(states, squares, states))
    for k, (n, seen) in enumerate(zip(squares.tolist(), states.tolist(), strict=True)):
        given = torch.randn(seen, 32, requires_grad=True)
        with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
            out = part.flow(torch.randn(n, 48), torch.rand(n), given, np.array([[1, 1, n]]),
                            SequenceLengths.from_lengths([seen]))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        assert work.forward[:, k].sum() == pytest.approx(forward.get_total_flops(), rel=0.01)
        assert work.backward[:, k].sum() == pytest.approx(backward.get_total_flops(), rel=0.01)
