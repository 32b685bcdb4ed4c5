"""How examples are mixed: repeats of a source, windows of a shuffle, mini-batches below caps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import DataConfig, RecipeError, RunConfig, SourceConfig, load_recipe
from orchmllm.data.sampler import (
    CappedSampler,
    GlobalSampler,
    MixtureSampler,
    make_sampler,
    shuffled,
)
from orchmllm.data.stream import StreamDataset, open_dataset
from orchmllm.plan.grouping import capped
from orchmllm.plan.layout import VISION
from orchmllm.runtime.build import build_dataset
from orchmllm.tools.data.build_index import build_index
from orchmllm.tools.data.command import main
from orchmllm.tools.predict.examples import of_indexes
from tests.lib.drawn import drawn_model, with_processor, write_recipe
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media
from tests.lib.gradients import BATCH, Case, all_gradients, reference_gradients, worst_difference
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.training import train, watched

REPEATS = (1, 3, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources of 7, 11 and 13 rows."""
    folder = tmp_path_factory.mktemp("mixing")
    write_media(folder)
    for k, count in enumerate((7, 11, 13)):
        rows = [llava_row(*QUESTIONS[(5 * k + i) % 12]) for i in range(count)]
        for i, row in enumerate(rows):
            row["conversations"][1]["value"] += f" {k} {i}" + " more" * (i % 5) * 10
        write_jsonl(folder / f"{k}.jsonl", rows)
    return folder


def data_of(folder, **keys) -> DataConfig:
    sources = tuple(SourceConfig(path=str(folder / f"{k}.jsonl"), repeats=r)
                    for k, r in enumerate(keys.pop("repeats", REPEATS)))
    return DataConfig(sources=sources, index_dir=str(folder / "index"),
                      **keys)


def drawn(sampler, count: int) -> np.ndarray:
    """The first `count` draws."""
    out, step = [], 0
    while len(out) < count:
        out += sampler.batch(step).tolist()
        step += 1
    return np.array(out[:count])


@pytest.mark.parametrize("window", [0, 1, 4, 1000])
def test_every_example_comes_as_often_as_its_source_says(folder, window):
    dataset = open_dataset(data_of(folder), str(with_processor()), seed=0)
    data = data_of(folder, shuffle_window=window)
    rows, held = dataset.split(3)
    epoch = sum(r * sum(dataset.where(i)[0] == k for i in rows) for k, r in enumerate(REPEATS))
    draws = drawn(make_sampler(dataset, rows, 5, seed=1, data=data), 4 * epoch)
    for part in np.split(draws, 4):
        counts = Counter(part.tolist())
        assert counts.keys() == set(rows) and not counts.keys() & set(held)
        assert all(counts[i] == REPEATS[dataset.where(i)[0]] for i in rows)
    other = make_sampler(dataset, rows, 8, seed=1, data=data)
    assert np.array_equal(drawn(other, 4 * epoch), draws)  # another number of ranks
    assert not np.array_equal(draws[:epoch], draws[epoch: 2 * epoch])


def test_the_only_source_is_repeated(folder):
    """Within an epoch, whose order is drawn as a whole."""
    data = DataConfig(sources=(SourceConfig(path=str(folder / "0.jsonl"), repeats=3),))
    dataset = open_dataset(data, str(with_processor()), seed=0)
    draws = drawn(make_sampler(dataset, range(7), 5, seed=1, data=data), 42).tolist()
    for part in (draws[:21], draws[21:]):
        assert Counter(part) == dict.fromkeys(range(7), 3) and len({*part[:7]}) < 7


def test_a_weighted_source_comes_whole_before_it_comes_again():
    sizes, share = (1500, 700), (0.6, 0.4)
    draws = drawn(MixtureSampler([range(1500), range(1500, 2200)], share, 50, seed=2), 5000)
    for size, mine in zip(sizes, (draws[draws < 1500], draws[draws >= 1500]), strict=True):
        assert len(mine) == 5000 * share[sizes.index(size)]
        for at in range(0, len(mine) - size + 1, size):
            assert len({*mine[at: at + size].tolist()}) == size


def test_a_weighted_source_is_not_held_out_as_a_whole(folder):
    sources = tuple(SourceConfig(path=str(folder / f"{k}.jsonl"), weight=0.5) for k in range(3))
    dataset = open_dataset(DataConfig(sources=sources), str(with_processor()), seed=0)
    assert [*map(len, dataset.split(20))] == [11, 20]
    with pytest.raises(ValueError, match=r"data.sources\[0\].weight = 0.5: of the 7 rows of .*0."
                       "jsonl data.num_validation = 30 holds out 7, so there is none to draw: low"):
        dataset.split(30)


def test_a_window_is_shuffled_in_itself_and_windows_among_each_other():
    order = shuffled(103, 10, [0, 1])
    assert sorted(order) == list(range(103))
    cuts = np.flatnonzero(np.diff(order // 10)) + 1
    parts = np.split(order, cuts)
    assert [len(p) for p in parts if p[0] // 10 != 10] == [10] * 10 and len(parts) == 11
    assert [p[0] // 10 for p in parts] != sorted(p[0] // 10 for p in parts)
    assert sum(not np.array_equal(p, np.sort(p)) for p in parts) >= 9
    whole = GlobalSampler(range(50), 7, seed=4)
    assert np.array_equal(drawn(GlobalSampler(range(50), 7, seed=4, window=50), 150),
                          drawn(whole, 150))


def test_sources_of_one_size_are_drawn_in_orders_of_their_own():
    draws = MixtureSampler([range(50), range(50, 100)], [1, 1], 100, seed=3).batch(0)
    first, second = draws[draws < 50], draws[draws >= 50] - 50
    common = min(len(first), len(second))
    assert common > 40 and not np.array_equal(first[:common], second[:common])


def test_the_window_of_a_stream(folder, reader):
    def rows(window: int) -> list[int]:
        stream = StreamDataset(
            [SourceConfig(path=str(folder / "2.jsonl"))], num_shards=1, seed=0, window=window,
            reader=reader, index_dir=folder / "index")
        return [stream.where(i)[1] for i in range(13)]

    assert rows(1) == list(range(13))
    assert [sorted(rows(4)[k: k + 4]) for k in (0, 4, 8)] == [
        list(range(k, k + 4)) for k in (0, 4, 8)]
    assert rows(4) != list(range(13)) and sorted(rows(256)) == list(range(13))


def recipe_of(folder, run_dir, **keys):
    base = recipe(model=drawn_model(), data=data_of(folder, prefetch=2, batching="capped",
                                            max_batch_tokens=400, max_batch_images=3),
                  balance=BalanceConfig(ranks_per_node=2), run=RunConfig(dir=str(run_dir)))
    return replace(base, train=replace(base.train, num_steps=14, batch_size=2),
                   checkpoint=replace(base.checkpoint, every_steps=5, asynchronous=False), **keys)


@pytest.fixture(scope="module")
def indexed(folder):
    sources = ", ".join(f"{{path: {s.path}}}" for s in data_of(folder).sources)
    assert main(["index", write_recipe(folder, f"sources: [{sources}]"), "--workers", "1"]) == 0
    return folder


def test_capped_mini_batches_stay_below_the_caps_and_drop_nothing(indexed):
    run = recipe_of(indexed, indexed / "run")
    dataset = open_dataset(run.data, str(with_processor()), seed=0)
    sampler = make_sampler(dataset, range(31), 4, data=run.data, per_rank=2, seed=3)
    assert isinstance(sampler, CappedSampler) and 31 <= len(sampler.indices) == 66
    groups = len(sampler.groups)
    seen: Counter[int] = Counter()
    for step in range(groups):  # two epochs, two mini-batches a step
        batch, alone = sampler.batch(step), sampler.shares(step, 1)
        assert [(s.start, s.stop) for s in alone] == [(0, len(batch))]
        seen.update(batch.tolist())
        for share in sampler.shares(step, 2):
            layouts = [dataset.layout(int(i)) for i in batch[share]]
            tokens = sum(int(x.num_tokens.sum()) for x in layouts)
            images = sum(int((x.modality == VISION).sum()) for x in layouts)
            assert len(layouts) == 1 or (tokens <= 400 and images <= 3)
    assert all(seen[i] == 2 * REPEATS[dataset.where(i)[0]] for i in range(31))
    again = make_sampler(dataset, range(31), 4, data=run.data, per_rank=2, seed=3)
    assert np.array_equal(again.batch(groups - 1), sampler.batch(groups - 1))
    fuller = [len(sampler.batch(s)) / 2 for s in range(groups)]
    assert np.mean(fuller) > 2.0
    with pytest.raises(ValueError, match="source 0.jsonl has no index; build it"):
        plain = open_dataset(replace(run.data, index_dir="none"), str(with_processor()), seed=3)
        make_sampler(plain, range(31), 4, data=run.data, seed=3)
    plain.indexes[0] = dataset.indexes[0]
    with pytest.raises(ValueError, match="source 1.jsonl has no index; build it"):
        make_sampler(plain, range(31), 4, data=run.data, seed=3)


CAPPED = SyntheticDataset()


def capped_sampler() -> CappedSampler:
    """One step with all examples."""
    layouts = [CAPPED.layout(i) for i in range(BATCH)]
    groups = capped(np.array([(x.modality == VISION).sum() for x in layouts]),
                    np.array([x.num_tokens.sum() for x in layouts]), max_images=2, max_tokens=60)
    return CappedSampler(range(BATCH), groups, len(groups))


@pytest.mark.slow
@pytest.mark.dist
def test_gradients_with_capped_mini_batches_equal_the_plain_loop():
    cases = {str((enabled, k, dispatch)): Case(
        recipe(balance=BalanceConfig(enabled=enabled, ranks_per_node=2, dispatch=dispatch)), CAPPED,
        accumulation_steps=k, sampler=capped_sampler)
        for enabled, k, dispatch in ((False, 1, "tensors"), (True, 2, "bytes"))}
    loss, grads = reference_gradients(next(iter(cases.values())))
    result = run_ranks(all_gradients, 2, cases)[0]
    for name in cases:
        assert result[name][0] == pytest.approx(loss, rel=1e-12), name
        error, where = worst_difference(result[name][1], grads)
        assert error <= 1e-9, (name, where, error)


def trained(world, run, stop_after: int = -1) -> list[tuple[float, list[int]]]:
    return watched(world, run, lambda step, row: (row["loss"], step.example_ids.tolist()),
                   stop_after, build_dataset(run))


@pytest.mark.dist
@pytest.mark.slow
def test_capped_training_resumes_exactly(indexed, tmp_path):
    whole = run_ranks(trained, 1, recipe_of(indexed, tmp_path / "whole"))[0]
    stopped = recipe_of(indexed, tmp_path / "stopped")
    run_ranks(trained, 1, stopped, 7)
    assert run_ranks(trained, 1, stopped)[0] == whole[5:]
    assert len({len(ids) for _, ids in whole}) > 2


def resumed_with_other_lengths(world, run) -> None:
    train(world, run)
    more = replace(run, train=replace(run.train, num_steps=2))
    halves = replace(more, train=replace(more.train, batch_size=1, accumulation_steps=2))
    with pytest.raises(ValueError, match="content.capped_batch_size is .*data.batching=capped"):
        train(world, halves)  # as many examples a step, but other ones stand together
    other = replace(more, data=replace(more.data, max_example_tokens=120,
                                             max_lost_percent=100.0))
    with pytest.raises(ValueError, match="content.capped_lengths is .*data.batching=capped"):
        train(world, other)
    for same in (more, replace(other, run=replace(run.run, allow_data_change=True),
                               train=replace(run.train, num_steps=3))):
        assert len(train(world, same)) == 1


@pytest.mark.dist
def test_other_lengths_of_capped_mini_batches_are_refused_on_resume(indexed, tmp_path):
    run = recipe_of(indexed, tmp_path / "run")
    run = replace(run, train=replace(run.train, num_steps=1))
    cut = open_dataset(replace(run.data, max_example_tokens=120), str(with_processor()), seed=0)
    for source in cut.sources:
        build_index(source, cut.reader, indexed / "index", num_workers=1)
    run_ranks(resumed_with_other_lengths, 1, run)


@pytest.mark.parametrize("data, said", [
    ("{path: x, batching: capped}", "needs a number of tokens"),
    ("{path: x, max_batch_tokens: 9}", "needs a number of tokens"),
    ("{path: x, batching: capped, max_batch_tokens: 9, streaming: true}", "forms mini-batches of"),
    ("{path: x, batching: capped, max_batch_tokens: 9, shuffle_window: 3}", "forms mini-batches"),
    ("{sources: [{path: x, weight: 1, repeats: 2}]}",
     r"data.sources\[0\].repeats = 2: repeats of x are counted in epochs"),
    ("{sources: [{path: x, repeats: 2}], streaming: true}", "repeats of x are counted in epochs")])
def test_what_does_not_go_together_is_refused(tmp_path, data, said):
    (tmp_path / "r.yaml").write_text(f"data: {data}\n")
    with pytest.raises(RecipeError, match=said):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("how", [
    "weights", "repeats", "data.shuffle_window=2",
    "data.batching=capped data.max_batch_tokens=400"])
def test_stats_are_of_batches_as_training_draws_them(how, folder, tmp_path):
    keys = {"weights": dict(weight=1.0), "repeats": dict(repeats=3)}.get(how, {})
    sources = "".join(f"    - {{path: {folder}/{k}.jsonl{', ' if more else ''}{more}}}\n"
                      for k, more in enumerate(
                          ", ".join(f"{name}: {value * (k + 1)}" for name, value in keys.items())
                          for k in range(3)))
    (tmp_path / "r.yaml").write_text(
        f"data:\n  sources:\n{sources}  index_dir: {folder}/index\n"
        f"model: {{config: {drawn_model().config}}}\ntrain: {{batch_size: 2}}\n")
    loaded = load_recipe(tmp_path / "r.yaml", [o for o in how.split() if "=" in o])
    dataset = open_dataset(loaded.data, str(with_processor()), seed=0)
    for source in dataset.sources:
        build_index(source, dataset.reader, folder / "index", num_workers=1)
    dataset = open_dataset(loaded.data, str(with_processor()), seed=0)
    sampler = make_sampler(dataset, dataset.split(0)[0], 8, data=loaded.data, per_rank=2,
                           seed=loaded.run.seed)
    assert isinstance(sampler, MixtureSampler) == (how == "weights")
    own = of_indexes(loaded, dataset.sources, dataset.indexes)
    for step in range(20):
        layout = own.draw(4, 2, step)
        assert np.array_equal(layout.example_id, sampler.batch(step))
        assert layout.examples_per_rank.tolist() == [
            s.stop - s.start for s in sampler.shares(step, 4)]
