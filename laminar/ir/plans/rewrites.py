"""Rewrites that a plan carries: the steps that make the graph it places of the one that was captured.

A plan places the ops of *one* graph, `graph_hash`. Where it carries rewrites, that is the graph after them, and
`captured_hash` is the one they start from. A step names a rule and a class of places, not ops: `rewrite/variants.py`
makes the same steps again on any capture of the model (another batch size, evaluation), and checks on the graph that
the plan was made from that the plan's own graph comes out. A step of a rule that was read from a file carries the
rule's text, so that the file is not needed again. Parameters keep names and shapes, so checkpoints of plans with and
without rewrites are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Applied:
    """One step of a rewrite: a rule, a class of sites, and how many there were."""

    rule: str
    key: str
    sites: int
    text: str = ""
    """The rule itself, in the language of rewrites, where it is in no table of Laminar's."""

    def to_json(self) -> list[Any]:
        """Plain data; `from_json` is the inverse."""
        return [self.rule, self.key, self.sites, *([self.text] if self.text else [])]

    @staticmethod
    def from_json(data: Sequence[Any]) -> Applied:
        """A step from `to_json`'s data."""
        rule, key, sites, *text = data
        if len(text) > 1:
            raise ValueError(f"a step of a rewrite has {len(data)} items, not 3 or 4")
        return Applied(str(rule), str(key), int(sites), *map(str, text))

    def __str__(self) -> str:
        return f"{self.rule} x{self.sites}"


Steps = tuple[Applied, ...]


def rewrites_json(steps: Steps, captured_hash: str) -> dict[str, Any]:
    """What a plan's JSON says of its rewrites: nothing where it has none."""
    return {"rewrites": {"captured": captured_hash, "steps": [s.to_json() for s in steps]}} if steps else {}


def rewrites_from(found: dict[str, Any]) -> tuple[Steps, str]:
    """The inverse, from what a plan's JSON says of its rewrites."""
    return tuple(map(Applied.from_json, found["steps"])), str(found["captured"])


def described(steps: Iterable[Applied]) -> str:
    """Steps in a few words, equal rules together."""
    return ", ".join(f"{rule} x{sites}" for rule, sites in _places(steps).items())


def _places(steps: Iterable[Applied]) -> dict[str, int]:
    """At how many places each rule is applied."""
    count: dict[str, int] = {}
    for step in steps:
        count[step.rule] = count.get(step.rule, 0) + step.sites
    return count


def carried(steps: Iterable[Applied]) -> dict[str, str]:
    """Names and texts of the rules that steps bring along."""
    return {step.rule: step.text for step in steps if step.text}


def carried_sites(steps: Iterable[Applied]) -> dict[str, int]:
    """Of the rules that steps bring along, at how many places each is applied."""
    return _places(step for step in steps if step.text)
