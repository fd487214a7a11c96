"""Plans that earlier searches for the same graph have found: a later one is no slower than those that it may take.

Somebody who searches with data parallelism alone, and then with everything, expects nothing slower. Searches are
bounded by time, so no order of looking at cells can promise that. What was found in this process is remembered instead,
by graph, cluster and optimizer; a search begins by simulating what of it lies in its own space. Commands hand it on
from one to the next (`across_commands`), through the folder that they keep graphs in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from laminar.cache import store, stored
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import predict
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.rewrites import carried
from laminar.ir.plans.staged import Staged, plan_of
from laminar.placement.micro_batch import micro
from laminar.planner.estimate.candidates import Final, Score
from laminar.planner.estimate.score_placement import feasible
from laminar.planner.space.cell import Cell
from laminar.planner.space.plan_space import Space
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style

REMEMBERED_PLANS = 4
"""Plans that are remembered of one graph on one cluster, the latest."""
REMEMBERED_GRAPHS = 8
"""Graphs on clusters of which any are, the latest."""
SCORE_COUNTS = ("again", "blocks", "saves_bytes", "spared", "away", "apart", "behind_s")
"""What a score says besides, as it is."""

_FOUND: dict[tuple[str, str, str], list[tuple[Score, Plan | Staged]]] = {}


def _key(graph: Graph, request: Request) -> tuple[str, str, str]:
    return graph.hash, request.cluster.hash, request.optimizer


def remember(graph: Graph, request: Request, final: Final) -> None:
    """Keep a plan that was found."""
    key = _key(graph, request)
    others = [one for one in _FOUND.pop(key, []) if one[1].hash != final.plan.hash]
    _FOUND[key] = [*others[1 - REMEMBERED_PLANS :], (final.score, final.plan)]
    while len(_FOUND) > REMEMBERED_GRAPHS:
        del _FOUND[next(iter(_FOUND))]


def forget() -> None:
    """As if nothing had been searched yet."""
    _FOUND.clear()


@contextmanager
def across_commands(graph: Graph, cluster: str, optimizer: str = "adamw") -> Iterator[None]:
    """Searches in here know what earlier commands have found for a graph on a cluster, by hash, and tell later ones."""
    key = (graph.hash, cluster, optimizer)
    about = dict(zip(("graph", "cluster", "optimizer"), key, strict=True))
    nothing: list[tuple[Score, Plan | Staged]] = []
    known = stored("found", about, lambda rows: [_from_json(row) for row in rows], nothing)
    here = _FOUND.get(key, [])
    mine = {plan.hash for _, plan in here}
    _FOUND[key] = [*(one for one in known if one[1].hash not in mine), *here][-REMEMBERED_PLANS:]
    yield
    store("found", about, [_to_json(*one) for one in _FOUND[key]])


def _to_json(score: Score, plan: Plan | Staged) -> dict[str, Any]:
    cell = score.cell
    figures = {name: getattr(score, name) for name in ("zero", "seconds", "peak_bytes", *SCORE_COUNTS)}
    told = {"style": score.style.words, **figures}
    place = [cell.stages, cell.micro_batches, cell.virtual, cell.dp, cell.tp, cell.recompute]
    return {"cell": place, "score": told, "plan": plan.to_json()}


def _from_json(row: dict[str, Any]) -> tuple[Score, Plan | Staged]:
    plan, told = plan_of(row["plan"]), row["score"]
    typed = {"style": Style.from_words(told["style"]), "again": tuple(told["again"]), "apart": tuple(told["apart"])}
    return Score(cell=Cell(*row["cell"]), plan=None, rewrites=plan.rewrites, **{**told, **typed}), plan


def usable(graph: Graph, request: Request, space: Space) -> Iterator[Final]:
    """Plans that were found before and are in a space, simulated anew."""
    for score, plan in _FOUND.get(_key(graph, request), []):
        if score.apart or request.pin.get("zero", score.zero) != score.zero:
            continue
        if plan.rewrites and not request.allows("rewrite"):
            continue
        if not carried(plan.rewrites).items() <= {rule.name: rule.text for rule in request.rules}.items():
            continue
        about = Space({**space.data, "rewrites": [[step.to_json() for step in plan.rewrites]]})
        if feasible(score, request) and about.contains(plan, graph):
            if isinstance(plan, Staged):
                part = micro(graph, plan.micro_batches)
                staged = predict_staged(part, plan, request.cluster, optimizer=request.optimizer)
                yield Final(score, plan, staged)
            else:
                ran = predict(graph, plan, request.cluster, optimizer=request.optimizer)
                yield Final(score, plan, ran)


__all__ = ["across_commands", "forget", "remember", "usable"]
