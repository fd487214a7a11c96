"""Merging: few large collectives instead of many small ones.

A step has as many gradient reductions as parameters, and each costs its latency. Reductions whose
result only leaves the step are merged into buckets, in the order in which they become ready, up to a
size; a bucket is issued as soon as its last member is ready, so that it overlaps with the rest of
backward. Where gradients are reduced over two axes one after the other, both halves are merged.
Gathers of parameters that are needed close together are merged at the first of them, over a second
axis too. Small all-reduces inside the step are merged where all their inputs are ready when the first is issued.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace

from laminar.cost.ops.families import COMPUTES, family_of
from laminar.ir.graph import map_refs
from laminar.ir.ops import COLLECTIVE_OPS
from laminar.ir.program import BUCKETED_GRADIENTS, Instr, MoveCause, Program
from laminar.ir.serial.codec import Ref

BUCKET_BYTES = 10 << 20
GATHER_BYTES = 8 << 20
REDUCTIONS = ("all_reduce", "reduce_scatter")
SMALL_BYTES = 1 << 18
"""Reductions below this size cost mostly their latency."""
TAPER = 4
"""How often the limit of a bucket halves towards the end of backward, where gradients are reduced over two axes."""
BUCKET_REACH = 64
"""How many instructions ahead to look for company."""


def merged(program: Program, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """All three kinds of merging."""
    return _small_reductions(_second_gathers(_parameter_gathers(_buckets(program, bucket_bytes))))


def _key(instr: Instr) -> tuple[object, ...]:
    """Collectives that can travel together: same kind, axes, reduction and dtype."""
    return (instr.kind, instr.box.axes, instr.box.reduction, instr.ins[0].spec.dtype)


def _buckets(program: Program, limit_bytes: int) -> Program:
    """Merge the reductions that only feed outputs; each bucket stands behind its last member's maker."""
    used = {ref for instr in program.instrs for ref in instr.refs}
    ready = {i.name: k for k, i in enumerate(program.instrs)}
    halves = _halves(program)

    def when(instr: Instr) -> int:
        name = instr.refs[0].name
        return ready.get(halves[name].refs[0].name if name in halves else name, -1)

    groups: dict[tuple[object, ...], list[Instr]] = {}
    for instr in program.instrs:
        if instr.kind in REDUCTIONS and Ref(instr.name) not in used:
            groups.setdefault(_key(instr), []).append(instr)
    runs = []
    for members in groups.values():
        members.sort(key=when)
        tapers = any(i.refs[0].name in halves for i in members)
        runs += _tapered(members, limit_bytes) if tapers else _cut(members, limit_bytes, lambda run, i: True)
    behind = _behind(program)
    merged = _replace(program, runs, BUCKETED_GRADIENTS, lambda run: behind(max(map(when, run))))
    return _first_halves(merged, set(halves))


def _behind(program: Program) -> Callable[[int], int]:
    """Where a bucket is issued that is ready behind a line: before the next op that has a kernel of its own.

    A compiler works between collectives. What an activation's gradient is made of, and often the activation itself,
    recomputed for the gradient of a weight, belongs into one kernel: a bucket in between would take it apart.
    """
    light = [i.op not in COLLECTIVE_OPS and family_of(i.op) not in (*COMPUTES, "indexing") for i in program.instrs]

    def found(k: int) -> int:
        at = k
        while 0 <= at < len(light) - 1 and light[at + 1]:
            at += 1
        return k if at == len(light) - 1 else at

    return found


def _tapered(members: list[Instr], limit_bytes: int) -> list[list[Instr]]:
    """Buckets that are smaller towards the end: nothing hides what is still to be reduced when backward is over."""
    runs: list[list[Instr]] = [[]]
    for instr in reversed(members):
        if sum(i.bytes for i in runs[-1]) >= limit_bytes * min(1.0, 2.0 ** (len(runs) - TAPER)):
            runs.append([])
        runs[-1].append(instr)
    return [run[::-1] for run in reversed(runs)]


def _halves(program: Program) -> dict[str, Instr]:
    """Reductions that one other reduction reads, over another axis, and that one only leaves the step."""
    makers = {i.name: i for i in program.instrs}
    readers: dict[str, list[Instr]] = {}
    for instr in program.instrs:
        for name in {r.name for r in instr.refs}:
            readers.setdefault(name, []).append(instr)
    leaving = {o.ref.name for o in program.outputs}
    found = {}
    for last in program.instrs:
        if last.kind in REDUCTIONS and last.name not in readers:
            first = makers.get(last.refs[0].name)
            if first is None or first.kind not in REDUCTIONS or len(first.refs) > 1:
                continue
            if len(readers[first.name]) == 1 and first.name not in leaving:
                found[first.name] = first
    return found


def _first_halves(program: Program, halves: set[str]) -> Program:
    """What a bucket reduces over another axis first travels in buckets too, as soon as it is there."""
    makers = {i.name: (k, i) for k, i in enumerate(program.instrs)}
    behind = _behind(program)
    runs: list[list[Instr]] = []
    for bucket in program.instrs:
        groups: dict[tuple[object, ...], list[Instr]] = {}
        for ref in bucket.refs:
            if ref.name in halves:
                groups.setdefault(_key(makers[ref.name][1]), []).append(makers[ref.name][1])
        runs += groups.values()

    def when(run: list[Instr]) -> int:
        return behind(max(makers.get(i.refs[0].name, (-1, None))[0] for i in run))

    return _replace(program, runs, BUCKETED_GRADIENTS, when)


def _parameter_gathers(program: Program) -> Program:
    """Merge gathers of inputs that are first needed close together."""
    inputs = {i.name for i in program.inputs}
    groups: dict[tuple[object, ...], list[Instr]] = {}
    for instr in program.instrs:
        if instr.kind == "all_gather" and instr.refs[0].name in inputs:
            groups.setdefault((*_key(instr), instr.phase), []).append(instr)
    return _gathered(program, groups)


def _second_gathers(program: Program) -> Program:
    """What was gathered in one run and is gathered over another axis then, merged as far as it is needed together."""
    inputs = {i.name for i in program.inputs}
    first = {
        i.name
        for i in program.instrs
        if i.kind == "all_gather" and len(i.refs) > 1 and all(r.name in inputs for r in i.refs)
    }
    groups: dict[tuple[object, ...], list[Instr]] = {}
    for instr in program.instrs:
        if instr.kind == "all_gather" and len(instr.refs) == 1 and instr.refs[0].name in first:
            groups.setdefault((*_key(instr), instr.phase, instr.refs[0].name), []).append(instr)
    return _gathered(program, groups)


def _gathered(program: Program, groups: dict[tuple[object, ...], list[Instr]]) -> Program:
    """Gathers of each group in runs of those that are needed close together, each where its first one stands."""
    at = {i.name: k for k, i in enumerate(program.instrs)}

    def near(run: list[Instr], instr: Instr) -> bool:
        return at[instr.name] - at[run[0].name] < BUCKET_REACH

    runs = [run for members in groups.values() for run in _cut(members, GATHER_BYTES, near)]
    return _replace(program, runs, "parameters", lambda run: at[run[0].name])


def _cut(members: list[Instr], limit_bytes: int, near: Callable[[list[Instr], Instr], bool]) -> list[list[Instr]]:
    """Members in order, in runs that are closed once they have reached the limit."""
    runs: list[list[Instr]] = []
    for instr in members:
        if runs and sum(i.bytes for i in runs[-1]) < limit_bytes and near(runs[-1], instr):
            runs[-1].append(instr)
        else:
            runs.append([instr])
    return runs


def _replace(program: Program, runs: list[list[Instr]], what: str, where: Callable[[list[Instr]], int]) -> Program:
    """The program with each run as one instruction, behind position `where(run)`."""
    if not runs:
        return program
    renamed: dict[Ref, Ref] = {}
    gone: set[str] = set()
    placed: dict[int, list[Instr]] = {}
    for run in runs:
        together = _join(run, what)
        renamed.update({Ref(old.name): Ref(together.name, k) for k, old in enumerate(run)})
        gone.update(i.name for i in run)
        placed.setdefault(where(run), []).append(together)
    out = list(placed.get(-1, []))
    for k, instr in enumerate(program.instrs):
        if instr.name not in gone:
            out.append(instr)
        out += placed.get(k, [])
    return _renamed(program, out, renamed)


def _small_reductions(program: Program) -> Program:
    """Merge small all-reduces whose inputs are all ready when the first of them is issued."""
    instrs = list(program.instrs)
    small = [k for k, i in enumerate(instrs) if i.op == "box.all_reduce" and i.bytes < SMALL_BYTES]
    if len(small) < 2:
        return program
    renamed: dict[Ref, Ref] = {}
    out: list[Instr] = []
    taken: set[str] = set()
    made = {i.name for i in program.inputs} | {c.name for c in program.constants}
    for k, instr in enumerate(instrs):
        if instr.name in taken:
            continue
        run = [instr]
        if instr.kind == "all_reduce" and instr.bytes < SMALL_BYTES:
            near = small[bisect_right(small, k) : bisect_left(small, k + BUCKET_REACH)]
            for other in (instrs[at] for at in near if instrs[at].name not in taken):
                if _key(other) == _key(instr) and all(r.name in made for r in other.refs):
                    run.append(other)
        if len(run) > 1:
            instr = _join(run, "small tensors")
            places = (Ref(old.name, i) for old in run for i in range(len(old.outs)))
            renamed.update({old: Ref(instr.name, at) for at, old in enumerate(places)})
            taken.update(i.name for i in run)
            made.update(i.name for i in run)
        out.append(instr)
        made.add(instr.name)
    return _renamed(program, out, renamed) if renamed else program


def _renamed(program: Program, instrs: list[Instr], renamed: dict[Ref, Ref]) -> Program:
    names = {ref.name for ref in renamed}

    def now(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    def moved(i: Instr) -> Instr:
        if not any([r.name in names for r in i.refs]):  # noqa: C419 (a list is faster)
            return i
        return replace(i, args=map_refs(i.args, now), refs=tuple(map(now, i.refs)))

    outputs = tuple(replace(o, ref=now(o.ref)) for o in program.outputs)
    return replace(program, instrs=tuple(map(moved, instrs)), outputs=outputs)


def _join(run: list[Instr], what: str) -> Instr:
    """Several collectives as one; a run of one stays what it is, under a new name."""
    first = run[0]
    refs = tuple(r for i in run for r in i.refs)
    gives, takes = tuple(p for i in run for p in i.box.gives), tuple(p for i in run for p in i.box.takes)
    return replace(
        first,
        name=f"{first.name}m",
        args=refs,
        refs=refs,
        ins=tuple(p for i in run for p in i.ins),
        outs=tuple(p for i in run for p in i.outs),
        cause=first.cause if len(refs) == 1 else MoveCause(what, members=len(refs)),
        boxing=replace(first.box, gives=gives, takes=takes),
        where=first.where if len(run) == 1 else "",
        module=first.module if len(run) == 1 else "",
        phase=run[-1].phase,
        bytes=sum(i.bytes for i in run),
    )
