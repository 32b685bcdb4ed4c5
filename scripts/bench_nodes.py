"""Bytes between nodes and exchange time by scheme, on emulated nodes (needs root; Linux).

    python scripts/bench_nodes.py [--items 30] [--mbit 200]

Every node is a network namespace with a shaped link (tc tbf, both directions) to a common bridge;
its ranks are real gloo processes that carry out the plans of realistic batches
(orchmllm.tools.predict.workload): inputs, text and features forward, feature gradients back. Rows
are --scale times narrower than the model's, so that a step takes a fraction of a second; the
plans see the real widths. Bytes are what the nodes' interfaces counted (headers included).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.comm.exchange import exchange_rows
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES, PhasePolicy, PlanSpec
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.rearrange import Exchange
from orchmllm.plan.step import RankPlan, plan_step
from orchmllm.tools.predict.workload import sample_layout

MODEL, NODES, PER_NODE = MODELS["10b"], 4, 2
WORLD = NODES * PER_NODE
SCHEMES = {
    "none": PhasePolicy("none"), "greedy": PhasePolicy("greedy"),
    "greedy+nodewise": PhasePolicy("greedy", nodewise=True),
    "least_move": PhasePolicy("least_move"),
}
PREFIX, SUBNET = "orchmllm", "10.77.0"


def spec_of(policy: PhasePolicy) -> PlanSpec:
    recipe = Recipe(model=MODEL, fsdp=FsdpConfig(compute_dtype="bfloat16"),
                    balance=BalanceConfig(vision=policy, audio=policy, llm=policy))
    return plan_spec(resolve(recipe, WORLD, PER_NODE))


def exchange_step(mine: RankPlan, texts: Exchange, spec: PlanSpec, scale: int) -> None:
    """Everything that a step moves, forward and back. texts: of positions of the LLM."""
    for phase in ENCODERS:
        width = max(1, spec.row_bytes[phase] // scale)
        exchange_rows(torch.zeros(len(mine.encode[phase].send_index), width, dtype=torch.uint8),
                      mine.encode[phase])
    exchange_rows(torch.zeros(len(texts.send_index), 2, dtype=torch.int32), texts)
    for phase in ENCODERS:
        features = torch.zeros(len(mine.feature[phase].send_index),
                               max(1, spec.feature_bytes // scale // 4), requires_grad=True)
        exchange_rows(features, mine.feature[phase]).sum().backward()


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def run_rank(rank: int, args: argparse.Namespace) -> dict:
    """scheme -> MB between nodes and seconds of a step, largest phase imbalance."""
    torch.set_num_threads(1)
    store = dist.TCPStore(f"{SUBNET}.1", 29511, WORLD, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD,
                            timeout=timedelta(seconds=120))
    out = {}
    try:
        for name, policy in SCHEMES.items():
            spec = spec_of(policy)
            layouts = [sample_layout(MODEL, num_ranks=WORLD, batch_size=args.items, seed=s)
                       for s in range(args.steps)]
            plans = [plan_step(layout, spec) for layout in layouts]
            out[name] = measure(rank, plans, spec, args.scale)
    finally:
        dist.destroy_process_group()
    return out


def measure(rank: int, plans: list, spec: PlanSpec, scale: int) -> dict:
    mine = [(plan.for_rank(rank), plan.llm.exchange(plan.layout.tokens_per_example, rank))
            for plan in plans]
    dist.barrier()
    before, started = sent_bytes(), time.perf_counter()
    for part, texts in mine:
        exchange_step(part, texts, spec, scale)
    dist.barrier()
    seconds, sent = time.perf_counter() - started, sent_bytes() - before
    total = torch.tensor([float(sent if rank % PER_NODE == 0 else 0)], dtype=torch.float64)
    dist.all_reduce(total)
    balance = max(max(after) / after.mean() for plan in plans
                  for after in [plan.phase_cost(p)[1] for p in PHASES] if after.sum())
    return {"internode_mb": float(total) / 1e6 / len(plans), "step_s": seconds / len(plans),
            "worst_imbalance": float(balance)}


def sh(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, stderr=None if check else subprocess.DEVNULL)


def shape(device: str, mbit: float, *inside: str) -> None:
    sh(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit",
       "burst", "256kb", "latency", "200ms")


def build(mbit: float) -> None:
    sh("ip", "link", "add", f"{PREFIX}br", "type", "bridge")
    sh("ip", "link", "set", f"{PREFIX}br", "up")
    for n in range(NODES):
        name, inside = f"{PREFIX}{n}", ("ip", "netns", "exec", f"{PREFIX}{n}")
        sh("ip", "netns", "add", name)
        sh("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        sh("ip", "link", "set", name, "master", f"{PREFIX}br", "up")
        sh(*inside, "ip", "addr", "add", f"{SUBNET}.{n + 1}/24", "dev", "eth0")
        sh(*inside, "ip", "link", "set", "eth0", "up")
        sh(*inside, "ip", "link", "set", "lo", "up")
        shape("eth0", mbit, *inside)
        shape(name, mbit)


def tear_down() -> None:
    for n in range(NODES):
        sh("ip", "netns", "del", f"{PREFIX}{n}", check=False)
        sh("ip", "link", "del", f"{PREFIX}{n}", check=False)
    sh("ip", "link", "del", f"{PREFIX}br", check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=30, help="examples per rank")
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scale", type=int, default=64)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        result = run_rank(args.rank, args)
        if args.rank == 0:
            print(json.dumps(result))
        return
    if os.geteuid():
        parser.error("network namespaces need root")
    tear_down()
    build(args.mbit)
    ranks = []
    try:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(
            ["ip", "netns", "exec", f"{PREFIX}{r // PER_NODE}", sys.executable, __file__,
             *sys.argv[1:], "--rank", str(r)], env=env, text=True,
            stdout=subprocess.PIPE if r == 0 else None) for r in range(WORLD)]
        text = ranks[0].communicate(timeout=600)[0]
        if any(r.wait(60) for r in ranks):
            raise SystemExit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
        tear_down()
    result = json.loads(text)
    print(f"{NODES} nodes x {PER_NODE} ranks, {args.items} items a rank, {args.mbit:g} Mbit/s:")
    for name, row in result.items():
        print(f"  {name:24s} {row['internode_mb']:7.2f} MB between nodes, {row['step_s']:.3f} s, "
              f"worst phase imbalance {row['worst_imbalance']:.3f}")
    ratio = np.divide(*(result[s]["internode_mb"]
                        for s in ("greedy+nodewise", "least_move")))
    print(f"  greedy+nodewise / least_move: {ratio:.2f}")


if __name__ == "__main__":
    main()
