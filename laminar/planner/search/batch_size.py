"""A batch that is free: the one that was captured or an equal part of it, whichever trains most samples a second.

    laminar.plan(graph, cluster, batch="free")

A larger batch has more work for what comes once a step, and needs more room: what is best depends on the machine. The
graph of a part follows from that of the batch (`placement/micro_batch.py`), so a batch of B samples has a search for
each of its divisors. Batches that no mesh of the request can share evenly are left out, unless the others have no plan.

Every batch begins with the cheapest bound on its step, which is one on its samples a second. The most promising one is
searched first. What it trains is what the others have to beat: one whose bound is below it is ruled out, and of the
others only such plans are looked at. All share one budget; a search may take half of what is left, the last one all.

What is proved is the most that the bounds leave to any batch; where a batch was ruled out without a search, that is
about the graph as captured. Batches larger than the one that was captured are not looked at: capture the largest that
you would train with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.plans.account import BatchTaken, OtherBatch
from laminar.ir.plans.certificate import Certificate
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned
from laminar.ir.plans.staged import Staged
from laminar.ir.serial.codec import content_hash
from laminar.placement.micro_batch import micro
from laminar.placement.presets import like
from laminar.planner.estimate.candidates import Nothing
from laminar.planner.search.best_first.search import promised
from laminar.planner.search.one_batch import refused, tried
from laminar.planner.space.cell import Cell, divisors
from laminar.planner.space.plan_space import Space
from laminar.planner.space.request import Request
from laminar.rewrite.variants import carrying, replayed
from laminar.rules.samples import samples_of


@dataclass
class Batch:
    """One number of samples, and what is known of it so far."""

    samples: int
    graph: Graph | None = None
    even: bool = True
    """Whether some mesh can share it."""
    bound_s: float = 0.0
    """No plan takes less."""
    space: str = ""
    plan: Plan | Staged | None = None
    error: PlanError | None = None
    why: str = ""
    """Why it was not taken."""

    @property
    def most(self) -> float:
        """Samples a second that no plan exceeds."""
        return self.samples / self.bound_s if self.bound_s else math.inf

    @property
    def rate(self) -> float:
        """Samples a second of its plan."""
        step_s = self.plan.step_s if self.plan else None
        return self.samples / step_s if step_s else 0.0

    def row(self) -> OtherBatch:
        """For `explain`."""
        most = self.most if math.isfinite(self.most) else None
        return OtherBatch(samples=self.samples, samples_per_s=self.rate or None, bound_samples_per_s=most, why=self.why)


def best_batch(graph: Graph, request: Request, progress: Callable[[str], None] | None = None) -> Plan | Staged:
    """The plan that trains most samples a second, of a batch and its equal parts."""
    return Batches(graph, request, progress).run()


class Batches:
    """One search over all batches."""

    def __init__(self, graph: Graph, request: Request, progress: Callable[[str], None] | None = None) -> None:
        self.began = time.process_time()
        self.graph, self.request = graph, replace(request, batch="fixed")
        self.progress = progress or (lambda text: None)
        samples = samples_of(graph)
        self.all = [self.begun(samples, parts) for parts in divisors(samples)]
        self.open = [b for b in self.all if b.graph is not None and b.even]
        """Those that are spoken of."""
        self.uneven = [b for b in self.all if b.graph is not None and not b.even]

    def begun(self, samples: int, parts: int) -> Batch:
        """A part of the batch, with the cheapest bound; or why there is none."""
        batch = Batch(samples // parts)
        try:
            graph = micro(self.graph, parts)
            if len(self.request.cluster.parts) == 1:
                batch.bound_s, cells = promised(graph, self.request)
                batch.space = Space.of(graph, self.request, cells).hash
                batch.even = any(_even(cell, batch.samples) for cell in cells)
            batch.graph = graph
        except PlanError as error:
            batch.why, batch.error = error.what, error
        return batch

    def left(self) -> float:
        """Processor seconds."""
        return self.request.budget_s - (time.process_time() - self.began)

    def run(self) -> Plan | Staged:
        """Batches in the order of what they promise, and the best of them."""
        best = self.looked(self.open)
        if best is None:
            best = self.looked(self.uneven)
            self.open += self.uneven
        else:
            for batch in self.uneven:
                batch.why = "no mesh shares it evenly"
        if best is None:
            raise self.none()
        assert best.plan is not None
        for batch in self.open:
            batch.why = batch.why or ("slower" if batch is not best else "")
        spent_s = time.process_time() - self.began
        account = replace(best.plan.account, batch=self.taken(best), search_s=spent_s, budget_s=self.request.budget_s)
        proof = account.certificate
        if proof is not None:
            unseen = self.request.allows("rewrite") and any(b.plan is None and b.error is None for b in self.open)
            more = ("rewrites, and branches apart, for batches that were not searched",) if unseen else ()
            proof = replace(proof, said=self.sentence(best, proof), outside=(*proof.outside, *more))
        return replace(best.plan, account=replace(account, certificate=proof))

    def looked(self, some: Sequence[Batch]) -> Batch | None:
        """The best of some batches, if one of them has a plan."""
        best: Batch | None = None
        waiting = sorted(some, key=lambda b: (-b.most, -b.samples))
        for k, batch in enumerate(waiting):
            if best is not None and batch.most <= best.rate:
                batch.why = "ruled out by its bound"
            elif best is not None and self.left() <= 0:
                batch.why = "not looked at: time was up"
            else:
                self.search(batch, best, len(waiting) - k)
                if batch.rate > (best.rate if best else 0.0):
                    best = batch
        return best

    def search(self, batch: Batch, best: Batch | None, waiting: int) -> None:
        """One batch, which is to train more than the best so far."""
        assert batch.graph is not None
        left = max(0.0, self.left())
        request = replace(self.request, budget_s=left / 2 if waiting > 1 else left)
        below_s = batch.samples / best.rate if best else math.inf
        found = tried(batch.graph, request, lambda text: self.progress(f"{batch.samples} samples, {text}"), below_s)
        if isinstance(found, Nothing):
            batch.error = found.error
            batch.why = self.lost(found, below_s)
        else:
            batch.plan = found
        if found.bound_s:
            batch.bound_s = found.bound_s
            batch.space = found.space if isinstance(found, Nothing) else found.certificate.space

    def lost(self, found: Nothing, below_s: float) -> str:
        """Why a batch that was searched has no plan."""
        if below_s <= found.bound_s < math.inf:
            return "ruled out by its bound"
        if not found.through and found.bound_s < below_s:
            return "nothing faster was found in time"
        return "no faster plan was found" if found.fits else "does not fit"

    def none(self) -> PlanError:
        """Nothing was found: the smallest batch says why."""
        for batch in sorted(self.all, key=lambda b: b.samples):
            if batch.graph is not None and batch.error is not None:
                error = refused(batch.graph, self.request, batch.error)
                return PlanError(f"of all batches, down to {counted(batch.samples)}: {error}")
        return next(b.error for b in self.all if b.error is not None)

    # --- what is told

    def taken(self, best: Batch) -> BatchTaken:
        """The batch that was taken, and those that were not."""
        return BatchTaken(
            samples=best.samples,
            captured=samples_of(self.graph),
            samples_per_s=best.rate,
            bound_samples_per_s=self.most(),
            space=self.space(),
            others=tuple(b.row() for b in self.all if b is not best),
        )

    def proved(self) -> list[Batch]:
        """Batches that something is proved about."""
        return [b for b in self.open if math.isfinite(b.most)]

    def most(self) -> float | None:
        """Samples a second that no plan for any of these exceeds."""
        return max((b.most for b in self.proved()), default=None)

    def space(self) -> str:
        """The hash of all plans that are spoken of: for each batch, that of its own."""
        return content_hash({str(b.samples): b.space for b in self.proved()})

    def sentence(self, best: Batch, about_steps: Certificate) -> str:
        """What is proved about samples a second."""
        most, about = self.most(), self.proved()
        this = f"this one trains {_rated(best.rate)} with {best.samples}"
        this += ", outside of what was searched" if not about_steps.covers_plan else ""
        if most is None:
            return f"Nothing is proved about samples/s; {this}."
        names = _listed([b.samples for b in about])
        said = f"No plan in space {self.space()[:8]} for a batch of {names} trains more than {_rated(most)} samples/s; "
        said += f"{this} (gap {100 * max(0.0, 1 - best.rate / most):.1f} %)."
        others = [b.samples for b in self.open if b not in about]
        said += f" Nothing is proved about {_listed(others)}." if others else ""
        return said + about_steps.against_machine


def _even(cell: Cell, samples: int) -> bool:
    return samples % (cell.micro_batches * cell.dp) == 0


def counted(samples: int) -> str:
    """Samples in words."""
    return f"{samples} sample{'s' if samples > 1 else ''}"


def _listed(samples: Sequence[int]) -> str:
    *first, last = (str(n) for n in samples)
    return (f"{', '.join(first)} or {last}" if first else last) + f" sample{'s' if max(samples) > 1 else ''}"


def _rated(rate: float) -> str:
    return f"{rate:,.4g}" if rate < 1e4 else f"{rate:,.0f}"


# --- graphs and plans of such batches


def refuse_other(plan: Planned, samples: int, parts: int = 1) -> None:
    """A batch that a plan with a batch of its own was not made for; `parts` is how many it is run in."""
    taken = plan.account.batch
    if taken is None or samples == taken.samples:
        return
    mine, given = taken.samples, counted(samples)
    ways = [f"give batches of {counted(mine * parts)}"]
    if samples % mine == 0 and isinstance(plan, Plan):
        ways.append(f"micro_batches={parts * samples // mine}")
    raise PlanError(
        f"this plan is for a batch of {counted(mine)}, not of {given}" + (" at a time" if parts > 1 else ""),
        next=", or ".join([*ways, f"plan for {given}"]),
    )


def fitted(graph: Graph, plan: Plan) -> Plan:
    """The plan for a graph that was captured with its batch, where numbers that count samples may differ from a part's.

    Rewrites may depend on such numbers. Where one does not fit, tensors stay as they lie, and ops are placed anew.
    """
    taken = plan.account.batch
    if taken is None or graph.hash in (plan.graph_hash, plan.captured_hash) or samples_of(graph) != taken.samples:
        return plan
    made, steps = replayed(graph, plan.rewrites)
    same = steps == plan.rewrites and {n.name for n in made.nodes} == set(plan.ops)
    return carrying(replace(plan, graph_hash=made.hash) if same else like(made, plan), graph, steps)
