"""Long examples: the longest that fits against tracked peaks, loads against plans."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from orchmllm.batch import Microbatch, Step
from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig, load_recipe
from orchmllm.data.stream import open_dataset
from orchmllm.models.families import read_config
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import ENCODERS, TEXT, BatchLayout
from orchmllm.plan.step import imbalance, phase_figures, plan_step
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.longest import LongExamples, Room, heaviest, loads_alone
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.data.command import main as data_command
from orchmllm.tools.predict.dry_run import NONE
from orchmllm.tools.predict.dry_run_command import main as dry_run
from orchmllm.tools.predict.workload import sample_layout
from tests.lib.drawn import with_processor
from tests.lib.formats import write_jsonl
from tests.lib.recipes import read
from tests.lib.tracked import tracked_peak
from tests.tools.predict.test_tracked_memory import thin

GB = 30.0
CASES = {  # (ranks, recipe, phase): of `phase` the longest item alone
    "text, none": (64, thin(activation_checkpointing="none"), "llm"),
    "text, selective": (64, thin(activation_checkpointing="selective"), "llm"),
    "text, full": (64, thin(), "llm"),
    "text, whole loss": (8, thin("mllm10b", loss_chunk_rows=0), "llm"),
    "text, 1 GPU": (1, thin("mllm_1gpu", activation_checkpointing="none"), "llm"),
    "image, none": (64, thin(activation_checkpointing="none"), "vision"),
    "image, full": (64, thin(), "vision"),
    "image, selective, 10B": (16, thin("mllm10b", activation_checkpointing="selective"), "vision"),
    "image, LLM full": (64, thin(vision_checkpointing="none"), "vision"),
    "clip, none": (64, thin(activation_checkpointing="none"), "audio"),
    "clip, selective": (64, thin(activation_checkpointing="selective"), "audio"),
    "clip, full": (8, thin("mllm10b"), "audio"),
}


def item(recipe, phase: str, positions: int, cut: bool = False) -> BatchLayout:
    """An example that is one text, or one medium of so many positions: an image 2 patches high, or
    a clip, which may be cut into those that are as long as the tower knows."""
    config = read_config(Path(recipe.model.folder))
    if phase == "llm":
        segments = [(TEXT, text_lengths(positions))]
    elif phase == "vision":
        group = config.vision_config.spatial_merge_size**2
        segments = [(ENCODERS[phase], SegmentLengths(
            positions, positions, positions // group, (1, 2, positions // 2)))]
    else:
        most = config.audio_config.max_source_positions if cut else positions
        clips = [most] * (positions // most) + [positions % most] * (positions % most > 0)
        segments = [(ENCODERS[phase], SegmentLengths(
            2 * n, n, -(-n // config.audio_stack), (1, 1, 2 * n))) for n in clips]
    return BatchLayout.from_segments(0, positions if phase == "llm" else 0, segments)


def with_every_tower(recipe, example: BatchLayout, ranks: int) -> BatchLayout:
    """The example on the first of the ranks, and a tiny image and a tiny clip on the last: the
    tracker fails where the units of a tower are not gathered, as in a step without its media."""
    tiny = [replace(item(recipe, phase, 16), example_id=np.array([k]))
            for k, phase in enumerate(ENCODERS, 1)]
    return BatchLayout.concat([example, *tiny],
                              [1, *[0] * (ranks - 2), 2] if ranks > 1 else [3])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_the_longest_that_fits_takes_the_budget(name):
    """Its tracked peak is within 5% of the budget."""
    ranks, recipe, phase = CASES[name]
    recipe = replace(recipe, fsdp=replace(recipe.fsdp, memory_gb=GB),
                     train=replace(recipe.train, global_batch_size=0))
    job = resolve(recipe, ranks, 8)
    memory = MemoryModel.of(job)
    room = Room.of(job, 0, memory)
    positions, full = room.fits(phase, item(recipe, phase, 64))
    assert positions <= full
    positions = positions // 8 * 8
    layout = with_every_tower(recipe, item(recipe, phase, positions, cut=True), ranks)
    plan = plan_step(layout, replace(plan_spec(job), balance=NONE))
    peak = tracked_peak(recipe, plan) + memory.state_bytes()["optimizer"]
    print(f"{name}: {positions:,} positions, {peak / 1e9:.2f} of {GB:g} GB")
    assert peak == pytest.approx(1e9 * GB, rel=0.05)


def test_each_example_alone_is_a_plan_of_as_many_ranks():
    layout = sample_layout(MODELS["10b"], num_ranks=40, batch_size=1, seed=3, mix="omni")
    job = resolve(read("mllm10b"), 40, 8)
    planned = loads_of(plan_step(layout, replace(plan_spec(job), balance=NONE)))
    for encodes in (True, False):
        alone = loads_alone(layout, encodes)
        for phase, lengths in planned.phases.items():
            share = 1 if encodes or phase == "llm" else 0
            for name in ("rows", "positions", "tokens"):
                wanted = share * getattr(lengths, name)
                assert (getattr(alone.phases[phase], name) == wanted).all()
        for phase, received in planned.received.items():
            assert (alone.received[phase] == received).all()


def test_a_row_that_fits_where_its_images_are_encoded_elsewhere():
    """But not where one rank does everything, nor a medium that is too long by itself."""
    recipe = thin(audio_checkpointing="none")
    images = [item(recipe, "vision", 1024)] * 64
    rows = BatchLayout.concat([
        replace(BatchLayout.concat(images), example_id=np.array([0]), num_targets=np.array([9]),
                examples_per_rank=np.array([1]), segments_per_example=np.array([64])),
        item(recipe, "audio", 60_000), item(recipe, "llm", 100)])
    job = resolve(recipe, 64, 8)

    def said(job, gigabytes: float) -> str:
        room = replace(Room.of(job, 0, MemoryModel.of(job)), budget=gigabytes * 1e9)
        every = replace(rows, example_id=np.arange(3))
        parts = [every.taken(part, [len(part)]) for part in (np.array([0]), np.array([1, 2]))]
        told = room.misfits(parts, "row {}".format)
        assert told == room.misfits([every], "row {}".format)
        costs = plan_spec(job).costs
        assert heaviest([every], costs, parts) == heaviest([every], costs)
        return "\n".join(told)

    def named(*args) -> list[str]:
        return re.findall(r"^  row (\d): [\d,]+ tokens, predicted", said(*args), re.M)

    whole = replace(job, recipe=replace(recipe, balance=NONE))
    assert named(job, 21) == ["1"] and named(whole, 21) == ["1", "0"]
    assert said(job, 500) == said(whole, 500) == ""
    assert "checkpointing=full, with which 1 of them fit" in said(job, 21)
    assert said(job, 1).startswith("warning: the model alone cannot fit a rank (1 GB): more ranks")


@dataclass(frozen=True)
class Shared(CostModel):
    """Of batches in which items of `piece` positions are the `parts` of one item, which share its
    positions and so the work of its attention."""

    piece: int = 0
    parts: int = 1

    def __call__(self, lengths, frames=None):
        lengths = np.asarray(lengths, np.int64)
        parts = np.where(lengths == self.piece, self.parts, 1)
        return super().__call__(lengths * parts, frames) // parts


def imbalance_of(long: int, parts: int, ranks: int, batch: int) -> tuple[float, object]:
    """(Imbalance of the LLM phase of a real plan of the 10B model in which an example of `long`
    tokens is shared by `parts`, the table's figures of the batch with the whole example)."""
    base = sample_layout(MODELS["10b"], num_ranks=ranks, batch_size=batch, seed=1)
    sizes = base.examples_per_rank.copy()
    spec = plan_spec(resolve(replace(read("mllm10b"), fsdp=FsdpConfig()), ranks, 8))

    def batch_with(count: int, tokens: int) -> BatchLayout:
        texts = [BatchLayout.from_segments(0, 1, [(TEXT, text_lengths(tokens))])] * count
        return BatchLayout.concat([*texts, base], [sizes[0] + count, *sizes[1:]])

    llm = spec.costs["llm"]
    piece = long // parts
    assert piece not in base.tokens_per_example
    cost = Shared(llm.linear, llm.quadratic, piece=piece, parts=parts)
    plan = plan_step(batch_with(parts, piece), replace(spec, costs=spec.costs | {"llm": cost}))
    [found] = heaviest([batch_with(1, long)], {"llm": llm})
    return imbalance(plan.planned_cost("llm")), found


@pytest.mark.parametrize("long, ranks, batch", [
    (16_400, 64, 8), (65_600, 4, 8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (65_600, 64, 8), (65_600, 64, 30), (16_400, 4, 8), (262_400, 64, 30)))])
def test_loads_of_the_longest_are_those_of_plans(long, ranks, batch):
    """Within 1%, whole and shared. No rank has more than all of them together."""
    for parts in (1, 2, 4, 8):
        real, item = imbalance_of(long, parts, ranks, batch)
        assert item.shared(parts) == pytest.approx(real, rel=0.01)
    assert 1 < item.ratio <= ranks


TINY = f"""
model: {{config: {with_processor()}}}
data: {{path: long.jsonl, index_dir: index}}
train: {{batch_size: 2, num_steps: 2}}
fsdp: {{memory_gb: 0.02}}
launch: {{nproc_per_node: 2}}
"""
LONG = 3000  # words of the last row


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A recipe, its data, of which the last row is long, and their lengths as a file."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "long.jsonl", [
        {"conversations": [{"from": "human", "value": "what " * 20},
                           {"from": "gpt", "value": "red " * words}]}
        for words in [20, 30, 40] * 10 + [LONG]])
    (tmp_path / "own.yaml").write_text(TINY, encoding="utf-8")
    lines = [{"images": [[64, 64 * (1 + k % 3)]], "text_tokens": 40} for k in range(30)]
    (tmp_path / "lengths.jsonl").write_text("\n".join(map(json.dumps, [
        *lines, {"text_tokens": LONG}])), encoding="utf-8")
    return tmp_path


def told(text: str) -> dict[str, list[str]]:
    """Phase -> the columns behind it in the table: length, loads on 1, 2, 4 and 8 ranks, fits."""
    [table] = re.findall(r"^Longest items.*\n(?:  .*\n?)+", text, re.M)
    assert all(len(line) <= 80 for line in table.splitlines())
    return {m[1]: m[2].split() for m in re.finditer(r"^  (\w+), \w+  +(\d.*)$", text, re.M)}


def test_a_dry_run_tells_of_the_longest_line(folder, capsys):
    args = ["own.yaml", "--ranks", "8", "--lengths", "lengths.jsonl"]
    assert dry_run([*args, "fsdp.memory_gb=0.1"]) == 0
    out = capsys.readouterr().out
    length, *loads, here, full = told(out)["llm"]
    assert length == "3,000" and "  llm: lengths.jsonl, line 31\n" in out
    whole, *shared = map(float, loads)
    assert whole > 4
    assert shared == pytest.approx([whole / 2, whole / 4, max(1, whole / 8)], abs=0.01)
    assert 3000 < int(here.replace(",", "")) < int(full.replace(",", ""))
    assert dry_run([*args, "fsdp.memory_gb=0.02"]) == 2  # not even this line alone
    error = capsys.readouterr().err
    assert re.search(r"rows that cannot fit a rank \(0.02 GB\), even alone: 1\n"
                     r"  lengths.jsonl, line 31: 3,000 tokens, predicted 0.0\d+ GB\n", error)
    cut = int(re.search(r"^  data.max_example_tokens=(\d+)$", error, re.M)[1])
    dry_run([*args, "fsdp.memory_gb=0.02", f"data.max_example_tokens={cut}"])
    assert "cannot fit a rank" not in "".join(capsys.readouterr())
    dry_run([*args, "fsdp.memory_gb=0.02", f"data.max_example_tokens={cut + cut // 100}"])
    assert "cannot fit a rank" in "".join(capsys.readouterr())
    dry_run([*args, "fsdp.memory_gb=0.01", "fsdp.activation_checkpointing=full"])
    assert "cannot fit a rank (0.01 GB), even alone, all recomputed: " in capsys.readouterr().err


def test_statistics_and_the_log_of_a_run_name_the_row(folder, capsys):
    """Of all rows where they are indexed, of the first step where they are not; a step is told of
    where it waits longer than those before."""
    loaded = load_recipe("own.yaml")
    job, spec = resolve(loaded, 2, 8), plan_spec(resolve(loaded, 2, 8))

    def logged() -> str:
        dataset, lines = open_dataset(loaded.data, loaded.model.folder, seed=0), []
        examples = LongExamples(job, spec, dataset, range(len(dataset)), 0, lines.append)
        for index, rows in enumerate(([0, 1, 2, 3], [0, 1, 2, 30], [4, 5, 6, 30])):
            plan = plan_step(dataset.layouts(np.array(rows), [2, 2]), spec)
            examples.tell(Step(index, plan.layout, [Microbatch(plan, plan.for_rank(0))],
                               phases=phase_figures(plan.layout, [plan])),
                          dict.fromkeys(PHASES, "none"))
        return "\n".join(lines)

    without = logged()
    whole, job = job, resolve(loaded, 2, 1)  # a rank is alone on its node
    assert "max_shares=" not in logged()
    job = whole
    assert "  llm: long.jsonl, row 3\n" in without and told(without)["llm"][0] == "146"
    assert data_command(["stats", "own.yaml", "--ranks", "2"]) == 0
    stats = capsys.readouterr().out
    assert without.count("waits for one example, long.jsonl, row 31") == 1
    assert without.count("(balance.llm.max_shares=2: ") == 1
    for text in (stats, logged()):
        assert "  llm: long.jsonl, row 31\n" in text and "here no ranks share one" in text
        assert re.search(r"cannot fit a rank.*\n  long.jsonl, row 31: 3,1\d\d tokens", text)
        assert told(text)["llm"][0].startswith("3,1")
    dataset, lines = open_dataset(loaded.data, loaded.model.folder, seed=0), []
    LongExamples(job, spec, dataset, dataset.split(1)[0], 0, lines.append)  # row 31 is held out
    assert data_command(["stats", "own.yaml", "--ranks", "2", "data.num_validation=1"]) == 0
    assert not lines and "row 31" not in capsys.readouterr().out
