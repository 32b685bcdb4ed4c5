"""What layers recompute: the choice against all others, what steps measure, and what is left to the
next start when memory runs out."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.fsdp import CHOICES, as_choice, layer_counts
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig, Recipe, RecipeError, load_recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import TEXT, BatchLayout
from orchmllm.plan.microbatches import assert_invariants, plan_microbatches
from orchmllm.plan.step import plan_step
from orchmllm.runtime import measured
from orchmllm.runtime.metrics import read_rows
from orchmllm.runtime.profile import exhausted_before
from orchmllm.sharding.choice import check_layers, choose_checkpointing
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.recomputed import recomputed_flop
from orchmllm.sharding.run_memory import RunMemory
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.drawn import build, model_of
from tests.lib.gradients import (
    FEW_MEDIA,
    Case,
    all_gradients,
    reference_gradients,
    worst_difference,
)
from tests.lib.launched import run_local
from tests.lib.ranks import run_ranks
from tests.lib.resume import run_recipe
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.training import listened

LAYERS = dict(zip(PHASES, (3, 2, 3), strict=True))
DEEP = model_of(vision={"depth": 3}, audio={"encoder_layers": 2}, text={"num_hidden_layers": 3})


def every(num_layers: int) -> list[str]:
    """All choices of a phase."""
    return [as_choice({"none": num_layers - f - s, "selective": s, "full": f})
            for f in range(num_layers + 1) for s in range(num_layers + 1 - f)]


def test_numbers_of_layers_are_read_and_refused(tmp_path):
    for choice in every(4):
        assert as_choice(layer_counts(choice, 4)) == choice
    assert layer_counts("full:1+selective:2", 4) == {"none": 1, "selective": 2, "full": 1}
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\nmodel: {config: x}\nfsdp: {llm_checkpointing: ful}\n")
    with pytest.raises(RecipeError) as told:
        load_recipe(path, ["fsdp.audio_checkpointing=full:1+selective:1"])
    with pytest.raises(ValueError, match="fsdp.vision_checkpointing=full:9: names 9 layers, but "
                       "there are 3"):
        planned()[0].counts("vision", "full:9")
    assert "did you mean 'full'?" in str(told.value) and "full:12+selective:4" in str(told.value)


def planned(ranks: int = 3):
    """(memory, loads, plan) of examples on some ranks."""
    job = resolve(recipe(model=DEEP), ranks, 8)
    data = SyntheticDataset()
    layout = BatchLayout.concat([data.layout(i) for i in range(4 * ranks)], [4] * ranks)
    plan = plan_step(layout, plan_spec(job))
    return MemoryModel.of(job), loads_of(plan), plan


def test_the_choice_is_that_of_enumeration_and_monotone():
    memory, loads, _ = planned()
    table = []
    for choices in product(*(every(n) for n in LAYERS.values())):
        choice = dict(zip(PHASES, choices, strict=True))
        table.append((recomputed_flop(memory, loads, choice), memory.peak(loads, choice)))
    times, peaks = np.array(table).T
    before = np.inf
    for budget in np.linspace(peaks.min(), peaks.max(), 25):
        choice = choose_checkpointing(memory, loads, budget)
        time = recomputed_flop(memory, loads, choice)
        assert memory.peak(loads, choice) <= budget * (1 + 1e-12)
        assert time == pytest.approx(times[peaks <= budget * (1 + 1e-12)].min(), rel=1e-9)
        assert time <= before
        before = time
    with pytest.raises(ValueError, match="GB a rank at least"):
        choose_checkpointing(memory, loads, 0.999 * peaks.min())


AUTO = FsdpConfig(activation_checkpointing="auto", memory_gb=0.0024)


def run_memory(said: list[str], known: dict, fsdp: FsdpConfig = AUTO, **train: int) -> RunMemory:
    """said: gets its lines, but for those of the caps."""
    one = recipe(model=DEEP, fsdp=fsdp)
    one = replace(one, train=replace(one.train, **{"batch_size": 4, **train}))
    return RunMemory(
        one, SyntheticDataset(), range(24), plan_spec(resolve(one, 3, 8)), 3, 0, known=known,
        log=lambda line: said.append(line) if train or not line.startswith(
            "memory of") else None)


def test_memory_asks_for_microbatches():
    """As many as the steps of the run need, told at the start; a run that goes on keeps its caps,
    whatever its steps took."""
    said, known, fsdp = [], {}, replace(AUTO, memory_gb=0.0024)
    memory = run_memory(said, known, fsdp, accumulation_steps=0, batch_size=8)
    assert set(memory.choice.values()) == {"full"} and memory.loads.phases["llm"].tokens.size == 6
    room = memory.spec.room
    most = [min(limit.most // limit.each[p] for limit in room if p in limit.each) for p in PHASES]
    assert "at most vision {}, audio {}, llm {} positions, each phase".format(*most) in said[1]
    counts = []
    for layout in memory.layouts:
        plans = plan_microbatches(layout, memory.spec, 0)
        assert_invariants(layout, plans, memory.spec)
        counts.append(len(plans))
        for _, plan in plans:
            assert memory.memory.peak(loads_of(plan), memory.choice) <= memory.budget
    assert max(counts) > 1 and f"the fewest microbatches that keep it: {max(counts)}" in said[1]
    again = run_memory([], {**json.loads(json.dumps(known)), "measured": 1.5}, fsdp,
                       accumulation_steps=0, batch_size=8)
    assert again.spec.digest == memory.spec.digest
    with pytest.raises(ValueError, match="auto needs to know what a rank can hold: set fsdp.mem"):
        run_memory([], {}, FsdpConfig(), accumulation_steps=0)


@pytest.mark.parametrize("part, count", [("vision", 3), ("generator", 1)])
def test_more_layers_than_there_are_are_refused(part, count):
    """A part that the model has not counts as one layer."""
    for named in (count, count + 1):
        run = recipe(model=DEEP, fsdp=FsdpConfig(**{f"{part}_checkpointing": f"full:{named}"}))
        with pytest.raises(ValueError, match=(
                f"fsdp.{part}_checkpointing.*names {named} layers, but there are {count}")
                ) if named > count else nullcontext():
            check_layers(run)


def test_what_steps_take_decides_once_more():
    """Twice the prediction on one of the ranks, at the end of the third step."""
    said, known, (_, _, plan) = [], {}, planned()
    model = build(DEEP)
    generous = replace(AUTO, memory_gb=0.0045)
    memory = run_memory(said, known, generous)
    first, step = memory.choice, SimpleNamespace(plans=[plan])
    assert set(first.values()) == {"none"}
    peaks = memory.memory.peaks(loads_of(plan), first)
    predicted = np.max([*peaks.values()], axis=0)
    for factors in ([1, 1, 1], [1, 1, 1.5], [1, 2, 1.5], [9, 9, 9]):
        memory.measure(step, predicted * factors, model)
    assert known["measured"] == pytest.approx(2) and memory.choice == known["choice"] != first
    assert 2 * memory.memory.peak(memory.loads, memory.choice) <= memory.budget * (1 + 1e-9)
    assert "before: vision none, audio none, llm none" in said[1] and len(said) == 2
    for phase, stack in model.blocks().items():
        kinds = [block.recomputes for block in stack]
        assert {c: kinds.count(c) for c in CHOICES} == layer_counts(memory.choice[phase],
                                                                    LAYERS[phase])
        assert kinds == sorted(kinds, key=CHOICES[::-1].index)
    again = run_memory(said, json.loads(json.dumps(known)), generous)  # from a checkpoint
    assert again.choice == memory.choice and "before" not in said[-1]


def test_a_run_goes_on_where_what_steps_took_fits_no_choice():
    """And starts again: caps of memory alone made it fit."""
    said, known, (_, _, plan) = [], {}, planned()
    fsdp, several = replace(AUTO, memory_gb=0.0023), {"accumulation_steps": 3}
    memory = run_memory(said, known, fsdp, **several)
    first, step = dict(memory.choice), SimpleNamespace(plans=[plan])
    predicted = np.max([*memory.memory.peaks(loads_of(plan), first).values()], axis=0)
    for _ in range(4):
        memory.measure(step, 1.3 * predicted, build(DEEP))
    assert memory.choice == first and said[-1].startswith(
        "warning: steps take 1.3 of the memory that was predicted, by which the recipe does not")
    again = run_memory(said, json.loads(json.dumps(known)), fsdp, **several)
    assert again.choice == first and again.spec.digest == memory.spec.digest


def test_the_smallest_gpu_decides():
    one = recipe(model=DEEP, fsdp=replace(AUTO, memory_gb=0.0))
    memory = RunMemory(one, SyntheticDataset(), range(24), plan_spec(resolve(one, 3, 8)), 3, 9e9,
                       gather=lambda numbers: np.array([numbers, [0.004e9], numbers]),
                       log=lambda line: None)
    assert memory.budget == 0.004e9


@pytest.mark.parametrize("memory_gb", [0.0024, 0.0028])
def test_after_memory_ran_out_one_layer_more_is_recomputed(memory_gb):
    fsdp = replace(AUTO, memory_gb=memory_gb)
    said, memory = [], run_memory([], {}, fsdp)
    step = SimpleNamespace(plans=[planned()[2]], as_sampled=False)
    advice, known = memory.exhausted(step, "llm")
    again = run_memory(said, {**memory.known, "ran_out": known,
                              "measured": known["exhausted"] / 2}, fsdp)
    # The run was planned by limits with which memory ran out.
    assert all(new.most < old.most for new, old in zip(again.spec.room, memory.spec.room,
                                                       strict=True)) and again.spec.room
    assert "since memory ran out before: recompute.json" in said[0]
    assert again.choice == known["next"] and again.choice != memory.choice
    changed = [p for p in PHASES if again.choice[p] != memory.choice[p]]
    before, after = (layer_counts(m.choice[changed[0]], LAYERS[changed[0]])
                     for m in (memory, again))
    assert len(changed) == 1 and sum(abs(before[c] - after[c]) for c in CHOICES) == 2
    assert f"one layer more: {again._described(again.choice)}" in advice
    del said[:]
    more = {"ran_out": known, "measured": known["exhausted"] * 1.01}  # than when memory ran out
    run_memory(said, more, fsdp)
    assert f"{more['measured']:.3g} of the prediction)" in said[0] and "ran out" not in said[0]
    fixed = run_memory(said, {}, FsdpConfig(activation_checkpointing="full",
                                            llm_checkpointing="full:1"))
    advice, known = fixed.exhausted(step, "llm")
    assert advice.startswith("recompute more: fsdp.llm_checkpointing=full:2;") and not known
    assert "loads" not in vars(fixed)  # no rows are read while memory is short


@pytest.mark.parametrize("change", [{"memory_gb": 0.1}, {"compute_dtype": "bfloat16"},
                                    {"llm_checkpointing": "none", "memory_gb": 0.003}])
def test_a_plan_of_another_recipe_is_left_out_and_told(change):
    _, known = run_memory([], {}).exhausted(
        SimpleNamespace(plans=[planned()[2]], as_sampled=False), "llm")
    said, other = [], replace(AUTO, **change)
    again = run_memory(said, {"ran_out": known}, other)
    assert "recompute.json in the run folder is not used" in said[0]
    assert again.choice == run_memory(anew := [], {}, other).choice and anew == said[1:]


@pytest.mark.parametrize("text", [
    "{half", "[]", '{"a": 1}', '{"exhausted": "x", "next": {}}',
    '{"exhausted": 1, "next": {"llm": "full"}}',
    '{"exhausted": "x", "next": {"vision": "full", "audio": "full", "llm": "full"}}'])
def test_a_file_that_no_run_left_is_not_used_and_told(text, tmp_path):
    (tmp_path / "recompute.json").write_text(text)
    said = []
    again = run_memory(said, {"ran_out": exhausted_before(tmp_path)})
    assert "recompute.json in the run folder is not used: it is damaged, or" in said[0]
    assert again.choice == run_memory(anew := [], {}).choice and anew == said[1:]


@pytest.mark.parametrize("phase, fsdp, moment, helps", [
    ("update", AUTO, "update", "more ranks than 3, fsdp.cpu_offload=true, fsdp.param_dtype=bfloa"),
    ("gather", replace(AUTO, shard_size=1, cpu_offload=True), "update", "fsdp.shard_size above 1, "
     "fsdp.param_dtype=bfloat16, or fewer"),
    ("llm", FsdpConfig(activation_checkpointing="full", shard_size=1), "last gradients",
     "fsdp.shard_size above 1, "),
])
def test_where_recomputing_more_is_no_help_no_plan_is_left(phase, fsdp, moment, helps):
    few = BatchLayout.concat([SyntheticDataset().layout(2)] * 3, [1] * 3)  # 9 tokens a rank
    advice, known = run_memory([], {}, fsdp).exhausted(
        SimpleNamespace(plans=[plan_step(few, planned()[2].spec)], as_sampled=False), phase)
    assert known == {} and moment in advice and helps in advice and "batch_size" not in advice


@pytest.mark.parametrize("checkpointing", ["auto", "none"])
def test_a_step_as_sampled_that_found_no_memory_is_refused_by_the_next_start(checkpointing):
    """Nothing more is recomputed for it, and balanced steps run."""
    _, _, plan = planned()
    wide = plan_step(plan.layout, plan.spec.as_sampled)
    fsdp = replace(AUTO, activation_checkpointing=checkpointing, memory_gb=0.0045)
    memory = run_memory([], {}, fsdp)
    assert memory.memory.peak(loads_of(wide), memory.choice) > memory.memory.peak(
        memory.loads, memory.choice)
    assert not memory.refuses(wide)
    advice, known = memory.exhausted(SimpleNamespace(plans=[wide], as_sampled=True), "llm")
    again = run_memory([], json.loads(json.dumps({"ran_out": known})), fsdp)
    assert again.choice == memory.choice and "the next start leaves" in advice
    assert "is predicted to need" in again.refuses(wide)


@pytest.mark.whole
def test_a_whole_model_refuses_a_step_that_does_not_fit_the_gpu(tmp_path):
    models.build("qwen3_5").config.save_pretrained(tmp_path)
    one = Recipe(model=ModelConfig(config=str(tmp_path)))
    spec = plan_spec(resolve(one, 2, 8))
    text = [BatchLayout.from_segments(i, 9, [(TEXT, text_lengths(n))])
            for i, n in enumerate((4000, 10))]
    plan = plan_step(BatchLayout.concat(text, [1, 1]), spec.as_sampled)
    room, wide = (RunMemory(one, None, (), spec, 2, device_bytes) for device_bytes in (1e8, 1e7))
    assert "GB of 0.0087" in wide.refuses(plan) and not room.refuses(plan)


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_without_memory_ends_all_and_the_next_start_recomputes_more(tmp_path, capfd):
    """The rank finds no memory inside of a block; then the same start goes on from the checkpoint,
    and the losses are those of a run that had memory."""
    def start(fault: str, folder: str) -> tuple[int, str, str]:
        code = run_local("tests.lib.faulty_train", [str(tmp_path / folder), fault], 2)
        return code, *capfd.readouterr()

    code, said, errors = start("memory", "run")
    assert code == 1 and "rank 1 failed at step 3" in errors and errors.count("error: ") == 1
    kept = json.loads((tmp_path / "run" / "recompute.json").read_text())
    described = next(x for x in said.splitlines() if x.startswith("recomputation: "))
    for phase, choice in kept["next"].items():
        assert f"{phase} {choice}" in errors
        assert f"{phase} {choice}" in described or phase == "llm"
    code, said, errors = start("memory no more", "run")
    assert code == 0 and "resuming at step 3" in said, errors
    told = next(x for x in said.splitlines() if x.startswith("recomputation: "))
    assert all(f"{phase} {choice}" in told for phase, choice in kept["next"].items())
    assert "before: " in told and told.partition("; ")[0] != described
    (tmp_path / "run" / "recompute.json").unlink()  # as if it had never run out
    _, said, _ = start("memory no more", "run")
    assert f"{described}; before: " in said
    assert start("memory no more", "whole")[0] == 0
    losses = [{row["step"]: row["loss"] for row in read_rows(tmp_path / f / "metrics.jsonl")}
              for f in ("run", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 8


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("fault, says, saved", [
    ("memory in the update", "it was the update, which needs no activations; what helps: more ", 3),
    ("memory held out, validation", "could be recomputed: lower train.batch_size", 2),
    ("memory held out, answers", "lower train.num_samples or train.sample_tokens", 3)])
def test_where_memory_ran_out_decides_what_is_told(tmp_path, capfd, fault, says, saved):
    """All ranks end with one text, nothing is left for the next start, and checkpoints stay."""
    assert run_local("tests.lib.faulty_train", [str(tmp_path), fault], 2) == 1
    errors = capfd.readouterr().err
    assert errors.count("error: rank 1 failed at step") == 1 and says in errors
    assert not (tmp_path / "recompute.json").exists()
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step_{saved:08d}"


def trained(world, run, factor: float, stop: int) -> tuple[list[float], list[str], dict]:
    """(losses, what was said of recomputation, what the layers recompute at the end). factor: of
    the prediction for rank 1, what it takes; 0: nobody counts."""
    said, losses = listened(), []

    def record(step, row: dict) -> None:
        losses.append(row["loss"])
        if step.index == stop:
            raise InterruptedError

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=record)

    def peak_bytes(device) -> float:
        memory = trainer.memory
        return factor * (1 + world.rank) / 2 * memory.memory.peak(memory.loads, memory.choice)

    measured.peak_bytes = peak_bytes
    try:
        trainer.run()
    except InterruptedError:
        trainer.checkpointer.wait()
    finally:
        trainer.close()
    kinds = {p: [b.recomputes for b in stack] for p, stack in trainer.model.blocks().items()}
    return losses, [x for x in said if x.startswith("recomputation")], kinds


@pytest.mark.slow
@pytest.mark.dist
def test_a_resume_goes_on_with_what_was_measured(tmp_path):
    """On as many ranks the choice is that of the checkpoint and losses are equal bit by bit, as
    those of a run that recomputes nothing; on other ranks it is chosen anew, and said."""
    run = run_recipe(tmp_path / "run")
    run = replace(run, model=DEEP, fsdp=replace(run.fsdp, activation_checkpointing="auto",
                                                memory_gb=0.0045))
    losses, said, kinds = run_ranks(trained, 2, run, 2.0, 4)[0]
    assert len(said) == 2 and "before: vision none, audio none, llm none" in said[1]
    assert any(kind != "none" for stack in kinds.values() for kind in stack)
    rest, again, still = run_ranks(trained, 2, run, 0.0, 99)[1]
    assert still == kinds and len(again) == 1 and again[0] in said[1]
    plain = replace(run, run=replace(run.run, dir=str(tmp_path / "plain")),
                    fsdp=replace(run.fsdp, activation_checkpointing="none"))
    assert losses[:4] + rest == run_ranks(trained, 2, plain, 0.0, 99)[0][0]  # 4 is not saved
    more = replace(run, train=replace(run.train, num_steps=10))
    _, anew, _ = run_ranks(trained, 1, more, 0.0, 99)[0]
    assert len(anew) == 1 and "before: " in anew[0]


@pytest.mark.dist
@pytest.mark.parametrize("ranks, shard_size, is_long", [(2, 0, False), *(
    pytest.param(*groups, True, marks=pytest.mark.slow)
    for groups in ((2, 0), (3, 0), (4, 0), (4, 2)))])
def test_gradients_are_those_of_one_process_without_recomputation(ranks, shard_size, is_long):
    """Long: also where the first ranks have no images and no clips."""
    choices = [("full:1+selective:1", "selective:1", "full:1"), ("selective:2", "full:1", "none"),
               ("full", "full:1+selective:1", "full:1+selective:2")]
    fsdp = FsdpConfig(param_dtype="float64", prefetch=1, shard_size=shard_size)
    cases = {str(k): Case(recipe(model=DEEP, fsdp=replace(fsdp, **{
        f"{p}_checkpointing": c for p, c in zip(PHASES, choice, strict=True)})))
        for k, choice in enumerate(choices[:3 if is_long else 1])}
    if is_long:
        cases |= {f"few {k}": replace(case, dataset=FEW_MEDIA, recipe=replace(
            case.recipe, balance=BalanceConfig(enabled=False))) for k, case in cases.items()}
    found = run_ranks(all_gradients, ranks, cases)
    wanted = {}
    for name, case in cases.items():
        few = case.dataset is FEW_MEDIA
        if few not in wanted:
            wanted[few] = reference_gradients(case)
        assert found[0][name][0] == pytest.approx(wanted[few][0], rel=1e-12)
        error, where = worst_difference(found[0][name][1], wanted[few][1])
        assert error <= 1e-9, f"{name}: {where} differs by {error:.1e}"
