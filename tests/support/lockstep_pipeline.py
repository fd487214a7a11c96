"""All places of a staged plan in one process: every part of every stage, for every micro-batch, rank by rank.

Nothing runs at the same time here; parts run as soon as what they take is there, stage after stage. What passes between
stages goes through the same crossings as between real ranks, and sums over micro-batches are made in the order of
micro-batches. So the numbers are those of a real run, whatever its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from laminar.errors import PlanError
from laminar.ir.program import Instr, MoveCause, Program, ProgramInput, ProgramOutput, placed
from laminar.ir.serial.codec import Ref
from laminar.lower.boxing.boxing_lines import boxing_line
from laminar.lower.stages.stage_programs import KEPT, Part, Stages
from laminar.rules.boxing.crossing import Crossing, crossing
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.comm.cross_mesh import CrossMeshReceiver, CrossMeshSender
from laminar.runtime.comm.shards import assemble

Locals = list[Tensor]
"""One value as each rank of a place holds it."""


def run_pipeline_lockstep(
    made: Stages | Sequence[Stages],
    batches: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | None = None,
    constants: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    watch: Callable[[Part], None] = lambda part: None,
) -> dict[str, Tensor]:
    """Whole outputs by `kind:name`, summed over micro-batches (a buffer is the last one's), from whole inputs.

    `batches` are the inputs of each micro-batch by name, parameters included; `weights` what each counts in the sums;
    `watch` sees every part before it runs. Where micro-batches differ in size, `made` has the stages of each and
    `constants` its constants; sums of all lie as those of the first.
    """
    sums: dict[tuple[int, str], Locals] = {}
    each = [made] * len(batches) if isinstance(made, Stages) else made
    for number, (inputs, one) in enumerate(zip(batches, each, strict=True)):
        weight = 1.0 if weights is None else weights[number]
        known = constants[number] if isinstance(constants, Sequence) else constants
        _micro_batch(one, inputs, known, watch, sums, weight)
    made = each[0]
    out: dict[str, Tensor] = {}
    for s, parts in enumerate(made.parts):
        mesh = made.staged.places[made.staged.stages[s].place].mesh
        for part in parts:
            for o in part.program.outputs:
                key = f"{o.kind}:{o.name}"
                if o.kind not in ("sent", KEPT):
                    whole = assemble(sums[s, key], o.placed.spec.shape, o.placed.nd, mesh)
                    out[key] = out[key] + whole if key in out else whole
    return out


def _micro_batch(
    made: Stages,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None,
    begin: Callable[[Part], None],
    sums: dict[tuple[int, str], Locals],
    weight: float,
) -> None:
    """Every part once, as soon as what it takes is there."""
    memory: list[dict[str, Locals]] = [{} for _ in made.parts]
    waiting = [part for parts in made.parts for part in parts]
    while waiting:
        ready = [part for part in waiting if part.takes <= memory[part.stage].keys()]
        if not ready:
            raise PlanError(f"parts {', '.join(p.name for p in waiting)} wait for each other")
        for part in ready:
            waiting.remove(part)
            begin(part)
            _part(made, part, inputs, constants, memory, sums, weight)


def _part(
    made: Stages,
    part: Part,
    inputs: Mapping[str, Tensor],
    constants: Mapping[str, Tensor] | None,
    memory: list[dict[str, Locals]],
    sums: dict[tuple[int, str], Locals],
    weight: float,
) -> None:
    here = memory[part.stage]
    known = {k: v for k, v in constants.items() if k in _constants(part.program)} if constants else None
    outs = lockstep.run_lockstep(part.program, inputs, known, held={n: here[n] for n in part.takes})
    places, stages = made.staged.places, made.staged.stages
    for o in part.program.outputs:
        key = f"{o.kind}:{o.name}"
        mine = [rank[key] for rank in outs]
        if o.kind == KEPT:
            here[o.name] = mine
        elif o.kind == "sent":
            for wire in made.wires:
                if wire.edge.src == part.stage and wire.edge.name == o.name:
                    src, dst = places[stages[part.stage].place], places[stages[wire.edge.dst].place]
                    way = crossing(wire.src.spec, src, wire.src.nd, dst, wire.dst.nd)
                    there = cross(dict(zip(src.ranks, mine, strict=True)), way)
                    memory[wire.edge.dst][o.name] = [there[r] for r in dst.ranks]
        elif o.kind == "buffer" or (part.stage, key) not in sums:
            sums[part.stage, key] = mine if o.kind == "buffer" else [x * weight for x in mine]
        else:
            sums[part.stage, key] = [a + b * weight for a, b in zip(sums[part.stage, key], mine, strict=True)]


def _constants(program: Program) -> set[str]:
    return {c.name for c in program.constants}


def reduction(crossing: Crossing) -> Program:
    """What a crossing does `before`, as a program on the source's mesh: its only input and output are the tensor."""
    mesh, spec = crossing.src.mesh, crossing.spec
    lines: list[Instr] = []
    now = Ref("x")
    for step in crossing.before:
        lines.append(boxing_line(f"cross{len(lines)}", now, spec, step, mesh.sizes, MoveCause("a crossing")))
        now = Ref(lines[-1].name)
    first = ProgramInput("x", "moved", placed(spec, crossing.src_nd))
    last = ProgramOutput("x", "moved", now, placed(spec, crossing.mid))
    return Program(mesh, (first,), (), tuple(lines), (last,), "", "")


def cross(locals_: Mapping[int, Tensor], crossing: Crossing) -> dict[int, Tensor]:
    """What every destination rank holds, from what every source rank does; ranks are those of the world."""
    program = reduction(crossing)
    memory: list[dict[Ref, Any]] = [{Ref("x"): locals_[rank]} for rank in crossing.src.ranks]
    for line in program.instrs:
        for mine, results in zip(memory, lockstep._box(line, program, memory), strict=True):
            mine[Ref(line.name)] = results[0]
    held: dict[int, Tensor] = {
        rank: mine[program.outputs[0].ref] for rank, mine in zip(crossing.src.ranks, memory, strict=True)
    }
    sent = {
        (rank, peer): x for rank in crossing.src.ranks for peer, x in CrossMeshSender(crossing, rank).pack(held[rank])
    }
    any_ = next(iter(held.values()))
    out = {}
    for rank in crossing.dst.ranks:
        receiver = CrossMeshReceiver(crossing, rank)
        room = receiver.room(any_.device, any_.dtype)
        for peer, buffer in room.buffers:
            buffer.copy_(sent[peer, rank])
        out[rank] = receiver.unpack(room, held.get(rank))
    return out
