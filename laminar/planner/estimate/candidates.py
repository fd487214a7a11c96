"""Candidates: placements with what they are expected to take, plans simulated in full, and what a search hands on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from laminar.errors import PlanError
from laminar.forecast.pipeline_step import StagedPrediction
from laminar.forecast.step import Prediction
from laminar.ir.plans.account import SimulatedPlan
from laminar.ir.plans.certificate import Certificate
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.rewrites import Steps
from laminar.ir.plans.staged import Staged
from laminar.planner.space.cell import Cell
from laminar.planner.space.plan_space import Space
from laminar.planner.space.styles import Style

USUAL = frozenset({"data", "typed", "kept", "inner", "tensor", "sequence", "sparing"})
"""Styles of plans that have a name."""


@dataclass(frozen=True, eq=False)
class Score:
    """A placement, and what it is expected to take."""

    cell: Cell
    style: Style
    zero: int
    plan: Plan | None
    """Of the folded graph of a micro-batch; if it is not there, `Model.placed` makes it."""
    seconds: float
    peak_bytes: float
    behind_s: float = 0.0
    """Of the seconds, those behind the last op: gradients still on their way, updates."""
    rewrites: Steps = ()
    """What the graph was made by that it places, see `planner/space/rewrites.py`."""
    again: tuple[int, ...] = ()
    """By place, blocks that are recomputed in backward where not all are; nothing where all are, or none."""
    blocks: int = 0
    """Of how many, where not all are."""
    saves_bytes: float = 0.0
    """What one more saves of a step without stages, where not all are recomputed."""
    spared: int = 0
    """Of the blocks that are recomputed, those whose products are kept, where that is not so for all."""
    away: int = 0
    """Blocks that wait in the host's memory."""
    apart: tuple[int, ...] = ()
    """Devices of each set, where branches have some of their own (`planner/search/best_first/branches.py`)."""

    def __str__(self) -> str:
        zero = f" zero{self.zero}" if self.zero else ""
        return f"{self.cell} {self.style}{zero}: {self.seconds * 1e3:.3f} ms, {self.peak_bytes / 1e9:.2f} GB"


@dataclass(frozen=True)
class Final:
    """A plan simulated at full depth."""

    score: Score
    plan: Plan | Staged
    ran: Prediction | StagedPrediction
    """The whole simulation, for whoever explains it."""

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self.ran.seconds

    @property
    def peak_bytes(self) -> int:
        """On the fullest rank."""
        return self.ran.peak_bytes

    @property
    def usual(self) -> bool:
        """Whether it has a name that people know."""
        return USUAL.issuperset(self.score.style.words) and not self.score.apart and not self.plan.rewrites

    @property
    def simple(self) -> tuple[int, ...]:
        """The smaller, the simpler."""
        cell, style = self.score.cell, self.score.style
        ways = (
            "data",
            "typed",
            "kept",
            "inner",
            "tensor",
            "sequence",
            "free",
            "lean",
            "hidden",
            "once",
            "sparing",
            "both",
            "mixed",
        )
        steps = len(self.plan.rewrites)
        return (
            steps,
            cell.stages,
            bool(self.score.apart),
            cell.micro_batches > 1,
            cell.virtual,
            max(map(ways.index, style.words)),
            cell.tp > 1,
            self.score.zero,
            cell.recompute,
            self.score.away > 0,
        )

    def row(self) -> SimulatedPlan:
        """For `explain`."""
        score, cell = self.score, self.score.cell
        return SimulatedPlan(
            plan=described_candidate(score),
            step_s=self.seconds,
            peak_bytes=self.peak_bytes,
            stages=cell.stages,
            micro_batches=cell.micro_batches,
            virtual=cell.virtual,
            dp=cell.dp,
            tp=cell.tp,
            recompute=cell.recompute,
            zero=score.zero,
            recomputed=score.again,
            spared=score.spared,
            offloaded=score.away,
            branches=score.apart,
        )


@dataclass(frozen=True)
class Found:
    """What a search has to say."""

    plan: Plan | Staged
    certificate: Certificate
    finals: tuple[Final, ...]
    """All that were simulated in full, best first."""
    scores: tuple[Score, ...]
    """All placements that were looked at, best first."""
    space: Space


@dataclass(frozen=True)
class Nothing:
    """A search with no plan to show: none fits, or none is faster than what was there before."""

    error: PlanError
    bound_s: float
    """No plan of the space that fits is faster."""
    space: str
    """Its hash."""
    fits: bool
    """Whether some of what was looked at fits."""
    through: bool
    """Whether it ended for another reason than time."""


def described_candidate(score: Score) -> str:
    """A plan in a few words."""
    names = {
        "data": "data parallel",
        "inner": "pieces within a node",
        "tensor": "tensor parallel",
        "sequence": "tensor and sequence parallel",
        "free": "placed freely",
        "lean": "placed freely within memory",
    }
    ways = dict.fromkeys(names[s] for s in score.style.axes)
    cell = score.cell
    mesh = " x ".join(f"{n}={s}" for n, s in zip(cell.mesh.names, cell.mesh.sizes, strict=True))
    out = f"{' and '.join(ways)} on {mesh}"
    if score.apart:
        sizes = " and ".join(map(str, score.apart))
        out = f"branches apart on {sizes} devices" + (f", {' and '.join(ways)}" if max(score.apart) > 1 else "")
    if score.zero:
        out += f", ZeRO {score.zero}"
        out += " gathered once" if score.style.gather_once and score.zero == 3 else ""
    if score.style.mixed_storage:
        out += ", mixed pieces"
    if not cell.plain:
        out += f", {cell.stages} stages" if cell.stages > 1 and not score.apart else ""
        out += f", {cell.micro_batches} micro-batches" if cell.micro_batches > 1 or not score.apart else ""
        out += f", {cell.virtual} virtual stages each" if cell.virtual > 1 else ""
    if cell.recompute and (any(score.again) or not score.again or score.style.keep_products == "some"):
        some = f"{sum(score.again)} of {score.blocks} " if score.again and sum(score.again) < score.blocks else ""
        part = f" (products of {score.spared} kept)" if 0 < score.spared < sum(score.again) else ""
        spared = " but for products" if score.style.keep_products == "all" or (score.spared and not part) else part
        both = score.style.keep_products == "some" and bool(some)
        spared = " but for products" if both and not any(score.again) else spared
        out += f", {some if any(score.again) else ''}blocks recomputed{spared} in backward"
        out += ", the others but for products" if both and any(score.again) else ""
    if score.away:
        out += f", {score.away} of {score.blocks} blocks offloaded"
    return out + (", rewritten" if score.rewrites else "")
