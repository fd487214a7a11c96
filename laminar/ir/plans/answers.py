"""Who answers questions about a plan: `plan.explain()`, `plan.why(...)`, `plan.what_if(...)`.

Answers take a simulator and a search, which stand above this room and know it. So plans ask whoever was named with
`answered_by`: `laminar/__init__.py` names the planner (`planner/answers.py`), which is loaded when somebody asks.
What can be asked is `ir.planned.Answers`; nothing here imports anything, so that naming somebody costs no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NAMED: list[Callable[[], Any]] = []


def answered_by(load: Callable[[], Any]) -> None:
    """Name who answers: `load` is called at each question, and gives an `ir.planned.Answers`."""
    _NAMED[:] = [load]


def who_answers() -> Any:
    """An `ir.planned.Answers`."""
    return _NAMED[0]()
