"""Simulated plans held against what was proved of their cells.

Every plan that a search simulates is held against its bound. One that is faster shows that the proof is wrong, and a
wrong proof is worth nothing: the certificate (`ir/plans/certificate.py`) is withdrawn, with an event and a sentence
that says so. With LAMINAR_CHECK_BOUNDS=1 in the environment the search ends with an error instead, and asks for the
best bound of every cell that it simulates a plan of.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from laminar.errors import LaminarError
from laminar.events import emit
from laminar.ir.plans.certificate import Contradiction

ROUNDING = 1e-6
"""What is simulated is counted in nanoseconds, what is proved in floating point."""


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
