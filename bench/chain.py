"""How fast does the guided random search propose and simulate, and what does it gain?

A GPT of 24 layers (355M parameters, bfloat16, 8 sequences of 1,024 tokens a device) on 64 H100, planned in several ways
on meshes of one and of two axes. Three questions, processor seconds, one process:

    proposals   per second by the sum of costs, accepted ones made: the graph with all its layers, and folded
    deltas      simulations by delta per second at full depth, edits of the load included, of states one move away
    gain        what `improve` makes of each plan, and what that takes; for the states that were lowered, how far the
                edited load was from the lowered plan (share of a step)

    python bench/chain.py [--devices 64] [--proposals 300000] [--layers 24 --width 1024 --tokens 1024 --each 8]

Targets: 20,000 proposals and 200 simulations by delta per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from common import report
from search import traced

from laminar.ir.clusters.cluster import Cluster
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.mcmc.additive_cost import Additive, classes
from laminar.planner.mcmc.delta_step import Edited
from laminar.planner.mcmc.improve import _Improving, copies, improve
from laminar.planner.mcmc.metropolis import Chain
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style

WARM = 1e-2
"""The temperature at which proposals are counted, as a share of the cost."""


def proposals_per_s(cost: Additive, together: list[tuple[int, ...]], count: int) -> dict[str, float]:
    """Rates of the first round, while prices are looked up for the first time, and of a second one."""
    out = {}
    start = list(cost.at)
    for name in ("first", "then"):
        cost.go(start)
        chain = Chain(cost, together, seed=1)
        chain.temperature = WARM * cost.total_s
        begun = time.process_time()
        for _ in range(count):
            chain.step()
        out[name] = round(count / (time.process_time() - begun))
    out["accepted"] = round(chain.accepted / count, 4)
    return out


def deltas(work: _Improving, count: int) -> dict[str, float]:
    """States one accepted move from the plan: rates, and the edited step against the lowered one."""
    best, cost = work.best, work.cost
    assert best.step is not None
    edited = Edited(best.step, cost, best.state, work.copies)
    chain = Chain(cost, work.classes, seed=2)
    chain.temperature = 1e-3 * cost.total_s
    spent = 0.0
    states: dict[tuple[int, ...], float] = {}
    for _ in range(count):
        cost.go(best.state)
        while not chain.step():
            pass
        begun = time.process_time()
        states[tuple(cost.at)] = edited.seconds(cost)
        spent += time.process_time() - begun
    errors, same = [], 0
    some = list(states.items())[:: max(1, len(states) // 24)]
    for state, seconds in some:
        plan = cost.plan_of(state)
        plan = plan if work.graph is work.deep else work.model.deepened(plan, work.deep)
        lowered = work.simulated(plan)
        if lowered is not None:
            errors.append(abs(seconds - lowered.seconds) / best.seconds)
            same += (seconds < best.seconds) == (lowered.seconds < best.seconds)
    cost.go(best.state)
    return {
        "per_s": round(count / spent),
        "lowered": len(errors),
        "error_median": round(statistics.median(errors), 5),
        "error_worst": round(max(errors), 5),
        "same_side": round(same / len(errors), 3),
    }


def main() -> None:
    """One line for each plan."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--devices", type=int, default=64)
    args.add_argument("--proposals", type=int, default=300_000)
    args.add_argument("--layers", type=int, default=24)
    args.add_argument("--width", type=int, default=1024)
    args.add_argument("--tokens", type=int, default=1024)
    args.add_argument("--each", type=int, default=8)
    given = args.parse_args()
    graph, _ = traced(given, given.devices)
    model = Model(graph, Request(Cluster.preset(f"{given.devices}xh100")))
    folded = model.small(1, model.keeps[-1])
    n, tp = given.devices, min(8, given.devices)
    two, one = Cell(1, 1, 1, n // tp, tp), Cell(1, 1, 1, n, 1)
    for cell, style, zero in (
        (two, Style(("data", "tensor")), 0),
        (two, Style(("free", "free"), "hidden"), 0),
        (one, Style(("data",)), 0),
        (one, Style(("data",)), 3),
        (one, Style(("free",)), 0),
    ):
        placer = model.placer(cell.mesh)
        plan = placer.pieces(folded, placer.plan(folded, style), style, zero)
        deep = model.deepened(plan, graph)
        whole = Additive(graph, deep, placer.costs[0.0])
        begun = time.process_time()
        small = Additive(
            folded, plan, placer.costs[0.0], {k: float(len(c)) for k, c in copies(model, folded, graph).items()}
        )
        built_s = time.process_time() - begun
        rates = {
            "layers": proposals_per_s(whole, classes(graph, model.fold.at, whole), 60_000),
            "folded": proposals_per_s(small, classes(folded, model.fold.at, small), 60_000),
        }
        work = _Improving(model, cell, plan, 0, None)
        by_delta = deltas(work, 300) if work.best.step is not None and work.best.step.editable else {}
        begun = time.process_time()
        found = improve(model, cell, plan, proposals=given.proposals)
        spent = time.process_time() - begun
        counts = replace(found, plan=plan)
        report(
            "chain",
            {
                "devices": n,
                "model": f"gpt {given.layers} x {given.width}, {given.each} x {given.tokens} a device",
                "plan": f"{style} on {cell}" + (f", ZeRO {zero}" if zero else ""),
                "sites": len(whole.names),
                "options": sum(len(t.options) for t in whole.tables),
                "built_s": round(built_s, 3),
                "proposals_per_s": rates,
                "target_proposals_per_s": 20_000,
                "deltas": by_delta,
                "target_deltas_per_s": 200,
                "before_ms": round(1e3 * work.best.seconds, 3),
                "after_ms": round(1e3 * found.seconds, 3),
                "improve_s": round(spent, 2),
                "proposals": counts.proposals,
                "accepted": counts.accepted,
                "simulated": counts.simulated,
                "lowered": counts.lowered,
            },
        )


if __name__ == "__main__":
    main()
