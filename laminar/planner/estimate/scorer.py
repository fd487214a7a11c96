"""Looking at a cell: what its placements are expected to take, and before that, what it promises.

In a cell without micro-batches each style of placement is lowered and simulated on a shallow model, with ZeRO and
without; placements whose parameters and state alone are too large are left out before that. Cells with micro-batches
are put together from parts that many of them have in common. A guess needs even less: parts of a micro-batch with
another number of samples. Nothing here rules a plan out for good: that is what bounds are for.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import StagedPrediction
from laminar.planner.estimate.candidates import Final
from laminar.planner.estimate.cost_by_depth import Parts, Share
from laminar.planner.estimate.model import Model, Score
from laminar.planner.estimate.pipeline_recompute import guessed, held_bytes, learned, some
from laminar.planner.estimate.score import feasible, scored
from laminar.planner.estimate.stage_cost import hop_s, parts_of, pipelined_s, plain_bytes, plain_s, share_of, unit
from laminar.planner.space.cell import Cell, divisors
from laminar.planner.space.styles import BOTH, KEPT, LEAN, SPARING, ZERO, styles

HOPELESS = 1.25
"""A placement that is so much slower than the best is not asked how much it holds."""
BUSY = 0.955
"""With state in pieces gradients travel half as far, and slow the work down less: by no more than this. Assumed."""
UNSURE = 1.015
"""How much more than there is an estimate of memory may say, for a plan to be worth simulating."""
FAR = 8
"""Parts are guessed from those of at most so many times as many samples, or as few."""
CRAMPED = 1.5
"""A cell in which nothing is guessed to fit is taken to be so much slower than it is guessed to be."""

SHORT = 0.05
"""A hop between stages that takes so much of a stage's work, or less, is short."""


class Looker:
    """Scores and guesses of the cells of one model."""

    def __init__(self, model: Model) -> None:
        self.model, self.request = model, model.request

    def zeros(self, cell: Cell) -> tuple[int, ...]:
        """Stages of ZeRO that are asked for."""
        pinned = self.request.pin.get("zero")
        if pinned is not None:
            return (pinned,)
        return ZERO if self.request.allows("zero") and cell.ranks > 1 else (0,)

    def worth(self, score: Score) -> bool:
        """Whether it may fit, as far as an estimate can tell."""
        return score.peak_bytes <= UNSURE * self.request.room_bytes

    def idle(self, score: Score) -> bool:
        """Whether nothing has to be made again where something may be: the cell in which nothing may has that plan."""
        asked = "recompute" in self.request.pin or "offload" in self.request.pin
        none = bool(score.again) and not any(score.again) and not score.away and BOTH not in score.style
        return score.cell.recompute and none and not asked

    def leaner(self, score: Score, final: Final | None) -> list[Score]:
        """A plan that turned out not to fit, with as many blocks made again or offloaded as it takes, if any may be."""
        model = self.model
        allowed = self.request.recomputes or (self.request.offloads and score.cell.plain)
        cell = replace(score.cell, recompute=True)
        try:
            if SPARING in score.style:  # some blocks as a whole, then, and the others so or not at all
                style = tuple(s for s in score.style if s != SPARING)
                return [scored(model, cell, way, score.zero) for way in ((*style, BOTH), style)]
            if score.cell.recompute or final is None or not allowed or not some(model):
                return []
            if isinstance(final.ran, StagedPrediction):
                learned(model, cell, score.style, score.zero, final.ran)
            elif score.plan is not None:
                model.shallow[score.cell, score.style, score.zero] = replace(score, peak_bytes=float(final.peak_bytes))
            return [scored(model, cell, score.style, score.zero, score.plan)]
        except LaminarError:
            return []

    def plain(self, cell: Cell, best_s: float, roomy: float, free: bool) -> list[Score]:
        """Placements of a step without micro-batches; with `free`, such as have no name too.

        `roomy` is what is taken to be held where there is plenty of room, else 0.
        """
        graph = self.model.small(1, self.model.keeps[-1])
        placer = self.model.placer(cell.mesh)
        found: list[Score] = []
        wanted = styles(cell.mesh, self.request.allows("tensor"), free, lean=not roomy)
        for style, plan in placer.plans(graph, wanted):
            for zero in self.zeros(cell):
                if {*style} <= {"data", "inner"} and len(style) > 1 and not zero:
                    continue  # that is data parallel on one axis
                # Gathered once is never slower than twice.
                for way in [(*style, KEPT), style] if zero == 3 and not cell.recompute else [style]:
                    one = None
                    with suppress(LaminarError):
                        pieces = placer.pieces(graph, plan, way, zero)
                        if self.model.stays_bytes(pieces) > UNSURE * self.request.room_bytes:
                            break
                        one = scored(self.model, cell, way, zero, pieces, HOPELESS * best_s, roomy)
                        if not self.idle(one):
                            found.append(one)
                    if one is None or not one.peak_bytes > self.request.room_bytes:
                        break
                if one is None:
                    continue
                if feasible(one, self.request):
                    best_s = min(best_s, one.seconds)
                # Pieces save memory; besides, they save updates and waiting for gradients, but no work, unless blocks
                # are made again or leave for want of memory.
                slow = BUSY * (one.seconds - one.behind_s) > best_s or not free
                if slow and not one.peak_bytes > self.request.room_bytes and not (any(one.again) or one.away):
                    break
        return found

    def staged(self, cell: Cell, free: bool, lean: bool) -> list[Score]:
        """Placements of a micro-batch, with as little in pieces as there is room for.

        Parameters in pieces are gathered for every micro-batch: only if that is to be (`lean`), or was asked for.
        """
        found: list[Score] = []
        roomy = False
        for style in styles(cell.mesh, self.request.allows("tensor"), free, lean=True, parts=True):
            if cell.stages > 1 and ("inner" in style or (style[0] == "free" and cell.dp > 1)):
                continue  # data parallel outside, any way inside
            if LEAN in style and roomy:
                continue
            for k, way in enumerate(self.ways(cell, style)):
                mine = self._pieces(cell, way, lean)
                found += [one for one in mine if not self.idle(one)]
                if k == 0 and any(feasible(one, self.request) for one in mine):
                    roomy |= "free" in style
                    break
        return found

    def ways(self, cell: Cell, style: tuple[str, ...]) -> list[tuple[str, ...]]:
        """A style with what costs little made again, with some blocks as a whole besides, and with nothing else."""
        if not cell.recompute or cell.plain or not some(self.model):
            return [style]
        return [(*style, SPARING), (*style, BOTH), style]

    def _pieces(self, cell: Cell, style: tuple[str, ...], lean: bool) -> list[Score]:
        """With more and more in pieces, until it fits."""
        zeros, found = self.zeros(cell), []
        for zero in zeros:
            if zero == 3 and not lean and len(zeros) > 1:
                continue
            with suppress(LaminarError):
                found.append(scored(self.model, cell, style, zero))
                if zero and feasible(found[-1], self.request):
                    break
        return found

    def slow_hops(self, cell: Cell, style: tuple[str, ...]) -> bool:
        """Whether a hop between stages is not short beside the work of a stage on a micro-batch."""
        if cell.stages == 1:
            return False
        parts = self._parts(cell, style)
        work_s = parts.forward_s.at(self.model.layers) + parts.backward_s.at(self.model.layers)
        return hop_s(self.model, cell, parts.hop_bytes.at(0)) > SHORT * work_s / cell.stages

    # --- guesses

    def guess(self, cell: Cell) -> float:
        """Seconds of the cell's simplest placement that may fit; 0 if there is nothing to guess from."""
        if "tp" in cell.mesh.names and not self.request.allows("tensor"):
            return 0.0
        named = [tuple(inner if n == "tp" else "data" for n in cell.mesh.names) for inner in ("tensor", "sequence")]
        once = [
            (*(inner if n == "tp" else "data" for n in cell.mesh.names), "once")
            for inner in (() if cell.plain else ("free", LEAN))
        ]
        found = math.inf
        if cell.plain and cell.tp > 1 and cell.dp > 1:  # samples may be spread over both axes
            found = self.guess(Cell(1, 1, 1, cell.ranks, 1, cell.recompute))
        roomy = fits = False
        for style in [*once, *named] if cell.tp > 1 else [("data",)]:
            if LEAN in style and roomy:
                continue
            for k, way in enumerate(self.ways(cell, style)):
                try:
                    seconds, fits = self._guessed(cell, way)
                except LaminarError:
                    if LEAN in style:  # nothing to save
                        break
                    return 0.0
                found = min(found, seconds)
                if fits and k == 0:
                    roomy = True
                    break
            if fits and style not in once:
                break
        return found

    def _guessed(self, cell: Cell, style: tuple[str, ...]) -> tuple[float, bool]:
        """Seconds with as little in pieces as fits; more than that, if nothing does."""
        parts = self._parts(cell, style)
        seconds, held = (plain_s, plain_bytes) if cell.plain else (pipelined_s, held_bytes)
        zeros = [z for z in self.zeros(cell) if cell.plain or z < 3] or [1]
        room = UNSURE * self.request.room_bytes
        if cell.recompute and some(self.model):
            both = BOTH in style
            bare = self._parts(cell, (*style, SPARING)) if both else self._parts(replace(cell, recompute=False), style)
            found = [guessed(self.model, cell, bare, parts, z, room) for z in zeros]
        else:
            found = [(held(self.model, cell, parts, z) > room, seconds(self.model, cell, parts, z)) for z in zeros]
        cramped, least_s = min(found)
        return CRAMPED * least_s if cramped else least_s, not cramped

    def _parts(self, cell: Cell, style: tuple[str, ...]) -> Parts:
        """Of its share, or in proportion to those of one that was looked at before."""
        model = self.model
        wanted = math.ceil(model.samples / cell.micro_batches / cell.dp)  # some ranks may have one more than others
        each = max(d for d in divisors(model.samples) if d <= wanted)
        share = share_of(model, cell, style, 0) if self.request.place else unit(model, cell, style, each)
        if share in model.parts or self.request.place:
            return parts_of(model, share)
        near = [o for o in model.parts if _bare(o) == _bare(share)]
        if near:
            best = min(near, key=lambda o: abs(math.log(o.samples / wanted)))
            if 1 / FAR <= best.samples / wanted <= FAR:
                return model.parts[best].scaled(wanted / best.samples)
        return parts_of(model, share).scaled(wanted / each)


def _bare(share: Share) -> Share:
    return replace(share, samples=0, micro_batches=0)
