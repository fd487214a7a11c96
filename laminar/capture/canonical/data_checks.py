"""Looks at data that only check it: what would raise or warn is taken not to, as in any step that runs.

    if labels.max() >= self.vocab_size:
        raise ValueError(...)
    assert torch.isfinite(x).all()

Which way such a question goes decides about an error, not about what is computed, so the path that goes on is the one
to capture. The statement is found in the source, by the position of the instruction that asks; where there is no
source, or the branch does anything but raise or warn, the question depends on data like any other. Checks are not
repeated in captured steps.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import linecache
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laminar.capture.canonical.canonical import Canonical, catches
from laminar.capture.canonical.certain_draws import item_of
from laminar.capture.torch_private import DataDependentOutputException, FakeTensor, tensor_checks, torch_assert

HERE = str(Path(__file__).parents[1])
SAYS = frozenset("warn warn_once warning warning_once info info_once debug log print".split())
"""Functions that tell somebody something."""
End = tuple[int, int]
"""Line and column at which an expression ends."""


def answer() -> bool | None:
    """What a question about data must give for the step to go on, if that is all it decides."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    if frame is None:
        return None
    end = _ends(frame.f_code).get(frame.f_lasti)
    return None if end is None else _answers(frame.f_code.co_filename).get(end)


@functools.lru_cache(maxsize=256)
def _ends(code: types.CodeType) -> dict[int, End]:
    """For every instruction that may ask for a truth, where the expression ends that it asks about.

    A jump has the place of its whole statement, so what counts is the instruction before it, which made the value.
    """
    out: dict[int, End] = {}
    before: Any = None
    for instr in dis.get_instructions(code):
        at = before if "JUMP" in instr.opname else instr
        if at is not None and at.positions is not None and at.positions.end_lineno is not None:
            out[instr.offset] = at.positions.end_lineno, at.positions.end_col_offset or 0
        before = instr
    return out


@functools.lru_cache(maxsize=64)
def _answers(filename: str) -> dict[End, bool]:
    """For every expression of a file that stands in the test of a check: the truth that passes it."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return {}
    out: dict[End, bool] = {}
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Try, ast.TryStar)):  # an error that is caught again is a way to branch
            todo += [n for part in (node.handlers, node.orelse, node.finalbody) for n in part]
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Assert):
            _mark(node.test, True, out)
        elif isinstance(node, ast.If) and _only_complains(node.body):
            _mark(node.test, False, out)
        elif isinstance(node, ast.If) and node.orelse and _only_complains(node.orelse):
            _mark(node.test, True, out)
    return out


def _only_complains(body: Sequence[ast.stmt]) -> bool:
    """Whether statements raise in the end, or do nothing but warn."""
    if isinstance(body[-1], ast.Raise):
        return all(isinstance(s, (ast.Expr, ast.Assign, ast.AnnAssign)) for s in body[:-1])
    return all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and _name(s.value) in SAYS for s in body)


def _name(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _mark(test: ast.expr, want: bool, out: dict[End, bool]) -> None:
    """The truth that each operand must have for the whole to be as wanted."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _mark(test.operand, not want, out)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            _mark(value, want, out)
    else:
        out[test.end_lineno or 0, test.end_col_offset or 0] = want


@catches(torch_assert)
def _asserted(mode: Canonical, condition: Any, message: str) -> None:
    if not isinstance(condition, FakeTensor):
        torch_assert(condition, message)


@catches(Tensor.__bool__)
def _truth(mode: Canonical, input: Tensor) -> bool:
    try:
        return bool(input)
    except DataDependentOutputException:
        found = answer()
        if found is None:
            raise
        return found


@catches(Tensor.item)
def _item(mode: Canonical, input: Tensor) -> Any:
    try:
        return item_of(mode, input)
    except DataDependentOutputException:
        found = answer() if input.dtype == torch.bool else None
        if found is None:
            raise
        return found


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, torch's own checks of tensors pass without a look at values that nobody has."""

    def checked(check: Any, at: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            if not isinstance(args[at] if len(args) > at else kwargs.get("cond"), FakeTensor):
                check(*args, **kwargs)

        return run

    with tensor_checks(checked):
        yield
