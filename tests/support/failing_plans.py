"""What a failing plan is told as."""

from __future__ import annotations

from laminar.ir.plans.plan import Plan
from laminar.runtime.check.in_process.loopback import TRANSPORTS
from laminar.runtime.check.verify import verify_program
from tests.support.shrink_plan import describe, shrink
from tests.support.zoo import Specimen, equal, specimen


def explain(name: str, plan: Plan, seed: int, one: Specimen) -> str:
    """A failure as one would want to find it: where, how to get it again, and as small as it goes."""
    way = TRANSPORTS[seed % len(TRANSPORTS)]
    small = shrink(plan, lambda p: not equal(one, p, way))
    graph = specimen(name).graph
    try:
        report = str(verify_program(graph, small, [specimen(name).inputs], one.dtype))
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    again = f"random_plan(specimen({name!r}).graph, {plan.mesh}, {seed})"
    return f"{again} differs in {one.dtype}; of it suffices\n{describe(graph, small)}\n{report}"
