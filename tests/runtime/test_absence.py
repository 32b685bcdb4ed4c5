"""Failure equals absence: after media that cannot be decoded, skipped steps, rollbacks and a resume
within a step of two microbatches, weights and moments are those of a plain loop over examples that
never had those examples and those steps."""

from __future__ import annotations

import pytest

from tests.lib.absence import (
    FAILURES,
    UNUSABLE,
    damaged_corpus,
    differences,
    reference_states,
    run_recipe,
    states_after,
)
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
BAR = 1e-12  # what is asked of a difference that rounding makes


@pytest.fixture(scope="module")
def corpus(demo_corpus, tmp_path_factory):
    return damaged_corpus(demo_corpus, tmp_path_factory.mktemp("damaged") / "corpus")


@pytest.fixture(scope="module")
def references(corpus):
    return references_of(corpus, FAILURES)


def references_of(corpus, names) -> dict:
    """The state without the damaged examples and without the steps of each of these failures."""
    run = run_recipe(corpus, corpus / "unused", FAILURES["resume"], "load")
    return reference_states(run, [FAILURES[name].left_out for name in names], UNUSABLE)


def check(num_ranks: int, cases: list[tuple[str, str, int]], corpus, folder, references) -> None:
    """cases: (failure, dispatch, microbatches)."""
    runs = {str(case): (run_recipe(corpus, folder / "-".join(map(str, case)), FAILURES[case[0]],
                                   *case[1:]), FAILURES[case[0]]) for case in cases}
    results = run_ranks(states_after, num_ranks, runs)[0]
    for name, (_, failure) in runs.items():
        for left_out, want in references.items():
            worst = differences(results[name], want)
            if left_out == failure.left_out:
                assert max(worst) <= BAR, (name, num_ranks, worst)
            else:  # what is compared does depend on the steps
                assert min(worst[:3]) > 1e9 * BAR, (name, num_ranks, worst)


def test_weights_are_those_without_what_failed(corpus, tmp_path):
    check(2, [("rollback", "load", 2)], corpus, tmp_path,
          references_of(corpus, ["rollback", "resume"]))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["load", "bytes", "tensors"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_on_any_ranks_with_any_dispatch(num_ranks, dispatch, corpus, tmp_path, references):
    check(num_ranks, [(name, dispatch, 2) for name in FAILURES] + [("resume", dispatch, 1)],
          corpus, tmp_path, references)
