"""What the simulator is given: tasks in lanes, waiting for each other, sharing links.

A step, as far as time is concerned, is a set of tasks. A task stands in one or more *lanes* (the
compute stream of a rank, a communication stream, the host thread); a lane runs its tasks in the
order of the list, one at a time. A task starts when it is first in all of its lanes and every task
in its `after` has ended. While it runs it may share *links* with others, and compute and transfers
of one rank may slow each other down (`Drag`). Nothing here knows tensors, programs or clusters:
`cost.schedule` turns those into a load, and `cost.simulate` says when each task starts and ends.

Time is a whole number of ticks, one tick a nanosecond. Speeds are whole numbers too, parts of
`FULL_SPEED`: a share of a link among up to 16 users is exact, and the same load gives the same ticks on
every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FULL_SPEED = 720720
"""Full speed. The least common multiple of 1..16, so that 1/n of it is whole up to n = 16."""

HOST, COMPUTE, TRANSFER = 0, 1, 2
"""What a task is to the others: nothing, one that computes on its ranks, one that moves bytes."""


class Lane(NamedTuple):
    """One queue of one rank: `compute`, `host`, or `communication:` and the axes it serves."""

    rank: int
    kind: str

    @property
    def role(self) -> int:
        """HOST, COMPUTE or TRANSFER."""
        if self.kind.startswith("communication"):
            return TRANSFER
        return COMPUTE if self.kind == "compute" else HOST


class Task(NamedTuple):
    """One thing that takes time. A plain tuple, because a search makes and compares millions of them."""

    name: str
    """Unique in its load, and stable over edits: delta simulation finds a task again by it."""
    lanes: tuple[int, ...]
    """The lanes it occupies at once. With a communication lane among them it is a transfer."""
    work: int
    """Ticks it takes when nothing disturbs it; 0 for a mere meeting point."""
    after: tuple[int, ...] = ()
    """Indices of the tasks that must have ended before it starts."""
    links: tuple[int, ...] = ()
    """Links it uses while it runs; n users of a link get 1/n of the speed each."""


@dataclass(frozen=True, slots=True)
class Drag:
    """How overlap slows both sides: the speed left, in parts of `FULL_SPEED`.

    On CPU a transfer takes cores from compute; on GPU it takes multiprocessors and bandwidth.
    """

    compute: int = FULL_SPEED
    """Speed of compute while a transfer runs on one of its ranks."""
    transfer: int = FULL_SPEED
    """Speed of a transfer while compute runs on one of its ranks."""

    def __post_init__(self) -> None:
        for name, value in (("compute", self.compute), ("transfer", self.transfer)):
            if not 0 < value <= FULL_SPEED:
                raise ValueError(f"Drag.{name} must lie in 1..{FULL_SPEED} (SCALE, full speed), got {value}")

    @classmethod
    def fractions(cls, compute: float, transfer: float) -> Drag:
        """From fractions of full speed, such as 0.8."""
        return cls(*(max(1, min(FULL_SPEED, round(f * FULL_SPEED))) for f in (compute, transfer)))


@dataclass(frozen=True)
class Load:
    """Everything that takes time in one step."""

    lanes: tuple[Lane, ...]
    tasks: tuple[Task, ...]
    links: int = 0
    """How many links there are; tasks name them 0..links-1."""
    drag: Drag = Drag()

    def index(self, name: str) -> int:
        """Where the task of that name stands in the list."""
        for i, task in enumerate(self.tasks):
            if task.name == name:
                return i
        raise KeyError(name)

    def __str__(self) -> str:
        return f"{len(self.tasks)} tasks in {len(self.lanes)} lanes, {self.links} links"
