"""What a rank runs: local ops and explicit collectives, in order.

One program serves all ranks. It keeps whole-tensor shapes and placements; the local size of a
dim that does not divide is a function of the rank, and the runtime works it out. Reading it needs
no torch, so it can be printed, diffed, counted and simulated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from laminar.ir.account import CollectiveRow, ProgramTraffic
from laminar.ir.codec import Ref, content_hash, encode
from laminar.ir.graph import Constant
from laminar.ir.mesh import Mesh
from laminar.ir.patterns import Picked
from laminar.ir.sbp import NdSbp, local_spec, show
from laminar.ir.tensor import TensorSpec

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LOCAL_STEPS = ("slice", "pad")
SEND, BRING = "host.send", "host.bring"
"""Lines that copy values to the host's memory, and back to the device. Both give what they are given, value by value;
what a line reads beyond that only says what must have arrived before it starts (see `lower/offload.py`)."""
HOSTS = frozenset((SEND, BRING))
NOTHING = Picked()


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and how it lies. Programs share equal ones (`placed`), and the hash is kept: simulation asks often."""

    spec: TensorSpec
    nd: NdSbp
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.spec, self.nd)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Placed, (self.spec, self.nd)  # hashes of text differ from process to process

    def local(self, mesh: Mesh, rank: int = 0) -> TensorSpec:
        """What one rank holds of it."""
        return _local(self, mesh.sizes, mesh.coords(rank))


@lru_cache(maxsize=1 << 18)
def _local(p: Placed, sizes: tuple[int, ...], coords: tuple[int, ...]) -> TensorSpec:
    return local_spec(p.spec, p.nd, sizes, coords)


@lru_cache(maxsize=1 << 16)
def placed(spec: TensorSpec, nd: NdSbp) -> Placed:
    """The one `Placed` of its kind."""
    return Placed(spec, nd)


@dataclass(frozen=True, slots=True)
class Instr:
    """One line of a program.

    `op` is an op of the graph (or a local form of one), or `box.` and a step of boxing. Boxing steps
    take `(refs, axes, gives, takes, reduction)`: several tensors at once where they were merged.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    refs: tuple[Ref, ...]
    ins: tuple[Placed, ...]
    outs: tuple[Placed | None, ...]
    where: str = ""
    module: str = ""
    phase: str = "forward"
    why: str = ""
    bytes: int = 0
    """For a collective: bytes the busiest rank receives; for a copy to or from the host, bytes of a rank."""

    @property
    def kind(self) -> str:
        """For a step of boxing its name, else the empty string."""
        return self.op[4:] if self.op.startswith("box.") else ""

    @property
    def moves(self) -> bool:
        """Whether ranks talk to each other here."""
        return self.kind in COLLECTIVES

    @property
    def hosts(self) -> bool:
        """Whether values go to the host's memory here, or come back."""
        return self.op in HOSTS

    @property
    def cause(self) -> str:
        """`cause_of` its `why`."""
        return cause_of(self.why)


def cause_of(why: str) -> str:
    """Why a collective is there, without names and counts: `P(sum) to B for gradients`. Of itself it is itself."""
    moved, found, what = why.partition(" for ")
    if what.startswith("%"):
        return f"{moved} for values"
    return moved + found + re.sub(r"^\d+ (.*?)( in one bucket| at once)?$", r"\1", what)


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A tensor given from outside, as each rank holds it."""

    name: str
    kind: str
    placed: Placed


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A tensor given back, as each rank holds it."""

    name: str
    kind: str
    ref: Ref
    placed: Placed


@dataclass(frozen=True)
class Program:
    """One program per rank, written once."""

    mesh: Mesh
    inputs: tuple[ProgramInput, ...]
    constants: tuple[Constant, ...]
    instrs: tuple[Instr, ...]
    outputs: tuple[ProgramOutput, ...]
    graph_hash: str
    plan_hash: str
    offload: Picked = NOTHING
    """What waits in the host's memory between forward and backward."""

    @property
    def collectives(self) -> list[Instr]:
        """Every instruction that moves bytes between ranks."""
        return [i for i in self.instrs if i.moves]

    def counts(self, **where: str) -> dict[str, int]:
        """How many collectives of each kind; `phase="forward"` and the like narrow it down."""
        out: dict[str, int] = {}
        for i in self.collectives:
            if all(getattr(i, key) == value for key, value in where.items()):
                out[i.kind] = out.get(i.kind, 0) + 1
        return out

    def axis_names(self, instr: Instr) -> str:
        """The axes a collective runs over, as a reader writes them."""
        return "x".join(self.mesh.names[a] for a in instr.args[1])

    def traffic(self) -> ProgramTraffic:
        """What the program moves and holds: the numbers `Plan.explain` prints."""
        rows: dict[tuple[str, str, str], CollectiveRow] = {}
        for i in self.collectives:
            key = (i.kind, self.axis_names(i), i.why.split(" for ")[0])
            row = rows.get(key) or CollectiveRow(kind=key[0], axes=key[1], why=key[2], count=0, bytes=0)
            rows[key] = replace(row, count=row.count + 1, bytes=row.bytes + i.bytes)
        params = [i.placed for i in self.inputs if i.kind == "param"]
        return ProgramTraffic(
            collectives=tuple(sorted(rows.values(), key=lambda r: -r.bytes)),
            count=len(self.collectives),
            bytes=sum(i.bytes for i in self.collectives),
            parameter_bytes=sum(p.local(self.mesh).nbytes for p in params),
            parameter_bytes_whole=sum(p.spec.nbytes for p in params),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""

        def text(p: Placed | None) -> list[str] | None:
            return [str(p.spec), *map(str, p.nd)] if p else None

        return {
            "mesh": self.mesh.to_json(),
            "graph": self.graph_hash,
            "plan": self.plan_hash,
            "inputs": [[i.name, i.kind, text(i.placed)] for i in self.inputs],
            "constants": [c.to_json() for c in self.constants],
            "instrs": [
                [i.name, i.op, encode(i.args), [text(p) for p in i.ins], [text(p) for p in i.outs], i.phase, i.why]
                for i in self.instrs
            ],
            "outputs": [[o.name, o.kind, encode(o.ref), text(o.placed)] for o in self.outputs],
        }

    @property
    def hash(self) -> str:
        """Identity of the program."""
        return content_hash(self.to_json())

    def __str__(self) -> str:
        """Op, local shape, placement; for each collective its bytes and why it exists."""
        lines = [f"program on {self.mesh} for plan {self.plan_hash[:12]}; local shapes are those of rank 0"]
        for i in self.inputs:
            lines.append(f"  {i.kind:<6} %{i.name}: {i.placed.local(self.mesh)} {show(i.placed.nd)}")
        module = None
        for instr in self.instrs:
            if instr.module != module:
                module = instr.module
                lines.append(f"# {module or '(loss)'}")
            outs = ", ".join(f"{p.local(self.mesh)} {show(p.nd)}" if p else "-" for p in instr.outs)
            names = ", ".join(map(str, instr.refs))
            if instr.hosts:
                lines.append(f"  %{instr.name}: {outs} = {instr.op}({names}) {instr.bytes:,} B  <- {instr.why}")
            elif instr.kind:
                axes = self.axis_names(instr)
                size = f" {instr.bytes:,} B" if instr.moves else ""
                lines.append(f"  %{instr.name}: {outs} = {instr.kind}[{axes}]({names}){size}  <- {instr.why}")
            else:
                lines.append(
                    f"  %{instr.name}: {outs} = {instr.op}({names})" + (f"    # {instr.where}" if instr.where else "")
                )
        for o in self.outputs:
            lines.append(f"  return {o.kind} {o.name} = {o.ref}: {o.placed.local(self.mesh)} {show(o.placed.nd)}")
        return "\n".join(lines)
