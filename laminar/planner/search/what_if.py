"""The same model with something changed: the search is done again, and the difference said in words.

    plan.what_if(memory_bytes=40e9)       plan.what_if(devices=16)        plan.what_if(link=0.5)
    plan.what_if(pin={"tp": 8})           plan.what_if(only="data")       plan.what_if(cluster="8xa100")
    plan.what_if(margin=0.2)              plan.what_if(batch="free")

What is not named stays as it was asked for; a pin set to None is lifted; of memory_bytes and margin, one takes the
place of the other. A plan whose batch was free stays with its batch; a free one is that or a part of it.
Another batch is another graph: capture it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from laminar.errors import ClusterError, PlanError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.forecast.step import Prediction, predict
from laminar.ir.clusters.cluster import Cluster, Figure
from laminar.ir.graph import Graph
from laminar.ir.plans.account import SimulatedPlan
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.planner.report.classify import placed_graph
from laminar.planner.report.graph_of_plan import cluster_for, cluster_named, graph_for
from laminar.planner.report.step_breakdown import spent
from laminar.planner.report.words import difference, sized
from laminar.planner.search.entry import best
from laminar.planner.space.pins import matching
from laminar.planner.space.request import asking, stored_pins

CHANGES = ("memory_bytes", "margin", "devices", "cluster", "pin", "only", "link", "budget_s", "optimizer", "batch")


@dataclass(frozen=True)
class WhatIf:
    """Two plans, and what lies between them."""

    changed: str
    before: Plan | Staged
    after: Plan | Staged | None
    """None where nothing fulfils the changed request."""
    words: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"what if {self.changed}", *(f"  {line}" for line in self.words)])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "changed": self.changed,
            "words": list(self.words),
            "before": _figures(self.before),
            "after": _figures(self.after) if self.after else None,
        }


def what_if(
    plan: Plan | Staged, *, graph: Graph | None = None, cluster: Cluster | str | None = None, **changes: Any
) -> WhatIf:
    """Search again with something changed; `cluster` is a change too where the plan knows its own."""
    given = {k: v for k, v in changes.items() if v is not None}
    for name in given:
        if name not in CHANGES or (name == "batch" and given[name] != "free"):
            batch = "capture the model with the other batch, and plan that" if "batch" in name else ""
            what = f"nothing called {name!r} can be changed" if name not in CHANGES else f"a batch of {given[name]!r}"
            raise PlanError(what, allowed="  ".join(CHANGES) if name not in CHANGES else '"free"', next=batch)
    whole = graph_for(plan, graph)
    own = cluster_named(plan)
    old = plan.origin.cluster if plan.origin else cluster_for(plan, own) if own else cluster_for(plan, cluster)
    new = cluster_for(plan, cluster) if cluster is not None else old
    said = [f"on {new.name}"] if new != old else []
    if "devices" in given:
        new = resized(new, int(given["devices"]))
        said.append(f"{new.devices} devices")
    if "link" in given:
        new = faster_links(new, float(given["link"]))
        said.append(f"links {given['link']:g} times as fast")
    former = dict(vars(plan.account.options)) if plan.account.options else {}
    if "memory_bytes" in given or "margin" in given:
        former |= {"memory_bytes": None, "margin": None}
    options = {**former, **{k: v for k, v in given.items() if k in ASKED_OPTIONS}}
    if "pin" in given:
        pins = {**former.get("pin", {}), **stored_pins(given["pin"])}
        options["pin"] = {k: v for k, v in pins.items() if v is not None}
    said += [_said(k, v) for k, v in given.items() if k in ASKED_OPTIONS]
    if not said:
        raise PlanError("nothing is changed", allowed="  ".join(CHANGES))
    request = asking(new, **options)  # what makes no sense is an error, not an answer
    for pattern in request.place:
        if not matching(whole, pattern):
            raise PlanError(
                f"{pattern!r} names no tensor of the model",
                allowed="  ".join(CHANGES),
                next="`laminar capture --report` lists all names",
            )
    before = _predicted(plan, whole, old)
    changed = " and ".join(said)
    try:
        after = best(whole, request)
    except (PlanError, ClusterError) as error:
        return WhatIf(changed, before, None, tuple(str(error).splitlines()))
    return WhatIf(changed, before, after, tuple(_words(before, after)))


ASKED_OPTIONS = ("memory_bytes", "margin", "pin", "only", "budget_s", "optimizer", "batch")


def _said(name: str, value: Any) -> str:
    if name == "memory_bytes":
        return f"a rank may fill {sized(value)}"
    if name == "margin":
        return f"{value:.3g} of the memory stays free"
    if name == "pin":
        return " and ".join(f"{k}={v} is pinned" if v is not None else f"{k} is not pinned" for k, v in value.items())
    if name == "only":
        return f"only {value if isinstance(value, str) else ','.join(value)} may be used"
    return f"{name} is {value}"


def _words(before: Plan | Staged, after: Plan | Staged) -> list[str]:
    a, b = before.account, after.account
    assert a.step and b.step and a.choice and b.choice
    slower = b.step.step_s / a.step.step_s - 1
    pace = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}" if abs(slower) >= 0.0005 else "as fast"
    mine, other = a.choice.plan, b.choice.plan
    words = [f"instead of {mine}: {other}" if mine != other else _same(before, after)]
    words.append(f"a step takes {b.step.step_s * 1e3:.3f} ms instead of {a.step.step_s * 1e3:.3f}: {pace}")
    if a.samples and b.samples and a.samples != b.samples:
        rates = b.samples / b.step.step_s, a.samples / a.step.step_s
        words.append(
            f"a batch has {b.samples} samples instead of {a.samples}: "
            f"{rates[0]:,.1f} samples a second instead of {rates[1]:,.1f}"
        )
    words.append(f"the fullest rank holds {sized(b.step.peak_bytes)} instead of {sized(a.step.peak_bytes)}")
    apart = difference(a.choice.spent, b.choice.spent, a.step.step_s)
    if apart:
        words.append(f"it spends {apart}")
    words.append(str(after.certificate))
    return words


def _same(before: Plan | Staged, after: Plan | Staged) -> str:
    """Two plans that are told in the same words."""
    if before.hash == after.hash:
        return "the plan stays the same"
    there = {k: v for plan in _plans(after) for k, v in plan.inputs.items()}
    moved = [k for plan in _plans(before) for k, v in plan.inputs.items() if there.get(k, v) != v]
    if not moved:
        return "tensors lie as they did; some ops are placed otherwise"
    more = f" and {len(moved) - 2} more" if len(moved) > 2 else ""
    return f"a plan of the same kind; {', '.join(moved[:2])}{more} lie otherwise"


def _plans(plan: Plan | Staged) -> list[Plan]:
    return [plan] if isinstance(plan, Plan) else [s.plan for s in plan.stages]


def _figures(plan: Plan | Staged) -> dict[str, Any]:
    found, step = plan.account.choice, plan.account.step
    return {
        "plan": plan.hash,
        "is": found.plan if found else plan.name,
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "peak_bytes": plan.peak_bytes,
        "cluster": step.cluster if step else None,
        "choice": found.to_json() if found else {},
    }


def _predicted(plan: Plan | Staged, graph: Graph, cluster: Cluster) -> Plan | Staged:
    """A plan that knows what it takes; one that nobody has simulated is."""
    if plan.account.step is not None and plan.account.choice is not None:
        return plan
    ran: Prediction | StagedPrediction
    if isinstance(plan, Staged):
        ran = predict_staged(placed_graph(plan, graph)[0], replace(plan, rewrites=()), cluster)
    else:
        ran = predict(graph, plan, cluster)
    choice = SimulatedPlan(plan=plan.name, step_s=ran.seconds, peak_bytes=ran.peak_bytes, spent=spent(ran))
    return replace(plan, account=replace(plan.account, step=ran.figures(), choice=choice))


# --- other machines


def resized(cluster: Cluster, devices: int) -> Cluster:
    """So many devices of the same kind, joined in the same way."""
    if devices < 1:
        raise ClusterError(f"{devices} devices", allowed="at least 1")
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([a-z].*)", cluster.name)
    if match is not None and _is_preset(cluster):
        each = int(match[2]) if match[2] else 0
        if each and devices % each == 0:
            return Cluster.preset(f"{devices // each}x{each}x{match[3]}")
        return Cluster.preset(f"{devices}x{match[3]}")
    inner = cluster.unit_devices[-2] if len(cluster.levels) > 1 else 1
    if devices % inner or devices > cluster.devices:
        raise ClusterError(
            f"{devices} devices can't be made of {cluster.name}, which has {cluster.devices}",
            allowed=f"multiples of {inner} up to {cluster.devices}",
            next="hand over the cluster: cluster=...",
        )
    last = replace(cluster.levels[-1], size=devices // inner, shared=min(cluster.levels[-1].shared, devices))
    return replace(cluster, name=f"{devices} of {cluster.name}", levels=(*cluster.levels[:-1], last))


def _is_preset(cluster: Cluster) -> bool:
    try:
        return Cluster.preset(cluster.name).hash == cluster.hash
    except ClusterError:
        return False


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """Links so many times as fast; collectives that were measured are priced by formula then."""
    if not factor > 0:
        raise ClusterError(f"links {factor:g} times as fast", allowed="a number above 0")

    def scaled(figure: Figure) -> Figure:
        return Figure(figure.value * factor, "assumed", f"{factor:g} times {figure.value / 1e9:.4g} GB/s")

    levels = tuple(
        replace(
            level,
            bytes_per_s=scaled(level.bytes_per_s),
            switch_bytes_per_s=level.switch_bytes_per_s and scaled(level.switch_bytes_per_s),
        )
        for level in cluster.levels
    )
    profile: Mapping[str, Any] = {k: v for k, v in cluster.profile.items() if k != "collectives"}
    return replace(cluster, name=f"{cluster.name}, links x{factor:g}", levels=levels, profile=profile)
