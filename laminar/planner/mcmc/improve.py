"""Guided random search: a chain over placements proposes, the simulator decides.

The chain (`planner/mcmc/metropolis.py`) walks by a sum of costs that knows no overlap
(`planner/mcmc/additive_cost.py`), on the folded graph where all layers do the same. It is restarted from the best plan
again and again, in turns: some rounds begin hot, cool down, and hand over the cheapest state on the way; in others it
stays near the best plan, and every state it comes to is simulated by *delta*, the load of the best plan edited where
the two differ (`planner/mcmc/delta_step.py`). What looks fastest is lowered and simulated in full at full depth, and
only that counts.

`improve` never returns a plan that is simulated slower than the one it was given, or that does not fit where that one
did. Budgets are counted in proposals: the same seed gives the same plan on any machine, unless a cap in seconds was
asked for and cuts the search short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import predict_staged
from laminar.forecast.step import held_by, timed
from laminar.ir.graph import Graph
from laminar.ir.plans.plan import Plan
from laminar.lower.step import step_programs
from laminar.planner.estimate.graphs_and_prices import Model
from laminar.planner.mcmc.additive_cost import Additive, classes
from laminar.planner.mcmc.delta_step import Edited, SimulatedStep
from laminar.planner.mcmc.metropolis import Chain
from laminar.planner.space.cell import Cell
from laminar.staging.stage_plans import pipeline

RESTARTS = (0.03, 0.0, 0.01, 0.0, 0.002, 0.0)
"""Restarts: the temperature a round cools down from, as a share of the cost; 0 stays near."""
COLDEST, STAYING_NEAR = 1e-5, 1e-3
"""The temperature it cools down to, and that of staying near."""
HIDDEN_BY_ROUND = (0.9, 0.9, 0.9, 0.9, 0.0, 0.0)
"""By round, the share of the exchanges of gradients and parameters that other work is taken to hide."""
NEAR_STATE = 1.01
"""How much more than the best plan's sum a state may cost to be simulated by delta."""
PROPOSALS_PER_DELTA = 200
"""Proposals of a round near the best for each simulation by delta."""
PROPOSALS_PER_LOWERING = 5000
"""Proposals of a round for each simulation of a lowered plan."""
LEAST_GAIN = 1e-4
"""A plan must be faster by this share to be taken: below it lies rounding."""


@dataclass(frozen=True)
class Improved:
    """What a search has come to."""

    plan: Plan
    """Of the micro-batch's graph at full depth."""
    seconds: float
    """Of a step, simulated."""
    accepted: int
    """Moves of the chain that were made."""
    proposals: int
    simulated: int
    """Simulations by delta and in full."""
    lowered: int = 0
    """Of those, in full."""


# --- improving a plan


def improve(
    model: Model, cell: Cell, plan: Plan, *, proposals: int, seed: int = 0, seconds: float | None = None
) -> Improved:
    """The best plan that the chain finds from a given one: simulated no slower, and fitting where that one fits.

    `plan` is one of the cell's micro-batch, folded or at full depth. `seconds` are processor seconds after which the
    search is cut short.
    """
    return _Improving(model, cell, plan, seed, seconds).run(proposals)


@dataclass
class _Best:
    """The best plan so far, as a state of the sum."""

    state: list[int]
    plan: Plan
    seconds: float
    cost_s: float
    """Its sum, as much hidden as the round has it."""
    step: SimulatedStep | None
    edited: Edited | None = None


class _Improving:
    def __init__(self, model: Model, cell: Cell, plan: Plan, seed: int, seconds: float | None) -> None:
        self.model, self.cell, self.seed = model, cell, seed
        self.until = math.inf if seconds is None else time.process_time() + seconds
        self.deep = model.whole(cell.micro_batches)
        if cell.recompute and model.blocks and not (plan.recompute or plan.offload):
            plan = replace(plan, recompute=(model.blocks,))
        self.graph, small, plan = self._folded(plan)
        self.copies = copies(model, self.graph, self.deep)
        self.cost = Additive(
            self.graph, small, model.placer(plan.mesh).costs[0.0], {n: float(len(c)) for n, c in self.copies.items()}
        )
        self.classes = classes(self.graph, model.fold.at, self.cost)
        self.free = any(len(t.options) > 1 for t in self.cost.tables)
        """Whether there is anything to choose; on one rank there is not."""
        self.deltas = self.lowered = self.accepted = self.proposals = 0
        self.seen: set[tuple[int, ...]] = {tuple(self.cost.at)}
        self.place = list(range(len(self.cost.names)))
        """By site, what it has in common with its class."""
        for together in self.classes:
            for site in together:
                self.place[site] = together[0]
        self.marks: set[Any] = set()
        """Of moves that were tried, see `mark`."""
        self.missed: dict[tuple[int, int], float] = {}
        """By place and option, seconds by which the edited load was too fast."""
        found = self.ran(plan)
        self.best = _Best(list(self.cost.at), plan, found.seconds, 0.0, found)
        self.first = found

    def _folded(self, plan: Plan) -> tuple[Graph, Plan, Plan]:
        """The graph to be searched, the plan on it, and at full depth; where layers differ, at full depth only."""
        model, parts = self.model, self.cell.micro_batches
        folded = model.small(parts, model.keeps[-1])
        if plan.graph_hash == folded.hash:
            return folded, plan, model.deepened(plan, self.deep)
        if plan.graph_hash != self.deep.hash:
            raise PlanError(
                f"plan {plan.hash[:12]} is for another graph than that of {self.cell}",
                next="give the cell it was made for",
            )
        names = {i.name for i in folded.inputs}
        small = replace(
            plan,
            graph_hash=folded.hash,
            ops={n.name: plan.ops[n.name] for n in folded.nodes},
            inputs={k: v for k, v in plan.inputs.items() if k in names},
            outputs={k: plan.outputs[k] for k in (f"{o.kind}:{o.name}" for o in folded.outputs)},
            state={k: v for k, v in plan.state.items() if k in names},
        )
        if model.deepened(small, self.deep).hash == plan.hash:
            return folded, small, plan
        return self.deep, plan, plan

    def run(self, proposals: int) -> Improved:
        """Rounds from the best plan, as many proposals in all."""
        rounds = min(len(RESTARTS), max(2, proposals // PROPOSALS_PER_LOWERING))
        for k in range(rounds):
            if self.free and not self.over():
                self.round(k, proposals // rounds + (k < proposals % rounds))
        simulated = self.deltas + self.lowered
        best = self.best
        return Improved(best.plan, best.seconds, self.accepted, self.proposals, simulated, self.lowered)

    def over(self) -> bool:
        """Whether a cap in seconds has been reached."""
        return self.until < math.inf and time.process_time() >= self.until

    def round(self, number: int, proposals: int) -> None:
        """One restart from the best plan."""
        cost = self.cost
        cost.go(self.best.state)
        cost.hide(HIDDEN_BY_ROUND[number])
        self.best.cost_s = cost.total_s
        chain = Chain(cost, self.classes, seed=self.seed * len(RESTARTS) + number)
        if RESTARTS[number]:
            self.cooled(chain, RESTARTS[number], proposals)
        else:
            self.nearby(chain, proposals)
        self.accepted += chain.accepted
        self.proposals += chain.proposals

    def cooled(self, chain: Chain, warm: float, proposals: int) -> None:
        """From afar: the cheapest state on the way down is lowered and simulated."""
        cost = chain.cost
        chain.temperature = warm * cost.total_s
        fall = (COLDEST / warm) ** (1 / max(1, proposals))
        least, state = math.inf, list(cost.at)
        for k in range(proposals):
            chain.temperature *= fall
            if chain.step() and cost.total_s < least:
                least, state = cost.total_s, list(cost.at)
            if k % 64 == 0 and self.over():
                return
        self.judged(state)

    def nearby(self, chain: Chain, proposals: int) -> None:
        """One or a few moves from the best plan: what is faster if its load is edited is lowered, the fastest first.

        Gains are made one upon the other: each move is tried on what is the best by then. Where the edited load has
        promised too much, the same move in another layer or along with others is believed so much less; of moves that
        come to the same tick in the same places one is tried.
        """
        cost, best = chain.cost, self.best
        chain.temperature = STAYING_NEAR * cost.total_s
        quota = max(1, proposals // PROPOSALS_PER_DELTA)
        found: dict[tuple[int, ...], float] = {}
        alike: dict[Any, tuple[int, ...]] = {}
        for k in range(proposals):
            if chain.step():
                state = tuple(cost.at)
                if cost.total_s <= NEAR_STATE * best.cost_s and state not in found and state not in self.seen:
                    found[state] = self.edited_s()
                    alike.setdefault(self.mark(best, state, found[state]), state)
                    quota -= 1
                cost.go(best.state)
            if not quota or (k % 64 == 0 and self.over()):
                break
        for _ in range(max(2, proposals // PROPOSALS_PER_LOWERING)):
            hopeful = [(found[s] + self.missed_s(best, s), s, mark) for mark, s in alike.items()]
            expected, state, mark = min(hopeful, default=(math.inf, (), None))
            if expected >= best.seconds * (1 - LEAST_GAIN) or self.over():
                break
            del alike[mark]
            if mark not in self.marks:
                self.marks.add(mark)
                self.tried(best, state, found[state])

    def mark(self, best: _Best, state: Sequence[int], seconds: float) -> Any:
        """What moves that come to the same have in common: where they are, and what comes of them."""
        places = {self.place[s] for s, (a, b) in enumerate(zip(best.state, state, strict=True)) if a != b}
        return tuple(sorted(places)), round(1e9 * (seconds - best.seconds))

    def missed_s(self, best: _Best, state: Sequence[int]) -> float:
        """By how much the edited load was too fast where such moves were tried before, at the worst."""
        moved = ((self.place[s], b) for s, (a, b) in enumerate(zip(best.state, state, strict=True)) if a != b)
        return max((self.missed.get(m, 0.0) for m in moved), default=0.0)

    def tried(self, best: _Best, state: Sequence[int], expected_s: float) -> None:
        """Make the moves to a state on what is the best by now, and learn how good the edited load was."""
        move = [(site, k) for site, k in enumerate(state) if k != best.state[site]]
        now = list(self.best.state)
        for site, option in move:
            now[site] = option
        before_s = self.best.seconds
        found = self.judged(now)
        if found is not None:
            gain, hoped = found - before_s, expected_s - best.seconds
            for site, option in move:
                self.missed[self.place[site], option] = gain - hoped

    def edited_s(self) -> float:
        """Seconds of the state by delta; where nothing can be edited, as its sum has it."""
        best = self.best
        if best.step is None or not best.step.editable:
            return best.seconds * self.cost.total_s / best.cost_s
        if best.edited is None:
            best.edited = Edited(best.step, self.cost, best.state, self.copies)
        self.deltas += 1
        return best.edited.seconds(self.cost)

    def judged(self, state: list[int]) -> float | None:
        """Lower a state's plan and simulate it: its seconds, if it is new and can be written. It may be best now."""
        if tuple(state) in self.seen:
            return None
        self.seen.add(tuple(state))
        plan = self.cost.plan_of(state)
        plan = plan if self.graph is self.deep else self.model.deepened(plan, self.deep)
        found = self.simulated(plan)
        if found is None:
            return None
        if found.seconds < self.best.seconds * (1 - LEAST_GAIN) and self.fits(found):
            self.best = _Best(state, plan, found.seconds, 0.0, found)
        return found.seconds

    def fits(self, step: SimulatedStep) -> bool:
        """Whether it holds no more than it may, or than the plan that was given does."""
        held = step.peak_bytes()
        return held <= self.model.request.room_bytes or held <= self.first.peak_bytes()

    def simulated(self, plan: Plan) -> SimulatedStep | None:
        """A plan lowered and simulated; nothing if it can't be written after all."""
        try:
            return self.ran(plan)
        except LaminarError:
            return None

    def ran(self, plan: Plan) -> SimulatedStep:
        """The same of a plan that can be written."""
        model, cell, request = self.model, self.cell, self.model.request
        self.lowered += 1
        if not cell.plain:
            staged = pipeline(self.deep, cell.stages, cell.micro_batches, cell.virtual, plan)
            piped = predict_staged(self.deep, staged, request.cluster, optimizer=request.optimizer)
            return SimulatedStep(piped.seconds, lambda: max(piped.peaks))
        prices = model.machine(plan.mesh)
        program, groups, made, times = timed(*step_programs(self.deep, plan), request.cluster, prices)

        def peak() -> int:
            return held_by(program, groups, request.cluster, prices.optimizer).peak_bytes

        return SimulatedStep(times.step / 1e9, peak, program, groups, made, times)


def copies(model: Model, graph: Graph, deep: Graph) -> dict[str, list[str]]:
    """What each op and input of a folded graph stands for in the deep one, itself included."""
    found = {name: [name] for name in (*graph.by_name, *(i.name for i in graph.inputs))}
    if graph is deep:
        return found
    fold, keep, inputs = model.fold, model.keeps[-1], {i.name for i in deep.inputs}
    for node in deep.nodes:
        if node.name not in found:
            layer, way, k = fold.at[node.name]
            twin = fold.ops[fold.stands_for(keep, layer), way, k]
            found[twin.name].append(node.name)
            for a, b in zip(node.ins, twin.ins, strict=True):
                mine = a != b and a.name in inputs and b.name in inputs
                if mine and a.name not in found and a.name not in found[b.name]:
                    found[b.name].append(a.name)
    return found
