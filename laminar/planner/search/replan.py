"""A plan for what is left: the former plan's ways, tried on a cluster that has lost devices.

    replan(graph, plan, asking(without(cluster, [7])))

A search from scratch takes seconds; a job that waits for a device that will not come back should have its new plan in
one. So little is looked at: the former plan's tensor parallel ranks, ZeRO and recompute stay, and what is left of the
devices is arranged anew. A batch that eight ranks share evenly can't be shared by seven, so there are three kinds of
arrangement, each of which may leave devices idle:

    alone      one mesh without stages, of as many ranks as divide the batch        7 devices: dp=4
    equal      stages of equal meshes                                               7 devices: 7 x dp=1, 3 x dp=2
    falling    stages whose meshes halve: all devices, few stages, larger ones      7 devices: dp=4, dp=2, dp=1
               with more layers

Parts of one micro-batch are simulated, all arrangements follow from these in closed form, and the best are simulated in
full until the time is up. Nothing is proved about what is found: there is no bound, and its account says
so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laminar.cost.sim.no_gc import uncollected
from laminar.errors import LaminarError, PlanError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.forecast.step import Prediction, predict
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.account import PartUsed, PlannedAnew, SimulatedPlan
from laminar.ir.plans.certificate import Certificate
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import PlanOrigin
from laminar.ir.plans.staged import Staged
from laminar.planner.estimate.candidates import Score, described_candidate
from laminar.planner.estimate.mixed_pipelines import Guess, Priced, Shop, Side, Sides, guessed, room_bytes
from laminar.planner.estimate.stage_cost import ends_s, parts_of, share_of
from laminar.planner.report.step_breakdown import counted_times
from laminar.planner.report.write_account import asked
from laminar.planner.search.mixed_cluster import MixedSearch, cut
from laminar.planner.space.cell import MOST_MICRO_BATCHES, Cell, divisors
from laminar.planner.space.request import Request
from laminar.planner.space.styles import Style
from laminar.planner.tuning import FIXED_SHARE, SCALED_FROM, SECOND_PLAN_S, USED_DEVICES
from laminar.rules.samples import samples_of
from laminar.staging.coupled_samples import refuse_coupled


@dataclass(frozen=True)
class Former:
    """What a plan was, as far as it is kept."""

    ranks: int
    tp: int
    zero: int
    recompute: bool
    plain: bool
    """Whether it had neither stages nor micro-batches."""
    step_s: float | None

    @staticmethod
    def of(plan: Plan | Staged) -> Former:
        """Read from the plan, and from its account where there is one."""
        one = plan.places[0].mesh if isinstance(plan, Staged) else plan.mesh
        # What an axis is called says little: data parallel may have two of them.
        choice, form = plan.account.choice, plan.account.form
        tensor = form.tensor if form else one.to_json().get("tp", 1)
        zero = form.zero if form else choice.zero or 0 if choice else 0
        again = (
            any(s.plan.recompute for s in plan.stages)
            if isinstance(plan, Staged)
            else bool(plan.recompute or plan.offload)
        )
        plain = not isinstance(plan, Staged)
        return Former(plan.mesh.ranks, tensor, zero, again, plain, plan.step_s)


@dataclass(frozen=True)
class Arrangement:
    """An arrangement of some of the devices, and what it is expected to take."""

    seconds: float
    cluster: Cluster
    """Those that are used, and the idle ones behind them."""
    used: int
    cell: Cell | None = None
    guess: Guess | None = None


def replanned(graph: Graph, plan: Plan | Staged, request: Request) -> Plan | Staged:
    """A plan for `request.cluster` that goes on as the former one did; the cluster is what is left of its own."""
    with uncollected():
        return Replan(graph, plan, request).run()


def arrangement(graph: Graph, request: Request) -> Plan | Staged | None:
    """The same without a former plan, for devices that a batch can't be shared by: nothing where they are of use.

    A search has stages of equal meshes that use all devices; arrangements that leave some idle, or halve meshes from
    stage to stage, are not in its space.
    """
    parts, samples = request.cluster.parts, samples_of(graph)
    alike = len({part.device.name for part in parts}) == 1
    devices = sum(part.devices for part in parts)
    odd = devices // (devices & -devices)
    if not alike or samples % odd == 0 or request.pin or request.place or not request.allows("data"):
        return None
    try:
        with uncollected():
            return Replan(graph, None, request).run()
    except PlanError:
        return None


def outside(plan: Plan | Staged, found: Plan | Staged | None) -> Plan | Staged:
    """A plan that no search covers, beside the best that a search has found: what is proved is about others."""
    account = plan.account
    assert account.step is not None
    step_s = account.step.step_s
    this = f"this plan ({step_s * 1e3:.4g} ms) lies outside of what was searched"
    if found is None:
        said = f"Nothing is proved: nothing was found by a search; {this}."
        proof = Certificate("", step_s, 0.0, 0, 0, 0, 0, 0, covers_plan=False, said=said)
        return replace(plan, account=replace(account, certificate=proof, search_s=0.0))
    theirs, row = found.account, found.account.choice
    assert theirs.certificate is not None and row is not None
    bound_s = min(theirs.certificate.bound_s, step_s)
    said = f"No plan in space {theirs.certificate.space[:8]} is simulated faster than {bound_s * 1e3:.4g} ms; {this}."
    proof = replace(theirs.certificate, step_s=step_s, bound_s=bound_s, interval=None, covers_plan=False, said=said)
    account = replace(
        account,
        certificate=proof,
        search_s=theirs.search_s or 0.0,
        space=theirs.space,
        bound_s=bound_s,
        runners_up=(replace(row, spent={}),),
    )
    return replace(plan, account=account)


class Replan:
    """One plan, made anew."""

    def __init__(self, graph: Graph, plan: Plan | Staged | None, request: Request) -> None:
        self.began = time.process_time()
        self.graph, self.plan, self.request = graph, plan, request
        self.former = Former.of(plan) if plan is not None else Former(request.cluster.devices, 1, 0, False, True, None)
        self.shop = Shop(graph, request)
        parts = request.cluster.parts
        self.k = max(range(len(parts)), key=lambda k: parts[k].devices)
        self.alike = len({part.device.name for part in parts}) == 1
        self.tried = 0

    @property
    def model(self) -> Any:
        """Of the largest part."""
        return self.shop.models[self.k]

    def run(self) -> Plan | Staged:
        """The best of a few."""
        if not self.alike:
            return self.finished(*self.mixed())
        best: tuple[Plan | Staged, Prediction | StagedPrediction, str, Arrangement] | None = None
        for option in sorted(self.options(), key=lambda o: o.seconds):
            late = time.process_time() - self.began > SECOND_PLAN_S
            if best is not None and (option.seconds >= best[1].seconds or late):
                break
            self.tried += 1
            found = self.simulated(option)
            if found is not None and (best is None or found[1].seconds < best[1].seconds):
                best = (*found, option)
        if best is None:
            raise PlanError(
                f"nothing like the former plan fits on {self.request.cluster.name}",
                next="search anew: laminar.plan(graph, cluster)",
            )
        return self.finished(*best)

    # --- arrangements

    def options(self) -> list[Arrangement]:
        """All arrangements, with what they are expected to take."""
        found = list(self.alone())
        if self.request.allows("pipeline"):
            try:
                if self.former.plain:
                    refuse_coupled(self.model.small(1, self.model.keeps[0]))
                found += self.staged()
            except LaminarError:
                pass
        return found

    def alone(self) -> Iterator[Arrangement]:
        """One mesh of as many ranks as divide the batch, on the largest part."""
        part, samples, tp = self.request.cluster.parts[self.k], self.model.samples, self.former.tp
        dp = max((d for d in divisors(samples) if d * tp <= part.devices), default=0)
        if not dp:
            return
        cell = Cell(1, 1, 1, dp, tp, self.former.recompute)
        if self.former.plain and self.former.step_s:
            seconds = self.former.step_s * self.former.ranks / cell.ranks
        else:
            one = self.priced(Side(1, dp, tp), 1)
            if one is None:
                return
            seconds = one.work_s + one.ends_s
        yield Arrangement(seconds, part, cell.ranks, cell)

    def staged(self) -> Iterator[Arrangement]:
        """Stages of equal meshes on the largest part, and of falling ones on all."""
        samples, layers = self.model.samples, self.model.cuts
        for used, cluster, sides in self.sides():
            stages = sum(side.stages for side in sides)
            if not 1 < stages <= layers:
                continue
            most = samples // max(side.dp for side in sides)
            for micro in divisors(samples):
                if micro & (micro - 1) or not stages <= micro <= min(most, MOST_MICRO_BATCHES * stages):
                    continue
                if any((samples // micro) % side.dp for side in sides):
                    continue
                guess = self.guess(Sides(tuple(sides), micro, self.former.recompute), cluster)
                if guess is not None:
                    yield Arrangement(guess.seconds, cluster, used, None, guess)

    def sides(self) -> Iterator[tuple[int, Cluster, list[Side]]]:
        """Devices that are used, the cluster they are numbered in, and meshes."""
        cluster, tp = self.request.cluster, self.former.tp
        part = cluster.parts[self.k]
        units = part.devices // tp
        for dp in divisors(self.model.samples):
            for stages in {units // dp, units // dp - 1}:
                if stages > 1 and stages * dp >= USED_DEVICES * units:
                    yield stages * dp * tp, part, [Side(stages, dp, tp)]
        falling = [_halves(p.devices // tp) for p in cluster.parts]
        for least in {d for digits in falling for d in digits}:
            yield from _kept(cluster, falling, least, tp)

    def guess(self, cell: Sides, cluster: Cluster) -> Guess | None:
        """What it takes, if it fits: state in shards where it has to be."""
        room = room_bytes(self.request, cluster.parts[0])
        shop = self.shop
        shop.request = replace(self.request, cluster=cluster)
        for zero in (0, 1):
            priced = [self.priced(side, cell.micro_batches, zero) for side in cell.sides]
            known = [p for p in priced if p is not None]
            if len(known) < len(priced):
                return None
            found = guessed(shop, cell, known)
            if max(found.held) <= room:
                return found
        return None

    def priced(self, side: Side, micro: int, zero: int = 0) -> Priced | None:
        """A side, from the one size of micro-batches that is simulated."""
        model, again = self.model, self.former.recompute
        style = Style.of(side.mesh, "tensor")
        size = max(d for d in divisors(model.samples) if d <= SCALED_FROM)
        times = model.samples // micro // side.dp / size
        cell = Cell(1, micro, 1, side.dp, side.tp, again)
        try:
            known = parts_of(
                model, share_of(model, Cell(1, model.samples // size, 1, 1, side.tp, again), Style(style.axes[-1:]), 0)
            )
        except LaminarError:
            return None
        fixed = FIXED_SHARE[side.tp > 1]
        work_s = known.forward_s.at(model.layers) + known.backward_s.at(model.layers)
        work_s *= fixed + (1 - fixed) * times
        parts = known.scaled(times)
        return Priced(side, style, zero, known.share, parts, work_s, ends_s(model, cell, parts, zero))

    # --- in full

    def simulated(self, option: Arrangement) -> tuple[Plan | Staged, Prediction | StagedPrediction, str] | None:
        """An arrangement at full depth, if it fits."""
        try:
            return self.whole(option) if option.cell is not None else self.piped(option)
        except PlanError:
            return None

    def whole(self, option: Arrangement) -> tuple[Plan, Prediction, str] | None:
        """Without stages; ZeRO as before, and more of it where it has to be."""
        cell, room = option.cell, room_bytes(self.request, option.cluster)
        assert cell is not None
        style = Style.of(cell.mesh, "tensor")
        for zero in sorted({self.former.zero, 3}):
            score = Score(cell, style, zero, None, option.seconds, 0.0)
            plan = self.model.unfolded(score)
            found = predict(self.graph, plan, option.cluster, optimizer=self.request.optimizer)
            if found.memory.peak_bytes <= room:
                return plan, found, described_candidate(score)
        return None

    def piped(self, option: Arrangement) -> tuple[Staged, StagedPrediction, str] | None:
        """With stages, cut by what was measured."""
        guess, model = option.guess, self.model
        assert guess is not None
        cell = guess.cell
        deep = model.whole(cell.micro_batches)
        plans: list[Plan] = []
        for p in guess.priced:
            like = next((q for q in plans if p.side.dp > 1 and q.mesh.names == p.side.mesh.names and not p.zero), None)
            if like is not None and p.side.tp == guess.priced[0].side.tp:
                # Samples in halves or in quarters: ops and tensors lie the same way.
                plans.append(replace(like, mesh=p.side.mesh))
                continue
            one = Cell(1, cell.micro_batches, 1, p.side.dp, p.side.tp, cell.recompute)
            plans.append(model.unfolded(Score(one, p.style, p.zero, None, 0.0, 0.0)))
        speeds = [self.shop.op_seconds(self.k, p, cell.micro_batches) for p in guess.priced]
        staged = cut(deep, cell.micro_batches, [plans[k] for k in cell.each], [speeds[k] for k in cell.each])
        ran = predict_staged(deep, staged, option.cluster, optimizer=self.request.optimizer)
        if max(ran.peaks) > room_bytes(self.request, option.cluster.parts[0]):
            return None
        words = ", then ".join(str(side) for side in cell.sides)
        return staged, ran, f"{words}, {cell.micro_batches} micro-batches"

    def mixed(self) -> tuple[Plan | Staged, StagedPrediction, str, Arrangement]:
        """On several kinds: a few pipelines of the search for such clusters, with the former tensor parallel ranks."""
        search = MixedSearch(self.graph, self.request)
        former = self.plan.micro_batches if isinstance(self.plan, Staged) else 0
        likely = sorted(
            (c for c in search.cells if c.recompute == self.former.recompute),
            key=lambda c: (max(s.tp for s in c.sides) != self.former.tp, search.ideal_s(c)),
        )
        same = [c for c in likely if c.micro_batches == former]
        for cell in [*same[:2], *likely[:2]]:
            search.guess(cell)
        for guess in sorted(search.guesses, key=lambda g: g.seconds):
            self.tried += 1
            found = search.piped(guess)
            if found is not None:
                option = Arrangement(guess.seconds, self.request.cluster, self.request.cluster.devices, None, guess)
                return found.plan, found.ran, found.row().plan, option
        raise PlanError(
            f"nothing like the former plan fits on {self.request.cluster.name}",
            next="search anew: laminar.plan(graph, cluster)",
        )

    def finished(
        self, plan: Plan | Staged, ran: Prediction | StagedPrediction, words: str, option: Arrangement
    ) -> Plan | Staged:
        """With an account of it."""
        cluster = self.request.cluster
        idle = cluster.devices - option.used
        near = (
            f"planned anew for {cluster.name}, near plan {self.plan.hash[:12]}"
            if self.plan
            else "in an arrangement that no search covers"
        )
        says = f"{near}: nothing is proved about it"
        says += f"; {idle} of {cluster.devices} devices stay idle" if idle else ""
        size = counted_times(self.graph)
        account = replace(
            plan.account,
            step=ran.figures(),
            samples=size.samples,
            tokens=size.tokens,
            devices=cluster.devices,
            choice=SimulatedPlan(plan=words, step_s=ran.seconds, peak_bytes=ran.peak_bytes),
            proof=says,
            replanned=PlannedAnew(
                former=self.plan.hash if self.plan else "",
                simulated=self.tried,
                idle=idle,
                seconds=time.process_time() - self.began,
            ),
            options=asked(self.request),
        )
        if idle:
            uses = PartUsed(cluster=option.cluster.name, of=cluster.name, idle=idle, says=says)
            account = replace(account, uses=uses)
        origin = PlanOrigin(self.graph, option.cluster, asked(self.request))
        return replace(plan, account=account, origin=origin)


def _halves(units: int) -> list[int]:
    """A number as a sum of powers of two, the largest first."""
    return [2**b for b in range(units.bit_length() - 1, -1, -1) if units >> b & 1]


def _kept(
    cluster: Cluster, falling: Sequence[list[int]], least: int, tp: int
) -> Iterator[tuple[int, Cluster, list[Side]]]:
    """Falling meshes of at least so many ranks; idle devices must lie behind all that are used."""
    parts = [[d for d in digits if d >= least] for digits in falling]
    used = [k for k, digits in enumerate(parts) if digits]
    if not used or used != list(range(used[0], used[-1] + 1)):
        return
    whole = all(sum(parts[k]) * tp == cluster.parts[k].devices for k in used[:-1])
    if len(used) > 1 and (not whole or used[0] > 0):
        return
    sides = [Side(1, d, tp) for k in used for d in parts[k]]
    devices = sum(side.ranks for side in sides)
    if devices >= USED_DEVICES * cluster.devices:
        yield devices, cluster if len(used) > 1 else cluster.parts[used[0]], sides
