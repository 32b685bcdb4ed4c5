"""Measures single parts on one device, each beside what it replaces: attention, the loss, audio
modes, and a whole step's peak memory beside orchmllm.sharding.memory; also the work of a simulated
rank and a fit of its times. Used by scripts/bench_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.batch import Microbatch, SequenceLengths
from orchmllm.config.model import AUDIO_MODES, ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.attention import attention_backend, sdpa_per_sequence
from orchmllm.models.flops import Lengths, padded_phases
from orchmllm.models.loss import LossHead
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.fsdp import build_model
from orchmllm.sharding.memory import Loads, MemoryModel, loads_of
from orchmllm.tools.predict.phase_runner import Clock, PhaseRunner, Work


def rank_work(plan: StepPlan, phase: str, rank: int) -> Work:
    """A rank's items of a phase."""
    layout, mine = plan.layout, plan.for_rank(rank)
    if phase == "llm":
        tokens = layout.tokens_per_example[mine.examples]
        return Work(phase, Lengths(tokens, tokens, tokens), np.zeros((len(tokens), 3), np.int64))
    example, segment = mine.media[phase].reshape(-1, 2).T
    at = layout.segment_start[example] + segment
    return Work(phase, Lengths(layout.rows[at], layout.attn_len[at], layout.num_tokens[at]),
                mine.grid[phase])


def no_work(phase: str) -> Work:
    """A rank without items of a phase."""
    none = np.zeros(0, np.int64)
    return Work(phase, Lengths(none, none, none), np.zeros((0, 3), np.int64))


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a rank's phase: constant + alpha * sum(l) + beta * sum(l^2) over its items."""

    constant: float
    alpha: float
    beta: float

    def seconds(self, lengths: Sequence[np.ndarray]) -> np.ndarray:
        """(k,) of k batches of items."""
        return _sums(lengths) @ [self.constant, self.alpha, self.beta]


def _sums(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """(k, 3): 1, sum and sum of squares of each batch's lengths."""
    return np.array([[1.0, x.sum(), np.square(x.astype(float)).sum()] for x in lengths])


def fit_depths(lengths: Sequence[np.ndarray], depths: np.ndarray,
               seconds: np.ndarray) -> tuple[TimeModel, TimeModel]:
    """(a layer's model, that of the rest, which has no squares) of batches measured at depths (k,):
    the non-negative coefficients with the least squared relative error. lengths: (k,) arrays,
    seconds (k,); ValueError for one depth, fewer than 5 times, or one that is not positive."""
    if len(seconds) < 5 or not (seconds > 0).all() or len(set(depths.tolist())) < 2:
        raise ValueError(f"needs 5 or more positive times at two depths, got {seconds.tolist()} at "
                         f"{sorted(set(depths.tolist()))}")
    sums = _sums(lengths)
    design = np.concatenate([sums * depths[:, None], sums[:, :2]], axis=1) / seconds[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    best, least = np.zeros(5), np.inf
    for active in (list(c) for k in range(5, 0, -1) for c in combinations(range(5), k)):
        x = np.zeros(5)
        x[active] = np.linalg.lstsq(design[:, active] / scale[active], np.ones(len(seconds)),
                                    rcond=None)[0] / scale[active]
        error = float(np.sum((design @ x - 1.0) ** 2))
        if (x >= 0).all() and error < least:
            best, least = x, error
    return TimeModel(*best[:3].tolist()), TimeModel(*best[3:].tolist(), 0.0)


class Peak:
    """bytes: how far tensors grew above what was there at the start; set at the end."""

    bytes: float = 0.0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the block: on CUDA the caching allocator's peak, on a CPU the allocator's events."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = float(torch.cuda.max_memory_allocated(device) - before)
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield peak
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events()
                    if e.name() == "[memory]")
    peak.bytes = float(np.cumsum([0, *(size for _, size in events)]).max())


def compare_attention(model: ModelConfig, phase: str, lengths: np.ndarray, device: torch.device,
                      dtype: torch.dtype, repeat: int) -> dict:
    """One layer's attention of a phase, forward and backward: the kernel that the models use and
    one call per run of equal lengths. lengths (n,): positions of the items."""
    config = getattr(model, phase)
    head_dim = config.hidden_size // config.num_heads
    heads = (config.num_heads, *(getattr(config, "num_kv_heads", config.num_heads),) * 2)
    backend = attention_backend(device.type, dtype, head_dim)
    seqlens, clock = SequenceLengths.from_lengths(lengths, device), Clock(device)
    q, k, v = (torch.randn(seqlens.total, h, head_dim, device=device, dtype=dtype,
                           requires_grad=True) for h in heads)
    out = {"phase": phase, "positions": seqlens.total, "sequences": len(lengths),
           "kernel": backend.description}
    for name, run in (("kernel_s", backend.run), ("per_sequence_s", sdpa_per_sequence)):
        def call(run=run) -> None:
            result = run(q, k, v, seqlens, phase == "llm")
            torch.autograd.grad(result, (q, k, v), torch.ones_like(result))

        call()  # compiles and allocates
        out[name] = clock.best(call, repeat)
    return out


def compare_audio_modes(model: ModelConfig, work: Work, device: torch.device, dtype: torch.dtype,
                        seed: int, repeat: int) -> dict[str, float]:
    """mode -> seconds of the audio phase, forward and backward, on the same clips (lengths as in
    mode `packed`, at most the window of `fixed`)."""
    out = {}
    for mode in AUDIO_MODES:
        config = replace(model, audio=replace(model.audio, mode=mode))
        mine, window = work, config.audio.geometry.window_frames
        if window:
            rows = np.full_like(work.lengths.rows, window)
            positions = -(-rows // 2)
            mine = replace(work, lengths=Lengths(rows, positions,
                                                 -(-positions // config.audio.stack)))
        runner = PhaseRunner(config, "audio", device, dtype, seed, 0)
        runner.seconds(mine, 1)
        out[mode] = runner.seconds(mine, repeat)
    return out


def compare_loss(model: ModelConfig, fsdp: FsdpConfig, rows: int, device: torch.device,
                 dtype: torch.dtype, repeat: int) -> list[dict]:
    """The loss of `rows` positions with its gradients, plain and in chunks of
    fsdp.loss_chunk_rows: time, measured and predicted peak bytes."""
    config, clock, out = model.llm, Clock(device), []
    head = LossHead(config.hidden_size, config.vocab_size).to(device, dtype)
    hidden = torch.randn(rows, config.hidden_size, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, config.vocab_size, (rows,), device=device)
    for chunk in (0, fsdp.loss_chunk_rows):
        def call(chunk=chunk) -> None:
            torch.autograd.grad(head(hidden, labels, chunk), (hidden, head.weight))

        call()
        with peak_memory(device) as peak:
            call()
        out.append({"chunk_rows": chunk, "rows": rows, "vocab_size": config.vocab_size,
                    "seconds": clock.best(call, repeat), "peak_bytes": peak.bytes,
                    "predicted_bytes": predicted_loss_bytes(model, dtype, chunk, rows)})
    return out


def predicted_loss_bytes(model: ModelConfig, dtype: torch.dtype, chunk: int, rows: int) -> float:
    """What the memory model says of the loss alone: its own tensors, and the weight's gradient."""
    fsdp = FsdpConfig(param_dtype=_name(dtype), loss_chunk_rows=chunk)
    none, tokens = np.zeros(1), np.array([float(rows)])
    loads = Loads({p: Lengths(none, none, tokens if p == "llm" else none) for p in PHASES},
                  {p: none for p in ENCODERS})
    return float(MemoryModel(model, fsdp, 1).loss_bytes(loads)[0])


def step_memory(model: ModelConfig, fsdp: FsdpConfig, spec: PlanSpec, layout: BatchLayout,
                device: torch.device, seed: int) -> dict:
    """Peak bytes of one forward and backward of the sharded model on the share of the rank that
    holds most tokens, above its parameters, measured and predicted."""
    tokens = np.bincount(layout.rank_of_example, layout.tokens_per_example, layout.num_ranks)
    part = list(layout.split_ranks(1))[int(tokens.argmax())]
    plan = plan_step(part, spec)
    with one_rank(device):
        built = build_model(model, fsdp, device, seed)
        batch = Orchestrator(spec, SimpleNamespace(rank=0, world_size=1), device=device).dispatch(
            random_inputs(model, plan, seed), 1)
        built(batch).backward()  # FSDP's buffers are made in the first pass
        built.zero_grad(set_to_none=True)
        with peak_memory(device) as peak:
            built(batch).backward()
        del built, batch
    memory = MemoryModel(model, fsdp, 1, on_cpu=device.type == "cpu")
    state = memory.state_bytes()
    moments = memory.peaks(loads_of(plan, padded_phases(model)),
                           {p: fsdp.checkpointing(p) for p in PHASES})
    predicted = max(float(v[0]) for k, v in moments.items() if k != "optimizer")
    return {"tokens": int(tokens.max()), "peak_bytes": peak.bytes,
            "predicted_bytes": predicted - state["parameters"] - state["optimizer"]}


def random_inputs(model: ModelConfig, plan: StepPlan, seed: int) -> Microbatch:
    """Rank 0's microbatch of the plan, with random media, tokens and labels, on the host."""
    mine = plan.for_rank(0)
    generator = torch.Generator().manual_seed(seed)
    shapes = {m: (int(mine.encode[m].lengths.sum()), getattr(model, m).geometry.row_size)
              for m in ENCODERS}
    inputs = {"vision": torch.randint(0, 256, shapes["vision"], generator=generator,
                                      dtype=torch.uint8),
              "audio": torch.randn(shapes["audio"], generator=generator)}
    text = torch.randint(0, model.llm.vocab_size, (int(mine.llm.lengths.sum()), 2),
                         generator=generator, dtype=torch.int32)
    return Microbatch(plan, mine, inputs, text, frozenset())


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A default process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
