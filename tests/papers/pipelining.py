"""Ranks that run torch.distributed.pipelining itself: stages of one small matrix that may sleep.

Traps: step() cuts its tensors equally, so the argument is the microbatch's index (l, 1) and stage 0
looks its data up; boundary shapes are static, and their examples must require gradients; nothing
private of the schedules is called, since a forward-only run leaves no gradients and no error."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

WIDTH = 4


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps and keeps record forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, stage: Stage, microbatch: int) -> Tensor:
        ctx.stage, ctx.microbatch = stage, microbatch
        stage.run("F", microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.stage.run("B", ctx.microbatch)
        return gradient.clone(), None, None


class Stage(nn.Module):
    """x -> tanh(x W), after the seconds given per microbatch; the index travels in column 0."""

    def __init__(self, index: int, seconds: tuple[list[float], list[float]], log: list) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.index, self.seconds, self.log = index, seconds, log

    def run(self, kind: str, microbatch: int) -> None:
        self.log.append((kind, self.index, microbatch))
        time.sleep(self.seconds["FB".index(kind)][microbatch])

    def forward(self, x: Tensor) -> Tensor:
        tag = x[:, :1].detach()
        microbatch = int(tag[0, 0])
        inside = torch.sin(tag + torch.arange(WIDTH)) if self.index == 0 else x[:, 1:]
        # W first: its gradient needs the sleeping backward to have run.
        y = _Sleep.apply(torch.tanh(inside @ self.weight), self, microbatch)
        return torch.cat([tag, y], dim=1)


def build(world, l: int, seconds, log: list):  # noqa: E741
    """(schedule, module) of this rank. seconds: (2, S, l) nested lists."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    s = world.rank
    module = Stage(s, (seconds[0][s], seconds[1][s]), log)
    x = torch.zeros(1, 1 if s == 0 else WIDTH + 1, requires_grad=s > 0)
    part = PipelineStage(module, s, world.world_size, torch.device("cpu"), input_args=(x,),
                         output_args=(torch.zeros(1, WIDTH + 1, requires_grad=True),))
    return Schedule1F1B(part, l, loss_fn=lambda y, _: y[:, 1:].square().sum(),
                        scale_grads=False), module


def step(world, made, order: list[int]) -> None:
    index = torch.tensor(order, dtype=torch.float32)[:, None]
    first, last = world.rank == 0, world.rank == world.world_size - 1
    made.step(*([index] if first else []), target=index if last else None)


def record(world, slots: list[int]) -> list[dict]:
    """Per number of microbatches: the operations as they ran, in order, and the gradients of two
    orders."""
    out = []
    for l in slots:  # noqa: E741
        seconds, log, gradients = [[[0.0] * l] * 4] * 2, [], []
        for order in (list(range(l)), list(range(l))[::-1]):
            made, module = build(world, l, seconds, log)
            step(world, made, order)
            gradients.append(module.weight.grad.ravel().tolist())
        out.append({"ops": log[:len(log) // 2], "gradients": gradients})
    return out


def timed(world, runs: list[tuple[int, list, list]]) -> list[dict]:
    """Per run (l, seconds, order): the least wall seconds of three steps, and the gradients."""
    import torch.distributed as dist

    out = []
    for l, seconds, order in runs:  # noqa: E741
        made, module = build(world, l, seconds, [])
        step(world, made, order)  # the first one makes the connections
        took = []
        for _ in range(3):
            module.weight.grad = None
            dist.barrier()
            started = time.perf_counter()
            step(world, made, order)
            dist.barrier()
            took.append(time.perf_counter() - started)
        out.append({"seconds": min(took), "gradients": module.weight.grad.ravel().tolist()})
    return out
