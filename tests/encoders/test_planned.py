"""Planned encoders on one rank: what the model's own forward gets for media of several kinds, and
what a plan that is wrong about them leads to."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from orchmllm.batch import Microbatch, ProcessedExample
from orchmllm.comm.exchange import RowGather
from orchmllm.config.recipe import DataConfig
from orchmllm.data.stream import open_dataset
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.models.whole_model import WholeModel
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import TEXT, VISION, BatchLayout
from orchmllm.plan.step import plan_step
from tests.lib import whole_models as models
from tests.lib.encoder_models import IMAGE, VIDEO
from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import write_model, write_rows
from tests.lib.whole_models import SPEC, Item, planned_row


def example(i: int, inputs: dict) -> ProcessedExample:
    """With every medium, in the order of its tokens, as a segment, or one for each two of its
    temporal slices."""
    ids, segments, parts, arguments = inputs["input_ids"][0], [], {}, {}
    ends = (ids[1:] != ids[:-1]).logical_and((ids[1:] > 60) | (ids[:-1] > 60)).nonzero()[:, 0] + 1
    taken = {IMAGE: 0, VIDEO: 0}
    rows = dict(taken)
    for run in ids.tensor_split(ends):
        token = int(run[0])
        if token not in taken:
            segments.append((TEXT, text_lengths(len(run))))
            continue
        name, grids = (("pixel_values", "image_grid_thw") if token == IMAGE
                       else ("pixel_values_videos", "video_grid_thw"))
        t, h, w = inputs[grids][taken[token]].tolist()
        taken[token] += 1
        for _ in range(max(1, t // 2)):
            frames, start = min(t, 2), rows[token]
            count = frames * h * w
            rows[token] += count
            arguments[len(segments)] = name
            parts[len(segments)] = {name: inputs[name][start: rows[token]],
                                    grids: torch.tensor([[frames, h, w]])}
            segments.append((VISION, SegmentLengths(count, count, count // 4, (frames, h, w))))
    targets = int((models.shifted(inputs) != -100).sum())
    return ProcessedExample(
        i, ids, inputs["labels"][0],
        {n: v for n, v in inputs.items() if n.endswith("grid_thw")},
        BatchLayout.from_segments(i, targets, segments), parts, arguments)


def planning(stock) -> WholeModel:
    whole = WholeModel(copy.deepcopy(stock), torch.float64)
    whole.encoders = PlannedEncoders(whole.hf)
    return whole


@pytest.fixture(scope="module")
def made():
    """A model, arguments of stock forward and the examples: video, nothing, an image, and both."""
    stock = models.build("qwen2_5_vl")
    items = [[Item("video", 3)], [], [Item("image", 4)], [Item("image", 1), Item("video", 5)]]
    inputs = [models.sample("qwen2_5_vl", stock, items, i) for i, items in enumerate(items)]
    return stock, planning(stock), inputs, [example(i, one) for i, one in enumerate(inputs)]


def test_video_before_images_and_a_medium_of_several_segments(made):
    """The calls of the model get the rows of their own media, in reading order."""
    stock, whole, inputs, examples = made
    whole.zero_grad()
    batch = planned_row(whole, examples, BatchLayout.concat([e.lengths for e in examples], [4]))
    items = batch.phases["vision"]
    assert items.order is not None and len(items.num_tokens) > 4  # a video has several segments
    loss = whole(batch)
    loss.backward()
    wanted, gradients = models.stock(stock, inputs)
    assert float(loss) == pytest.approx(wanted, rel=1e-10)
    assert models.difference(models.gradients(whole.hf), gradients) <= models.EXACT


def test_images_that_are_cut_and_not_each_get_their_own_rows(tmp_path):
    """The model wants those that are not cut last, whatever the order of the media is."""
    stock = write_model("llava_onevision", tmp_path, torch.float64).train()
    data = write_rows(tmp_path, 6, "llava_onevision")
    rows = open_dataset(DataConfig(path=str(data), index_dir=str(tmp_path / "index")),
                        str(tmp_path), seed=0)
    whole = planning(stock)
    layouts = [rows.layout(i) for i in range(6)]
    examples = [rows.load(i, segments=np.flatnonzero(layout.modality != TEXT).tolist())
                for i, layout in enumerate(layouts)]
    layout = BatchLayout.concat(layouts, [6])
    batch = planned_row(whole, examples, layout)
    tiles = [len(e.parts[s]["pixel_values"][0]) for e in examples for s in sorted(e.parts)]
    assert tiles != sorted(tiles, key=lambda n: n == 1)  # one that is not cut stands before others
    loss = whole(batch)
    loss.backward()
    wanted, gradients = models.stock(stock, [
        {"input_ids": e.input_ids[None], "labels": e.labels[None],
         "attention_mask": torch.ones_like(e.input_ids)[None],
         **{k: v.double() if v.is_floating_point() else v for k, v in e.media.items()}}
        for e in map(rows.load, range(6))])
    assert float(loss.detach()) == pytest.approx(wanted, rel=models.EXACT)
    assert models.difference(models.gradients(whole.hf), gradients) <= models.EXACT


def with_one_lost(world, stock, examples: list[ProcessedExample]) -> None:
    whole = planning(stock)
    layout = BatchLayout.concat([e.lengths for e in examples], [4])
    orchestrator = Orchestrator(SPEC, RowGather(1))
    plan = plan_step(layout, SPEC)
    micro = Microbatch(plan, plan.for_rank(0), positions=np.arange(4))
    micro.content = planned_row(whole, examples, layout)
    every = orchestrator.dispatch(micro)
    micro.ignored = np.array([2])  # as all ranks have agreed
    lost = np.repeat(micro.rank_plan.examples == 2, micro.content.seqlens.lengths)
    stays = torch.from_numpy(~lost)[every.kept]
    found = orchestrator.dispatch(micro)
    assert not stays.all() and torch.equal(found.kept, every.kept[stays])
    assert torch.equal(found.targets, every.targets[stays])


@pytest.mark.dist
def test_labels_of_an_example_whose_medium_failed_on_any_rank_are_not_learnt(made):
    run_ranks(with_one_lost, 1, made[0], made[3])


def test_an_encoder_that_makes_other_rows_than_planned_is_an_error(made):
    """One segment has two rows less than its medium, another two more: their sum is right."""
    _, whole, _, examples = made
    layout = BatchLayout.concat([e.lengths for e in examples], [4])
    at = layout.segments[VISION][[0, -1]]
    tokens = layout.num_tokens.copy()
    tokens[at] += [-2, 2]
    with pytest.raises(RuntimeError, match=r"'vision' made \[.*\] rows of features of its media, "
                                           r"where \[.*\] were planned"):
        whole(planned_row(whole, examples, replace(layout, num_tokens=tokens)))
    assert "get_image_features" not in vars(whole.hf.model)  # the model calls its encoders again
    text = planned_row(whole, examples[1:2], BatchLayout.concat([examples[1].lengths], [1]))
    assert text.phases == {} and float(whole(text)) > 0
