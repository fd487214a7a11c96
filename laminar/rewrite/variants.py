"""Rewrites of a graph as a space to search: equivalent graphs, the promising ones first.

    for variant in variants(graph, limit=40):
        variant.graph, variant.applied, variant.change, variant.unexplored

The first variant is the graph itself. The second has had every `tidy` rule applied where that saves time. From there
on a *move* rewrites all sites of a class at once, every block of a model alike. What merging and splitting rules do
about the same parameters (the products of query, key and value in forward, their gradients, the gradient of what they
read) is one move, because a planner hardly ever wants one without the others; the parts by themselves come when there
is nothing else left to try. Moves are made in the order of what the roofline of one device expects of them: it knows
nothing of placements, so it only says what to look at first. `unexplored` counts the moves that were seen and not
made, those ruled out as too slow included: what the search has not looked at, and so can't vouch for.

A plan keeps `applied`; `replay` makes the same rewrite of a freshly captured graph, of another batch size too, and
`rewritten` gives the graph that a plan places for one that was captured: whoever has a plan and a captured graph asks
it first, and lowers what it gives.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.rewrites import Applied, Steps
from laminar.ir.plans.staged import Staged
from laminar.rewrite.apply import Rewrite, Site, Work, rewrite, work_of
from laminar.rewrite.edit import Lookup
from laminar.rewrite.rules import REWRITE_RULES

__all__ = [
    "REWRITE_RULES",
    "Applied",
    "Rewrite",
    "Site",
    "Variant",
    "Variants",
    "Work",
    "carrying",
    "replay",
    "replayed",
    "rewritten",
    "tidied",
    "variants",
    "work_of",
]

SLACK = 1.1
"""Moves that a roofline expects to make a step slower than this times the best are not made. Chosen: splitting every
packed projection costs the smallest GPT of the examples 9 % by that roofline, and a GPT-2 medium 0.04 %."""


@dataclass(frozen=True)
class Variant:
    """A graph that computes the same."""

    graph: Graph
    applied: tuple[Applied, ...]
    change: Work
    """What it does more than the graph it was made from, on one device."""
    unexplored: int
    """Moves known when this was found that nobody has made yet; `Variants.unexplored` goes on counting."""

    def __str__(self) -> str:
        done = ", ".join(map(str, self.applied)) or "as captured"
        return f"{done}: {self.change.ops:+d} ops, {self.change.moved_bytes:+.3g} bytes, {self.change.flops:+.3g} flops"


@dataclass(frozen=True)
class _State:
    look: Lookup
    applied: tuple[Applied, ...]
    work: Work
    lone: int = 0
    """Moves on the way here that took apart what belongs together."""


VariantMove = tuple[tuple[Rewrite, str], ...]


class Variants(Iterator[Variant]):
    """Equivalent graphs one by one; `unexplored` is up to date, after the last one too."""

    def __init__(self, graph: Graph, rules: Sequence[Rewrite], limit: int, slack: float, apart: bool) -> None:
        self.rules, self.limit, self.slack, self.apart = rules, limit, slack, apart
        self.waiting: list[tuple[int, float, int, _State, VariantMove]] = []
        self.pruned = 0
        """Moves that were expected to be too slow, or that nobody wants."""
        self.best_s = float("inf")
        self._count = itertools.count()
        self._found = self._search(graph)

    def __next__(self) -> Variant:
        return next(self._found)

    @property
    def unexplored(self) -> int:
        """Moves that were seen and not made."""
        return self.pruned + len(self.waiting)

    def _search(self, graph: Graph) -> Iterator[Variant]:
        look = Lookup(graph)
        whole = work_of(look)
        after, steps = _tidied(look, self.rules)
        states = [_State(look, (), whole), *([_State(after, steps, work_of(after))] if steps else [])]
        self._push(states[-1])
        seen = {s.look.identity() for s in states}
        for state in states[: self.limit]:
            yield Variant(state.look.graph, state.applied, state.work - whole, self.unexplored)
        left = self.limit - len(states)
        while self.waiting and left > 0:
            lone, _, _, parent, move = heapq.heappop(self.waiting)
            child = _make(parent, move, lone)
            if child is None or (name := child.look.identity()) in seen:
                continue
            seen.add(name)
            self._push(child)
            left -= 1
            yield Variant(child.look.graph, child.applied, child.work - whole, self.unexplored)

    def _push(self, state: _State) -> None:
        self.best_s = min(self.best_s, state.work.seconds)
        for move, gain_s, lone in _moves(state.look, self.rules):
            expected_s = state.work.seconds - gain_s
            if expected_s > self.slack * self.best_s or (lone and not self.apart):
                self.pruned += 1
            else:
                heapq.heappush(self.waiting, (state.lone + lone, expected_s, next(self._count), state, move))


def variants(
    graph: Graph,
    rules: Sequence[Rewrite] = REWRITE_RULES,
    limit: int = 64,
    slack: float = SLACK,
    apart: bool = True,
) -> Variants:
    """Equivalent graphs, at most `limit`, this one first; ends early if there are no more.

    Unless `apart`, moves that take apart what belongs together are not made, and count as not looked at.
    """
    return Variants(graph, rules, limit, slack, apart)


def tidied(graph: Graph, rules: Iterable[Rewrite] = REWRITE_RULES) -> tuple[Graph, tuple[Applied, ...]]:
    """The graph with every tidy rule applied wherever it saves something, until there is nothing left to do."""
    look, steps = _tidied(Lookup(graph), rules)
    return look.graph, steps


def _tidied(look: Lookup, rules: Iterable[Rewrite]) -> tuple[Lookup, tuple[Applied, ...]]:
    tidy = [r for r in rules if r.tidy]
    steps: list[Applied] = []
    while True:
        done = len(steps)
        found = [(rule, key, _saves(sites)) for rule in tidy for key, sites in _classes(rule, look)]
        for rule, key, saved in sorted(found, key=lambda f: f[2], reverse=True):
            sites = [s for s in rule.find(look) if s.key == key] if saved > (0.0, 0) else []
            if _saves(sites) > (0.0, 0):  # still, after what others have done
                made, count = rewrite(look, rule, sites)
                if count:
                    look = made
                    steps.append(rule.step(key, count))
        if len(steps) == done:
            return look, tuple(steps)


def _saves(sites: Sequence[Site]) -> tuple[float, int]:
    """Seconds, then nodes, saved at each of these sites; nothing where one of them would lose."""
    return min(((s.gain_s, s.fewer) for s in sites), default=(0.0, 0))


def replay(
    graph: Graph, applied: Iterable[Applied], rules: Iterable[Rewrite] = REWRITE_RULES, other_depth: bool = False
) -> Graph:
    """The same steps on another capture of the same model; one that finds other sites is refused.

    `other_depth`: as many sites as there are, but some. A model of two blocks then stands for one of a hundred, whose
    rewrites take longer to look through.
    """
    steps = tuple(applied)
    made, counts = _replayed(graph, steps, rules)
    for step, done in zip(steps, counts, strict=True):
        if done != step.sites and not (other_depth and done):
            raise PlanError(
                f"rewrite {step.rule} was made at {step.sites} places of class {step.key}, this graph has {done}",
                next="plan for this model again",
            )
    return made


def replayed(graph: Graph, applied: Iterable[Applied], rules: Iterable[Rewrite] = REWRITE_RULES) -> tuple[Graph, Steps]:
    """As many of these steps as there are places for, and those that were made, each with its number of places.

    A graph for evaluation has no backward pass, one in another precision has casts in between: what does not fit there
    is left as it was captured.
    """
    steps = tuple(applied)
    made, counts = _replayed(graph, steps, rules)
    return made, tuple(replace(s, sites=done) for s, done in zip(steps, counts, strict=True) if done)


def _replayed(graph: Graph, steps: Steps, rules: Iterable[Rewrite]) -> tuple[Graph, list[int]]:
    named = {r.name: r for r in rules}
    look, counts = Lookup(graph), []
    for step in steps:
        if not step.text and step.rule not in named:
            raise PlanError(f"no rewrite rule is called {step.rule}", allowed="  ".join(named))
        rule = Rewrite.of_file(step.rule, step.text) if step.text else named[step.rule]
        sites = [s for s in rule.find(look) if s.key == step.key]
        look, done = rewrite(look, rule, sites) if sites else (look, 0)
        counts.append(done)
    return look.graph, counts


def rewritten(graph: Graph, plan: Plan | Staged) -> Graph:
    """The graph that a plan places, from one that was captured; with no rewrites in the plan, that itself.

    On the graph that the plan was made from every step must be made as it was, and the plan's graph come out. Of other
    graphs of the model (another batch size, evaluation) as much is rewritten as fits.
    """
    if not plan.rewrites or graph.hash == plan.graph_hash:
        return graph
    if graph.hash != plan.captured_hash:
        return replayed(graph, plan.rewrites)[0]
    made = replay(graph, plan.rewrites)
    if made.hash != plan.graph_hash:
        raise PlanError(
            f"the rewrites of plan {plan.hash[:12]} make graph {made.hash[:12]}, it is for {plan.graph_hash[:12]}",
            next="its rules have changed since: plan for this model again",
        )
    return made


AnyPlan = TypeVar("AnyPlan", Plan, Staged)


def carrying(plan: AnyPlan, captured: Graph, steps: Steps) -> AnyPlan:
    """A plan for the graph that these steps have made of a captured one, with the steps in it."""
    return replace(plan, rewrites=steps, captured_hash=captured.hash if steps else "")


def _classes(rule: Rewrite, look: Lookup) -> list[tuple[str, list[Site]]]:
    out: dict[str, list[Site]] = {}
    for site in rule.find(look):
        out.setdefault(site.key, []).append(site)
    return list(out.items())


def _moves(look: Lookup, rules: Sequence[Rewrite]) -> Iterator[tuple[VariantMove, float, bool]]:
    """What can be done next, with the seconds it is hoped to save, and whether it takes apart what belongs together."""
    bundles: dict[tuple[str, frozenset[frozenset[str]]], list[tuple[Rewrite, str, list[Site]]]] = {}
    for rule in rules:
        for key, sites in _classes(rule, look):
            about = frozenset(tie for s in sites for tie in s.ties)
            if (rule.kind or rule.shared) and frozenset() not in about:
                bundles.setdefault((rule.kind, about), []).append((rule, key, sites))
            elif rule.kind or sum(s.gain_s for s in sites) > 0:
                yield ((rule, key),), sum(s.gain_s for s in sites), False
    for (kind, _), classes in bundles.items():
        hope_s = _hope_s([sites for _, _, sites in classes], bool(kind))
        if kind or hope_s > 0:
            yield tuple((rule, key) for rule, key, _ in classes), hope_s, False
        for rule, key, sites in classes if len(classes) > 1 else []:
            gain_s = sum(s.gain_s for s in sites)
            if kind or gain_s > 0:
                yield ((rule, key),), gain_s, True


def _hope_s(classes: Sequence[Sequence[Site]], shared_writing: bool) -> float:
    """What classes save together at best. Either they share what they write, so that each alone looks worse than it is,
    or what is inside them, which goes away once."""
    if len(classes) == 1:
        return sum(s.gain_s for s in classes[0])
    if shared_writing:
        return sum(max(sum(s.gain_s for s in sites), 0.0) for sites in classes)
    inside_s = max(sum(s.hope_s - s.gain_s for s in sites) for sites in classes)
    return sum(s.gain_s for sites in classes for s in sites) + inside_s


def _make(parent: _State, move: VariantMove, lone: int) -> _State | None:
    look, steps = parent.look, list(parent.applied)
    for rule, key in move:
        sites = [s for s in rule.find(look) if s.key == key]
        if not sites:
            return None
        look, done = rewrite(look, rule, sites)
        if not done:
            return None
        steps.append(rule.step(key, done))
    return _State(look, tuple(steps), work_of(look), lone)
