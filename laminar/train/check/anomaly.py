"""Where the first NaN or infinity came from: module, op, line, rank.

Every line of the program is looked at as it runs, which is slow and meant for looking. A NaN is
blamed on the first line that made one. An infinity is only suspect, for masks are made of them: it
is blamed if the step ends with a loss or gradient that is not finite and no NaN came before. Ranks
compare what they saw at the end of the step, so that all stop with the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from laminar.errors import NonFiniteError
from laminar.ir.program import Instr
from laminar.train.world import World

FILLS = ("aten.full", "aten.masked_fill", "aten.where", "aten.scalar_tensor", "aten.constant_pad_nd", "aten.fill")
"""Ops that put an infinity where they are told."""
HARMLESS_VIEWS = ("aten.view", "aten.expand", "aten.permute", "aten.t", "aten._to_copy", "aten.clone", "aten.slice")


class Watched:
    """What one rank saw in this step; call it with each line and its result."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.count = 0
        self.tainted: set[str] = set()
        """Lines whose result holds an infinity."""
        self.nan: tuple[int, str, dict[str, str]] | None = None
        self.inf: tuple[int, str, dict[str, str]] | None = None

    def __call__(self, instr: Instr, result: Any) -> None:
        """Look at one line's result."""
        self.count += 1
        if self.nan is not None:
            return
        for t in _tensors(result):
            if not t.is_floating_point() or bool(torch.isfinite(t).all()):
                continue
            if bool(torch.isnan(t).any()):
                self.nan = (self.count, "NaN", self._about(instr))
                return
            inherited = any(r.name in self.tainted for r in instr.refs)
            self.tainted.add(instr.name)
            if self.inf is None and not inherited and not instr.op.startswith((*FILLS, *HARMLESS_VIEWS)):
                self.inf = (self.count, "infinity", self._about(instr))

    def _about(self, instr: Instr) -> dict[str, str]:
        return {
            "module": instr.module or "(the loss)",
            "op": instr.op if not instr.kind else f"{instr.kind} ({instr.why})",
            "phase": instr.phase,
            "at": instr.where,
            "rank": str(self.rank),
        }

    def forget(self) -> None:
        """Begin anew."""
        self.count, self.nan, self.inf = 0, None, None
        self.tainted.clear()

    def report(self, world: World, step: int, failed: bool) -> None:
        """Compare with the other ranks and raise if anyone saw an anomaly; then begin anew."""
        mine = self.nan or (self.inf if failed else None)
        if mine is not None and self.nan is not None and self.inf is not None:
            mine = self.inf  # the infinity came first, and NaNs are made of them
        found = [f for f in world.gather_objects(mine) if f is not None]
        self.forget()
        if found:
            _, what, about = min(found, key=lambda f: (f[0], f[2]["rank"]))
            raise NonFiniteError(
                f"step {step}: the first {what} was made here",
                **about,
                next="look at what goes into that op; check learning rate and inputs",
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
