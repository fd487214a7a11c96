"""Simulated plans held against what was proved of their cells.

Every plan that a search simulates is held against its bound. One that is faster shows that the proof is wrong, and a
wrong proof is worth nothing: the certificate (`ir/certificate.py`) is withdrawn, with an event and a sentence that says
so. With LAMINAR_CHECK_BOUNDS=1 in the environment the search stops there instead, and asks for the best bound of every
cell that it simulates a plan of.
"""

from __future__ import annotations

import os

from laminar.errors import LaminarError
from laminar.events import emit
from laminar.ir.certificate import Contradiction

ROUNDING = 1e-6
"""What is simulated is counted in nanoseconds, what is proved in floating point."""


def checking() -> bool:
    """Whether a contradiction is to end the search."""
    return os.environ.get("LAMINAR_CHECK_BOUNDS", "") not in ("", "0")


def contradicted(plan: str, step_s: float, bound_s: float) -> Contradiction | None:
    """Whether a simulated plan lies below a bound; ends the search if that is wanted."""
    if step_s >= bound_s * (1 - ROUNDING):
        return None
    found = Contradiction(plan, step_s, bound_s)
    if checking():
        raise LaminarError(f"a bound is wrong: {found}", next="report it, with the model and the cluster")
    emit("certificate_withdrawn", plan=plan, step_s=step_s, bound_s=bound_s)
    return found
