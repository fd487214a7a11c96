"""Looking at a cell: what its placements are expected to take, and before that, what it promises.

In a cell without micro-batches each style of placement is lowered and simulated on a shallow model, with ZeRO and
without; placements whose parameters and state alone are too large are left out before that. Cells with micro-batches
are put together from parts that many of them have in common. A guess needs even less: parts of a micro-batch with
another number of samples. Nothing here rules a plan out for good: that is what bounds are for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import StagedPrediction
from laminar.ir.plans.plan import Plan
from laminar.planner.estimate.candidates import Final, Score
from laminar.planner.estimate.cost_by_depth import Parts, Share
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.pipeline_recompute import Cut, guessed_recompute, held_bytes, learned, some
from laminar.planner.estimate.score_placement import feasible, scored
from laminar.planner.estimate.stage_cost import hop_s, parts_of, pipelined_s, plain_bytes, plain_s, share_of, unit
from laminar.planner.space.cell import Cell, divisors
from laminar.planner.space.styles import ZERO_STAGES, Style, styles
from laminar.planner.tuning import (
    CRAMPED_CELL,
    HOPELESS_SCORE,
    MEMORY_DOUBT,
    SCALED_SAMPLES,
    SHARDED_GRADIENTS,
    SHORT_HOP,
)


class CellScorer:
    """Scores and guesses of the cells of one model."""

    def __init__(self, model: Model) -> None:
        self.model, self.request = model, model.request

    def zero_stages(self, cell: Cell) -> tuple[int, ...]:
        """Stages of ZeRO that are asked for."""
        pinned = self.request.pin.get("zero")
        if pinned is not None:
            return (pinned,)
        return ZERO_STAGES if self.request.allows("zero") and cell.ranks > 1 else (0,)

    def may_fit(self, score: Score) -> bool:
        """As far as an estimate can tell."""
        return score.peak_bytes <= MEMORY_DOUBT * self.request.room_bytes

    def recomputes_nothing(self, score: Score) -> bool:
        """Whether nothing has to be recomputed where something may be: the cell in which nothing may has that plan."""
        asked = "recompute" in self.request.pin or "offload" in self.request.pin
        none = bool(score.again) and not any(score.again) and not score.away and score.style.keep_products != "some"
        return score.cell.recompute and none and not asked

    def leaner(self, score: Score, final: Final | None) -> list[Score]:
        """A plan that turned out not to fit, with as many blocks recomputed or offloaded as it takes, if any may be."""
        model, style = self.model, score.style
        allowed = self.request.recomputes or (self.request.offloads and score.cell.plain)
        cell = replace(score.cell, recompute=True)
        try:
            if style.keep_products == "all":  # some blocks as a whole, then, and the others so or not at all
                leaner = [replace(style, keep_products="some"), replace(style, keep_products="none")]
                return [scored(model, cell, other, score.zero) for other in leaner]
            if score.cell.recompute or final is None or not allowed or not some(model):
                return []
            if isinstance(final.ran, StagedPrediction):
                learned(model, cell, style, score.zero, final.ran)
            elif score.plan is not None:
                model.shallow[score.cell, style, score.zero] = replace(score, peak_bytes=float(final.peak_bytes))
            return [scored(model, cell, style, score.zero, score.plan)]
        except LaminarError:
            return []

    # --- without micro-batches

    def plain(self, cell: Cell, best_s: float, roomy: float, free: bool) -> list[Score]:
        """Placements of a step without micro-batches; with `free`, such as have no name too.

        `roomy` is what is taken to be held where there is plenty of room, else 0.
        """
        graph = self.model.small(1, self.model.keeps[-1])
        wanted = styles(cell.mesh, self.request.allows("tensor"), free, lean=not roomy)
        found: list[Score] = []
        for style, plan in self.model.placer(cell.mesh).plans(graph, wanted):
            for zero in self._zero_steps(cell, style):
                scores = self._gathered(cell, style, plan, zero, HOPELESS_SCORE * best_s, roomy)
                found += [one for one in scores if not self.recomputes_nothing(one)]
                if not scores:
                    continue
                last = scores[-1]
                if feasible(last, self.request):
                    best_s = min(best_s, last.seconds)
                if self._sharded_enough(last, best_s, free):
                    break
        return found

    def _zero_steps(self, cell: Cell, style: Style) -> Iterator[int]:
        """Stages of ZeRO that a style is tried with, more and more of it in shards."""
        one_axis = {*style.axes} <= {"data", "inner"} and len(style.axes) > 1
        yield from (zero for zero in self.zero_stages(cell) if zero or not one_axis)  # whole, that is data parallel

    def _gathered(self, cell: Cell, style: Style, plan: Plan, zero: int, worth_s: float, roomy: float) -> list[Score]:
        """One stage of ZeRO: parameters gathered once, and twice if that does not fit; what can't be is left out."""
        model = self.model
        graph, placer = model.small(1, model.keeps[-1]), model.placer(cell.mesh)
        found: list[Score] = []
        # Gathered once is never slower than twice.
        once = [replace(style, gather_once=True)] if zero == 3 and not cell.recompute else []
        for one in [*once, style]:
            with suppress(LaminarError):
                sharded = placer.pieces(graph, plan, one, zero)
                if model.stays_bytes(sharded) <= MEMORY_DOUBT * self.request.room_bytes:
                    found.append(scored(model, cell, one, zero, sharded, worth_s, roomy))
                    if found[-1].peak_bytes > self.request.room_bytes:
                        continue
            break
        return found

    def _sharded_enough(self, score: Score, best_s: float, free: bool) -> bool:
        """Whether to shard more is of no use.

        Shards save memory; besides, they save updates and waiting for gradients, but no work, unless blocks are
        recomputed or leave for want of memory.
        """
        slow = SHARDED_GRADIENTS * (score.seconds - score.behind_s) > best_s or not free
        short = score.peak_bytes > self.request.room_bytes or any(score.again) or bool(score.away)
        return slow and not short

    # --- with micro-batches

    def staged(self, cell: Cell, free: bool, lean: bool) -> list[Score]:
        """Placements of a micro-batch, with as little in shards as there is room for.

        Sharded parameters are gathered for every micro-batch: only if that is to be (`lean`), or was asked for.
        """
        found: list[Score] = []
        roomy = False
        for style in styles(cell.mesh, self.request.allows("tensor"), free, lean=True, parts=True):
            if cell.stages > 1 and ("inner" in style.axes or (style.axes[0] == "free" and cell.dp > 1)):
                continue  # data parallel outside, any way inside
            if "lean" in style.axes and roomy:
                continue
            for k, one in enumerate(self.recomputing(cell, style)):
                mine = self._fewest_shards(cell, one, lean)
                found += [score for score in mine if not self.recomputes_nothing(score)]
                if k == 0 and any(feasible(score, self.request) for score in mine):
                    roomy |= "free" in style.axes
                    break
        return found

    def recomputing(self, cell: Cell, style: Style) -> list[Style]:
        """A style whose recomputed blocks keep their products; with some recomputed as a whole; and with all."""
        if not cell.recompute or cell.plain or not some(self.model):
            return [style]
        return [replace(style, keep_products="all"), replace(style, keep_products="some"), style]

    def _fewest_shards(self, cell: Cell, style: Style, lean: bool) -> list[Score]:
        """With more and more in shards, until it fits."""
        stages, found = self.zero_stages(cell), []
        for zero in stages:
            if zero == 3 and not lean and len(stages) > 1:
                continue
            with suppress(LaminarError):
                found.append(scored(self.model, cell, style, zero))
                if zero and feasible(found[-1], self.request):
                    break
        return found

    def cuts(self, score: Score) -> list[Cut]:
        """How stages are cut: where hops are slow, also so that less is sent by stages that are less even."""
        return ["stages", "sent"] if self.slow_hops(score.cell, score.style) else ["stages"]

    def slow_hops(self, cell: Cell, style: Style) -> bool:
        """Whether a hop between stages is not short beside the work of a stage on a micro-batch."""
        if cell.stages == 1:
            return False
        parts = self._parts(cell, style)
        work_s = parts.forward_s.at(self.model.layers) + parts.backward_s.at(self.model.layers)
        return hop_s(self.model, cell, parts.hop_bytes.at(0)) > SHORT_HOP * work_s / cell.stages

    # --- guesses

    def guess(self, cell: Cell) -> float:
        """Seconds of the cell's simplest placement that may fit; 0 if there is nothing to guess from."""
        if "tp" in cell.mesh.names and not self.request.allows("tensor"):
            return 0.0
        found = math.inf
        if cell.plain and cell.tp > 1 and cell.dp > 1:  # samples may be spread over both axes
            found = self.guess(Cell(1, 1, 1, cell.ranks, 1, cell.recompute))
        roomy = fits = False
        for style in self._guessed_from(cell):
            lean = "lean" in style.axes
            if lean and roomy:
                continue
            for k, one in enumerate(self.recomputing(cell, style)):
                try:
                    seconds, fits = self._guessed(cell, one)
                except LaminarError:
                    if lean:  # nothing to save
                        break
                    return 0.0
                found = min(found, seconds)
                if fits and k == 0:
                    roomy = True
                    break
            if fits and style.overlap == "none":
                break
        return found

    def _guessed_from(self, cell: Cell) -> list[Style]:
        """Styles that a guess is made from: where there are micro-batches, also such as have no name."""
        if cell.tp == 1:
            return [Style(("data",))]
        free = [] if cell.plain else [Style.of(cell.mesh, "free", "once"), Style.of(cell.mesh, "lean", "once")]
        return [*free, Style.of(cell.mesh, "tensor"), Style.of(cell.mesh, "sequence")]

    def _guessed(self, cell: Cell, style: Style) -> tuple[float, bool]:
        """Seconds with as little in shards as fits; more than that, if nothing does."""
        parts = self._parts(cell, style)
        seconds, held = (plain_s, plain_bytes) if cell.plain else (pipelined_s, held_bytes)
        stages = [z for z in self.zero_stages(cell) if cell.plain or z < 3] or [1]
        room = MEMORY_DOUBT * self.request.room_bytes
        if cell.recompute and some(self.model):
            if style.keep_products == "some":
                bare = self._parts(cell, replace(style, keep_products="all"))
            else:
                bare = self._parts(replace(cell, recompute=False), style)
            found = [guessed_recompute(self.model, cell, bare, parts, z, room) for z in stages]
        else:
            found = [(held(self.model, cell, parts, z) > room, seconds(self.model, cell, parts, z)) for z in stages]
        cramped, least_s = min(found)
        return CRAMPED_CELL * least_s if cramped else least_s, not cramped

    def _parts(self, cell: Cell, style: Style) -> Parts:
        """Of its share, or in proportion to those of one that was looked at before."""
        model = self.model
        wanted = math.ceil(model.samples / cell.micro_batches / cell.dp)  # some ranks may have one more than others
        each = max(d for d in divisors(model.samples) if d <= wanted)
        share = share_of(model, cell, style, 0) if self.request.place else unit(model, cell, style, each)
        if share in model.parts or self.request.place:
            return parts_of(model, share)
        near = [o for o in model.parts if _kind(o) == _kind(share)]
        if near:
            best = min(near, key=lambda o: abs(math.log(o.samples / wanted)))
            if 1 / SCALED_SAMPLES <= best.samples / wanted <= SCALED_SAMPLES:
                return model.parts[best].scaled(wanted / best.samples)
        return parts_of(model, share).scaled(wanted / each)


def _kind(share: Share) -> tuple[object, ...]:
    """All but how many samples there are."""
    return share.mesh, share.style, share.zero, share.recompute
