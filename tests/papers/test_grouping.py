"""Groupings before sampling and DistTrain's reordering: what they keep, lose and bound."""

from __future__ import annotations

import numpy as np
import pytest

from orchmllm.papers.grouping import (
    bias,
    device_group,
    dist_ratio,
    fixed,
    intra_reorder,
    isf,
    length_group,
    pad_ratio,
    random_groups,
)
from orchmllm.plan.grouping import capped

CAPS = {"max_images": 9, "max_tokens": 4096}


def samples(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 6, n)
    return images, (256 * images + rng.integers(20, 800, n)).astype(np.int64)


def covered(groups, n: int) -> bool:
    """Every item in one group, or dropped."""
    return sorted([*groups.index, *groups.dropped]) == list(range(n))


@pytest.mark.parametrize("leftovers", ["pack", "drop"])
@pytest.mark.parametrize("seed", range(4))
def test_isf(leftovers, seed):
    images, tokens = samples(3000, seed)
    tokens[7], images[11] = 5000, 12  # above the caps
    made = isf(images, tokens, **CAPS, leftovers=leftovers, seed=seed)
    assert covered(made, 3000) and (made.sizes > 0).all()
    sums = made.sums(images), made.sums(tokens)
    over = (sums[0] > 9) | (sums[1] > 4096)
    assert (made.sizes[over] == 1).all() and over.sum() == 2
    full = (sums[0] >= 9) | (sums[1] >= 4096 - 128)
    if leftovers == "drop":
        assert full.all() and 0 < len(made.dropped) < 600
        share, dropped, everything = bias(made, images)
        assert share == len(made.dropped) / 3000 and dropped < everything  # what is lost is light
    else:
        assert len(made.dropped) == 0 and full.mean() > 0.9
    again = isf(images, tokens, **CAPS, leftovers=leftovers, seed=seed)
    assert (again.index == made.index).all() and (again.offsets == made.offsets).all()


def test_isf_keeps_what_the_paper_says():
    # One round over one order, cap 9: 8 is not full, and the last group is never completed.
    orders = {tuple(np.random.default_rng(s).permutation(4)): s for s in range(200)}
    for images, kept in (([4, 4, 9, 1], [2]), ([4, 4, 1, 9], [0, 1, 2])):
        made = isf(np.array(images), np.ones(4, np.int64), **CAPS, rounds=1, leftovers="drop",
                   seed=orders[0, 1, 2, 3])
        assert made.index.tolist() == kept
        assert made.dropped.tolist() == sorted({0, 1, 2, 3} - set(kept))
    images, tokens = np.array(images), np.ones(4, np.int64)
    assert len(isf(images[:0], tokens[:0], **CAPS)) == 0


def test_capped_drops_nothing():
    images, tokens = samples(500)
    tokens[3] = 9000
    made = capped(images, tokens, **CAPS)
    over = (made.sums(images) > 9) | (made.sums(tokens) > 4096)
    assert covered(made, 500) and len(made.dropped) == 0
    assert over.sum() == 1 and made.sizes[over].tolist() == [1]
    # Best fit needs little more than the fuller of the two caps asks for.
    assert len(made) <= 1.15 * max(images.sum() / 9, tokens.sum() / 4096) + 1


def test_groups_of_similar_lengths():
    _, tokens = samples(1003)
    plain = random_groups(1003, 4, 0)
    alike = length_group(tokens, 4, window=256, seed=0)
    ranks = device_group(tokens, 4, num_ranks=8, window=256, seed=0)
    for made in (plain, alike, ranks):
        assert covered(made, 1003) and (made.sizes == 4).all()
    assert pad_ratio(tokens, alike) < 0.1 * pad_ratio(tokens, plain)
    assert dist_ratio(ranks.sums(tokens), 8) < 0.2 * dist_ratio(plain.sums(tokens), 8)


def test_ratios_by_hand():
    groups = fixed(np.arange(4), 2)
    assert pad_ratio(np.array([4, 2, 3, 3]), groups) == pytest.approx((2 / 8 + 0) / 2)
    assert pad_ratio(np.array([0, 0, 3, 3]), groups) == 0
    assert dist_ratio(np.array([4, 2, 0, 0, 9]), 2) == pytest.approx((1 - 3 / 4 + 0) / 2)


@pytest.mark.parametrize("seed", range(5))
def test_intra_reorder(seed):
    sizes = np.random.default_rng(seed).integers(1, 1000, 203)
    kinds = {"printed": {}, "descending": {"descending": True}, "equal": {"equal_counts": True}}
    load = {}
    for kind, options in kinds.items():
        group = intra_reorder(sizes, 8, **options)
        load[kind] = np.bincount(group, weights=sizes, minlength=8).max()
        if kind == "equal":
            assert np.ptp(np.bincount(group, minlength=8)) <= 1
    assert load["descending"] <= load["equal"] <= load["printed"]
    assert load["descending"] <= sizes.sum() / 8 * 1.01


def test_algorithm_2_as_printed_can_be_nearly_twice_the_best():
    # 2 - 1/m: many small samples spread evenly, then the one large sample.
    m = 8
    sizes = np.array([1] * (m * (m - 1)) + [m])
    assert np.bincount(intra_reorder(sizes, m), weights=sizes).max() == 2 * m - 1
    best = np.bincount(intra_reorder(sizes, m, descending=True), weights=sizes).max()
    assert best == m


@pytest.mark.parametrize("call, message", [
    (lambda: isf([1], [1], max_images=0, max_tokens=1), "max_images must be .* got 0"),
    (lambda: isf([1], [1], **CAPS, leftovers="keep"), "pack or drop"),
    (lambda: isf([1, 2], [1], **CAPS), "tokens has 1 entries"),
    (lambda: capped([-1], [1], **CAPS), "negative"),
    (lambda: length_group([1], 0, window=4, seed=0), "batch must be .* got 0")])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
