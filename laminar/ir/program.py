"""What a rank runs: local ops and explicit collectives, in order.

One program serves all ranks. It keeps whole-tensor shapes and placements; the local size of a
dim that does not divide is a function of the rank, and the runtime works it out. Reading it needs
no torch, so it can be printed, diffed, counted, simulated, saved as JSON and read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from laminar.errors import PlanError
from laminar.ir.graph import Constant, refs_in
from laminar.ir.mesh import Mesh
from laminar.ir.ops import COLLECTIVES, HOST_COPIES
from laminar.ir.plans.account import CollectiveRow, ProgramTraffic
from laminar.ir.plans.patterns import Picked
from laminar.ir.sbp import NdSbp, local_spec, parse_nd, show
from laminar.ir.serial.codec import Ref, content_hash, decode, decode_ref, encode
from laminar.ir.serial.reading import JsonPart
from laminar.ir.tensor import TensorSpec

PROGRAM_VERSION = 1
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
class Boxing:
    """How a boxing step moves its tensors: over which axes, and where each of them is joined and cut."""

    axes: tuple[int, ...]
    """Numbers of the mesh axes that it runs over."""
    gives: tuple[tuple[int, int], ...]
    """For each tensor the (dim, blocks) at which the axis is opened: all_gather, all_to_all, pad."""
    takes: tuple[tuple[int, int], ...]
    """For each tensor the (dim, blocks) at which the axis cuts: slice, reduce_scatter, all_to_all."""
    reduction: str = "sum"
    """How terms are put together: sum, max or min."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "axes": list(self.axes),
            "gives": [list(pair) for pair in self.gives],
            "takes": [list(pair) for pair in self.takes],
            "reduction": self.reduction,
        }

    @staticmethod
    def from_json(part: JsonPart) -> Boxing:
        """A boxing from `to_json`'s data."""
        gives, takes = (
            tuple((dim.whole(-1), blocks.whole(1)) for dim, blocks in (row.rows(2) for row in part[key].rows()))
            for key in ("gives", "takes")
        )
        return Boxing(tuple(a.whole() for a in part["axes"].rows()), gives, takes, part["reduction"].text())


READ_VALUES, BUCKETED_GRADIENTS = "values", "gradients"


@dataclass(frozen=True, slots=True)
class MoveCause:
    """What a line moves tensors for; programs print it, and timelines sum up by it."""

    what: str
    """`values` that an op reads, an output (`grad`, with its name), `gradients` in a bucket, `updated parameters`."""
    name: str = ""
    """The op that reads the values, or the output."""
    members: int = 1
    """How many tensors travel together."""

    @property
    def reader(self) -> str:
        """The op that the tensors are moved for, where it is one."""
        return self.name if self.what == READ_VALUES else ""

    @property
    def summary(self) -> str:
        """Without ops and counts: `gradients`."""
        return f"{self.what} {self.name}" if self.name and self.what != READ_VALUES else self.what

    def __str__(self) -> str:
        if self.members > 1:
            return f"{self.members} {self.what} {'in one bucket' if self.what == BUCKETED_GRADIENTS else 'at once'}"
        return f"%{self.name}" if self.reader else self.summary


@dataclass(frozen=True, slots=True)
class Instr:
    """One line of a program.

    `op` is an op of the graph (or a local form of one), or `box.` and a step of boxing, which `boxing` describes and
    whose `args` are its tensors: several at once where they were merged.
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
    cause: MoveCause | None = None
    """For a step of boxing and a copy to or from the host: what it is there for."""
    bytes: int = 0
    """For a collective: bytes the busiest rank receives; for a copy to or from the host, bytes of a rank."""
    boxing: Boxing | None = None

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
        return self.op in HOST_COPIES

    @property
    def box(self) -> Boxing:
        """The boxing of a line that is known to be a step of one."""
        assert self.boxing is not None, f"%{self.name} = {self.op} moves nothing"
        return self.boxing

    @property
    def change(self) -> str:
        """For a step of boxing, from which placement to which its tensors go: `P(sum) to B`."""
        return f"{_shown(self.ins[0].nd)} to {_shown(self.outs[0].nd)}" if self.boxing and self.outs[0] else ""

    @property
    def why(self) -> str:
        """Why the line is there, as programs print it: `P(sum) to B for 7 gradients in one bucket`."""
        return self._for(str(self.cause or ""))

    @property
    def reason(self) -> str:
        """The same without names and counts, what transfers are summed up by: `P(sum) to B for gradients`."""
        return self._for(self.cause.summary if self.cause else "")

    def _for(self, cause: str) -> str:
        return f"{self.change} for {cause}" if cause and self.boxing else cause


_shown = lru_cache(maxsize=1 << 12)(show)


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
        return "x".join(self.mesh.names[a] for a in instr.box.axes)

    def traffic(self) -> ProgramTraffic:
        """What the program moves and holds: the numbers `Plan.explain` prints."""
        rows: dict[tuple[str, str, str], CollectiveRow] = {}
        for i in self.collectives:
            key = (i.kind, self.axis_names(i), i.change)
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
        """Plain data; `from_json` is the inverse."""
        return {
            **self._json([[*_row(i), i.where, i.module] for i in self.instrs]),
            "graph": self.graph_hash,
            "plan": self.plan_hash,
            "hash": self.hash,
        }

    def _json(self, instrs: list[list[Any]]) -> dict[str, Any]:
        return {
            "laminar_program": PROGRAM_VERSION,
            "mesh": self.mesh.to_json(),
            "inputs": [[i.name, i.kind, _written(i.placed)] for i in self.inputs],
            "constants": [c.to_json() for c in self.constants],
            "instrs": instrs,
            "outputs": [[o.name, o.kind, encode(o.ref), _written(o.placed)] for o in self.outputs],
            "offload": self.offload.to_json(),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Program:
        """A program from `to_json`'s data."""
        version = data.get("laminar_program") if isinstance(data, dict) else None
        if version != PROGRAM_VERSION:
            raise PlanError(f"program version {version!r}, this is version {PROGRAM_VERSION}")
        part = JsonPart(data, lambda what: PlanError(f"corrupt program: {what}", next="lower the plan again"))
        mesh = part["mesh"].read(Mesh)
        program = Program(
            mesh,
            tuple(
                ProgramInput(name.text(), kind.text(), _placed(at, mesh))
                for name, kind, at in (row.rows(3) for row in part["inputs"].rows())
            ),
            tuple(row.read(Constant.from_json) for row in part["constants"].rows()),
            tuple(_instr(row.rows(11), mesh) for row in part["instrs"].rows()),
            tuple(
                ProgramOutput(name.text(), kind.text(), ref.read(decode_ref), _placed(at, mesh))
                for name, kind, ref, at in (row.rows(4) for row in part["outputs"].rows())
            ),
            part["graph"].text(),
            part["plan"].text(),
            part["offload"].read(Picked.from_json),
        )
        if part.read(lambda _: program.hash) != part["hash"].text():
            raise part["hash"].wrong("the program is not the one that was written: a program is lowered, not edited")
        return program

    @cached_property
    def hash(self) -> str:
        """Identity of the program; lines and module names do not count."""
        return content_hash({"runs": self.runs_hash, "graph": self.graph_hash, "plan": self.plan_hash})

    @cached_property
    def runs_hash(self) -> str:
        """Identity of what ranks run, whatever graph and plan it was made from."""
        return content_hash(self._json([_row(i) for i in self.instrs]))

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


def _written(p: Placed | None) -> list[str] | None:
    return [str(p.spec), *map(str, p.nd)] if p else None


def _placed(part: JsonPart, mesh: Mesh) -> Placed:
    spec, *nd = (text.text() for text in part.rows(1 + len(mesh.sizes)))
    return part.read(lambda _: placed(TensorSpec.parse(spec), parse_nd(nd)))


def _row(i: Instr) -> list[Any]:
    """What counts of a line for the identity of a program."""
    return [
        i.name,
        i.op,
        encode(i.args),
        [_written(p) for p in i.ins],
        [_written(p) for p in i.outs],
        i.phase,
        [i.cause.what, i.cause.name, i.cause.members] if i.cause else None,
        i.bytes,
        i.boxing.to_json() if i.boxing else None,
    ]


def _instr(row: list[JsonPart], mesh: Mesh) -> Instr:
    name, op, args, ins, outs, phase, cause, nbytes, boxing, where, module = row
    made = tuple(None if p.value is None else _placed(p, mesh) for p in outs.rows())
    found = tuple(a.read(decode) for a in args.rows())
    return Instr(
        name.text(),
        op.text(),
        found,
        tuple(refs_in(found)),
        tuple(_placed(p, mesh) for p in ins.rows()),
        made,
        where.text(),
        module.text(),
        phase.text(),
        None if cause.value is None else _cause(*cause.rows(3)),
        nbytes.whole(),
        None if boxing.value is None else Boxing.from_json(boxing),
    )


def _cause(what: JsonPart, name: JsonPart, members: JsonPart) -> MoveCause:
    return MoveCause(what.text(), name.text(), members.whole(1))
