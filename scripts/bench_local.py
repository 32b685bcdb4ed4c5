"""How near to its lower bounds `least_move` gets: load, time, volume between nodes, busiest rank.

    python scripts/bench_local.py [--ranks 128] [--batch-size 60] [--seeds 20]
        [--tolerances 0,0.001,0.005] [--only vision,audio,...] [--json FILE]
        [--others [--solver highs|cbc --limit 60]]

Inputs: the natural mix for three model sizes (vision at bounds 448, 672, 896; audio; LLM) and
textbook distributions, 8 ranks per node. Columns: share of seeds at or below (1 + tolerance) times
the lower bound; mean and worst excess over it; CPU time of one thread, median and worst, beside
`greedy` on the same input; volume between nodes over its lower bound (the surplus of the nodes
above 8 caps), mean and worst; what the busiest rank sends and receives between nodes over the
largest surplus of a node / 8 (worst), and the same for the largest room a node must fill; volume
between nodes beside `greedy` with node-wise rearrangement (--nodewise).
--others: instead of all that the other policies, and node-wise rearrangement of `greedy` batches by
`search` and by a solver.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from orchmllm.estimate.workload import MODELS, SYNTHETIC, sample_layout, synthetic_lengths
from orchmllm.plan.balance import core, load_cap
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.plan.nodewise import SOLVERS, assign_nodes, node_traffic

NODE = 8
LAMBDA = 1.3e-4  # quadratic over linear part of the conv policy's cost
NOTHING = np.zeros(0, np.int64)


def inputs(ranks: int, batch_size: int, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name -> (lengths, home)."""
    out = {}
    for model in MODELS:
        layout = sample_layout(model, num_ranks=ranks, batch_size=batch_size, seed=seed)
        side = MODELS[model].vision.max_side
        for name, modality in ((f"vision {side}", VISION), ("audio", AUDIO)):
            seg = layout.segments_of(modality)
            out[name] = (layout.attn_len[seg],
                         layout.rank_of_example[layout.example_of_segment[seg]])
        out[f"llm {model}"] = (layout.tokens_per_example, layout.rank_of_example)
    n = ranks * batch_size
    for name in SYNTHETIC:
        out[name] = (synthetic_lengths(name, n, seed), np.arange(n) // batch_size)
    return out


def cpu_ms(call) -> tuple[float, np.ndarray]:
    start = time.process_time()
    result = call()
    return 1e3 * (time.process_time() - start), result


def measure(weight, home, ranks: int, tolerance: float, nodewise: bool) -> dict[str, float]:
    bound, cap = core().lower_bound(weight, ranks), load_cap(weight, ranks, tolerance)
    greedy_ms, batch = cpu_ms(lambda: core().greedy(weight, home, ranks))
    ms, rank_of = cpu_ms(lambda: core().least_move(weight, home, NOTHING, ranks, NODE, cap))
    loads = np.bincount(rank_of, weight, ranks)
    surplus = np.bincount(home // NODE, weight, -(-ranks // NODE)) - NODE * cap
    least, share = np.maximum(0, surplus).sum(), max(1.0, surplus.max() / NODE)

    def between(target):
        moved = target // NODE != home // NODE
        return (np.bincount(home[moved], weight[moved], ranks),
                np.bincount(target[moved], weight[moved], ranks))

    send, receive = between(rank_of)
    row = {"items": len(weight) / ranks, "ok": float(loads.max() <= cap),
           "excess": loads.max() / bound - 1, "ms": ms, "greedy_ms": greedy_ms,
           "volume": send.sum() / max(1, least), "busiest": max(send.max(), receive.max()) / share,
           "room": max(0, -surplus.min()) / NODE / share, "moved": send.sum() / weight.sum()}
    if nodewise:
        paper = assign_nodes(home, batch, weight, num_ranks=ranks, ranks_per_node=NODE)[batch]
        row["less"] = between(paper)[0].sum() / max(1, send.sum())
    return row


def other_policies(args: argparse.Namespace, seed: int) -> None:
    """Times of greedy, padded, conv (audio: largest cost over sum(l + lambda l^2) / ranks) and
    node-wise rearrangement (tokens of the busiest sender)."""
    d = args.ranks
    for name, (weight, home) in inputs(d, args.batch_size, seed).items():
        if not any(part in name for part in args.only.split(",")):
            continue
        greedy_ms, batch = cpu_ms(lambda: core().greedy(weight, home, d))  # noqa: B023
        padded_ms, _ = cpu_ms(lambda: core().padded(weight, home, d))  # noqa: B023
        text = f"{name:10s} seed {seed}: greedy {greedy_ms:.1f} ms, padded {padded_ms:.1f} ms"
        if name == "audio":
            pad = (LAMBDA * weight * weight).astype(np.int64)
            ms, rank_of = cpu_ms(lambda: core().conv_transformer(weight, pad, home, d))  # noqa: B023
            longest = np.zeros(d, np.int64)
            np.maximum.at(longest, rank_of, pad)
            cost = np.bincount(rank_of, weight, d) + np.bincount(rank_of, minlength=d) * longest
            text += f", conv {cost.max() * d / (weight + pad).sum():.4f} x the bound in {ms:.1f} ms"
        for solver in filter(None, ("search", args.solver)):
            limit = None if solver == "search" else args.limit
            ms, rank_of = cpu_ms(lambda: assign_nodes(  # noqa: B023
                home, batch, weight, num_ranks=d, ranks_per_node=NODE, solver=solver,  # noqa: B023
                limit=limit))  # noqa: B023
            send, _ = node_traffic(home, batch, weight, rank_of, NODE)
            text += f", {solver} {send.max()} in {ms:.0f} ms"
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tolerances", default="0,0.001,0.005")
    parser.add_argument("--only", default="", help="substrings of input names")
    parser.add_argument("--nodewise", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--solver", choices=SOLVERS[1:])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the solver")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.others:
        for seed in range(args.seeds):
            other_policies(args, seed)
        return
    rows = defaultdict(list)
    for seed in range(args.seeds):
        for name, (weight, home) in inputs(args.ranks, args.batch_size, seed).items():
            if any(part in name for part in args.only.split(",")):
                for tolerance in map(float, args.tolerances.split(",")):
                    rows[name, tolerance].append(
                        measure(weight, home, args.ranks, tolerance, args.nodewise))
    print(f"{args.ranks} ranks, {args.batch_size} examples per rank, {args.seeds} seeds")
    for (name, tolerance), values in rows.items():
        v = {key: np.array([row[key] for row in values]) for key in values[0]}
        less = f" greedy+nodewise moves {v['less'].mean():.0f}x" if args.nodewise else ""
        print(f"{name:10s} {v['items'].mean():3.0f} items/rank, tol {tolerance:5.3f}: "
              f"ok {v['ok'].mean():4.0%} excess {v['excess'].mean():.1e} <= {v['excess'].max():.1e}"
              f" | ms {np.median(v['ms']):.2f} <= {v['ms'].max():.2f}, greedy "
              f"{np.median(v['greedy_ms']):.2f} | volume {v['volume'].mean():.2f} <= "
              f"{v['volume'].max():.2f} ({v['moved'].mean():.2%} of all) busiest "
              f"{v['busiest'].mean():.2f} <= {v['busiest'].max():.2f} (room {v['room'].max():.2f})"
              f"{less}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([
            {"input": name, "tolerance": tolerance, **row}
            for (name, tolerance), values in rows.items() for row in values]))


if __name__ == "__main__":
    main()
