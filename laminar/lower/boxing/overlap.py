"""Order: what runs when. Nothing unused runs; collectives start early and are awaited late.

The order of collectives is the same on every rank, because it is computed once, from the program
alone. A collective is issued where it stands; the runtime waits at the first reader. So the only
thing to do here is to let other work stand between the two: where the next instruction waits for
a collective still under way, later ones that don't are drawn forward, within a window that bounds
how long their results must be kept.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.ir.ops import COLLECTIVE_OPS
from laminar.ir.program import Instr, Program
from laminar.lower.boxing.buckets import SMALL_BYTES

CHAIN = 6
"""How many ops may lead from inputs to a small collective for both to be moved to the start."""
SECOND_HALF = 12
"""How many go ahead of a collective that needs the result of another: by then that has come, and to wait until nothing
else is left would leave all such collectives for the end. Chosen, not measured: about half of a block's backward."""
WINDOW = 24
"""How many instructions ahead work may be drawn from. Chosen, not measured: about one block."""


def drop_unused(program: Program) -> Program:
    """Without the instructions whose results nobody reads."""
    live = {o.ref.name for o in program.outputs}
    kept: list[Instr] = []
    for instr in reversed(program.instrs):
        if instr.name in live:
            kept.append(instr)
            for ref in instr.refs:
                live.add(ref.name)
    return replace(program, instrs=tuple(reversed(kept)))


def _issued_early(program: Program) -> list[Instr]:
    """Collectives moved up towards the point where their inputs are ready: large ones at most a window.

    Gathers of parameters come out ahead of the ops that need them, which is prefetching.
    """
    first, read = _from_inputs(program), _read(program)
    ahead = [i for i in program.instrs if i.name in first]
    rest = [i for i in program.instrs if i.name not in first]
    ready: dict[str, int] = {}
    slots: list[tuple[int, int, Instr]] = []
    last = -1
    for k, instr in enumerate(rest):
        at = k
        if instr.op in COLLECTIVE_OPS and instr.name in read:  # gradients are issued where they stand
            made = max((ready.get(r.name, -1) for r in instr.refs), default=-1)
            far = instr.bytes < SMALL_BYTES  # costs no memory to hold, only time to wait for
            at = made + 1 if far else max(made + 1, k - WINDOW, last)
            last = max(at, last)
        ready[instr.name] = at
        slots.append((at, k, instr))
    # At one place collectives that were moved up go first: what stood there does not depend on them.
    return ahead + [instr for _, _, instr in sorted(slots, key=lambda s: (s[0], s[2].op not in COLLECTIVE_OPS, s[1]))]


def _read(program: Program) -> set[str]:
    """What some op reads, before it was moved or after."""
    found: set[str] = set()
    for instr in reversed(program.instrs):
        if instr.op not in COLLECTIVE_OPS or instr.name in found:
            found.update(r.name for r in instr.refs)
    return found


def _from_inputs(program: Program) -> set[str]:
    """Small collectives that depend on inputs through a few small ops, and those ops: counts of labels and the like."""
    found: set[str] = set()
    if not any(i.op in COLLECTIVE_OPS for i in program.instrs):
        return found
    makers = {i.name: i for i in program.instrs}
    for instr in program.instrs:
        if instr.op not in COLLECTIVE_OPS or instr.bytes >= SMALL_BYTES:
            continue
        chain: dict[str, Instr] = {}
        todo = [instr]
        while todo and len(chain) <= CHAIN:
            here = todo.pop()
            chain[here.name] = here
            todo += [makers[r.name] for r in here.refs if r.name in makers and r.name not in chain]
        small = all(p is None or p.spec.nbytes < SMALL_BYTES for i in chain.values() for p in i.outs)
        if not todo and len(chain) <= CHAIN and small and not any(i.moves for i in chain.values() if i is not instr):
            found |= set(chain)
    return found


def overlap(program: Program) -> Program:
    """The same instructions, with independent work between a collective and its first reader."""
    pending = _issued_early(program)
    if not any(i.op in COLLECTIVE_OPS for i in pending):
        return replace(program, instrs=tuple(pending))
    flying: dict[str, int] = {}
    """Collectives that nobody has waited for, by when they were issued."""
    drawn = 0
    """Instructions that went ahead of a collective that waits for another."""
    out: list[Instr] = []
    done: set[str] = {i.name for i in program.inputs} | {c.name for c in program.constants}
    pending.reverse()  # the next one is the last
    while pending:
        head = pending[-1]
        pick = 0
        moves = head.op in COLLECTIVE_OPS
        if moves and drawn >= SECOND_HALF:
            _landed(flying, head)
        if flying and any(r.name in flying for r in head.refs):
            for k in range(1, min(WINDOW, len(pending))):
                item = pending[-1 - k]
                if item.phase == "recompute" and head.phase == "forward":
                    continue  # what forward drops would still be there
                if all(r.name in done and r.name not in flying for r in item.refs):
                    pick = k
                    break
            else:
                # Nothing is free. A collective may wait for one that is young: what waits for the oldest goes first.
                near = [k for k in range(min(WINDOW, len(pending))) if moves and _ready(pending[-1 - k], head, done)]
                pick = min(near, key=lambda k: _age(flying, pending[-1 - k]), default=0)
                _landed(flying, pending[-1 - pick])
        instr = pending.pop(-1 - pick)
        drawn = drawn + 1 if pick and moves else 0
        out.append(instr)
        done.add(instr.name)
        if instr.op in COLLECTIVE_OPS:
            flying[instr.name] = len(out)
    return replace(program, instrs=tuple(out))


def _landed(flying: dict[str, int], instr: Instr) -> None:
    """Who runs has waited for what it reads."""
    for ref in instr.refs:
        flying.pop(ref.name, None)


def _ready(instr: Instr, head: Instr, done: set[str]) -> bool:
    """Whether it may go before the head: all that it reads is under way, and forward drops nothing that it makes."""
    return (instr.phase != "recompute" or head.phase != "forward") and all(r.name in done for r in instr.refs)


def _age(flying: dict[str, int], instr: Instr) -> int:
    """When the youngest collective that it reads was issued."""
    return max((flying[r.name] for r in instr.refs if r.name in flying), default=-1)
