"""BalancedDataLoader in a user's loop: what is yielded, where it ends, state, errors."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from orchmllm.comm import value_bytes as wire
from orchmllm.loader.source import _looked_up
from tests.lib.dropin import Stream, Texts, collate, example_of, length_of, loader_of, token_count
from tests.lib.ranks import run_ranks

LENGTHS = [length_of(i) for i in range(48)]


def epoch(world, how: dict, num_epochs: int = 1) -> list[list]:
    """Per batch [ids, num_global_targets, own labels, num_examples, ids, step, whether the
    optimizer steps] of this rank."""
    loader = loader_of(Texts(), batch_size=4, collate_fn=collate, **how)
    return [[b["ids"].tolist() if loader.step.num_examples else [], loader.step.num_global_targets,
             int((b["labels"] != -100).sum()), loader.step.num_examples, loader.step.example_ids,
             loader.step.step, loader.step.is_last_microbatch]
            for _ in range(num_epochs) for b in loader]


def targets_of(ids: list[int]) -> int:
    return sum(int((example_of(i)["labels"] != -100).sum()) for i in ids)


@pytest.mark.dist
@pytest.mark.parametrize("how", [
    dict(lengths=LENGTHS, shuffle=True), dict(lengths=length_of, num_workers=2, shuffle=True,
         multiprocessing_context="fork"),
    dict(length_fn=token_count, num_workers=1, shuffle=True),
    dict(length_fn=token_count, accumulation_steps=3),
    dict(lengths=LENGTHS, accumulation_steps="auto", max_tokens=44, shuffle=True),
    *(pytest.param(how, marks=pytest.mark.slow) for how in (
        dict(lengths=LENGTHS, policy="greedy"), dict(lengths=LENGTHS, max_tokens=400),
        dict(length_fn=token_count), dict(length_fn=token_count, shuffle=True, prefetch=0),
        dict(lengths=LENGTHS, accumulation_steps=2))),
], ids=lambda how: "-".join(how))
def test_every_example_once_with_global_targets(how):
    ranks = run_ranks(epoch, 3, how)
    assert sorted(i for rank in ranks for b in rank for i in b[0]) == list(range(48))
    assert len({len(rank) for rank in ranks}) == 1
    for t in range(ranks[0][-1][5] + 1):
        batches = [b for rank in ranks for b in rank if b[5] == t]
        assert {b[1] for b in batches} == {targets_of([i for b in batches for i in b[0]])}
        assert all(b[2] == targets_of(b[0]) and b[4] == b[0] for b in batches)
        assert sum(b[6] for b in batches) == 3
        if most := how.get("max_tokens"):
            held = [sum(LENGTHS[i] for i in b[0]) for b in batches]
            assert max(held) <= most
            assert how.get("accumulation_steps") != "auto" or (
                1 < len(batches) // 3 <= 1 - -sum(held) // (3 * most))


@pytest.mark.dist
def test_load_equals_bytes_and_epochs_differ():
    load = run_ranks(epoch, 2, dict(lengths=LENGTHS, shuffle=True), 2)
    assert load == run_ranks(epoch, 2, dict(length_fn=token_count, shuffle=True), 2)
    assert load[0][:6] != load[0][6:]


def uneven(world, drop_last: bool, wrapped: bool) -> tuple[list[int], int, int]:
    size = [20, 27, 0][world.rank]  # 5, 7 (the last of 3 examples) and 0 batches
    data = Stream(100 * world.rank, size)
    how = dict(collate_fn=collate, length_fn=token_count, drop_last=drop_last)
    loader = (loader_of(DataLoader(data, 4, collate_fn=collate, drop_last=drop_last),
                        length_fn=token_count) if wrapped
              else loader_of(data, 4, **how))
    seen, steps = [], 0
    try:
        for b in loader:
            seen += b["ids"].tolist() if loader.step.num_examples else []
            steps += 1
    except Exception as e:
        return str(e), steps, 0
    return seen, steps, loader.num_dropped


@pytest.mark.dist
@pytest.mark.parametrize("drop_last, wrapped", [
    (False, False), (True, True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, True), (True, False)))])
def test_uneven_streams_end_together(drop_last, wrapped):
    ranks = run_ranks(uneven, 3, drop_last, wrapped)
    seen = sorted(i for ids, *_ in ranks for i in ids)
    assert {steps for _, steps, _ in ranks} == {6 if drop_last else 7}
    whole = [*range(20), *range(100, 124 if drop_last else 127)]
    assert seen == whole
    if not wrapped:
        assert {dropped for *_, dropped in ranks} == {3 if drop_last else 0}


def stopped(world, num_steps: int, state: dict | None, how: dict) -> tuple[list, dict]:
    """The first (or next) num_steps of an epoch; the state after them, taken inside the loop."""
    loader = loader_of(Texts(), collate_fn=collate, lengths=LENGTHS, shuffle=True, **how)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    out = []
    for _ in loader:
        out.append(loader.step.example_ids)
        if len(out) == num_steps:
            break
    return out, loader.state_dict()


def global_batches(ranks: list) -> list[list[int]]:
    return [sorted(i for ids in step for i in ids) for step in zip(*(r[0] for r in ranks),
                                                                    strict=True)]


@pytest.fixture(scope="module")
def whole_and_first() -> list[list]:
    """An epoch on two ranks, and its first 3 steps."""
    return [run_ranks(stopped, 2, steps, None, dict(batch_size=3)) for steps in (8, 3)]


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks, workers", [
    (1, 0), (4, 1), *(pytest.param(*case, marks=pytest.mark.slow)
                      for case in ((2, 2), (3, 0), (6, 0)))])
def test_resume_on_other_ranks_and_workers(whole_and_first, num_ranks, workers):
    whole, first = whole_and_first
    states = [state for _, state in first]
    assert states[0] == states[1] and len(json.dumps(states[0])) < 4096
    rest = run_ranks(stopped, num_ranks, 5, states[0],
                     dict(batch_size=3, num_workers=workers, prefetch=1))
    assert global_batches(first) + global_batches(rest) == global_batches(whole)


def passed(world, **how) -> list[int]:
    loader = loader_of(Texts(48), 2, collate_fn=collate, lengths=LENGTHS, num_workers=1,
                       multiprocessing_context="fork", **how)
    return [i for _ in loader for i in loader.step.example_ids]


@pytest.mark.dist
@pytest.mark.parametrize("steps", [3, 4])
def test_a_worker_that_loads_less_than_a_step_ahead_is_given_all(steps):
    assert sorted(run_ranks(passed, 1, accumulation_steps=steps)[0]) == [*range(48)]


def refused(world, state: dict) -> str:
    loader = loader_of(Stream(0, 8), 2, collate_fn=collate, length_fn=token_count)
    state = {**loader.state_dict(), **state}
    try:
        loader.load_state_dict(state)
    except ValueError as e:
        return str(e)
    return ""


@pytest.mark.dist
def test_a_streams_state_refuses_another_world():
    texts = run_ranks(refused, 2, {"num_ranks": 4})
    assert texts[0] == texts[1] and "use as many ranks" in texts[0]
    assert "kind" in run_ranks(refused, 1, {"kind": "indices"})[0]


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}{b}")


def failing(world, where: str, how: dict) -> list[tuple[str, str, int, str]]:
    return [fails_with(world, where, kind, dict(how))
            for kind in (KeyError, Odd, StopIteration, OSError, MemoryError)]


def fails_with(world, where: str, kind: type, how: dict) -> tuple[str, str, int, str]:
    """(class of the error, its text, processes that are left, where its cause was raised)."""
    calls = {"n": 0}

    def maybe(value, there: str):
        calls["n"] += 1
        if world.rank == 1 and where == there and calls["n"] > 6:
            raise kind(1, 2)
        return value

    class Data(Texts):
        def __getitem__(self, i):
            return maybe(super().__getitem__(i), "dataset")

    loader = loader_of(
        Data(), 2, multiprocessing_context="fork" if "num_workers" in how else None,
        collate_fn=lambda e: maybe(collate(e), "collate_fn"), **{
            **({"length_fn": lambda e: maybe(token_count(e), "length_fn")}
               if where == "length_fn" or how.pop("bytes", False) else {"lengths": LENGTHS}),
            **how})
    try:
        for _ in loader:
            pass
    except Exception as e:
        cause = "".join(traceback.format_exception(e.__cause__)) if e.__cause__ else ""
        return type(e).__name__, str(e), len(psutil.Process().children()), cause
    return "", "", 0, ""


@pytest.mark.dist
@pytest.mark.parametrize("where, how", [
    ("length_fn", {}), ("collate_fn", {"bytes": True}), ("dataset", {"num_workers": 1}),
    ("dataset", {}), ("dataset", {"bytes": True}),
    *(pytest.param(where, how, marks=pytest.mark.slow) for where, how in (
        ("collate_fn", {}),
        ("length_fn", {"num_workers": 1, "prefetch": 0}))),
], ids=str)
def test_an_error_is_raised_on_all_ranks_with_the_same_text(where, how):
    for ranks in zip(*run_ranks(failing, 2, where, how), strict=True):
        assert {r[0] for r in ranks} == {"RemoteError"}, ranks
        assert ranks[0][1] == ranks[1][1] and "rank 1 failed" in ranks[0][1]
        assert all(r[2] == 0 for r in ranks)
        assert ranks[0][3] == "" and (
            "in maybe" in ranks[1][3] or "num_workers" in how
            or "StopIteration" in ranks[1][1]), ranks


def killed_worker(world, how: dict) -> tuple[str, int, list[str]]:
    loader = loader_of(Texts(4800), 2, collate_fn=collate, num_workers=1,
                       multiprocessing_context="fork", **how)
    try:
        for k, _ in enumerate(loader):
            if k == 3 and world.rank == 1:
                os.kill(psutil.Process().children()[0].pid, signal.SIGKILL)
            time.sleep(0.01)
    except Exception as e:
        return (str(e), len(psutil.Process().children()),
                [t.name for t in threading.enumerate() if t.name.startswith("orchmllm")])
    return "", 0, []


@pytest.mark.dist
@pytest.mark.parametrize("how", [
    dict(lengths=length_of), pytest.param(dict(length_fn=token_count), marks=pytest.mark.slow)],
    ids=lambda how: "-".join(how))
def test_a_killed_worker_is_told_by_all_ranks(how):
    ranks = run_ranks(killed_worker, 2, how)
    assert ranks[0][0] == ranks[1][0] and "worker" in ranks[0][0], ranks
    assert all(r[1:] == (0, []) for r in ranks), ranks


def early(world) -> list[str]:
    loader = loader_of(Texts(), 2, collate_fn=collate, lengths=LENGTHS, num_workers=1,
                       multiprocessing_context="fork")
    for k, _ in enumerate(loader):
        if k == 1:
            break
    again = sum(loader.step.num_examples for _ in loader)
    assert len(loader) == 12
    return [again, *(t.name for t in threading.enumerate() if t.name.startswith("orchmllm")),
            *map(str, psutil.Process().children())]


@pytest.mark.dist
def test_break_joins_and_the_next_pass_is_whole():
    ranks = run_ranks(early, 2)
    assert sum(r[0] for r in ranks) == 48 and all(len(r) == 1 for r in ranks), ranks


def distributed_sampler(world) -> list[int]:
    data = Texts()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    wrapped = DataLoader(data, 4, sampler=sampler, collate_fn=collate)
    seen = [b["ids"].tolist() for b in loader_of(wrapped, lengths=LENGTHS)]
    plain = [b["ids"].tolist() for b in wrapped]
    return [seen, plain]


@pytest.mark.dist
def test_a_wrapped_loader_keeps_its_global_batches():
    ranks = run_ranks(distributed_sampler, 2)
    for kind in zip(*(zip(*r, strict=True) for r in ranks), strict=True):
        assert sorted(sum((seen for seen, _ in kind), [])) == sorted(
            sum((plain for _, plain in kind), []))


class Pair(NamedTuple):
    ids: torch.Tensor
    text: str


class Triple(tuple):
    pass


@pytest.mark.parametrize("value", [
    None, 3, 2**70, -1.5, "a\ud800", b"x\0", [1, (2, "b")], {"a": {1: [b""]}},
    torch.arange(6).reshape(2, 3), torch.arange(62).reshape(2, 31)[:1, 3], torch.zeros(0, 4),
    torch.tensor(2.5, dtype=torch.bfloat16),
    np.float32(1.5), np.str_(""), np.arange(4, dtype=np.int16)[::2], torch.tensor([True]),
    Pair(3, "a"),
], ids=lambda v: type(v).__name__)
def test_wire_round_trip(value):
    back = wire.decode(wire.encode({"x": value}))["x"]
    assert type(back) is type(value)
    if isinstance(value, torch.Tensor):
        assert back.dtype == value.dtype and torch.equal(back, value)
    elif isinstance(value, np.ndarray):
        assert back.dtype == value.dtype and np.array_equal(back, value)
    else:
        assert back == value


@pytest.mark.parametrize("value, where", [
    ({"a": [object()]}, r"example\['a'\]\[0\] is a builtins.object"),
    ({(1, 2): 3}, "keys must be"), (Triple((1,)), "Triple, which cannot be sent"),
    ({"t": torch.zeros(2, device="meta")}, "dense CPU tensors"),
    ({"m": np.ma.array([1.0], mask=[True])}, r"example\['m'\] is a numpy.ma.(core.)?MaskedArray"),
    ({"p": torch.nn.Parameter(torch.zeros(2))}, "Parameter, which cannot be sent"),
])
def test_wire_refuses(value, where):
    with pytest.raises(TypeError, match=where):
        wire.encode(value)


def ask(world, kind: str) -> list:
    """(The examples of which this rank asks the length, the numbers of the batches.)"""
    asked: list[int] = []

    def length(i: int) -> int:
        asked.append(i)
        return length_of(i)

    lengths = [length_of(i) for i in range(48)]
    loader = loader_of(Texts(), 4, collate_fn=collate, lengths={
        "function": length, "list": lengths, "tensor": torch.tensor(lengths),
        "array": np.array(lengths, np.uint16)}[kind])
    return [asked, [batch["ids"].tolist() for batch in loader]]


@pytest.mark.dist
def test_a_rank_asks_a_function_for_the_lengths_of_its_own_examples():
    asked, batches = zip(*run_ranks(ask, 2, "function"), strict=True)
    assert sorted(asked[0] + asked[1]) == [*range(48)]
    for kind in ("list", "tensor", "array"):
        assert [yielded for _, yielded in run_ranks(ask, 2, kind)] == list(batches)


class Doubled(list):
    def __getitem__(self, i):
        return 2 * super().__getitem__(i)


def test_whole_numbers_alone_are_looked_up_as_an_array():
    for lengths in ([3, 4], (3, 4), torch.tensor([3, 4]), np.array([3, 4], np.uint8)):
        found = _looked_up(lengths)
        assert found.dtype == np.int64 and found.tolist() == [3, 4]
    for lengths, second in (([3, 4.5], 4.5), (np.array([3, 4.5]), 4.5), ([[3], [4, 5]], [4, 5]),
                            (torch.tensor([3, 4.5]), 4.5), (Doubled([3, 4]), 8)):
        assert _looked_up(lengths)(1) == second
    assert _looked_up(length_of) is length_of
