"""Batches that collate pads: what a plan, its log line and its advice say of them is what a count
of padded tokens says."""

from __future__ import annotations

import logging
import math
import re
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchmllm import BalancedDataLoader, CostModel
from orchmllm.loader.positions import KNOTS, Fit
from tests.lib.dropin import Texts, collate, length_of
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
SIZE = 96
LENGTHS = [length_of(i) for i in range(SIZE)]
LINE = re.compile(r"imbalance ([\d.]+)->([\d.]+); predicted gain (-?[\d.]+)%")


def messages() -> list[str]:
    """Grows by what the loader's logger says from now on."""
    lines: list[str] = []
    log, handler = logging.getLogger("orchmllm.loader"), logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lines


def by_rank(sizes: list[int]) -> torch.Tensor:
    """(ranks, steps) of what each rank counted."""
    out = [torch.zeros(len(sizes), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor(sizes))
    return torch.stack(out)


def counted(world, how: dict) -> tuple[list, list, list[str]]:
    """Entries of the batches by rank and step, as sampled and as planned; what the log says."""
    sizes, lines = [], messages()
    for enabled in (False, True):
        del lines[:]
        loader = BalancedDataLoader(Texts(SIZE), 4, shuffle=True, collate_fn=collate, log_every=1,
                                    lengths=LENGTHS, enabled=enabled, check_loss=False, **how)
        sizes.append(by_rank([batch["input_ids"].numel() for batch in loader]).tolist())
    return *sizes, [line for line in lines if LINE.search(line)]


def test_a_padded_plan_is_measured_in_padded_tokens():
    before, after, lines = run_ranks(counted, 4, dict(policy="padded"))[0]
    off, on = np.array(before), np.array(after)
    said = [[float(x) for x in LINE.search(line).groups()] for line in lines]
    assert len(said) == off.shape[1] and on.max(0).sum() < 0.8 * off.max(0).sum()
    for t, (sampled, planned, gain) in enumerate(said):
        assert sampled == pytest.approx(off[:, t].max() / off[:, t].mean(), abs=0.0051)
        assert planned == pytest.approx(on[:, t].max() / on[:, t].mean(), abs=0.0051)
        assert gain == pytest.approx(100 * (1 - on[:, t].max() / off[:, t].max()), abs=0.051)
    skipping = run_ranks(counted, 4, dict(policy="padded", min_gain=0.02))[0]
    assert skipping[1] == after  # what is worth it is not skipped


def by_cost(world) -> list[tuple[list, list[tuple]]]:
    with pytest.raises(ValueError, match="is 0 for every item"):
        BalancedDataLoader(Texts(), 4, lengths=LENGTHS[:48], phases=CostModel(0, 0))
    out = []
    for terms in ((0, 1), (1, 0), (1000, 0)):
        _, planned, lines = counted(world, dict(policy="greedy", phases=CostModel(*terms)))
        out.append((planned, [LINE.search(line).groups() for line in lines]))
    return out


def test_a_small_cost_balances_as_a_large_one():
    """CostModel(1, 0) is the length; in whole kFLOP it would be 0 for every item."""
    quadratic, small, large = run_ranks(by_cost, 2)[0]
    assert small == large != quadratic
    assert max(float(before) for before, *_ in quadratic[1]) > 1.1


def packed(examples: list[dict]) -> dict:
    return {key: torch.cat([e[key] for e in examples])[None] for key in ("input_ids", "labels")}


class Given(Texts):
    """Examples of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(len(lengths))
        self.lengths = lengths

    def __getitem__(self, i: int) -> dict:
        ids = torch.ones(self.lengths[i], dtype=torch.int64)
        return {"id": i, "input_ids": ids, "labels": ids}


def lengths_of(kind: str, n: int) -> list[int]:
    random = np.random.default_rng(0)
    return {"uniform": random.integers(16, 513, n), "lognormal": random.lognormal(4.5, 1, n) + 8,
            "bimodal": np.where(random.random(n) < .9, 40, 400) + random.integers(0, 20, n),
            }[kind].clip(1, 2048).astype(int).tolist()


def of_width(examples: list[dict], width: int) -> dict:
    """Right-padded or cut to (B, width)."""
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    for row, e in zip(ids, examples, strict=True):
        row[: len(e["input_ids"])] = e["input_ids"][:width]
    return {"input_ids": ids, "labels": ids}


def cut(examples: list[dict]) -> dict:
    return of_width(examples, min(192, max(len(e["input_ids"]) for e in examples)))


def cut_and_joined(examples: list[dict]) -> dict:
    return packed([{key: e[key][:192] for key in ("input_ids", "labels")} for e in examples])


def filled_up(examples: list[dict]) -> dict:
    return of_width(examples, 2048)


def powers_of_two(examples: list[dict]) -> dict:
    return of_width(examples, 2 ** math.ceil(math.log2(max(len(e["input_ids"]) for e in examples))))


def in_characters(examples: list[dict]) -> dict:
    """Of whose lengths four are one position."""
    return collate([{"id": 0, **{key: e[key][::4] for key in ("input_ids", "labels")}}
                    for e in examples])


KINDS = ("uniform", "lognormal", "bimodal")
CASES = [(kind, together) for kind in KINDS for together in (collate, packed)]
OTHERS = [(kind, together) for kind in KINDS for together in (
    cut, cut_and_joined, filled_up, powers_of_two, in_characters)]


def computed(world, cases: list[tuple]) -> list[list[tuple[np.ndarray, list[float]]]]:
    """Of each case, as sampled, by the loader's choice and by each policy: positions of the slowest
    rank by step, and the gains that the log gives."""
    lines, out = messages(), []
    for kind, together in cases:
        lengths, case = lengths_of(kind, 768), []
        for how in (dict(enabled=False), {}, *(
                dict(policy=policy) for policy in ("padded", "least_move", "greedy"))):
            del lines[:]
            loader = BalancedDataLoader(
                Given(lengths), 8, shuffle=True, collate_fn=together, lengths=lengths, log_every=1,
                check_loss=False, **how)
            sizes = by_rank([batch["input_ids"].numel() for batch in loader])
            gains = [float(m[3]) for line in lines if (m := LINE.search(line))]
            case.append((sizes.max(0).values.numpy(), gains))
        out.append(case)
    return out


def shares(case: tuple, of_case: list[tuple]) -> tuple[float, float]:
    """Positions with the loader's choice by those as sampled, and by those with the best policy: of
    the steps that are planned by what was seen. One step may not tell powers of two from one width
    for all."""
    seen = 1 if case in CASES else 2
    (off, _), (auto, _), *fixed = of_case
    return auto.sum() / off.sum(), auto[seen:].sum() / min(sizes[seen:].sum() for sizes, _ in fixed)


@pytest.mark.parametrize("cases, num_ranks", [
    (CASES[2:4], 4), *(pytest.param(cases, d, marks=pytest.mark.slow)
                       for cases, d in ((CASES, 4), (CASES, 2), (OTHERS, 2), (OTHERS, 4)))])
def test_without_a_policy_the_loader_finds_the_one_that_fits(cases, num_ranks):
    for case, of_case in zip(cases, run_ranks(computed, num_ranks, cases)[0], strict=True):
        (off, _), (auto, gains), *_ = of_case
        of_off, of_best = shares(case, of_case)
        counted = 100 * (1 - auto[1:].sum() / off[1:].sum())
        print(f"{case[0]}, {case[1].__name__}: positions of the slowest rank / off {of_off:.3f}, / "
              f"best {of_best:.3f}; gain {counted:.1f}% counted, {np.mean(gains[1:]):.1f}% logged")
        assert auto[0] == off[0]  # what a batch costs is not known yet
        assert of_off <= 1.01 and of_best <= 1.03
        assert len(gains) == 96 // num_ranks
        if cases is not OTHERS and num_ranks == 4:
            assert abs(np.mean(gains[1:]) - counted) <= 5


def said(world, lengths: list[int], hows: list[dict]) -> list[tuple[list[str], dict]]:
    """What the log says but for its lines of steps, and the geometry in the state at the end."""
    lines, out = messages(), []
    for how in hows:
        del lines[:]
        loader = BalancedDataLoader(Given(lengths), 4, lengths=lengths, check_loss=False,
                                    **{"collate_fn": collate, **how})
        for _ in loader:
            pass
        shown = [line for line in lines if not LINE.search(line)]
        out.append((shown, loader.state_dict()["geometry"]))
    return out


def test_what_is_seen_of_batches_is_said_once():
    """Of one rank alone whose examples are not equally long, and later than in the first step."""
    uneven, chosen = [8, 8, 8, 8, 30, 9, 12, 20] * 3, "steps are planned by the policy"
    first, other = run_ranks(said, 2, uneven, [
        {}, dict(collate_fn=packed), dict(tolerance=.1), dict(policy="least_move"),
        dict(policy="padded"), dict(policy="padded", collate_fn=packed), dict(policy="none")])
    (auto, joined, *misfits, fits, joins, none) = (lines for lines, _ in first)
    assert auto == [f"collate_fn pads: {chosen} padded"]
    assert joined == [f"batches show no padding: {chosen} least_move"]
    assert all(len(m) == 1 and m[0].startswith("collate_fn pads, so") for m in misfits)
    assert len(misfits) == 2 and fits == none == []
    assert len(joins) == 1 and joins[0].startswith("collate_fn joins examples without padding")
    assert [geometry for _, geometry in first] == [2, 1, 2, 2, 2, 1, 2]
    assert other == [([], geometry) for _, geometry in first]
    equal = run_ranks(said, 2, [8] * 8 + uneven, [{}])[0][0][0]
    assert equal == [f"collate_fn pads: {chosen} padded"]


def resumed(world) -> tuple[list, list]:
    """Shapes of the batches of the second half, without a break and after a resume. Each rank has a
    state of its own, of another moment."""
    lengths = lengths_of("uniform", 96)

    def loader():
        return BalancedDataLoader(Given(lengths), 4, collate_fn=in_characters, lengths=lengths,
                                  sampler=range(world.rank, 96, 2), check_loss=False)

    whole, shapes = loader(), []
    for batch in whole:
        shapes.append(batch["input_ids"].shape)
        if whole.step.step == 5:
            time.sleep(0.5 * world.rank)  # the prefetch thread goes on
            state = whole.state_dict()
    again = loader()
    again.load_state_dict(state)
    return shapes[6:], [batch["input_ids"].shape for batch in again]


def test_a_resumed_loader_keeps_what_it_saw():
    for rest, again in run_ranks(resumed, 2):
        assert rest == again and len(rest) == 6


def test_few_pairs_of_a_length_and_its_positions_are_kept():
    """Of thousands of ranks, in one step and in many, with as good a fit."""
    rng, fit = np.random.default_rng(0), Fit()
    for _ in range(20):
        lengths = rng.integers(10, 9000, 2560)
        fit.add(np.stack([lengths, 2 * lengths + 7], 1))
        assert len(fit.knots) <= KNOTS
    asked = np.arange(20, 9000)
    assert np.abs(fit(asked) - (2 * asked + 7)).max() <= 1
    fit.add(np.array([[0, 0], [20_000, 40_007]]))  # longer than any before
    assert fit(np.array([20_000])) == 40_007
