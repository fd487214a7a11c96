"""The last plans of a search, before and after they are run: which take part, and which one is taken.

Besides what a search finds, plans with a name take part, whatever was predicted of them: who has to choose one by hand
would try these. torch's own data parallel may be one more (`as_ddp`); whether it does the same is up to whoever knows
the model (`train/auto/ddp_fits.py`). What it takes is assumed to be what our data parallel is predicted to take.

Nothing is run here. Whoever has ranks at hand runs them (`train/auto/interleaved_timing.py`): `laminar plan --measure`
on ranks that it starts, a job with `plan="auto"` on its own. Either way what was measured stands in the account of the
plan that is taken, and the plan tells of itself, not of the one that was predicted fastest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from laminar.errors import LaminarError
from laminar.forecast.pipeline_step import StagedPrediction, predict_staged
from laminar.forecast.step import Prediction, predict
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import Account, MeasuredPlan, MeasuredPlans, PlanLeftOut, SimulatedPlan
from laminar.ir.plans.plan import Plan, runs_ddp
from laminar.ir.plans.planned import PlanOrigin
from laminar.ir.plans.staged import Staged, plan_of
from laminar.placement import presets
from laminar.placement.micro_batch import micro
from laminar.planner.report.step_breakdown import binding, held, spent

MEASURED_PLANS = 3
"""Plans of a search that take part, besides those with a name."""
DDP = "torch's own data parallel"
MEASURED_ROUNDS = 8
"""How often each is run, at most."""
NOBODY_LEFT_OUT: Mapping[str, str] = MappingProxyType({})
MEASURED_ALIKE = 1.01
"""Plans within this of the fastest are as good as it."""


@dataclass(frozen=True)
class Finalist:
    """A plan that may be run, and what it was predicted to take."""

    name: str
    plan: Plan | Staged
    step_s: float
    peak_bytes: int

    def is_like(self, other: Finalist) -> bool:
        """Whether it is the same plan, or one that is predicted alike to the last digit: the same program, then."""
        if runs_ddp(self.plan) or runs_ddp(other.plan):
            return False
        alike = (self.step_s, self.peak_bytes) == (other.step_s, other.peak_bytes)
        return alike or self.plan.hash == other.plan.hash

    def to_json(self) -> dict[str, Any]:
        """Plain data, without what the plan says of itself."""
        plan = replace(self.plan, account=Account(runs=self.plan.account.runs)).to_json()
        return {"name": self.name, "plan": plan, "step_s": self.step_s, "peak_bytes": self.peak_bytes}

    @staticmethod
    def from_json(data: Any) -> Finalist:
        """The inverse."""
        return Finalist(data["name"], plan_of(data["plan"]), data["step_s"], data["peak_bytes"])


@dataclass(frozen=True)
class Measured:
    """What a plan took."""

    step_s: float
    """Median over rounds."""
    low_s: float
    high_s: float
    """Quartiles."""
    ratio: float
    """Median over rounds of its time over that of the first plan that ran, in the same round."""
    rounds: int
    ahead: bool = True
    """Whether it was faster than that in three of four rounds."""


def finalists(plan: Plan | Staged) -> list[Finalist]:
    """The plan that a search predicts to be fastest, those that come next, and behind them plans with a name."""
    choice, origin = plan.account.choice, plan.origin
    if origin is None or choice is None:
        return []  # plans that lie outside of what was searched
    sides: list[Finalist] = []
    for row, one in zip((choice, *plan.account.runners_up), (plan, *origin.others), strict=False):
        side = Finalist(row.plan, one, row.step_s, row.peak_bytes)
        if len(sides) < MEASURED_PLANS and not any(map(side.is_like, sides)):
            sides.append(side)
    for side in sorted(_named(origin), key=lambda side: side.step_s):
        if not any(map(side.is_like, sides)):
            sides.append(side)
    return sides


def _named(origin: PlanOrigin) -> Iterator[Finalist]:
    """Plans by name that there are for this model, as they are predicted."""
    ranks, graph = origin.cluster.devices, origin.graph
    dp, tp = Mesh({"dp": ranks}), Mesh({"tp": ranks})
    data = f"data parallel on dp={ranks}"
    makes: dict[str, Callable[[], Plan]] = {
        data: lambda: presets.data_parallel(graph, dp),
        f"{data}, ZeRO 1": lambda: presets.zero(graph, dp, 1),
        f"{data}, ZeRO 3": lambda: presets.zero(graph, dp, 3),
        f"tensor parallel on tp={ranks}": lambda: presets.tensor_parallel(graph, tp),
    }
    for name, make in makes.items():
        with suppress(LaminarError):  # what can't be spread so
            plan = make()
            ran = _simulated(plan, origin)
            yield Finalist(name, plan, ran.seconds, ran.peak_bytes)


def as_ddp(plan: Plan | Staged) -> Finalist | None:
    """torch's own data parallel, for the model that a plan was searched for; none where samples can't be spread."""
    assert plan.origin is not None
    graph, ranks = plan.origin.graph, plan.origin.cluster.devices
    with suppress(LaminarError):
        data = presets.data_parallel(graph, Mesh({"dp": ranks}))
        ran = _simulated(data, plan.origin)
        marked = replace(data, account=replace(data.account, runs="ddp"))
        return Finalist(DDP, marked, ran.seconds, ran.peak_bytes)
    return None


def summed_up(rows: Sequence[Sequence[float] | str]) -> list[Measured | str]:
    """Seconds of a step by round, summed up; of a plan that is out, why."""
    first = next((row for row in rows if not isinstance(row, str)), ())
    return [row if isinstance(row, str) else _summed(row, first) for row in rows]


def _summed(row: Sequence[float], first: Sequence[float]) -> Measured:
    low, middle, high = statistics.quantiles(row, n=4, method="inclusive") if len(row) > 1 else (row[0],) * 3
    ratios = [a / b for a, b in zip(row, first, strict=True)]
    late = sum(r >= 1.0 for r in ratios)
    return Measured(middle, low, high, statistics.median(ratios), len(row), 4 * late <= len(ratios))


def fastest(rows: Sequence[Measured | str]) -> int:
    """Which one is taken; as good as equal, or ahead by chance, what was predicted fastest stays."""
    stays = isinstance(rows[0], Measured)
    ratios = {
        k: row.ratio for k, row in enumerate(rows) if isinstance(row, Measured) and (row.ahead or not stays or k == 0)
    }
    best = min(ratios, key=lambda k: ratios[k])
    return 0 if ratios.get(0, float("inf")) <= MEASURED_ALIKE * ratios[best] else best


def settled(
    plan: Plan | Staged,
    finals: Sequence[Finalist],
    rows: Sequence[Measured | str],
    left_out: Mapping[str, str] = NOBODY_LEFT_OUT,
    *,
    seconds: float | None = None,
    micro_batches: int = 1,
) -> Plan | Staged:
    """The plan that is taken, with all that was measured in its account; at least one has run.

    `plan` is the one that was predicted fastest, and the first of the finalists; `left_out` are those that were none,
    and why; all of it took so many seconds, with steps of so many micro-batches.
    """
    assert plan.origin is not None, "a plan that comes from a search"
    best, ran = fastest(rows), [row for row in rows if isinstance(row, Measured)]
    found = [
        MeasuredPlan(
            plan=f.name,
            step_s=row.step_s,
            low_s=row.low_s,
            high_s=row.high_s,
            ratio=row.ratio,
            ahead=row.ahead,
            predicted_s=f.step_s,
            taken=k == best,
        )
        for k, (row, f) in enumerate(zip(rows, finals, strict=True))
        if isinstance(row, Measured)
    ]
    out = [PlanLeftOut(plan=f.name, why=row) for row, f in zip(rows, finals, strict=True) if isinstance(row, str)]
    out += [PlanLeftOut(plan=name, why=why) for name, why in left_out.items()]
    told = MeasuredPlans(
        rounds=ran[0].rounds,
        rows=tuple(found),
        says=_says(rows, best),
        out=tuple(out),
        seconds=seconds,
        micro_batches=micro_batches,
    )
    if best == 0:
        return replace(plan, account=replace(plan.account, measured=told))
    return _instead(plan, finals[best], told)


def _says(rows: Sequence[Measured | str], best: int) -> str:
    first, taken = rows[0], rows[best]
    if best == 0:
        return "the plan that was predicted fastest is the fastest measured, or as good as it"
    if isinstance(first, str) or isinstance(taken, str):
        return f"taken because the plan that was predicted fastest is out: {first}"
    ahead = first.ratio / taken.ratio
    return f"taken because it was measured fastest: {ahead:.3f} times as fast as the predicted best"


def _instead(plan: Plan | Staged, taken: Finalist, told: MeasuredPlans) -> Plan | Staged:
    """Another plan than the one that was predicted fastest, with an account of its own."""
    assert plan.origin is not None
    account, own, ran = plan.account, taken.plan.account, _simulated(taken.plan, plan.origin)
    assert account.choice is not None
    choice = SimulatedPlan(plan=taken.name, step_s=ran.seconds, peak_bytes=ran.peak_bytes, spent=spent(ran))
    other = replace(
        account.updated(own),
        step=ran.figures(),
        stages=own.stages,
        choice=choice,
        runners_up=tuple(r for r in (account.choice, *account.runners_up) if r.plan != choice.plan),
        searched=account.choice.plan,
        binding=binding(choice.spent, account.binding.memory_bytes if account.binding else None),
        memory=held(ran),
        wins=None,
        form=None,
        measured=told,
    )
    return replace(taken.plan, name="ddp" if runs_ddp(taken.plan) else "measured", account=other, origin=plan.origin)


def _simulated(plan: Plan | Staged, origin: PlanOrigin) -> Prediction | StagedPrediction:
    """What a plan is predicted to take."""
    optimizer = origin.asked.optimizer
    if isinstance(plan, Staged):
        return predict_staged(micro(origin.graph, plan.micro_batches), plan, origin.cluster, optimizer=optimizer)
    return predict(origin.graph, plan, origin.cluster, optimizer=optimizer)
