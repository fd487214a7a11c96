"""As few blocks recomputed in backward as memory asks for.

A cell that may make blocks again (`Cell.recompute`) leaves open how many. Each one that is costs its forward once more
and saves what it would have kept, times the micro-batches that are under way where it lies. Under 1F1B that is most at
the first place and one at the last: the first ones make more blocks again, and therefore get fewer layers.

Places are weighed in closed form first (`Places`), from parts of a micro-batch with all blocks recomputed and with none
(`planner/estimate/stage_cost.py`): for a number of seconds that every place may take, each takes as many layers as it
can, with as many of them recomputed as it must; the least number of seconds for which they take all layers is the
estimate. At full depth (`pipelined`, `plain`) stages are cut so that this work is balanced and blocks are picked one
by one, in a stage the first ones: their backward comes last, when nothing else is kept any more. The simulation then
says what each rank really holds; what the estimate was off by is taken into account and the choice made once more, a
few times at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from laminar.cost.machine import UPDATES
from laminar.errors import PlanError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.forecast.step import Prediction, predict
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged, StagePlan
from laminar.planner.estimate.activation_mix import tried_mixes
from laminar.planner.estimate.block_mix import BlockMix, BlockWays
from laminar.planner.estimate.cost_by_depth import Parts, Share
from laminar.planner.estimate.stage_cost import (
    HOPS_HELD,
    parts_of,
    pipelined_s,
    plain_bytes,
    plain_s,
    share_of,
    split_layers,
    state_share,
    unevenly,
    work_by_op,
)
from laminar.planner.space.cell import Cell
from laminar.planner.space.styles import Style
from laminar.planner.tuning import EVEN_STAGES, FEWER_BLOCKS, LAYER_GRID, MEMORY_DOUBT, RECOMPUTE_TRIES
from laminar.staging.balance import balanced
from laminar.staging.stage_plans import pipeline

if TYPE_CHECKING:
    from laminar.planner.estimate.candidates import Score
    from laminar.planner.estimate.graphs_and_prices import Model

Cut = Literal["stages", "places", "sent"]
"""How stages are cut: by what ops take on this machine, so that stages or places are even, or so that less is sent."""


def under_way(cell: Cell, place: int, more: int = 0) -> np.ndarray:
    """Micro-batches that each virtual stage of a place keeps: a row for each moment at which they may be most.

    `more` begin before the first one comes back, at any place with several stages.
    """
    return _under_way(cell.stages, cell.virtual, cell.micro_batches, place, more)


@lru_cache(maxsize=4096)
def _under_way(stages: int, virtual: int, many: int, place: int, more: int) -> np.ndarray:
    if virtual == 1:
        return np.array([[min(many, stages - place)]], dtype=float)
    ahead = min(2 * (stages - place - 1) + (virtual - 1) * stages + 1 + more, many * virtual)
    begun = np.arange(min(many * virtual, ahead + 2 * virtual * stages))
    # As `lower/stages/schedules.py` has it: rounds of micro-batches through each virtual stage, and back in reverse.
    forward = np.eye(virtual)[begun // stages % virtual].cumsum(0)
    backward = np.eye(virtual)[virtual - 1 - begun // stages % virtual].cumsum(0)
    ended = np.maximum(0, begun - ahead + 1)
    out: np.ndarray = forward - np.where(ended[:, None] > 0, backward[ended - 1], 0.0)
    return out[ahead - 1 :]


@dataclass(frozen=True)
class Spread:
    """Layers by place, how many of them are recomputed, and what the slowest place takes for a micro-batch."""

    layers: np.ndarray
    again: np.ndarray
    slowest_s: float


class Places:
    """The places of a pipeline, all of the same mesh: what layers take and hold there."""

    def __init__(self, model: Model, cell: Cell, bare: Parts, again: Parts, zero: int, more: int = 0) -> None:
        """`bare` are parts with nothing recomputed, `again` with all blocks; `more` micro-batches are under way."""
        self.model, self.cell, self.zero, self.parts = model, cell, zero, again
        self.layers = float(model.layers)
        self.room = model.request.room_bytes
        optimizer, share = UPDATES[model.request.optimizer], state_share(cell, again, model.layers, zero)
        self.stays = again.weight_bytes.each + again.grad_bytes.each + optimizer * again.elements.each / share
        outer = again.weight_bytes.ends + again.grad_bytes.ends + optimizer * again.elements.ends / share
        self.grads = again.grad_bytes.each
        """What is reduced when nothing is kept any more."""
        self.fixed = np.full(cell.stages, HOPS_HELD * cell.virtual * again.hop_bytes.at(0) if cell.stages > 1 else 0.0)
        self.fixed[0] += outer / 2
        self.fixed[-1] += outer / 2 + bare.kept_bytes.ends
        self.keeps = bare.kept_bytes.each
        self.saves = max(0.0, bare.kept_bytes.each - again.kept_bytes.each)
        self.each_s = bare.forward_s.each + bare.backward_s.each
        self.more_s = max(0.0, again.forward_s.each + again.backward_s.each - self.each_s)
        self.ends_s = bare.forward_s.ends + bare.backward_s.ends
        self.ends_layers = self.ends_s / self.each_s if self.each_s and cell.stages > 1 else 0.0
        """What the ends of the model take, in layers."""
        self.rows = [under_way(cell, p, more) for p in range(cell.stages)]
        self.kept = np.array([rows.sum(1).max() for rows in self.rows])[:, None] / cell.virtual
        """By place, how many times a layer is kept, if all of its virtual stages are alike."""
        # What forward makes counts where it is made before it is kept; of virtual stages one is at work. At the last
        # place the end of the model may take more than that.
        works = bare.works_bytes.ends
        ends = works > self.keeps * self.layers / cell.stages / cell.virtual
        self.fixed[-1] += works * ends
        self.works = np.full((cell.stages, 1), 1 / cell.virtual)
        self.works[-1] *= not ends
        self.off = np.zeros(cell.stages)
        """By place, bytes by which the estimate was found to be too low."""

    def bare_bytes(self, layers: np.ndarray) -> np.ndarray:
        """What places hold with so many layers (places by any) if nothing is recomputed."""
        stash = np.maximum(self.keeps * self.kept, self.grads) + self.keeps * self.works
        out: np.ndarray = self._rest(layers) + layers * stash
        return out

    def _rest(self, layers: np.ndarray) -> np.ndarray:
        """Besides what is kept, at work and reduced."""
        out: np.ndarray = (self.fixed + self.off)[:, None] + layers * self.stays
        return out

    def needed(self, layers: np.ndarray) -> np.ndarray:
        """Layers that places with so many (places by any) have to recompute; infinite where that is not enough."""
        left = self.room - self._rest(layers)
        out = np.zeros_like(layers)
        # While micro-batches are kept, and when gradients are reduced.
        for held, times in ((0.0, self.kept + self.works), (self.grads, self.works)):
            excess = np.maximum(0.0, layers * (held + self.keeps * times) - left)
            rate = np.broadcast_to(self.saves * times, layers.shape)
            some = np.divide(excess, rate, out=np.full(layers.shape, np.inf), where=rate > 0)
            out = np.maximum(out, np.where(excess > 0, some, 0.0))
        return np.where(out > layers, np.inf, out)

    def spread(self) -> Spread | None:
        """Layers so that the slowest place is as fast as can be; nothing where they can't all be held."""
        stages, ends = self.cell.stages, np.zeros((self.cell.stages, 1))
        ends[-1] = self.ends_s
        grid = np.linspace(0.0, min(self.layers, 2 * self.layers / stages + 1), LAYER_GRID + 1)
        table = np.broadcast_to(grid, (stages, len(grid)))
        again = self.needed(table)
        seconds = ends + table * self.each_s + np.where(np.isfinite(again), again, 0.0) * self.more_s
        ok = np.isfinite(again).cumprod(1).sum(1)  # as many as fit, with all those before
        if not ok.all() or not self.each_s:
            return None
        most = float(max(seconds[p, n - 1] for p, n in enumerate(ok)))
        limits = np.linspace(0.0, most, 4 * LAYER_GRID)
        taken = np.array([np.interp(limits, seconds[p, :n], grid[:n]) for p, n in enumerate(ok)])
        taken[:, :] = np.where(limits[None, :] < seconds[:, :1], 0.0, taken)
        sums = taken.sum(0)
        if sums[-1] < self.layers * (1 - 1e-6):
            return None
        slowest_s = float(np.interp(self.layers, sums, limits))
        layers = np.array([np.interp(slowest_s, limits, row) for row in taken])
        layers *= self.layers / layers.sum()
        # Stages are cut by what they take: a place that has too little room for its share gets it all the same.
        full = np.array([n > 1 and layers[p] >= grid[n - 1] * (1 - 1e-6) for p, n in enumerate(ok)])
        short = np.array([seconds[p, n - 1] < EVEN_STAGES * slowest_s for p, n in enumerate(ok)])
        if (full & short & (ok <= LAYER_GRID)).any():
            return None
        made = np.array([np.interp(n, grid[:k], again[p, :k]) for p, (n, k) in enumerate(zip(layers, ok, strict=True))])
        return Spread(layers, np.minimum(made, layers), slowest_s)

    def shares(self, spread: Spread) -> tuple[np.ndarray, np.ndarray]:
        """Where stages begin, in layers, and what share of its layers each recomputes: virtual stages are alike."""
        each = np.tile(spread.layers, self.cell.virtual) / self.cell.virtual
        share = np.tile(spread.again / np.maximum(spread.layers, 1e-9), self.cell.virtual)
        return np.cumsum(each) - each, share

    def held(self, place: int, layers: Sequence[float], again: Sequence[float]) -> float:
        """Bytes of a place whose virtual stages have so many layers, of which so many are recomputed."""
        kept = self.keeps * np.array(layers) - self.saves * np.array(again)
        stash = max(float((self.rows[place] @ kept).max()), self.grads * sum(layers))
        works = kept.max() * self.works[place, 0] * self.cell.virtual
        return float(self.fixed[place] + self.off[place] + self.stays * sum(layers) + stash + works)

    def seconds(self, spread: Spread, blocks: int) -> tuple[float, tuple[int, ...]]:
        """Of a step, and the blocks recomputed by place: none is recomputed by half."""
        scale = blocks / self.layers
        made = np.minimum(np.ceil(spread.again * scale - 1e-6), np.ceil(spread.layers * scale))
        mean = (self.ends_s + self.layers * self.each_s + made.sum() / scale * self.more_s) / self.cell.stages
        step_s = pipelined_s(self.model, self.cell, self.parts, self.zero, max(spread.slowest_s, mean))
        return step_s, tuple(int(n) for n in made)


def places(model: Model, cell: Cell, style: Style, zero: int, more: int = 0) -> Places:
    """Of a cell in a style."""
    share = share_of(model, cell, style, zero)
    found = Places(model, cell, parts_of(model, without_whole(share, style)), parts_of(model, share), zero, more)
    found.off += model.off.get((cell, style, zero), 0.0)
    return found


def without_whole(share: Share, style: Style) -> Share:
    """The share of blocks that are not recomputed as a whole."""
    if style.keep_products == "some":
        return replace(share, style=replace(share.style, keep_products="all"))
    return replace(share, recompute=False)


def learned(model: Model, cell: Cell, style: Style, zero: int, ran: StagedPrediction) -> None:
    """What places were found to hold with nothing recomputed is kept in mind for the cell in which blocks may be."""
    here = places(model, cell, style, zero)
    share = replace(share_of(model, cell, style, zero), recompute=False)
    inside = _inside(model, here, ran.staged, work_by_op(model, share, model.whole(cell.micro_batches)))
    held = [
        here.held(p, [sum(inside[s].values()) for s in range(p, len(inside), cell.stages)], [0.0] * cell.virtual)
        for p in range(cell.stages)
    ]
    model.off[cell, style, zero] = here.off + np.array(ran.peaks, dtype=float) - np.array(held)


def held_bytes(model: Model, cell: Cell, parts: Parts, zero: int) -> float:
    """On the fullest rank, with stages of equal work in which nothing or everything is recomputed, as parts have it."""
    here = Places(model, cell, parts, parts, zero)
    layers = np.full(cell.stages, (here.layers + here.ends_layers) / cell.stages)
    layers[-1] = max(0.0, layers[-1] - here.ends_layers)
    layers *= unevenly(model, cell, parts) if split_layers(model, cell) else 1.0
    return float(here.bare_bytes(layers[:, None]).max())


def guessed_recompute(
    model: Model, cell: Cell, bare: Parts, again: Parts, zero: int, room: float
) -> tuple[bool, float]:
    """Whether too little fits even if all blocks are recomputed; and seconds, with as few as fit."""
    if not cell.plain:
        found = Places(model, cell, bare, again, zero).spread()
        if found is None:
            return True, pipelined_s(model, cell, again, zero)
        return False, pipelined_s(model, cell, again, zero, found.slowest_s)
    (none_s, none), (all_s, every) = (
        (plain_s(model, replace(cell, recompute=r), p, zero), plain_bytes(model, replace(cell, recompute=r), p, zero))
        for r, p in ((False, bare), (True, again))
    )
    share = min(1.0, max(0.0, (none - room) / (none - every))) if none > every else float(none > room)
    return every > room and none > room, none_s + share * (all_s - none_s)


def some(model: Model) -> bool:
    """Whether a model has blocks of which some can be recomputed, and others not."""
    return len(model.block_names) > 1 and len(model.keeps) > 1


# --- at full depth


SimulatedRun = tuple[Staged, StagedPrediction, tuple[int, ...]]
"""A plan with stages, simulated; and how many blocks each place recomputes."""


def pipelined(
    model: Model, score: Score, deep: Graph, plan: Plan, cut: Cut = "stages", worth_s: float = math.inf
) -> SimulatedRun:
    """A score's plan with stages, simulated; and how many blocks each place recomputes.

    What is too large and takes longer than `worth_s` is not tried with more. Where places have several stages, they
    begin one more micro-batch before the first comes back, if there is room for it: what they hand on then has time to
    travel. Simulated, plans of GPT-3's shape on 1,024 H100 gain 0.6 % by that, of Llama 405B's on 16,384 1.2 %.
    """
    room = model.request.room_bytes
    if score.cell.virtual == 1:
        return _pipelined(model, score, deep, plan, cut, worth_s, 0)
    try:
        ran = _pipelined(model, score, deep, plan, cut, worth_s, 1)
        peak, seconds = max(ran[1].peaks), ran[1].seconds
    except PlanError:
        ran, peak, seconds = None, 0, 0.0
    if ran is not None and (peak <= room or peak > MEMORY_DOUBT * room or seconds > worth_s):
        return ran
    return _pipelined(model, score, deep, plan, cut, worth_s, 0)


def first_cut(model: Model, score: Score, deep: Graph, cut_by: Cut = "stages") -> dict[str, int]:
    """The stages of forward ops in which `pipelined` begins, one at each place."""
    cell, share = score.cell, share_of(model, score.cell, score.style, score.zero)
    work = work_by_op(model, share, deep)
    if score.again:
        here = places(model, cell, score.style, score.zero)
        if (spread := here.spread()) is not None:
            work = _work(model, here, spread, work_by_op(model, without_whole(share, score.style), deep), work)
    return balanced(deep, cell.stages, None if cut_by == "sent" else [work] * cell.stages)


def _pipelined(
    model: Model, score: Score, deep: Graph, plan: Plan, cut_by: Cut, worth_s: float, more: int
) -> SimulatedRun:
    """With so many more micro-batches under way at each place."""
    cell, request = score.cell, model.request
    share = share_of(model, cell, score.style, score.zero)

    def run(plan: Plan, work: Mapping[str, float]) -> Staged:
        made = pipeline(
            deep,
            cell.stages,
            cell.micro_batches,
            cell.virtual,
            plan,
            couple="microbatch",
            speeds=None if cut_by == "sent" else [work] * cell.stages,
            by_place=cut_by == "places",
            stash=1 + (more / 2) / (cell.stages * cell.virtual),
        )
        return replace(made, name="searched", coupled=False)

    if not score.again:
        made = run(plan, work_by_op(model, share, deep))
        return made, predict_staged(deep, made, request.cluster, optimizer=request.optimizer), ()
    here = places(model, cell, score.style, score.zero, more)
    bare, whole = work_by_op(model, without_whole(share, score.style), deep), work_by_op(model, share, deep)
    plan = replace(plan, recompute=())
    best: SimulatedRun | None = None
    last: SimulatedRun | None = None
    spread, least = here.spread(), [0] * cell.stages
    cut = run(plan, _work(model, here, spread, bare, whole)) if spread else None
    for _ in range(RECOMPUTE_TRIES):
        if spread is None or cut is None:
            break
        made, pieces, counts, held = _picked(model, here, cut, bare, score.style, least)
        if held.max() > request.room_bytes * (MEMORY_DOUBT if last is None else 1.0):
            break  # with all that it has recomputed, some place holds too much
        ran = predict_staged(deep, made, request.cluster, optimizer=request.optimizer)
        last = made, ran, counts
        here.off += np.array(ran.peaks, dtype=float) - held
        if max(ran.peaks) > request.room_bytes:
            if ran.seconds > worth_s:
                break
            # The same stages, and more blocks where there was too little room.
            least = [n + (peak > request.room_bytes) for n, peak in zip(pieces, ran.peaks, strict=True)]
            continue
        if best is None or ran.seconds < best[1].seconds:
            best = last
        before, spread = spread, here.spread()
        if spread is None or spread.slowest_s > FEWER_BLOCKS * before.slowest_s:
            break
        cut, least = run(plan, _work(model, here, spread, bare, whole)), [0] * cell.stages
    found = best or last
    if found is None and spread is not None:
        raise PlanError(f"stages cut for {cell} hold too much, whatever is recomputed", binds="memory")
    if found is None:  # all of them, if nothing less will do
        made = run(replace(plan, recompute=model.again(cell, score.style)), whole)
        found = made, predict_staged(deep, made, request.cluster, optimizer=request.optimizer), ()
    return found


def _work(
    model: Model, here: Places, spread: Spread, bare: Mapping[str, float], whole: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of forward ops with their backward: of blocks where some are recomputed, in proportion."""
    begins, shares = here.shares(spread)
    of, count = model.block_of, len(model.block_names)
    out = {}
    for name, seconds in bare.items():
        block = of.get(name)
        if block is not None:
            at = (block + 0.5) * here.layers / count
            seconds += float(shares[int(np.searchsorted(begins, at, side="right")) - 1]) * (whole[name] - seconds)
        out[name] = seconds
    return out


def _picked(
    model: Model,
    here: Places,
    staged: Staged,
    bare: Mapping[str, float],
    style: Style,
    least: Sequence[int],
) -> tuple[Staged, tuple[int, ...], tuple[int, ...], np.ndarray]:
    """Stages with as few blocks recomputed as places need, `least` of them at least; and what should then be held.

    Between them, how many pieces of blocks each place recomputes, and how many blocks: one that is cut between stages
    counts where it is recomputed first.
    """
    cell, shares = here.cell, _inside(model, here, staged, bare)
    own, held, pieces = list(staged.stages), np.zeros(cell.stages), []
    made: dict[int, int] = {}
    """Block -> the first stage that recomputes it."""
    for place in range(cell.stages):
        mine = [c * cell.stages + place for c in range(cell.virtual)]
        layers = [sum(shares[s].values()) for s in mine]
        again = [0.0] * cell.virtual
        names: list[list[int]] = [[] for _ in mine]
        # Virtual stages in turns: which of them keeps most changes all the time. The first blocks of each.
        order = [(k, c, b) for c, s in enumerate(mine) for k, b in enumerate(shares[s])]
        for _, c, b in sorted(order):
            if sum(map(len, names)) >= least[place] and here.held(place, layers, again) <= here.room:
                break
            again[c] += shares[mine[c]][b]
            names[c].append(b)
        held[place] = here.held(place, layers, again)
        for c, s in enumerate(mine):
            patterns = model.patterns(names[c], style, of=len(shares[s]))
            if style.keep_products == "some":
                others = [b for b in shares[s] if b not in names[c]]
                patterns += model.patterns(others, replace(style, keep_products="all"), of=len(shares[s]))
            own[s] = StagePlan(own[s].place, replace(own[s].plan, recompute=patterns))
            made |= {b: min(s, made.get(b, s)) for b in names[c]}
        pieces.append(sum(map(len, names)))
    counts = [sum(s % cell.stages == p for s in made.values()) for p in range(cell.stages)]
    return replace(staged, stages=tuple(own)), tuple(pieces), tuple(counts), held


def _inside(model: Model, here: Places, staged: Staged, bare: Mapping[str, float]) -> list[dict[int, float]]:
    """By stage, its blocks and how much of each it has, in layers."""
    total: dict[int, float] = {}
    inside: list[dict[int, float]] = [{} for _ in staged.stages]
    for name, stage in staged.of.items():
        block = model.block_of.get(name)
        if block is not None:
            total[block] = total.get(block, 0.0) + bare[name]
            inside[stage][block] = inside[stage].get(block, 0.0) + bare[name]
    scale = here.layers / len(model.block_names)
    return [{b: scale * s / (total[b] or 1.0) for b, s in sorted(blocks.items())} for blocks in inside]


def plain(model: Model, score: Score, plan: Plan, worth_s: float = math.inf) -> tuple[Plan, Prediction, BlockMix]:
    """A score's plan without stages, simulated; and what becomes of its blocks.

    As few recomputed as fit; then mixes that are expected to be faster (`planner/estimate/activation_mix.py`).
    """
    request = model.request
    if not score.again:
        return plan, predict(model.graph, plan, request.cluster, optimizer=request.optimizer), BlockMix()
    ways = model.ways.get((score.cell, score.style, score.zero))
    best = None
    if request.recomputes and (ways is None or ways.least_bytes <= MEMORY_DOUBT * request.room_bytes):
        best = _fewest(model, score, plan, ways, worth_s)
    fits = best is not None and best[1].memory.peak_bytes <= request.room_bytes
    if ways is not None:
        best_s = min(worth_s, best[1].seconds) if best is not None and fits else worth_s
        for mix, made, ran in tried_mixes(model, score, plan, ways, best_s):
            fitting = ran.memory.peak_bytes <= request.room_bytes
            if best is None or (fitting, -ran.seconds) > (fits, -best[1].seconds):
                best, fits = (made, ran, mix), fitting
    if best is None:  # nothing is worth trying
        raise PlanError(f"blocks of {score.cell} hold too much, whatever becomes of them", binds="memory")
    return best


def _fewest(
    model: Model, score: Score, plan: Plan, ways: BlockWays | None, worth_s: float
) -> tuple[Plan, Prediction, BlockMix]:
    """With as few blocks recomputed as fit, whole ones."""
    request, room = model.request, model.request.room_bytes
    found: dict[int, tuple[Plan, Prediction]] = {}

    def run(count: int) -> int:
        made = replace(plan, recompute=model.patterns(range(count), score.style))
        found[count] = made, predict(model.graph, made, request.cluster, optimizer=request.optimizer)
        return found[count][1].memory.peak_bytes

    blocks, count, first_saves = len(model.block_names), score.again[0], score.saves_bytes
    expected = score.peak_bytes + count * first_saves if score.peak_bytes else 0.0
    """With nothing recomputed."""
    if ways is not None and ways.whole is not None:
        expected, first_saves = ways.kept_bytes, ways.whole[1] or first_saves
        count = min(blocks, math.ceil((expected - room) / first_saves)) if first_saves else blocks
    held: dict[int, int] = {}
    for _ in range(RECOMPUTE_TRIES):
        held[count] = run(count)
        most = max((n for n, size in held.items() if size > room), default=-1)
        least = min((n for n, size in held.items() if size <= room), default=blocks + 1)
        if least - most <= 1 or (most == count and found[count][1].seconds > worth_s):
            break
        known = {0: expected, **held} if expected else held
        more = max((n for n in known if n < count), default=-1)
        saves = (known[more] - held[count]) / (count - more) if more >= 0 else first_saves
        wanted = count + math.ceil((held[count] - room) / saves) if saves > 0 else (most + least) // 2
        if least <= blocks and least - wanted < 1 and most < 0:
            break  # nearly as much as there is room for
        count = min(max(wanted, most + 1), least - 1)
    fitting = [n for n, size in held.items() if size <= room]
    best = min(fitting) if fitting else max(held)
    return *found[best], BlockMix(best)
