"""Legal recipes, drawn at random: each trains to its end and leaves a checkpoint. What a failure
says is a command that repeats it, with the demo corpus (scripts/make_demo_data.py) as data.path."""

from __future__ import annotations

import pytest

from tests.lib.drawn_recipes import draw, run_all
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


def check(num_ranks: int, seeds: range, corpus, folder, without=()) -> None:
    drawn, taken, refused = zip(*(
        draw(num_ranks, seed, corpus, folder / str(seed), without) for seed in seeds), strict=True)
    print(f"{sum(taken)} values were taken, {sum(refused)} were refused")
    assert sum(taken) > sum(refused)
    run_ranks(run_all, num_ranks, drawn)


def test_drawn_recipes_train(demo_corpus, tmp_path):
    # Workers are processes that take seconds to start: the slow test draws them, too.
    check(2, range(2), demo_corpus, tmp_path, without=("data.num_workers",))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_many_drawn_recipes_train(num_ranks, first, demo_corpus, tmp_path):
    check(num_ranks, range(first, first + 10), demo_corpus, tmp_path)
