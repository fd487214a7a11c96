"""The decision: for every tensor of a graph, how it lies on a mesh.

A plan names, for each op, the placements it reads and makes; for each input how it is stored; for
each output how it is wanted; and for each parameter how its optimizer state lies. Lowering inserts
boxing where producer and consumer differ. A plan is for one graph (by hash); one written by hand
is as good as one found by search.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from laminar.errors import PlacementError, PlanError
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.account import Account
from laminar.ir.plans.patterns import apart, as_patterns
from laminar.ir.plans.planned import Planned, PlanOrigin
from laminar.ir.plans.rewrites import Steps, rewrites_from, rewrites_json
from laminar.ir.sbp import NdSbp, check_placement, parse_nd, show
from laminar.ir.serial.codec import canonical
from laminar.ir.serial.reading import JsonPart

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The placements of one op: of each tensor it reads, and of each it makes."""

    ins: tuple[NdSbp, ...]
    outs: tuple[NdSbp, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(show, self.ins))} -> {', '.join(map(show, self.outs))}"


@lru_cache(maxsize=1 << 14)
def _text(nd: NdSbp) -> str:
    return "|".join(map(str, nd))


@lru_cache(maxsize=1 << 14)
def _chosen(choice: Choice) -> str:
    """As canonical JSON."""
    return canonical([[_text(nd) for nd in choice.ins], [_text(nd) for nd in choice.outs]])


@lru_cache(maxsize=1 << 14)
def _nd(text: str, axes: int) -> NdSbp:
    found = parse_nd(text.split("|"))
    if len(found) != axes:
        raise PlacementError(f"{text!r} places on {len(found)} axes, the mesh has {axes}")
    return found


def _placed(part: JsonPart, mesh: Mesh) -> NdSbp:
    text = part.text()
    return part.read(lambda _: _nd(text, len(mesh.sizes)))


def _choice(part: JsonPart, mesh: Mesh) -> Choice:
    ins, outs = part.rows(2)
    return Choice(tuple(_placed(p, mesh) for p in ins.rows()), tuple(_placed(p, mesh) for p in outs.rows()))


@dataclass(frozen=True)
class Plan(Planned):
    """How to spread one graph over one mesh."""

    mesh: Mesh
    graph_hash: str
    ops: dict[str, Choice]
    inputs: dict[str, NdSbp]
    outputs: dict[str, NdSbp]
    """By `kind:name`, such as `grad:blocks.0.up.weight`."""
    state: dict[str, NdSbp] = field(default_factory=dict)
    """Placement of the optimizer state, by parameter; a parameter not named has it as it lies itself."""
    name: str = "hand"
    account: Account = field(default_factory=Account)
    """What it says about itself, filled in by whoever made it: not part of the identity."""
    recompute: tuple[str, ...] = ()
    """What backward recomputes instead of keeping it: patterns of modules and values, see `ir/plans/patterns.py`."""
    origin: PlanOrigin | None = field(default=None, compare=False, repr=False)
    """What it was made from, where known: not saved, and no part of the identity."""
    rewrites: Steps = ()
    """What makes the graph that is placed of the one that was captured, see `ir/plans/rewrites.py`."""
    captured_hash: str = ""
    """Of the graph that rewrites start from, where that is known."""
    offload: tuple[str, ...] = ()
    """What waits in the host's memory between forward and backward: patterns, as for `recompute`."""
    gather_once: bool = False
    """Whether parameters that were put together from pieces for forward stay whole until backward has read them."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "laminar_plan": PLAN_VERSION,
            "name": self.name,
            "mesh": self.mesh.to_json(),
            "graph": self.graph_hash,
            "inputs": {k: _text(v) for k, v in self.inputs.items()},
            "outputs": {k: _text(v) for k, v in self.outputs.items()},
            "state": {k: _text(v) for k, v in self.state.items()},
            "ops": {k: [[_text(p) for p in c.ins], [_text(p) for p in c.outs]] for k, c in self.ops.items()},
            **({"recompute": list(self.recompute)} if self.recompute else {}),
            **({"offload": list(self.offload)} if self.offload else {}),
            **({"gather_once": True} if self.gather_once else {}),
            **rewrites_json(self.rewrites, self.captured_hash),
            "account": self.account.to_json(),
        }

    @staticmethod
    def from_json(data: Any) -> Plan:
        """A plan from `to_json`'s data."""
        version = data.get("laminar_plan") if isinstance(data, dict) else None
        if version is None:
            raise PlanError("this is not a plan: it has no laminar_plan field")
        if version != PLAN_VERSION:
            raise PlanError(
                f"plan of version {version}, this laminar reads version {PLAN_VERSION}",
                next="upgrade laminar, or make the plan again",
            )
        part = JsonPart(
            data, lambda what: PlanError(f"corrupt plan: {what}", next="undo the edit, or make the plan again")
        )
        mesh = part["mesh"].read(Mesh)
        rewrites, captured = part.get("rewrites", {"steps": [], "captured": ""}).read(rewrites_from)
        return Plan(
            mesh=mesh,
            graph_hash=part["graph"].text(),
            ops={k: _choice(c, mesh) for k, c in part["ops"].fields().items()},
            inputs={k: _placed(nd, mesh) for k, nd in part["inputs"].fields().items()},
            outputs={k: _placed(nd, mesh) for k, nd in part["outputs"].fields().items()},
            state={k: _placed(nd, mesh) for k, nd in part["state"].fields().items()},
            name=part["name"].text(),
            account=Account.from_part(part["account"]),
            recompute=part.get("recompute", None).read(as_patterns),
            rewrites=rewrites,
            captured_hash=captured,
            offload=part.get("offload", None).read(as_patterns),
            gather_once=part.get("gather_once", False).flag(),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan; a file that is not one says why."""
        try:
            data = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise PlanError(f"no plan file {path}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} is not a plan: {error}") from error
        return Plan.from_json(data)

    @cached_property
    def hash(self) -> str:
        """Identity of the decision; its name and its account do not count."""
        bare = replace(self, ops={}, account=Account())
        data = {k: v for k, v in bare.to_json().items() if k not in ("account", "name")}
        before, behind = canonical(data).split('"ops":{}', 1)
        ops = ",".join([f"{json.dumps(name)}:{_chosen(self.ops[name])}" for name in sorted(self.ops)])
        return hashlib.sha256(f'{before}"ops":{{{ops}}}{behind}'.encode()).hexdigest()

    def fits(self, graph: Graph) -> None:
        """Refuse a graph this plan was not made for, or placements its tensors can't have."""
        if graph.hash != self.graph_hash:
            again = "capture the same model with the same batch shape, or plan again"
            raise PlanError(
                f"plan {self.hash[:12]} is for graph {self.graph_hash[:12]}, not {graph.hash[:12]}",
                next="laminar.rewritten(graph, plan)" if graph.hash == self.captured_hash else again,
            )
        for item in graph.inputs:
            if item.name not in self.inputs:
                raise PlanError(f"plan {self.hash[:12]} does not place input {item.name}")
            check_placement(item.spec, self.inputs[item.name], self.mesh.sizes, f"input {item.name}")
        for node in graph.nodes:
            choice = self.ops.get(node.name)
            if choice is None:
                raise PlanError(f"plan {self.hash[:12]} does not place op %{node.name}")
            if (len(choice.ins), len(choice.outs)) != (len(node.ins), len(node.outs)):
                raise PlanError(
                    f"plan {self.hash[:12]} places {len(choice.ins)} tensors that %{node.name} reads and "
                    f"{len(choice.outs)} that it makes",
                    allowed=f"{len(node.ins)} and {len(node.outs)}, as {node.op} has",
                    next="see ops in the file of the plan, or plan again",
                )
        for out in graph.outputs:
            if f"{out.kind}:{out.name}" not in self.outputs:
                raise PlanError(f"plan {self.hash[:12]} does not place output {out.kind}:{out.name}")
        for item in graph.inputs:
            if item.name in self.state:
                check_placement(item.spec, self.state[item.name], self.mesh.sizes, f"state of {item.name}")
        apart(graph, self.recompute, self.offload)

    def with_recompute(self, *patterns: str) -> Plan:
        """The same plan with these modules and values recomputed in backward, and no others; its account is empty."""
        return replace(self, recompute=as_patterns(patterns), account=Account())

    def with_offload(self, *patterns: str) -> Plan:
        """The same plan with what these modules make kept in the host's memory, and no others; its account is empty."""
        return replace(self, offload=as_patterns(patterns), account=Account())

    def __str__(self) -> str:
        return f"Plan({self.hash[:12]}, {self.name}, {self.mesh}, {len(self.ops)} ops)"


def runs_ddp(plan: Planned) -> bool:
    """Whether a plan is run by torch's own data parallel, because that was measured fastest."""
    return plan.account.runs == "ddp"
