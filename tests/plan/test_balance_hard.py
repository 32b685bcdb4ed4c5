"""What is hard to balance: homes and weights as bad as they come, and images of few sizes."""

import sys
from pathlib import Path

import numpy as np
import pytest

from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import example_bytes
from orchmllm.plan.balance import balance, core, load_cap
from orchmllm.tools.predict.workload import sample_headers, sample_layout
from tests.lib.balancing import least_moved, loads
from tests.lib.recipes import small_spec

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # as for a script that is started
from bench_balance import adversarial, measure, spec_of, synthetic_lengths  # noqa: E402

NOTHING = np.zeros(0, np.int64)


@pytest.mark.parametrize(
    "kind", ["all on one rank", "half on one rank", "all on one node", "sorted"])
def test_homes_as_bad_as_they_come(kind: str) -> None:
    """Within the tolerance, and little more moves between nodes than has to."""
    d = 1024
    weight = synthetic_lengths("lognormal", d * 60, 0)
    weight = weight * 1000 + weight * weight // 8
    home = {"all on one rank": np.zeros(d * 60, np.int64),
            "half on one rank": np.where(np.arange(d * 60) % 2, 0, np.arange(d * 60) // 60),
            "all on one node": np.arange(d * 60) % 8,
            "sorted": np.argsort(np.argsort(weight, kind="stable")) // 60}[kind]
    cap = load_cap(weight, d, .005)
    got = core().least_move(weight, home, NOTHING, d, 8, cap)
    assert loads(weight, got, d).max() <= cap
    assert moved(weight, home, got) <= 1.2 * surplus(weight, home, cap)


def test_no_input_takes_much_longer_than_others() -> None:
    """Operations, of which every loop counts its own, and which hold the time within a factor of
    two: at most ten times the median of inputs with as many items."""
    rows = {name: measure(problem, .005)[0] for name, problem in adversarial(153600).items()}
    operations = {name: row["operations"] for name, row in rows.items()}
    median = np.median(list(operations.values()))
    assert {name: n / median for name, n in operations.items() if n > 10 * median} == {}
    assert sum(row["worse"] for row in rows.values()) == 0
    most = {name: 1.2 if name.startswith("sorted") else 10 for name in rows}
    assert {name: row["volume"] for name, row in rows.items() if row["volume"] > most[name]} == {}


@pytest.mark.parametrize(("ranks", "clips", "seed", "most"), [(512, 12, 0, 1.5), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in (
        (512, 12, 2, 1.5), (512, 12, 3, 1.5), (512, 12, 4, 1.5), (512, 12, 5, 2.5),
        (512, 21, 0, 2.5), (512, 21, 1, 2.8), (512, 21, 2, 2.1), (512, 21, 3, 2.0),
        (512, 30, 1, 1.5), (512, 30, 2, 1.5), (512, 30, 3, 2.2), (512, 30, 5, 3.7),
        (1024, 21, 0, 1.5), (2560, 12, 0, 1.5), (2560, 12, 1, 1.5), (2560, 21, 0, 1.5),
        (2560, 21, 1, 1.5), (2560, 30, 0, 1.5), (2560, 30, 1, 1.5)))])
def test_clips_of_two_lengths_are_not_all_shipped(ranks: int, clips: int, seed: int,
                                                  most: float) -> None:
    """Clips of about 1 s and 29 s. With 12 or 30 a rank, 99.9% of the places for long ones are
    taken: without the way from `greedy`, its plan was the result, which changes the node of 80% to
    90% of the load. most: of the least volume, where a tolerance is 0.1% or is missed; seven draws
    of twenty are above 1.5. With 21 a rank most tolerances below 2% are missed: each then has the
    plan of tolerance 0, which takes the largest load down as far as it can and moves more."""
    rng = np.random.default_rng(seed)
    n = clips * ranks
    seconds = np.where(rng.random(n) < .5, rng.normal(1, .1, n), rng.normal(29, .3, n))
    cost = small_spec(MODELS["84b"]).costs["audio"]
    weight = cost((50 * seconds.clip(.3, 30)).astype(np.int64))
    home = np.arange(n) // clips
    shipped = loads(weight, core().greedy(weight, home, ranks), ranks).max()
    before = core().least_move(weight, home, NOTHING, ranks, 8, load_cap(weight, ranks, 0))
    for tolerance in (.001, .002, .005, .01, .02, .05):
        cap = load_cap(weight, ranks, tolerance)
        got = core().least_move(weight, home, NOTHING, ranks, 8, cap)
        largest = loads(weight, got, ranks).max()
        assert largest <= max(shipped, cap)
        missed = largest > cap
        assert not missed or np.array_equal(got, before), tolerance
        least = least_moved(weight, home, ranks, max(cap, largest))
        times = most if missed or tolerance == .001 else min(most, 1.7)
        assert moved(weight, home, got) <= times * least, tolerance
        assert moved(weight, home, got) <= moved(weight, home, before)
        before = got


@pytest.mark.parametrize("ranks", [512, pytest.param(2560, marks=pytest.mark.slow)])
def test_items_on_one_rank_of_each_node_stay_in_their_node(ranks: int) -> None:
    weight = synthetic_lengths("lognormal", ranks * 30, 3)
    home = np.arange(ranks * 30) // 240 * 8
    for tolerance in (.001, .005, .02, .05):
        cap = load_cap(weight, ranks, tolerance)
        got = core().least_move(weight, home, NOTHING, ranks, 8, cap)
        assert loads(weight, got, ranks).max() <= cap
        assert moved(weight, home, got) <= 1.05 * surplus(weight, home, cap)


def test_the_least_that_moves_is_no_more_than_a_plan_moves() -> None:
    """Of all assignments of 12 items to two nodes whose ranks can then be balanced."""
    rng = np.random.default_rng(0)
    plans = np.array(np.meshgrid(*[[0, 8]] * 12)).reshape(12, -1).T
    for cap in (32, 40, 61, 64):
        weight = rng.choice([1, 2, 30, 31, 32], 12)
        home = np.where(rng.random(12) < .9, 0, 8)
        fits = [p for p in plans if all(
            loads(weight[p == k], core().least_move(weight[p == k], np.zeros((p == k).sum(), int),
                                                    NOTHING, 8, 8, cap), 8).max(initial=0) <= cap
            for k in (0, 8))]
        least = least_moved(weight, home, 16, cap)
        assert all(moved(weight, home, p) >= least for p in fits)


@pytest.mark.parametrize("policy", ["greedy", "least_move", "padded", "conv_transformer"])
def test_weights_near_the_end_of_int64(policy: str) -> None:
    """`make sanitize` runs these under UBSan, which ends them at the first overflow."""
    rng = np.random.default_rng(0)
    weight = rng.integers(1, 2**56, 40) + (np.arange(40) == 3) * (2**61 - 2**58)
    options = {"padded_cost": np.zeros(40, np.int64)} if policy == "conv_transformer" else {}
    for tolerance in (0., .001, 1.) if policy == "least_move" else (None,):
        for home in (np.zeros(40, np.int64), np.arange(40) % 24):
            rank_of = balance(weight, num_ranks=24, policy=policy, home=home, ranks_per_node=8,
                              tolerance=tolerance, **options)
            most = load_cap(weight, 24, tolerance) if tolerance else weight.max()
            assert loads(weight, rank_of, 24).max() <= most


def images_of_few_sizes(ranks: int, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(weight, home): FLOP costs of images of at most 448 pixels a side, most of four sizes."""
    drawn = sample_headers("natural", ranks * batch_size, seed)
    size = drawn.size[drawn.is_image]  # (n, 2) pixels; a patch has 14 of them
    size = size * np.minimum(1.0, 448 / size.max(axis=1, keepdims=True))
    patches = (size / 14 + 0.5).astype(np.int64).clip(1, 32).prod(axis=1)
    home = np.repeat(np.arange(ranks * batch_size), drawn.media_per_example) // batch_size
    return small_spec(MODELS["10b"]).costs["vision"](patches), home[drawn.is_image]


@pytest.mark.parametrize(("ranks", "seed"), [(128, 6), (256, 6), (512, 5)])
def test_images_of_few_sizes_are_within_the_tolerance(ranks: int, seed: int) -> None:
    """19 a rank: sums near the cap are rare, and ranks of like items cannot trade for them."""
    weight, home = images_of_few_sizes(ranks, 30, seed)
    cap = load_cap(weight, ranks, .001)
    got = core().least_move(weight, home, NOTHING, ranks, 8, cap)
    assert loads(weight, got, ranks).max() <= cap
    assert moved(weight, home, got) <= 2 * surplus(weight, home, cap)


@pytest.mark.parametrize("seed", [5, 26, 39])
def test_little_moves_where_little_has_to(seed: int) -> None:
    """Nodes are above their cap by a few examples. It was up to 1.5 times the least: ranks were to
    send less than one example, so nodes swapped examples of almost the same cost."""
    layout = sample_layout(MODELS["10b"], num_ranks=128, batch_size=15, seed=seed)
    weight = spec_of("mllm10b", "tensors").costs["llm"](layout.tokens_per_example)
    home, cap = layout.rank_of_example, load_cap(weight, 128, .005)
    got = core().least_move(weight, home, example_bytes(layout, 8192), 128, 8, cap)
    assert loads(weight, got, 128).max() <= cap
    assert moved(weight, home, got) <= 1.12 * surplus(weight, home, cap)


def moved(weight: np.ndarray, home: np.ndarray, rank_of: np.ndarray) -> int:
    return weight[rank_of // 8 != home // 8].sum()


def surplus(weight: np.ndarray, home: np.ndarray, cap: int) -> int:
    """What has to change its node at least."""
    return np.maximum(0, loads(weight, home // 8, home.max() // 8 + 1) - 8 * cap).sum()


def test_a_smaller_tolerance_is_not_worse_than_half_a_percent() -> None:
    """With 10 images a rank 0.1% is out of reach; half a percent is not."""
    for seed in range(20):
        weight, home = images_of_few_sizes(128, 15, seed)
        most = [loads(weight, core().least_move(weight, home, NOTHING, 128, 8,
                                                load_cap(weight, 128, tolerance)), 128).max()
                for tolerance in (.005, .001, 0)]
        assert most[0] >= most[1] >= most[2], seed
