"""Rules against arithmetic: every signature of a call, run rank by rank and put together again.

A `Case` is one real call of an op: its plain arguments and the tensors it reads. For a signature the
inputs are placed as it says (pieces, copies, or terms of random size and sign whose sum is the
value), each rank runs its local call exactly as a program would, and what the ranks hold together
must be what the op gives on whole tensors. Used by tests/rules/test_rules.py; collects nothing itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import caller, spec_of, unplain
from laminar.errors import PlacementError
from laminar.ir.graph import Graph, Input, Node, Output, map_refs
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.program import Instr, Placed
from laminar.ir.sbp import B, NdSbp, Partial, Split, check_placement, show
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec
from laminar.lower.lower import LOCAL_DIM, lower
from laminar.rules.notation import Call, Signature, call_of, localise
from laminar.rules.signing import Blocks, options
from laminar.runtime.check.in_process import lockstep
from laminar.runtime.code.local_op import prepare
from laminar.runtime.comm.shards import assemble, cut_pieces

SHAPE_ONLY = ("aten.empty.memory_format",)
"""Ops whose elements mean nothing: only the shapes of what they make are compared."""


@dataclass
class Case:
    """One call: an op, its positional arguments with `Ref`s for tensors, and those tensors."""

    op: str
    args: tuple[Any, ...]
    values: list[Tensor]

    @cached_property
    def whole(self) -> tuple[Tensor | None, ...]:
        """What the op makes of whole tensors."""
        with torch.no_grad():
            out = caller(self.op)(*[_fill(a, self.values) for a in self.args])
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    @cached_property
    def node(self) -> Node:
        """The node a captured graph would hold."""
        return Node("op", self.op, self.args, tuple(spec_of(o) if o is not None else None for o in self.whole))

    @cached_property
    def call(self) -> Call:
        """The call a rule sees."""
        return call_of(self.node, {Ref(f"x{i}"): spec_of(v) for i, v in enumerate(self.values)})

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a case different from another: everything but the numbers."""
        return self.op, repr(self.args), tuple(str(spec_of(v)) for v in self.values)

    def __str__(self) -> str:
        args = map_refs(self.args, lambda r: str(spec_of(self.values[int(r.name[1:])])))
        return f"{self.op}({', '.join(map(str, args))})"


@dataclass
class Failure:
    """A signature that arithmetic does not bear out."""

    case: Case
    signatures: tuple[Signature, ...]
    sizes: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.case}  {'  then '.join(map(str, self.signatures))}  on {self.sizes}: {self.why}"


def _fill(arg: Any, values: list[Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[int(arg.name[1:])]
    if isinstance(arg, (tuple, list)):
        return [_fill(a, values) for a in arg]
    return unplain(arg)


# --- placing ---------------------------------------------------------------------------------


def terms(x: Tensor, parts: int, op: str, random: torch.Generator) -> list[Tensor]:
    """Random tensors whose sum, maximum or minimum is `x`."""
    if op == "sum":
        others = [_noise(x, random) for _ in range(parts - 1)]
        at = int(torch.randint(parts, (), generator=random))
        last = x - sum(others) if others else x
        return [*others[:at], last, *others[at:]]
    owner = torch.randint(parts, x.shape, generator=random)
    out = []
    for r in range(parts):
        worse = _noise(x, random).abs() + 1
        out.append(torch.where(owner == r, x, x - worse if op == "max" else x + worse))
    return out


def _noise(x: Tensor, random: torch.Generator) -> Tensor:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return (torch.randn(x.shape, generator=random, dtype=torch.float64) * 3).to(x.dtype)
    return torch.randint(-7, 8, x.shape, generator=random).to(x.dtype)


def place(x: Tensor, nd: NdSbp, sizes: tuple[int, ...], random: torch.Generator) -> list[Tensor]:
    """What each rank holds of a whole tensor, rank by rank."""
    held = [x]
    for placement, parts in zip(nd, sizes, strict=True):
        grown: list[Tensor] = []
        for piece in held:
            if isinstance(placement, Split):
                grown += cut_pieces(piece, placement.dim, placement.blocks, parts)
            elif isinstance(placement, Partial):
                grown += terms(piece, parts, placement.op, random)
            else:
                grown += [piece] * parts
        held = grown
    return [h.contiguous() for h in held]


# --- running ---------------------------------------------------------------------------------


def _run(case: Case, ins: list[NdSbp], outs: list[NdSbp], hows: set[str], mesh: Mesh, held: list[list[Tensor]]) -> Any:
    """Outputs of every rank."""
    call, args, op = case.call, case.args, case.op
    if hows:
        (op,) = hows
        args = (*args, "offset", *LOCAL_DIM[op](case.args, call.ins, call.outs))
    instr = Instr(
        "op",
        op,
        args,
        tuple(Ref(f"x{i}") for i in range(len(ins))),
        tuple(Placed(s, nd) for s, nd in zip(call.ins, ins, strict=True)),
        tuple(Placed(s, nd) if s else None for s, nd in zip(call.outs, outs, strict=True)),
    )
    results = []
    for rank in range(mesh.ranks):
        target, local, kwargs = prepare(instr, mesh, rank, torch.device("cpu"))
        mine = [h[rank] for h in held]
        out = target(*[_given(a, mine) for a in local], **{k: _given(v, mine) for k, v in kwargs.items()})
        results.append(tuple(out) if isinstance(out, (tuple, list)) else (out,))
    return results


def _given(arg: Any, values: list[Tensor]) -> Any:
    if isinstance(arg, Ref):
        return values[int(arg.name[1:])]
    return [_given(a, values) for a in arg] if isinstance(arg, (list, tuple)) else arg


def _run_lowered(case: Case, ins: list[NdSbp], outs: list[NdSbp], mesh: Mesh) -> Any:
    """The same through a graph of one node: how expansions are run. Partial inputs are made by padding."""
    names = [f"x{i}" for i in range(len(ins))]
    made = [i for i, o in enumerate(case.node.outs) if o is not None]
    graph = Graph(
        tuple(Input(n, "buffer", spec_of(v)) for n, v in zip(names, case.values, strict=True)),
        (),
        (case.node,),
        tuple(Output(f"o{i}", "metric", Ref("op", i)) for i in made),
    )
    stored = {n: tuple(B if isinstance(p, Partial) else p for p in nd) for n, nd in zip(names, ins, strict=True)}
    plan = Plan(
        mesh, graph.hash, {"op": Choice(tuple(ins), tuple(outs))}, stored, {f"metric:o{i}": outs[i] for i in made}
    )
    results = lockstep.run_lockstep(lower(graph, plan), dict(zip(names, case.values, strict=True)))
    return [tuple(r.get(f"metric:o{i}") for i in range(len(outs))) for r in results]


# --- comparing -------------------------------------------------------------------------------


EXACT = 1e-9
"""Relative to the largest element, in float64."""
HALVES = {torch.float16, torch.bfloat16}


def _tolerance(case: Case) -> float:
    dtypes = {
        t.dtype for t in (*case.values, *case.whole) if t is not None and (t.is_floating_point() or t.is_complex())
    }
    narrow = dtypes - {torch.float64, torch.complex128}
    return EXACT if not narrow else 2e-2 if narrow & HALVES else 2e-5


def _differs(got: Tensor, want: Tensor, tolerance: float) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{spec_of(got)} instead of {spec_of(want)}"
    if not want.numel():
        return ""
    if not (want.is_floating_point() or want.is_complex()):
        return "" if torch.equal(got, want) else "other values"
    finite = want.isfinite()
    scale = float(want[finite].abs().max()) if finite.any() else 1.0
    least = 1e-2 if tolerance == EXACT else 1.0  # rounding of terms, which may be larger than their sum
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance * max(scale, least), equal_nan=True):
        return ""
    return f"off by {float((got - want).abs().nan_to_num().max()):.3g}"


def check_one(case: Case, signs: tuple[Signature, ...], sizes: tuple[int, ...], random: torch.Generator) -> str:
    """What is wrong with a call placed by one signature per axis; empty if nothing is."""
    mesh = Mesh({f"a{i}": n for i, n in enumerate(sizes)})
    ins = [tuple(s.ins[i] for s in signs) for i in range(len(case.call.ins))]
    outs = [tuple(s.outs[i] for s in signs) for i in range(len(case.call.outs))]
    hows = {s.how for s in signs if s.how}
    try:
        if "expand" in hows:
            results = _run_lowered(case, ins, outs, mesh)
        else:
            held = [place(v, nd, sizes, random) for v, nd in zip(case.values, ins, strict=True)]
            with torch.no_grad():
                results = _run(case, ins, outs, hows, mesh, held)
    except PlacementError as error:
        return f"refused: {error}"
    except Exception as error:  # any crash of a local call is a wrong signature
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    tolerance = _tolerance(case)
    for i, (nd, spec) in enumerate(zip(outs, case.call.outs, strict=True)):
        if spec is None:
            continue
        if why := _wrong_output([r[i] for r in results], case.whole[i], spec, nd, mesh, case.op, tolerance):
            return f"output {i} {show(nd)}: {why}"
    return ""


def _wrong_output(
    pieces: list[Any], want: Any, spec: TensorSpec, nd: NdSbp, mesh: Mesh, op: str, tolerance: float
) -> str:
    for rank, piece in enumerate(pieces):
        if piece is None:
            return f"rank {rank} made nothing"
        expected = Placed(spec, nd).local(mesh, rank)
        if spec_of(piece) != expected:
            return f"rank {rank} made {spec_of(piece)} instead of {expected}"
    if op in SHAPE_ONLY:
        return ""
    # Copies must agree: put the tensor together once for every choice of who speaks for a broadcast axis.
    for speaker in itertools.product(*[range(n) if p == B else (0,) for p, n in zip(nd, mesh.sizes, strict=True)]):
        ranks = []
        for r in range(mesh.ranks):
            coords = mesh.coords(r)
            ranks.append(mesh.rank(tuple(s if p == B else c for s, p, c in zip(speaker, nd, coords, strict=True))))
        if why := _differs(assemble([pieces[r] for r in ranks], spec.shape, nd, mesh), want, tolerance):
            return why
    return ""


# --- one axis, two axes ----------------------------------------------------------------------


def blocks_for(call: Call, counts: tuple[int, ...] = (2, 3)) -> Blocks:
    """A few block counts in circulation for every size in the call."""
    return tuple((n, counts) for n in sorted({n for s in (*call.ins, *call.outs) if s for n in s.shape}))


def placeable(case: Case, signs: tuple[Signature, ...]) -> bool:
    """Terms of an infinite value say nothing, those of half precision little: such inputs are never partial here."""
    return all(
        not any(isinstance(s.ins[i], Partial) for s in signs)
        or not v.is_floating_point()
        or (v.dtype not in HALVES and bool(v.isfinite().all()))
        for i, v in enumerate(case.values)
    )


def check_axis(
    case: Case, parts: int, random: torch.Generator, signatures: Iterable[Signature] | None = None
) -> tuple[int, list[Failure]]:
    """How many signatures of a call on one axis were checked, and those that are wrong."""
    try:
        found = options(case.call, parts, blocks_for(case.call)) if signatures is None else tuple(signatures)
    except Exception as error:  # a rule that can't be applied to a real call is wrong
        return 1, [Failure(case, (), (parts,), f"{type(error).__name__}: {error}")]
    failures, count = [], 0
    for sign in found[1:]:
        if placeable(case, (sign,)):
            count += 1
            if why := check_one(case, (sign,), (parts,), random):
                failures.append(Failure(case, (sign,), (parts,), why))
    return count, failures


def pairs(case: Case, sizes: tuple[int, int]) -> Iterator[tuple[Signature, Signature]]:
    """Signatures that may follow each other on two axes; those that mix kinds of partial may not."""
    for first in options(case.call, sizes[0], blocks_for(case.call))[1:]:
        local = localise(case.call, first, sizes[0])
        for second in options(local, sizes[1], blocks_for(local))[1:]:
            nds = [*zip(first.ins, second.ins, strict=True), *zip(first.outs, second.outs, strict=True)]
            try:
                for nd, spec in zip(nds, (*case.call.ins, *case.call.outs), strict=True):
                    if spec is not None:
                        check_placement(spec, nd, sizes, "a tensor")
            except PlacementError:
                continue
            if placeable(case, (first, second)):
                yield first, second
