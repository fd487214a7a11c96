"""All firings of a pipeline in one order, for processes that may compute parts of any stage.

Each process runs those firings of the order that it has a share in, and waits for what a firing needs from others. As
all go by one order, in which nothing stands before what it needs, no two can wait for each other. It follows 1F1B: a
stage begins as many micro-batches as there are stages from it to the last, then ends one before it begins the next. So
processes with stages of their own are at work at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from laminar.errors import NetError, PlanError
from laminar.lower.stages.stage_programs import Part, Stages

Turn = tuple[str, int]
"""A part by name, and a micro-batch."""


def carriers(made: Stages) -> list[tuple[Part, Part, int]]:
    """For each value that passes between stages the part that makes it, the first that reads it, and its number."""
    out = []
    for n, wire in enumerate(made.wires):
        edge = wire.edge
        maker = next(p for p in made.parts[edge.src] if edge.name in p.gives)
        reader = next(p for p in made.parts[edge.dst] if edge.name in p.takes)
        out.append((maker, reader, n))
    return out


def one_order(sizes: Sequence[Stages]) -> list[Turn]:
    """Every part of every stage once for each micro-batch; `sizes` has for each what it passes through."""
    made = sizes[0]
    needs = _needs(made)
    for other in sizes[1:]:
        if other is not made:
            theirs = _needs(other)
            if theirs.keys() != needs.keys():
                odd = sorted(theirs.keys() ^ needs.keys())[0]
                raise PlanError(
                    f"micro-batches of another size have, or have not, part {odd} of their stage",
                    next="use micro-batches of one size",
                )
            for name, before in theirs.items():
                needs[name] |= before
    begun, out = dict.fromkeys(needs, 0), list[Turn]()
    while len(out) < len(needs) * len(sizes):
        ready = [
            [p for p in parts if begun[p.name] < len(sizes) and all(begun[n] > begun[p.name] for n in needs[p.name])]
            for parts in made.parts
        ]
        turns = [max(some, key=parts.index) for some, parts in zip(ready, made.parts, strict=True) if some]
        if not turns:
            raise NetError("stages wait for each other", next="cut the model elsewhere")
        held = [p for p in turns if p is not made.parts[p.stage][0] or _under_way(made, begun, p) < _ahead(made, p)]
        for part in held or turns[:1]:
            out.append((part.name, begun[part.name]))
            begun[part.name] += 1
    return out


def _needs(made: Stages) -> dict[str, set[str]]:
    """For each part those that have to run before it."""
    needs: dict[str, set[str]] = {p.name: set() for parts in made.parts for p in parts}
    for parts in made.parts:
        for before, part in itertools.pairwise(parts):
            needs[part.name].add(before.name)
    for maker, reader, _ in carriers(made):
        needs[reader.name].add(maker.name)
    return needs


def _under_way(made: Stages, begun: dict[str, int], part: Part) -> int:
    """Micro-batches that a stage has begun and not ended."""
    return begun[part.name] - begun[made.parts[part.stage][-1].name]


def _ahead(made: Stages, part: Part) -> int:
    """How many micro-batches a stage may have under way; of a stage without backward nothing is kept."""
    return len(made.parts) - part.stage if len(made.parts[part.stage]) > 1 else 1
