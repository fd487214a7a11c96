"""Signatures of a call, from wherever they come: its rule, a probe, or nothing but replication.

`options` lists them for one axis; `resolve` finds, axis by axis, the one a plan has chosen, and is
where an impossible choice is refused; `follow` places a written-out expansion along given inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from laminar.errors import NoRuleError
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, no_rank_empty, parse, show
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import (
    Call,
    Signature,
    call_of,
    calls_in,
    circulating_blocks,
    localise,
    replicated,
    signatures,
)
from laminar.rules.ops.table import rule_for

Blocks = tuple[tuple[int, tuple[int, ...]], ...]
"""For each dim size, the block counts in circulation: hashable, so that options can be cached."""
Probed = tuple[Signature, ...]


@lru_cache(maxsize=1 << 17)
def options(call: Call, parts: int, blocks: Blocks = (), probed: Probed = ()) -> tuple[Signature, ...]:
    """Every signature of a call on an axis; the replicated one first."""
    if parts == 1:
        return (replicated(call),)
    rule = rule_for(call)
    if rule is not None:
        return tuple(signatures(rule, call, parts, dict(blocks)))
    return (replicated(call), *(s for s in probed if _fits(s, call, parts)))


def _fits(signature: Signature, call: Call, parts: int) -> bool:
    """Probed signatures only speak of dims that divide."""
    pairs = [*zip(signature.ins, call.ins, strict=True), *zip(signature.outs, call.outs, strict=True)]
    return all(
        not isinstance(p, Split)
        or spec is None
        or (spec.shape[p.dim] % parts == 0 and no_rank_empty(spec.shape[p.dim], parts))
        for p, spec in pairs
    )


def probed_signatures(graph: Graph) -> dict[str, Probed]:
    """What probing found, by node."""
    return {
        name: tuple(Signature(tuple(map(parse, ins)), tuple(map(parse, outs))) for ins, outs in rows)
        for name, rows in graph.probed
    }


def blocks_in(graph: Graph) -> Blocks:
    """The block counts that a graph's own views, cats and splits bring up, by dim size."""
    found: dict[int, set[int]] = {}
    for call in dict.fromkeys(calls_in(graph).values()):
        rule = rule_for(call)
        if rule is not None and "(" in rule.text:
            for size, count in circulating_blocks(rule, call):
                found.setdefault(size, set()).add(count)
    return tuple((n, tuple(sorted(k))) for n, k in sorted(found.items()))


@lru_cache(maxsize=1 << 17)
def _resolve(
    call: Call, ins: tuple[NdSbp, ...], outs: tuple[NdSbp, ...], sizes: tuple[int, ...], probed: Probed
) -> Any:
    chosen: list[Signature] = []
    local = call
    for axis, parts in enumerate(sizes):
        want_in = tuple(nd[axis] for nd in ins)
        want_out = tuple(nd[axis] for nd in outs)
        counts = {p.blocks for p in (*want_in, *want_out) if isinstance(p, Split)}
        shapes = {n for s in (*local.ins, *local.outs) if s for n in s.shape}
        blocks = tuple((n, tuple(sorted(_inner(counts, n)))) for n in sorted(shapes))
        found = next(
            (
                s
                for s in options(local, parts, blocks, probed)
                if s.ins == want_in
                and all(o is None or a == b for a, b, o in zip(s.outs, want_out, call.outs, strict=True))
            ),
            None,
        )
        if parts == 1:
            found = replicated(call)
        if found is None:
            return axis, options(local, parts, (), probed)
        chosen.append(found)
        local = localise(local, found, parts)
    return tuple(chosen)


def _inner(counts: Iterable[int], size: int) -> set[int]:
    """Block counts a factor of this size may itself have, given those seen on whole dims."""
    out = set()
    for count in counts:
        out |= {k for k in range(1, count + 1) if count % k == 0 and size % k == 0}
    return out


def resolve(
    call: Call, ins: tuple[NdSbp, ...], outs: tuple[NdSbp, ...], mesh: Mesh, node: Node, probed: Probed = ()
) -> tuple[Signature, ...]:
    """The signature on each axis of an op placed as given, or an error that lists what is allowed."""
    result = _resolve(call, ins, outs, mesh.sizes, probed)
    if result and isinstance(result[0], int):
        axis, allowed = result
        reads = ", ".join(f"{s} {show(p)}" for s, p in zip(call.ins, ins, strict=True))
        raise NoRuleError(
            f"{node.op}({reads}) -> {', '.join(map(show, outs))} has no rule "
            f"on axis {mesh.names[axis]}={mesh.sizes[axis]}",
            tensor=f"%{node.name}",
            at=node.where,
            allowed="   ".join(map(str, allowed)),
            next="change one placement, or add a rule (docs/use/add_a_rule.md)",
        )
    return result  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Placing:
    """Where one node of an expansion reads and writes, per axis."""

    node: Node
    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]


def follow(
    nodes: Sequence[Node],
    given: Mapping[Ref, NdSbp],
    specs: Mapping[Ref, TensorSpec],
    sizes: tuple[int, ...],
    eager: bool = False,
) -> list[Placing]:
    """Place nodes in order so that each fits its inputs; partial values are reduced where nothing passes them.

    Eagerly: a partial value is reduced as soon as it arises, so that all its readers share one reduction.
    """
    calls = {n.name: call_of(n, specs) for n in nodes}
    ins: dict[str, list[tuple[Sbp, ...]]] = {n.name: [] for n in nodes}
    outs: dict[str, list[tuple[Sbp, ...]]] = {n.name: [] for n in nodes}
    for axis, parts in enumerate(sizes):
        here: dict[Ref, Sbp] = {ref: nd[axis] for ref, nd in given.items()}
        for node in nodes:
            call = calls[node.name]
            have = tuple(here[r] for r in node.ins)
            chosen = closest(call, have, parts)
            ins[node.name].append(chosen.ins)
            outs[node.name].append(chosen.outs)
            calls[node.name] = localise(call, chosen, parts)
            arises = eager and not any(isinstance(p, Partial) for p in chosen.ins)
            here.update(
                {Ref(node.name, i): B if arises and isinstance(p, Partial) else p for i, p in enumerate(chosen.outs)}
            )
    return [Placing(n, tuple(zip(*ins[n.name], strict=True)), tuple(zip(*outs[n.name], strict=True))) for n in nodes]


@lru_cache(maxsize=1 << 16)
def closest(call: Call, have: tuple[Sbp, ...], parts: int) -> Signature:
    """The signature that changes its inputs least: slicing is nearly free, gathering is a last resort."""
    counts = {p.blocks for p in have if isinstance(p, Split)}
    shapes = {n for s in (*call.ins, *call.outs) if s for n in s.shape}
    blocks = tuple((n, tuple(sorted(_inner(counts, n)))) for n in sorted(shapes))

    def distance(s: Signature) -> int:
        return sum(_change(a, b) for a, b in zip(have, s.ins, strict=True))

    return min(options(call, parts, blocks), key=distance)


def _change(a: Sbp, b: Sbp) -> int:
    if a == b:
        return 0
    if a == B:
        return 1 if isinstance(b, Split) else 5
    return 10 if isinstance(a, Partial) and b == B else 100
