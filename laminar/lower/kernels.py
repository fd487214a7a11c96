"""Kernels: which lines of a program a fusing compiler makes one.

Inductor reads and writes memory once for a whole group of elementwise ops and reductions. What a step takes then
depends on the groups: a value that stays inside one is never written. This follows its rules as far as
they decide that, and no further:

    a kernel of its own   products, attention, convolutions, sorts, and whatever is not named here
    views                 no kernel of their own
    everything else       joins the kernel that makes one of its inputs, if both run over as many elements and
                          nothing between them has to run elsewhere first; else a kernel that reads one of its
                          inputs; else it opens a new one

Sums over leading dims (gradients of biases and norms) run across the rows others run along, and are kernels of
their own. Groups come in an order in which they can run.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from laminar.cost.ops.interned import Forms, forms_of
from laminar.cost.sim.no_gc import uncollected
from laminar.ir.ops import ASYNC_OPS, FREE
from laminar.ir.program import Instr, Program
from laminar.lower.memory.mincut_recompute import BACKWARD, ELEMENTWISE, FUSES, ROWWISE, SMALL_REDUCTIONS

POINTWISE = frozenset(
    f"aten.{name}"
    for name in """embedding gather index.Tensor index_select cat stack constant_pad_nd slice_backward select_backward
    slice_scatter select_scatter nll_loss_forward nll_loss2d_forward tril triu repeat one_hot native_dropout
    native_dropout_backward full_like zeros_like ones_like empty_like new_zeros new_full avg_pool2d
    max_pool2d_with_indices bernoulli.p rand normal_functional _adaptive_avg_pool2d upsample_nearest2d flip roll
    clamp_min.Tensor clamp_max.Tensor argmax argmin any all prod prod.dim_int var.correction""".split()
) | {
    "laminar.gather_at",
    "laminar.nll_at",
    "laminar.nll_backward_at",
    "laminar.embedding_at",
    "laminar.batch_norm_moments",
    "laminar.batch_norm",
}
"""Ops besides those `recompute` knows that a compiler writes itself."""
WRITES_ITSELF = ELEMENTWISE | BACKWARD | FUSES | ROWWISE | SMALL_REDUCTIONS | POINTWISE
REDUCES = (
    FUSES - BACKWARD
    | ROWWISE
    | SMALL_REDUCTIONS
    | {"laminar.batch_norm_moments", "laminar.batch_norm", "aten.var.correction"}
)
PICKS = frozenset(("aten.nll_loss_forward", "laminar.nll_at", "aten.gather", "laminar.gather_at"))
"""Ops that take a few elements of their first input, which then need not be stored for them."""
MOST_TOUCHED = 32
"""Tensors read and written beyond which a kernel is closed. Assumed, not measured."""


@dataclass(slots=True)
class Kernel:
    """Lines that run as one. Values go by the numbers that `cost.forms` gives them."""

    fused: bool
    moves: bool
    size: int
    """Elements it runs over."""
    part: int
    """Which of the stretches that are compiled apart it belongs to: cut at collectives and where backward begins."""
    lines: list[int] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    """Kernels whose results it reads, by number."""
    feeds: set[int] = field(default_factory=set)
    depth: int = 0
    """Kernels on the longest way to it."""
    touches: set[int] = field(default_factory=set)
    small: set[int] = field(default_factory=set)
    """What it has reduced, and what it made of that."""


class _Fact(NamedTuple):
    """What grouping asks of a line, the same for all lines of its form."""

    op: str
    free: bool
    fused: bool
    picks: bool
    widens: bool
    size: int
    made: tuple[tuple[int, int], ...]
    """Which of its results there are, and their elements."""


def kernels(program: Program) -> list[tuple[int, ...]]:
    """The program's lines in groups, each the indices of what runs as one kernel.

    Views stand with what they are views of. Those of inputs stand first, and those of what a collective made before
    the first kernel that reads them: looking at what is still under way would be waiting for it.
    """
    with uncollected():
        return _Grouping(program).groups()


class _Grouping:
    def __init__(self, program: Program) -> None:
        self.forms = forms = forms_of(program)
        self.facts = [_fact(i, program) for i in forms.examples]
        self.whole = forms.whole(FREE)
        self.parts = _parts(forms)
        self.uses = Counter(chain.from_iterable(forms.reads))
        self.uses.update(forms.number(o.ref) for o in program.outputs)
        self.found: list[Kernel] = []
        self.maker = [-1] * forms.values
        self.readers: dict[int, list[int]] = {}

    def groups(self) -> list[tuple[int, ...]]:
        facts, whole, maker, found = self.facts, self.whole, self.maker, self.found
        first_views: list[tuple[int, ...]] = []
        awaited: dict[int, int] = {}
        """Views of what collectives made, each by the first value that it makes."""
        lines = zip(self.forms.of, self.forms.reads, self.forms.makes, self.parts, strict=True)
        for n, (form, reads, first, part) in enumerate(lines):
            fact = facts[form]
            if not fact.free:
                ins = [whole[v] for v in reads]
                self._add(n, fact, ins if len(ins) < 2 else list(dict.fromkeys(ins)), first, part)
                continue
            at = maker[whole[first]]
            if at >= 0 and not found[at].moves:
                found[at].lines.append(n)  # later lines of the same kernel may read it
            elif at < 0:
                first_views.append((n,))
            else:
                made = self.forms.makes[n + 1] if n + 1 < len(self.forms.of) else self.forms.values
                awaited.update(dict.fromkeys(range(first, made), n))
        out = first_views
        for k in self._in_order():
            if awaited:
                out += [(n,) for n in self._looked_at(found[k].lines, awaited)]
            out.append(tuple(found[k].lines))
        return out + [(n,) for n in sorted(set(awaited.values()))]

    def _looked_at(self, lines: list[int], awaited: dict[int, int]) -> list[int]:
        """Views that have to be there for these lines, in their order; they are awaited no more."""
        found: set[int] = set()
        todo = list(lines)
        while todo:
            for v in self.forms.reads[todo.pop()]:
                if v in awaited and awaited[v] not in found:
                    found.add(awaited[v])
                    todo.append(awaited[v])
        for v in [v for v, n in awaited.items() if n in found]:
            del awaited[v]
        return sorted(found)

    def _add(self, n: int, fact: _Fact, ins: list[int], first: int, part: int) -> None:
        found, maker, readers = self.found, self.maker, self.readers
        at = self._place(fact, ins, part)
        kernel = found[at]
        kernel.lines.append(n)
        kernel.touches.update(ins)
        depth = kernel.depth
        for v in ins:
            made = maker[v]
            if made >= 0 and made != at:
                kernel.needs.add(made)
                found[made].feeds.add(at)
                if found[made].depth >= depth:
                    depth = found[made].depth + 1
            if v in readers:
                readers[v].append(at)
            else:
                readers[v] = [at]
        if depth > kernel.depth:
            self._deepen(at, depth)
        for k, elements in fact.made:
            v = first + k
            maker[v] = at
            kernel.touches.add(v)
            if elements < kernel.size:
                kernel.small.add(v)

    def _deepen(self, at: int, depth: int) -> None:
        if not self.found[at].feeds:
            self.found[at].depth = depth
            return
        todo = [(at, depth)]
        while todo:
            k, d = todo.pop()
            kernel = self.found[k]
            if d > kernel.depth:
                kernel.depth = d
                todo += [(after, d + 1) for after in kernel.feeds]

    def _place(self, fact: _Fact, ins: list[int], part: int) -> int:
        """The kernel an op joins, by number; a new one if none will have it."""
        found, maker = self.found, self.maker
        if fact.fused:
            makers = [k for v in ins if (k := maker[v]) >= 0]
            beside = [k for v in ins for k in self.readers.get(v, ())[-4:]]
            for at in dict.fromkeys([*makers[::-1], *beside[::-1]]):
                kernel = found[at]
                if not kernel.fused or kernel.part != part or len(kernel.touches) > MOST_TOUCHED:
                    continue
                alike = kernel.size == fact.size or not kernel.small.isdisjoint(ins)
                if (alike or (fact.picks and maker[ins[0]] == at)) and not self._between(at, makers):
                    return at
        if fact.widens and ins and (made := maker[ins[0]]) >= 0:
            product = self.facts[self.forms.of[found[made].lines[0]]]
            if product.op == "aten.mm" and self.uses[ins[0]] == 1:
                return made  # a product that is only made to be widened comes out wide
        found.append(Kernel(fact.fused, fact.op in ASYNC_OPS, fact.size, part))
        return len(found) - 1

    def _between(self, first: int, makers: list[int]) -> bool:
        """Whether one of the `makers` can only run after `first` has.

        Parts follow each other, so all that lies between two kernels of one part is of that part.
        """
        found = self.found
        floor, part = found[first].depth, found[first].part
        todo = [m for m in makers if m != first]
        seen: set[int] = set()
        while todo:
            k = todo.pop()
            if k == first:
                return True
            kernel = found[k]
            if kernel.depth > floor and kernel.part == part and k not in seen:
                seen.add(k)
                todo += kernel.needs
        return False

    def _in_order(self) -> list[int]:
        """As the program's lines stand, each kernel where its last line stands, but behind what it needs."""
        found = self.found
        out: dict[int, None] = {}
        for k in sorted(range(len(found)), key=lambda k: found[k].lines[-1]):
            todo = [k] if k not in out else []
            while todo:
                waiting = [n for n in found[todo[-1]].needs if n not in out]
                if waiting:
                    todo += waiting
                else:
                    out[todo.pop()] = None
        return list(out)


def parts(program: Program) -> dict[str, int]:
    """By line, which stretch it belongs to, cut as `runtime.compiled` cuts."""
    return dict(zip((i.name for i in program.instrs), _parts(forms_of(program)), strict=True))


def _parts(forms: Forms) -> list[int]:
    begun, part = False, 0
    flying: dict[int, range] = {}
    """Values of collectives that nobody has read yet, each with all of its collective."""
    out = []
    for instr, reads, first in zip(forms.program.instrs, forms.reads, forms.makes, strict=True):
        moves = cut = instr.op in ASYNC_OPS
        if flying:
            for v in reads:
                if v in flying:
                    cut = True
                    for other in flying[v]:
                        del flying[other]
        if not begun and instr.phase != "forward":  # forward ends here, as in `recompute.early`
            begun = cut = True
        part += cut
        if moves:
            mine = range(first, first + max(1, len(instr.outs)))
            flying.update(dict.fromkeys(mine, mine))
        out.append(part)
    return out


def _fact(instr: Instr, program: Program) -> _Fact:
    made = tuple((k, math.prod(p.local(program.mesh).shape)) for k, p in enumerate(instr.outs) if p)
    sizes = [elements for _, elements in made]
    if instr.op in REDUCES:
        sizes += [math.prod(p.local(program.mesh).shape) for p in instr.ins]
    return _Fact(
        op=instr.op,
        free=instr.op in FREE,
        fused=instr.op in WRITES_ITSELF and not instr.kind and not _across(instr),
        picks=instr.op in PICKS,
        widens=instr.op == "aten._to_copy",
        size=max(sizes, default=0),
        made=made,
    )


def _across(instr: Instr) -> bool:
    """Whether it sums over leading dims only."""
    if instr.op not in ("aten.sum.dim_IntList", "aten.mean.dim") or not instr.outs or instr.outs[0] is None:
        return False
    dims = instr.args[1] if len(instr.args) > 1 and isinstance(instr.args[1], tuple) else ()
    rank = len(instr.ins[0].spec.shape)
    return bool(dims) and all(d % rank < rank - 1 for d in dims) and rank > 1
