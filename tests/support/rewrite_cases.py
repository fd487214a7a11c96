"""Rewrite rules and graphs that several of them apply to."""

from __future__ import annotations

from functools import cache

from laminar.rewrite.rules import REWRITE_RULES
from laminar.rewrite.variants import Variant, variants
from tests.support import zoo

BY_NAME = {r.name: r for r in REWRITE_RULES}


@cache
def several(name: str, limit: int = 6) -> tuple[Variant, ...]:
    """The first variants of a model."""
    return tuple(variants(zoo.specimen(name).graph, limit=limit))
