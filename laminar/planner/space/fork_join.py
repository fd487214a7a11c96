"""Where a model forks and joins again: ops between the two that do not wait for each other.

Forward is a graph of ops with a beginning, from which whatever reads no other op starts, and an end, the loss. A region
lies between an op that joins and the last op that every way to it passes, or between an op that forks and the first one
that every way from it passes: dominators, one walk over the program in each direction. Inside a region, ops that are
connected belong together; those that are not are its *branches*, and may run at the same time. Between two branches
there is nothing to exchange, only with what comes before and what comes behind.

Values may leave a region on other ways than through its join (a tower that has a loss of its own), or come into it on
other ways than through its fork: such ways end behind all branches or begin before them, so no two of the three ever
wait for each other. In a series-parallel graph the regions are its parallel parts, each once.

Masks, positions and casts of weights belong to whoever reads them and are no ops here, nor is anything that the loss
does not need. Where branches may run is not the business of this file: see `planner/search/best_first/branches.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from laminar.ir.graph import Graph
from laminar.lower.stages.split_stages import light_ops

BEGINNING = ""
"""The fork of a region whose branches read inputs only."""

OpReads = Mapping[str, Sequence[str]]
"""For each op, in an order in which they can run, the ops that it reads."""


@dataclass(frozen=True)
class Region:
    """Branches between a fork and a join."""

    fork: str
    join: str
    branches: tuple[frozenset[str], ...]
    """In the order of their first ops."""

    @property
    def inside(self) -> frozenset[str]:
        """All ops of all branches."""
        return frozenset().union(*self.branches)


def forward_reads(graph: Graph) -> dict[str, list[str]]:
    """What forward ops that the loss needs read of each other, the loss last."""
    light = light_ops(graph)
    ops = {n.name: n for n in graph.nodes if n.phase == "forward" and n.name not in light}
    needed = {o.ref.name for o in graph.outputs if o.kind == "loss"}
    for node in reversed(ops.values()):
        if node.name in needed:
            needed.update(r.name for r in node.ins)
    return {
        name: list(dict.fromkeys(r.name for r in node.ins if r.name in ops))
        for name, node in ops.items()
        if name in needed
    }


def regions(reads: OpReads) -> list[Region]:
    """All regions of a graph with two branches or more, in the order of their joins; the last op is the end of all."""
    if not reads:
        return []
    names = list(reads)
    number = {name: k for k, name in enumerate(names, 1)}  # 0 is the beginning
    before: list[list[int]] = [[], *(sorted(number[r] for r in reads[n]) or [0] for n in names)]
    behind: list[list[int]] = [[] for _ in before]
    for k, own in enumerate(before):
        for r in own:
            behind[r].append(k)
    end = len(names)
    above = _dominators(before)
    # The same backwards, where the end is the beginning; an op that nobody reads leads to the end as well.
    turned = [[end - u for u in behind[k]] if behind[k] or k == end else [0] for k in range(end, -1, -1)]
    below = [end - d for d in reversed(_dominators(turned))]
    found: dict[tuple[int, int], None] = {}
    for j in range(1, end + 1):
        if len(before[j]) > 1:
            found[above[j], j] = None
    for f in range(end):
        if len(behind[f]) > 1:
            found[f, below[f]] = None
    out = []
    for f, j in sorted(found, key=lambda pair: (pair[1], -pair[0])):
        inside = _between(before, behind, f, j, above, below)
        branches = list(_parts(inside, before))
        if len(branches) > 1:
            named = (frozenset(names[k - 1] for k in branch) for branch in sorted(branches, key=min))
            out.append(Region(names[f - 1] if f else BEGINNING, names[j - 1], tuple(named)))
    return out


def _dominators(before: Sequence[Sequence[int]]) -> list[int]:
    """For each op, the last one that every way to it passes. Numbers follow an order in which ops can run."""
    out, depth = [0] * len(before), [0] * len(before)
    for k in range(1, len(before)):
        at = before[k][0]
        for other in before[k][1:]:
            while at != other:
                if depth[at] >= depth[other]:
                    at = out[at]
                else:
                    other = out[other]
        out[k], depth[k] = at, depth[at] + 1
    return out


def _between(
    before: Sequence[Sequence[int]],
    behind: Sequence[Sequence[int]],
    f: int,
    j: int,
    above: Sequence[int],
    below: Sequence[int],
) -> set[int]:
    """What lies between: all that leads to the join if the fork is on every way to it, else all that the fork gives to.

    Where both hold, either way comes to the same, but for values that leave the region or come into it.
    """
    start, steps, stop = (j, before, f) if above[j] == f else (f, behind, j)
    seen, todo = {start, stop}, [start]
    while todo:
        for k in steps[todo.pop()]:
            if k not in seen:
                seen.add(k)
                todo.append(k)
    return seen - {start, stop}


def _parts(inside: set[int], before: Sequence[Sequence[int]]) -> Iterator[set[int]]:
    """Ops that are connected with each other, whichever way."""
    home = {k: k for k in inside}

    def root(k: int) -> int:
        while home[k] != k:
            home[k] = k = home[home[k]]
        return k

    for k in inside:
        for r in before[k]:
            if r in home:
                home[root(k)] = root(r)
    parts: dict[int, set[int]] = {}
    for k in inside:
        parts.setdefault(root(k), set()).add(k)
    yield from parts.values()
