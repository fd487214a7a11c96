"""Exact mode as values: which logical ranks a job is computed by, and which process hosts which of them.

A job in exact mode is computed by *logical ranks*: units of the batch times slices of the weights times parts of every
sequence, for each stage of the model. They are part of what the job is; a `Hosting` says which process computes which
of them, and is no part of it. Everything that ranks add up is added in a fixed binary tree over logical indices
(`left_size`, `children`), or as integers, so bits don't depend on the hosting.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from laminar.errors import LaminarError, MeshError
from laminar.ir.mesh import Mesh
from laminar.ir.serial.reading import JsonPart

TreeNode = tuple[int, int]
"""A node of the tree: the terms from its first up to and without its second number."""
KINDS_OF_SUM = ("tree", "integers")
"""How terms may be added."""
MOST_AS_INTEGERS = 64
"""Terms: of more, too few bits would be left for each."""
EXAMPLE = "exact=True, exact=laminar.Exact(units=8, slices=1), or on the command line --exact units=8,slices=1"


@dataclass(frozen=True)
class Exact:
    """What bits depend on besides model, data and the machine's kind: fixed when a job first starts, and saved."""

    units: int = 8
    """Parts of the batch. As many processes as there are units times slices can take part, or fewer."""
    slices: int = 1
    """Parts of the weights, as tensor parallelism cuts them; each costs, so only as many as will ever be needed."""
    threads: int = 1
    """Threads of each process: kernels share work out by their number."""
    context: int = 1
    """Parts of every sequence, split by token; each reads the keys and values of the others."""
    sums: str = "tree"
    """How terms are added: up a fixed tree, or as integers, which are added in any order ("integers")."""
    stages: int = 1
    """Parts of the model, cut where work is balanced; a process may host logical ranks of any of them."""

    def __post_init__(self) -> None:
        if self.sums not in KINDS_OF_SUM:
            raise LaminarError(f"exact mode with sums={self.sums!r}", allowed="  ".join(KINDS_OF_SUM), next=EXAMPLE)
        for name in COUNTED:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LaminarError(
                    f"exact mode with {name}={value!r}", allowed="a whole number of at least 1", next=EXAMPLE
                )

        if self.sums == "integers" and self.mesh.ranks > MOST_AS_INTEGERS:
            raise LaminarError(
                f"exact mode with sums of {self.mesh.ranks} logical ranks in integers",
                allowed=f"at most {MOST_AS_INTEGERS} logical ranks",
                next='fewer units, or sums="tree"',
            )

    @staticmethod
    def of(asked: Any) -> Exact | None:
        """What `parallelize(exact=...)` and `--exact` are given: a truth value, an `Exact`, or its numbers as text."""
        if asked is None or asked is False:
            return None
        if isinstance(asked, Exact):
            return asked
        if asked is True or asked == "":
            return Exact()
        if not isinstance(asked, str):
            raise LaminarError(f"exact={asked!r}", allowed=EXAMPLE)
        found: dict[str, Any] = {}
        for item in asked.split(","):
            name, _, value = item.partition("=")
            number = name.strip() in COUNTED and value.strip().isdigit()
            if not number and name.strip() != "sums":
                raise LaminarError(f"exact mode is asked for with {item.strip()!r}", allowed=EXAMPLE)
            found[name.strip()] = int(value) if number else value.strip()
        return Exact(**found)

    @property
    def mesh(self) -> Mesh:
        """The logical ranks of one stage, those of a unit side by side."""
        within = {"context": self.context, "slice": self.slices}
        return Mesh({"unit": self.units} | {name: parts for name, parts in within.items() if parts > 1})

    @property
    def ranks(self) -> int:
        """How many logical ranks there are, one stage's after the other's: the most processes that can take part."""
        return self.stages * self.mesh.ranks

    def to_json(self) -> dict[str, int | str]:
        """Plain data; `from_json` is the inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @staticmethod
    def from_json(part: JsonPart) -> Exact:
        """From `to_json`'s data."""
        numbers = {name: part.get(name, 1).whole(1) for name in COUNTED}
        return Exact(**numbers, sums=part.get("sums", "tree").text())

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


COUNTED = tuple(f.name for f in fields(Exact) if f.name != "sums")
"""The fields of `Exact` that are numbers."""


@dataclass(frozen=True)
class Hosting:
    """Which process computes which logical ranks. Any hosting gives the same bits; fewer and whole subtrees are
    faster.
    """

    processes: tuple[int, ...]
    """For each logical rank the process that hosts it."""

    def __post_init__(self) -> None:
        if not self.processes or set(self.processes) != set(range(max(self.processes) + 1)):
            raise MeshError(
                f"{list(self.processes)} is no hosting",
                allowed="for each logical rank a process; every one from 0 hosts at least one",
            )

    @staticmethod
    def even(ranks: int, processes: int) -> Hosting:
        """Neighbours together, as equal in number as can be."""
        if processes > ranks:
            raise MeshError(
                f"{processes} processes for {ranks} logical ranks",
                allowed=f"at most {ranks} processes",
                next=f"start {ranks}, or begin a job with more units",
            )
        return Hosting(tuple(r * processes // ranks for r in range(ranks)))

    @staticmethod
    def drawn(ranks: int, processes: int, seed: int) -> Hosting:
        """Any hosting, by chance: uneven and scattered."""
        dice = random.Random(seed)
        hosts = [*range(processes), *(dice.randrange(processes) for _ in range(ranks - processes))]
        dice.shuffle(hosts)
        return Hosting(tuple(hosts))

    @staticmethod
    def of_counts(counts: Sequence[int]) -> Hosting:
        """Neighbours together, so many for each process."""
        return Hosting(tuple(p for p, n in enumerate(counts) for _ in range(n)))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return max(self.processes) + 1

    def hosted(self, process: int) -> tuple[int, ...]:
        """The logical ranks of a process."""
        return tuple(r for r, p in enumerate(self.processes) if p == process)

    def to_json(self) -> list[int]:
        """Plain data; `from_json` is the inverse."""
        return list(self.processes)

    @staticmethod
    def from_json(part: JsonPart) -> Hosting:
        """From `to_json`'s data."""
        return Hosting(tuple(p.whole() for p in part.rows()))


# --- the tree -----------------------------------------------------------------------------------


def left_size(terms: int) -> int:
    """How many of a node's terms its left child has: the largest power of two below their number."""
    return 1 << ((terms - 1).bit_length() - 1)


def children(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """The two nodes that a node is the sum of."""
    first, end = node
    middle = first + left_size(end - first)
    return (first, middle), (middle, end)


@lru_cache(maxsize=1 << 12)
def cover(members: tuple[bool, ...]) -> tuple[TreeNode, ...]:
    """The largest nodes of the tree over all terms that are sums of those that are here alone, from left to right."""
    out: list[TreeNode] = []

    def walk(node: TreeNode) -> None:
        here = members[node[0] : node[1]]
        if all(here):
            out.append(node)
        elif any(here):
            for child in children(node):
                walk(child)

    walk((0, len(members)))
    return tuple(out)
