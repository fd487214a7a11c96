"""From a program that fails to a small one that fails in the same way.

Options are made plainer first (one rank, plain SGD, one micro-batch, one step), then statements are taken out, in
halves and quarters down to single ones (delta debugging, Zeller and Hildebrandt 2002): what a removed one gave is
replaced by a plain tensor of its shape. In the end, results and frozen parameters go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.program import Program, Statement

PLAINER: tuple[tuple[str, Any], ...] = (
    ("again", False),
    ("precision", "f32"),
    ("micro_batches", 1),
    ("clip_norm", None),
    ("steps", 1),
    ("steps", 2),
    ("optimizer", "sgd"),
    ("way", "alone"),
    ("way", "lockstep"),
    ("ranks", 2),
    ("plan", "data"),
    ("plan", "zero3"),
    ("plan", "tensor"),
)


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 250) -> Program:
    """A smaller program for which `fails` still holds."""
    left = [tries]

    def still(other: Program) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(other)

    for key, value in PLAINER:
        if program.options.get(key) == value:
            continue
        options = {**program.options, key: value}
        if key == "way":
            options |= {"ranks": 1, "plan": "data"} if value == "alone" else {"micro_batches": 1, "precision": "f32"}
        if options["way"] == "alone" and (options["ranks"] != 1 or options["plan"] != "data"):
            continue
        other = replace(program, options=options)
        program = other if still(other) else program
    changed = True
    while changed and left[0] > 0:
        changed = False
        for other in _smaller(program):
            if still(other):
                program, changed = other, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something less, large pieces first."""
    real = [s for s in program.statements if not _is_stand_in(s)]
    size = max(1, len(real) // 2)
    while real:
        for at in range(0, len(real), size):
            other = program
            for s in real[at : at + size]:
                other = other.without(s.out)
            yield _swept(other)
        if size == 1:
            break
        size //= 2
    if len(program.results) > 1:
        for r in program.results:
            yield _swept(replace(program, results=tuple(x for x in program.results if x != r)))
    for s in program.statements:  # what a statement gave may be what the loss is made of
        if program.results != (s.out,) and len(s.shape) >= 2 and s.shape[0] == -1:
            yield _swept(replace(program, results=(s.out,)))
    for k in program.frozen:
        yield replace(program, frozen=tuple(x for x in program.frozen if x != k))
    if program.loss != "squares":
        yield replace(program, loss="squares")
    if program.dtype != "float64":
        yield replace(program, dtype="float64")
    if program.samples > 4:
        yield replace(program, samples=4)


def _is_stand_in(s: Statement) -> bool:
    return not s.ins and not s.init and ("x.sum(1)" in s.code[0] or "x.new_ones" in s.code[0])


def _swept(program: Program) -> Program:
    """Without statements that nothing needs."""
    needed, kept = set(program.results), []
    for s in reversed(program.statements):
        if s.out in needed:
            needed |= set(s.ins)
            kept.append(s)
    return replace(program, statements=tuple(reversed(kept)))
