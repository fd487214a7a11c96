"""Verification: the same numbers as one device, or the name of the first op where they part.

What runs is what ranks run: the generated code of every rank with its exchanges, all of them in this process
(`loopback.py`), or real processes. Where it differs, the program is interpreted in lock-step to find the first op that
does; if the interpreter finds none, the code itself is watched line by line.

In float64 every floating dtype *in the graph* is widened, so that what is left is the order of sums. An output counts
as equal if it is off by at most `tol` times its own maximum, or, where that is smaller than what it was summed from, of
the size of its terms (`rounding.py`): some gradients are zero in exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laminar.ir.graph import Graph, Node, widen
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Instr, Program
from laminar.ir.sbp import show
from laminar.ir.serial.codec import Ref
from laminar.lower.lower import lower
from laminar.lower.stages.stage_programs import Stages, in_other_precision, stages
from laminar.rewrite.variants import rewritten
from laminar.runtime.check.in_process import lockstep, loopback, loopback_pipeline
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.one_device import widened_tensor as widened_one
from laminar.runtime.check.processes import run_processes
from laminar.runtime.check.rounding import TermSizes, sizes
from laminar.runtime.comm.shards import assemble

VERIFY_TOLERANCE = {"f64": 1e-9, "f32": 1e-5}


@dataclass
class Report:
    """What verification found."""

    ok: bool
    max_rel_error: float
    tolerance: float
    worst: str
    """The output that is off most."""
    losses: list[tuple[float, float]] = field(default_factory=list)
    """For each batch the loss of one device and that of the plan."""
    errors: dict[str, float] = field(default_factory=dict)
    first_difference: str = ""
    """On failure: the first op whose value differs, with shape, placement and line."""
    ranks: int = 1
    batches: int = 0
    checked: int = 0
    eager_checked: int = 0
    """Outputs of the captured graph that were held against the model itself in plain PyTorch; 0 if none were."""
    eager_error: float = 0.0
    eager_tolerance: float = 0.0
    eager_differs: dict[str, str] = field(default_factory=dict)
    """What is not the model's, in words, by `kind:name`: then the plan is one for something else."""

    def __str__(self) -> str:
        verdict = "equal" if self.max_rel_error <= self.tolerance else "DIFFERENT"
        lines = [
            f"{verdict}: {self.checked} outputs on {self.ranks} ranks, {self.batches} batches, worst error "
            f"{self.max_rel_error:.2e} of {self.tolerance:.0e} allowed ({self.worst})"
        ]
        lines += [f"  loss on one device {one:.12g}, on {self.ranks} ranks {many:.12g}" for one, many in self.losses]
        if self.first_difference:
            lines.append(f"  first difference: {self.first_difference}")
        if self.eager_differs:
            lines.append("DIFFERENT: what was captured is not the model as plain PyTorch runs it")
            lines += [f"  {said}" for said in [*self.eager_differs.values()][:5]]
            if len(self.eager_differs) > 5:
                lines.append(f"  and {len(self.eager_differs) - 5} more")
        elif self.eager_checked:
            lines.append(
                f"equal: {self.eager_checked} outputs of the captured graph and of the model in plain PyTorch, within "
                f"{self.eager_tolerance:.0e}"
            )
        return "\n".join(lines)


def relative_error(got: Tensor, want: Tensor, floor: float) -> float:
    """Largest difference, against the larger of the tensor's maximum and the floor."""
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    if want.is_complex() and got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else math.inf
    both = torch.isnan(got) & torch.isnan(want) | (got == want)
    diff = torch.where(both, torch.zeros((), dtype=got.dtype), (got - want).abs())
    scale = max(float(want[torch.isfinite(want)].abs().max()) if bool(torch.isfinite(want).any()) else 0.0, floor)
    top = float(diff.max())
    return math.inf if math.isnan(top) else 0.0 if top == 0 else top / scale if scale else math.inf


def judged(key: str, got: Tensor, want: Tensor, tol: float, sized: Mapping[str, float] | TermSizes) -> float:
    """How far an output is off, as tolerances are measured: by itself, or else by the size of its terms."""
    error = relative_error(got, want, 0.0)
    return error if error <= tol else relative_error(got, want, sized[key])


def widened(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating tensors in float64, complex ones in complex128."""
    return {k: widened_one(v.detach()) for k, v in tensors.items()}


def verify_program(
    graph: Graph,
    plan: Plan,
    batches: Sequence[Mapping[str, Tensor]],
    dtype: str = "f64",
    ranks: str = "inprocess",
    tolerance: float | None = None,
    device: str = "cpu",
    change: Callable[[Program], Program] = lambda p: p,
    text: bool = False,
) -> Report:
    """Compare a plan's program with one device, on whole inputs given by name.

    `text`: in process, write and compile the code of every rank instead of calling its lines one by one.
    """
    wide = dtype == "f64"
    tol = VERIFY_TOLERANCE[dtype] if tolerance is None else tolerance
    subject, placed = widen(graph) if wide else graph, rewritten(graph, plan)
    plan.fits(placed)
    placed = widen(placed) if wide else placed
    program = change(lower(placed, replace(plan, graph_hash=placed.hash)))
    constants = constants_of(subject, wide)
    report = Report(True, 0.0, tol, "", ranks=plan.mesh.ranks, batches=len(batches))
    here: loopback.Ranks | None = None
    for batch in batches:
        inputs = widened(batch) if wide else {k: v.detach() for k, v in batch.items()}
        want = run_graph(subject, inputs, constants)
        if ranks == "inprocess":
            here = here or loopback.Ranks(program, constants, text=text)
            outs = here.run(inputs)
        else:
            outs = run_processes(program, inputs, constants, device)
        sized = TermSizes(subject, inputs, constants)
        for o in program.outputs:
            key = f"{o.kind}:{o.name}"
            got = assemble([r[key] for r in outs], o.placed.spec.shape, o.placed.nd, program.mesh)
            error = judged(key, got, want[key], tol, sized)
            report.errors[key] = max(report.errors.get(key, 0.0), error)
            report.checked += 1
            if o.kind == "loss":
                report.losses.append((float(want[key]), float(got)))
        if max(report.errors.values()) > tol and not report.first_difference and ranks == "inprocess":
            report.first_difference = first_difference(subject, program, inputs, constants, tol)
    report.worst, report.max_rel_error = max(report.errors.items(), key=lambda e: e[1], default=("nothing", 0.0))
    report.ok = report.max_rel_error <= tol
    return report


def verify_stages(
    whole: Graph,
    parts: Sequence[tuple[Graph, Staged]],
    samples: Sequence[int],
    batches: Sequence[Mapping[str, Tensor]],
    micro: Sequence[Sequence[Mapping[str, Tensor]]],
    dtype: str = "f64",
    tolerance: float | None = None,
) -> Report:
    """Compare a plan with stages, all places in this process, with one device.

    `whole` is the graph of a batch, `parts` are graph and plan of each of its micro-batches and `samples` their sizes,
    `batches` and `micro` their inputs. Where ops may see one micro-batch at a time, one device runs the same
    micro-batches. If the loss is a total over a weight, gradients of micro-batches are those of totals (`scaled`).
    """
    wide, tol = dtype == "f64", VERIFY_TOLERANCE[dtype] if tolerance is None else tolerance
    one, staged = widen(whole) if wide else whole, parts[0][1]
    made: dict[str, tuple[Graph, Stages]] = {}
    for graph, plan in parts:
        if graph.hash not in made:
            plan.fits(graph)
            subject = widen(graph) if wide else graph
            like = next((found for _, found in made.values()), None)
            made[graph.hash] = subject, stages(subject, in_other_precision(subject, plan) if wide else plan, like)
    each = [made[graph.hash] for graph, _ in parts]
    report = Report(True, 0.0, tol, "", ranks=staged.ranks, batches=len(batches))
    for batch, given in zip(batches, micro, strict=True):
        fed = [widened(m) if wide else {k: v.detach() for k, v in m.items()} for m in given]
        alone: list[dict[str, Tensor]] = []
        if staged.coupled:
            for (subject, _), m in zip(each, fed, strict=True):  # a buffer is as the last micro-batch has left it
                left = {k.partition(":")[2]: v for k, v in (alone[-1] if alone else {}).items() if k[:7] == "buffer:"}
                alone.append(run_graph(subject, {**m, **left}, constants_of(subject, wide)))
        weights = [1.0 if weighted(one) else n / sum(samples) for n in samples]
        constants = [constants_of(subject, wide) for subject, _ in each]
        got = loopback_pipeline.run_pipeline_loopback([found for _, found in each], fed, weights, constants)
        got = _by_weight(got) if weighted(one) else got
        if staged.coupled:
            want = {k: torch.stack([r[k] * w for r, w in zip(alone, weights, strict=True)]).sum(0) for k in alone[0]}
            want |= {k: v for k, v in alone[-1].items() if k.startswith("buffer:")}
            want = _by_weight(want) if weighted(one) else want
        else:
            want = run_graph(one, widened(batch) if wide else batch, constants_of(one, wide))
        sized = TermSizes(one, widened(batch) if wide else batch, constants_of(one, wide))
        for key, w in want.items():
            kind = key.partition(":")[0]
            if kind in ("grad", "loss") or (staged.coupled and kind == "buffer"):
                error = judged(key, got[key], w, tol, sized)
                report.errors[key] = max(report.errors.get(key, 0.0), error)
                report.checked += 1
            if kind == "loss":
                report.losses.append((float(w), float(got[key])))
    report.worst, report.max_rel_error = max(report.errors.items(), key=lambda e: e[1], default=("nothing", 0.0))
    report.ok = report.max_rel_error <= tol
    return report


def _by_weight(summed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss and gradients that totals of micro-batches come to; one of them may weigh nothing."""
    weight = summed["metric:loss_weight"]
    out = {k: v / weight if k.startswith("grad:") else v for k, v in summed.items()}
    return out | {"loss:loss": summed["metric:loss_total"] / weight}


def weighted(graph: Graph) -> bool:
    """Whether the loss is a total over a weight."""
    return any(o.kind == "metric" and o.name == "loss_weight" for o in graph.outputs)


def first_difference(
    graph: Graph, program: Program, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor], tol: float
) -> str:
    """The first line of the program whose value is not the graph's; or of its code, if that alone differs."""
    values: dict[Ref, Tensor] = {}

    def remember(node: Node, results: tuple[Any, ...]) -> None:
        values.update({Ref(node.name, i): v for i, v in enumerate(results)})

    run_graph(graph, inputs, constants, remember)
    sized: dict[Ref, float] = {}
    found: list[str] = []

    def look(instr: Instr, results: list[tuple[Any, ...]]) -> None:
        if found or instr.kind or instr.name not in graph.by_name:
            return
        for i, placed in enumerate(instr.outs):
            ref = Ref(instr.name, i)
            want = values.get(ref)
            if placed is None or want is None:
                continue
            line = f"%{instr.name} = {instr.op}: {placed.spec} {show(placed.nd)}"
            try:
                got = assemble([r[i] for r in results], placed.spec.shape, placed.nd, program.mesh).to(want.dtype)
                error = relative_error(got, want, 1e-300)
                if error > max(tol, 1e-12) * 10:
                    if not sized:
                        sized.update(sizes(graph, inputs, constants, values.keys()))
                    error = relative_error(got, want, sized[ref])
            except (RuntimeError, ValueError, IndexError) as broken:
                found.append(f"{line} can't be put together: {broken}")
                return
            if error > max(tol, 1e-12) * 10:
                where = f"\n    at {instr.where}" if instr.where else ""
                found.append(f"{line} is off by {error:.1e}{where}")
                return

    outs = lockstep.run_lockstep(program, inputs, constants, look)
    if found:
        return found[0]
    want = run_graph(graph, inputs, constants)
    output = TermSizes(graph, inputs, constants)
    for o in program.outputs:
        key = f"{o.kind}:{o.name}"
        got = assemble([r[key] for r in outs], o.placed.spec.shape, o.placed.nd, program.mesh)
        if judged(key, got, want[key], tol, output) > tol:
            return "no single op differs: only the sum of many"
    seen: dict[str, tuple[Instr, dict[int, tuple[Any, ...]]]] = {}

    def note(rank: int, instr: Instr, value: Any) -> None:
        results = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        copies = tuple(v.clone() if isinstance(v, Tensor) else v for v in results)
        seen.setdefault(instr.name, (instr, {}))[1][rank] = copies

    loopback.run_loopback(program, inputs, constants, watch=note)
    for instr, by_rank in seen.values():
        look(instr, [by_rank[r] for r in sorted(by_rank)])
    what = found[0] if found else "no line of it: what its outputs hold was written again"
    return f"the program is right, its code is not: {what}"
