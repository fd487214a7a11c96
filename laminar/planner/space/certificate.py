"""What a search has proved, as data and in one sentence.

The space (`planner/space/plan_space.py`) says which plans were meant. The bound is below the simulated time of every
plan in it. Cells whose own bound is above the plan that was found are out of the question; those that are left, looked
at or not, set the bound.

Every plan that a search simulates is held against what was proved of its cell. One that is faster shows that the proof
is wrong, and a wrong proof is worth nothing: the certificate is withdrawn, with an event and a sentence that says so.
With LAMINAR_CHECK_BOUNDS=1 in the environment the search ends with an error instead, and asks for the best bound of
every cell that it simulates a plan of.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from laminar.errors import LaminarError, PlanError
from laminar.events import emit
from laminar.ir.planned import Planned

ROUNDING = 1e-6
"""What is simulated is counted in nanoseconds, what is proved in floating point."""


@dataclass(frozen=True)
class Contradiction:
    """A plan that is simulated faster than what was proved of all plans of its kind."""

    plan: str
    step_s: float
    bound_s: float

    def __str__(self) -> str:
        return f"{self.plan} is simulated at {self.step_s * 1e3:.6g} ms, below its bound of {self.bound_s * 1e3:.6g} ms"


def checking() -> bool:
    """Whether a contradiction is to be an error."""
    return os.environ.get("LAMINAR_CHECK_BOUNDS", "") not in ("", "0")


def contradicted(plan: str, step_s: float, bound_s: float) -> Contradiction | None:
    """Whether a simulated plan lies below a bound."""
    return None if step_s >= bound_s * (1 - ROUNDING) else Contradiction(plan, step_s, bound_s)


def withdrawn(found: Iterable[Contradiction | None]) -> tuple[Contradiction, ...]:
    """The contradictions among what was held against bounds: an event for each, or an error where that is wanted.

    Called once, at the end of a search, where nothing that a search tries and gives up can swallow the error.
    """
    wrong = tuple(one for one in found if one is not None)
    if wrong and checking():
        raise LaminarError(f"a bound is wrong: {wrong[0]}", next="report it, with the model and the cluster")
    for one in wrong:
        emit("certificate_withdrawn", plan=one.plan, step_s=one.step_s, bound_s=one.bound_s)
    return wrong


@dataclass(frozen=True)
class Certificate:
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
    interval: tuple[float, float] = (0.0, 0.0)
    """Of the plan's seconds on the machine, 90 %."""
    known: str = ""
    """What prices rest on."""
    contradictions: tuple[Contradiction | str, ...] = ()
    """Plans that show the bound to be wrong: nothing is proved then, and `bound_s` is 0."""
    said: str = ""
    """The sentence, where somebody else wrote it: about samples a second, or about a plan outside of the space."""

    @property
    def gap(self) -> float:
        """How far the plan is from the bound, as a share of its own time."""
        return 1 - self.bound_s / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        if self.said:
            return self.said
        low, high = (100 * (x / self.step_s - 1) for x in self.interval)
        machine = f"Against the machine: {low:+.0f} to {high:+.0f} % (90 %), {self.known}."
        if self.contradictions:
            return (
                f"Nothing is proved about this plan, {self.step_s * 1e3:.4g} ms: the certificate is withdrawn, because "
                f"{self.contradictions[0]}. Please report it, with the model and the cluster. {machine}"
            )
        return (
            f"No plan in space {self.space[:8]} is simulated faster than {self.bound_s * 1e3:.4g} ms; "
            f"this one {self.step_s * 1e3:.4g} ms (gap {100 * self.gap:.1f} %). {machine}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "space": self.space,
            "step_s": self.step_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "cells": {"all": self.cells, "looked_at": self.looked_at, "pruned": self.pruned, "unfit": self.unfit,
                      "unfinished": self.unfinished},
            "outside": list(self.outside),
            **({"withdrawn": [str(c) for c in self.contradictions]} if self.contradictions else {}),
            "sentence": str(self),
        }  # fmt: skip


def certificate(plan: Planned) -> Certificate:
    """What was proved about the space that a plan was searched in."""
    found = plan.account.get("certificate")
    if not isinstance(found, dict) or "sentence" not in found:
        raise PlanError("this plan does not come from a search", next="laminar.plan(graph, cluster) searches")
    cells = found["cells"]
    return Certificate(
        space=found["space"],
        step_s=found["step_s"],
        bound_s=found["bound_s"],
        cells=cells["all"],
        looked_at=cells["looked_at"],
        pruned=cells["pruned"],
        unfit=cells["unfit"],
        unfinished=cells["unfinished"],
        outside=tuple(found["outside"]),
        contradictions=tuple(found.get("withdrawn", ())),
        said=found["sentence"],
    )
