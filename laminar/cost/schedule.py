"""From a program and prices to a load: who does what, on which lane, after what.

One list of tasks stands for all ranks that do the same. Ranks are told apart only where their pieces differ in
size (a dim that does not divide) or where their groups lie differently on the machine; on most plans
all ranks are one *class*, and a step on a thousand devices is simulated once.

A local op is a task on the compute lane. A collective has up to three: `start` (packing, on the compute
lane), the transfer (on a communication lane of its axes, across the classes that take part), and `finish`
(unpacking, on the compute lane, before the first reader, where the runtime waits). A copy to the host or back is like a
collective of one rank, on a lane of its own that disturbs nobody; on a CPU it is an op. Ranks that share memory
have no transfer: copying is theirs, so `finish` waits for every `start` of its group. On a GPU whose step
is not recorded, each op is also launched by the host lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from laminar.cost.sim.no_gc import uncollected
from laminar.cost.sim.tasks import Drag, Lane, Load, Task
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.ops import COLLECTIVE_OPS, FREE
from laminar.ir.program import Instr, Placed, Program
from laminar.ir.sbp import Split, local_shape

OFFLOAD = "offload"
"""The family of copies to the host's memory and back, and the lane they have to themselves."""
TICKS_PER_S = 1e9
"""Ticks of a second."""


KernelGroups = Sequence[tuple[int, ...]]
"""Positions of instructions that run as one kernel, in the order in which kernels run."""


class Price(NamedTuple):
    """Seconds of one thing, how they are known, and the standard error of their logarithm."""

    seconds: float
    source: str
    sigma: float
    family: str


class ExchangePrice(NamedTuple):
    """What a collective costs: on the compute lane before and behind, and on the wire between."""

    start_s: float
    transfer_s: float
    finish_s: float
    source: str
    sigma: float
    algorithm: str
    level: int = 0
    """Of the cluster: whose links it keeps busy."""
    wait_s: float = 0.0
    """What ranks that do the same still wait for each other."""


class Line(NamedTuple):
    """A task's price and what it is, for labels, for fits and for intervals."""

    instr: Instr | None
    part: str
    """"" for an op, else start, transfer or finish, or the name of what happens around the program."""
    price: Price


@dataclass(frozen=True)
class Schedule:
    """A load, and beside each task what it is."""

    load: Load
    lines: tuple[Line, ...]
    stands_for: dict[int, tuple[int, ...]]
    """Rank that was written down -> the ranks that do the same."""
    ranks: int

    def labels(self) -> list[dict[str, Any]]:
        """For `cost.simulate.timeline`, one per task."""
        out = []
        for line in self.lines:
            i, price = line.instr, line.price
            label: dict[str, Any] = {"family": price.family, "source": price.source}
            if price.family == OFFLOAD:
                label["kind"] = "wait" if line.part == "finish" else "communication"
            if line.part in ("start", "finish", "wait") and price.family != OFFLOAD:
                label["kind"] = "wait" if line.part == "wait" else "communication"
            if i is not None:
                label |= {"op": i.op, "module": i.module, "phase": i.phase}
                if i.moves or i.hosts:
                    label |= {"cause": i.reason, "bytes": i.bytes}
            out.append(label)
        return out


class Prices:
    """What a program's lines cost one rank: what a schedule asks. `cost.prices` answers; a test may do so itself."""

    launch_s: float = 0.0
    """Host seconds for each op where the host launches them one by one; 0 where it is part of the op."""
    launch_source: str = "assumed"
    """How that is known: the source of the device's figure."""
    drag: Drag = Drag()

    def lines(self, program: Program, rank: int) -> Sequence[Price | ExchangePrice]:
        """A price for every instruction of the program."""
        raise NotImplementedError

    def kernels(self, program: Program, groups: KernelGroups, rank: int) -> Sequence[Price | ExchangePrice]:
        """A price for every group of instructions that run as one."""
        raise NotImplementedError

    def around(self, program: Program, rank: int) -> tuple[list[tuple[str, Price]], list[tuple[str, Price]]]:
        """What a step does before the program and behind it: sharding the batch, norm and update."""
        return [], []

    def after(self, then: Program, rank: int) -> list[tuple[str, Price]]:
        """What follows the program that runs after the update."""
        return []


def rank_classes(program: Program, cluster: Cluster | None = None) -> list[tuple[int, ...]]:
    """Ranks that do the same, as tuples; the first of each is the one that is written down."""
    mesh = program.mesh
    placed = {id(p): p for i in program.instrs for p in i.ins}  # programs share equal ones
    placed |= {id(p): p for i in program.instrs for p in i.outs if p is not None}
    placed |= {id(i.placed): i.placed for i in program.inputs} | {id(o.placed): o.placed for o in program.outputs}
    uneven = [p for p in set(placed.values()) if _uneven(p, mesh.sizes)]
    far = cluster is not None and len(cluster.levels) > 1
    over = tuple(sorted({i.box.axes for i in program.instrs if i.op in COLLECTIVE_OPS})) if far else ()
    key = (mesh.sizes, over, cluster.unit_devices if over and cluster is not None else ())
    if uneven or key not in _SPREAD:
        everyone = range(mesh.ranks)
        marks: list[list[Any]] = [[] for _ in everyone]
        for p in uneven:
            for r in everyone:
                marks[r].append(local_shape(p.spec.shape, p.nd, mesh.sizes, mesh.coords(r)))
        for axes in over:
            for group in mesh.groups(axes):
                assert cluster is not None
                reach = cluster.span(group)
                mark = (reach.level, reach.units, reach.members)
                for r in group:
                    marks[r].append(mark)
        found: dict[Any, list[int]] = {}
        for r in everyone:
            found.setdefault(tuple(marks[r]), []).append(r)
        out = [tuple(ranks) for ranks in found.values()]
        if uneven:
            return out
        if len(_SPREAD) >= 256:
            _SPREAD.clear()
        _SPREAD[key] = out
    return list(_SPREAD[key])


_SPREAD: dict[Any, list[tuple[int, ...]]] = {}
"""Classes where all pieces are equal: by axes, over which ranks talk, and devices of the machine's units."""


@lru_cache(maxsize=1 << 14)
def _uneven(p: Placed, sizes: tuple[int, ...]) -> bool:
    """Whether ranks hold pieces of different sizes."""
    left = list(p.spec.shape)
    for sbp, parts in zip(p.nd, sizes, strict=True):
        if isinstance(sbp, Split):
            n = left[sbp.dim] // sbp.blocks
            if n % parts or left[sbp.dim] % sbp.blocks:
                return True
            left[sbp.dim] //= parts
    return False


@dataclass
class _Writer:
    program: Program
    groups: list[tuple[int, ...]]
    levels: int
    lanes: dict[Lane, int] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    waiting: dict[str, Callable[[], None]] = field(default_factory=dict)
    own: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By class, its compute lane."""

    def lane(self, rank: int, kind: str) -> int:
        return self.lanes.setdefault(Lane(rank, kind), len(self.lanes))

    def add(self, task: Task, line: Line) -> int:
        self.tasks.append(task)
        self.lines.append(line)
        return len(self.tasks) - 1

    def compute(
        self, at: int, name: str, seconds: float, line: Line, after: tuple[int, ...] = (), launch: Price | None = None
    ) -> int:
        """A task on the compute lane of a class."""
        rank = self.groups[at][0]
        if at:
            name = f"{name}@{rank}"
        if launch is not None:
            host = Task(f"{name}/launch", (self.lane(rank, "host"),), ticks(launch.seconds))
            after = (*after, self.add(host, Line(line.instr, "launch", launch)))
        lanes = self.own.get(at)
        if lanes is None:
            lanes = self.own[at] = (self.lane(rank, "compute"),)
        self.tasks.append(Task(name, lanes, round(seconds * TICKS_PER_S), after))
        self.lines.append(line)
        return len(self.tasks) - 1


def ticks(seconds: float) -> int:
    """Seconds as whole ticks."""
    return round(seconds * TICKS_PER_S)


def schedule(
    program: Program,
    prices: Prices,
    cluster: Cluster | None = None,
    then: Program | None = None,
    groups: KernelGroups | None = None,
) -> Schedule:
    """The load of one step; `then` is what runs after the update (see `lower.step`), `groups` what is fused."""
    with uncollected():
        ranks = rank_classes(program, cluster)
        levels = len(cluster.levels) if cluster is not None else 1
        w = _Writer(program, ranks, levels)
        around = [prices.around(program, g[0]) for g in ranks]
        for k, (before, _) in enumerate(around):
            for name, price in before:
                w.compute(k, name, price.seconds, Line(None, name, price))
        _lines(w, program, prices, groups)
        for k, (_, behind) in enumerate(around):
            for name, price in behind:
                w.compute(k, name, price.seconds, Line(None, name, price))
        if then is not None:
            _lines(w, then, prices, None)
            for k, g in enumerate(ranks):
                for name, price in prices.after(then, g[0]):
                    w.compute(k, name, price.seconds, Line(None, name, price))
        lanes = tuple(w.lanes) or (Lane(0, "compute"),)
        load = Load(lanes, tuple(w.tasks), len(ranks) * levels, prices.drag)
        return Schedule(load, tuple(w.lines), {g[0]: g for g in ranks}, program.mesh.ranks)


def _lines(w: _Writer, program: Program, prices: Prices, groups: KernelGroups | None) -> None:
    """The tasks of all lines of one program, for every class."""
    if groups is None:
        by_class = [prices.lines(program, g[0]) for g in w.groups]
    else:
        by_class = [prices.kernels(program, groups, g[0]) for g in w.groups]
    met: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for instr in program.instrs:
        if instr.op in COLLECTIVE_OPS and instr.box.axes not in met:
            met[instr.box.axes] = _meetings(program, instr.box.axes, w.groups)
    waiting = w.waiting = {}
    everyone = range(len(w.groups))
    instrs, launch = program.instrs, None
    if prices.launch_s:
        sigma = 0.1 if prices.launch_source == "measured" else 0.3  # assumed
        launch = Price(prices.launch_s, prices.launch_source, sigma, "host")
    for n, lines in enumerate(groups if groups is not None else ((k,) for k in range(len(instrs)))):
        instr = instrs[lines[-1]]
        if instr.op in FREE and len(lines) > 1:
            instr = next((instrs[k] for k in reversed(lines) if instrs[k].op not in FREE), instr)
        if waiting:
            for k in lines:
                for ref in instrs[k].refs:
                    if ref.name in waiting:
                        waiting.pop(ref.name)()
        if instr.op not in COLLECTIVE_OPS:
            for k in everyone:
                price = by_class[k][n]
                assert isinstance(price, Price)
                if price.family == OFFLOAD:
                    _copy(w, instr, k, price)
                    continue
                w.compute(k, instr.name, price.seconds, Line(instr, "", price), launch=launch)
            continue
        costs = [row[n] for row in by_class]
        for meeting in met[instr.box.axes]:
            _exchange(w, instr, meeting, {k: c for k in meeting if isinstance(c := costs[k], ExchangePrice)}, program)
    for finish in list(waiting.values()):
        finish()
    waiting.clear()  # they know who writes, who knows them: circles, which only the garbage collector would end


def _copy(w: _Writer, instr: Instr, k: int, price: Price) -> None:
    """The tasks of a copy to the host or back of one class: from where compute has come to, awaited by its reader."""
    none = Price(0.0, "free", 0.0, OFFLOAD)
    rank = w.groups[k][0]
    begun = w.compute(k, f"{instr.name}/start", 0.0, Line(instr, "start", none))
    name = instr.name if k == 0 else f"{instr.name}@{rank}"
    task = Task(name, (w.lane(rank, OFFLOAD),), ticks(price.seconds), (begun,))
    copied = w.add(task, Line(instr, "transfer", price))
    before = w.waiting.get(instr.name)

    def finish() -> None:
        if before is not None:  # other ranks' copies of the same line
            before()
        w.compute(k, f"{instr.name}/finish", 0.0, Line(instr, "finish", none), (copied,))

    w.waiting[instr.name] = finish


def _meetings(program: Program, axes: tuple[int, ...], groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Which classes wait for each other in a collective over `axes`: those that have a group in common."""
    together = {k: {k} for k in range(len(groups))}
    if len(groups) > 1:
        class_of = {r: k for k, g in enumerate(groups) for r in g}
        for group in program.mesh.groups(axes):
            members = {class_of[m] for m in group}
            joined = set().union(*(together[k] for k in members))
            for k in joined:
                together[k] = joined
    out: list[tuple[int, ...]] = []
    for found in together.values():
        if tuple(sorted(found)) not in out:
            out.append(tuple(sorted(found)))
    return out


def _exchange(
    w: _Writer, instr: Instr, meeting: tuple[int, ...], costs: Mapping[int, ExchangePrice], program: Program
) -> None:
    """The tasks of one collective among the classes of a meeting."""
    starts = {}
    for k in meeting:
        c = costs[k]
        line = Line(instr, "start", Price(c.start_s, c.source, c.sigma, instr.kind))
        starts[k] = w.compute(k, f"{instr.name}/start", c.start_s, line)
    slowest = max(costs.values(), key=lambda c: c.transfer_s)
    behind = tuple(starts.values())
    if slowest.transfer_s > 0:
        axes = program.axis_names(instr)
        lanes = tuple(w.lane(w.groups[k][0], f"communication:{axes}") for k in meeting)
        links = tuple(k * w.levels + slowest.level for k in meeting)
        price = Price(slowest.transfer_s, slowest.source, slowest.sigma, instr.kind)
        name = instr.name if meeting[0] == 0 else f"{instr.name}@{w.groups[meeting[0]][0]}"
        task = Task(name, lanes, ticks(slowest.transfer_s), behind, links)
        behind = (w.add(task, Line(instr, "transfer", price)),)

    def finish() -> None:
        for k in meeting:
            c, after = costs[k], behind
            if c.wait_s:
                price = Price(c.wait_s, "calibrated", 0.5, instr.kind)
                after = (w.compute(k, f"{instr.name}/wait", c.wait_s, Line(instr, "wait", price), behind),)
            line = Line(instr, "finish", Price(c.finish_s, c.source, c.sigma, instr.kind))
            w.compute(k, f"{instr.name}/finish", c.finish_s, line, after)

    before = w.waiting.get(instr.name)
    if before is None:
        w.waiting[instr.name] = finish
    else:  # another meeting of the same collective

        def both(first: Callable[[], None] = before) -> None:
            first()
            finish()

        w.waiting[instr.name] = both
