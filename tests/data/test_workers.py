"""Worker processes of the trainer's loader: the same batches as without, and no worse an end."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing import connection
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from torch.utils.data import DataLoader

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.data.loading import forks, long_calls, pipeline, whole_examples
from orchmllm.data.loading.workers import Workers
from orchmllm.data.media.medium import MediaError
from orchmllm.runtime.stop import Stopped
from orchmllm.trainer import Trainer
from tests.lib.commands import ROOT
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe


class Failing(SyntheticDataset):
    """Some media cannot be decoded."""

    def load(self, i, *, on_error=None, **how):
        out = super().load(i, **how)
        for segment, part in out.parts.items():
            if (i + segment) % 7 == 0:
                on_error(segment, MediaError("x.jpg", f"example {i} is broken"))
                part[out.arguments[segment]].zero_()
        return out


def run_recipe(num_workers: int, **changes):
    base = recipe(model=SHALLOW, balance=BalanceConfig(dispatch=changes.pop("dispatch", "load"),
                                        ranks_per_node=2))
    return replace(
        base, data=replace(base.data, prefetch=2, num_workers=num_workers),
        train=replace(base.train, num_steps=4, batch_size=6, accumulation_steps=2),
        **changes)


def drawn(world, num_workers: int, dispatch: str) -> tuple[list, list, int]:
    """(arrays of all batches, failures of all steps, child processes afterwards)."""
    data = SyntheticDataset() if dispatch == "bytes" else Failing()
    trainer = Trainer(run_recipe(num_workers, dispatch=dispatch), world, dataset=data)
    arrays, failed = [], []
    for step in trainer.loader():
        failed.append(sorted((f.example, f.segment, f.reason) for f in step.failed))
        for micro in step.micro:
            arrays.append(step.num_global_targets)
            trainer.orchestrator.dispatch(micro).moved(lambda x: arrays.append(x.numpy()) or x)
    return arrays, failed, len(psutil.Process().children())


@pytest.mark.dist
@pytest.mark.parametrize("dispatch", [
    "load", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bytes", "tensors"))])
def test_same_batches_with_any_number_of_workers(dispatch):
    alone, *others = (run_ranks(drawn, 2, n, dispatch) for n in (0, 1, 3))
    assert dispatch == "bytes" or all(failed for _, failed, _ in alone)
    for other in others:
        for (want, failed, _), (got, also_failed, left) in zip(alone, other, strict=True):
            assert failed == also_failed and left == 0 and len(want) == len(got)
            for a, b in zip(want, got, strict=True):
                np.testing.assert_array_equal(a, b, strict=True)


class Told(SyntheticDataset):
    """Example `long` is known to take long. Every load is written down as it begins."""

    def __init__(self, long: int, path: str, cached_examples: int) -> None:
        super().__init__(size=96)  # no example twice
        self.long, self.path, self.cached_examples = long, path, cached_examples

    def kept(self, i: int, read: bool) -> SimpleNamespace:
        return SimpleNamespace(seconds=100.0 * (i == self.long), problem="it is made whole",
                               num_bytes=0)

    def load(self, i, *, row=None, **how):
        with open(self.path, "a") as file:
            file.write(f"{i}\n")
        return super().load(i, **how)


def order_of_loads(world, folder: str, cached_examples: int, segments: int, rest_s: float
                   ) -> tuple[list[list[int]], list[int]]:
    """The examples of each step, and all examples in the order in which workers began them.
    segments: planned at most; rest_s: of the workers after each step."""
    run = run_recipe(2)
    run = replace(run, train=replace(run.train, num_steps=8))
    steps = [step.example_ids_of_rank for step in Trainer(
        run, world, dataset=SyntheticDataset(size=96)).loader()]
    data = Told(steps[-1][0], f"{folder}/loads", cached_examples)
    predicted = patch.object(long_calls, "predicted_s", lambda row, segments: (
        np.array([row.seconds]), np.zeros(1)))
    found = []
    with predicted, patch.object(whole_examples, "SEGMENTS_PLANNED", segments):
        for step in Trainer(run, world, dataset=data).loader():
            found.append(step.example_ids_of_rank)
            time.sleep(rest_s)  # as training does: workers have nothing to do
    assert found == steps
    return steps, [int(line) for line in open(data.path)]


@pytest.mark.parametrize("cached_examples, segments, early", [
    (4096, 1 << 20, True), (30, 1 << 20, False), (4096, 30, False)])
def test_a_call_that_takes_long_begins_early(tmp_path, cached_examples, segments, early):
    """Before those of two earlier steps, but not where the dataset would forget what is planned,
    or the plans would take much memory."""
    (steps, loads), = run_ranks(order_of_loads, 1, str(tmp_path), cached_examples, segments,
                                0.3 if early else 0.1)  # long enough on busy machines
    assert sorted(set(loads)) == sorted(i for step in steps for i in step)
    begun = loads.index(steps[-1][0])
    assert early == (begun < min(map(loads.index, steps[-3])))


class Blocked(SyntheticDataset):
    """Example 0 waits; what is loaded after it is written down."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.go_on = path, multiprocessing.get_context("fork").Event()

    def load(self, i, **how):
        if i == 0:
            self.go_on.wait(300)
        with open(self.path, "a") as file:
            file.write(f"{i}\n")
        return super().load(i, **how)


def test_what_an_earlier_step_needs_comes_first(tmp_path):
    data = Blocked(str(tmp_path / "loads"))
    workers = Workers(data, 1)
    try:
        replies = [workers.request("load", [((i,), {})], step)
                   for i, step in ((0, 9), (1, 7), (2, 8), (3, 7), (4, 0))]
        data.go_on.set()
        assert [reply()[0][0].example_id for reply in replies] == list(range(5))
    finally:
        workers.close()
    assert (tmp_path / "loads").read_text().split() == list("04132")


class Unlucky(SyntheticDataset):
    """Rank 1's worker raises, or is killed, at example 5."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self.how, self.rank, self.main = how, rank, os.getpid()

    def load(self, i, **how):
        if i == 5 and self.rank == 1 and os.getpid() != self.main:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raises":
                raise KeyError("no such thing")
        return super().load(i, **how)


def unlucky(world, how: str) -> None:
    run = run_recipe(2, dispatch="tensors")
    run = replace(run, train=replace(run.train, num_steps=12))
    trainer = Trainer(run, world, dataset=Unlucky(how, world.rank))
    children = psutil.Process().children
    try:
        for step in trainer.loader():
            if how == "killed while idle" and world.rank == 1 and step.index == 1:
                children()[0].kill()
                time.sleep(0.2)
            trainer.train_step(step)
    finally:
        assert not [c for c in children() if c.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.dist
@pytest.mark.parametrize("how, text", [
    pytest.param("killed", "a data worker exited unexpectedly", marks=pytest.mark.slow),
    ("raises", "KeyError: 'no such thing'"),
    ("killed while idle", "a data worker exited unexpectedly")])
def test_what_happens_in_a_worker_is_raised_on_all_ranks(how, text):
    with pytest.raises(RankFailure) as failure:
        run_ranks(unlucky, 2, how)
    kinds, texts = zip(*(e[:2] for e in failure.value.errors.values()), strict=True)
    assert kinds == ("RemoteError",) * 2 and len(set(texts)) == 1 and text in texts[0]


def killed(world, folder: str) -> None:
    trainer = Trainer(run_recipe(2), world, dataset=SyntheticDataset())
    for step in trainer.loader():
        trainer.train_step(step)
        pids = [c.pid for c in psutil.Process().children()]
        (open(f"{folder}/{world.rank}", "w").write(" ".join(map(str, pids))))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.dist
def test_no_worker_outlives_its_rank(tmp_path):
    with pytest.raises(RankFailure):
        run_ranks(killed, 2, str(tmp_path))
    pids = [int(p) for f in tmp_path.iterdir() for p in f.read_text().split()]
    assert len(pids) == 4
    while any(map(_alive, pids)):  # until the test's time is up
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def signalled(world, run) -> int:
    """SIGTERM to every process of a rank, as a launcher sends it to a process group."""
    def signal_all(step, row: dict) -> None:
        if step.index == 0:
            for child in psutil.Process().children():
                child.send_signal(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=signal_all)
    try:
        trainer.run()
    except Stopped:
        return trainer.progress.step
    finally:
        trainer.close()


@pytest.mark.dist
def test_a_signal_to_the_process_group_stops_at_the_step(tmp_path):
    run = run_recipe(2, checkpoint=CheckpointConfig(every_steps=100))
    run = replace(run, run=replace(run.run, dir=str(tmp_path)))
    assert run_ranks(signalled, 2, run) == [2, 2]
    assert (tmp_path / "checkpoints" / "latest").read_text().startswith("step_00000002")


def test_results_keep_their_order_and_errors_their_text():
    """And the traceback of the worker."""
    with closing(Workers(Failing(), 2)) as pool:
        calls = [((i,), {}) for i in range(24)]
        results = pool.request("load", calls)()
        assert [value.example_id for value, *_ in results] == list(range(24))
        with pytest.raises(RuntimeError, match="a data worker failed: AttributeError: .*nothing"
                           ) as failure:
            pool.request("nothing", [((0,), {})])()
        assert "in _run" in str(failure.value.__cause__)
        assert pool.request("load", [])() == []
    with pytest.raises(ValueError, match="num_workers is -1"):
        Workers(Failing(), -1)


class Dying(SyntheticDataset):
    """The worker that loads example 3 is killed when it has sent half of its answer."""

    def load(self, i, **how):
        def half(pipe, data):
            write(pipe, data[:len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        if i == 3:
            write, connection.Connection._send = connection.Connection._send, half
        return super().load(i, **how)


def test_a_worker_that_is_killed_while_it_answers_hangs_nobody():
    with closing(Workers(Dying(), 2)) as pool:
        for _ in range(2):  # neither this request nor a later one
            with pytest.raises(RuntimeError, match="a data worker exited unexpectedly"):
                pool.request("load", [((i,), {}) for i in range(16)])()
    assert not [w for w in pool.processes if w.is_alive()]


class Odd(Exception):
    def __init__(self, text, more):
        super().__init__(text)


class Unpicklable(SyntheticDataset):
    def load(self, i, **how):
        if i == 0:
            raise Odd("an error of its own", 2)
        return threading.Lock()


@pytest.mark.parametrize("i, text", [(0, "Odd: an error of its own"), (1, "TypeError: .*lock")])
def test_what_cannot_be_pickled_is_named(i, text):
    with closing(Workers(Unpicklable(), 1)) as pool:
        with pytest.raises(RuntimeError, match=f"a data worker failed: {text}"):
            pool.request("load", [((i,), {})])()


@pytest.fixture
def stuck_once(monkeypatch, tmp_path):
    """The first process that is forked hangs before it does anything."""
    run = forks.SureFork.run

    def stuck(self):
        try:
            (tmp_path / "stuck").touch(exist_ok=False)
        except FileExistsError:
            return run(self)
        time.sleep(60)

    monkeypatch.setattr(forks.SureFork, "run", stuck)
    monkeypatch.setattr(forks, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(forks, "START_ATTEMPTS", 100)  # on a busy machine others are late, too
    return tmp_path / "stuck"


def test_a_fork_that_is_stuck_is_forked_anew(stuck_once, monkeypatch):
    with closing(Workers(Failing(), 2)) as pool:
        results = pool.request("load", [((i,), {}) for i in range(8)])()
        assert [value.example_id for value, *_ in results] == list(range(8))
        assert stuck_once.exists()
        assert [w.is_alive() for w in pool.processes] == [True, True]
    stuck_once.unlink()
    monkeypatch.setattr(forks, "START_ATTEMPTS", 1)
    with pytest.raises(RuntimeError, match="did not start"):
        Workers(Failing(), 1).request("load", [((0,), {})])


def test_a_worker_that_is_killed_for_being_late_holds_no_lock(monkeypatch):
    """It says that it runs just after the time is over, and is killed a while later."""
    patience = forks.wait

    def late(waiting, timeout):
        monkeypatch.setattr(forks, "wait", patience)
        time.sleep(0.5)
        return []

    monkeypatch.setattr(forks, "wait", late)
    with closing(Workers(Failing(), 2)) as pool:
        results = pool.request("load", [((i,), {}) for i in range(8)])()
        assert [value.example_id for value, *_ in results] == list(range(8))


def test_workers_start_beside_a_thousand_open_files():
    """Descriptors above 1023, as a rank of many data shards has; select() cannot wait for those."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1200 + len(os.listdir("/proc/self/fd"))
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted < 1100:
        pytest.skip(f"at most {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened, pool = [], Workers(Failing(), 1)
    try:
        opened += (os.open(os.devnull, os.O_RDONLY) for _ in range(1050))
        assert max(opened) > 1023
        assert pool.request("load", [((0,), {})])()[0][0].example_id == 0
    finally:
        pool.close()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Stuck(SyntheticDataset):
    """A read that never ends, as of a file server that is gone."""

    def __init__(self, started) -> None:
        super().__init__()
        self.started = started

    def load(self, i, **how):
        self.started.touch()
        time.sleep(10_000)


def test_a_worker_that_is_stuck_does_not_keep_the_loader_from_ending(tmp_path):
    pool = Workers(Stuck(tmp_path / "started"), 1)
    pool.request("load", [((0,), {})])
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    [worker] = pool.processes
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and not worker.is_alive()


HALF_STARTED = """
import time
from orchmllm.data.loading import forks, long_calls, pipeline
from orchmllm.data.loading.workers import Workers
from tests.data.test_workers import Failing

forked, start = [], forks.SureFork.start

def starts_once(self):
    forked.append(self)
    if len(forked) == 2:
        self.run = lambda: time.sleep(60)
        forks.START_TIMEOUT_S, forks.START_ATTEMPTS = 0.3, 2
    start(self)

forks.SureFork.start = starts_once
try:
    Workers(Failing(), 2).request("load", [((0,), {}), ((1,), {})])
except RuntimeError as error:
    print(error, len(forked), [p.is_alive() for p in forked])
"""


@pytest.mark.slow
def test_a_pool_of_which_one_worker_does_not_start_leaves_none_and_the_rank_can_exit():
    done = subprocess.run([sys.executable, "-c", HALF_STARTED], text=True,
                          stdout=subprocess.PIPE, check=True, cwd=ROOT)
    assert "did not start in 2 attempts" in done.stdout
    assert done.stdout.strip().endswith("2 [False, False]")


def test_also_those_of_torch_s_loader(stuck_once):
    loader = DataLoader(range(8), 2, num_workers=2,
                        multiprocessing_context=forks.loader_context(None, 2))
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert stuck_once.exists()
    assert forks.loader_context("forkserver", 2) == "forkserver"
    assert forks.loader_context(None, 0) is None


class Slow(SyntheticDataset):
    """The example `slow` comes when `there` is set."""

    def __init__(self) -> None:
        super().__init__(size=96)  # no example twice in the four steps
        self.slow, self.there = -1, threading.Event()

    def load(self, i, **how):
        if i == self.slow:
            self.there.wait()
        return super().load(i, **how)


def left_while_it_loads(world) -> tuple[bool, list, list]:
    """Whether the loader's thread outlived close(); the examples of a whole loader's steps, and of
    the one that comes after that."""
    data = Slow()
    trainer = Trainer(run_recipe(0), world, dataset=data)
    plan = [step.example_ids_of_rank for step in trainer.loader()]
    if world.rank == 1:
        data.slow = plan[1][0]
    steps = iter(trainer.loader())
    next(steps)  # the thread goes on with the second step
    with patch.object(pipeline.Prefetcher.close, "__defaults__", (0.05,)):
        steps.close()
    busy = trainer.orchestrator.gather.closed_thread.is_alive()
    threading.Timer(0.3, data.there.set).start()
    return busy, plan, [step.example_ids_of_rank for step in trainer.loader()]


@pytest.mark.dist
def test_a_loader_waits_for_one_that_was_left_while_it_loads():
    found = run_ranks(left_while_it_loads, 2)
    for busy, plan, again in found:
        assert busy and again == plan
