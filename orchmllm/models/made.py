"""The images that a rank makes in a microbatch: from which states of the LLM, and what of them it
has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchmllm.batch import Microbatch, SequenceLengths, on_device
from orchmllm.comm.exchange import exchange_rows
from orchmllm.comm.pieces import Media
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.plan.layout import GENERATOR, MADE
from orchmllm.plan.rearrange import Exchange, ranges

ROW_KEY = 0  # of the image that a rank makes which has none


@dataclass(frozen=True)
class MadeItems:
    """media: squares of this rank's images, or of one blank one; grids (n, 3) of them; conditions:
    states of the LLM that each gets; keys (n,) of what is drawn for them; weights (n,) float32: 0
    where nothing is learnt; examples (n,): positions in the microbatch's layout. at (S,): positions
    of this rank's row whose states leave by `exchange`. is_placeholder: it makes none."""

    media: Media
    grids: np.ndarray
    conditions: SequenceLengths
    keys: list[int]
    weights: Tensor
    examples: np.ndarray
    at: Tensor
    exchange: Exchange
    is_placeholder: bool

    @classmethod
    def of(cls, media: Media, micro: Microbatch, seed: int, step: int) -> MadeItems:
        """Of a planned microbatch. media: what this rank makes of it, or a blank image. seed: of
        the run."""
        mine, layout = micro.rank_plan, micro.plan.layout
        places, exchange = mine.media[GENERATOR], mine.feature[GENERATOR]
        taken, row = mine.taken[GENERATOR], mine.row
        first = np.cumsum(row[:, 2]) - row[:, 2]
        starts = first[np.searchsorted(row[:, 0], taken[:, 0])]
        item = np.searchsorted(layout.segments[MADE],
                               layout.segment_start[taken[:, 0]] + taken[:, 1])
        at = ranges(starts, layout.conditions[item])
        lengths, grids = exchange.lengths, mine.grid[GENERATOR]
        keys = [key_of(seed, step, int(layout.example_id[e]), s) for e, s in places.tolist()]
        if blank := not len(places):
            lengths, grids, keys = np.array([1]), np.array([[1, 1, 1]]), [ROW_KEY]
        return cls(media, grids, SequenceLengths.from_lengths(lengths), keys,
                   torch.full((len(grids),), float(not blank)), places[:, 0],
                   torch.from_numpy(at), exchange, blank)

    def moved(self, move: Callable[[Tensor], Tensor]) -> MadeItems:
        """With `move` of every tensor but the lengths."""
        return replace(self, media=self.media.moved(move), weights=move(self.weights),
                       at=move(self.at))

    def to(self, device: torch.device) -> MadeItems:
        """The same on the training device."""
        return replace(
            self.moved(partial(on_device, device=device)),
            conditions=SequenceLengths.from_lengths(np.array(self.conditions.lengths), device))

    def exchanged(self, group: dist.ProcessGroup | None) -> MadeItems:
        """With the squares that come from other ranks of a process group; collective."""
        return replace(self, media=self.media.exchanged(group))

    def without_labels(self, lost: np.ndarray) -> MadeItems:
        """On the host: nothing is learnt of the images of examples (k,) of the layout."""
        if self.is_placeholder:
            return self
        stays = torch.from_numpy(~np.isin(self.examples, lost))
        return replace(self, weights=self.weights * stays)

    def loss(self, generator: nn.Module, states: Tensor, group: dist.ProcessGroup | None,
             clock: PhaseClock) -> Tensor:
        """The generator's loss, a scalar. states: (S, width) of the positions `at`; group: ranks
        among which they move. Collective."""
        states = clock.mark(states, before="llm", after="exchange")
        states = exchange_rows(states, self.exchange, group)
        states = clock.mark(states, before="exchange", after=GENERATOR)
        if self.is_placeholder:  # and its gradient takes part in the exchange
            states = states.new_zeros(1, states.shape[1]) + states.sum()
        pieces = zip(self.media.pieces, self.media.starts.tolist(), strict=True)
        squares = torch.cat([piece.views(self.media.data, start)[0] for piece, start in pieces])
        return generator(squares, states, self.grids, self.conditions, self.keys, self.weights)


def key_of(seed: int, *place: int) -> int:
    """63 bits of a run's seed and of where an image is: (step, example, segment), never the rank.
    """
    text = " ".join(map(str, (seed, *place)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
