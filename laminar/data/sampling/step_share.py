"""A rank's part of a step, and who works it out: which samples, in which micro-batches.

Every rank plans for all and takes its own part. Either samples go to ranks first and each rank packs its own into
micro-batches, or (`fixed_units`) units are packed from the global batch first, so that they are the same whoever gets
them, and go to ranks whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

from laminar.data.balance.assign import Assignment, assign
from laminar.data.balance.rank_speeds import RankSpeeds
from laminar.data.cost.online_cost import OnlineCost
from laminar.data.cost.sample_cost import FloatArray, IntArray, SampleCost
from laminar.data.packing.units import pack_units
from laminar.errors import DataError

Collate = Callable[[list[Any]], Any]
"""From the samples of a micro-batch to what the model is given, such as `pack`."""


class Planning(TypedDict, total=False):
    """What samplers and streams may be told about ranks and micro-batches."""

    ranks: int | None
    """How many there are; those of torch.distributed unless given."""
    rank: int | None
    """Which is this one."""
    cost: SampleCost | OnlineCost | None
    """What samples cost; their tokens unless given."""
    speeds: RankSpeeds | Sequence[float] | None
    """Of ranks; all equal unless given."""
    tokens: int | None
    """At most so many in a micro-batch; without, all of a rank's samples are one micro-batch."""
    fixed_units: bool
    """Whether micro-batches are packed from the global batch, before anybody looks at ranks."""
    too_long: str
    """A sample with more tokens gets a micro-batch of its own ("alone"), or is an "error"."""


@dataclass(frozen=True)
class StepShare:
    """What one rank does in one step; without micro-batches there is nothing for it to do."""

    epoch: int
    step: int
    """In this epoch, from 0."""
    micro_batches: list[list[int]]
    """Numbers of samples in the data set; of a stream, in its window."""
    batch_samples: int
    """Of all ranks together."""
    batch_tokens: int
    """Of all ranks together."""
    work: FloatArray
    """By rank, the cost of what it has."""
    tokens: int
    """This rank's."""
    squares: int
    """This rank's lengths, squared and added up."""

    @property
    def samples(self) -> list[int]:
        """All of this rank's, one micro-batch after the other."""
        return [sample for part in self.micro_batches for sample in part]


@dataclass(frozen=True)
class LoadedStep:
    """A rank's part of a step with its data: `units` are micro-batches as the collate function made them."""

    share: StepShare
    units: list[Any]
    state: dict[str, Any] = field(default_factory=dict)
    """Where to go on after this step."""


class StepPlanner:
    """Ranks, their speeds, what samples cost, and how micro-batches are made: all that a plan is made of."""

    def __init__(self, how: Planning) -> None:
        unknown = set(how) - set(Planning.__annotations__)
        if unknown:
            raise TypeError(f"unexpected: {', '.join(sorted(unknown))}")
        self.ranks, self.rank = ranks_here(how.get("ranks"), how.get("rank"))
        self.tokens, self.fixed_units = how.get("tokens"), how.get("fixed_units", False)
        self.too_long = how.get("too_long", "alone")
        if self.fixed_units and self.tokens is None:
            raise DataError("fixed_units without tokens", next="say how many tokens a unit may have")
        speeds = how.get("speeds")
        self.speeds = speeds if isinstance(speeds, RankSpeeds) else RankSpeeds(self.ranks if speeds is None else speeds)
        if self.speeds.ranks != self.ranks:
            raise DataError(f"{self.speeds.ranks} speeds for {self.ranks} ranks")
        self._learning = how.get("cost") or SampleCost()
        self.cost = self._learning.cost if isinstance(self._learning, OnlineCost) else self._learning
        """The cost that steps are planned with."""

    def share(
        self, epoch: int, step: int, batch: IntArray, lengths: IntArray, rank_of: IntArray | None = None
    ) -> StepShare:
        """This rank's part of a step; `rank_of` where samples have their ranks already."""
        if self.fixed_units:
            assert self.tokens is not None
            units = pack_units(lengths, self.tokens, too_long=self.too_long)
            costs = self.cost.of(lengths)
            found = assign([float(costs[unit].sum()) for unit in units], self.ranks, self.speeds.speeds)
            mine = [units[u] for u in found.of_rank(self.rank)]
        else:
            costs = self.cost.of(lengths)
            speeds = self.speeds.speeds
            found = assign(costs, self.ranks, speeds) if rank_of is None else Assignment(rank_of, costs, speeds)
            own = np.flatnonzero(found.rank_of == self.rank)
            if self.tokens is None:
                mine = [own.tolist()] if len(own) else []
            else:
                packed = pack_units(lengths[own], self.tokens, too_long=self.too_long)
                mine = [own[unit].tolist() for unit in packed]
        parts: list[list[int]] = [batch[unit].tolist() for unit in mine]
        sizes = lengths[[i for unit in mine for i in unit]] if mine else lengths[:0]
        tokens, squares = int(sizes.sum()), int((sizes * sizes).sum())
        return StepShare(epoch, step, parts, len(batch), int(lengths.sum()), found.work, tokens, squares)

    def learn(self, rows: Sequence[Sequence[float]], renew: bool) -> None:
        """What ranks have measured in a step, (seconds, units, samples, tokens, squares) each, for a cost that learns.

        It is planned with only when `renew` says so, because every change throws away what was planned ahead.
        """
        if isinstance(self._learning, OnlineCost):
            for (seconds, *sums), speed in zip(rows, self.speeds.speeds, strict=True):
                if sums[0] and seconds > 0:
                    self._learning.observe_sums(sums, seconds, float(speed))
            if renew:
                self.cost = self._learning.cost

    def state_dict(self) -> dict[str, Any]:
        """What was learnt; plain values."""
        online = {"online": self._learning.state_dict()} if isinstance(self._learning, OnlineCost) else {}
        return {"cost": self.cost.to_json(), "speeds": self.speeds.state_dict(), **online}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; speeds of another number of ranks are measured anew."""
        self.cost = SampleCost.from_json(state["cost"])
        if isinstance(self._learning, OnlineCost) and "online" in state:
            self._learning.load_state_dict(state["online"])
        if len(state["speeds"]["log"]) == self.ranks:
            self.speeds.load_state_dict(state["speeds"])


def collated(sample: Callable[[int], Any], parts: Sequence[Sequence[int]], collate: Collate) -> list[Any]:
    """Micro-batches loaded and put together."""
    return [collate([sample(number) for number in part]) for part in parts]


def ranks_here(ranks: int | None, rank: int | None) -> tuple[int, int]:
    """How many ranks and which is this one: as given, as torch.distributed has it, or one alone."""
    if ranks is None or rank is None:
        import torch.distributed as dist

        there = dist.is_available() and dist.is_initialized()
        ranks = ranks if ranks is not None else dist.get_world_size() if there else 1
        rank = rank if rank is not None else dist.get_rank() if there else 0
    if not 0 <= rank < ranks:
        raise DataError(f"rank {rank} of {ranks}", allowed="ranks count from 0")
    return ranks, rank
