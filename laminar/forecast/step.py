"""Prediction: a graph, a plan and a cluster to the seconds, bytes and timeline of a step.

The assembly of lowering and cost: the plan becomes the program ranks would run, each line gets its price, the
simulator says when it runs. Needs no torch and none of the hardware. A prediction says how it is known (shares
of the time that were measured, interpolated or computed from peaks) and how sure it is: the error of
calibrated steps where the cluster was calibrated, else the errors of its parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from laminar.cost.calibrate import Calibration, interval
from laminar.cost.machine import UPDATES, Machine
from laminar.cost.memory.peak import Memory, memory
from laminar.cost.ops.table import cpu_section
from laminar.cost.schedule import Schedule, schedule
from laminar.cost.sim.simulate import Times, simulate, timeline
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import PredictedStep
from laminar.ir.plans.plan import Plan
from laminar.ir.program import Program
from laminar.ir.timeline import Span, Timeline
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import recompute, written_out
from laminar.lower.step import step_programs
from laminar.rewrite.variants import rewritten

UNCALIBRATED = 0.15
"""Standard error of log(seconds) that a step has on top of its parts where nothing was calibrated. Assumed."""

WORKSPACE_BYTES = 32 << 20
"""What the library for products keeps of a GPU's memory, where that was not measured. Assumed, as on Hopper."""


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take."""

    plan: Plan
    cluster: Cluster
    program: Program
    schedule: Schedule
    times: Times
    memory: Memory
    sigma: float
    """Standard error of log(seconds)."""
    groups: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    load_s: float = 0.0
    """Of reading a batch, on every rank."""
    prefetch: int = 2
    """Batches that may be loaded ahead; with 0 loading comes before the step, else beside it."""

    @property
    def seconds(self) -> float:
        """Of a step, once loaders are ahead as far as they can be."""
        step_s = self.times.step / 1e9
        return max(step_s, self.load_s) if self.prefetch else step_s + self.load_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """90 % of steps like this one lie within."""
        return interval(self.seconds, self.sigma)

    @cached_property
    def timeline(self) -> Timeline:
        """Who does what when."""
        low, high = self.interval_s
        meta = {
            "plan": self.plan.hash,
            "plan_name": self.plan.name,
            "cluster": self.cluster.name,
            "interval_ns": [round(low * 1e9), round(high * 1e9)],
            "peak_bytes": self.memory.peak_bytes,
            "axes": {i.name: self.program.axis_names(i) for i in self.program.collectives},
        }
        ranks = {g[0]: g for g in self.schedule.stands_for.values()}
        found = timeline(
            self.schedule.load,
            self.times,
            self.schedule.labels(),
            ranks=self.schedule.ranks,
            stands_for=ranks,
            memory={min(ranks): self._curve()},
            meta=meta,
        )
        return self._loading(found) if self.load_s else found

    def _loading(self, found: Timeline) -> Timeline:
        """With the loader of every rank, beside the step or before it."""
        load_ns = round(1e9 * self.load_s)
        later = 0 if self.prefetch else load_ns
        loads = [Span("load0.0", "host", r, 0, load_ns, "host", "load", "load", phase="load") for r in found.written]
        spans = [replace(s, start=s.start + later, end=s.end + later) for s in found.spans]
        curves = {r: tuple((at + later, held) for at, held in curve) for r, curve in found.memory.items()}
        return replace(found, spans=(*spans, *loads), memory=curves)

    def _curve(self) -> tuple[tuple[int, int], ...]:
        """Bytes over time on the first rank: the curve over lines, put where the lines end."""
        at = {
            line.instr.name: k
            for k, line in enumerate(self.schedule.lines)
            if line.instr and line.part in ("", "start")
        }
        out = []
        for index, held in self.memory.curve:
            name = self.program.instrs[index].name if index < len(self.program.instrs) else ""
            if name in at:
                out.append((int(self.times.end[at[name]]), held))
        return tuple(sorted(out))

    @property
    def peak_bytes(self) -> int:
        """On the fullest rank."""
        return self.memory.peak_bytes

    def figures(self) -> PredictedStep:
        """For the account of the plan."""
        return replace(
            shared_figures(self.seconds, self.interval_s, self.peak_bytes, self.cluster),
            known=self.known(),
        )

    def known(self) -> dict[str, float]:
        """Shares of the work's seconds by how their price is known."""
        by: dict[str, float] = {}
        for line in self.schedule.lines:
            by[line.price.source] = by.get(line.price.source, 0.0) + line.price.seconds
        total = sum(by.values()) or 1.0
        return {k: round(v / total, 4) for k, v in sorted(by.items(), key=lambda kv: -kv[1])}


def shared_figures(seconds: float, interval_s: tuple[float, float], peak_bytes: int, cluster: Cluster) -> PredictedStep:
    """What the account of a plan says of its step, with stages or without."""
    low, high = interval_s
    return PredictedStep(step_s=seconds, step_low_s=low, step_high_s=high, peak_bytes=peak_bytes, cluster=cluster.name)


def machine(cluster: Cluster, mesh: Mesh, optimizer: str = "adamw", calibrated: bool = True) -> Machine:
    """The prices for a mesh on a cluster; without calibration, parts simply add up."""
    cluster.fits(mesh)
    section = section_of(cluster, mesh.ranks)
    found = cluster.profile.get("calibration", {}).get(section)
    calibration = Calibration.from_json(found) if found and calibrated else Calibration()
    return Machine(cluster, section, calibration, optimizer=optimizer, fused=cluster.device.kind == "gpu")


def section_of(cluster: Cluster, ranks: int) -> str:
    """The part of a profile that such ranks find their times in."""
    if cluster.device.kind == "gpu":
        return f"cuda/{cluster.device.name}"
    return cpu_section(ranks, max(1, cluster.devices // ranks))


def predict(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: str = "adamw",
    prices: Machine | None = None,
    load_s: float = 0.0,
    prefetch: int = 2,
) -> Prediction:
    """Simulate one training step of a plan on a cluster; batches that take `load_s` to read are loaded ahead."""
    cluster.fits(plan.mesh)
    cluster = cluster.on(range(plan.mesh.ranks))
    prices = prices or machine(cluster, plan.mesh, optimizer)
    program, then = step_programs(rewritten(graph, plan), plan)
    return replace(predict_program(program, then, plan, cluster, prices), load_s=load_s, prefetch=prefetch)


def timed(
    program: Program, then: Program | None, cluster: Cluster, prices: Machine
) -> tuple[Program, tuple[tuple[int, ...], ...] | None, Schedule, Times]:
    """When each line of a lowered program runs: the program as a compiler has it, its kernels, schedule and times."""
    groups = None
    if prices.fused:
        program = recompute(written_out(program))
        groups = tuple(kernels(program))
        # Without collectives and copies to the host the step is recorded and replayed: the host launches one thing.
        launched = bool(program.collectives) or any(i.hosts for i in program.instrs)
        prices.launch_s = cluster.device.launch_s.value if launched else 0.0
        prices.launch_source = cluster.device.launch_s.source
    made = schedule(program, prices, cluster, then, groups)
    return program, groups, made, simulate(made.load)


def predict_program(
    program: Program, then: Program | None, plan: Plan, cluster: Cluster, prices: Machine
) -> Prediction:
    """The same, from programs that are lowered already."""
    program, groups, made, times = timed(program, then, cluster, prices)
    held = held_by(program, groups, cluster, prices.optimizer)
    return Prediction(plan, cluster, program, made, times, held, sigma_of(made, prices.calibration), groups)


def held_by(program: Program, groups: tuple[tuple[int, ...], ...] | None, cluster: Cluster, optimizer: str) -> Memory:
    """What a rank holds while it runs a program that `timed` gave."""
    kind = "cuda" if cluster.device.kind == "gpu" else "cpu"
    kept = int(cluster.profile.get("workspace_bytes", WORKSPACE_BYTES)) if kind == "cuda" else 0
    return memory(
        program,
        optimizer=UPDATES[optimizer],
        allocator=kind,
        backend=cluster.backend,
        groups=groups,
        workspace_bytes=kept,
    )


# --- plans with stages


def sigma_of(made: Schedule, calibration: Calibration) -> float:
    """A calibrated machine's own error; else that of the parts, as if they all erred the same way."""
    if calibration.models:
        return calibration.sigma
    total = sum(line.price.seconds for line in made.lines) or 1.0
    parts = sum(line.price.seconds * line.price.sigma for line in made.lines) / total
    return math.hypot(parts, UNCALIBRATED)


def with_prediction(graph: Graph, plan: Plan, cluster: Cluster, optimizer: str = "adamw") -> Plan:
    """The plan with the prediction written into its account."""
    found = predict(graph, plan, cluster, optimizer=optimizer)
    return replace(plan, account=replace(plan.account, step=found.figures()))


__all__ = ["Prediction", "machine", "predict", "predict_program", "with_prediction"]
