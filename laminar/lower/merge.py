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
        for instr in [*members, None]:
            # Small tensors right behind each other; the last bucket of backward is kept small by the
            # order itself: what is ready last is reduced last.
            if run and (instr is None or size + instr.bytes > limit_bytes):
                merged = _merge(run, len(program.instrs) + len(renamed))
                for k, old in enumerate(run):
                    renamed[Ref(old.name)] = Ref(merged.name, k)
                    dropped.add(old.name)
                at = max(ready.get(i.refs[0].name, -1) for i in run)
                placed_at.setdefault(at, []).append(merged)
                run, size = [], 0
            if instr is not None:
                run.append(instr)
                size += instr.bytes
    out: list[Instr] = list(placed_at.get(-1, []))
    for k, instr in enumerate(program.instrs):
        if instr.name not in dropped:
            out.append(
                replace(
                    instr,
                    args=map_refs(instr.args, lambda r: renamed.get(r, r)),
                    refs=tuple(renamed.get(r, r) for r in instr.refs),
                )
            )
        out += placed_at.get(k, [])
    outputs = tuple(replace(o, ref=renamed.get(o.ref, o.ref)) for o in program.outputs)
    return replace(program, instrs=tuple(out), outputs=outputs)


def _merge(run: list[Instr], number: int) -> Instr:
    first = run[0]
    refs = tuple(i.refs[0] for i in run)
    why = first.why if len(run) == 1 else f"{first.why.split(' for ')[0]} for {len(run)} gradients in one bucket"
    return Instr(
        f"bucket{number}",
        first.op,
        (refs, *first.args[1:]),
        refs,
        tuple(i.ins[0] for i in run),
        tuple(i.outs[0] for i in run),
        phase="backward",
        why=why,
        bytes=sum(i.bytes for i in run),
    )
