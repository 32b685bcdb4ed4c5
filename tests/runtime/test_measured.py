"""Phase times by events of the device: read after the step's one synchronisation, told to all ranks
in the next one, and what is made of them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from orchmllm.models.phase_clock import PhaseClock, device_s
from orchmllm.trainer import Trainer
from tests.lib.events import QueuedEvent
from tests.lib.ranks import run_ranks
from tests.lib.rows import row_problems
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

SLEEP_S = 0.05  # of rank 1 in its LLM phase


def test_events_have_the_time_between_switches(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = PhaseClock()
    clock.use_events(QueuedEvent)
    for k, phase in enumerate(("vision", "forward", "vision", "llm", "update")):
        clock.switch(phase)
        now[0] += 1 << k
    with pytest.raises(RuntimeError, match="not ready"):
        device_s(clock._marks)
    QueuedEvent.wait()
    seconds = device_s(clock.take_marks())
    assert dict(seconds) == dict(clock.wall_s) == {"vision": 1 + 4, "forward": 2, "llm": 8}
    assert not device_s(clock.take_marks())
    for k, phase in enumerate(("update", "data", "vision", "llm")):  # after what the step reported
        clock.switch(phase)
        now[0] += 1 << k
    clock.reset()
    clock.switch("exchange")
    QueuedEvent.wait()
    # No phase of another step.
    assert device_s(clock.take_marks()) == {"update": 1, "data": 2 + 4 + 8}


def burn(seconds: float) -> None:
    """CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_cpu_time_is_of_the_threads_that_switch():
    """On a GPU a thread of its own goes backward, whose CPU time has nothing to do with that of the
    thread that steps."""
    clock = PhaseClock()
    burn(0.05)
    clock.switch("forward")
    burn(0.01)
    clock.switch("llm")

    def backward() -> None:
        for phase in ("llm", "vision", "vision"):
            clock.switch(phase)
            burn(0.02)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    clock.switch("update")
    assert all(0 <= seconds < 0.05 for seconds in clock.cpu_s.values())
    assert min(clock.cpu_s["llm"], clock.cpu_s["vision"]) >= 0.02


def run(world, folder: str) -> tuple[list[dict], int]:
    """Five steps with events, of which the step's own gather is the only wait; rank 1 is slow."""
    one = recipe(model=SHALLOW)
    one = replace(one, run=replace(one.run, dir=folder),
                  balance=replace(one.balance, measure_every=3),
                  train=replace(one.train, num_steps=6, lr=1e-2),
                  data=replace(one.data, prefetch=1))
    trainer = Trainer(one, world, dataset=SyntheticDataset())
    trainer.model.clock.use_events(QueuedEvent)
    send = trainer._send

    def waits(values):
        found = send(values)
        QueuedEvent.wait()
        return found

    trainer._send = waits
    if world.rank:
        trainer.model.blocks()["llm"][0].register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
    rows: list[dict] = []
    trainer.run(rows)
    trainer.close()
    return rows, QueuedEvent.read


@pytest.mark.dist
def test_rows_use_the_step_before(tmp_path):
    (rows, read), (others, _) = run_ranks(run, 2, str(tmp_path))
    assert rows[0]["measured"] is None
    assert read > 10 * len(rows)
    for i, row in enumerate(rows):
        assert row_problems({"schema": 1, **row}) == []
        if i:
            measured = row["measured"]
            assert measured["step"] == i - 1 and measured == others[i]["measured"]
            assert measured["slowest_s"]["llm"] > SLEEP_S
            assert 1.0 < measured["imbalance"]["llm"] < 2.0 + 1e-9
            assert bool(measured["gain"]) == (i == 3) == rows[i - 1]["as_sampled"]
            assert others[i]["waiting_s"] > SLEEP_S and others[i]["logging_s"] > 0
            assert others[i]["core_wait_s"] < others[i]["waiting_s"]
            assert row["update_s"] > 0
            assert row["exchange_ms"] == pytest.approx(1e3 * measured["slowest_s"]["exchange"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_agree_with_a_synchronised_measurement():
    """To 2%: matrix products of some 100 ms."""
    clock, x = PhaseClock(), torch.randn(4096, 4096, device="cuda")
    clock.use_events(lambda: torch.cuda.Event(enable_timing=True))
    for measured in (False, True):
        torch.cuda.synchronize()
        started = time.perf_counter()
        clock.switch("llm")
        for _ in range(40):
            x = (x @ x).clamp(-1, 1)
        clock.switch("update")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        found = device_s(clock.take_marks())["llm"]
        if measured:
            assert found == pytest.approx(seconds, rel=0.02)
