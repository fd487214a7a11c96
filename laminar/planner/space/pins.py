"""Tensors whose placement is fixed by hand, while the rest is searched.

    {"blocks.*.mlp.up.weight": "S(0)"}          on the innermost axis of the mesh: `tp` where there is one
    {"embed.weight": "tp:S(0)"}                 on that axis; meshes that lack it are left out
    {"head.weight": "dp:B;tp:S(0)"}             on several

A pattern names parameters, buffers and leaves of the batch: `*` stands for one part of a path or a piece of one, and
anything else that means something in a regular expression makes the pattern one. What is fixed is how a tensor lies
between ops; ops read it so where that is cheapest. Layers that are alike are planned alike, so a pattern has to name
all of them or none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import Partial, Sbp, Split, check_placement, parse
from laminar.placement.fold import Fold

WRITE = "write 'S(0)', or 'tp:S(0)', or 'dp:B;tp:S(0)'"


@lru_cache(maxsize=1 << 10)
def parsed(text: str) -> tuple[tuple[str, Sbp], ...]:
    """Axis and placement; the axis is empty where none is named."""
    out = []
    for item in text.split(";"):
        axis, colon, placement = item.rpartition(":")
        if colon and not axis.strip():
            raise PlanError(f"{text!r} names no axis", next=WRITE)
        found = parse(placement.strip())
        if isinstance(found, Partial):
            raise PlanError(f"a tensor can't lie as {found}", allowed="S(d)  S(d, blocks=k)  B", next=WRITE)
        out.append((axis.strip(), found))
    return tuple(out)


def axes_named(place: Mapping[str, str]) -> set[str]:
    """Axes without which a mesh can't hold the pins."""
    return {axis for text in place.values() for axis, _ in parsed(text) if axis}


@lru_cache(maxsize=1 << 8)
def pattern(text: str) -> re.Pattern[str]:
    """A path with stars, or a regular expression."""
    try:
        if re.fullmatch(r"[\w.*]+", text):
            return re.compile(re.escape(text).replace(r"\*", "[^.]*"))
        return re.compile(text)
    except re.error as error:
        raise PlanError(f"{text!r} is not a pattern: {error}") from None


def matching(graph: Graph, text: str) -> list[str]:
    """Inputs that a pattern names, by any of their names."""
    regex = pattern(text)
    return [i.name for i in graph.inputs if any(regex.fullmatch(n) for n in (i.name, *i.aliases))]


def pinned(graph: Graph, mesh: Mesh, place: Mapping[str, str]) -> list[dict[str, Sbp]]:
    """What is fixed on each axis of a mesh; later patterns win."""
    out: list[dict[str, Sbp]] = [{} for _ in mesh.sizes]
    for text, placement in place.items():
        for name in matching(graph, text):
            for axis, sbp in parsed(placement):
                out[mesh.axis(axis) if axis else len(out) - 1][name] = sbp
    return out


def checked(graph: Graph, layers: Fold, place: Mapping[str, str]) -> None:
    """Refuse patterns that name nothing, placements that tensors can't have, and some of several layers alike."""
    names = {n: i.name for i in graph.inputs for n in (i.name, *i.aliases)}
    groups = alike(layers)
    for text, placement in place.items():
        found = matching(graph, text)
        if not found:
            raise PlanError(
                f"pin {text!r} names no tensor of the model",
                closest=", ".join(closest_names(text, names)),
                next="`laminar capture --report` lists all names; `*` stands for one part of a path",
            )
        for name in found:
            for _, sbp in parsed(placement):
                if isinstance(sbp, Split):
                    check_placement(graph.input(name).spec, (sbp,), (1,), f"pin {name}")
            missing = sorted(groups.get(name, set()) - set(found))
            if missing:
                raise PlanError(
                    f"pin {text!r} names {name} but not {missing[0]}, which is planned like it",
                    next=f"name all layers: {re.sub(r'[.][0-9]+[.]', '.*.', name)!r}",
                )


def alike(layers: Fold) -> dict[str, set[str]]:
    """For each input of a layer, those that stand in its place in others."""
    inputs = {i.name for i in layers.graph.inputs}
    groups: dict[tuple[str, int, int], set[str]] = {}
    for (_, way, k), node in layers.ops.items():
        for at, ref in enumerate(node.ins):
            if ref.name in inputs:
                groups.setdefault((way, k, at), set()).add(ref.name)
    return {name: group for group in groups.values() for name in group}


def closest_names(text: str, names: Mapping[str, str] | Sequence[str], most: int = 3) -> list[str]:
    """Names that are nearly what was written."""
    known = list(names)
    near = get_close_matches(text, known, most, 0.3)
    if near:
        return near
    words = set(re.findall(r"[A-Za-z]+", text))
    return sorted(known, key=lambda n: -len(words & set(re.findall(r"[A-Za-z]+", n))))[:most]


__all__ = ["alike", "axes_named", "checked", "closest_names", "matching", "parsed", "pinned"]
