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

from laminar.cost.work import FREE
from laminar.ir.codec import Ref
from laminar.ir.program import Instr, Program
from laminar.lower.recompute import BACKWARD, ELEMENTWISE, FUSES, ROWWISE, SMALL, early

POINTWISE = frozenset(
    f"aten.{name}"
    for name in """embedding gather index.Tensor index_select cat stack constant_pad_nd slice_backward select_backward
    slice_scatter select_scatter nll_loss_forward nll_loss2d_forward tril triu repeat one_hot native_dropout
    native_dropout_backward full_like zeros_like ones_like empty_like new_zeros new_full avg_pool2d
    max_pool2d_with_indices bernoulli.p rand normal_functional _adaptive_avg_pool2d upsample_nearest2d flip roll
    clamp_min.Tensor clamp_max.Tensor argmax argmin any all prod prod.dim_int var.correction""".split()
) | {"laminar.gather_at", "laminar.nll_at", "laminar.nll_backward_at", "laminar.embedding_at",
     "laminar.batch_norm_moments", "laminar.batch_norm"}  # fmt: skip
"""Ops besides those `recompute` knows that a compiler writes itself."""
WRITES_ITSELF = ELEMENTWISE | BACKWARD | FUSES | ROWWISE | SMALL | POINTWISE
REDUCES = (
    FUSES - BACKWARD | ROWWISE | SMALL | {"laminar.batch_norm_moments", "laminar.batch_norm", "aten.var.correction"}
)
PICKS = frozenset(("aten.nll_loss_forward", "laminar.nll_at", "aten.gather", "laminar.gather_at"))
"""Ops that take a few elements of their first input, which then need not be stored for them."""
MOST_TOUCHED = 32
"""Tensors read and written beyond which a kernel is closed. Assumed, not measured."""


@dataclass
class Kernel:
    """Lines that run as one."""

    fused: bool
    size: int
    """Elements it runs over."""
    lines: list[int] = field(default_factory=list)
    needs: set[int] = field(default_factory=set)
    """Kernels whose results it reads, by number."""
    feeds: set[int] = field(default_factory=set)
    depth: int = 0
    """Kernels on the longest way to it."""
    touches: set[Ref] = field(default_factory=set)
    small: set[Ref] = field(default_factory=set)
    """What it has reduced, and what it made of that."""
    part: int = 0
    """Which of the stretches that are compiled apart it belongs to: cut at collectives and where backward begins."""


def kernels(program: Program) -> list[tuple[int, ...]]:
    """The program's lines in groups, each the indices of what runs as one kernel.

    Views stand with what they are views of; those of inputs and of what a collective made stand alone.
    """
    return _Grouping(program).groups()


class _Grouping:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.found: list[Kernel] = []
        self.maker: dict[Ref, int] = {}
        self.readers: dict[Ref, list[int]] = {}
        self.parts = parts(program)
        self.uses = Counter(r for i in program.instrs for r in i.refs)
        self.uses.update(o.ref for o in program.outputs)

    def groups(self) -> list[tuple[int, ...]]:
        base: dict[Ref, Ref] = {}
        views: dict[int, list[int]] = {}
        for n, instr in enumerate(self.program.instrs):
            if instr.op in FREE:
                source = base.get(instr.refs[0], instr.refs[0]) if instr.refs else Ref(instr.name)
                base.update({Ref(instr.name, k): source for k in range(max(1, len(instr.outs)))})
                at = self.maker.get(source, -1)
                if at >= 0 and not self.program.instrs[self.found[at].lines[0]].moves:
                    self.found[at].lines.append(n)  # later lines of the same kernel may read it
                else:
                    views.setdefault(at, []).append(n)
                continue
            self._add(n, instr, list(dict.fromkeys(base.get(r, r) for r in instr.refs)))
        out: list[tuple[int, ...]] = [(v,) for v in views.get(-1, [])]
        for k in self._in_order():
            out += [tuple(self.found[k].lines), *((v,) for v in views.get(k, []))]
        return out

    def _add(self, n: int, instr: Instr, ins: list[Ref]) -> None:
        at = self._place(instr, ins)
        kernel = self.found[at]
        kernel.lines.append(n)
        kernel.touches.update(ins)
        for ref in ins:
            made = self.maker.get(ref)
            if made is not None and made != at:
                kernel.needs.add(made)
                self.found[made].feeds.add(at)
                self._deepen(at, self.found[made].depth + 1)
            self.readers.setdefault(ref, []).append(at)
        for k, out in enumerate(instr.outs):
            if out is not None:
                ref = Ref(instr.name, k)
                self.maker[ref] = at
                kernel.touches.add(ref)
                if math.prod(out.local(self.program.mesh).shape) < kernel.size:
                    kernel.small.add(ref)

    def _deepen(self, at: int, depth: int) -> None:
        todo = [(at, depth)]
        while todo:
            k, d = todo.pop()
            if d > self.found[k].depth:
                self.found[k].depth = d
                todo += [(after, d + 1) for after in self.found[k].feeds]

    def _place(self, instr: Instr, ins: list[Ref]) -> int:
        """The kernel an op joins, by number; a new one if none will have it."""
        size, part = _size(instr, self.program), self.parts[instr.name]
        fused = instr.op in WRITES_ITSELF and not instr.kind and not _across(instr)
        if fused:
            makers = [self.maker[r] for r in ins if r in self.maker]
            beside = [k for r in ins for k in self.readers.get(r, [])[-4:]]
            for at in dict.fromkeys([*reversed(makers), *reversed(beside)]):
                kernel = self.found[at]
                alike = kernel.size == size or any(r in kernel.small for r in ins)
                alike = alike or (instr.op in PICKS and self.maker.get(ins[0]) == at)
                if not kernel.fused or kernel.part != part or not alike or len(kernel.touches) > MOST_TOUCHED:
                    continue
                if not any(self._reaches(at, m) for m in makers if m != at):
                    return at
        if instr.op == "aten._to_copy" and ins and (made := self.maker.get(ins[0])) is not None:
            product = self.program.instrs[self.found[made].lines[0]]
            if product.op == "aten.mm" and self.uses[ins[0]] == 1:
                return made  # a product that is only made to be widened comes out wide
        self.found.append(Kernel(fused, size, part=part))
        return len(self.found) - 1

    def _reaches(self, first: int, last: int) -> bool:
        """Whether `last` runs after `first` has."""
        floor, todo, seen = self.found[first].depth, [last], set()
        while todo:
            k = todo.pop()
            if k == first:
                return True
            if k in seen or self.found[k].depth <= floor:
                continue
            seen.add(k)
            todo += self.found[k].needs
        return False

    def _in_order(self) -> list[int]:
        """As the program's lines stand, each kernel where its last line stands, but behind what it needs."""
        order = sorted(range(len(self.found)), key=lambda k: self.found[k].lines[-1])
        out: dict[int, None] = {}

        def put(k: int) -> None:
            todo = [k]
            while todo:
                top = todo[-1]
                waiting = [n for n in self.found[top].needs if n not in out]
                if waiting:
                    todo += waiting
                else:
                    out[todo.pop()] = None

        for k in order:
            if k not in out:
                put(k)
        return list(out)


def parts(program: Program) -> dict[str, int]:
    """By line, which stretch it belongs to, cut as `runtime.compiled` cuts."""
    first, late, part = early(program), False, 0
    flying: set[str] = set()
    out = {}
    for instr in program.instrs:
        arrived = {r.name for r in instr.refs} & flying
        begins = instr.name not in first and not late
        if arrived or begins or instr.moves:
            part += 1
        flying -= arrived
        late = late or begins
        if instr.moves:
            flying.add(instr.name)
        out[instr.name] = part
    return out


def _size(instr: Instr, program: Program) -> int:
    shapes = [p.local(program.mesh).shape for p in instr.outs if p]
    if instr.op in REDUCES:
        shapes += [p.local(program.mesh).shape for p in instr.ins]
    return max((math.prod(s) for s in shapes), default=0)


def _across(instr: Instr) -> bool:
    """Whether it sums over leading dims only."""
    if instr.op not in ("aten.sum.dim_IntList", "aten.mean.dim") or not instr.outs or instr.outs[0] is None:
        return False
    dims = instr.args[1] if len(instr.args) > 1 and isinstance(instr.args[1], tuple) else ()
    rank = len(instr.ins[0].spec.shape)
    return bool(dims) and all(d % rank < rank - 1 for d in dims) and rank > 1
