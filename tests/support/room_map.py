"""The map of the package in docs/architecture.md, made from the folders themselves."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "laminar"


def rows() -> list[str]:
    """A row for each folder: what it says of itself, and its modules."""
    out = ["| folder | what it is | modules |", "|---|---|---|"]
    for init in sorted(PACKAGE.rglob("__init__.py")):
        folder = init.parent
        if folder != PACKAGE:
            said = (ast.get_docstring(ast.parse(init.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            modules = " ".join(sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__"))
            out.append(f"| `{folder.relative_to(PACKAGE)}` | {said} | {modules} |")
    return out


if __name__ == "__main__":
    print("\n".join(rows()))
