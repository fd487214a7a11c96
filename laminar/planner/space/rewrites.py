"""Rewrites that are worth a search of their own: a few graphs that compute the same, best expected first.

    found = Variants(graph, request)
    for steps, variant in found: ...          # the graph as captured is the last of them
    found.unexplored                          # moves that were seen and are in none of these

A placement depends on the graph it is for: what merges query, key and value makes one wide product, which is split over
ranks in other ways than three narrow ones. So a variant is not judged by the placement that is best without it: each of
those given here is searched like the captured graph, in the same cells and with bounds of its own, all of them in one
queue (`planner/search/best_first.py`). What is not given here is outside of what the search has proved, and counted.

Which ones to give is decided where it is cheap. Rewrites are made of a model of few layers (`placement/fold.py`): all
sites of a class are rewritten alike, so the steps mean the same at any depth, and folding what was rewritten gives what
rewriting the folded graph gives. Each of these small graphs is spread over all devices by sample and simulated. Data
parallel is a fair judge for that, since it splits no weight and so hides nothing that a rewrite saves or costs; it is
no judge of splitting what is packed, which can only pay where weights are split. Those that are simulated faster than
the graph as captured go to the search, the fastest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laminar.errors import LaminarError
from laminar.forecast.step import machine, timed
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.rewrites import Steps
from laminar.lower.step import step_programs
from laminar.placement import presets
from laminar.placement.fold import Fold, fold
from laminar.planner.space.request import Request
from laminar.planner.tuning import (
    SAME_STEP,
    SEARCHED_VARIANTS,
    SIMULATED_VARIANTS,
    VARIANT_GAIN,
    VARIANT_OP_S,
    VARIANTS_BUDGET,
)
from laminar.rewrite.apply import Rewrite
from laminar.rewrite.rules import REWRITE_RULES
from laminar.rewrite.variants import replayed, variants
from laminar.rules.samples import samples_of

VARIANT_LAYERS = 3
"""Layers of the model on which variants are compared: the first, the last and one that is like all others."""


@dataclass(frozen=True)
class Candidate:
    """A graph to search, and what is expected of it."""

    steps: Steps
    graph: Graph
    expected: float
    """Seconds of a shallow model, data parallel, as a multiple of those of the graph as captured."""


class SearchedVariants:
    """The graphs to search for a model on a cluster, the best expected first; the captured one is always there."""

    def __init__(self, graph: Graph, request: Request, given: int = SEARCHED_VARIANTS) -> None:
        self.unexplored = 0
        """Moves that were seen, and variants that were made, and are not among what is given."""
        self.found = [Candidate((), graph, 1.0)]
        folded = fold(graph)
        shallow = folded.small(VARIANT_LAYERS)
        price = _Price(graph, request)
        room = int(VARIANTS_BUDGET * request.budget_s / VARIANT_OP_S / max(1, len(shallow.nodes)))
        limit = max(1, min(SIMULATED_VARIANTS, room)) if request.allows("rewrite") else 1
        rules = (*REWRITE_RULES, *request.rules)
        moves = variants(shallow, rules, limit=limit, apart=False)
        small = list(moves)
        whole_s = price(shallow) if small[1:] else 1.0
        hopes = [price(v.graph) / whole_s for v in small[1:]]
        # Where nothing is known nothing is hoped for.
        for expected, k in sorted((h if h > 0 else math.inf, k) for k, h in enumerate(hopes, 1)):
            deep = None
            if expected <= 1 - VARIANT_GAIN and len(self.found) <= given:
                steps = _needed(shallow, small[k].applied, rules, price, expected * whole_s)
                deep = _deep(graph, folded, steps)
            if deep is not None and all(deep[0] != c.steps for c in self.found):
                self.found.append(Candidate(deep[0], deep[1], expected))
            else:
                self.unexplored += 1
        self.unexplored += moves.unexplored
        self.found.sort(key=lambda c: c.expected)

    def __iter__(self) -> Iterator[tuple[Steps, Graph]]:
        return ((c.steps, c.graph) for c in self.found)

    def __len__(self) -> int:
        return len(self.found)


def _needed(shallow: Graph, applied: Steps, rules: Sequence[Rewrite], price: _Price, seconds: float) -> Steps:
    """Merging and splitting alone, if tidying up beforehand saves nothing: a compiler may do the same by itself."""
    kinds = {r.name: r.kind for r in rules}
    bare = tuple(s for s in applied if kinds[s.rule])
    made, done = replayed(shallow, bare)
    return bare if bare and done == bare and price(made) <= (1 + SAME_STEP) * seconds else applied


def _deep(graph: Graph, folded: Fold, applied: Steps) -> tuple[Steps, Graph] | None:
    """The steps at full depth, and what they make; nothing where layers are not what they were in the shallow model."""
    made, steps = replayed(graph, applied)
    same = [(s.rule, s.key) for s in steps] == [(s.rule, s.key) for s in applied]
    return (steps, made) if same and fold(made).layers == folded.layers else None


class _Price:
    """Seconds of a graph's step, the batch split over as many devices as divide it."""

    def __init__(self, graph: Graph, request: Request) -> None:
        self.cluster = request.cluster
        self.mesh = Mesh({"dp": math.gcd(samples_of(graph), request.cluster.devices)})
        self.prices = machine(request.cluster, self.mesh, request.optimizer)

    def __call__(self, graph: Graph) -> float:
        try:
            program, then = step_programs(graph, presets.data_parallel(graph, self.mesh))
        except LaminarError:  # an op that no rule can split
            return math.nan
        return timed(program, then, self.cluster, self.prices)[3].step / 1e9
