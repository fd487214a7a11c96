"""Recompute as a plan decides it: what blocks make inside is dropped after forward and recomputed in backward.

A plan names blocks (modules) and values; see `ir/plans/patterns.py`. Of a block only what comes in from outside is
kept, and the ops that lead from there to what backward reads run once more, each right before the first line of
backward that needs it. What backward does not read is not recomputed: a block's last ops seldom are.

    outputs      of a block that somebody else needs in backward too (the next block starts from it) are kept
                 anyway, and so never recomputed; nor is what they are a view of.
    collectives  are not repeated unless the pattern says so: what they made is kept like an input of the block.
    products     of blocks that spare them (`blocks.*-products`) are kept in the same way: only what costs little, norms
                 and activations, is recomputed.
    weights      that are put together from pieces (ZeRO 3) are the exception: they are never kept from forward to
                 backward, with or without recompute. They are gathered for recompute, and the same gathered
                 weight serves the block's backward.
    draws        have a key, so a mask that is recomputed is the same mask.
    statistics   of batch norm leave forward as new buffers, once; lines that run again only serve backward.

The same ops run on the same values, some of them twice, so that results are those of the plan without
recompute, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from laminar.cost.ops.families import COMPUTES, family_of
from laminar.ir.graph import map_refs
from laminar.ir.ops import FREE
from laminar.ir.plans.account import RecomputeSaving
from laminar.ir.plans.patterns import Picked
from laminar.ir.program import Instr, Placed, Program
from laminar.ir.serial.codec import Ref
from laminar.lower.boxing.overlap import drop_unused

ANEW = "_anew"
"""Ending of lines that run again because the plan says so."""


def early(program: Program) -> set[str]:
    """Instructions that belong to forward: those marked so that need nothing from backward."""
    late: set[str] = set()
    first: set[str] = set()
    for instr in program.instrs:
        if instr.phase != "forward" or (late and any(r.name in late for r in instr.refs)):
            late.add(instr.name)
        else:
            first.add(instr.name)
    return first


def with_recompute(program: Program, picked: Picked) -> Program:
    """The program with what is inside of blocks recomputed for backward; lines must still be as the graph has them."""
    program = drop_unused(program)
    return drop_unused(_weights_once(run_again(program, lines_again(program, picked), ANEW)))


def recompute_saving(without: Program, program: Program, picked: Picked) -> RecomputeSaving:
    """What `Plan.explain` tells about recompute, from the program without it and the one with it."""
    return RecomputeSaving(
        blocks=len(picked.blocks),
        values=len(picked.values),
        lines=sum(i.phase == "recompute" for i in program.instrs),
        kept_bytes=boundary_bytes(program),
        whole_bytes=boundary_bytes(without),
    )


def boundary(program: Program) -> dict[Ref, Placed]:
    """Forward values that later instructions read: what has to lie in memory between the two, views as themselves.

    What waits in the host's memory does not.
    """
    first = early(program)
    makers = {i.name: i for i in program.instrs}
    crossing = {r for i in program.instrs if i.name not in first and not i.hosts for r in i.refs if r.name in first}
    return {r: p for r in sorted(crossing, key=str) if (p := makers[r.name].outs[r.index]) is not None}


def boundary_bytes(program: Program, counts: Callable[[Instr], bool] = lambda line: True) -> int:
    """Bytes of a rank that live on from forward into backward; a view counts as the tensor behind it, once.

    `counts` says of which lines.
    """
    makers = {i.name: i for i in program.instrs}
    held: set[Ref] = set()
    for ref in boundary(program):
        while ref.name in makers and makers[ref.name].op in FREE:
            ref = makers[ref.name].refs[0]
        held.add(ref)
    lying = [
        p for r in held if (m := makers.get(r.name)) is not None and counts(m) and (p := m.outs[r.index]) is not None
    ]
    return sum(p.local(program.mesh).nbytes for p in lying)


def lines_again(program: Program, picked: Picked) -> set[str]:
    """Forward lines that run again: those that lead from what blocks are given to what their backward reads."""
    first, gathered = early(program), _gathered(program)
    wanted: dict[str, set[str | None]] = {}
    """For lines of forward whose results are needed later, the blocks that need them; None: somebody else does."""
    for out in program.outputs:
        if out.kind != "sent" and out.ref.name in first:
            wanted[out.ref.name] = {None}  # stays until the step ends
    again: set[str] = set()
    values = _values(program, picked)
    for instr in reversed(program.instrs):
        block = picked.block_of(instr.module)
        if instr.name not in first:
            for ref in instr.refs:
                wanted.setdefault(ref.name, set()).add(block)
            continue
        for_whom = wanted.get(instr.name)
        if for_whom is None:
            continue
        value = values.get(instr.name)
        named = value is not None or (block is not None and for_whom == {block})
        apart = instr.moves and not {block, value} & picked.exchanging
        apart |= block in picked.sparing and value is None and family_of(instr.op) in COMPUTES
        if instr.name in gathered or (named and not apart):
            again.add(instr.name)
            for ref in instr.refs:
                wanted.setdefault(ref.name, set()).add(block)
        elif instr.op in FREE:
            for ref in instr.refs:  # kept with this view of it
                wanted.setdefault(ref.name, set()).add(None)
    return again


def _values(program: Program, picked: Picked) -> dict[str, str]:
    """Lines that make values that are named, or views of them: a view that is kept keeps what it is a view of."""
    out: dict[str, str] = {}
    for instr in program.instrs:
        value = picked.value_of(instr.name)
        if value is None and instr.op in FREE and instr.refs:
            value = out.get(instr.refs[0].name)
        if value is not None:
            out[instr.name] = value
    return out


def _gathered(program: Program) -> set[str]:
    """Lines that put weights together from pieces, or cast and view what was put together."""
    weights = {i.name for i in program.inputs if i.kind == "param"}
    found: set[str] = set()
    for instr in program.instrs:
        if instr.refs and all(r.name in weights for r in instr.refs):
            weights.add(instr.name)
            if instr.moves or any(r.name in found for r in instr.refs):
                found.add(instr.name)
    return found


def run_again(program: Program, chosen: Collection[str], ending: str) -> Program:
    """Copies of the chosen lines of forward, each right before the first line of backward that needs it.

    Backward then reads the copies; forward reads what it did.
    """
    first = early(program)
    at = {i.name: k for k, i in enumerate(program.instrs)}
    out: list[Instr] = []
    done: set[str] = set()

    def now(ref: Ref) -> Ref:
        return Ref(ref.name + ending, ref.index) if ref.name in chosen else ref

    def copied(instr: Instr, **more: str) -> Instr:
        if not more and not any(r.name in chosen for r in instr.refs):
            return instr
        return replace(instr, args=map_refs(instr.args, now), refs=tuple(map(now, instr.refs)), **more)  # type: ignore[arg-type]

    for instr in program.instrs:
        if instr.name in first:
            out.append(instr)
            continue
        missing: list[int] = []
        todo = [r.name for r in instr.refs]
        while todo:
            name = todo.pop()
            if name in chosen and name not in done:
                done.add(name)
                missing.append(at[name])
                todo += [r.name for r in program.instrs[at[name]].refs]
        for k in sorted(missing):
            line = program.instrs[k]
            out.append(copied(line, name=line.name + ending, phase="recompute"))
        out.append(copied(instr))
    return replace(program, instrs=tuple(out))


def _weights_once(program: Program) -> Program:
    """What recompute and the backward behind it both make of the same weight, made by whoever comes first."""
    first = early(program)
    weights = {i.name for i in program.inputs if i.kind == "param"}
    seen: dict[object, str] = {}
    renamed: dict[str, str] = {}
    out: list[Instr] = []

    def now(ref: Ref) -> Ref:
        return Ref(renamed.get(ref.name, ref.name), ref.index)

    for instr in program.instrs:
        if any(r.name in renamed for r in instr.refs):
            instr = replace(instr, args=map_refs(instr.args, now), refs=tuple(map(now, instr.refs)))
        if instr.name not in first and instr.refs and all(r.name in weights for r in instr.refs):
            weights.add(instr.name)
            instr = replace(instr, phase="backward")  # gathers of one phase travel together
            key = (instr.op, repr(instr.args), instr.boxing, instr.outs)
            other = seen.setdefault(key, instr.name)
            if other != instr.name:
                renamed[instr.name] = other
                continue
        out.append(instr)
    outputs = tuple(replace(o, ref=now(o.ref)) for o in program.outputs)
    return replace(program, instrs=tuple(out), outputs=outputs)
