"""What plans have in common, with stages or without: figures, and questions that can be asked.

A plan carries an account (`ir/plans/account.py`), written by whoever made it and saved with it. A plan that comes
straight from a search also remembers its origin, the graph and what was asked; that is not saved, so a plan from a file
is handed its graph again where a question needs one.

Questions (`explain`, `space`, `why`, `what_if`, `flags`, `dot`, `draw`) are passed on to whoever was named to answer
them (`ir/plans/answers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from laminar.errors import PlanError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import Account, SearchOptions
from laminar.ir.plans.answers import who_answers
from laminar.ir.plans.certificate import Certificate


@dataclass(frozen=True)
class PlanOrigin:
    """What a plan was made from. Not part of its identity, and not saved."""

    graph: Graph
    """Of the whole batch."""
    cluster: Cluster
    asked: SearchOptions = field(default_factory=SearchOptions)
    """Options of the search."""
    others: tuple[Any, ...] = ()
    """Other plans that were simulated in full, best first."""


class Planned:
    """A plan of either kind."""

    if TYPE_CHECKING:

        @property
        def account(self) -> Account:
            """What the plan says about itself."""

        @property
        def origin(self) -> PlanOrigin | None:
            """What it was made from, where known."""

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step, where known."""
        return self.account.step.step_s if self.account.step else None

    @property
    def peak_bytes(self) -> int | None:
        """Predicted bytes on the fullest rank, where known."""
        return self.account.step.peak_bytes if self.account.step else None

    @property
    def bound_s(self) -> float | None:
        """No plan in the space searched is faster than this, where known."""
        return self.account.bound_s

    @property
    def certificate(self) -> Certificate:
        """What was proved about the plans it was searched among: it prints, and has `bound_s`, `gap` and `outside`."""
        if self.account.certificate is None:
            raise PlanError("this plan does not come from a search", next="laminar.plan(graph, cluster) searches")
        return self.account.certificate

    @property
    def space(self) -> Any:
        """The plans that it was searched among, as a value: it prints, and `plan.space.contains(other)` says why."""
        return _answers().space(self)

    def explain(self, price: float | None = None) -> str:
        """What is placed where, what is exchanged and why, what was not split, and what a search has to say.

        `price` is that of a device-hour, in any currency.
        """
        return _answers().explain(self, price)

    def forecast(self) -> str:
        """Seconds and bytes of a step as predicted, with the 90 % interval and how they are known."""
        return _answers().forecast(self)

    def why(self, name: str, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> Any:
        """Why a tensor lies as it does: each other placement it could have, with the seconds and bytes of that step.

        A plan from a file is handed the graph of its batch; `cluster` is that of the plan unless given.
        """
        return _answers().why(self, name, graph, cluster)

    def what_if(self, *, graph: Graph | None = None, cluster: Cluster | str | None = None, **changes: Any) -> Any:
        """The search done again with something changed, and the difference in words.

        memory_bytes, margin, cluster, devices (so many of the same kind), pin, only, link (a factor on the speed of
        links), budget_s, batch ("free"). What is not named stays as it was asked.
        """
        return _answers().what_if(self, graph, cluster, changes)

    def flags(self, style: str, *, graph: Graph | None = None) -> Any:
        """The same plan as flags of "megatron" or "torchtitan", or what stands in the way."""
        return _answers().flags(self, style, graph)

    def dot(self, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> str:
        """The graph with placements and costs, in DOT; layers that repeat are drawn once."""
        return _answers().dot(self, graph, cluster)

    def draw(self, path: str | Path, *, graph: Graph | None = None, cluster: Cluster | str | None = None) -> None:
        """The same as a picture; the kind of file follows from the name."""
        _answers().draw(self, path, graph, cluster)


class Answers(Protocol):
    """What can be asked of a plan."""

    def explain(self, plan: Planned, price: float | None) -> str:
        """What it does and why, in words."""

    def forecast(self, plan: Planned) -> str:
        """What a step takes, in words."""

    def space(self, plan: Planned) -> Any:
        """What it was searched among."""

    def why(self, plan: Planned, name: str, graph: Graph | None, cluster: Cluster | str | None) -> Any:
        """Why a tensor is placed as it is."""

    def what_if(
        self, plan: Planned, graph: Graph | None, cluster: Cluster | str | None, changes: dict[str, Any]
    ) -> Any:
        """The search done again with something changed."""

    def flags(self, plan: Planned, style: str, graph: Graph | None) -> Any:
        """The flags of another system."""

    def dot(self, plan: Planned, graph: Graph | None, cluster: Cluster | str | None) -> str:
        """The graph with placements and costs."""

    def draw(self, plan: Planned, path: str | Path, graph: Graph | None, cluster: Cluster | str | None) -> None:
        """The same as a picture."""


def _answers() -> Answers:
    found: Answers = who_answers()
    return found
