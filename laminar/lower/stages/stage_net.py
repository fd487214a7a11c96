"""The net of a staged plan: which actor runs which part, and what each queue carries.

Values that forward makes for other stages travel with `F1->F2`, whichever part reads them there; gradients with
`B2->B1`. Between the parts of one stage lie the stash `F2->B2` and, where backward is in two parts, what the
weight part needs of forward (`F2->W2`, which the input part may read too) and of the input part (`I2->W2`).
A value that a stage was given and a later part reads lies in the stash as if the stage had made it.

Micro-batches of several sizes pass through one net: each size has programs of its own, and registers are as large as
the largest needs them (`together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from laminar.errors import PlanError
from laminar.ir.mesh import Place
from laminar.ir.net import Net, Queue
from laminar.ir.program import Placed
from laminar.lower.stages.deadlock import refuse_deadlock
from laminar.lower.stages.pipeline_net import Layout, Stage, StageEdge
from laminar.lower.stages.schedules import dag_net
from laminar.lower.stages.stage_programs import KEPT, Part, Stages, Wire


@dataclass(frozen=True)
class Piped:
    """A staged plan as a net."""

    made: Stages
    net: Net
    carries: dict[str, tuple[str, ...]]
    """For each queue that micro-batches pass through, the names of the values it carries, in order."""
    layout: Layout
    """What the net was made for."""

    @cached_property
    def wires(self) -> dict[str, tuple[Wire, ...]]:
        """For each queue between stages, how its values lie on both sides, in the order of `carries`."""
        out: dict[str, tuple[Wire, ...]] = {}
        for e in {(w.edge.src, w.edge.dst, w.edge.phase) for w in self.made.wires}:
            name = _queue_name(self.made, *e)
            here = {w.edge.name: w for w in self.made.wires if (w.edge.src, w.edge.dst, w.edge.phase) == e}
            out[name] = tuple(here[n] for n in self.carries[name])
        return out

    def ends(self, queue: Queue) -> tuple[Place, Place]:
        """The places at both ends of a queue between stages."""
        a, b = self.net.by_name[queue.producer].place, self.net.by_name[queue.consumers[0]].place
        return self.net.places[a], self.net.places[b]


def piped(made: Stages, memory_bytes: int | None = None) -> Piped:
    """The net of lowered stages; refused if it would wait for ever, or hold more than `memory_bytes` in registers."""
    return together([made], memory_bytes)[0]


def together(sizes: Sequence[Stages], memory_bytes: int | None = None) -> list[Piped]:
    """One net for stages lowered for micro-batches of several sizes, in the same order."""
    found = [layout_of(made) for made in sizes]
    layout = widest([layout for layout, _ in found])
    staged = sizes[0].staged
    net = dag_net(
        layout, staged.places, staged.schedule, window=staged.window, stash=staged.stash, registers=staged.registers
    )
    refuse_deadlock(net, memory_bytes)
    return [Piped(made, net, _known(net, carries), layout) for made, (_, carries) in zip(sizes, found, strict=True)]


def joining(made: Stages, other: Piped) -> Piped | None:
    """Stages for micro-batches of another size in a net that is there; None if its registers are too small."""
    layout, carries = layout_of(made)
    if widest([other.layout, layout]) != other.layout:
        return None
    return Piped(made, other.net, _known(other.net, carries), other.layout)


def widest(layouts: Sequence[Layout]) -> Layout:
    """A layout in which all of these fit: every size is the largest there is."""
    first = layouts[0]
    rows = []
    for same in zip(*(layout.stages for layout in layouts), strict=True):
        most = {f.name: max(getattr(s, f.name) for s in same) for f in fields(Stage) if f.name.endswith("_bytes")}
        rows.append(replace(same[0], trained=any(s.trained for s in same), **most))
    edges: dict[tuple[int, int], StageEdge] = {}
    for e in (e for layout in layouts for e in layout.edges):
        known = edges.setdefault((e.source, e.target), e)
        assert known.grad_bytes is not None and e.grad_bytes is not None
        edges[e.source, e.target] = StageEdge(
            e.source, e.target, max(known.bytes, e.bytes), max(known.grad_bytes, e.grad_bytes)
        )
    return replace(first, stages=tuple(rows), edges=tuple(edges[key] for key in sorted(edges)))


def _known(net: Net, carries: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """What queues of the net carry; one that only other sizes need carries nothing."""
    return {q.name: carries[q.name] for q in net.queues if q.name in carries}


def layout_of(made: Stages) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    """Stages and edges as schedules see them, and what each queue carries."""
    staged, carries = made.staged, dict[str, tuple[str, ...]]()
    rows = []
    for s in range(len(made.parts)):
        kept = _kept(made, s)
        carries.update(kept)
        back = "I" if staged.apart else "B"
        sizes = {name: sum(_bytes(made, s, n) for n in names) for name, names in kept.items()}
        grads = [o for p in made.parts[s] for o in p.program.outputs if o.kind == "grad"]
        mesh = staged.places[staged.stages[s].place].mesh
        rows.append(
            Stage(
                place=staged.stages[s].place,
                stash_bytes=sizes.get(f"F{s}->{back}{s}", 0),
                kept_bytes=sizes.get(f"F{s}->W{s}", 0),
                pending_bytes=sizes.get(f"I{s}->W{s}", 0),
                grads_bytes=sum(o.placed.local(mesh).nbytes for o in grads),
                trained=bool(grads),
            )
        )
    for edge in (w.edge for w in made.wires):
        if (edge.src > edge.dst) == (edge.phase == "forward"):
            raise PlanError(
                f"stage {edge.dst} reads %{edge.name} in {edge.phase}, which stage {edge.src} makes",
                next="number stages in the order in which a micro-batch passes them",
            )
    pairs = {(min(w.edge.src, w.edge.dst), max(w.edge.src, w.edge.dst)) for w in made.wires}
    edges = []
    for a, b in sorted(pairs):
        sizes = {}
        for src, dst, phase in ((a, b, "forward"), (b, a, "backward")):
            here = [w for w in made.wires if (w.edge.src, w.edge.dst, w.edge.phase) == (src, dst, phase)]
            carries[_queue_name(made, src, dst, phase)] = tuple(w.edge.name for w in here)
            mesh = staged.places[staged.stages[dst].place].mesh
            sizes[phase] = sum(w.dst.local(mesh).nbytes for w in here)
        edges.append(StageEdge(a, b, sizes["forward"], sizes["backward"]))
    layout = Layout(
        stages=tuple(rows),
        edges=tuple(edges),
        places=len(staged.places),
        micro_batches=staged.micro_batches,
        apart=staged.apart,
    )
    return layout, carries


def _queue_name(made: Stages, src: int, dst: int, phase: str) -> str:
    letter = "F" if phase == "forward" else "I" if made.staged.apart else "B"
    return f"{letter}{src}->{letter}{dst}"


def _kept(made: Stages, s: int) -> dict[str, tuple[str, ...]]:
    """What the parts of a stage keep for each other, by queue."""
    parts = {p.kind: p for p in made.parts[s]}
    made_by: dict[str, str] = {}
    for kind in ("forward", "input", "backward"):
        if kind in parts:
            made_by.update({o.name: kind for o in parts[kind].program.outputs if o.kind == KEPT})
    for w in made.wires:
        if w.edge.dst == s:
            made_by[w.edge.name] = (
                "forward" if w.edge.phase == "forward" else "input" if made.staged.apart else "backward"
            )

    def wanted(kind: str) -> list[str]:
        part: Part | None = parts.get(kind)
        return sorted(part.takes) if part is not None else []

    if not made.staged.apart:
        return {f"F{s}->B{s}": tuple(n for n in wanted("backward") if made_by[n] == "forward")}
    late = [n for n in wanted("weight") if made_by[n] == "forward"]
    return {
        f"F{s}->I{s}": tuple(n for n in wanted("input") if made_by[n] == "forward" and n not in late),
        f"F{s}->W{s}": tuple(late),
        f"I{s}->W{s}": tuple(n for n in wanted("weight") if made_by[n] != "forward"),
    }


def _bytes(made: Stages, s: int, name: str) -> int:
    """Of a value that a stage keeps, on its fullest rank."""
    mesh = made.staged.places[made.staged.stages[s].place].mesh
    found: Placed = next(i.placed for p in made.parts[s] for i in p.program.inputs if i.name == name)
    return found.local(mesh).nbytes
