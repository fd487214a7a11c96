"""Where a simulated step spends its time, what binds it, and how sure it is that it beats the others.

`spent` gives every moment of a step to one part: products, other kernels, exchanges that nothing hides (by axis and by
the link they go over), the update, launches, the bubble. Parts of two plans are compared by name: that is why one of
them lost.

`chances` asks how often the plan that is predicted fastest would be, were prices wrong as their interval says. Plans
of one model on one machine share their errors: if products are slower than believed, they are so in all plans. So each
part gets one unknown factor, the same for every plan and independent of other parts', as wide as the interval of the
whole step; a bubble is as wrong as the work it waits for. What plans spend alike then cancels, what they spend
differently does not. On top, every plan has a small error of its own (`OWN_SIGMA`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from laminar.cost.calibrate import HALF_90
from laminar.cost.ops.families import COMPUTES
from laminar.cost.sim.simulate import simulate, timeline
from laminar.forecast.pipeline_step import StagedPrediction, inside, part_schedule
from laminar.forecast.step import Prediction
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import BindingLimit
from laminar.ir.timeline import KINDS, Span, Timeline
from laminar.rules.samples import samples_of

CHANCE_DRAWS = 20_000
OWN_SIGMA = 0.01
"""Standard error of log(seconds) that is one plan's own, whatever it shares with others. Assumed."""
BUBBLE, EXCHANGE, TRANSFERS = "bubble", "exposed exchange", "transfers between stages"
BINDS = {
    "products": "compute",
    "other kernels": "memory bandwidth of the device",
    BUBBLE: "the pipeline's bubble",
    "update": "the optimizer's update",
    "launches": "launches by the host",
}
"""What a part is bound by; exchanges by their link."""


def spent(ran: Prediction | StagedPrediction) -> dict[str, float]:
    """Seconds of a step by part; they add up to the step."""
    if isinstance(ran, Prediction):
        found = _parts(ran.timeline, _links(ran.cluster, ran.plan.mesh, 0))
    else:
        found = _staged(ran)
    rest = ran.seconds - sum(found.values())
    if abs(rest) > 1e-9:  # ranks agree that a step begins, or wait for a batch to be loaded
        found["beginning and end"] = found.get("beginning and end", 0.0) + rest
    return found


def _staged(ran: StagedPrediction) -> dict[str, float]:
    """Parts of a stage are simulated once more, one by one, to see what their seconds are made of."""
    inner = _inside(ran)
    total = sum(inner.values()) or 1.0
    out: dict[str, float] = {}
    for part, seconds in _parts(ran.timeline, {}).items():
        if part == "stages at work":
            out |= {k: out.get(k, 0.0) + seconds * s / total for k, s in inner.items()}
        else:
            out[part] = out.get(part, 0.0) + seconds
    return out


def _inside(ran: StagedPrediction) -> dict[str, float]:
    """What one micro-batch costs in the slowest stage, by part."""
    staged, cluster = ran.staged, ran.cluster
    by_stage: dict[int, list[Any]] = {}
    for part in ran.pipe.made.by_name.values():
        by_stage.setdefault(part.stage, []).append(part)
    slowest = max(by_stage, key=lambda s: sum(ran.part_s[p.name] for p in by_stage[s]))
    place = staged.places[staged.stages[slowest].place]
    home = cluster.on(place.ranks)
    prices = inside(home, min(staged.ranks, home.devices))
    out: dict[str, float] = {}
    for part in by_stage[slowest]:
        made = part_schedule(part.program, prices)
        line = timeline(made.load, simulate(made.load), made.labels(), ranks=made.ranks)
        for name, seconds in _parts(line, _links(cluster, place.mesh, place.ranks[0])).items():
            out[name] = out.get(name, 0.0) + seconds
    return out


def _links(cluster: Cluster, mesh: Mesh, first: int) -> dict[str, str]:
    """For axes of a mesh, the links that a group of theirs goes over."""
    out = {}
    ids = np.arange(mesh.ranks).reshape(mesh.sizes)
    for axis, name in enumerate(mesh.names):
        group = np.moveaxis(ids, axis, 0).reshape(mesh.sizes[axis], -1)[:, 0]
        out[name] = cluster.joining([int(first + r) for r in group]).name if len(group) > 1 else ""
    return out


def _label(span: Span, links: Mapping[str, str]) -> str:
    if span.kind == "communication":
        axes = span.lane.partition(":")[2]
        if ">" in axes:
            return TRANSFERS
        if not axes:  # through shared memory, on the compute lane
            return EXCHANGE
        found = {links[a] for a in axes.replace("+", ",").split(",") if links.get(a)}
        return f"{EXCHANGE} over {axes}" + (f" ({', '.join(sorted(found))})" if found else "")
    if span.kind == "wait":
        return "waiting"
    if span.kind == "host":
        return "launches"
    family = span.family or span.op
    if family in COMPUTES:
        return "products"
    if family in ("forward", "backward", "input", "weight"):
        return "stages at work"
    if family in ("optimizer", "optimize", "update"):
        return "update"
    return f"{EXCHANGE} of gradients" if family == "reduce" else "other kernels"


def _parts(line: Timeline, links: Mapping[str, str]) -> dict[str, float]:
    """Each moment of the first rank goes to what computes, else to what moves, else to a wait, else to the host."""
    rank = line.written[0]
    mine = [s for s in line.spans if s.rank == rank and s.end > s.start and not s.beside]
    order = {kind: k for k, kind in enumerate(KINDS)}
    marks = sorted([(s.start, 1, i) for i, s in enumerate(mine)] + [(s.end, 0, i) for i, s in enumerate(mine)])
    labels = [_label(s, links) for s in mine]
    running: list[set[int]] = [set() for _ in KINDS]
    out: dict[str, float] = {}
    now, busy = (marks[0][0] if marks else 0), 0
    for at, begins, i in marks:
        top = next((r for r in running if r), None)
        if top and at > now:
            name = labels[min(top)]
            out[name] = out.get(name, 0.0) + (at - now) / 1e9
            busy += at - now
        now = at
        (running[order[mine[i].kind]].add if begins else running[order[mine[i].kind]].remove)(i)
    if line.step_ns > busy:
        out[BUBBLE] = (line.step_ns - busy) / 1e9
    return out


def held(ran: Prediction | StagedPrediction) -> dict[str, int]:
    """Bytes of the fullest rank by what they are; with stages, of the fullest rank of each place."""
    if isinstance(ran, StagedPrediction):
        return {f"place {p}": n for p, n in enumerate(ran.peaks)}
    m = ran.memory
    found = {"parameters": m.parameters, "gradients": m.gradients, "state": m.state, "activations": m.peak_activations}
    found["batch and buffers"] = m.inputs + m.buffers + m.constants
    found["workspace and rounding"] = max(0, m.peak_bytes - sum(found.values()))
    return {k: n for k, n in found.items() if n > 0.001 * m.peak_bytes}


def binding(parts: Mapping[str, float], memory_bytes: float | None = None) -> BindingLimit:
    """What most of a step depends on, and how much memory it might fill."""
    if not parts:
        return BindingLimit(memory_bytes=memory_bytes)
    name = max(parts, key=lambda k: parts[k])
    if name.startswith((EXCHANGE, TRANSFERS)):
        resource = f"communication, {name}"
    else:
        resource = BINDS.get(name, name) + ("" if BINDS.get(name) in (None, name) else f" ({name})")
    return BindingLimit(
        resource=resource, part=name, share=parts[name] / sum(parts.values()), memory_bytes=memory_bytes
    )


def chances(rows: Sequence[Mapping[str, float]], sigma: float) -> list[float]:
    """For plans by what they spend on each part, how often each is the fastest; see above for what is assumed."""
    if len(rows) < 2:
        return [1.0] * len(rows)
    names = sorted({name for row in rows for name in row if name != BUBBLE})
    draw = np.random.default_rng(0).standard_normal
    factors = np.exp(sigma * draw((CHANCE_DRAWS, len(names))))
    seconds = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    work = factors @ seconds.T
    idle = np.array([row.get(BUBBLE, 0.0) for row in rows])
    total = work * (1 + idle / np.maximum(seconds.sum(1), 1e-12)) * np.exp(OWN_SIGMA * draw((CHANCE_DRAWS, len(rows))))
    best = np.bincount(np.argmin(total, 1), minlength=len(rows))
    return [float(n) / CHANCE_DRAWS for n in best]


def assumption(sigma: float) -> str:
    """What `chances` takes for granted, in words."""
    wide = 100 * (float(np.exp(HALF_90 * sigma)) - 1)
    return (
        f"each part of a step may be off by {wide:.0f} % (90 %), alike in all plans and independent of other parts, "
        f"and each plan by {100 * (float(np.exp(HALF_90 * OWN_SIGMA)) - 1):.1f} % of its own"
    )


@dataclass(frozen=True)
class BatchCount:
    """How much a batch has."""

    samples: int
    tokens: int | None
    """In a model with attention."""


def counted_times(graph: Graph) -> BatchCount:
    """Samples of a batch and, in a model with attention, its tokens."""
    samples = samples_of(graph)
    whole = [i.spec for i in graph.of_kind("batch") if i.spec.shape[:1] == (samples,) and len(i.spec.shape) == 2]
    tokens = max((s.numel for s in whole if not s.is_float), default=0)
    attends = any("attention" in n.op for n in graph.nodes)
    return BatchCount(samples, tokens if attends and tokens else None)
