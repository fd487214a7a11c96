"""Buckets: reductions of gradients that nobody waits for, merged into few large ones.

A step has as many gradient reductions as parameters, and on a small model each costs its latency.
Those whose result only leaves the step are merged, in the order in which they become ready, up to
a size; the merged one is issued as soon as its last member is ready, so that it overlaps with the
rest of backward. The runtime lays the members of an all-reduce side by side in one buffer.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.ir.codec import Ref
from laminar.ir.graph import map_refs
from laminar.ir.program import Instr, Program


def bucket(program: Program, limit_bytes: int) -> Program:
    """Merge the all-reduces that only feed outputs."""
    used: dict[Ref, int] = {}
    for instr in program.instrs:
        for ref in instr.refs:
            used[ref] = used.get(ref, 0) + 1
    ready = {i.name: k for k, i in enumerate(program.instrs)}
    groups: dict[tuple[object, ...], list[Instr]] = {}
    for instr in program.instrs:
        if instr.kind == "all_reduce" and not used.get(Ref(instr.name)):
            dtype = instr.ins[0].spec.dtype
            groups.setdefault((instr.args[1], instr.args[4], dtype), []).append(instr)
    renamed: dict[Ref, Ref] = {}
    dropped: set[str] = set()
    placed_at: dict[int, list[Instr]] = {}
    for members in groups.values():
        members.sort(key=lambda i: ready.get(i.refs[0].name, -1))
        run: list[Instr] = []
        size = 0
        for member in [*members, None]:
            # Small tensors right behind each other; the last bucket of backward is kept small by the
            # order itself: what is ready last is reduced last.
            if run and (member is None or size + member.bytes > limit_bytes):
                merged = _merge(run, len(program.instrs) + len(renamed))
                for k, old in enumerate(run):
                    renamed[Ref(old.name)] = Ref(merged.name, k)
                    dropped.add(old.name)
                at = max(ready.get(i.refs[0].name, -1) for i in run)
                placed_at.setdefault(at, []).append(merged)
                run, size = [], 0
            if member is not None:
                run.append(member)
                size += member.bytes
    out: list[Instr] = list(placed_at.get(-1, []))
    for k, instr in enumerate(program.instrs):
        if instr.name not in dropped:
            out.append(instr)
        out += placed_at.get(k, [])
    return _renamed(program, out, renamed)


SMALL_BYTES = 1 << 18
REACH = 64
"""Reductions below this size cost mostly their latency; how many instructions ahead to look for company."""


def gather_small(program: Program) -> Program:
    """Merge small all-reduces whose inputs are all ready when the first of them is issued."""
    instrs = list(program.instrs)
    renamed: dict[Ref, Ref] = {}
    out: list[Instr] = []
    taken: set[str] = set()
    made: set[str] = {i.name for i in program.inputs} | {c.name for c in program.constants}
    for k, instr in enumerate(instrs):
        if instr.name in taken:
            continue
        if instr.kind == "all_reduce" and instr.bytes < SMALL_BYTES:
            run = [instr]
            for other in instrs[k + 1 : k + REACH]:
                same = other.kind == "all_reduce" and (other.args[1], other.args[4]) == (instr.args[1], instr.args[4])
                if (
                    same
                    and other.name not in taken
                    and other.bytes < SMALL_BYTES
                    and other.ins[0].spec.dtype == instr.ins[0].spec.dtype
                    and all(r.name in made for r in other.refs)
                ):
                    run.append(other)
            if len(run) > 1:
                instr = _merge(run, k, instr)
                at = 0
                for old in run:
                    taken.add(old.name)
                    for i in range(len(old.outs)):
                        renamed[Ref(old.name, i)] = Ref(instr.name, at)
                        at += 1
        out.append(instr)
        made.add(instr.name)
        made.update(r.name for r in renamed if renamed[r].name == instr.name)
    return _renamed(program, out, renamed)


def _renamed(program: Program, instrs: list[Instr], renamed: dict[Ref, Ref]) -> Program:
    def now(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    moved = tuple(replace(i, args=map_refs(i.args, now), refs=tuple(map(now, i.refs))) for i in instrs)
    return replace(program, instrs=moved, outputs=tuple(replace(o, ref=now(o.ref)) for o in program.outputs))


def _merge(run: list[Instr], number: int, like: Instr | None = None) -> Instr:
    first = run[0]
    refs = tuple(r for i in run for r in i.refs)
    what = "gradients in one bucket" if like is None else "small tensors at once"
    why = first.why if len(refs) == 1 else f"{first.why.split(' for ')[0]} for {len(refs)} {what}"
    return Instr(
        f"bucket{number}" if like is None else f"merged{number}",
        first.op,
        (refs, *first.args[1:]),
        refs,
        tuple(p for i in run for p in i.ins),
        tuple(p for i in run for p in i.outs),
        where=like.where if like else "",
        module=like.module if like else "",
        phase=like.phase if like else "backward",
        why=why,
        bytes=sum(i.bytes for i in run),
    )
