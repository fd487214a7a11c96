"""The price list: what each line of a program costs on one cluster, calibrated.

Two regimes. *Line by line* (CPU ranks, and GPUs without a compiler): every op is called by itself, its operands
lie as views left them, and calling costs host time. *Fused* (GPUs through Inductor): lines run in the groups that
`lower.fuse` found; a group that a compiler writes costs what it reads and writes once, and products,
attention and convolutions cost what they cost alone. In both, lines of one form (`cost.forms`) that find their
operands alike are priced once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from laminar.cost.calibrate import COUNTS, PARTS, Calibration
from laminar.cost.comm.price import CollectiveCost
from laminar.cost.ops.families import COMPUTES, family_of
from laminar.cost.ops.interned import Forms, forms_of
from laminar.cost.ops.price import OpCost
from laminar.cost.ops.strides import follow_strides
from laminar.cost.ops.table import local_call
from laminar.cost.schedule import OFFLOAD, ExchangePrice, KernelGroups, Price, Prices
from laminar.cost.sim.tasks import Drag
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.mesh import Mesh
from laminar.ir.ops import COLLECTIVE_OPS, FREE, HOST_COPIES
from laminar.ir.program import Instr, Program, ProgramOutput
from laminar.ir.sbp import Split
from laminar.ir.serial.codec import Ref
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
NORM_KERNELS = 6
"""What a GPU runs for the norm of all gradients, however many there are."""


@lru_cache(maxsize=8)
def op_cost(cluster: Cluster, section: str) -> OpCost:
    """What ops cost, learnt once from a profile and not once for every plan: it depends on nothing else."""
    return OpCost(cluster, section)


class Machine(Prices):
    """Prices on a cluster for a number of ranks."""

    def __init__(
        self, cluster: Cluster, section: str, calibration: Calibration, *, optimizer: str = "adamw", fused: bool = False
    ) -> None:
        self.cluster, self.calibration, self.optimizer, self.fused = cluster, calibration, optimizer, fused
        self.ops, self.collectives = op_cost(cluster, section), CollectiveCost(cluster)
        on_cpu = cluster.backend == "shared"
        self.gloo = CollectiveCost(replace(cluster, backend="gloo")) if on_cpu else self.collectives
        """For what does not go through shared memory on ranks that have it."""
        self.launch_s = 0.0
        self.drag = drag_of(cluster)
        self._levels: dict[Any, int] = {}
        self.times = {k: calibration.multiplier(k) for k in PARTS}
        """By what is done, how many times as long it takes as its price says."""
        self._extra = calibration.extra_s

    # --- lines ----------------------------------------------------------------------------------

    def lines(self, program: Program, rank: int) -> Sequence[Price | ExchangePrice]:
        forms = forms_of(program)
        calls = [local_call(i, program.mesh, rank) for i in forms.examples]
        exchanges = self._exchanges(forms, rank)
        known: dict[int, Price] = {}
        out: list[Price | ExchangePrice] = []
        for n, (instr, lying) in enumerate(zip(program.instrs, follow_strides(forms, calls), strict=True)):
            if instr.op in COLLECTIVE_OPS:
                out.append(exchanges[n])
                continue
            if instr.op in HOST_COPIES:
                out.append(self.hosted(instr, program.mesh, rank))
                continue
            price = known.get(id(lying))
            if price is None:
                price = known[id(lying)] = self.op(lying.call, lying.marks)
            out.append(price)
        share = self.calibration.multiplier("waits")
        if share and exchanges:
            each = share * waits(program, out) / len(exchanges)
            out = [p._replace(wait_s=each) if isinstance(p, ExchangePrice) else p for p in out]
        return out

    def kernels(self, program: Program, groups: KernelGroups, rank: int) -> Sequence[Price | ExchangePrice]:
        forms = forms_of(program)
        exchanges = self._exchanges(forms, rank)
        out: list[Price | ExchangePrice] = []
        alone: dict[int, Price] = {}
        seen: dict[Any, Price] = {}
        kinds = [kernel_kind(i) for i in forms.examples]
        for group, work in zip(groups, fused_work(forms, groups, rank), strict=True):
            form = forms.of[group[0]]
            if kinds[form] == "moves":
                out.append(exchanges[group[0]])
            elif kinds[form] == "host":
                out.append(self.hosted(program.instrs[group[0]], program.mesh, rank))
            elif kinds[form] == "view":
                out.append(FREE_PRICE)
            elif kinds[form] == "fused":
                price = seen.get(work)
                if price is None:
                    price = seen[work] = self.kernel(*work)
                out.append(price)
            else:
                price = alone.get(form)
                if price is None:
                    price = alone[form] = self.op(local_call(forms.examples[form], program.mesh, rank))
                out.append(price)
        return out

    def _exchanges(self, forms: Forms, rank: int) -> dict[int, ExchangePrice]:
        """The program's collectives, by line."""
        leaving = {forms.number(o.ref) for o in forms.program.outputs}
        moves = [i.op in COLLECTIVE_OPS for i in forms.examples]
        known: dict[tuple[int, bool], ExchangePrice] = {}
        out = {}
        for n, form in enumerate(forms.of):
            if moves[form]:
                instr = forms.examples[form]
                # Whether terms lie where ranks can read them: gradients that products write into a bucket.
                resident = instr.kind == "all_reduce" and (len(instr.refs) > 1 or forms.makes[n] in leaving)
                if (form, resident) not in known:
                    known[form, resident] = self.exchange(instr, forms.program.mesh, rank, resident)
                out[n] = known[form, resident]
        return out

    def kernel(self, nbytes: int, shape: tuple[int, int, str] | None) -> Price:
        """A kernel that a compiler writes: what it reads and writes, once; reductions by the shape they reduce."""
        beside = 0.0
        if shape is None:
            answer = self.ops("fused.pointwise", (), (), (nbytes,))
        elif shape[2] == NORM_GRADIENT:
            # Its time is that of two passes, for the bytes of one; whatever else is fused with it joins the first.
            own = min(nbytes, 3 * 2 * shape[0] * shape[1])
            answer = self.ops("fused.reduction", (), (), (*shape[:2], own, shape[2]))
            more, less = (self.ops("fused.pointwise", (), (), (n,)).seconds for n in (nbytes, own))
            beside = more - less
        else:
            answer = self.ops("fused.reduction", (), (), (*shape[:2], nbytes, shape[2]))
        seconds = (answer.seconds + beside) * self.times["memory"] + self._extra.get("lines", 0.0)
        return Price(seconds, answer.source, answer.sigma, "fused")

    def op(self, call: Call, marks: tuple[str, ...] = ()) -> Price:
        """One local op."""
        answer = self.ops(call.op, call.ins, call.outs, call.args, marks)
        family = family_of(call.op)
        part = "compute" if family in COMPUTES else "memory"
        seconds = answer.seconds * self.times[part] + self._extra.get("lines", 0.0)
        return Price(seconds, answer.source, answer.sigma, family)

    def exchange(self, instr: Instr, mesh: Mesh, rank: int, resident: bool) -> ExchangePrice:
        """One collective."""
        cost = self.gloo if instr.kind == "all_to_all" else self.collectives
        answer = cost.of(instr, mesh, rank, resident)
        place = (mesh, instr.box.axes, rank)
        level = self._levels.get(place)
        if level is None:
            level = max(0, self.cluster.span(mesh.group(instr.box.axes, mesh.coords(rank))).level)
            self._levels[place] = level
        kind = "exchange" if cost.cluster.backend == "shared" else "wire"
        times, extra = self.times[kind], self._extra.get(f"{kind}s", 0.0)
        extra += len(instr.refs) * self._extra.get("pieces", 0.0)
        start, wire, finish = answer.start_s * times, answer.transfer_s * times + extra, answer.finish_s * times
        if self.cluster.backend == "shared":
            # Through shared memory nothing goes on beside the rank; nor does it through Gloo where ranks leave no
            # core idle: its threads run when the rank waits.
            wire, finish = 0.0, finish + wire
        return ExchangePrice(start, wire, finish, answer.source, answer.sigma, f"{kind}: {answer.algorithm}", level)

    def hosted(self, instr: Instr, mesh: Mesh, rank: int) -> Price:
        """A copy to the host or back: beside compute on a GPU (`OFFLOAD`), by the rank itself on a CPU."""
        nbytes = sum(p.local(mesh, rank).nbytes for p in instr.outs if p)
        if self.cluster.device.kind == "cpu":
            return Price(self.copy_s(nbytes) * self.times["memory"], "interpolated", 0.3, "moving")
        rate = self.cluster.device.host_bytes_per_s
        return Price(nbytes / rate.value, rate.source, 0.1 if rate.source == "measured" else 0.3, OFFLOAD)

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
            ("norm", self.norm(grads, elements)),
            *self._norm_sum(outs, program.mesh),
            ("optimizer", self.update(len(grads), elements)),
        ]

    def after(self, then: Program, rank: int) -> list[tuple[str, Price]]:
        """Gathered parameters are copied to where the model has them."""
        spec = TensorSpec((sum(o.placed.local(then.mesh, rank).nbytes for o in then.outputs) // 4,), "f32")
        answer = self.ops("aten.clone", (spec,), (spec,), (Ref("", 0), None))
        return [("gathered", Price(answer.seconds * self.times["memory"], answer.source, answer.sigma, "moving"))]

    def norm(self, grads: Sequence[TensorSpec], elements: int) -> Price:
        """The norm of the gradient: every piece read once, and a kernel for each on a CPU."""
        if self.fused:
            answer = self.ops("fused.pointwise", (), (), (sum(g.nbytes for g in grads),))
            calls = NORM_KERNELS
        else:
            flat, one = TensorSpec((elements,), grads[0].dtype), TensorSpec((), grads[0].dtype)
            answer = self.ops("aten.sum", (flat,), (one,), (Ref("", 0),))
            calls = len(grads)
        each = calls * self.ops.rates.call_s
        return Price((answer.seconds + each) * self.times["memory"], answer.source, answer.sigma, "gradients")

    def _norm_sum(self, outs: Sequence[ProgramOutput], mesh: Mesh) -> list[tuple[str, Price]]:
        """Ranks that hold pieces add up their squares."""
        if mesh.ranks == 1 or not any(isinstance(p, Split) for o in outs for p in o.placed.nd):
            return []
        answer = self.gloo.on("all_reduce", 8, mesh, tuple(range(len(mesh.sizes))))
        seconds = answer.seconds * self.times["wire"] + self._extra.get("wires", 0.0)
        return [("norm_sum", Price(seconds, answer.source, answer.sigma, "all_reduce"))]

    def update(self, tensors: int, elements: int) -> Price:
        """The optimizer's step on so many elements of so many tensors."""
        answer = self.ops(f"optimizer.{self.optimizer}", (), (), (tensors, elements))
        return Price(answer.seconds * self.times["update"], answer.source, answer.sigma, "optimizer")


def fused_work(forms: Forms, groups: KernelGroups, rank: int) -> list[tuple[int, tuple[int, int, str] | None]]:
    """For each kernel the bytes it reads from outside and leaves for others, and rows, columns and kind of its largest
    reduction."""
    program, mesh = forms.program, forms.program.mesh
    sizes = [[o.local(mesh, rank).nbytes if o else 0 for o in i.outs] or [0] for i in forms.examples]
    free = [i.op in FREE for i in forms.examples]
    twice = [i.op == "laminar.batch_norm_backward" for i in forms.examples]
    reductions = [_reduced(i, mesh, rank) for i in forms.examples]
    of, whole = forms.of, forms.whole(FREE)
    at = [-1] * len(of)
    for g, group in enumerate(groups):
        for n in group:
            at[n] = g
    nbytes = [*(i.placed.local(mesh, rank).nbytes for i in program.inputs), *(c.spec.nbytes for c in program.constants)]
    home = [-1] * len(nbytes)
    for form, g in zip(of, at, strict=True):
        nbytes += sizes[form]
        home += [g] * len(sizes[form])
    left = {whole[forms.number(o.ref)] for o in program.outputs}
    """Values that somebody wants besides the kernel that makes them."""
    moved = [0] * len(groups)
    shapes: list[tuple[int, int, str] | None] = [None] * len(groups)
    for g, group in enumerate(groups):
        read: dict[int, int] = {}
        for n in group:
            form = of[n]
            for v in forms.reads[n]:
                base = whole[v]
                if home[base] != g:
                    size = nbytes[v] if nbytes[v] < nbytes[base] else nbytes[base]
                    if size >= read.get(base, 0):
                        read[base] = size
                    if not free[form]:
                        left.add(base)
            if twice[form]:
                # Differentiated in two passes, priced by bytes; gradients of norms of rows have prices of their own.
                moved[g] += sum(nbytes[v] for v in forms.reads[n][:2])
            reduced, best = reductions[form], shapes[g]
            if reduced is not None and (best is None or reduced[0] > best[0] * best[1]):
                shapes[g] = reduced[1]
        moved[g] += sum(read.values())
    for v in left:
        if home[v] >= 0:
            moved[home[v]] += nbytes[v]
    return list(zip(moved, shapes, strict=True))


def kernel_kind(instr: Instr) -> str:
    """How a kernel that begins with such a line is priced."""
    if instr.op in COLLECTIVE_OPS:
        return "moves"
    if instr.op in HOST_COPIES:
        return "host"
    if instr.op in FREE:
        return "view"
    return "fused" if family_of(instr.op) not in COMPUTES and instr.op not in ALONE else "alone"


def _reduced(instr: Instr, mesh: Mesh, rank: int) -> tuple[int, tuple[int, int, str]] | None:
    """Elements a reduction runs over, and their rows, columns and kind; nothing for an elementwise op."""
    family = family_of(instr.op)
    if family not in ("rows", "sums", "channels") or not instr.ins:
        return None
    size = max(math.prod(p.local(mesh, rank).shape) for p in instr.ins)
    outs = [math.prod(p.local(mesh, rank).shape) for p in instr.outs if p]
    kind, rows = "layer_norm", 1
    if family == "rows":
        rows = size // max(1, instr.ins[0].local(mesh, rank).shape[-1])
        kind = NORM_GRADIENT if instr.op in TWICE else "softmax" if "softmax" in instr.op else kind
    elif outs:
        rows = max(1, min(outs))
        dims = instr.args[1] if len(instr.args) > 1 and isinstance(instr.args[1], tuple) else ()
        last = len(instr.ins[0].spec.shape) - 1
        across = bool(dims) and last > 0 and all(d % (last + 1) != last for d in dims)
        kind = "columns" if across or family == "channels" else kind
    columns = max(1, size // rows)
    return size, (columns, rows, kind) if kind == "columns" else (rows, columns, kind)


TWICE = ("aten.native_layer_norm_backward", "aten.native_group_norm_backward")
"""Norms of rows are differentiated in two passes: along rows, then across them for their own parameters."""
NORM_GRADIENT = "layer_norm_backward"
"""The kind of such a kernel in a profile."""
FREE_PRICE = Price(0.0, "free", 0.0, "view")


def drag_of(cluster: Cluster) -> Drag:
    """How much compute and transfers slow each other down: as measured, else assumed."""
    rows: Sequence[Mapping[str, Any]] = cluster.profile.get("overlap", ())
    if rows:
        n = len(rows)
        return Drag.fractions(sum(r["compute_left"] for r in rows) / n, sum(r["transfer_left"] for r in rows) / n)
    return Drag.fractions(0.9, 0.9) if cluster.device.kind == "gpu" else Drag.fractions(0.6, 0.6)  # assumed


def waits(program: Program, lines: Sequence[Price | ExchangePrice]) -> float:
    """The root of local work times meetings, in seconds against a millisecond: see `cost.calibrate`."""
    local = sum(p.seconds for p in lines if isinstance(p, Price))
    return math.sqrt(1e-3 * local * sum(i.moves for i in program.instrs))


def features(
    program: Program, lines: Sequence[Price | ExchangePrice], around: Sequence[tuple[str, Price]]
) -> dict[str, float]:
    """What `cost.calibrate` fits: seconds and counts of a step, uncalibrated."""
    out = dict.fromkeys((*PARTS, *COUNTS), 0.0)
    for instr, price in zip(program.instrs, lines, strict=True):
        if isinstance(price, ExchangePrice):
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
