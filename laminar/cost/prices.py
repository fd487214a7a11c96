"""The price list: what each line of a program costs on one cluster, calibrated.

Two regimes. *Line by line* (CPU ranks, and GPUs without a compiler): every op is called by itself, its operands
lie as views left them, and calling costs host time. *Fused* (GPUs through Inductor): lines run in the groups that
`lower.fuse` found; a group that a compiler writes costs what it reads and writes once, and products,
attention and convolutions cost what they cost alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from laminar.cost.calibrate import COUNTS, PARTS, Calibration
from laminar.cost.collectives import CollectiveCost
from laminar.cost.families import COMPUTES, family_of
from laminar.cost.layout import layouts
from laminar.cost.ops import OpCost
from laminar.cost.schedule import Exchange, Groups, Price, Prices
from laminar.cost.table import local_call
from laminar.cost.tasks import Drag
from laminar.cost.work import FREE
from laminar.ir.cluster import Cluster
from laminar.ir.codec import Ref
from laminar.ir.mesh import Mesh
from laminar.ir.program import Instr, Program, ProgramOutput
from laminar.ir.sbp import Split
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Call

UPDATES = {"adamw": 8, "adam": 8, "sgd": 0, "momentum": 4}
"""Bytes of state an optimizer keeps for a float32 element."""
ALONE = (
    "aten.sort",
    "aten.topk",
    "aten.cumsum",
    "aten.embedding_dense_backward",
    "aten.max_pool2d_with_indices_backward",
)
"""Ops that fused code calls as kernels of their own, besides products, attention and convolutions."""


class Machine(Prices):
    """Prices on a cluster for a number of ranks."""

    def __init__(
        self, cluster: Cluster, section: str, calibration: Calibration, *, optimizer: str = "adamw", fused: bool = False
    ) -> None:
        self.cluster, self.calibration, self.optimizer, self.fused = cluster, calibration, optimizer, fused
        self.ops, self.collectives = OpCost(cluster, section), CollectiveCost(cluster)
        on_cpu = cluster.backend == "shared"
        self.gloo = CollectiveCost(replace(cluster, backend="gloo")) if on_cpu else self.collectives
        """For what does not go through shared memory on ranks that have it."""
        self.launch_s = 0.0
        self.drag = drag_of(cluster)
        self._levels: dict[Any, int] = {}
        self._times = {k: calibration.multiplier(k) for k in PARTS}
        self._extra = calibration.extra_s

    # --- lines ----------------------------------------------------------------------------------

    def lines(self, program: Program, rank: int) -> Sequence[Price | Exchange]:
        calls = {i.name: local_call(i, program.mesh, rank) for i in program.instrs}
        lying = layouts(program, calls)
        makers = {i.name: i for i in program.instrs}
        leaving = {o.ref for o in program.outputs}
        out: list[Price | Exchange] = []
        for instr in program.instrs:
            if instr.moves:
                out.append(self.exchange(instr, program.mesh, rank, _resident(instr, makers, leaving)))
            else:
                out.append(self.op(calls[instr.name], lying.marks.get(instr.name, ())))
        share = self.calibration.multiplier("waits")
        if share and (meetings := sum(i.moves for i in program.instrs)):
            each = share * waits(program, out) / meetings
            out = [p._replace(wait_s=each) if isinstance(p, Exchange) else p for p in out]
        return out

    def kernels(self, program: Program, groups: Groups, rank: int) -> Sequence[Price | Exchange]:
        sizes = _Sizes(program, rank)
        out: list[Price | Exchange] = []
        seen: dict[Any, Price] = {}
        makers = {i.name: i for i in program.instrs}
        leaving = {o.ref for o in program.outputs}
        for group in groups:
            first = program.instrs[group[0]]
            if first.moves:
                out.append(self.exchange(first, program.mesh, rank, _resident(first, makers, leaving)))
            elif first.op in FREE:
                out.append(FREE_PRICE)
            elif family_of(first.op) not in COMPUTES and first.op not in ALONE:
                out.append(self._fused(program, group, sizes))
            else:
                # Layers repeat: lines that differ in names only have one price.
                key = (first.op, first.ins, first.outs, *[a for a in first.args if not isinstance(a, Ref)])
                price = seen.get(key)
                if price is None:
                    price = seen[key] = self.op(local_call(first, program.mesh, rank))
                out.append(price)
        return out

    def _fused(self, program: Program, group: tuple[int, ...], sizes: _Sizes) -> Price:
        """A kernel that a compiler writes: what it reads and writes, once; reductions by the shape they reduce."""
        nbytes = sizes.traffic(group)
        shape = sizes.reduced(group)
        if shape is None:
            answer = self.ops("fused.pointwise", (), (), (nbytes,))
        else:
            answer = self.ops("fused.reduction", (), (), (*shape[:2], nbytes, shape[2]))
        seconds = answer.seconds * self._times["memory"] + self._extra.get("lines", 0.0)
        return Price(seconds, answer.source, answer.sigma, "fused")

    def op(self, call: Call, marks: tuple[str, ...] = ()) -> Price:
        """One local op."""
        answer = self.ops(call.op, call.ins, call.outs, call.args, marks)
        family = family_of(call.op)
        part = "compute" if family in COMPUTES else "memory"
        seconds = answer.seconds * self._times[part] + self._extra.get("lines", 0.0)
        return Price(seconds, answer.source, answer.sigma, family)

    def exchange(self, instr: Instr, mesh: Mesh, rank: int, resident: bool) -> Exchange:
        """One collective."""
        cost = self.gloo if instr.kind == "all_to_all" else self.collectives
        answer = cost.of(instr, mesh, rank, resident)
        place = (mesh, instr.args[1], rank)
        level = self._levels.get(place)
        if level is None:
            level = max(0, self.cluster.span(mesh.group(instr.args[1], mesh.coords(rank))).level)
            self._levels[place] = level
        kind = "exchange" if cost.cluster.backend == "shared" else "wire"
        times, extra = self._times[kind], self._extra.get(f"{kind}s", 0.0)
        extra += len(instr.refs) * self._extra.get("pieces", 0.0)
        start, wire, finish = answer.start_s * times, answer.transfer_s * times + extra, answer.finish_s * times
        if self.cluster.backend == "shared":
            # Through shared memory nothing goes on beside the rank; nor does it through Gloo where ranks leave no
            # core idle: its threads run when the rank waits.
            wire, finish = 0.0, finish + wire
        return Exchange(start, wire, finish, answer.source, answer.sigma, f"{kind}: {answer.algorithm}", level)

    def copy_s(self, nbytes: int) -> float:
        """Seconds to copy float32 values from one place in memory to another."""
        return self.ops("aten.clone", (spec := TensorSpec((nbytes // 4,), "f32"),), (spec,), (Ref("", 0), None)).seconds

    # --- around ---------------------------------------------------------------------------------

    def around(self, program: Program, rank: int) -> tuple[list[tuple[str, Price]], list[tuple[str, Price]]]:
        begin = Price(self._extra.get("steps", 0.0), "calibrated", 0.3, "host")
        outs = [o for o in program.outputs if o.kind == "grad"]
        if not outs:
            return [("batch", begin)], []
        grads = [o.placed.local(program.mesh, rank) for o in outs]
        elements = sum(g.numel for g in grads)
        return [("batch", begin)], [
            ("norm", self._norm(grads, elements)),
            *self._norm_sum(outs, program.mesh),
            ("optimizer", self._update(len(grads), elements)),
        ]

    def after(self, then: Program, rank: int) -> list[tuple[str, Price]]:
        """Gathered parameters are copied to where the model has them."""
        spec = TensorSpec((sum(o.placed.local(then.mesh, rank).nbytes for o in then.outputs) // 4,), "f32")
        answer = self.ops("aten.clone", (spec,), (spec,), (Ref("", 0), None))
        return [("gathered", Price(answer.seconds * self._times["memory"], answer.source, answer.sigma, "moving"))]

    def _norm(self, grads: Sequence[TensorSpec], elements: int) -> Price:
        """The norm of the gradient: every piece read once, and a kernel for each on a CPU."""
        if self.fused:
            answer = self.ops("fused.pointwise", (), (), (sum(g.nbytes for g in grads),))
        else:
            flat, one = TensorSpec((elements,), grads[0].dtype), TensorSpec((), grads[0].dtype)
            answer = self.ops("aten.sum", (flat,), (one,), (Ref("", 0),))
        each = len(grads) * self.ops.rates.call_s
        return Price((answer.seconds + each) * self._times["memory"], answer.source, answer.sigma, "gradients")

    def _norm_sum(self, outs: Sequence[ProgramOutput], mesh: Mesh) -> list[tuple[str, Price]]:
        """Ranks that hold pieces add up their squares."""
        if mesh.ranks == 1 or not any(isinstance(p, Split) for o in outs for p in o.placed.nd):
            return []
        answer = self.gloo.on("all_reduce", 8, mesh, tuple(range(len(mesh.sizes))))
        seconds = answer.seconds * self._times["wire"] + self._extra.get("wires", 0.0)
        return [("norm_sum", Price(seconds, answer.source, answer.sigma, "all_reduce"))]

    def _update(self, tensors: int, elements: int) -> Price:
        answer = self.ops(f"optimizer.{self.optimizer}", (), (), (tensors, elements))
        return Price(answer.seconds * self._times["update"], answer.source, answer.sigma, "optimizer")


class _Sizes:
    """Bytes of a program's values on one rank, and who reads them."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.nbytes = {Ref(i.name): i.placed.local(program.mesh, rank).nbytes for i in program.inputs}
        self.nbytes |= {Ref(c.name): c.spec.nbytes for c in program.constants}
        self.base: dict[Ref, Ref] = {}
        self.readers: dict[Ref, set[int]] = {}
        for n, instr in enumerate(program.instrs):
            free = instr.op in FREE
            for k, out in enumerate(instr.outs):
                if out is not None:
                    self.nbytes[Ref(instr.name, k)] = out.local(program.mesh, rank).nbytes
                    if free and instr.refs:
                        self.base[Ref(instr.name, k)] = self.base.get(instr.refs[0], instr.refs[0])
            if not free:
                for ref in instr.refs:
                    self.readers.setdefault(self.base.get(ref, ref), set()).add(n)
        self.leaving = {self.base.get(o.ref, o.ref) for o in program.outputs}

    def reduced(self, group: tuple[int, ...]) -> tuple[int, int, str] | None:
        """Rows, columns and kind of the largest reduction in a kernel; none in an elementwise one."""
        best: tuple[int, int, str] | None = None
        for n in group:
            instr = self.program.instrs[n]
            if family_of(instr.op) not in ("rows", "sums", "channels") or not instr.ins:
                continue
            size = max(math.prod(p.local(self.program.mesh, self.rank).shape) for p in instr.ins)
            outs = [math.prod(p.local(self.program.mesh, self.rank).shape) for p in instr.outs if p]
            kind, rows = "layer_norm", 1
            if family_of(instr.op) == "rows":
                rows = size // max(1, instr.ins[0].local(self.program.mesh, self.rank).shape[-1])
                kind = "layer_norm_backward" if instr.op in TWICE else "softmax" if "softmax" in instr.op else kind
            elif outs:
                rows = max(1, min(outs))
                dims = instr.args[1] if len(instr.args) > 1 and isinstance(instr.args[1], tuple) else ()
                last = len(instr.ins[0].spec.shape) - 1
                across = bool(dims) and last > 0 and all(d % (last + 1) != last for d in dims)
                kind = "columns" if across or family_of(instr.op) == "channels" else kind
            if best is None or size > best[0] * best[1]:
                best = (rows, max(1, size // rows), kind)
                if kind == "columns":
                    best = (best[1], best[0], kind)
        return best

    def traffic(self, group: tuple[int, ...]) -> int:
        """Bytes a kernel reads from outside and leaves for others."""
        inside = set(group)
        instrs = [self.program.instrs[n] for n in group]
        made = {i.name for i in instrs}
        read: dict[Ref, int] = {}
        for instr in instrs:
            for ref in instr.refs:
                base = self.base.get(ref, ref)
                if base.name not in made:
                    read[base] = max(read.get(base, 0), min(self.nbytes[ref], self.nbytes[base]))
        left = 0
        for instr in instrs:
            for k, out in enumerate(instr.outs):
                ref = Ref(instr.name, k)
                if out is not None and (ref in self.leaving or self.readers.get(ref, set()) - inside):
                    left += self.nbytes[ref]
        # Norms are differentiated in two passes: along rows, then across them for their own parameters.
        twice = [i for i in instrs if i.op in TWICE]
        return sum(read.values()) + left + sum(sum(self.nbytes[r] for r in i.refs[:2]) for i in twice)


TWICE = ("aten.native_layer_norm_backward", "aten.native_group_norm_backward", "laminar.batch_norm_backward")
FREE_PRICE = Price(0.0, "free", 0.0, "view")


def drag_of(cluster: Cluster) -> Drag:
    """How much compute and transfers slow each other down: as measured, else assumed."""
    rows: Sequence[Mapping[str, Any]] = cluster.profile.get("overlap", ())
    if rows:
        n = len(rows)
        return Drag.fractions(sum(r["compute_left"] for r in rows) / n, sum(r["transfer_left"] for r in rows) / n)
    return Drag.fractions(0.9, 0.9) if cluster.device.kind == "gpu" else Drag.fractions(0.6, 0.6)  # assumed


def _resident(instr: Instr, makers: Mapping[str, Instr], leaving: set[Ref]) -> bool:
    """Whether a reduction's terms lie where ranks can read them: gradients that products write into a bucket."""
    return instr.kind == "all_reduce" and (len(instr.refs) > 1 or Ref(instr.name) in leaving)


def waits(program: Program, lines: Sequence[Price | Exchange]) -> float:
    """The root of local work times meetings, in seconds against a millisecond: see `cost.calibrate`."""
    local = sum(p.seconds for p in lines if isinstance(p, Price))
    return math.sqrt(1e-3 * local * sum(i.moves for i in program.instrs))


def features(
    program: Program, lines: Sequence[Price | Exchange], around: Sequence[tuple[str, Price]]
) -> dict[str, float]:
    """What `cost.calibrate` fits: seconds and counts of a step, uncalibrated."""
    out = dict.fromkeys((*PARTS, *COUNTS), 0.0)
    for instr, price in zip(program.instrs, lines, strict=True):
        if isinstance(price, Exchange):
            kind = price.algorithm.split(":")[0]
            out[kind] += price.start_s + price.transfer_s + price.finish_s
            out[f"{kind}s"] += 1
            out["pieces"] += len(instr.refs)
        else:
            out["compute" if price.family in COMPUTES else "memory"] += price.seconds
            out["lines"] += instr.op not in FREE
    out["waits"] = waits(program, lines)
    for name, price in around:
        if name == "batch":
            out["steps"] += 1
        elif name == "norm_sum":
            out["wire"] += price.seconds
            out["wires"] += 1
        else:
            out["update" if name == "optimizer" else "memory"] += price.seconds
    return out
