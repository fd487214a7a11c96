"""One public name, one meaning: a reader who searches for it finds one thing.

`support/shared_names.txt` has the names that still stand in several modules, and why. It may only get shorter: a name
that is no longer shared has to leave it, and no other comes in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "laminar"
SHARED = Path(__file__).parent / "support" / "shared_names.txt"


def names_of(tree: ast.Module) -> Iterator[str]:
    """Public classes, functions, constants and types that a module defines at its top."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for one in node.targets for t in ast.walk(one) if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def shared() -> dict[str, list[str]]:
    """By name, the modules that define it, where there are several."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in sorted(set(names_of(ast.parse(path.read_text())))):
            if not name.startswith("_") and name not in ("T", "K", "V"):
                found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return {name: where for name, where in found.items() if len(where) > 1}


def allowed() -> dict[str, str]:
    """Names that several modules may define, and why."""
    return dict(line.split(": ", 1) for line in SHARED.read_text().splitlines())


def test_a_public_name_is_defined_in_one_module() -> None:
    """Two things of one name are mistaken for each other; those that are left are listed."""
    assert not {name: where for name, where in shared().items() if name not in allowed()}


def test_the_list_of_shared_names_has_none_that_could_leave_it() -> None:
    """What was renamed must not come back."""
    assert not set(allowed()) - set(shared()) and all(allowed().values())
