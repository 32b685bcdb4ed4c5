"""The memory model against measured peaks of scaled-down runs, and `auto` against brute force."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.fsdp import CHOICES
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.loader.indices import batch_layout
from orchmllm.models.flops import item_rank, phase_lengths
from orchmllm.models.whole_flops import phase_work
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.choice import choose_checkpointing
from orchmllm.sharding.fits import decide, largest_fitting, scaled
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.recomputed import recomputed_flop
from orchmllm.sharding.run_memory import RunMemory
from orchmllm.tools.predict.workload import sample_layout
from orchmllm.trainer import Trainer
from tests.lib.drawn import model_of
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen, small_spec
from tests.lib.synthetic import MODEL, SyntheticDataset, recipe
from tests.lib.tracked import as_on_a_gpu, tracked_peak

KINDS = (("TVT",), ("TAT",), ("TVT", "TAT", "T"))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_predicted_peak_is_the_measured_one(choice, kinds):
    fsdp = FsdpConfig(activation_checkpointing=choice, compute_dtype="bfloat16")
    for peak, predicted in compared(of(wide(), fsdp), kinds):
        assert predicted == pytest.approx(peak, rel=0.10 if kinds == ("TVT",) else 0.05)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("parts", [("llm",), ("vision", "audio")])
def test_predicted_peak_with_frozen_parts(choice, parts):
    model = frozen(*parts, model=wide())
    fsdp = FsdpConfig(activation_checkpointing=choice, compute_dtype="bfloat16")
    for peak, predicted in compared(of(model, fsdp), ("TVT", "TAT", "T")):
        assert predicted == pytest.approx(peak, rel=0.05)


def test_frozen_parts_have_no_gradients_or_optimizer():
    whole, part = (MemoryModel(m, FsdpConfig(), 2).state_bytes()
                   for m in (MODEL, frozen("vision", "audio", "llm")))
    assert part["parameters"] == whole["parameters"]
    assert part["gradients"] < 0.3 * whole["gradients"]
    assert part["optimizer"] == 2 * part["gradients"]


def small_cases():
    """(memory, plan) of the paper's smallest and largest shapes, few ranks."""
    for name, shards in (("10b", 64), ("84b", 256)):
        layout = sample_layout(MODELS[name], num_ranks=8, batch_size=6, seed=1)
        yield MemoryModel(MODELS[name], FsdpConfig(compute_dtype="bfloat16", loss_chunk_rows=1024),
                          shards), plan_step(layout, small_spec(MODELS[name]))


def one_case():
    memory, plan = next(iter(small_cases()))
    return memory, loads_of(plan)


def test_auto_picks_what_brute_force_picks():
    """Over budgets from nothing fits to everything fits: the cheapest of the 27 that fits, with
    costs computed here item by item, and peaks from one phase at a time."""
    for memory, plan in small_cases():
        table, loads, d = {}, loads_of(plan), plan.layout.num_ranks
        for combination in product(CHOICES, repeat=3):
            choice = dict(zip(PHASES, combination, strict=True))
            cost = 0.0
            for phase in PHASES:
                work = phase_work(phase, memory.model, phase_lengths(plan.layout, phase),
                                  choice[phase])
                block, layers = memory.blocks(phase)[0], memory.num_layers(phase)
                moved = 380 * block.moved * layers * phase_lengths(plan.layout, phase).positions
                products, attention = work.recompute
                again = {"none": 0 * moved, "selective": moved, "full": attention + moved
                         + block.repeated * products}[choice[phase]]
                cost += np.bincount(item_rank(plan, phase), again, d).max()
            assert recomputed_flop(memory, loads, choice) == pytest.approx(cost, rel=0.01)
            peak = max(v.max() for v in memory.peaks(loads, choice).values())
            table[combination] = (cost, peak)
        peaks = sorted(p for _, p in table.values())
        for budget in [*np.linspace(peaks[0], peaks[-1], 23), peaks[-1] * 2]:
            fitting = {c: v for c, v in table.items() if v[1] <= budget}
            want = min(fitting, key=fitting.get)
            got = choose_checkpointing(memory, loads, budget, by_layer=False)
            assert tuple(got.values()) == want
        with pytest.raises(ValueError, match=r"needs [\d.]+ GB a rank at least"):
            choose_checkpointing(memory, loads, peaks[0] * 0.99)


def test_what_is_fixed_stays():
    memory, loads = one_case()
    got = choose_checkpointing(memory, loads, 1e15, {"llm": "full"})
    assert got == {"vision": "none", "audio": "none", "llm": "full"}


def test_a_recipe_that_cannot_fit_names_what_would():
    memory, loads = one_case()
    tight = recipe(fsdp=FsdpConfig(activation_checkpointing="auto"))
    tight = replace(tight, train=replace(tight.train, batch_size=6))
    full = dict.fromkeys(PHASES, "full")
    least = memory.peak(loads, full)
    with pytest.raises(ValueError, match=r"train.batch_size=[1-5] would fit"):
        decide(tight, memory, loads, 0.9 * least)
    fitting = largest_fitting(memory, loads, full, 0.9 * least, 6, 6)
    assert memory.peak(scaled(loads, fitting / 6), full) <= 0.9 * least
    with pytest.raises(ValueError, match="more ranks than 64"):
        decide(tight, memory, loads, 1e6)
    with pytest.raises(ValueError, match="set fsdp.memory_gb"):
        decide(tight, memory, loads, 0)


@pytest.mark.parametrize("now", [1, 6, 64, 65, 4096, 10**6])
def test_the_largest_that_fits_is_found_among_any_number(now):
    memory, loads = one_case()
    full = dict.fromkeys(PHASES, "full")
    budget = memory.peak(scaled(loads, 2.5), full)
    found = largest_fitting(memory, loads, full, budget, now, 10**9 - 1)
    assert memory.peak(scaled(loads, found / now), full) <= budget
    assert memory.peak(scaled(loads, (found + 1) / now), full) > budget
    assert found == int(2.5 * now)
    for high in (1, now, found):
        assert largest_fitting(memory, loads, full, budget, now, high) == high
    assert not largest_fitting(memory, loads, full, 1.0, now, 10**9 - 1)


def test_auto_in_a_run_uses_its_own_data():
    data = SyntheticDataset()
    asked = recipe(fsdp=FsdpConfig(activation_checkpointing="auto", memory_gb=1.0))
    spec = small_spec(MODEL)
    assert RunMemory(asked, data, range(24), spec, 2, 0).choice == dict.fromkeys(PHASES, "none")
    # From the second microbatch on the gradients are there from the start, and need their room.
    again = RunMemory(replace(asked, train=replace(asked.train, accumulation_steps=2)), data,
                      range(24), spec, 2, 0)
    one = replace(again.memory, microbatches=1)
    more = again.memory.peak(again.loads, again.choice) - one.peak(again.loads, again.choice)
    assert more == pytest.approx(one.state_bytes()["gradients"], rel=0.3)
    assert len(again.loads.phases["llm"].positions) == 2 * 2 * 2  # steps, microbatches, ranks
    with pytest.raises(ValueError, match="would help"):
        RunMemory(replace(asked, fsdp=replace(asked.fsdp, memory_gb=1e-4)), data, range(24),
                  spec, 2, 0)


def test_more_memory_for_more_of_everything():
    memory, loads = one_case()
    choice = dict.fromkeys(PHASES, "full")
    assert memory.peak(scaled(loads, 2), choice) > memory.peak(loads, choice)
    gathered = replace(memory, all_gather=8)
    assert gathered.peak(loads, choice) > memory.peak(loads, choice)
    travel = small_spec(memory.model).row_bytes  # those of others are not cast
    assert gathered._batch(loads) - memory._batch(loads) == pytest.approx(
        sum(8 * loads.phases[p].rows.max() * travel[p] for p in travel))
    assert replace(memory, shards=1).peak(loads, choice) > memory.peak(loads, choice)


def test_ranks_that_share_an_example_hold_its_keys_and_values():
    memory, _ = one_case()
    spec = small_spec(memory.model)
    spec = replace(spec, balance=replace(
        spec.balance, llm=replace(spec.balance.llm, max_shares=2)))
    loads = loads_of(plan_step(batch_layout(range(5), [9000, *[10] * 4], [2, 1, 1, 1]), spec))
    assert sorted(loads.gathered) == [0, 0, 9000, 9000]
    choice = dict.fromkeys(PHASES, "full")
    shared, whole = (memory.peaks(one, choice) for one in (loads, replace(loads, gathered=0.0)))
    for moment, copies in (("llm forward", 2), ("llm backward", 4)):
        assert shared[moment] - whole[moment] == pytest.approx(
            copies * loads.gathered * memory.position_bytes)


def wide() -> ModelConfig:
    """Activations, not weights, take the memory."""
    return model_of(
        num_layers=4,
        vision={"embed_dim": 96, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 4},
        audio={"d_model": 96, "encoder_ffn_dim": 384, "encoder_attention_heads": 4},
        text={"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4,
              "num_key_value_heads": 4, "vocab_size": 512})


def _peak(trainer: Trainer, step) -> float:
    """Of one forward and backward pass. What gloo is late with on a busy machine comes on top."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        trainer._accumulate(step)
    trainer.optimizer.zero_grad()
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events()
                    if e.name() == "[memory]")
    return float(np.cumsum([b for _, b in events]).max())


def dataset(kinds: tuple[str, ...]) -> SyntheticDataset:
    return SyntheticDataset(kinds=kinds, size=1000, max_side=224)


def of(model: ModelConfig, fsdp: FsdpConfig) -> Recipe:
    return recipe(model=model, fsdp=fsdp, balance=BalanceConfig(enabled=False))


def measured(world, one: Recipe, kinds: tuple[str, ...], batch_size: int = 24
             ) -> tuple[float, StepPlan]:
    """(Measured peak bytes of one forward and backward pass above what is resident before it but
    the batch, from the allocator's own events: the least of three passes; its plan)."""
    data = dataset(kinds)
    trainer = Trainer(one, world, dataset=data)
    n = batch_size * world.world_size
    loader = iter(StepLoader(data, GlobalSampler(range(2 * n), n, shuffle=False),
                             trainer.orchestrator, num_steps=2, prefetch=0, feed=trainer._feed))
    trainer._accumulate(next(loader))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    step = next(loader)
    gc.collect()
    peak = min(_peak(trainer, step) for _ in range(3))
    held = []  # a batch that is on the device already
    step.micro[0].content.moved(lambda x: held.append(x.nbytes) or x)
    return peak + sum(held), step.plans[0]


def compared(one: Recipe, kinds: tuple[str, ...]) -> list[tuple[float, float]]:
    """(Measured, predicted) of two ranks, without parameters and the optimizer's state. A CPU keeps
    more than the GPU of the memory model: what torch's tracker finds with its own kernels, less
    what it finds with those of a GPU, is added to what is predicted."""
    out, memory = [], MemoryModel(one.model, one.fsdp, 2)
    state, found = memory.state_bytes(), run_ranks(measured, 2, one, kinds)
    choice = {p: one.fsdp.checkpointing(p) for p in PHASES}
    for rank, (peak, plan) in enumerate(found):
        moments = memory.peaks(loads_of(plan), choice)
        predicted = max(float(v[rank]) for k, v in moments.items() if k != "optimizer")
        of_cpu, of_gpu = (tracked_peak(one, plan, dataset(kinds), rank, kernels)
                          for kernels in (nullcontext, as_on_a_gpu))
        out.append((peak, predicted - state["parameters"] - state["optimizer"] + of_cpu - of_gpu))
    return out
