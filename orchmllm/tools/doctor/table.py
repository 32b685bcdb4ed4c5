"""All ranks' checks as one table, in which what differs is named by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from orchmllm.tools.doctor.machine import Check

SLOW = 0.7  # of the median, for a figure that all ranks should reach
RANKS_SHOWN = 8


def ranks(some: Sequence[int]) -> str:
    """In words."""
    shown = ", ".join(map(str, some[:RANKS_SHOWN])) + f" and {len(some) - RANKS_SHOWN} more" * (
        len(some) > RANKS_SHOWN)
    return f"rank{'s' * (len(some) > 1)} {shown}"


def merged(found: Mapping[int, Sequence[Check]]) -> list[Check]:
    """One check for each name and outcome."""
    names = list(dict.fromkeys(c.name for checks in found.values() for c in checks))
    return [one for name in names for one in _merge(
        {rank: c for rank, checks in found.items() for c in checks if c.name == name},
        alone=len(found) == 1)]


def _merge(by_rank: Mapping[int, Check], alone: bool) -> list[Check]:
    first = next(iter(by_rank.values()))
    failed = Counter((c.what, c.cure) for c in by_rank.values() if not c.ok)
    if failed:
        out = []
        for what, cure in failed:
            who = [r for r, c in by_rank.items() if (c.ok, c.what) == (False, what)]
            out.append(Check(first.name, False, what if alone else f"{ranks(who)}: {what}", cure))
        return out
    texts = Counter(c.what for c in by_rank.values())
    if first.alike and len(texts) > 1:
        (most, count), *odd = texts.most_common()
        lines = [f"{ranks([r for r, c in by_rank.items() if c.what == what])}: {what}"
                for what, _ in odd]
        return [Check(first.name, False, "; ".join(
            [*lines, f"the other{'s' * (count > 1)}: {most}"]),
            "give all nodes the same image or environment")]
    values = {r: c.value for r, c in by_rank.items() if c.value}
    usual = median(values.values()) if values else 0.0
    slow = [r for r, value in values.items() if value < SLOW * usual]
    if slow:
        return [Check(first.name, False, f"{ranks(slow)}: {by_rank[slow[0]].what}, less than "
                      f"{SLOW:.0%} of the median rank's",
                      "look at clocks, cooling and links of that machine (nvidia-smi -q -d "
                      "PERFORMANCE), or leave it out")]
    others = f" ({len(texts) - 1} other values)" if len(texts) > 1 else ""
    return [first._replace(what=first.what + others)]


def network(pairs: Sequence[Mapping], num_nodes: int, least_gbit: float) -> list[Check]:
    """What the pairs of nodes found. least_gbit: of a link each way, in Gbit/s."""
    broken = [p for p in pairs if "error" in p]
    fine = [p for p in pairs if "error" not in p]
    if broken:
        count = Counter(r for p in broken for r in p["ranks"])
        most = max(count.values())
        odd = [r for r, n in count.items() if n == most]
        between = sorted({"-".join(map(str, sorted(p["ranks"]))) for p in broken})
        out = [Check(
            "network", False, f"{ranks(sorted(odd))}: no connection between ranks "
            f"{', '.join(between[:RANKS_SHOWN])} ({broken[0]['error']})",
            "open all TCP ports between the nodes of a job, and set GLOO_SOCKET_IFNAME to the "
            "interface towards the other nodes (ip route get ADDRESS names it)")]
    else:
        out = [Check("network", True, f"{num_nodes} met in {(num_nodes - 1).bit_length()} rounds")]
    if not fine:
        return out
    best: dict[int, float] = {}
    for p in fine:
        best[p["ranks"][0]] = max(best.get(p["ranks"][0], 0.0), p["bytes_per_s"])
    gbit = {r: 8e-9 * speed for r, speed in best.items()}
    usual, slowest = median(gbit.values()), min(gbit, key=gbit.__getitem__)
    slow = sorted(r for r, g in gbit.items() if g < least_gbit or g < SLOW / 2 * usual)
    shown = f"{gbit[slowest]:.3g} .. {max(gbit.values()):.3g} Gbit/s each way by gloo"
    out.append(Check("bandwidth", not slow, f"{ranks(slow)}: " * bool(slow) + shown,
                     f"at least {least_gbit:g} Gbit/s (--network) and {SLOW / 2:.0%} of the median "
                     "are expected: look at the link of these nodes, and whether "
                     "GLOO_SOCKET_IFNAME names the fast network"))
    return out


def text(checks: Sequence[Check], seconds: float) -> str:
    """For a terminal."""
    width = max(len(c.name) for c in checks)
    lines = []
    for c in checks:
        lines.append(f"{'ok  ' if c.ok else 'FAIL'}  {c.name:<{width}}  "
                     + c.what.replace("\n", f"\n{'':{width + 8}}"))
        if not c.ok:
            lines.append(f"{'':{width + 8}}cure: {c.cure}")
    failed = sum(not c.ok for c in checks)
    lines.append(f"{failed or 'none'} of {len(checks)} checks failed, in {seconds:.1f} s")
    return "\n".join(lines)
