"""What a search has proved, as data and in one sentence.

The space (`planner/space/plan_space.py`) says which plans were meant. The bound is below the simulated time of every
plan in it. Cells whose own bound is above the plan that was found are out of the question; those that are left, looked
at or not, set the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laminar.ir.serial.reading import JsonPart
from laminar.ir.serial.records import Record


@dataclass(frozen=True)
class Contradiction:
    """A plan that is simulated faster than what was proved of all plans of its kind."""

    plan: str
    step_s: float
    bound_s: float

    def __str__(self) -> str:
        return f"{self.plan} is simulated at {self.step_s * 1e3:.6g} ms, below its bound of {self.bound_s * 1e3:.6g} ms"


@dataclass(frozen=True)
class Certificate(Record):
    """No plan of the space is simulated to be faster than `bound_s`."""

    space: str
    """Its hash."""
    step_s: float
    bound_s: float
    cells: int
    looked_at: int
    pruned: int
    unfit: int
    unfinished: int
    outside: tuple[str, ...] = ()
    """What the space leaves out, in words."""
    interval: tuple[float, float] | None = None
    """Of the plan's seconds on the machine, 90 %."""
    known: str = ""
    """What prices rest on."""
    contradictions: tuple[Contradiction | str, ...] = ()
    """Plans that show the bound to be wrong: nothing is proved then, and `bound_s` is 0."""
    covers_plan: bool = True
    """Whether the plan itself lies in the space."""
    said: str = field(default="", compare=False)
    """The sentence, where somebody else wrote it: about samples a second, or about a plan outside of the space."""

    @property
    def gap(self) -> float:
        """How far the plan is from the bound, as a share of its own time."""
        return 1 - self.bound_s / self.step_s if self.step_s else 0.0

    @property
    def against_machine(self) -> str:
        """How far off predictions may be, as a sentence; nothing where that is not known."""
        if self.interval is None:
            return ""
        low, high = (100 * (x / self.step_s - 1) for x in self.interval)
        return f" Against the machine: {low:+.0f} to {high:+.0f} % (90 %), {self.known}."

    def __str__(self) -> str:
        if self.said:
            return self.said
        if self.contradictions:
            return (
                f"Nothing is proved about this plan, {self.step_s * 1e3:.4g} ms: the certificate is withdrawn, because "
                f"{self.contradictions[0]}. Please report it, with the model and the cluster.{self.against_machine}"
            )
        return (
            f"No plan in space {self.space[:8]} is simulated faster than {self.bound_s * 1e3:.4g} ms; "
            f"this one {self.step_s * 1e3:.4g} ms (gap {100 * self.gap:.1f} %).{self.against_machine}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the sentence for whoever reads the file."""
        return {
            "space": self.space,
            "step_s": self.step_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "cells": {
                "all": self.cells,
                "looked_at": self.looked_at,
                "pruned": self.pruned,
                "unfit": self.unfit,
                "unfinished": self.unfinished,
            },
            "outside": list(self.outside),
            **({"interval": list(self.interval), "known": self.known} if self.interval else {}),
            **({} if self.covers_plan else {"covers_plan": False}),
            **({"withdrawn": [str(c) for c in self.contradictions]} if self.contradictions else {}),
            "sentence": str(self),
        }

    @classmethod
    def from_part(cls, part: JsonPart) -> Certificate:
        """Read; the sentence is taken as it is written."""
        cells, interval = part["cells"], part.get("interval", None)
        return cls(
            space=part["space"].text(),
            step_s=part["step_s"].number(),
            bound_s=part["bound_s"].number(),
            cells=cells["all"].whole(),
            looked_at=cells["looked_at"].whole(),
            pruned=cells["pruned"].whole(),
            unfit=cells["unfit"].whole(),
            unfinished=cells["unfinished"].whole(),
            outside=tuple(text.text() for text in part["outside"].rows()),
            interval=None if interval.value is None else _pair(interval),
            known=part.get("known", "").text(),
            contradictions=tuple(text.text() for text in part.get("withdrawn", []).rows()),
            covers_plan=part.get("covers_plan", True).flag(),
            said=part["sentence"].text(),
        )


def _pair(part: JsonPart) -> tuple[float, float]:
    low, high = part.rows(2)
    return low.number(), high.number()
