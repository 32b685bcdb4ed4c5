"""What a plan moves between ranks in the training thread, and how long that takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from orchmllm.plan.layout import ENCODERS, GENERATOR, OF_MEDIA
from orchmllm.plan.step import StepPlan
from orchmllm.tools.predict.hardware import Hardware


@dataclass(frozen=True)
class Move:
    """One exchange of rows. between, inside: bytes of the rank that sends or receives most between
    nodes, and inside them; peers: of the rank that has most; times: how often it happens."""

    between: float
    inside: float
    peers: int
    times: int

    def seconds(self, hardware: Hardware) -> float:
        """As long as the busiest rank of either link takes, and a moment for each peer."""
        network, node = (size / (bandwidth * hardware.network_efficiency) for size, bandwidth in (
            (self.between, hardware.network_bandwidth), (self.inside, hardware.sheet.node)))
        hops = hardware.network_hop_s if self.between else hardware.node_hop_s
        return self.times * (max(network, node) + self.peers * hardware.message_s + hops)


def moves_of(plan: StepPlan, all_gather: bool = False,
             learn: Collection[str] = tuple(ENCODERS)) -> Iterator[Move]:
    """What moves: forward, and features' gradients backward. With dispatch `bytes` inputs travel in
    the background. all_gather: every rank receives all ranks' padded shares instead. learn:
    encoder phases whose features have a gradient."""
    balance, d, node = plan.spec.balance, plan.layout.num_ranks, plan.spec.ranks_per_node
    for phase in plan.spec.phases:
        for index, (move, volume) in enumerate(plan.transfers(phase)):
            features = phase in OF_MEDIA and index == 0
            if balance.dispatch == "bytes" and not features:
                continue
            times = 2 if features and (phase in learn or phase == GENERATOR) else 1
            if all_gather:
                held = float(np.bincount(move.source_rank, volume, d).max())
                yield Move(held * max(d - node, 0) / node, held * (d - 1), 0, times)
                continue
            moved = move.volume(volume)
            if len(moved[0]):
                yield _all_to_all(*moved, d, node, times)


def _all_to_all(source: np.ndarray, target: np.ndarray, moved: np.ndarray, d: int, node: int,
                times: int) -> Move:
    """moved[i] > 0 bytes go from source[i] to another rank, target[i]."""
    between = source // node != target // node

    def busiest(which: np.ndarray) -> float:
        return max(float(np.bincount(at[which], moved[which], d).max()) for at in (source, target))

    most = int(np.bincount(np.unique(source * d + target) // d).max())
    return Move(busiest(between), busiest(~between), most, times)
