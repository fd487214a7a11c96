"""Recompute: which forward values backward reads back from memory, and which it recomputes.

Between forward and backward everything that backward reads has to lie somewhere. What is cheap to make
again (element by element, from values that are kept anyway) need not. The choice is a minimum cut. Each
forward value v is an edge in(v) -> out(v) that costs v's bytes on a rank; each op that may run again
stands between the outs of what it reads and the ins of what it makes, and costs the traffic that running
it again causes; what backward reads hangs at the sink. An edge in the cut is a value kept or an op run
again, and the smallest cut is the cheapest choice of all.

    traffic   a value that is recomputed for an op that can't be fused with its making (a product, a
              convolution) is written once more, and what it is made of is read once more, unless a kernel
              that reads that anyway can write it along the way. One byte of traffic counts `TRAFFIC`
              bytes of memory. Values recomputed inside a fused kernel cost next to nothing, but not
              nothing, so that none is recomputed without need.
    views     cost nothing and are never kept: keeping one would keep all of the tensor behind it.
    norms     are written out first where the caller says so (`written_out`): their statistics are small
              and kept, the rest is elementwise.
    reach     a residual stream could be recomputed from its first value and everything ever added to it,
              all of it at the moment backward starts. So a value may be recomputed only from values
              that lie at most `HEAVY_REACH` heavy ops before it.

What a plan recomputes (`lower/memory/planned_recompute.py`) is backward here: it reads what its blocks keep, and stays
as it is, since only lines of forward are chosen from. Products, attention, convolutions, reductions and collectives are
never run again; nor is any op not named here. Results are those of the program without this pass, to the last bit: the
same ops run on the same values, some of them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from laminar.ir.graph import Node, map_refs, refs_in
from laminar.ir.ops import FREE
from laminar.ir.program import Instr, Placed, Program, placed
from laminar.ir.serial.codec import Ref
from laminar.lower.boxing.overlap import drop_unused
from laminar.lower.memory.offload import offloaded, without_offload
from laminar.lower.memory.planned_recompute import early, run_again
from laminar.rules.notation import call_of
from laminar.rules.ops.expand import Sheet, expand

TRAFFIC = 0.45
"""Bytes of memory that a byte of traffic is worth. What that decides, in bytes moved for each byte saved: an activation
function whose input backward reads anyway (1) and one behind a norm per channel (2) run again; a norm's narrow output
(3) and the narrow copy of a weight (3) are kept. Measured on an H200, GPT of 355M: see bench/results/gpu.jsonl."""
RECOMPUTED_BYTE = 1 / 64
"""What each byte recomputed costs inside a fused kernel; only breaks ties. Assumed, not measured."""
SMALL_SHARE = 8
"""Sources that are smaller than the result by this factor are read for nothing: statistics, biases."""
HEAVY_REACH = 4
"""Heavy ops a value may be away from what it is made from again: about half of a transformer block."""

ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in """relu gelu silu tanh sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal abs sign sin
    cos tan erf floor ceil round trunc hardtanh hardswish hardsigmoid leaky_relu elu celu softplus mish threshold isnan
    isinf logical_not bitwise_not neg add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor
    mul.Scalar div.Tensor div.Scalar pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor clamp clamp.Tensor clamp_min
    clamp_max maximum minimum where.self masked_fill.Scalar masked_fill.Tensor addcmul addcdiv lerp.Scalar lerp.Tensor
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor
    ge.Scalar logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor _to_copy clone
    full scalar_tensor arange zeros ones""".split()
) | {"laminar.uniform", "laminar.normal", "laminar.batch_norm_apply"}
"""Ops that fuse into whoever reads them, keyed draws among them: the key is an input."""
ROWWISE = frozenset(("aten.native_layer_norm", "aten._softmax", "aten._log_softmax"))
"""Norms over the last dims, if not written out: one pass over what they read, so worth running again."""
BACKWARD = frozenset(
    f"aten.{name}"
    for name in """threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward hardtanh_backward
    leaky_relu_backward elu_backward softplus_backward hardswish_backward mse_loss_backward""".split()
)
"""Elementwise ops that only backward has."""
FUSES = (
    BACKWARD
    | frozenset(
        f"aten.{name}"
        for name in """native_layer_norm_backward native_group_norm_backward _softmax_backward_data mean mean.dim amax
    _log_softmax_backward_data nll_loss_backward nll_loss2d_backward sum sum.dim_IntList amin""".split()
    )
    | {"laminar.batch_norm_backward", "laminar.batch_norm_sums", "laminar.batch_norm_grad"}
)
"""Readers besides elementwise ops that take a value from the kernel that makes it, without memory between."""
SMALL_REDUCTIONS = frozenset(
    f"aten.{name}" for name in "sum sum.dim_IntList mean mean.dim amax amin var_mean.correction".split()
)
"""Reductions inside norms: kept, being small, but no distance."""
WRITTEN_OUT_OPS = ("aten.native_layer_norm", "aten._softmax", "aten._log_softmax", "laminar.batch_norm")


@dataclass(frozen=True, slots=True)
class RecomputeOp:
    """An op as the choice sees it. Values are numbers; those nobody here makes are inputs of the step."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    again: float
    """What running it again costs, in bytes; infinite if it may not."""


def choose(
    ops: Sequence[RecomputeOp], keep: dict[int, float], rewrite: dict[int, float], wanted: set[int]
) -> tuple[set[int], set[int]]:
    """Values to keep and ops to run again, at the least cost for which everything `wanted` is at hand.

    `keep` is what keeping a value costs (inputs of the step are at hand for nothing and are not in it),
    `rewrite` what a value costs beyond its op if it is recomputed.
    """
    made = {v for op in ops for v in op.makes}
    number = {v: k for k, v in enumerate(sorted(made))}
    n = len(number)
    source, sink = 2 * n + len(ops), 2 * n + len(ops) + 1
    edges: list[tuple[int, int, float]] = []
    for v, k in number.items():
        edges.append((2 * k, 2 * k + 1, keep[v]))
        if rewrite.get(v):
            edges.append((source, 2 * k, rewrite[v]))
        if v in wanted:
            edges.append((2 * k + 1, sink, np.inf))
    for i, op in enumerate(ops):
        edges.append((source, 2 * n + i, op.again))
        edges += [(2 * n + i, 2 * number[v], np.inf) for v in op.makes]
        edges += [(2 * number[v] + 1, 2 * n + i, np.inf) for v in op.reads if v in made]
    late = _sink_side(sink + 1, edges, source, sink)
    kept = {v for v, k in number.items() if 2 * k not in late and 2 * k + 1 in late}
    return kept, {i for i in range(len(ops)) if 2 * n + i in late}


def _sink_side(nodes: int, edges: list[tuple[int, int, float]], source: int, sink: int) -> set[int]:
    """The side of the sink in the minimum cut that lies nearest to it."""
    rows, cols, given = zip(*edges, strict=True) if edges else ((), (), ())
    costs = np.array(given, dtype=np.float64)
    known = np.isfinite(costs)
    finite = sum(costs[known].tolist())
    most = 1 << 28
    unit = max(finite, 1.0) / most if finite > most or bool((costs[known] % 1).any()) else 1.0
    caps = np.full(len(costs), 2 * most)
    caps[known] = np.minimum(np.rint(costs[known] / unit), most)
    graph = csr_matrix((caps.astype(np.int32), (rows, cols)), shape=(nodes, nodes))
    flow = maximum_flow(graph, source, sink).flow
    left = graph - flow  # what each edge could still carry; edges back carry minus what flows
    left.data = np.where(left.data > 0, 1, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)
    return {int(k) for k in reached}


# --- programs --------------------------------------------------------------------------------


def recompute(program: Program, *, traffic: float = TRAFFIC, reach: int = HEAVY_REACH) -> Program:
    """The same program, with what is cheap recomputed in backward instead of kept, or sent to the host."""
    program = without_offload(program)
    first = early(program)
    forward = [i for i in program.instrs if i.name in first]
    lying = {Ref(i.name, k): p for i in forward for k, p in enumerate(i.outs) if p is not None}
    size = {ref: p.local(program.mesh).nbytes for ref, p in lying.items()}
    number = {ref: k for k, ref in enumerate(size)}
    given = {i.name: i.placed.local(program.mesh).nbytes for i in program.inputs}
    leaving = {o.ref for o in program.outputs}
    far = _far(forward, reach)
    ops = []
    for instr in forward:
        makes = tuple(number[Ref(instr.name, k)] for k, p in enumerate(instr.outs) if p is not None)
        cost = np.inf
        if instr.op in FREE:
            cost = 0.0
        elif (instr.op in ELEMENTWISE or instr.op in ROWWISE) and instr.name not in far:
            cost = traffic * sum(given.get(r.name, 0) for r in set(instr.refs))
            cost += RECOMPUTED_BYTE * sum(size[Ref(instr.name, k)] for k, p in enumerate(instr.outs) if p)
        ops.append(RecomputeOp(tuple({number[r] for r in instr.refs if r in number}), makes, cost))
    makers = {i.name: i for i in forward}
    keep = {number[ref]: np.inf if makers[ref.name].op in FREE else float(nbytes) for ref, nbytes in size.items()}
    keep |= {number[ref]: 0.0 for ref in leaving if ref in number and makers[ref.name].op not in FREE}
    moved, wanted = _readers(program, first, makers, size)
    rewrite = {number[r]: traffic * nbytes for r, nbytes in moved.items()}
    _, again = choose(ops, keep, rewrite, {number[r] for r in wanted})
    return offloaded(drop_unused(run_again(program, {forward[i].name for i in again}, ".again")))


def _far(forward: Sequence[Instr], reach: int) -> set[str]:
    """Instructions that would have to look back over more than `reach` heavy ops to run again."""
    depth: dict[str, int] = {}
    oldest: dict[str, int] = {}
    far: set[str] = set()
    for instr in forward:
        before = [r.name for r in instr.refs if r.name in depth]
        cheap = instr.op in FREE or instr.op in ELEMENTWISE or instr.op in ROWWISE
        depth[instr.name] = max((depth[n] for n in before), default=0) + (
            not cheap and instr.op not in SMALL_REDUCTIONS
        )
        oldest[instr.name] = min((oldest[n] for n in before), default=depth[instr.name])
        if not cheap or depth[instr.name] - oldest[instr.name] > reach:
            oldest[instr.name] = depth[instr.name]
            if cheap and instr.op not in FREE:
                far.add(instr.name)
    return far


def _readers(
    program: Program, first: set[str], makers: dict[str, Instr], size: dict[Ref, int]
) -> tuple[dict[Ref, float], set[Ref]]:
    """Traffic of values that backward would have to make in a kernel of their own, and all values it reads.

    Such a kernel writes the value and reads what it is made of, unless an elementwise op of backward reads that
    as well: then the two are one kernel, and only the writing is left.
    """
    wanted: set[Ref] = set()
    alone: set[Ref] = set()
    shared: set[Ref] = set()
    hard: set[Ref] = set()

    def behind(ref: Ref) -> Ref:
        while ref.name in makers and makers[ref.name].op in FREE:
            ref = makers[ref.name].refs[0]
        return ref

    for instr in reversed(program.instrs):
        if instr.name in first:
            continue
        if instr.op in FREE:  # read as its own readers read it
            unfused = any(Ref(instr.name, k) in hard for k in range(len(instr.outs)))
        else:
            unfused = instr.op not in ELEMENTWISE and instr.op not in FUSES
        for ref in instr.refs:
            if unfused:
                hard.add(ref)
            if ref.name in first:
                wanted.add(ref)
                if unfused:
                    alone.add(behind(ref))
                elif instr.op in ELEMENTWISE or instr.op in BACKWARD:
                    shared.add(behind(ref))
    moved: dict[Ref, float] = {}
    for ref in alone & size.keys():
        sources = {behind(r) for r in makers[ref.name].refs} & size.keys()
        moved[ref] = size[ref] + sum(size[s] for s in sources - shared if SMALL_SHARE * size[s] > size[ref])
    return moved, wanted


# --- norms written out -----------------------------------------------------------------------


def written_out(program: Program) -> Program:
    """The program with forward norms and softmaxes as small statistics and elementwise ops.

    For code that is fused anyway: then the statistics are kept and the rest is recomputed in backward.
    Rounding may differ from the fused kernels in the last bits.
    """
    first = early(program)
    out: list[Instr] = []
    renamed: dict[Ref, Ref] = {}

    def now(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    for instr in program.instrs:
        if not renamed.keys().isdisjoint(instr.refs):
            instr = replace(instr, args=map_refs(instr.args, now), refs=tuple(map(now, instr.refs)))
        if instr.op not in WRITTEN_OUT_OPS or instr.name not in first:
            out.append(instr)
            continue
        lines, ends = _lines(instr)
        out += lines
        renamed |= {Ref(instr.name, k): end for k, end in enumerate(ends)}
    outputs = tuple(replace(o, ref=now(o.ref)) for o in program.outputs)
    return drop_unused(replace(program, instrs=tuple(out), outputs=outputs))


def _lines(instr: Instr) -> tuple[list[Instr], tuple[Ref, ...]]:
    """What a norm is written out as, and which of that are its results."""
    given = {f"@{k}": ref for k, ref in reversed(list(enumerate(instr.refs)))}
    numbers = {ref: Ref(name) for name, ref in given.items()}
    args = map_refs(instr.args, numbers.__getitem__)
    form, ends = _form(instr.op, args, repr(args), instr.ins, instr.outs)

    def now(ref: Ref) -> Ref:
        return given[ref.name] if ref.name in given else Ref(instr.name + ref.name[1:], ref.index)

    lines = [
        Instr(
            instr.name + line.name[1:],
            line.op,
            map_refs(line.args, now),
            tuple(map(now, line.refs)),
            line.ins,
            line.outs,
            instr.where,
            instr.module,
            instr.phase,
        )
        for line in form
    ]
    return lines, tuple(map(now, ends))


@lru_cache(maxsize=1 << 10)
def _form(
    op: str, args: tuple[Any, ...], told: str, ins: tuple[Placed, ...], made: tuple[Placed | None, ...]
) -> tuple[tuple[Instr, ...], tuple[Ref, ...]]:
    """The lines of all norms that differ in names only: this one's is "@", and "@0", "@1" are what it reads.

    `told` are the arguments as text: 1 and 1.0 are equal, but not the same.
    """
    like = Instr("@", op, args, tuple(refs_in(args)), ins, made)
    nodes, ends = _sheet(like)
    known = dict(zip(like.refs, ins, strict=True))
    stats = made[-1] or ins[0]
    out = []
    for node in nodes:
        refs = tuple(refs_in(node.args))
        # A value as deep as the input lies as the input does, for the dims that were reduced are not split;
        # statistics lie like statistics, and a cast of a weight like the weight.
        outs = tuple(
            placed(s, known[r].nd if len(s.shape) == len(known[r].spec.shape) else stats.nd)
            for s in node.outs
            if s is not None
            for r in refs[:1]
        )
        known |= {Ref(node.name, k): p for k, p in enumerate(outs)}
        out.append(Instr(node.name, node.op, node.args, refs, tuple(known[r] for r in refs), outs))
    return tuple(out), ends


def _sheet(instr: Instr) -> tuple[list[Node], tuple[Ref, ...]]:
    specs = {r: p.spec for r, p in zip(instr.refs, instr.ins, strict=True)}
    made = tuple(p.spec if p else None for p in instr.outs)
    if instr.op != "laminar.batch_norm":
        return expand(call_of(Node(instr.name, instr.op, instr.args, made), specs), instr.args, specs, instr.name)
    x, weight, bias, eps = instr.args
    stats = made[1]
    assert stats is not None and made[0] is not None
    sheet = Sheet(instr.name, specs=dict(specs))
    dims = tuple(d for d in range(len(specs[x].shape)) if d != 1)
    var = sheet.emit("aten.var_mean.correction", (sheet.cast(x, stats.dtype), dims, 0, False), stats, stats)
    rstd = sheet.point("rsqrt", sheet.add(var, eps))
    mean = Ref(var.name, 1)
    y = sheet.emit("laminar.batch_norm_apply", (x, weight, bias, mean, var, eps), made[0])
    return sheet.nodes, (y, mean, rstd)
