"""The search: cells in the order of their bounds, the best placements of each, and the finalists simulated in full.

A cell waits with the cheapest bound that is known of it, and gets a better one when its turn comes; when that one, too,
is below what has been found, its placements are scored. A score that would be the best is simulated at full depth, and
counts only then. The search is over when the next bound is not below the best plan, or when its time is. Then those
near the best are simulated too, with those that have a name (data parallel, ZeRO, tensor parallel), and of plans that
are as good as equal the simplest wins.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from laminar.cost.calibrate import interval
from laminar.errors import LaminarError, PlanError
from laminar.forecast import predict, predict_staged
from laminar.ir.graph import Graph
from laminar.ir.plan import Plan
from laminar.ir.staged import Staged
from laminar.planner.bound import Bounds
from laminar.planner.cells import Cell, cells
from laminar.planner.certificate import Certificate, hashed, space
from laminar.planner.placing import ZERO, styles
from laminar.planner.request import Request
from laminar.planner.score import Model, Score, feasible, no_room, scored
from laminar.rules.samples import samples_of
from laminar.staging import pipeline, refuse_coupled

FINALISTS = 2
"""Plans that are simulated at full depth in the end, and as many that have a name."""
NEAR = 1.03
"""How far the score of a finalist may be from the best one's."""
HOPELESS = 1.25
"""A placement that is so much slower than the best is not tried with everything in pieces."""
PLENTY = 5
"""How many times what a rank holds at least must fit for memory not to be asked about before the end."""
EQUAL = 1.005
"""Plans within this of the best are as good as it: the simplest of them is taken."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Final:
    """A plan simulated at full depth."""

    score: Score
    plan: Plan | Staged
    seconds: float
    peak_bytes: int
    account: dict[str, Any]

    @property
    def simple(self) -> tuple[int, ...]:
        """The smaller, the simpler."""
        cell, style = self.score.cell, self.score.style
        ways = ("data", "inner", "tensor", "free", "hidden")
        return (cell.stages, cell.micro_batches > 1, cell.virtual, max(map(ways.index, style)), cell.tp > 1,
                self.score.zero, cell.recompute)  # fmt: skip

    def row(self) -> dict[str, Any]:
        """For `explain`."""
        return {"plan": described(self.score), "step_s": self.seconds, "peak_bytes": self.peak_bytes,
                **self.score.cell.to_json(), "zero": self.score.zero}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a search has to say."""

    plan: Plan | Staged
    certificate: Certificate
    finals: tuple[Final, ...]
    """All that were simulated in full, best first."""
    scores: tuple[Score, ...]
    """All placements that were looked at, best first."""
    space: dict[str, Any]


def described(score: Score) -> str:
    """A plan in a few words."""
    names = {"data": "data parallel", "inner": "pieces within a node", "tensor": "tensor parallel",
             "free": "placed freely"}  # fmt: skip
    ways = dict.fromkeys(names[s] for s in score.style if s in names)
    cell = score.cell
    mesh = " x ".join(f"{n}={s}" for n, s in zip(cell.mesh.names, cell.mesh.sizes, strict=True))
    out = f"{' and '.join(ways)} on {mesh}"
    if score.zero:
        out += f", ZeRO {score.zero}"
    if not cell.plain:
        out += f", {cell.stages} stages" if cell.stages > 1 else ""
        out += f", {cell.micro_batches} micro-batches"
        out += f", {cell.virtual} virtual stages each" if cell.virtual > 1 else ""
    return out + (", blocks made again in backward" if cell.recompute else "")


def find(graph: Graph, request: Request, progress: Progress | None = None) -> Found:
    """The fastest plan of the space that fits, and how far it can be from the best there is."""
    search = _Search(graph, request, progress or (lambda text: None))
    search.run()
    return search.result()


class _Search:
    def __init__(self, graph: Graph, request: Request, progress: Progress) -> None:
        self.began = time.process_time()
        self.request, self.progress = request, progress
        self.model = Model(graph, request)
        self.bounds = Bounds(self.model)
        self.outside = ["rewrites of the graph", "stages cut elsewhere, or of different meshes", "other schedules"]
        samples = samples_of(graph)
        try:
            refuse_coupled(self.model.small(1, self.model.keeps[-1]))
        except LaminarError as error:
            samples = 1
            self.outside.append(f"micro-batches: {str(error).splitlines()[0]}")
        self.cells = cells(request, samples, self.model.cuts if samples > 1 else 1, self.model.blocks is not None)
        self.scores: list[Score] = []
        self.finals: list[Final] = []
        self.at: dict[Cell, float] = {}
        """The best bound that is known of each cell."""
        self.looked_at: set[Cell] = set()
        self.unfit: set[Cell] = set()
        """Cells in which nothing can fit."""

    # --- the loop

    def left(self) -> float:
        """Processor seconds that are left."""
        return self.request.budget_s - (time.process_time() - self.began)

    @property
    def best_s(self) -> float:
        """Of what was simulated at full depth, and fits."""
        return min((f.seconds for f in self.finals), default=float("inf"))

    def run(self) -> None:
        """Bounds and placements until nothing can be better, or time is up."""
        first = [c for c in self.cells if c.plain and not c.recompute]
        if first and self.least_bytes(first[0]) <= self.request.room_bytes:
            self.look(max(first, key=lambda c: c.dp))
        queue: list[tuple[float, int, Cell, int]] = []
        for k, cell in enumerate(self.cells):
            self.at[cell] = self.bounds.rough(cell)
            queue.append((self.at[cell], k, cell, 0))
        heapq.heapify(queue)
        while queue:
            bound_s, k, cell, known = heapq.heappop(queue)
            if bound_s >= self.best_s or (self.left() < 0 and self.finals):
                break
            if known == 0 and self.least_bytes(cell) > self.request.room_bytes:
                self.unfit.add(cell)
                self.at[cell] = float("inf")
                continue
            if known < 2:
                better = (self.bounds.quick, self.bounds.of)[known](cell).seconds
                self.at[cell] = max(bound_s, better)
                heapq.heappush(queue, (self.at[cell], k, cell, known + 1))
            elif cell.recompute and self.fits_without(cell):
                self.looked_at.add(cell)  # what is made again costs time, and here nothing has to be
            elif cell not in self.looked_at:
                self.look(cell)
        self.bound_s = min((b for b in self.at.values()), default=0.0)

    def look(self, cell: Cell) -> None:
        """Score the placements of a cell."""
        self.looked_at.add(cell)
        graph = self.model.small(cell.micro_batches, self.model.keeps[-1])
        wanted = styles(cell.mesh, self.request.allows("tensor"), self.left() > 0)
        placer = self.model.placer(cell.mesh)
        found: list[Score] = []
        best_s = self.best_s
        least = self.least_bytes(cell)
        roomy = least if PLENTY * least < self.request.room_bytes else 0.0
        for style, plan in placer.plans(graph, wanted):
            for zero in self.zeros(cell):
                if "inner" in style and not zero:
                    continue  # that is data parallel on one axis
                try:
                    pieces = placer.pieces(graph, plan, style, zero)
                    one = scored(self.model, cell, style, zero, pieces, HOPELESS * best_s, roomy)
                except LaminarError:
                    continue
                found.append(one)
                if feasible(one, self.request):
                    best_s = min(best_s, one.seconds)
                # Pieces save memory; besides, they save updates, but never a quarter of a step.
                slow = not cell.plain or one.seconds > HOPELESS * best_s or self.left() < 0
                if slow and not one.peak_bytes > self.request.room_bytes:
                    break
        found.sort(key=lambda s: s.seconds)
        for k, one in enumerate(found):
            if one.seconds < self.best_s and feasible(one, self.request):
                found[k] = self.confirmed(one)
                if found[k].seconds == self.best_s:
                    break
        self.scores += found

    def confirmed(self, score: Score) -> Score:
        """A score that would be the best, simulated at full depth: only what was simulated may win."""
        final = self.simulated(score)
        if final is None:
            return replace(score, peak_bytes=float("inf"))
        score = replace(score, seconds=final.seconds, peak_bytes=float(final.peak_bytes))
        if feasible(score, self.request):
            self.finals.append(replace(final, score=score))
            if self.best_s == final.seconds:
                self.progress(f"{final.seconds * 1e3:.3f} ms: {described(score)}")
        return score

    def least_bytes(self, cell: Cell) -> float:
        """What a rank holds at least; where the batch at once leaves plenty of room, micro-batches do too."""
        whole = self.bounds.least_bytes(Cell(1, 1, 1, self.request.cluster.devices, 1))
        return whole if PLENTY * whole < self.request.room_bytes else self.bounds.least_bytes(cell)

    def fits_without(self, cell: Cell) -> bool:
        """Whether the fastest placement of a cell fits without making anything again."""
        twin = replace(cell, recompute=False)
        if twin not in self.looked_at and twin in self.at:
            self.look(twin)
        mine = [s for s in self.scores if s.cell == twin]
        return bool(mine) and feasible(min(mine, key=lambda s: s.seconds), self.request)

    def zeros(self, cell: Cell) -> tuple[int, ...]:
        """Stages of ZeRO that are asked for."""
        pinned = self.request.pin.get("zero")
        if pinned is not None:
            return (pinned,)
        return ZERO if self.request.allows("zero") and cell.ranks > 1 else (0,)

    # --- the end

    def finalists(self) -> list[Final]:
        """What was the best at its time, those near it, and those of them with a name, all at full depth."""
        done = {f.score for f in self.finals}
        near = sorted((s for s in self.scores if feasible(s, self.request) and s not in done), key=lambda s: s.seconds)
        near = [s for s in near if s.seconds <= NEAR * self.best_s]
        named = [s for s in near if set(s.style) <= {"data", "inner", "tensor"}]
        for score in dict.fromkeys([*near[:FINALISTS], *named[:FINALISTS]]):
            self.confirmed(score)
        if not self.finals:
            raise no_room(self.request, min((s.peak_bytes for s in self.scores), default=float("inf")))
        return sorted(self.finals, key=lambda f: f.seconds)

    def simulated(self, score: Score) -> Final | None:
        """A score's plan at full depth; nothing if it can't be written after all."""
        request, cell = self.request, score.cell
        try:
            plan = self.model.unfolded(score)
            if cell.plain:
                found = predict(self.model.graph, plan, request.cluster, optimizer=request.optimizer)
                account = {**found.account(), "sigma": found.sigma}
                return Final(score, plan, found.seconds, found.memory.peak_bytes, account)
            deep = self.model.whole(cell.micro_batches)
            staged = pipeline(deep, cell.stages, cell.micro_batches, cell.virtual, plan)
            staged = replace(staged, name="searched")
            ran = predict_staged(deep, staged, request.cluster, optimizer=request.optimizer)
            account = {**staged.account, **ran.account(), "sigma": ran.sigma}
            return Final(score, staged, ran.seconds, max(ran.peaks), account)
        except PlanError:
            return None

    def result(self) -> Found:
        """The choice, and what is known about it."""
        finals = self.finalists()
        best = min((f for f in finals if f.seconds <= EQUAL * finals[0].seconds), key=lambda f: (f.simple, f.seconds))
        about = space(self.model.graph, self.request, self.cells)
        bound_s = min(self.bound_s, *(f.seconds for f in finals))
        known = best.account.get("known") or {}
        certificate = Certificate(
            space=hashed(about),
            step_s=best.seconds,
            bound_s=bound_s,
            cells=len(self.cells),
            looked_at=len(self.looked_at),
            pruned=sum(1 for c, b in self.at.items() if b >= best.seconds and c not in self.looked_at | self.unfit),
            unfit=len(self.unfit),
            unfinished=sum(1 for c, b in self.at.items() if b < best.seconds and c not in self.looked_at),
            outside=tuple(self.outside),
            interval=interval(best.seconds, best.account.pop("sigma")),
            known="prices " + (", ".join(f"{v:.0%} {k}" for k, v in known.items() if v >= 0.01) or "from peaks"),
        )
        account = {
            **best.plan.account,
            **best.account,
            "bound_s": bound_s,
            "certificate": certificate.to_json(),
            "choice": best.row(),
            "runners_up": [f.row() for f in finals if f is not best],
            "search_s": time.process_time() - self.began,
        }
        scores = tuple(sorted(self.scores, key=lambda s: s.seconds))
        return Found(replace(best.plan, account=account), certificate, tuple(finals), scores, about)
