"""A program as memory is asked about it: values by number, and for each line what it reads, makes and looks at.

A step is played through twice where a compiler is at work (`cost/memory/peak.py`), and its layers repeat: whatever
does not depend on where values come to lie is worked out here, once for a program, and as far as it goes once for each
form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from laminar.cost.memory.comm_buffers import Buffers, buffers_of
from laminar.cost.memory.inductor_reuse import NEVER_IN_PLACE, in_order
from laminar.cost.ops.interned import forms_of
from laminar.cost.ops.strides import follow_strides
from laminar.cost.ops.table import local_call
from laminar.ir.ops import COLLECTIVE_OPS, DRAWS, FREE, HOST_COPIES
from laminar.ir.program import Instr, Program

TWO_PASSES = frozenset("native_layer_norm_backward native_group_norm_backward batch_norm_backward".split())
"""Ops that a compiler makes two kernels of, along rows and across them: what they read outlives the first."""
ALLOCATES = frozenset(
    """convolution convolution_backward attention attention_at attention_backward attention_backward_at lstm
    lstm_backward sort topk""".split()
)
"""Kernels that take memory for their results themselves."""
KEEPS = ALLOCATES - {"convolution"}
"""Kernels whose results, several at once, are not taken over by others."""


class Fact(NamedTuple):
    """What is the same for all lines of a form."""

    outs: tuple[tuple[int, int, str], ...]
    """Of results that there are: which one, bytes, dtype."""
    makes: int
    """Of all results."""
    gives: bool
    """Whether others may take over the memory of its results."""
    takes: bool
    """Whether its results may take over memory."""
    drawn: int
    """Numbers that it draws."""
    cat: bool
    looks: bool
    """Whether it is a view, unless it has to copy."""
    moves: bool
    hosts: bool
    boxes: bool
    short: str
    """Its op, without where that is from."""


class LineRun(NamedTuple):
    """One line, or several that are one kernel."""

    lines: tuple[int, ...]
    apart: bool
    """Whether it goes on beside what follows."""
    forward: bool
    read: list[int]
    """Values, in order, as often as they are read."""
    outer: list[int]
    """Those that other lines have made."""
    seen: list[int]
    """Of these, such as exist."""
    spare: list[tuple[int, int, int]]
    """(value, line that may write where it lies, how often this kernel reads it)."""


class Script:
    """What a rank does, for memory."""

    def __init__(
        self, program: Program, rank: int, backend: str, groups: Sequence[tuple[int, ...]] | None, keep: Collection[str]
    ) -> None:
        self.program, self.rank, self.compiled = program, rank, groups is not None
        forms = self.forms = forms_of(program)
        self.buffers: Buffers = buffers_of(program, rank, backend, self.compiled)
        self.lying = {forms.number(ref): home for ref, home in self.buffers.lying.items()}
        self.facts = [_fact(i, program, rank) for i in forms.examples]
        self.maker = [-1] * forms.values
        """By value, the line that makes it."""
        for n, (form, first) in enumerate(zip(forms.of, forms.makes, strict=True)):
            for k in range(self.facts[form].makes or 1):
                self.maker[first + k] = n
        self.views = self._views()
        self.readers = [0] * forms.values
        for reads in forms.reads:
            for v in reads:
                self.readers[v] += 1
        for o in program.outputs:
            self.readers[forms.number(o.ref)] += 1
        self.used = [n > 0 for n in self.readers]
        if keep:
            lines = {i.name: n for n, i in enumerate(program.instrs)}
            for name in keep:
                for k in range(self.facts[forms.of[lines[name]]].makes):
                    self.readers[forms.makes[lines[name]] + k] += 1
        self.grads = {self.root(forms.number(o.ref)) for o in program.outputs if o.kind == "grad"}
        order, self.inner = in_order(forms, groups)
        self.runs = [self._run(lines) for lines in order]

    def fact(self, line: int) -> Fact:
        """Of a line."""
        return self.facts[self.forms.of[line]]

    def root(self, value: int) -> int:
        """The value whose memory this is a view of."""
        while (line := self.maker[value]) >= 0 and self.views[line]:
            value = self.forms.reads[line][0]
        return value

    def _views(self) -> list[bool]:
        """By line, whether it only looks at memory in another way."""
        forms = self.forms
        if not any(fact.looks for fact in self.facts):
            return [False] * len(forms.of)
        calls = [local_call(i, self.program.mesh, self.rank) for i in forms.examples]
        return [
            self.facts[f].looks and not lying.copies
            for f, lying in zip(forms.of, follow_strides(forms, calls), strict=True)
        ]

    def _run(self, lines: tuple[int, ...]) -> LineRun:
        forms, maker, inner, first = self.forms, self.maker, self.inner, self.fact(lines[0])
        apart = first.moves or first.hosts
        if len(lines) == 1:
            read = outer = forms.reads[lines[0]]
        else:
            inside = set(lines)
            read = [v for n in lines for v in forms.reads[n]]
            outer = [v for v in read if maker[v] not in inside]
        seen = [v for v in outer if v not in inner]
        spare = self._spare(lines, read) if self.compiled and not apart else []
        return LineRun(lines, apart, self.program.instrs[lines[0]].phase == "forward", read, outer, seen, spare)

    def _spare(self, lines: tuple[int, ...], read: list[int]) -> list[tuple[int, int, int]]:
        """For lines of a kernel what they are the last to read: a compiler may write results there."""
        facts = [self.fact(n) for n in lines]
        if any(fact.boxes or fact.short in NEVER_IN_PLACE for fact in facts):
            return []
        forms, maker, inner = self.forms, self.maker, self.inner
        inside, last = set(lines), dict[int, int]()
        through: dict[int, set[int]] = {}  # what a line reads from outside, also by way of values that never exist
        for n, fact in zip(lines, facts, strict=True):
            found: set[int] = set()
            for v in forms.reads[n]:
                if maker[v] not in inside:
                    found.add(v)
                elif v in inner:
                    found |= through[maker[v]]
            through[n] = found
            at = forms.makes[n]
            if any(at + k not in inner for k in range(fact.makes)):
                last |= dict.fromkeys(found, n)
        again = [through[n] for n, fact in zip(lines, facts, strict=True) if fact.short in TWO_PASSES]
        return [(v, n, read.count(v)) for v, n in last.items() if not any(v in found for found in again)]


def _fact(instr: Instr, program: Program, rank: int) -> Fact:
    local = [(k, p.local(program.mesh, rank)) for k, p in enumerate(instr.outs) if p]
    short = instr.op.partition(".")[2]
    return Fact(
        outs=tuple((k, spec.nbytes, spec.dtype) for k, spec in local),
        makes=len(instr.outs),
        gives=not instr.kind and short not in KEEPS,
        takes=not instr.kind and short not in ALLOCATES,
        drawn=local[0][1].numel if instr.op in DRAWS and instr.outs[0] else 0,
        cat=instr.op == "aten.cat",
        looks=(instr.op in FREE or instr.op.startswith("aten.squeeze")) and bool(instr.refs),
        moves=instr.op in COLLECTIVE_OPS,
        hosts=instr.op in HOST_COPIES,
        boxes=bool(instr.kind),
        short=short,
    )
