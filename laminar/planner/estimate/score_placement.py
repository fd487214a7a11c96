"""What a placement takes, quickly: a shallow model is simulated, a deep one follows.

Without micro-batches the whole way of a prediction is walked (lowering, prices, simulation, memory), on the folded
graph with two and with four layers; what two layers add, every further two add. With micro-batches the parts of one are
put together (`planner/estimate/stage_cost.py`). How many blocks are recomputed, where some are, follows from what none
and all would take and hold (`planner/estimate/pipeline_recompute.py`). All are estimates, good for ranking: what is to
win is simulated at full depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from laminar.errors import NoPlanFits
from laminar.forecast.step import held_by, timed
from laminar.ir.plans.plan import Plan
from laminar.lower.step import step_programs
from laminar.planner.estimate.activation_mix import ways_of
from laminar.planner.estimate.candidates import Score
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.pipeline_recompute import held_bytes, places, some
from laminar.planner.estimate.stage_cost import parts_of, pipelined_s, share_of
from laminar.planner.space.cell import Cell
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style


def extrapolated(at: dict[int, float], layers: int) -> float:
    """A quantity at full depth, from two depths."""
    depths = sorted(at)
    if len(depths) == 1:
        return at[depths[0]]
    low, high = depths[-2:]
    return at[high] + (layers - high) * (at[high] - at[low]) / (high - low)


def scored(
    model: Model,
    cell: Cell,
    style: Style,
    zero: int,
    plan: Plan | None = None,
    worth_s: float = math.inf,
    roomy: float = 0.0,
) -> Score:
    """Seconds and bytes of a placement of the folded graph, at full depth.

    Without a plan, that of the style. Where there are no micro-batches, what takes longer than `worth_s` is not asked
    how much it holds: nan. Nor is any where there is plenty of room: it is taken to hold `roomy` bytes.
    """
    if cell.recompute and some(model):
        return (_between if cell.plain else _spread)(model, cell, style, zero, plan, worth_s)
    if not cell.plain:
        parts = parts_of(model, share_of(model, cell, style, zero))
        return Score(
            cell, style, zero, plan, pipelined_s(model, cell, parts, zero), held_bytes(model, cell, parts, zero)
        )
    return _shallow(model, cell, style, zero, plan, worth_s, roomy)


def _shallow(
    model: Model, cell: Cell, style: Style, zero: int, plan: Plan | None, worth_s: float, roomy: float = 0.0
) -> Score:
    """A step without micro-batches, nothing or everything recomputed."""
    if plan is None:
        plan = model.placed(Score(cell, style, zero, None, 0.0, 0.0))
    else:
        plan = replace(plan, recompute=model.again(cell, style))
    ran = {keep: _plain(model, model.deepened(plan, model.small(1, keep)), keep) for keep in model.depths}
    seconds = extrapolated({keep: found[0] for keep, found in ran.items()}, model.layers)
    behind_s = extrapolated({keep: found[1] for keep, found in ran.items()}, model.layers)
    if roomy or seconds > worth_s:
        return Score(cell, style, zero, plan, seconds, roomy or math.nan, behind_s)
    held = {keep: found[2]() for keep, found in ran.items()}
    found = Score(cell, style, zero, plan, seconds, extrapolated(held, model.layers), behind_s)
    model.shallow[cell, style, zero] = found
    return found


def _between(model: Model, cell: Cell, style: Style, zero: int, plan: Plan | None, worth_s: float) -> Score:
    """A step without micro-batches, as few blocks recomputed as fit: between none and all, in proportion.

    Or fewer, if others wait in the host's memory or keep their products.
    """
    twin, room = replace(cell, recompute=False), model.request.room_bytes
    none = model.shallow.get((twin, style, zero)) or _shallow(model, twin, style, zero, plan, worth_s)
    if math.isnan(none.peak_bytes):
        return replace(none, cell=cell)
    blocks, every = len(model.block_names), None
    best = replace(none, cell=cell, again=(0,), blocks=blocks)
    if model.request.recomputes:
        every = model.shallow.get((cell, style, zero)) or _shallow(model, cell, style, zero, plan, math.inf)
        best = _some_again(model, none, every)
    if none.peak_bytes <= room or none.plan is None:
        return best
    ways = model.ways[cell, style, zero] = ways_of(model, none, every)
    found = ways.within(room)
    if found is None or (best.peak_bytes <= room and best.seconds <= found[1]):
        return best
    mix, seconds, held = found
    return replace(
        best, seconds=seconds, peak_bytes=held, again=(mix.again,), blocks=blocks, spared=mix.spared, away=mix.away
    )


def _some_again(model: Model, none: Score, every: Score) -> Score:
    """As few blocks recomputed as fit."""
    room, blocks = model.request.room_bytes, len(model.block_names)
    saves = (none.peak_bytes - every.peak_bytes) / blocks
    if saves <= 0 or every.peak_bytes > room:
        return every
    if none.plan is not None and none.peak_bytes > room:
        # The first ones save more than all in the mean: behind them a block at work takes what they have saved.
        saves = max(saves, _first_saves(model, none.plan, every.style))
    count = min(blocks, max(0, math.ceil((none.peak_bytes - room) / saves)))

    def at(a: float, b: float) -> float:
        return a + count / blocks * (b - a)

    return replace(
        every,
        seconds=at(none.seconds, every.seconds),
        peak_bytes=none.peak_bytes - count * saves,
        behind_s=at(none.behind_s, every.behind_s),
        again=(count,),
        blocks=blocks,
        saves_bytes=saves,
    )


def _first_saves(model: Model, plan: Plan, style: Style) -> float:
    """Bytes that the first block saves if it alone is recomputed."""
    keep = model.depths[-1]
    deep = model.deepened(plan, model.small(1, keep))
    none, one = (_plain(model, replace(deep, recompute=p), keep)[2]() for p in ((), model.patterns([0], style)))
    return none - one


def _spread(model: Model, cell: Cell, style: Style, zero: int, plan: Plan | None, worth_s: float) -> Score:
    """A step with micro-batches in which every place recomputes as few blocks as fit."""
    del worth_s
    here = places(model, cell, style, zero)
    found = here.spread()
    if found is None:
        return Score(
            cell,
            style,
            zero,
            plan,
            pipelined_s(model, cell, here.parts, zero),
            held_bytes(model, cell, here.parts, zero),
        )
    blocks = len(model.block_names)
    seconds, again = here.seconds(found, blocks)
    held = max(
        here.held(p, [n / cell.virtual] * cell.virtual, [a / cell.virtual] * cell.virtual)
        for p, (n, a) in enumerate(zip(found.layers, found.again, strict=True))
    )
    return Score(cell, style, zero, plan, seconds, held, again=again, blocks=blocks)


def _plain(model: Model, plan: Plan, keep: int) -> tuple[float, float, Callable[[], float]]:
    """Seconds of a step, those behind the last op, and how to find out what it holds."""
    cluster, prices = model.request.cluster, model.machine(plan.mesh)
    program, then = step_programs(model.small(1, keep), plan)
    program, groups, made, times = timed(program, then, cluster, prices)
    last = max((int(times.end[k]) for k, line in enumerate(made.lines) if line.instr and not line.part), default=0)
    held = partial(held_by, program, groups, cluster, prices.optimizer)
    return times.step / 1e9, (times.step - last) / 1e9, lambda: float(held().peak_bytes)


def feasible(score: Score, request: Request) -> bool:
    """Whether it fits."""
    return score.peak_bytes <= request.room_bytes


def no_room(request: Request, least_bytes: float) -> NoPlanFits:
    """Nothing fits: what is needed at least, and the cheapest way out."""
    return NoPlanFits(
        f"no plan fits: the leanest found needs {least_bytes / 1e9:.2f} GB on its fullest rank, "
        f"{request.room_bytes / 1e9:.2f} GB are allowed",
        least_bytes=least_bytes,
        binds="memory",
        next=f"allow memory_bytes={least_bytes:.3g}, take more devices, or a smaller batch",
    )
