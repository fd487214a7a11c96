"""What a plan is asked, answered: `plan.explain()`, `plan.why(...)`, `plan.what_if(...)` and the like end here.

`laminar/__init__.py` names this module to `ir/plans/answers.py`. Each answer loads what it takes, so that a plan is
explained without loading a search.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Answers, Planned
from laminar.ir.plans.staged import Staged


class PlannerAnswers:
    """`ir.planned.Answers`, by the planner."""

    def explain(self, plan: Planned, price: float | None) -> str:
        """What it does and why, in words."""
        from laminar.planner.report.explain import explain

        return explain(plan, price)

    def forecast(self, plan: Planned) -> str:
        """What a step takes, in words."""
        from laminar.planner.report.explain import forecast

        return forecast(plan)

    def space(self, plan: Planned) -> Any:
        """What it was searched among."""
        from laminar.planner.space.plan_space import space

        return space(plan)

    def why(self, plan: Planned, name: str, graph: Graph | None, cluster: Cluster | str | None) -> Any:
        """Why a tensor is placed as it is."""
        from laminar.planner.report.tensor_alternatives import why

        return why(plan, name, graph=graph, cluster=cluster)

    def what_if(
        self, plan: Planned, graph: Graph | None, cluster: Cluster | str | None, changes: dict[str, Any]
    ) -> Any:
        """The search done again with something changed."""
        from laminar.planner.search.what_if import what_if

        assert isinstance(plan, Plan | Staged)
        return what_if(plan, graph=graph, cluster=cluster, **changes)

    def flags(self, plan: Planned, style: str, graph: Graph | None) -> Any:
        """The flags of another system."""
        from laminar.planner.report.flags import flags

        return flags(plan, style, graph=graph)

    def dot(self, plan: Planned, graph: Graph | None, cluster: Cluster | str | None) -> str:
        """The graph with placements and costs."""
        from laminar.planner.report.draw import dot

        return dot(plan, graph=graph, cluster=cluster)

    def draw(self, plan: Planned, path: str | Path, graph: Graph | None, cluster: Cluster | str | None) -> None:
        """The same as a picture."""
        from laminar.planner.report.draw import draw

        draw(plan, path, graph=graph, cluster=cluster)


ANSWERS: Answers = PlannerAnswers()
