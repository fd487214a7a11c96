"""Offload as a plan decides it: what blocks make in forward waits in the host's memory until backward reads it.

A plan names blocks (modules) and values, as it does for recompute (`ir/plans/patterns.py`). What forward makes inside a
block and backward reads leaves with one line, `host.send`, behind the last of it that is made, and comes back with
another, `host.bring`. Both are identities, so that results are those of the plan without, to the last bit.

    what stays   inputs, weights and what is made of weights alone, results of the step; whatever is smaller than a
                 64th of the block's largest (statistics of norms); and of several blocks that are named the one that
                 backward begins with, if fewer lines lie between the two than inside: it would come straight back.
    views        are not sent: what they look at is, and they are recomputed from what came back.
    there        a send starts when all it takes is made, beside what follows. The next block's send reads the last
                 one's result, and so waits until that has arrived: then its block is off the device.
    and back     one block ahead: a block's values start to come back when backward first reads those of the block
                 before it in backward and has done with the one before that. They are awaited at their own first
                 reader.
    the last     block that leaves has none behind it to wait for it. If it is the one that backward begins with, its
                 smallest value leaves by itself, as late as it can for the block to add nothing to what is held at
                 most (before a head over many words, or one block before forward ends), and waits for the rest; and
                 the block comes back as soon as it adds nothing again. Where there is no time for that, it comes
                 back as backward begins.

So at most two blocks' worth of what is sent lies on the device, in forward and in backward, unless backward reads
three blocks at once (long skip connections). Where copying takes longer than the compute of a block, ranks
wait, and memory stays.

Compiled steps choose what else to recompute (`lower/memory/mincut_recompute.py`) from the program without these lines,
which are then put in anew: what is recomputed need not travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from laminar.errors import PlanError
from laminar.ir.graph import map_refs
from laminar.ir.ops import FREE, HOST_BRING, HOST_COPIES, HOST_SEND
from laminar.ir.plans.account import OffloadSaving
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Instr, MoveCause, Placed, Program
from laminar.ir.serial.codec import Ref
from laminar.lower.boxing.overlap import drop_unused
from laminar.lower.memory.planned_recompute import boundary_bytes, early

STAYS_SHARE = 64
"""What is smaller than the block's largest value by this factor stays. Chosen, not measured."""
BACK = "_back"
"""Ending of views that are recomputed from what came back."""


@dataclass
class _Block:
    """Values that travel together."""

    name: str
    refs: list[Ref]
    made: int
    """Line that makes the last of them."""
    read: int
    """First line of backward that reads one of them."""
    done: int
    """And the last."""
    lines: int
    """Of forward, inside the block."""


def offloaded(program: Program) -> Program:
    """The program with lines that send what its plan names to the host and bring it back; those it has are replaced."""
    if not (program.offload.blocks or program.offload.values):
        return program
    program = drop_unused(without_offload(program))
    blocks = _blocks(program)
    in_backward = sorted(blocks, key=lambda b: b.read)
    ahead: dict[str, int] = {}
    for k, block in enumerate(in_backward[1:]):
        gone = in_backward[k - 1].done + 1 if k else 0
        ahead[block.name] = min(max(in_backward[k].read, gone), block.read)
    if len(in_backward) > 1 and in_backward[0].read - in_backward[0].made <= in_backward[0].lines:
        blocks.remove(in_backward[0])
    if not blocks:
        return program
    first = early(program)
    begins = next(k for k, i in enumerate(program.instrs) if i.name not in first)
    ends = 1 + max(k for k, i in enumerate(program.instrs) if i.name in first)  # weights may be gathered ahead
    held = _held(program, first, {ref for block in blocks for ref in block.refs})
    lying = {Ref(i.name, k): p for i in program.instrs for k, p in enumerate(i.outs) if p is not None}
    behind: dict[int, list[Instr]] = {}
    before: dict[int, list[Instr]] = {}
    away: dict[Ref, Ref] = {}
    last: Instr | None = None
    blocks.sort(key=lambda b: b.made)
    for block in blocks:
        refs, late = block.refs, list[Ref]()
        nbytes = sum(lying[r].local(program.mesh).nbytes for r in refs)
        by = -1 if block is not blocks[-1] or block.name in ahead else _seen_off(program, held, begins, block, nbytes)
        if by >= 0:
            refs, late = _smallest_last(program, refs)
        last = _send(block, refs, last, lying, program)
        behind.setdefault(block.made, []).append(last)
        sends = [last]
        if late:
            last = _send(block, late, last, lying, program, "_last")
            behind.setdefault(by, []).append(last)
            sends.append(last)
        at = ahead.get(block.name, begins)
        if block.name not in ahead:
            at = _roomy(program, held, max(begins, ends if ends < block.read else 0), block.read, nbytes)
        back = _bring(block, [Ref(s.name, k) for s in sends for k in range(len(s.outs))], sends)
        before.setdefault(max(at, begins, block.made + 1), []).append(back)
        away |= {ref: Ref(back.name, k) for k, ref in enumerate((*refs, *late))}
    return drop_unused(_rewired(program, first, away, behind, before))


def without_offload(program: Program) -> Program:
    """The program as if everything stayed on the device; it still says what its plan names."""
    source: dict[Ref, Ref] = {}
    out: list[Instr] = []

    def now(ref: Ref) -> Ref:
        return source.get(ref, ref)

    for instr in program.instrs:
        if instr.op in HOST_COPIES:
            source |= {Ref(instr.name, k): now(instr.refs[k]) for k in range(len(instr.outs))}
        elif source.keys().isdisjoint(instr.refs):
            out.append(instr)
        else:
            out.append(replace(instr, args=map_refs(instr.args, now), refs=tuple(map(now, instr.refs))))
    return replace(program, instrs=tuple(out)) if source else program


def refuse_stages(plan: Plan) -> None:
    """Stages keep their values in registers, which lie on the device, one for each micro-batch under way."""
    if plan.gather_once:
        raise PlanError(
            "parameters gathered once in a plan with stages: they would be kept for every micro-batch under way",
            next="gather_once=False, or a plan without stages",
        )
    if plan.offload:
        raise PlanError(
            f"offload of {', '.join(plan.offload)} in a plan with stages: what stages keep stays on the device",
            next='recompute=... instead, fewer micro-batches under way (schedule="1f1b"), or a plan without stages',
        )


def sent_bytes(program: Program, rank: int = 0) -> int:
    """Bytes of a rank that wait in the host's memory, all blocks together."""
    outs = (p for i in program.instrs if i.op == HOST_SEND for p in i.outs if p is not None)
    return sum(p.local(program.mesh, rank).nbytes for p in outs)


def offload_saving(program: Program) -> OffloadSaving:
    """What `Plan.explain` tells about offload."""
    sends = [i for i in program.instrs if i.op == HOST_SEND]
    return OffloadSaving(
        blocks=len(sends),
        tensors=sum(len(i.outs) for i in sends),
        bytes=sent_bytes(program),
        kept_bytes=boundary_bytes(program),
        whole_bytes=boundary_bytes(without_offload(program)),
    )


def _blocks(program: Program) -> list[_Block]:
    """What leaves the device, block by block."""
    first, at = early(program), {i.name: k for k, i in enumerate(program.instrs)}
    behind = _behind(program, first)
    looked_at = _behind(program, at)
    names = _named(program, first, behind)
    weights = _weights(program)
    stays = {behind.get(o.ref, o.ref) for o in program.outputs}
    read: dict[Ref, int] = {}
    done: dict[Ref, int] = {}
    for k, instr in enumerate(program.instrs):
        if instr.name not in first:
            for ref in instr.refs:
                whole = looked_at.get(ref, ref)
                read.setdefault(whole, k)
                done[whole] = k
    found: dict[str, list[Ref]] = {}
    for ref in read:
        if ref.name in first and ref.name in names and ref.name not in weights and ref not in stays:
            found.setdefault(names[ref.name], []).append(ref)
    lines = Counter(names.values())
    size = {r: _bytes(program, at, r) for refs in found.values() for r in refs}
    out = []
    for name, refs in found.items():
        least = max(size[r] for r in refs) / STAYS_SHARE
        refs = sorted((r for r in refs if size[r] and size[r] >= least), key=lambda r: (at[r.name], r.index))
        while refs and min(read[r] for r in refs) <= at[refs[-1].name]:  # backward has begun before all is made
            refs.pop()
        if refs:
            whens = [read[r] for r in refs], [done[r] for r in refs]
            out.append(_Block(name, refs, at[refs[-1].name], min(whens[0]), max(whens[1]), lines[name]))
    return out


def _behind(program: Program, among: Collection[str]) -> dict[Ref, Ref]:
    """For what views among these lines make, the value that they look at."""
    out: dict[Ref, Ref] = {}
    for instr in program.instrs:
        if instr.name in among and instr.op in FREE and instr.refs:
            whole = out.get(instr.refs[0], instr.refs[0])
            out |= {Ref(instr.name, k): whole for k in range(max(1, len(instr.outs)))}
    return out


def _named(program: Program, first: set[str], behind: dict[Ref, Ref]) -> dict[str, str]:
    """Lines of forward to the block that they belong to, or to the value that they make or are looked at as."""
    out: dict[str, str] = {}
    for instr in program.instrs:
        if instr.name in first:
            value = program.offload.value_of(instr.name)
            if value is not None:
                out[behind.get(Ref(instr.name), Ref(instr.name)).name] = f"%{value}"
            elif (block := program.offload.block_of(instr.module)) is not None:
                out.setdefault(instr.name, block)
    return out


def _weights(program: Program) -> set[str]:
    """What is made of weights alone: casts of them, or weights put together from pieces."""
    out = {i.name for i in program.inputs if i.kind == "param"}
    for instr in program.instrs:
        if instr.refs and all(r.name in out for r in instr.refs):
            out.add(instr.name)
    return out


def _bytes(program: Program, at: dict[str, int], ref: Ref) -> int:
    out = program.instrs[at[ref.name]].outs[ref.index]
    return out.local(program.mesh).nbytes if out is not None else 0


def _smallest_last(program: Program, refs: Sequence[Ref]) -> tuple[list[Ref], list[Ref]]:
    """All values but the smallest, and that, where there are several."""
    at = {i.name: k for k, i in enumerate(program.instrs)}
    least = min(refs, key=lambda r: _bytes(program, at, r))
    return ([r for r in refs if r != least], [least]) if len(refs) > 1 else (list(refs), [])


def _held(program: Program, first: set[str], sent: Collection[Ref]) -> list[int]:
    """By line, bytes of values that lie on the device if what is sent goes with its last reader of forward.

    Results of the step are left out: gradients have their places from the beginning.
    """
    at = {i.name: k for k, i in enumerate(program.instrs)}
    looked_at = _behind(program, at)
    last: dict[Ref, int] = {}
    for k, instr in enumerate(program.instrs):
        for ref in (looked_at.get(r, r) for r in instr.refs):
            if ref not in sent or instr.name in first:
                last[ref] = k
    for o in program.outputs:
        last.pop(looked_at.get(o.ref, o.ref), None)
    more = [0] * (len(at) + 1)
    for ref, k in last.items():
        if ref.name in at:
            more[at[ref.name]] += (nbytes := _bytes(program, at, ref))
            more[k + 1] -= nbytes
    return list(accumulate(more))[:-1]


def _seen_off(program: Program, held: Sequence[int], begins: int, block: _Block, nbytes: int) -> int:
    """The last line by which a block can leave so that it adds nothing to what is held at most.

    Only between parts of the model; -1 where fewer than half as many lines lie between as inside the block.
    """
    most, k = max(held), block.made + 1
    while k < begins and held[k] + nbytes <= most:
        k += 1
    while k > block.made and program.instrs[k].module == program.instrs[k - 1].module:
        k -= 1
    return k - 1 if 2 * (k - 1 - block.made) >= block.lines else -1


def _roomy(program: Program, held: Sequence[int], begins: int, read: int, nbytes: int) -> int:
    """The first line of backward from which on so many bytes more are never more than there were before.

    That is, up to where they are read. If there is none, the first line of backward. Between parts of the model.
    """
    most, best, after = max(held[:read]), begins, 0
    for k in range(read - 1, begins, -1):
        after = max(after, held[k])
        if after + nbytes > most:
            break
        best = k
    while begins < best < read and program.instrs[best].module == program.instrs[best - 1].module:
        best += 1
    return best


def _send(
    block: _Block, refs: Sequence[Ref], last: Instr | None, lying: dict[Ref, Placed], program: Program, ending: str = ""
) -> Instr:
    outs = tuple(lying[r] for r in refs)
    reads, ins = tuple(refs), outs
    if last is not None:
        reads, ins = (*reads, Ref(last.name)), (*ins, last.ins[0])
    short = block.name.replace(".", "_").removeprefix("%") + ending
    nbytes = sum(p.local(program.mesh).nbytes for p in outs)
    cause = MoveCause("activations to the host")
    return Instr(f"send_{short}", HOST_SEND, reads, reads, ins, outs, "", block.name, "forward", cause, nbytes)


def _bring(block: _Block, come: Sequence[Ref], sends: Sequence[Instr]) -> Instr:
    """Back with all that a block has sent."""
    refs, outs = tuple(come), tuple(p for s in sends for p in s.outs if p is not None)
    name = "bring_" + block.name.replace(".", "_").removeprefix("%")
    nbytes = sum(s.bytes for s in sends)
    cause = MoveCause("activations back from the host")
    return Instr(name, HOST_BRING, refs, refs, outs, outs, "", block.name, "backward", cause, nbytes)


def _rewired(
    program: Program,
    first: set[str],
    away: dict[Ref, Ref],
    behind: dict[int, list[Instr]],
    before: dict[int, list[Instr]],
) -> Program:
    """Backward reads what came back, and views of it that are made where they are first needed."""
    views = {ref.name for ref, whole in _behind(program, first).items() if whole in away}
    lines = {i.name: i for i in program.instrs}
    done: set[str] = set()
    out: list[Instr] = []

    def now(ref: Ref) -> Ref:
        return Ref(ref.name + BACK, ref.index) if ref.name in views else away.get(ref, ref)

    def copied(instr: Instr, **more: str) -> Instr:
        return replace(instr, args=map_refs(instr.args, now), refs=tuple(map(now, instr.refs)), **more)  # type: ignore[arg-type]

    def look(name: str) -> None:
        if name in views and name not in done:
            done.add(name)
            for ref in lines[name].refs:
                look(ref.name)
            out.append(copied(lines[name], name=name + BACK, phase="backward"))

    for k, instr in enumerate(program.instrs):
        out += before.get(k, [])
        if instr.name in first:
            out.append(instr)
        else:
            for ref in instr.refs:
                look(ref.name)
            out.append(copied(instr))
        out += behind.get(k, [])
    return replace(program, instrs=tuple(out))
