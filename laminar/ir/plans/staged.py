"""A plan with stages: different ops on different sets of ranks.

Every forward op has a stage; backward ops follow theirs (`lower/stages/split_stages.py`). A stage runs at a place, a
set of ranks with a mesh of its own, and has an ordinary plan for its own graph there. Several stages may share a place
(virtual stages). A step is a number of micro-batches, passed from stage to stage in the order that `schedule` names,
from which a place may be `window` positions ahead; `registers` overrides how many micro-batches may be under way
between two parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from laminar.errors import PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh, Place
from laminar.ir.plans.account import Account
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.planned import Planned, PlanOrigin
from laminar.ir.plans.rewrites import Steps, rewrites_from, rewrites_json
from laminar.ir.serial.codec import content_hash
from laminar.ir.serial.reading import JsonPart

STAGED_VERSION = 1
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-level", "backward-first")


@dataclass(frozen=True)
class StagePlan:
    """One stage: where it runs, and how its own graph is spread there."""

    place: int
    plan: Plan


@dataclass(frozen=True)
class Staged(Planned):
    """How to spread one graph over several sets of ranks."""

    graph_hash: str
    places: tuple[Place, ...]
    stages: tuple[StagePlan, ...]
    of: dict[str, int]
    """The stage of every forward op that runs in one stage only."""
    micro_batches: int
    schedule: str = "1f1b"
    window: int | None = 0
    apart: bool = False
    """Whether gradients of inputs and of weights are parts of their own."""
    stash: float = 1.0
    """How many times as many micro-batches as the schedule needs may be under way; more lets a window be of use."""
    registers: dict[str, int] = field(default_factory=dict)
    """Registers of queues, by name, where they are not the schedule's own."""
    coupled: bool = False
    """Whether ops that couple samples may see one micro-batch at a time."""
    name: str = "hand"
    account: Account = field(default_factory=Account)
    """What it says about itself, filled in by whoever made it: not part of the identity."""
    origin: PlanOrigin | None = field(default=None, compare=False, repr=False)
    """What it was made from, where known: not saved, and no part of the identity."""
    rewrites: Steps = ()
    """What makes the graph that is cut into stages of the one that was captured, see `ir/plans/rewrites.py`."""
    captured_hash: str = ""
    """Of the graph that rewrites start from, where that is known."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(f"no schedule is called {self.schedule!r}", allowed="  ".join(SCHEDULES))
        if self.micro_batches < 1:
            raise PlanError(f"a step of {self.micro_batches} micro-batches", allowed="at least 1")
        if not self.stash >= 1.0:
            raise PlanError(f"a stash of {self.stash}", allowed="1.0 or more")
        if self.window is not None and self.window < 0:
            raise PlanError(f"a window of {self.window}", allowed="0 or more, or None for any")
        for s, stage in enumerate(self.stages):
            if not 0 <= stage.place < len(self.places):
                raise PlanError(f"stage {s} is at place {stage.place}", allowed=f"0 to {len(self.places) - 1}")
            if stage.plan.mesh != self.places[stage.place].mesh:
                raise PlanError(f"stage {s} is planned for {stage.plan.mesh}, its place is {self.places[stage.place]}")
        if {s.place for s in self.stages} != set(range(len(self.places))):
            raise PlanError("a place without a stage")

    @property
    def ranks(self) -> int:
        """How many ranks the plan needs."""
        return 1 + max(r for p in self.places for r in p.ranks)

    @property
    def mesh(self) -> Mesh:
        """All its ranks on one axis, for whoever only counts them: each place has a mesh of its own."""
        return Mesh({"ranks": self.ranks})

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "laminar_staged_plan": STAGED_VERSION,
            "name": self.name,
            "graph": self.graph_hash,
            "places": [{"ranks": list(p.ranks), "mesh": p.mesh.to_json()} for p in self.places],
            "stages": [{"place": s.place, "plan": s.plan.to_json()} for s in self.stages],
            "of": self.of,
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "window": self.window,
            "apart": self.apart,
            "stash": self.stash,
            "registers": self.registers,
            "coupled": self.coupled,
            **rewrites_json(self.rewrites, self.captured_hash),
            "account": self.account.to_json(),
        }

    @staticmethod
    def from_json(data: Any) -> Staged:
        """A staged plan from `to_json`'s data."""
        version = data.get("laminar_staged_plan") if isinstance(data, dict) else None
        if version != STAGED_VERSION:
            raise PlanError(f"staged plan of version {version}, this laminar reads version {STAGED_VERSION}")
        part = JsonPart(
            data, lambda what: PlanError(f"corrupt plan: {what}", next="undo the edit, or make the plan again")
        )
        rewrites, captured = part.get("rewrites", {"steps": [], "captured": ""}).read(rewrites_from)
        places = tuple(_place(p) for p in part["places"].rows())
        stages = tuple(StagePlan(s["place"].whole(), s["plan"].read(Plan.from_json)) for s in part["stages"].rows())
        of = {k: v.whole() for k, v in part["of"].fields().items()}
        if not places or not stages:
            raise part.wrong("a plan needs at least one place and one stage")
        if odd := next((k for k, s in of.items() if s >= len(stages)), None):
            raise part["of"][odd].wrong(f"stage {of[odd]}, of {len(stages)}")
        window = part["window"]
        fields: dict[str, Any] = {
            "graph_hash": part["graph"].text(),
            "places": places,
            "stages": stages,
            "of": of,
            "micro_batches": part["micro_batches"].whole(1),
            "schedule": part["schedule"].text(),
            "window": None if window.value is None else window.whole(),
            "apart": part["apart"].flag(),
            "stash": part["stash"].number(1.0),
            "registers": {k: v.whole(1) for k, v in part["registers"].fields().items()},
            "coupled": part["coupled"].flag(),
            "name": part["name"].text(),
            "account": Account.from_part(part["account"]),
            "rewrites": rewrites,
            "captured_hash": captured,
        }
        try:
            return Staged(**fields)
        except PlanError as error:
            raise part.wrong(str(error)) from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @cached_property
    def hash(self) -> str:
        """Identity of the decision; names and accounts do not count."""
        data = {k: v for k, v in self.to_json().items() if k not in ("account", "name", "stages")}
        return content_hash({**data, "stages": [[s.place, s.plan.hash] for s in self.stages]})

    def fits(self, graph: Graph) -> None:
        """Refuse a graph this plan was not made for."""
        if graph.hash != self.graph_hash:
            again = "capture the same model with the same shape of micro-batch, or plan again"
            raise PlanError(
                f"plan {self.hash[:12]} is for graph {self.graph_hash[:12]}, not {graph.hash[:12]}",
                next="laminar.rewritten(graph, plan)" if graph.hash == self.captured_hash else again,
            )

    def __str__(self) -> str:
        return f"Staged({self.hash[:12]}, {self.name}, {len(self.stages)} stages, {self.micro_batches} micro-batches)"


def _place(part: JsonPart) -> Place:
    ranks = tuple(r.whole() for r in part["ranks"].rows())
    return part["mesh"].read(lambda axes: Place(ranks, Mesh(axes)))


def load_plan(path: str | Path) -> Plan | Staged:
    """A plan from its file, with stages or without."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return Plan.load(path)  # says what is wrong with the file
    return plan_of(data) if isinstance(data, dict) and "laminar_staged_plan" in data else Plan.load(path)


def plan_of(data: dict[str, Any]) -> Plan | Staged:
    """A plan from its plain data, with stages or without."""
    return Staged.from_json(data) if "laminar_staged_plan" in data else Plan.from_json(data)
