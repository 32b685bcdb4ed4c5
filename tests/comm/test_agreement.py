"""One rank disagrees or fails: every rank raises, with the same text, before the model runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from orchmllm.comm.agree import PlanMismatchError, describe
from orchmllm.comm.exchange import RaggedGather, RowGather, gather_texts
from orchmllm.config.balance import BalanceConfig
from orchmllm.plan.assign import PhasePolicy
from orchmllm.plan.cost import CostModel
from orchmllm.plan.step import build_plan, plan_step
from orchmllm.trainer import Trainer
from tests.lib.dropin import Texts, collate, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

pytestmark = pytest.mark.dist
ODD = 1
RECIPE = recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=2))


def other_plan(layout, spec):
    ranks = np.zeros(layout.num_examples, np.int64)
    return replace(plan_step(layout, spec), llm=build_plan(
        layout, {m: np.zeros(len(layout.segments[c]), np.int64)
                 for m, c in (("vision", 1), ("audio", 2))}, ranks, spec).llm)


def other_lengths(layout, spec):
    return plan_step(replace(layout, attn_len=layout.attn_len + (layout.attn_len > 0)), spec)


def failing_planner(layout, spec):
    raise ZeroDivisionError("planner broke")


class BrokenLengths(SyntheticDataset):
    def layout(self, i):
        raise KeyError(f"no lengths for example {i}: größe?")


class BrokenDecode(SyntheticDataset):
    def load(self, i, **wanted):
        raise MemoryError("decoder ran out of memory")


def one_step(world, fault: str, prefetch: int) -> tuple[str, str, int]:
    """(exception, its text, calls of the model) of a run with `fault` on rank ODD."""
    odd = world.rank == ODD
    ahead = fault == "planner raises"  # while the next step is planned, too
    run = replace(RECIPE, data=replace(RECIPE.data, prefetch=prefetch, num_workers=int(ahead)))
    dataset, planner = SyntheticDataset(), plan_step
    if odd and fault == "config":
        run = replace(run, balance=replace(run.balance, llm=PhasePolicy("none")))
    if odd:
        planner = {"plan": other_plan, "lengths": other_lengths,
                   "planner raises": failing_planner}.get(fault, plan_step)
        dataset = {"layout raises": BrokenLengths(), "decode raises": BrokenDecode()}.get(
            fault, dataset)
    trainer = Trainer(run, world, dataset=dataset)
    trainer.orchestrator.planner = planner
    if odd and fault == "cost":
        trainer.orchestrator.spec = replace(
            trainer.orchestrator.spec, costs={**trainer.orchestrator.spec.costs,
                                              "llm": CostModel(1, 1)})
    calls = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        for step in trainer.loader():
            trainer.train_step(step)
    except Exception as e:
        return type(e).__name__, str(e), len(calls)
    return "", "", len(calls)


FAULTS = [
    ("plan", "PlanMismatchError", "disagree on plan"),
    ("lengths", "PlanMismatchError", "disagree on plan"),
    ("config", "PlanMismatchError", "disagree on spec_digest"),
    ("cost", "PlanMismatchError", "disagree on spec_digest"),
    ("planner raises", "RemoteError", "rank 1 failed: ZeroDivisionError: planner broke"),
    ("layout raises", "RemoteError", ": größe?'"),  # whole, though it is not ASCII
    ("decode raises", "RemoteError", "rank 1 failed: MemoryError: decoder ran out of memory"),
]


@pytest.mark.parametrize("fault, error, text, num_ranks", [
    *((*fault, 2) for fault in FAULTS),
    *(pytest.param(*fault, 3, marks=pytest.mark.slow) for fault in FAULTS)])
def test_all_ranks_raise_in_the_same_step(fault, error, text, num_ranks):
    results = run_ranks(one_step, num_ranks, fault, 2)
    assert len(set(results)) == 1, results
    assert results[0][0] == error and text in results[0][1] and results[0][2] == 0
    assert "step 0" in results[0][1]
    if error == "PlanMismatchError":
        both = "no majority" if num_ranks == 2 else "rank 1 differs"
        assert both in results[0][1]


def ahead_by_its_rank(world) -> str:
    """What a rank is told that plans a later step than rank 0 does."""
    trainer = Trainer(RECIPE, world, dataset=SyntheticDataset())
    with pytest.raises(PlanMismatchError) as error:
        trainer.orchestrator.gather_layout(world.rank, SyntheticDataset().layout(0))
    return str(error.value)


def test_ranks_that_plan_other_steps_are_told():
    for rank, said in enumerate(run_ranks(ahead_by_its_rank, 2)):
        assert said.startswith(f"step {rank}: ranks disagree on step: no majority: rank 0 has 0, ")


def gathers(world, per_node: int) -> tuple[list, list, list, list]:
    """Rows of equal lengths, rows of which only later ranks' are longer than the capacity, at last
    by one, and texts."""
    gather = RowGather(per_node)
    again = RowGather(per_node)  # a second set, as the validation loader has
    found = [RaggedGather(again, 2)(np.arange(n)) for n in (3 * world.rank + 1, 3)]
    return ([g(np.arange(3) + 10 * world.rank) for g in (gather, again, gather)],
            [[row[:n].tolist() for row, n in zip(*one, strict=True)] for one in found],
            gather_texts(gather, "äé☃" * world.rank),
            gather.from_first(f"of {world.rank}".encode()))


@pytest.mark.parametrize("num_ranks, per_node", [
    (1, 1), (5, 2), (4, 8), *(pytest.param(*case, marks=pytest.mark.slow)
                              for case in ((4, 4), (4, 2), (3, 1)))])
def test_two_level_gather(num_ranks, per_node):
    check(run_ranks(gathers, num_ranks, per_node))


def check(found: list) -> None:
    """What comes is whole on every rank, whatever texts are written in."""
    want = np.arange(3) + 10 * np.arange(len(found))[:, None]
    for rows, (ragged, longer), texts, of_first in found:
        assert all(np.array_equal(r, want) for r in rows)
        assert ragged == [[*range(3 * rank + 1)] for rank in range(len(found))]
        assert longer == [[0, 1, 2]] * len(found) and of_first == b"of 0"
        assert texts == ["äé☃" * rank for rank in range(len(found))]


def bytes_of_gathers(world, dispatch: str) -> list[int]:
    """Of each row that this rank gives to a gather."""
    gather, seen = RowGather.__call__, []

    def counted(self, row):
        seen.append(row.nbytes)
        return gather(self, row)

    RowGather.__call__ = counted
    how = {"load": {"lengths": [length_of(i) for i in range(48)]},
           "bytes": {"length_fn": token_count}}[dispatch]
    for _ in loader_of(Texts(), 4, collate_fn=collate, **how):
        pass
    return seen


def test_with_lengths_a_step_gathers_two_headers():
    """LAYOUT and COMMIT of 6 steps, and LAYOUT of the end; docs/loader.md says how many bytes."""
    with_lengths, moving = (run_ranks(bytes_of_gathers, 2, d)[0] for d in ("load", "bytes"))
    assert sorted(with_lengths) == [64] * 13
    assert max(moving) > 64


def test_any_error_can_be_told_to_other_ranks():
    assert describe(OSError("no \udc80.jpg")).encode() == b"OSError: no \\udc80.jpg"
    said = describe(OSError("a" * 9000 + "b" * 9000))
    assert said == f"OSError: {'a' * 2000} [...] {'b' * 2000}"


def gathers_beside_uneven_groups(world) -> tuple[list, list, list, list]:
    """The user's program may have made more groups on some ranks than on others."""
    dist.new_group([0, 1])
    return gathers(world, 2)


def test_groups_of_the_user_do_not_matter():
    check(run_ranks(gathers_beside_uneven_groups, 4))
