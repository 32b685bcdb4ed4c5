"""What a step of a text model of transformers costs: with the examples of a rank in one packed row
as orchmllm trains them, in the packed row of transformers itself, and padded to the longest.

    python scripts/bench_packed.py --positions 4096 12288

Forward and backward in float32 on the CPU, on one thread, of examples of 50 to 1,000 tokens. Each
way runs in a process of its own, which is stopped after --limit seconds of CPU time; the time is
CPU time, the memory what the process holds at most beyond model and inputs.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn

from orchmllm.batch import SequenceLengths
from orchmllm.models import packing

WAYS = {"orchmllm": "one row, attention per example",
        "transformers": "one row, one mask for the whole row",
        "padded": "a row for each example, padded to the longest"}
VOCABULARY, HEAD = 256, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, nargs="+", default=[4096, 12288])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--repeats", type=int, default=2, help="of which the fastest counts")
    parser.add_argument("--limit", type=int, default=120, help="seconds of CPU time of a process")
    args = parser.parse_args()
    print(f"{args.layers} layers x {args.width}, float32, load average {os.getloadavg()[0]:.1f} on "
          f"{os.cpu_count()} cores")
    for positions in args.positions:
        lengths = drawn(positions)
        print(f"{positions:,} positions, {len(lengths)} examples, the longest {max(lengths)}")
        for way, what in WAYS.items():
            print(f"  {way:12s} {in_a_process(way, lengths, args):>24s}   {what}", flush=True)


def drawn(positions: int) -> list[int]:
    """Lengths of examples that are so many positions together."""
    rng, lengths = np.random.default_rng(0), []
    while (left := positions - sum(lengths)) > 0:
        lengths.append(min(int(rng.integers(50, 1000)), left))
    return lengths


def in_a_process(way: str, lengths: list[int], args: argparse.Namespace) -> str:
    """The time and memory of a step, or why there are none. Raises RuntimeError if it fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(theirs, way, lengths, args))
    process.start()
    theirs.close()
    try:
        seconds, megabytes = ours.recv()
    except EOFError:  # it ended without an answer
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return f"> {args.limit} s, stopped"
        raise RuntimeError(f"{way} at {sum(lengths)} positions ended with exit code "
                           f"{process.exitcode}") from None
    process.join()
    return f"{seconds:7.2f} s {megabytes:7,.0f} MB"


def measure(answer, way: str, lengths: list[int], args: argparse.Namespace) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (args.limit, args.limit + 5))
    torch.set_num_threads(1)
    model = text_model(args)
    inputs = arguments(way, lengths)
    if way == "orchmllm":
        model.config._attn_implementation = packing.NAME
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = min(step(model, way, lengths, inputs) for _ in range(args.repeats))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer.send((best, (peak - before) / 1024))


def text_model(args: argparse.Namespace) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = args.width // HEAD
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=2 * args.width,
        num_hidden_layers=args.layers, num_attention_heads=heads, head_dim=HEAD,
        num_key_value_heads=max(heads // 2, 1))).train()


def arguments(way: str, lengths: list[int]) -> dict[str, Tensor]:
    """Of the model's forward."""
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)))
    if way == "padded":
        rows = [padded(part[0], max(lengths)) for part in ids.split(lengths, 1)]
        mask = [padded(torch.ones(n, dtype=torch.long), max(lengths)) for n in lengths]
        return {"input_ids": torch.stack(rows), "attention_mask": torch.stack(mask)}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    # Without a mask transformers finds the examples where positions begin anew.
    mask = {"attention_mask": torch.ones_like(ids)} if way == "orchmllm" else {}
    return {"input_ids": ids, "position_ids": positions, **mask}


def padded(values: Tensor, length: int) -> Tensor:
    return nn.functional.pad(values, (0, length - len(values)))


def step(model: nn.Module, way: str, lengths: list[int], inputs: dict[str, Tensor]) -> float:
    """CPU seconds of a forward and backward pass."""
    start = time.process_time()
    if way == "orchmllm":
        with packing.packed(SequenceLengths.from_lengths(lengths), model.config.num_hidden_layers):
            logits = model(**inputs, use_cache=False).logits
    else:
        logits = model(**inputs, use_cache=False).logits
    logits.sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
