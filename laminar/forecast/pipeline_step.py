"""Prediction of a step with stages: a graph, a staged plan and a cluster to seconds, bytes and a timeline.

Each part of a stage is lowered, priced and simulated by itself; the net of actors is then executed with these times and
with those of the messages between stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from laminar.cost.calibrate import interval
from laminar.cost.comm.stage_messages import Hop, hop, lanes, messages
from laminar.cost.machine import UPDATES, Machine
from laminar.cost.memory.peak import Memory, memory
from laminar.cost.ops.interned import forms_of
from laminar.cost.schedule import Price, Schedule, schedule
from laminar.cost.sim.pipeline import Execution, execute
from laminar.cost.sim.simulate import simulate
from laminar.forecast.step import machine, section_of, shared_figures, sigma_of
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.net import Net
from laminar.ir.plans.account import PlacePeak, PredictedStep
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.program import Program, placed
from laminar.ir.timeline import Timeline
from laminar.lower.boxing.reshard import Move, moves
from laminar.lower.kernels import kernels
from laminar.lower.memory.mincut_recompute import written_out
from laminar.lower.stages.loaders import with_loads
from laminar.lower.stages.stage_net import Piped, piped
from laminar.lower.stages.stage_programs import stages
from laminar.rewrite.variants import rewritten

STEADY = 4
"""The step of a pipe with loaders that is shown: the first ones find it empty, the last ones find nothing to load."""
MEETING_S = {"cpu": 2e-3, "gpu": 3e-4}
"""What a step with stages takes besides its micro-batches: ranks agree that it begins, and that it is over. On CPU
ranks 1.2 ms were measured before the first firing and about one behind the last (`bench/jitter.py`); on GPUs it is
assumed."""
CONTROL_S = {"cpu": 1e-4, "gpu": 2e-5}
"""What a message between stages costs besides its bytes. On CPU ranks at most 0.12 ms was measured
(`bench/control.py`); assumed on GPUs."""


@dataclass(frozen=True)
class StagedPrediction:
    """What a step of a plan with stages is expected to take."""

    staged: Staged
    cluster: Cluster
    pipe: Piped
    execution: Execution
    part_s: dict[str, float]
    """Seconds of each part for one micro-batch, and of updates."""
    peaks: tuple[int, ...]
    """By place, bytes on its fullest rank: weights, gradients, state, all registers, those of batches that are loaded
    ahead included, and the largest part at work."""
    sigma: float

    @property
    def seconds(self) -> float:
        """Of a step, the pipe being filled and emptied in each."""
        return self.execution.step_ns / 1e9 + MEETING_S[self.cluster.kind]

    @property
    def interval_s(self) -> tuple[float, float]:
        """90 % of steps like this one lie within."""
        return interval(self.seconds, self.sigma)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By place, the share of a step in which it has nothing to do."""
        return self.execution.bubbles[: len(self.staged.places)]

    @property
    def uneven(self) -> float:
        """How many times what the mean place does for a micro-batch the busiest one does."""
        places = [0.0] * len(self.staged.places)
        for s, stage in enumerate(self.staged.stages):
            places[stage.place] += sum(self.part_s.get(f"{part}{s}", 0.0) for part in "FBIW")
        return max(places) * len(places) / (sum(places) or 1.0)

    @cached_property
    def timeline(self) -> Timeline:
        """Who does what when, in one step."""
        found = self.execution.one(min(STEADY, self.execution.steps) - 1)
        return replace(found, meta={**found.meta, "plan": self.staged.hash, "cluster": self.cluster.name})

    @property
    def peak_bytes(self) -> int:
        """On the fullest rank of all places."""
        return max(self.peaks)

    def figures(self) -> PredictedStep:
        """For the account of the plan."""
        places = (
            PlacePeak(
                part=part.name, device=part.device.name, peak_bytes=peak, memory_bytes=part.device.memory_bytes.value
            )
            for part, peak in zip(self.homes, self.peaks, strict=True)
        )
        return replace(
            shared_figures(self.seconds, self.interval_s, self.peak_bytes, self.cluster),
            bubbles=tuple(round(b, 4) for b in self.bubbles),
            places=tuple(places) if len(self.cluster.parts) > 1 else (),
        )

    @property
    def homes(self) -> tuple[Cluster, ...]:
        """By place, the cluster of one kind of device that it stands on."""
        return tuple(self.cluster.on(place.ranks) for place in self.staged.places)


class _Inside(Machine):
    """Prices of a part's own lines: batches and updates are around the pipe, not in it."""

    def around(self, program: Program, rank: int) -> tuple[list[tuple[str, Price]], list[tuple[str, Price]]]:
        return [], []


def inside(cluster: Cluster, ranks: int, optimizer: str = "adamw") -> Machine:
    """The prices inside of parts of stages, on a cluster of one kind that so many ranks of a plan stand on."""
    world = machine(cluster, Mesh({"ranks": ranks}), optimizer)
    found = _Inside(cluster, section_of(cluster, ranks), world.calibration, optimizer=optimizer, fused=world.fused)
    found.launch_s, found.launch_source = cluster.device.launch_s.value, cluster.device.launch_s.source
    return found


def part_schedule(program: Program, prices: Machine) -> Schedule:
    """When each line of one part of a stage runs, by prices of `inside`."""
    program = written_out(program) if prices.fused else program
    return schedule(program, prices, prices.cluster, None, tuple(kernels(program)) if prices.fused else None)


def part_memory(program: Program, cluster: Cluster, optimizer: str) -> Memory:
    """What a part takes while it runs."""
    kind = "cuda" if cluster.kind == "gpu" else "cpu"
    return memory(program, optimizer=UPDATES[optimizer], allocator=kind, backend=cluster.backend)


def owned(program: Program, plan: Plan) -> Program:
    """A part whose gradients lie as those want them who update: in shards, where state is in shards."""
    outputs = []
    for o in program.outputs:
        if o.kind == "grad":
            o = replace(o, placed=placed(o.placed.spec, plan.state.get(o.name, plan.inputs[o.name])))
        outputs.append(o)
    return replace(program, outputs=tuple(outputs))


def outline(program: Program) -> tuple[Any, ...]:
    """A program without its names: two that have the same outline take the same time and memory."""
    forms = forms_of(program)
    args = [repr(plain) for plain in forms.plain]
    lines = tuple([(i.op, i.ins, i.outs, i.phase, text) for i, text in zip(forms.examples, args, strict=True)])
    ends = tuple((o.kind, forms.number(o.ref), o.placed) for o in program.outputs)
    inputs = (tuple((i.kind, i.placed) for i in program.inputs), tuple(c.spec for c in program.constants))
    return program.mesh, lines, tuple(forms.of), tuple(map(tuple, forms.reads)), inputs, ends


def predict_staged(
    graph: Graph,
    staged: Staged,
    cluster: Cluster,
    *,
    optimizer: str = "adamw",
    load_s: float = 0.0,
    prefetch: int = 2,
) -> StagedPrediction:
    """Execute a step of a plan with stages: each part takes its predicted time, each hop that of its links.

    Every rank reads whole batches, `prefetch` of them ahead, which takes `load_s` each.
    """
    cluster.fits(staged.mesh)
    homes = [cluster.on(place.ranks) for place in staged.places]
    pipe = piped(stages(rewritten(graph, staged), staged))
    whole = staged.micro_batches * sum(i.spec.nbytes for i in graph.of_kind("batch"))
    # On GPUs what is loaded ahead waits in pinned memory of the host for the rank's share to be cut.
    net = with_loads(pipe.net, whole if cluster.kind == "cpu" else 0, prefetch)
    # By the part itself: two that have the same name may be different machines.
    ranks = {
        id(h): len({r for p, at in zip(staged.places, homes, strict=True) if at is h for r in p.ranks}) for h in homes
    }
    worlds = {id(h): machine(h, Mesh({"ranks": ranks[id(h)]}), optimizer) for h in homes}
    insides = {id(h): inside(h, ranks[id(h)], optimizer) for h in homes}
    part_s: dict[str, float] = {}
    errors: list[tuple[float, float]] = []
    held: dict[str, Memory] = {}
    alike: dict[Any, tuple[float, float, Memory]] = {}
    for part in pipe.made.by_name.values():
        home, plan = homes[staged.stages[part.stage].place], staged.stages[part.stage].plan
        same = (id(home), *outline(part.program))
        if same not in alike:
            made = part_schedule(part.program, insides[id(home)])
            sigma = sigma_of(made, worlds[id(home)].calibration)
            alike[same] = simulate(made.load).step / 1e9, sigma, part_memory(part.program, home, optimizer)
        part_s[part.name], sigma, held[part.name] = alike[same]
        errors.append((part_s[part.name], sigma))
        behind = worlds[id(home)].around(owned(part.program, plan), 0)[1]
        if behind:
            part_s[f"O{part.stage}"] = sum(price.seconds for _, price in behind)
    for s in range(len(staged.stages)):
        prices = insides[id(homes[staged.stages[s].place])]
        for name, program in _ends(pipe, s).items():
            made = schedule(program, prices, prices.cluster, None, None)
            part_s[name] = part_s.get(name, 0.0) + simulate(made.load).step / 1e9
    for name, seconds in _tied_s(pipe, cluster).items():
        part_s[name] = part_s.get(name, 0.0) + seconds
    work = {a.name: round(1e9 * (load_s if a.kind == "load" else part_s.get(a.name, 0.0))) for a in net.actors}
    hops = _hops(pipe, cluster)
    transfers = {name: round(1e9 * (one.seconds + CONTROL_S[cluster.kind])) for name, one in hops.items()}
    # Without loads every step is like the first.
    steps = STEADY + prefetch + 1 if load_s else 1
    ran = execute(net if load_s else pipe.net, work, steps, transfers=transfers, lanes=lanes(hops))
    total = sum(seconds for seconds, _ in errors) or 1.0
    sigma = sum(seconds * error for seconds, error in errors) / total
    return StagedPrediction(staged, cluster, pipe, ran, part_s, _peaks(pipe, net, held, optimizer), sigma)


def _ends(pipe: Piped, stage: int) -> dict[str, Program]:
    """What a stage exchanges once a step: sums of micro-batches reduced to their owners, updated pieces gathered."""
    plan = pipe.made.staged.stages[stage].plan
    mesh = pipe.net.places[pipe.made.staged.stages[stage].place].mesh
    grads: list[Move] = []
    for part in pipe.made.parts[stage]:
        for o in part.program.outputs:
            if o.kind == "grad":
                grads.append((o.name, o.placed.spec, o.placed.nd, plan.state.get(o.name, plan.inputs[o.name])))
    pieces: list[Move] = [
        (name, spec, plan.state[name], plan.inputs[name])
        for name, spec, _, _ in grads
        if plan.state.get(name, plan.inputs[name]) != plan.inputs[name]
    ]
    made = {f"R{stage}": moves(mesh, grads, "micro-batches summed"), f"O{stage}": moves(mesh, pieces, "updated")}
    return {name: program for name, program in made.items() if program.instrs}


def _tied_s(pipe: Piped, cluster: Cluster) -> dict[str, float]:
    """What gradients of weights that several places hold take to the first of these and back, in its reduction."""
    staged, cut = pipe.made.staged, pipe.made.cut
    specs = {o.name: graph.specs[o.ref] for graph in cut.graphs for o in graph.outputs if o.kind == "grad"}
    out: dict[str, float] = {}
    for name, where in cut.tied.items():
        if name in specs:
            lies = {s: staged.stages[s].plan.state.get(name, staged.stages[s].plan.inputs[name]) for s in where}
            # One stage of each place, the first.
            home, *others = sorted({staged.stages[s].place: s for s in sorted(where, reverse=True)}.values())
            for src, dst in [way for s in others for way in ((s, home), (home, s))]:
                a, b = (staged.places[staged.stages[s].place] for s in (src, dst))
                sent = hop(cluster, messages(a, b, [(specs[name], lies[src], lies[dst])]))
                out[f"R{home}"] = out.get(f"R{home}", 0.0) + sent.seconds
    return out


def _hops(pipe: Piped, cluster: Cluster) -> dict[str, Hop]:
    """What a register of each queue between places takes, and the links it goes through."""
    out = {}
    for q in pipe.net.queues:
        src, dst = pipe.ends(q)
        if src != dst:
            values = [(w.src.spec, w.src.nd, w.dst.nd) for w in pipe.wires.get(q.name, ())]
            out[q.name] = hop(cluster, messages(src, dst, values) or [(src.ranks[0], dst.ranks[0], 0)])
    return out


def _peaks(pipe: Piped, net: Net, held: dict[str, Memory], optimizer: str) -> tuple[int, ...]:
    """By place: weights, gradients and state of its stages, the largest part at work, and all registers."""
    stays, works = [0] * len(pipe.net.places), [0] * len(pipe.net.places)
    for s, parts in enumerate(pipe.made.parts):
        place, plan = pipe.made.staged.stages[s].place, pipe.made.staged.stages[s].plan
        mesh = pipe.net.places[place].mesh
        weights: dict[str, int] = {}
        for part in parts:
            pieces = [o.placed.local(mesh) for o in owned(part.program, plan).outputs if o.kind == "grad"]
            stays[place] += held[part.name].gradients + sum(int(UPDATES[optimizer] * p.numel) for p in pieces)
            works[place] = max(works[place], held[part.name].peak_activations)
            weights.update({i.name: i.placed.local(mesh).nbytes for i in part.program.inputs if i.kind == "param"})
        stays[place] += sum(weights.values())
    return tuple(a + b + net.bound_bytes(p) for p, (a, b) in enumerate(zip(stays, works, strict=True)))
