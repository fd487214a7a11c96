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
from laminar.ir.codec import canonical
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.patterns import apart, as_patterns
from laminar.ir.planned import Origin, Planned, account_of, reading_account, searched
from laminar.ir.reading import Part
from laminar.ir.rewrites import Steps, carried, described, rewrites_from, rewrites_json
from laminar.ir.sbp import NdSbp, check, parse_nd, show

VERSION = 1


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


def _placed(part: Part, mesh: Mesh) -> NdSbp:
    text = part.text()
    return part.read(lambda _: _nd(text, len(mesh.sizes)))


def _choice(part: Part, mesh: Mesh) -> Choice:
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
    account: dict[str, Any] = field(default_factory=dict)
    """What the plan costs, filled in by whoever made it: for `explain`, not part of the identity."""
    recompute: tuple[str, ...] = ()
    """What backward makes again instead of keeping it: patterns of modules and values, see `ir/patterns.py`."""
    origin: Origin | None = field(default=None, compare=False, repr=False)
    """What it was made from, where known: not saved, and no part of the identity."""
    rewrites: Steps = ()
    """What makes the graph that is placed of the one that was captured, see `ir/rewrites.py`."""
    captured_hash: str = ""
    """Of the graph that rewrites start from, where that is known."""
    offload: tuple[str, ...] = ()
    """What waits in the host's memory between forward and backward: patterns, as for `recompute`."""
    gather_once: bool = False
    """Whether parameters that were put together from pieces for forward stay whole until backward has read them."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "laminar_plan": VERSION,
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
            "account": self.account,
        }

    @staticmethod
    def from_json(data: Any) -> Plan:
        """A plan from `to_json`'s data."""
        version = data.get("laminar_plan") if isinstance(data, dict) else None
        if version is None:
            raise PlanError("this is not a plan: it has no laminar_plan field")
        if version != VERSION:
            raise PlanError(
                f"plan of version {version}, this laminar reads version {VERSION}",
                next="upgrade laminar, or make the plan again",
            )
        part = Part(data, lambda what: PlanError(f"corrupt plan: {what}", next="undo the edit, or make the plan again"))
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
            account=account_of(part["account"]),
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
        data = {k: v for k, v in replace(self, ops={}).to_json().items() if k not in ("account", "name")}
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
            check(item.spec, self.inputs[item.name], self.mesh.sizes, f"input {item.name}")
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
                check(item.spec, self.state[item.name], self.mesh.sizes, f"state of {item.name}")
        apart(graph, self.recompute, self.offload)

    def with_recompute(self, *patterns: str) -> Plan:
        """The same plan with these modules and values made again in backward, and no others; its account is empty."""
        return replace(self, recompute=as_patterns(patterns), account={})

    def with_offload(self, *patterns: str) -> Plan:
        """The same plan with what these modules make kept in the host's memory, and no others; its account is empty."""
        return replace(self, offload=as_patterns(patterns), account={})

    def explain(self, price: float | None = None) -> str:
        """What is spread how, which collectives follow and why, what was not split, and what a search has to say.

        `price` is that of a device-hour, in any currency.
        """
        with reading_account():
            return self._explained(price)

    def _explained(self, price: float | None) -> str:
        lines = [
            f"plan {self.hash[:12]} ({self.name}), graph {self.graph_hash[:12]}, {self.mesh}, {self.mesh.ranks} ranks"
        ]
        lines += ["", "inputs, grouped by placement"]
        groups: dict[str, list[str]] = {}
        for name, nd in self.inputs.items():
            groups.setdefault(show(nd), []).append(name)
        for placement, names in sorted(groups.items(), key=lambda g: -len(g[1])):
            lines.append(
                f"  {placement:<28} {len(names):>4}  {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            )
        account = self.account
        if self.recompute:
            lines += ["", f"made again in backward: {', '.join(self.recompute)}", *_again(account)]
        if self.offload:
            lines += ["", f"kept in the host's memory: {', '.join(self.offload)}", *_away(account)]
        if self.gather_once:
            lines += ["", "parameters in pieces are gathered once a step: what forward has gathered stays for backward"]
        if self.rewrites:
            lines += ["", f"rewritten before it is spread: {described(self.rewrites)}"]
            lines += [f"  {name}, from a file: {text}" for name, text in carried(self.rewrites).items()]
        if "proof" in account:
            lines.append(f"  {account['proof']}")
        if "eager" in account:
            lines += ["", "runs as it is, in plain PyTorch", *(f"  {row}" for row in account["eager"])]
        if "collectives" in account:
            lines += ["", f"collectives per step: {account['count']}, {account['bytes']:,} bytes received per rank"]
            for row in account["collectives"]:
                lines.append(
                    f"  {row['kind']:<15} over {row['axes']:<8} x{row['count']:<4} {row['bytes']:>14,} B  {row['why']}"
                )
        if "parameter_bytes" in account:
            lines += [
                "",
                f"parameters per rank: {account['parameter_bytes']:,} of {account['parameter_bytes_whole']:,} bytes",
            ]
        if "cost_s" in account:
            lines.append(
                f"cost on an assumed machine, without overlap: {account['cost_s'] * 1e3:.3f} ms; "
                f"everything on every rank instead: {account['replicated_s'] * 1e3:.3f} ms"
            )
            lines.append(account["solver"])
        if "step_s" in account:
            lines += ["", self.forecast()]
        lines += searched(account, price)
        if account.get("unsplit"):
            lines += ["", "computed whole on every rank, because nothing says how to split them"]
            for row in account["unsplit"]:
                lines.append(f"  {row['op']:<28} {row['share']:6.2%} of the work  {row['where']}")
        return "\n".join(lines)

    @reading_account()
    def forecast(self) -> str:
        """Seconds and bytes of a step as predicted, with the 90 % interval and how they are known."""
        a = self.account
        known = ", ".join(f"{share:.0%} {how}" for how, share in a.get("known", {}).items() if share >= 0.005)
        return (
            f"a step on {a['cluster']}: {a['step_s'] * 1e3:.3f} ms predicted "
            f"({a['step_low_s'] * 1e3:.3f} to {a['step_high_s'] * 1e3:.3f}, 90 %)\n"
            f"  prices: {known}\n"
            f"  memory of the fullest rank: {a['peak_bytes']:,} bytes"
        )

    def __str__(self) -> str:
        return f"Plan({self.hash[:12]}, {self.name}, {self.mesh}, {len(self.ops)} ops)"


def _again(account: dict[str, Any]) -> list[str]:
    """What recompute saves and costs, where known."""
    if "again" not in account:
        return []
    a = account["again"]
    return [
        f"  {a['blocks']} blocks and {a['values']} values: {a['lines']} lines run twice, "
        f"{a['kept_bytes']:,} instead of {a['whole_bytes']:,} bytes of activations kept per rank"
    ]


def _away(account: dict[str, Any]) -> list[str]:
    """What offload takes off the device, where known."""
    if "offload" not in account:
        return []
    a = account["offload"]
    return [
        f"  {a['tensors']} tensors of {a['blocks']} blocks, {a['bytes']:,} bytes there and back in a step; "
        f"{a['kept_bytes']:,} instead of {a['whole_bytes']:,} bytes of activations kept per rank"
    ]


def runs_ddp(plan: Any) -> bool:
    """Whether a plan is run by torch's own data parallel, because that was measured fastest."""
    return bool(plan.account.get("runs") == "ddp")
