"""A program of logical ranks as processes run it that host whole units each: the lines that a simulation prices.

The mesh becomes that of processes, whose one axis takes the place of the units'. A line runs once for all units of a
process, but for each slice of the weights and each part of the sequences; what makes terms of sums over units runs for
each unit. Exchanges between slices or parts become additions and copies inside of a process.
Not covered: processes that share a unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from laminar.ir.graph import map_refs
from laminar.ir.mesh import Mesh
from laminar.ir.program import Boxing, Instr, Placed, Program, ProgramInput, ProgramOutput, placed
from laminar.ir.sbp import B, Partial, Split, local_spec
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.rules.boxing.boxing import Step, step_bytes

UNIT_AXIS = 0
"""The mesh axis of units, and of processes."""
Coordinates = tuple[int, ...]
"""Of what differs by slice or part: where on each axis of the mesh, 0 on those along which it does not."""
EachUnit = tuple[Ref, ...]
"""A value: one reference for all units of a process, or one for each of them."""


@dataclass(frozen=True)
class _Sent:
    """One instance that processes exchange."""

    result: Ref
    at: Coordinates
    now: Ref
    src: Placed
    dst: Placed
    which: int
    """Its number among the line's tensors."""


def hosted_lines(program: Program, mesh: Mesh) -> Program:
    """The program of one process: it computes its share of the units of a program of logical ranks."""
    return _Writer(program, mesh).written()


class _Writer:
    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program, self.mesh, self.sizes = program, mesh, program.mesh.sizes
        self.units = -(-self.sizes[UNIT_AXIS] // mesh.ranks)
        self.lines: list[Instr] = []
        self.have: dict[tuple[Ref, Coordinates], EachUnit] = {}
        self.logical: dict[Ref, Placed] = {Ref(i.name): i.placed for i in program.inputs}
        for instr in program.instrs:
            self.logical |= {Ref(instr.name, k): p for k, p in enumerate(instr.outs) if p is not None}

    def written(self) -> Program:
        """All of it."""
        given = [Ref(i.name) for i in self.program.inputs] + [Ref(c.name) for c in self.program.constants]
        for ref in given:
            for at in self._instances((self.logical.get(ref),)):
                self.have[ref, at] = (ref,)
        for instr in self.program.instrs:
            if instr.kind:
                self._exchange(instr)
            else:
                self._op(instr)
        inputs = tuple(ProgramInput(i.name, i.kind, self._whole(i.placed)) for i in self.program.inputs)
        outputs = tuple(
            ProgramOutput(o.name, o.kind, self._value(o.ref, self._origin)[0], self._whole(o.placed))
            for o in self.program.outputs
        )
        return replace(self.program, mesh=self.mesh, inputs=inputs, instrs=tuple(self.lines), outputs=outputs)

    # --- values -----------------------------------------------------------------------------------

    @property
    def _origin(self) -> Coordinates:
        return (0,) * len(self.sizes)

    def _instances(self, each: Iterable[Placed | None], but: tuple[int, ...] = ()) -> Iterator[Coordinates]:
        """Where instances of a line are that concerns such tensors, on all axes but the units' and some others."""
        along = {a for p in each if p is not None for a, kind in enumerate(p.nd) if kind != B} - {UNIT_AXIS, *but}
        yield from itertools.product(*(range(n) if a in along else (0,) for a, n in enumerate(self.sizes)))

    def _value(self, ref: Ref, at: Coordinates) -> EachUnit:
        p = self.logical.get(ref)
        return self.have[ref, self._narrowed(p, at)]

    @staticmethod
    def _narrowed(p: Placed | None, at: Coordinates) -> Coordinates:
        if p is None:
            return (0,) * len(at)
        return tuple(0 if kind == B or a == UNIT_AXIS else c for a, (kind, c) in enumerate(zip(p.nd, at, strict=True)))

    def _keep(self, ref: Ref, at: Coordinates, value: EachUnit) -> None:
        self.have[ref, self._narrowed(self.logical[ref], at)] = value

    def _whole(self, p: Placed) -> Placed:
        """As a process has it that has all slices and parts: its units' share."""
        return placed(p.spec, (p.nd[UNIT_AXIS],))

    def _instance(self, p: Placed) -> Placed:
        """One slice's or part's of that."""
        return placed(local_spec(p.spec, (B, *p.nd[1:]), self.sizes), (p.nd[UNIT_AXIS],))

    def _of_unit(self, p: Placed) -> Placed:
        """One unit's of an instance."""
        cut = p.nd[UNIT_AXIS]
        if not isinstance(cut, Split):
            return p
        shape = list(p.spec.shape)
        shape[cut.dim] = -(-shape[cut.dim] // self.units)
        return placed(TensorSpec(tuple(shape), p.spec.dtype), p.nd)

    # --- lines ------------------------------------------------------------------------------------

    def _op(self, instr: Instr) -> None:
        terms = any(p is not None and isinstance(p.nd[UNIT_AXIS], Partial) for p in instr.outs)
        for n, at in enumerate(self._instances((*instr.ins, *instr.outs))):
            ins = tuple(self._instance(p) for p in instr.ins)
            outs = tuple(None if p is None else self._instance(p) for p in instr.outs)
            name = f"{instr.name}_at{n}" if n else instr.name
            if not terms or self.units == 1:
                made = [self._written(instr, name, at, 0, ins, outs)]
            else:
                ins = tuple(map(self._of_unit, ins))
                outs = tuple(None if p is None else self._of_unit(p) for p in outs)
                made = [self._written(instr, f"{name}_of_unit{u}", at, u, ins, outs) for u in range(self.units)]
            for k, p in enumerate(instr.outs):
                if p is None:
                    continue
                each = tuple(Ref(m, k) for m in made)
                apart = len(each) > 1 and not isinstance(p.nd[UNIT_AXIS], Partial)
                value = (self._beside(instr, f"{name}_units{k}", each, p),) if apart else each
                self._keep(Ref(instr.name, k), at, value)

    def _written(
        self,
        instr: Instr,
        name: str,
        at: Coordinates,
        unit: int,
        ins: tuple[Placed, ...],
        outs: tuple[Placed | None, ...],
    ) -> str:
        def of(ref: Ref) -> Ref:
            value = self._value(ref, at)
            return value[unit % len(value)]

        refs = tuple(map(of, instr.refs))
        self.lines.append(replace(instr, name=name, args=map_refs(instr.args, of), refs=refs, ins=ins, outs=outs))
        return name

    def _beside(self, like: Instr, name: str, each: EachUnit, p: Placed) -> Ref:
        """Pieces put one beside the other: of units, or of slices and parts."""
        dim = next((s.dim for s in p.nd if isinstance(s, Split)), 0)
        return self._plain(like, name, "aten.cat", each, (list(each), dim), self._instance(p))

    def _plain(self, like: Instr, name: str, op: str, refs: EachUnit, args: tuple[object, ...], p: Placed) -> Ref:
        self.lines.append(
            replace(like, name=name, op=op, args=args, refs=refs, ins=(p,) * len(refs), outs=(p,), bytes=0, boxing=None)
        )
        return Ref(name)

    # --- exchanges --------------------------------------------------------------------------------

    def _exchange(self, instr: Instr) -> None:
        """What of it lies within a process as plain lines, and the rest between processes."""
        within = tuple(a for a in instr.box.axes if a != UNIT_AXIS)
        sent: list[_Sent] = []
        for k, (ref, src, dst) in enumerate(zip(instr.refs, instr.ins, instr.outs, strict=True)):
            assert dst is not None
            for n, at in enumerate(self._instances((src, dst), within)):
                name = f"{instr.name}_{k}_at{n}"
                group = self._group(at, within)
                if instr.kind in ("all_reduce", "reduce_scatter"):
                    terms = [r for member in group for r in self._value(ref, member)]
                    now = self._added(instr, name, terms, self._instance(src))
                elif instr.moves and within:
                    pieces = tuple(self._value(ref, member)[0] for member in group)
                    now = self._plain(instr, name, "aten.cat", pieces, (list(pieces), 0), self._instance(dst))
                else:  # a piece of what is here, or a term beside zeros
                    now = self._value(ref, at)[0]
                result = Ref(instr.name, k)
                if UNIT_AXIS in instr.box.axes and self.mesh.ranks > 1:
                    sent.append(_Sent(result, at, now, self._instance(src), self._instance(dst), k))
                for member in group:
                    self._keep(result, member, (now,))
        if sent:
            self._between(instr, sent)

    def _group(self, at: Coordinates, axes: tuple[int, ...]) -> list[Coordinates]:
        """All places that differ from one along some axes."""
        along = (range(n) if a in axes else (c,) for a, (n, c) in enumerate(zip(self.sizes, at, strict=True)))
        return list(itertools.product(*along))

    def _added(self, like: Instr, name: str, terms: list[Ref], p: Placed) -> Ref:
        total = terms[0]
        for n, term in enumerate(terms[1:]):
            total = self._plain(like, f"{name}_sum{n}", "aten.add.Tensor", (total, term), (total, term), p)
        return total

    def _between(self, instr: Instr, sent: list[_Sent]) -> None:
        """All instances in one exchange of processes."""
        gives, takes = (tuple(each[s.which] for s in sent) for each in (instr.box.gives, instr.box.takes))
        total = 0
        for s, give, take in zip(sent, gives, takes, strict=True):
            step = Step(instr.kind, (UNIT_AXIS,), s.src.nd, s.dst.nd, give, take, instr.box.reduction)
            total += step_bytes(step, s.src.spec, self.mesh.sizes)
        refs = tuple(s.now for s in sent)
        ins, outs = tuple(s.src for s in sent), tuple(s.dst for s in sent)
        boxing = Boxing((UNIT_AXIS,), gives, takes, instr.box.reduction)
        self.lines.append(replace(instr, args=refs, refs=refs, ins=ins, outs=outs, bytes=total, boxing=boxing))
        for n, s in enumerate(sent):
            self._keep(s.result, s.at, (Ref(instr.name, n),))
