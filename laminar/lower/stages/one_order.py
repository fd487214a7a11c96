"""All firings of a pipeline in one order, for processes that may compute parts of any stage.

Each process runs those firings of the order that it has a share in, and waits for what a firing needs from others. As
all go by one order, in which nothing stands before what it needs, no two can wait for each other. It follows 1F1B: a
stage begins as many micro-batches as there are stages from it to the last, then ends one before it begins the next. So
processes with stages of their own are at work at the same time.
"""

from __future__ import annotations

import itertools

from laminar.errors import NetError
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


def one_order(made: Stages, micro_batches: int) -> list[Turn]:
    """Every part of every stage once for each micro-batch."""
    needs: dict[str, set[str]] = {p.name: set() for parts in made.parts for p in parts}
    for parts in made.parts:
        for before, part in itertools.pairwise(parts):
            needs[part.name].add(before.name)
    for maker, reader, _ in carriers(made):
        needs[reader.name].add(maker.name)
    begun, out = dict.fromkeys(needs, 0), list[Turn]()
    while len(out) < len(needs) * micro_batches:
        ready = [
            [p for p in parts if begun[p.name] < micro_batches and all(begun[n] > begun[p.name] for n in needs[p.name])]
            for parts in made.parts
        ]
        turns = [max(some, key=lambda p: parts.index(p)) for some, parts in zip(ready, made.parts, strict=True) if some]
        held = [p for p in turns if p is not made.parts[p.stage][0] or _under_way(made, begun, p) < _ahead(made, p)]
        if not turns:
            raise NetError("stages wait for each other", next="cut the model elsewhere")
        for part in held or turns[:1]:
            out.append((part.name, begun[part.name]))
            begun[part.name] += 1
    return out


def _under_way(made: Stages, begun: dict[str, int], part: Part) -> int:
    """Micro-batches that a stage has begun and not ended."""
    return begun[part.name] - begun[made.parts[part.stage][-1].name]


def _ahead(made: Stages, part: Part) -> int:
    """How many micro-batches a stage may have under way; of a stage without backward nothing is kept."""
    return len(made.parts) - part.stage if len(made.parts[part.stage]) > 1 else 1
