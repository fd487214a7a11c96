"""Parts of a model named by pattern: what a plan says about activations, it says about modules or single values.

    blocks.*               each module one level below `blocks`: `*` stands for one part of a path, or a piece of one
    r"blocks\\.(0|2)"       anything else that means something in a regular expression makes the pattern one; of modules
                           inside each other that match, the outermost counts
    %gelu_3  %gelu.*       values, by the names that programs print; always a regular expression
    blocks.*+collectives   what ranks exchange inside is included
    blocks.*-products      products, attention and convolutions inside are left out, and so is what only they need

Each module that matches is one block: all that runs inside it. Patterns match whole names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from laminar.errors import PlanError
from laminar.ir.graph import Graph

WITH_COLLECTIVES = "+collectives"
WITHOUT_PRODUCTS = "-products"
NAMES_SHOWN = 12
"""Names that an error lists."""


@dataclass(frozen=True)
class Picked:
    """What patterns name."""

    blocks: frozenset[str] = frozenset()
    """Paths of modules, none inside another."""
    values: frozenset[str] = frozenset()
    """Ops, by name."""
    exchanging: frozenset[str] = frozenset()
    """Those blocks and values whose collectives are included."""
    sparing: frozenset[str] = frozenset()
    """Those blocks whose products are left out."""

    def block_of(self, module: str) -> str | None:
        """The block that a module is, or is in."""
        while module:
            if module in self.blocks:
                return module
            module = module.rpartition(".")[0]
        return None

    def marks(self, name: str) -> str:
        """What a pattern of this block or value ends in."""
        return WITHOUT_PRODUCTS * (name in self.sparing) + WITH_COLLECTIVES * (name in self.exchanging)

    def value_of(self, line: str) -> str | None:
        """The value that a line makes, or helps to make: an op that is written out has lines `name.0`, `name.1`."""
        name = line if line in self.values else line.partition(".")[0]
        return name if name in self.values else None

    def to_json(self) -> dict[str, list[str]]:
        """Plain data; `from_json` is the inverse."""
        return {f.name: sorted(getattr(self, f.name)) for f in fields(self)}

    @staticmethod
    def from_json(data: Mapping[str, list[str]]) -> Picked:
        """What is named, from `to_json`'s data."""
        return Picked(**{f.name: frozenset(data[f.name]) for f in fields(Picked)})


def pick(graph: Graph, patterns: Sequence[str]) -> Picked:
    """What patterns name in a graph; one that names nothing is refused with what there is."""
    if not patterns:
        return Picked()
    names = _Names(graph)
    blocks: set[str] = set()
    values: set[str] = set()
    exchanging: set[str] = set()
    sparing: set[str] = set()
    for pattern in patterns:
        found = names.matching(pattern)
        single = pattern.startswith("%")
        if not found:
            raise PlanError(
                f"{pattern!r} names no {'value' if single else 'module'} of the model",
                allowed=_some([f"%{n}" for n in names.ops] if single else _families(names.paths)),
                next="`*` stands for one part of a path; patterns match whole names",
            )
        (values if single else blocks).update(found)
        _, marks = _parted(pattern)
        if WITH_COLLECTIVES in marks:
            exchanging.update(found)
        if WITHOUT_PRODUCTS in marks:
            sparing.update(found)
    outer = {b for b in blocks if not _within(b, blocks)}
    return Picked(frozenset(outer), frozenset(values), frozenset(exchanging), frozenset(sparing))


def apart(graph: Graph, recompute: Sequence[str], offload: Sequence[str]) -> tuple[Picked, Picked]:
    """What is recomputed and what waits in the host's memory; whatever both name is refused."""
    again, away = pick(graph, recompute), pick(graph, offload)
    if not (again.blocks or again.values) or not (away.blocks or away.values):
        return again, away
    both = [b for b in sorted(away.blocks) if again.block_of(b)] + [b for b in sorted(again.blocks) if away.block_of(b)]
    both += [f"%{v}" for v in sorted(away.values & again.values)]
    for values, other in ((away.values, again), (again.values, away)):
        both += [f"%{v}" for v in sorted(values) if other.block_of(graph.by_name[v].module)]
    if both:
        raise PlanError(
            f"{both[0]} is both recomputed in backward and sent to the host",
            next="name it in recompute or in offload, not in both",
        )
    return again, away


def known_patterns(graph: Graph, patterns: Sequence[str]) -> tuple[str, ...]:
    """Those patterns that name something in a graph: a stage has only some of the blocks."""
    names = _Names(graph) if patterns else None
    return tuple(p for p in patterns if names is not None and names.matching(p))


class _Names:
    """What can be named in a graph."""

    def __init__(self, graph: Graph) -> None:
        forward = [n for n in graph.nodes if n.phase == "forward"]
        self.ops = [n.name for n in forward]
        self.paths = _paths(tuple(dict.fromkeys([n.module for n in forward])))

    def matching(self, pattern: str) -> list[str]:
        """Ops for a pattern of values, else modules."""
        text, _ = _parted(pattern)
        regex = _regex(text)
        if text.startswith("%"):
            return [n for n in self.ops if regex.fullmatch(f"%{n}")]
        return _outermost(regex, self.paths)


def as_patterns(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """One pattern, several, or none, as a tuple; commas separate several in one text."""
    if given is None:
        return ()
    texts: list[str] = []
    for one in [given] if isinstance(given, str) else given:
        texts += [t.strip() for t in one.split(",")] if isinstance(one, str) and _plain(one) else [one]
    for text in texts:
        if not isinstance(text, str) or not _parted(text)[0]:
            raise PlanError(f"{text!r} is not a pattern", next='write a path such as "blocks.*", or several in a list')
    return tuple(dict.fromkeys(texts))


def _parted(pattern: str) -> tuple[str, tuple[str, ...]]:
    """A pattern without what it ends in, and that."""
    marks: list[str] = []
    while mark := next((m for m in (WITH_COLLECTIVES, WITHOUT_PRODUCTS) if pattern.endswith(m)), None):
        pattern = pattern.removesuffix(mark)
        marks.append(mark)
    return pattern, tuple(marks)


def _plain(text: str) -> bool:
    return re.fullmatch(r"[\w.*, %+-]*", text) is not None


def _regex(text: str) -> re.Pattern[str]:
    try:
        if re.fullmatch(r"[\w.*]+", text):
            return re.compile(re.escape(text).replace(r"\*", "[^.]*"))
        return re.compile(text)
    except re.error as error:
        raise PlanError(f"{text!r} is not a pattern: {error}") from error


@lru_cache(maxsize=1 << 10)
def _paths(modules: tuple[str, ...]) -> tuple[str, ...]:
    """All modules that run something, and those they are in."""
    out: dict[str, None] = {}
    for module in modules:
        parts = module.split(".") if module else []
        out |= dict.fromkeys(".".join(parts[: k + 1]) for k in range(len(parts)))
    return tuple(out)


def _outermost(regex: re.Pattern[str], paths: Sequence[str]) -> list[str]:
    found = dict.fromkeys(p for p in paths if regex.fullmatch(p))
    return [p for p in found if not _within(p, found)]


def _within(path: str, others: Collection[str]) -> bool:
    """Whether it lies inside of one of the others."""
    return any(path[:k] in others for k, letter in enumerate(path) if letter == ".")


def _families(paths: Sequence[str]) -> list[str]:
    """Paths with their numbers as `*`, once each."""
    return list(dict.fromkeys(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", p) for p in paths))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
