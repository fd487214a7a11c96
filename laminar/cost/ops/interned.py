"""A program without its names: lines that differ in nothing else have one form, and values are numbers.

Layers repeat. A step of 24 of them has thousands of lines and about a hundred forms: an op, its arguments, and the
tensors it reads and makes with their placements. Whatever follows from those alone (local shapes, seconds, bytes,
whether a compiler writes it) is worked out once for each form and looked up for each line. What depends on who reads
whom goes by the numbers of values, which index lists, where references would have to be hashed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from laminar.ir.program import Instr, Program
from laminar.ir.serial.codec import Ref


class Forms:
    """The forms of a program's lines, and its values by number; `of`, `reads` and `makes` have an entry per line."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.examples: list[Instr] = []
        """The first line of each form."""
        self.plain: list[tuple[Any, ...]] = []
        """Its arguments besides tensors; for a step of boxing, how it moves them."""
        self.of: list[int] = []
        """Which form."""
        self.reads: list[list[int]] = []
        """Numbers of the values it reads, in the order of its references."""
        self.makes: list[int] = []
        """Number of the first value it makes; the others follow."""
        self.numbers: dict[str, int] = {}
        """Number of the first value of a name."""
        numbers, known, count = self.numbers, dict[Any, int](), 0
        of, reads, makes = self.of.append, self.reads.append, self.makes.append
        for name in [*(i.name for i in program.inputs), *(c.name for c in program.constants)]:
            numbers[name] = count
            count += 1
        for instr in program.instrs:
            op, args, refs, outs = instr.op, instr.args, instr.refs, instr.outs
            # Mostly tensors come first and all else behind; comparing says so faster than looking at each.
            plain = args[len(refs) :] if args[: len(refs)] == refs else _plain(args)
            if instr.boxing is not None:
                plain = (instr.boxing,)
            key = (op, instr.ins, outs, *plain)
            form = known.get(key)
            if form is None:
                form = known[key] = len(self.examples)
                self.examples.append(instr)
                self.plain.append(plain)
            of(form)
            reads([numbers[r.name] + r.index for r in refs])
            makes(count)
            numbers[instr.name] = count
            count += len(outs) or 1
        self.values = count
        """How many values there are."""

    def number(self, ref: Ref) -> int:
        """Of a value."""
        return self.numbers[ref.name] + ref.index

    def whole(self, views: Collection[str]) -> list[int]:
        """For each value the one it looks at, through any number of `views` (ops); itself if it is no view."""
        out = list(range(self.values))
        looks = [i.op in views for i in self.examples]
        for form, reads, first in zip(self.of, self.reads, self.makes, strict=True):
            if looks[form] and reads:
                for v in range(first, first + max(1, len(self.examples[form].outs))):
                    out[v] = out[reads[0]]
        return out


_LAST: list[Forms] = []


def forms_of(program: Program) -> Forms:
    """The forms of a program; who asks about one of the last two gets the same again."""
    for forms in _LAST:
        if forms.program is program:
            return forms
    _LAST[:] = [Forms(program), *_LAST[:1]]
    return _LAST[0]


def _plain(args: Sequence[Any], lists: bool = True) -> tuple[Any, ...]:
    """Arguments with tensors, also those in lists, marked by where they stand, whatever their names."""
    if lists:
        args = [_plain(a, False) if isinstance(a, (tuple, list)) else a for a in args]
    return tuple([Ref if a.__class__ is Ref else a for a in args])
