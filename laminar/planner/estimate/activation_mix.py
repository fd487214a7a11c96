"""What becomes of each block where memory is short: kept, recomputed, recomputed but for its products, or sent away.

Of a step without stages. Blocks are alike, so a mix is three numbers: how many are recomputed, how many without their
products, and how many wait in the host's memory. What one block of each takes and saves is simulated on a shallow
model; the first two add up. Copies to the host cost nothing as long as the link keeps up with the work beside it, and
from there on what is left over (`lower/memory/offload.py` says who waits for whom):

    there     a block must have left when the next one leaves, the last one before memory is fullest: where a head
              takes much, that is when all blocks are done, else one block earlier.
    and back  in backward, which is taken to last twice as long as forward, each has the time from block to block.
    a step    that offloads is launched op by op where it could have been replayed: a sum for all of them.
    all       blocks is a way of its own: then the last one stays, and gives the one before it time to come back.

Blocks that leave are spread out so that this is least, from the first or second block on. Of the others the first ones
are recomputed, whole ones first: their backward comes last.

All mixes are tried on these figures (a few thousand additions); what no other beats in seconds and in bytes is the
front, on which whatever room there is finds its mix. The fastest that should fit is simulated at full depth; what the
estimate was off by is taken into account, and the front asked again, a few times at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from laminar.forecast.step import Prediction, held_by, predict, timed
from laminar.ir.ops import HOST_SEND
from laminar.ir.plans.plan import Plan
from laminar.lower.step import step_programs
from laminar.planner.space.styles import Style

if TYPE_CHECKING:
    from laminar.planner.estimate.candidates import Score
    from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.estimate.block_mix import BlockMix, BlockWays
from laminar.planner.tuning import ACTIVATION_MIXES, WORTH_SIMULATING


def eased(model: Model, plan: Plan, style: Style, ways: BlockWays, mix: BlockMix) -> Plan:
    """A plan with a mix."""
    whole, spared, away = ways.placed(mix)
    again = model.patterns(whole, style) + model.patterns(spared, replace(style, keep_products="all"))
    return replace(plan, recompute=again, offload=model.patterns(away))


def ways_of(model: Model, kept: Score, whole: Score | None) -> BlockWays:
    """Of a placement that was scored with all blocks kept, and with all recomputed."""
    assert kept.plan is not None
    style, blocks, request = kept.style, len(model.block_names), model.request
    depth = model.depths[-1]
    graph, few = model.small(1, depth), max(1, min(depth, blocks) - 1)
    plan = replace(model.deepened(kept.plan, graph), recompute=(), offload=())
    prices, before = model.machine(plan.mesh), (model.blocks or "").removesuffix("*")

    def run(plan: Plan) -> tuple[float, float, float, float]:
        """Seconds, bytes, seconds of a block's forward, bytes of all that leaves."""
        program, then = step_programs(graph, plan)
        program, groups, made, times = timed(program, then, request.cluster, prices)
        ends: dict[str, int] = {}
        for k, line in enumerate(made.lines):
            if line.instr is not None and line.instr.phase == "forward" and not line.part:
                block = line.instr.module.removeprefix(before).partition(".")[0]
                if line.instr.module.startswith(before) and block.isdigit():
                    ends[block] = max(ends.get(block, 0), int(times.end[k]))
        forward_s = (max(ends.values()) - min(ends.values())) / 1e9 / (len(ends) - 1) if len(ends) > 1 else 0.0
        held = held_by(program, groups, request.cluster, prices.optimizer).peak_bytes
        sent = sum(p.local(plan.mesh).nbytes for i in program.instrs if i.op == HOST_SEND for p in i.outs if p)
        return times.step / 1e9, float(held), forward_s, float(sent)

    kept_s, kept_bytes, forward_s, _ = run(plan)

    def way(style: Style) -> tuple[float, float]:
        """The first blocks recomputed: in the last one's backward what they have saved is not needed any more."""
        seconds, held, _, _ = run(replace(plan, recompute=model.patterns(range(few), style, of=depth)))
        return max(0.0, seconds - kept_s) / few, max(0.0, kept_bytes - held) / few

    found = BlockWays(blocks, kept.seconds, kept.peak_bytes, None, None)
    if request.recomputes:
        each = way(style)
        if whole is not None:  # at both depths, and so without what only the shallow model has
            each = max(0.0, whole.seconds - kept.seconds) / blocks, each[1]
        found = replace(found, whole=each, spared=way(replace(style, keep_products="all")))
    if request.offloads and forward_s:
        one_s, one, _, sent = run(replace(plan, offload=model.patterns([min(1, few - 1)], of=depth)))
        if sent and kept_bytes > one:
            _, late, _, _ = run(replace(plan, offload=model.patterns([max(0, few - 1)], of=depth)))
            _, every, _, _ = run(replace(plan, offload=model.patterns(range(blocks))))
            found = replace(
                found,
                sent_bytes=sent,
                last_bytes=max(0.0, kept_bytes - one),
                every_bytes=max(0.0, kept_bytes - every + (blocks - depth) * sent),
                behind=int(2 * (kept_bytes - late) < kept_bytes - one),
                copy_s=sent / request.cluster.device.host_bytes_per_s.value,
                forward_s=forward_s,
                each_s=2 * request.cluster.device.launch_s.value,
            )
            late_s = replace(found, blocks=depth).spread[1][1]
            if math.isfinite(late_s):
                found = replace(found, launch_s=max(0.0, one_s - kept_s - late_s))
    return found


def tried_mixes(
    model: Model, score: Score, plan: Plan, ways: BlockWays, best_s: float
) -> Iterator[tuple[BlockMix, Plan, Prediction]]:
    """Mixes at full depth, each expected to fit and to be faster than `best_s` and all before it that did fit."""
    request, off_s, off_bytes = model.request, 0.0, 0.0
    done: set[BlockMix] = set()
    for _ in range(ACTIVATION_MIXES):
        found = next((m for m in ways.front if m[0] not in done and m[2] + off_bytes <= request.room_bytes), None)
        if found is None or found[1] + off_s > WORTH_SIMULATING * best_s:
            return
        mix, seconds, held = found
        done.add(mix)
        made = eased(model, plan, score.style, ways, mix)
        ran = predict(model.graph, made, request.cluster, optimizer=request.optimizer)
        off_s, off_bytes = ran.seconds - seconds, ran.memory.peak_bytes - held
        if ran.memory.peak_bytes <= request.room_bytes:
            best_s = min(best_s, ran.seconds)
        yield mix, made, ran
