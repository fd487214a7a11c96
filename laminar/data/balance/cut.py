"""Samples cut by rows, so that one that is longer than a rank's share holds nobody up.

A rank's share is its part of all work, by its speed. First, a sample that costs more than a share gives whole shares
away to ranks that take nothing else. What is left of it, and all other samples, are assigned as ever. Last, the
slowest rank gives the end of its largest piece to the rank that has least, as much as brings one of them to its
share, until the slowest is close enough to the mean. Each of these cuts settles a rank, so there are fewer cuts than
ranks, however the lengths are.

A piece is rows [start, stop) of one sample. Under causal attention its rows look at the keys [0, stop), which ranks
with earlier pieces of the sample make. Exchanging these keys and values is the attention's matter, not this file's;
what it costs on the wire is not counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from laminar.data.balance.assign import checked_costs, checked_speeds, slowest_over_mean
from laminar.data.balance.exchange import CLOSE_ENOUGH, exchanged
from laminar.data.balance.longest_first import longest_first, whole_costs
from laminar.data.cost.sample_cost import FloatArray, SampleCost, checked_lengths
from laminar.errors import DataError


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows [start, stop) of a sample of `length` tokens."""

    sample: int
    start: int
    stop: int
    length: int
    causal: bool = True

    @property
    def rows(self) -> int:
        """How many tokens are this piece's own."""
        return self.stop - self.start

    @property
    def keys(self) -> tuple[int, int]:
        """The keys its rows look at, as a range of the sample."""
        return (0, self.stop if self.causal else self.length)

    @property
    def whole(self) -> bool:
        """Whether it is all of its sample."""
        return self.rows == self.length


@dataclass(frozen=True)
class CutBatch:
    """A step's samples as pieces on ranks."""

    pieces: tuple[tuple[RowPiece, ...], ...]
    """By rank, by sample and row."""
    work: FloatArray
    """The cost that each rank has."""
    speeds: FloatArray

    @property
    def slowest_over_mean(self) -> float:
        """See `Assignment.slowest_over_mean`."""
        return slowest_over_mean(self.work, self.speeds)

    @property
    def cut_samples(self) -> int:
        """How many samples are in more than one piece."""
        return len({p.sample for rank in self.pieces for p in rank if not p.whole})

    def of_rank(self, rank: int) -> tuple[RowPiece, ...]:
        """A rank's pieces."""
        return self.pieces[rank]

    def of_sample(self, sample: int) -> list[tuple[int, RowPiece]]:
        """Who has which rows of a sample, in the order of rows."""
        found = [(r, p) for r, rank in enumerate(self.pieces) for p in rank if p.sample == sample]
        return sorted(found, key=lambda pair: pair[1].start)


def cut_and_assign(
    lengths: ArrayLike,
    ranks: int,
    cost: SampleCost | None = None,
    speeds: Sequence[float] | FloatArray | None = None,
    *,
    rows: int = 1,
    close: float = CLOSE_ENOUGH,
) -> CutBatch:
    """Samples to ranks, cut where that is needed to come `close` to the mean, at multiples of `rows` rows."""
    if rows < 1 or close < 1:
        raise DataError(f"cuts at multiples of {rows} rows, {close} times the mean", allowed="1 or more, both")
    cost = SampleCost() if cost is None else cost
    found = _Cuts(checked_lengths(lengths).tolist(), cost, checked_speeds(ranks, speeds), rows)
    found.give_shares_away()
    found.assign_the_rest()
    found.cut_until(close)
    pieces = tuple(
        tuple(sorted((RowPiece(s, a, b, found.lengths[s], cost.causal) for s, a, b in mine), key=_place))
        for mine in found.held
    )
    return CutBatch(pieces, np.asarray(found.load), found.speeds)


def _place(piece: RowPiece) -> tuple[int, int]:
    return piece.sample, piece.start


class _Cuts:
    """Pieces (sample, start, stop) on their way to ranks."""

    def __init__(self, lengths: list[int], cost: SampleCost, speeds: FloatArray, rows: int) -> None:
        self.lengths, self.cost, self.speeds, self.rows = lengths, cost, speeds, rows
        self.costs = checked_costs(cost.of(lengths))
        self.mean = float(self.costs.sum()) / float(speeds.sum())
        self.share: list[float] = (self.mean * speeds).tolist()
        self.held: list[list[tuple[int, int, int]]] = [[] for _ in self.share]
        self.load = [0.0] * len(self.share)
        self.stop = list(lengths)
        """Where the rows that are not given away yet end, by sample."""
        self.open = list(range(len(self.share)))
        """Ranks that did not get a share of one sample."""

    def worth(self, piece: tuple[int, int, int]) -> float:
        """What a piece costs."""
        sample, start, stop = piece
        return self.cost.of_rows(start, stop, self.lengths[sample])

    def put(self, rank: int, piece: tuple[int, int, int]) -> None:
        """One more piece for a rank."""
        self.held[rank].append(piece)
        self.load[rank] += self.worth(piece)

    def tail(self, piece: tuple[int, int, int], cost: float) -> int:
        """The row at which a piece is cut so that its end costs about so much."""
        sample, start, stop = piece
        rows = self.cost.rows_worth(cost, stop, self.lengths[sample])
        at = round((stop - rows) / self.rows) * self.rows
        return min(max(at, start), stop)

    def give_shares_away(self) -> None:
        """Samples above a share fill ranks, fastest first, until what is left of them is below one."""
        fastest = sorted(self.open, key=lambda r: -self.share[r])
        longest = sorted(range(len(self.lengths)), key=lambda s: -self.costs[s])
        for sample in longest:
            while len(fastest) > 1 and self.worth((sample, 0, self.stop[sample])) > self.share[fastest[0]]:
                rank = fastest[0]
                at = self.tail((sample, 0, self.stop[sample]), self.share[rank])
                if at == self.stop[sample]:
                    break  # a share is less than what may be cut off
                fastest.pop(0)
                self.put(rank, (sample, at, self.stop[sample]))
                self.stop[sample] = at
            if self.stop[sample] == self.lengths[sample]:
                break  # it fits, and so do all that are shorter
        self.open = sorted(fastest)

    def assign_the_rest(self) -> None:
        """What is left, whole or not, as without cuts, to the ranks that have nothing yet."""
        costs = self.costs.copy()
        for sample, (stop, length) in enumerate(zip(self.stop, self.lengths, strict=True)):
            if stop < length:
                costs[sample] = self.worth((sample, 0, stop))
        whole, fast = whole_costs(costs), self.speeds[self.open]
        ranks = exchanged(whole, longest_first(whole, fast), fast)
        for k, work in enumerate(np.bincount(ranks, weights=costs, minlength=len(fast)).tolist()):
            self.load[self.open[k]] += work
        for sample, (k, stop) in enumerate(zip(ranks.tolist(), self.stop, strict=True)):
            if stop or not self.lengths[sample]:
                self.held[self.open[k]].append((sample, 0, stop))

    def cut_until(self, close: float) -> None:
        """The slowest rank gives the end of its largest piece to the one with most room."""
        slow = [1.0 / s for s in self.speeds.tolist()]
        for _ in range(4 * len(self.load)):
            late = [work * s for work, s in zip(self.load, slow, strict=True)]
            high, low = late.index(max(late)), late.index(min(late))
            if late[high] <= close * self.mean:
                return
            gives = min(self.load[high] - self.share[high], self.share[low] - self.load[low])
            piece = max(self.held[high], key=self.worth)
            at = self.tail(piece, gives) if self.worth(piece) > gives else piece[1]
            if at == piece[2]:
                return  # less than a row
            self.held[high].remove(piece)
            self.load[high] -= self.worth(piece)
            if at > piece[1]:
                self.put(high, (piece[0], piece[1], at))
            self.put(low, (piece[0], at, piece[2]))
