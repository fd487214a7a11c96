"""What calibration fits: seconds of a predicted step by kind of work, for our plans and for torch's DDP."""

from __future__ import annotations

from laminar.cost.calibrate import COUNTS, PARTS
from laminar.cost.machine import Machine, features
from laminar.cost.ops.families import COMPUTES
from laminar.cost.schedule import OFFLOAD, Price
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Program
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.step import step_programs
from laminar.rewrite.variants import rewritten


def step_features(graph: Graph, plan: Plan, prices: Machine) -> dict[str, float]:
    """What calibration fits for one step of a plan; `prices` must be uncalibrated."""
    program, then = step_programs(rewritten(graph, plan), plan)
    if prices.fused:
        return _compiled_features(recompute(written_out(program)), prices)
    before, behind = prices.around(program, 0)
    out = features(program, prices.lines(program, 0), [*before, *behind])
    if then is not None:
        more = features(then, prices.lines(then, 0), prices.after(then, 0))
        out = {k: out.get(k, 0.0) + more.get(k, 0.0) for k in {*out, *more}}
    return out


def _compiled_features(program: Program, prices: Machine) -> dict[str, float]:
    """The same for a step without collectives that is compiled: a line is a kernel."""
    out = dict.fromkeys((*PARTS, *COUNTS), 0.0)
    for price in prices.kernels(program, kernels(program), 0):
        if isinstance(price, Price) and price.seconds and price.family != OFFLOAD:
            out["compute" if price.family in COMPUTES else "memory"] += price.seconds
            out["lines"] += 1
    before, behind = prices.around(program, 0)
    for name, price in [*before, *behind]:
        out["update" if name == "optimizer" else "memory"] += price.seconds
        out["steps"] += name == "batch"
    return out


def ddp_features(graph: Graph, data: Plan, prices: Machine) -> dict[str, float]:
    """The same for DistributedDataParallel, from the data parallel plan: the same ops, called by autograd.

    Gradients are reduced by Gloo in buckets of 25 MB (the first of 1 MB), beside backward, which is two thirds of the
    work; on ranks that have no core to spare nothing is gained by that, and both are slowed down where they overlap.
    """
    program, _ = step_programs(graph, data)
    before, behind = prices.around(program, 0)
    update = [item for item in behind if item[0] == "optimizer"]  # DDP measures no norm
    local = features(program, prices.lines(program, 0), [*before, *update])
    grads = [o.placed.spec.nbytes for o in program.outputs if o.kind == "grad"]
    exchange, left, first = 0.0, float(sum(grads)), 1 << 20
    while left > 0:
        part = min(left, first)
        exchange += prices.gloo.on("all_reduce", int(part), program.mesh, (0,)).seconds
        left, first = left - part, 25 << 20
    return {
        "compute": local["compute"],
        "memory": local["memory"],
        "update": local["update"],
        "eager_lines": local["lines"],
        "eager_parameters": float(len(grads)),
        "eager_steps": 1.0,
        "eager_exchange": exchange,
        "eager_overlap": min(exchange, (local["compute"] + local["memory"]) * 2 / 3),
        "eager_copies": prices.copy_s(sum(grads)),
    }
