"""The best plan so far, shared by the searches of all graphs of a model, and the time that each of them has left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from laminar.planner.estimate.candidates import Final, described_candidate
from laminar.planner.space.request import Request

TellPlan = Callable[[str], None]


class Incumbent:
    """Plans simulated at full depth that fit, of all graphs, and what has to be beaten."""

    def __init__(self, request: Request, progress: TellPlan, below_s: float) -> None:
        """Slower plans than `below_s` are of no use to anybody."""
        self.request, self.progress, self.below_s = request, progress, below_s
        self.began = time.process_time()
        self.finals: list[Final] = []
        self.earlier_s = math.inf
        """What a search before this one has found that this one may take."""

    @property
    def best_s(self) -> float:
        """Of what was simulated at full depth, and fits; or what there was before."""
        return min([self.below_s, *(f.seconds for f in self.finals)])

    @property
    def best(self) -> Final | None:
        """The fastest of these plans."""
        return min(self.finals, key=lambda f: f.seconds, default=None)

    @property
    def settled(self) -> bool:
        """Whether the search may end: there is a plan, of this search or from before."""
        return bool(self.finals) or self.below_s < math.inf

    def take(self, final: Final, note: str = "") -> None:
        """Keep a plan that fits, and tell of it if it is the best."""
        self.finals.append(final)
        if self.best_s == final.seconds:
            self.tell(final, note)

    def tell(self, final: Final, note: str = "") -> None:
        """One line, for whoever waits."""
        self.progress(f"{final.seconds * 1e3:.3f} ms: {described_candidate(final.score)}{note and f', {note}'}")


class TimeLeft:
    """Processor seconds that the search of one graph has left."""

    def __init__(self, began: float, budget_s: float) -> None:
        self.began, self.budget_s = began, budget_s
        self.until_s, self.extra_s = budget_s, 0.0

    def left(self) -> float:
        """What must be done whatever the time comes on top of what was asked for."""
        return self.until_s + self.extra_s - (time.process_time() - self.began)

    def leave_half(self) -> None:
        """Half of what is left is for others."""
        self.until_s -= self.left() / 2

    def take_all(self) -> None:
        """Whatever others have left is for this one again."""
        self.until_s = self.budget_s

    @contextmanager
    def on_top(self) -> Iterator[None]:
        """What is done in here does not count."""
        begun = time.process_time()
        yield
        self.extra_s = time.process_time() - begun
