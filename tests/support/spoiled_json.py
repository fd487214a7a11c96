"""JSON files as people and merges spoil them: one to three random edits of a value somewhere in the file.

Used by the tests of files that users may edit; collects nothing itself.
"""

from __future__ import annotations

import copy
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2.5, 1e30, -0.5, "", "x", "B", "S(0)", "S(1)", "S(7)", "S(-1)",
    "S(0, blocks=2)", "P(sum)", "P(max)", "B|B", "S(0)|B", "S(0)|S(0)", [], {}, [[]], [None], {"a": 2}, {"dp": 4},
    {"ref": ["x", 0]}, "f32[3,4]", "f99[1]", "1f1b", 10**12,
)  # fmt: skip


def paths(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a document is."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [at, *(p for key, value in inside for p in paths(value, (*at, key)))]


def mutated(data: Any, rng: random.Random) -> tuple[Any, str]:
    """A document with a few edits, and what they are."""
    data = copy.deepcopy(data)
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        # Parts of a document are hit alike, however many values each has.
        at: tuple[Any, ...] = ()
        here = data
        while isinstance(here, (dict, list)) and here and (not at or rng.random() < 0.8):
            key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
            at, here = (*at, key), here[key]
        if not at:
            continue
        parent = data
        for key in at[:-1]:
            parent = parent[key]
        data, what = _edited(data, parent, at, rng)
        said.append(f"{what} {at}")
    return data, "; ".join(said)


def _edited(data: Any, parent: Any, at: tuple[Any, ...], rng: random.Random) -> tuple[Any, str]:
    key = at[-1]
    how = rng.choice(("odd", "odd", "drop", "swap", "copy", "nudge", "wrap", "rename"))
    if how == "drop":
        del parent[key]
    elif how == "swap" and len(parent) > 1:
        other = rng.choice([k for k in (parent if isinstance(parent, dict) else range(len(parent))) if k != key])
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "copy" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif how == "copy":
        parent[f"{key}_again"] = copy.deepcopy(parent[key])
    elif how == "nudge" and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = parent[key] + rng.choice((-1, 1, 0.5, 10**6))
    elif how == "wrap":
        parent[key] = rng.choice(([parent[key]], {"value": parent[key]}, str(parent[key])))
    elif how == "rename" and isinstance(parent, dict):
        parent[rng.choice(("x", "batch.0", f"{key}.x"))] = parent.pop(key)
    else:
        how = "odd"
        parent[key] = copy.deepcopy(rng.choice(ODD))
    return data, how
