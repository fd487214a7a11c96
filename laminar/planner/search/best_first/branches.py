"""Branches on devices of their own: two towers that meet late have nothing to exchange before they do.

Where a model forks (`planner/space/fork_join.py`) and its branches hold enough of the work, each may have a set of
devices to itself. Then no gradient of a branch leaves its set; only what the branches give to those behind the join,
and are given back, passes between sets. A *way* says which branches share a set, how large the sets are, on which of
them the ops before the fork and behind the join run, and how many micro-batches there are. How tensors lie on a set
stays open.

Sizes follow the work: every split of the devices into sets that share a micro-batch evenly is filled, the heaviest
branch first, always where there is most room for it, and the splits whose busiest set has least to do are looked at.
A way is cut into stages (before, the branches of each set, behind), which is an ordinary plan with stages, and
simulated; then each set tries its other placements, as long as that helps.

What a way takes at least, whatever its placements, is the business of `planner/bounds/branch_bound.py`.

Not covered: branches that are pipelines themselves, sets without a branch, several regions at a time, branches of a
graph that was rewritten, blocks recomputed, devices of several kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import predict_staged
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.lower.stages.split_stages import light_ops
from laminar.planner.bounds.branch_bound import Floor
from laminar.planner.bounds.cell_bound import Bounds
from laminar.planner.bounds.piece_bound import per_element_s
from laminar.planner.estimate.candidates import Final, Score
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.space.cell import Cell, divisors
from laminar.planner.space.fork_join import Region, forward_reads, regions
from laminar.planner.space.styles import Overlap, Style
from laminar.planner.tuning import (
    BRANCH_BUDGET,
    BRANCH_REGIONS,
    BRANCH_WAYS,
    BUSIEST_SET,
    LIGHT_TRUNK,
    NEAR_WAY,
    SECOND_BRANCH,
    SIMULATED_WAYS,
)
from laminar.staging.balance import work_s
from laminar.staging.stage_plans import arranged

BRANCH_SETS = 8
"""Sets of devices at most."""
UNEVEN_SETS = 4
"""Sets up to which their sizes may have a factor of three."""
BRANCH_MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batches that are looked at."""
BRANCH_PINS = ("microbatches", "zero")
"""Pins that a way can follow; others speak of stages that are alike."""
NEVER_IN_BRANCHES = ("recompute", "offload")
"""What sets never do; to pin it to nothing is fine."""


@dataclass(frozen=True)
class BranchWay:
    """Which branches go where, with placements left open."""

    region: Region
    groups: tuple[tuple[int, ...], ...]
    """The branches of each set, by number."""
    sizes: tuple[int, ...]
    """Devices of each set."""
    before: int | None
    """The set on which the ops before the fork run; None where there are none."""
    behind: int
    micro_batches: int

    @property
    def homes(self) -> tuple[int, ...]:
        """The set of each stage: before, the branches of each set, behind."""
        first = () if self.before is None else (self.before,)
        return (*first, *range(len(self.sizes)), self.behind)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "fork": self.region.fork,
            "join": self.region.join,
            "branches": [list(g) for g in self.groups],
            "devices": list(self.sizes),
            "before": self.before,
            "behind": self.behind,
            "microbatches": self.micro_batches,
        }

    def __str__(self) -> str:
        sizes = " and ".join(map(str, self.sizes))
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"branches apart on {sizes} devices{parts}"


@dataclass(frozen=True)
class Inner:
    """How a set of devices is used."""

    cell: Cell
    style: Style
    zero: int


@dataclass(frozen=True)
class Tried:
    """A way with placements, simulated in full."""

    way: BranchWay
    inners: tuple[Inner, ...]
    final: Final


class Branches:
    """The ways of one model, their bounds, and the best plans among them."""

    def __init__(self, model: Model, bounds: Bounds, coupled: bool = False) -> None:
        """Samples that are coupled stay in one batch."""
        self.model, self.request, self.coupled = model, model.request, coupled
        self.bounds = bounds
        self.looked_at: set[BranchWay] = set()
        self.raised: set[BranchWay] = set()
        """Those whose bound is as good as it gets."""
        self.floors: dict[tuple[Any, ...], Floor] = {}
        self.plans: dict[tuple[int, Inner], Plan] = {}
        self.at: dict[BranchWay, float] = {}
        """All ways, with their bounds."""
        for way in self._ways() if self._allowed() else ():
            with suppress(LaminarError):  # ops that read values of two branches at once can't be cut
                self.at[way] = self.bound_s(way)

    def _allowed(self) -> bool:
        request = self.request
        others = {name: value for name, value in request.pin.items() if name not in BRANCH_PINS}
        fixed = {name for name, value in others.items() if value or name not in NEVER_IN_BRANCHES}
        return request.cluster.devices > 1 and request.allows("pipeline") and not fixed and not request.place

    # --- which there are

    @cached_property
    def reads(self) -> dict[str, list[str]]:
        """Forward."""
        return forward_reads(self.model.graph)

    @cached_property
    def params(self) -> dict[str, int]:
        """For forward ops, elements of the parameters that they are the first to read, trained or not."""
        graph, light = self.model.graph, light_ops(self.model.graph)
        carried: dict[str, set[str]] = {i.name: {i.name} for i in graph.of_kind("param")}
        sizes = {i.name: i.spec.numel for i in graph.of_kind("param")}
        out: Counter[str] = Counter()
        for node in graph.nodes:
            if node.phase == "forward":
                mine = {p for r in node.ins for p in carried.get(r.name, ())}
                if node.name in light:
                    carried[node.name] = mine
                else:
                    out[node.name] = sum(sizes.pop(p, 0) for p in mine)
        return out

    def found(self) -> list[Region]:
        """Regions whose second branch has enough of the work or of the parameters, the most promising first."""
        worth = []
        everything = regions(self.reads)
        if not everything:
            return []
        for share in (work_s(self.model.graph), self.params):
            total = sum(share.values()) or 1
            for region in everything:
                second = sorted(sum(share[n] for n in branch) for branch in region.branches)[-2]
                if second >= SECOND_BRANCH * total:
                    worth.append((second / total, region))
        return list(dict.fromkeys(region for _, region in sorted(worth, key=lambda w: -w[0])))[:BRANCH_REGIONS]

    def _ways(self) -> Iterator[BranchWay]:
        """Of each region those whose busiest set has least to do."""
        for region in self.found():
            kept: list[tuple[float, BranchWay]] = []
            items = self._items(region)
            trunk = items[-2] + items[-1]
            for micro in self._micro_batches(trunk / sum(items)):
                for sizes in self._splits(micro, len(region.branches)):
                    dealt = deal(items[:-2], items[-2:], sizes)
                    if dealt is not None:
                        busiest, groups, (before, behind) = dealt
                        first = before if self._before(region) else None
                        kept.append((busiest, BranchWay(region, groups, sizes, first, behind, micro)))
            least = min((busiest for busiest, _ in kept), default=0.0)
            level = sorted((k for k in kept if k[0] <= BUSIEST_SET * least), key=lambda k: (k[0], k[1].micro_batches))
            yield from (way for _, way in level[:BRANCH_WAYS])

    def _before(self, region: Region) -> set[str]:
        """Ops that must have run before any branch does."""
        inside, out = region.inside, set[str]()
        for name in reversed(self.reads):
            if name in inside or name in out:
                out.update(self.reads[name])
        return out - inside

    def _items(self, region: Region) -> list[float]:
        """Seconds of each branch on one device, then of what is before them, and behind: a rough count."""
        work = work_s(self.model.graph)
        rate = self.bounds.one_device_s() / (sum(work.values()) or 1.0)
        each = per_element_s(self.model.inside)
        seconds = {n: rate * work[n] + each * self.params[n] for n in work}
        before = self._before(region)
        parts = [sum(seconds[n] for n in names) for names in (*region.branches, before)]
        return [*parts, max(0.0, sum(seconds.values()) - sum(parts))]

    def _micro_batches(self, trunk: float) -> list[int]:
        pinned, samples = self.request.pin.get("microbatches"), self.model.samples
        if pinned is not None:
            return [pinned] if samples % pinned == 0 and not (self.coupled and pinned > 1) else []
        most = 1 if self.coupled or trunk < LIGHT_TRUNK else max(BRANCH_MICRO_BATCHES)
        return [m for m in BRANCH_MICRO_BATCHES if m <= most and samples % m == 0]

    def _splits(self, micro: int, branches: int) -> Iterator[tuple[int, ...]]:
        """All devices in sets that share a micro-batch evenly and lie in nodes as the first devices do.

        A set has a power of two of devices, or where there are few sets, three times one.
        """
        cluster, data = self.request.cluster, self.request.allows("data") or self.request.allows("zero")
        even = divisors(self.model.samples // micro) if data else [1]
        for count in range(2, min(branches, cluster.devices, BRANCH_SETS) + 1):
            odd = 3 if count <= UNEVEN_SETS else 1
            for sizes in falling(cluster.devices, count, [d for d in even if d // (d & -d) <= odd]):
                firsts = [sum(sizes[:k]) for k in range(count)]
                ends = [((0, n - 1), (first, first + n - 1)) for first, n in zip(firsts, sizes, strict=True)]
                alone = self.request.pin.get("zero") and 1 in sizes  # one device has nothing to cut into pieces
                if not alone and all(cluster.joining(a) == cluster.joining(b) for a, b in ends):
                    yield sizes

    # --- stages

    def stage_of(self, way: BranchWay) -> dict[str, int]:
        """The stage of every forward op; what the loss does not need runs behind what it reads."""
        graph, before = self.model.whole(way.micro_batches), self._before(way.region)
        first, last = int(way.before is not None), len(way.homes) - 1
        group = {b: g for g, numbers in enumerate(way.groups) for b in numbers}
        branch = {n: first + group[b] for b, names in enumerate(way.region.branches) for n in names}
        out: dict[str, int] = {}
        light = light_ops(graph)
        for node in graph.nodes:
            if node.phase != "forward" or node.name in light:
                continue
            if node.name in self.reads:
                out[node.name] = branch.get(node.name, 0 if node.name in before else last)
            else:
                out[node.name] = max((out[r.name] for r in node.ins if r.name in out), default=last)
        return out

    def raise_bound(self, best_s: float, left: Callable[[], float]) -> None:
        """The lowest bounds below the best plan, with exchanges counted, as far as time allows."""
        while left() > 0 and any(bound_s < best_s for bound_s in self.at.values()):
            way = min(self.at, key=lambda w: self.at[w])
            if way in self.raised:
                return
            self.raised.add(way)
            with suppress(LaminarError):
                self.at[way] = max(self.at[way], self.bound_s(way, exchanges=True))

    def bound_s(self, way: BranchWay, exchanges: bool = False) -> float:
        """No plan of a way takes less."""
        key = (way.region, way.groups, way.before is None, way.micro_batches)
        if key not in self.floors:
            self.floors[key] = Floor(
                self.model, self.model.whole(way.micro_batches), self.stage_of(way), len(way.homes), way.micro_batches
            )
        floor = self.floors[key]
        if not exchanges:
            return floor.seconds(way.sizes, way.homes)
        busy = [
            floor.exchanged_s(self.bounds, p, self._cells(size, way.micro_batches), way.homes)
            for p, size in enumerate(way.sizes)
        ]
        return floor.seconds(way.sizes, way.homes, busy)

    def _cells(self, size: int, micro: int) -> list[Cell]:
        """Meshes of a set: one axis, and where it has several nodes, one across and one inside."""
        node = self.request.cluster.levels[0].size
        out = [Cell(1, micro, 1, size, 1)]
        if 1 < node < size and size % node == 0:
            out.append(Cell(1, micro, 1, size // node, node))
        return out

    # --- plans

    def options(self, size: int, micro: int) -> list[Inner]:
        """Ways to use a set: data parallel, in shards, placed freely."""
        request, cell = self.request, Cell(1, micro, 1, size, 1)
        pinned = request.pin.get("zero")
        zeros = (0,) if size == 1 or not request.allows("zero") else (0, 1, 3)
        zeros = zeros if pinned is None or size == 1 else (pinned,)
        out = [Inner(cell, Style(("data",)), zero) for zero in zeros]
        if size > 1 and request.allows("tensor"):
            overlap: Overlap = "once" if micro > 1 else "none"
            ways = {1: Style(("free",), overlap), 2: Style(("data", "free"), overlap)}
            cells = [(one, ways[len(one.mesh.sizes)]) for one in self._cells(size, micro)]
            out += [Inner(one, style, zero) for one, style in cells for zero in zeros if zero < 3]
        return out

    def plan(self, way: BranchWay, inners: Sequence[Inner]) -> Staged:
        """A way with placements for each set."""
        micro, graph = way.micro_batches, self.model.whole(way.micro_batches)
        for inner in inners:
            if (micro, inner) not in self.plans:
                score = Score(inner.cell, inner.style, inner.zero, None, 0.0, 0.0)
                self.plans[micro, inner] = self.model.unfolded(score)
        plans = [self.plans[micro, inner] for inner in inners]
        return replace(arranged(graph, self.stage_of(way), way.homes, plans, micro), name="searched")

    def simulated(self, way: BranchWay, inners: Sequence[Inner]) -> Tried | None:
        """In full; nothing where it can't be written."""
        request = self.request
        try:
            staged = self.plan(way, inners)
            ran = predict_staged(
                self.model.whole(way.micro_batches), staged, request.cluster, optimizer=request.optimizer
            )
        except LaminarError:
            return None
        largest = max(inners, key=lambda inner: (inner.cell.ranks, inner.zero))
        cell = Cell(len(way.sizes), way.micro_batches, 1, largest.cell.dp, largest.cell.tp)
        score = Score(cell, largest.style, largest.zero, None, ran.seconds, max(ran.peaks), apart=way.sizes)
        return Tried(way, tuple(inners), Final(score, staged, ran))

    def search(self, best_s: Callable[[], float], left: Callable[[], float]) -> Iterator[Final]:
        """The best plans of ways that may beat what is there, the best first; they need not fit."""
        until_s = min(0.0, left() - BRANCH_BUDGET * self.request.budget_s)
        found: list[Tried] = []
        for way in sorted(self.at, key=lambda w: self.at[w]):
            if len(self.looked_at) == SIMULATED_WAYS or self.at[way] >= best_s() or (left() < until_s and found):
                break
            self.looked_at.add(way)
            options = [self.options(size, way.micro_batches) for size in way.sizes]
            data = [o[0] for o in options]
            free = [next((inner for inner in o if "free" in inner.style.axes), o[0]) for o in options]
            tries = [self.simulated(way, inners) for inners in ([data] if data == free else [data, free])]
            found += [one for one in tries if one is not None]
        best: Tried | None = None
        done: set[BranchWay] = set()
        for one in sorted(found, key=self._key):
            if one.way in done or (best is not None and one.final.seconds > NEAR_WAY * best.final.seconds):
                continue
            done.add(one.way)
            better = self._descended(one, lambda: left() > until_s)
            best = best or better
            yield better.final

    def _key(self, one: Tried) -> tuple[float, float]:
        """What fits comes first, then what is faster."""
        return max(0.0, one.final.peak_bytes / self.request.room_bytes - 1), one.final.seconds

    def _descended(self, best: Tried, time: Callable[[], bool]) -> Tried:
        """Other placements, of all sets of a size at once and of each alone, as long as they help."""
        sizes = best.way.sizes
        options = {size: self.options(size, best.way.micro_batches) for size in sizes}
        alike = [[p for p, other in enumerate(sizes) if other == size] for size in dict.fromkeys(sizes)]
        alone = [[p] for p in range(len(sizes))]
        better = True
        while better:
            better = False
            for places in [*alike, *(one for one in alone if one not in alike)]:
                for inner in options[sizes[places[0]]]:
                    inners = tuple(inner if p in places else one for p, one in enumerate(best.inners))
                    if inners != best.inners and time():
                        found = self.simulated(best.way, inners)
                        if found is not None and self._key(found) < self._key(best):
                            best, better = found, True
        return best


# --- dealing out


def falling(total: int, count: int, allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many allowed ones, the largest first."""
    if count == 0:
        if total == 0:
            yield ()
        return
    for size in sorted(allowed, reverse=True):
        if size <= total and size * count >= total:
            for rest in falling(total - size, count - 1, [a for a in allowed if a <= size]):
                yield (size, *rest)


def deal(
    branches: Sequence[float], trunk: Sequence[float], sizes: Sequence[int]
) -> tuple[float, tuple[tuple[int, ...], ...], tuple[int, ...]] | None:
    """Branches and parts of the trunk dealt out to sets of devices: the heaviest first, where it makes least trouble.

    The seconds of the busiest set, the branches of each, and the set of each part of the trunk; None where a set would
    be left without a branch.
    """
    held = [0.0] * len(sizes)
    groups: list[list[int]] = [[] for _ in sizes]
    homes = [0] * len(trunk)
    items = [*((s, 0, k) for k, s in enumerate(branches)), *((s, 1, k) for k, s in enumerate(trunk))]
    for seconds, kind, k in sorted(items, key=lambda item: (-float(f"{item[0]:.6g}"), *item[1:])):
        p = min(range(len(sizes)), key=lambda p: ((held[p] + seconds) / sizes[p], p))
        held[p] += seconds
        if kind:
            homes[k] = p
        else:
            groups[p].append(k)
    if not all(groups):
        return None
    busiest = max(h / size for h, size in zip(held, sizes, strict=True))
    return busiest, tuple(tuple(sorted(g)) for g in groups), tuple(homes)
