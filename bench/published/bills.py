"""Bills: what one micro-batch asks of a device, part by part, before anything has a price.

A model's block with its embedding and head is captured on the meta device, placed on its tensor-parallel ranks, cut
into three stages and lowered, like any other graph; `cost.schedule` says which task waits for which. A bill keeps that
load with what each task is (a product of such a shape, so many bytes, a collective) in place of its seconds. It hangs
on shapes alone, so it is made once and kept by content in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.published.model import Shape
from laminar.cost.calibrate import Calibration
from laminar.cost.comm.price import collective_bytes
from laminar.cost.machine import Machine
from laminar.cost.ops.families import COMPUTES, family_of, traits_of
from laminar.cost.schedule import ExchangePrice, Price, schedule
from laminar.cost.sim.tasks import Lane, Load, Task
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.program import Instr, Program
from laminar.lower.kernels import kernels
from laminar.lower.lower import written
from laminar.lower.memory.mincut_recompute import recompute as recompute_cheap
from laminar.lower.memory.mincut_recompute import written_out
from laminar.lower.memory.planned_recompute import boundary, early
from laminar.lower.stages.stage_programs import Part, stages
from laminar.rules.notation import Call

VERSION = 1
"""Of what is kept; with the sources of this package and of lowering it is part of every key."""
STAGES = ("embed", "block", "head")
SELECTIVE = ("block.attention.core",)
"""What selective recompute recomputes; one kernel keeps nothing of it anyway."""

Item = tuple[Any, ...]
"""("mm", batch, m, n, k, dtype)  ("attention", backward, batch x heads, queries, keys, width, causal, kv bytes)
("bytes", moved, reduces)  ("move", kind, bytes)  ("launch",)  ("none",)"""


@dataclass(frozen=True)
class Bill:
    """One part of one stage: forward or backward of a micro-batch."""

    lanes: tuple[tuple[int, str], ...]
    tasks: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    """Lanes, what each waits for, links."""
    items: tuple[Item, ...]

    def load(self, works: list[int], drag: Any) -> Load:
        """With seconds in place of items."""
        tasks = tuple(
            Task(str(k), lanes, work, after, links)
            for k, ((lanes, after, links), work) in enumerate(zip(self.tasks, works, strict=True))
        )
        return Load(tuple(Lane(*lane) for lane in self.lanes), tasks, 4, drag)


@dataclass(frozen=True)
class Bills:
    """All parts of a model with one block."""

    parts: dict[str, Bill]
    """`F` or `B` and the stage: `Fblock`, `Bhead`."""
    kept_bytes: dict[str, int]
    """By stage, what forward keeps for backward."""
    sent_bytes: int
    """Of the value between blocks, on one rank."""
    params: dict[str, int]
    """By stage, elements of weights on one rank."""
    tensors: int
    """Tensors of weights in a block."""


class Recorder(Machine):
    """Prices nothing: it writes down what it is asked about, and each line carries the number of its item."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, "", Calibration(), fused=True)
        self.items: list[Item] = []
        self.launch_s = 1e-9

    def _note(self, item: Item) -> str:
        self.items.append(item)
        return str(len(self.items) - 1)

    def op(self, call: Call, marks: tuple[str, ...] = ()) -> Price:
        return Price(0.0, self._note(item_of(call, marks)), 0.0, "")

    def kernel(self, nbytes: int, shape: tuple[int, int, str] | None) -> Price:
        return Price(0.0, self._note(("bytes", nbytes, shape is not None)), 0.0, "")

    def exchange(self, instr: Instr, mesh: Mesh, rank: int, resident: bool) -> ExchangePrice:
        note = self._note(("move", instr.kind, collective_bytes(instr, mesh, rank)))
        return ExchangePrice(0.0, 1.0, 0.0, note, 0.0, "", 0)

    def around(self, program: Program, rank: int) -> tuple[list[tuple[str, Price]], list[tuple[str, Price]]]:
        return [], []


def item_of(call: Call, marks: tuple[str, ...] = ()) -> Item:
    """What a single op asks for."""
    traits = traits_of(call, marks)
    if traits.family == "matmul":
        batch, m, n, k = (round(2**x) for x in traits.geometry)
        return ("mm", batch, m, n, k, traits.dtype)
    if traits.family == "attention":
        back = call.op.endswith("backward")
        q, key = call.ins[int(back)].shape, call.ins[1 + int(back)].shape
        keys = sum(s.nbytes for s in call.ins[1 + int(back) : 3 + int(back)])
        causal = any(a is True for a in call.args)
        return ("attention", back, q[0] * q[1], q[2], key[2], q[3], causal, keys)
    if call.op in FREE or family_of(call.op) == "view":
        return ("none",)
    assert traits.family not in COMPUTES
    return ("bytes", int(traits.nbytes), traits.family in ("rows", "sums"))


def made(shape: Shape, tp: int, *, recompute: str, split_norms: bool, fused: bool, compiled: bool) -> Bills:
    """The bills of a shape on `tp` ranks; kept where they have been made before."""
    return _made(shape, tp, recompute, split_norms and tp > 1, fused, compiled)


@lru_cache(maxsize=4096)
def _made(shape: Shape, tp: int, recompute: str, split_norms: bool, fused: bool, compiled: bool) -> Bills:
    key = json.dumps([VERSION, _sources(), asdict(shape), tp, recompute, split_norms, fused, compiled], sort_keys=True)
    path = _cache() / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".pickle")
    found = _kept(path)
    if found is None:
        found = _make(shape, tp, recompute, split_norms, fused, compiled)
        _keep(path, found)
    return found


def _kept(path: Path) -> Bills | None:
    """What was made before; nothing if it can't be read."""
    try:
        with open(path, "rb") as file:
            found = pickle.load(file)
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
        return None
    return found if isinstance(found, Bills) else None


def _keep(path: Path, made: Bills) -> None:
    """Best effort: where nothing can be written, it is recomputed next time."""
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(pickle.dumps(made))
        part.replace(path)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "laminar" / "published"


@lru_cache(maxsize=1)
def _sources() -> str:
    """Of everything that decides what a bill says."""
    import laminar

    own, root = Path(__file__).parent, Path(laminar.__file__).parent
    files = [own / f"{n}.py" for n in ("bills", "model", "plans")]
    for room in ("capture", "rules", "lower", "placement", "rewrite", "staging", "cost", "ir"):
        files += sorted((root / room).rglob("*.py"))
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


@lru_cache(maxsize=8)
def _graph(shape: Shape) -> Graph:
    import laminar
    from bench.published import model

    made, batch = model.on_meta(shape)
    return laminar.capture(made, model.loss, batch)


def _make(shape: Shape, tp: int, recompute: str, split_norms: bool, fused: bool, compiled: bool) -> Bills:
    from bench.published.plans import tensor_plan
    from laminar.staging.stage_plans import pipeline

    graph = _graph(shape)
    plan = tensor_plan(graph, tp, kv_heads=shape.kv_heads, gated=shape.gated, split_norms=split_norms)
    again = {"none": (), "full": ("block+collectives",), "selective": SELECTIVE if not shape.fused_attention else ()}[
        recompute
    ]
    staged = pipeline(graph, stages=[r"block\b", r"norm$"], microbatches=1, inner=plan, recompute=again)
    low = stages(graph, staged)
    parts: dict[str, Bill] = {}
    kept: dict[str, int] = {}
    params: dict[str, int] = {}
    for s, row in enumerate(low.parts):
        for part in row:
            parts[f"{'F' if part.kind == 'forward' else 'B'}{STAGES[s]}"] = bill_of(part, fused)
        kept[STAGES[s]] = kept_bytes(
            row, written(low.cut.graphs[s], staged.stages[s].plan) if compiled else None, fused
        )
        weights = {
            i.name: i.placed.local(part.program.mesh).numel
            for part in row
            for i in part.program.inputs
            if i.kind == "param"
        }
        params[STAGES[s]] = sum(weights.values())
        if s == 1:
            tensors = len(weights)
    wire = next(w for w in low.wires if w.edge.src == 0 and w.edge.phase == "forward")
    return Bills(parts, kept, wire.dst.local(Mesh({"tp": tp})).nbytes, params, tensors)


def bill_of(part: Part, fused: bool) -> Bill:
    """The load of a part, with items for seconds."""
    program = written_out(part.program)
    recorder = Recorder(
        Cluster.preset("8xh100" if program.mesh.ranks <= 8 else f"{-(-program.mesh.ranks // 8)}x8xh100")
    )
    recorder.fused = fused
    plan = schedule(program, recorder, None, None, tuple(kernels(program)) if fused else None)
    items: list[Item] = []
    for line in plan.lines:
        if line.part == "launch":
            items.append(("launch",))
        elif line.part == "" or line.part == "transfer":
            items.append(recorder.items[int(line.price.source)] if line.price.source.isdigit() else ("none",))
        else:
            items.append(("none",))
    for k in range(len(items) - 1):
        if items[k] == ("launch",) and items[k + 1] == ("none",):
            items[k] = ("none",)  # views are not launched
    tasks = tuple((t.lanes, t.after, tuple(0 for _ in t.links[:1])) for t in plan.load.tasks)
    lanes = tuple((lane.rank, lane.kind) for lane in plan.load.lanes)
    return Bill(lanes, tasks, tuple(items))


def kept_bytes(parts: tuple[Part, ...], whole: Program | None, fused: bool) -> int:
    """What forward keeps for backward on one rank, views of one tensor once; what was gathered is kept as its piece.

    Of a stage that is compiled (`whole` is its program), no more than a compiler keeps that makes cheap ops again.
    Kernels written by hand keep what goes into a gated activation, not what its gate makes of it.
    """
    program = recompute_cheap(written_out(whole)) if whole is not None else None
    forward = parts[0].program if program is None else program
    makers = {i.name: i for i in forward.instrs}
    given = {i.name: i for i in forward.inputs}
    if program is not None:
        refs = set(boundary(program))
        first = early(program)
        later = {r.name for i in program.instrs if i.name not in first for r in i.refs}
    else:
        refs = {out.ref for out in forward.outputs if out.kind == "kept"}
        later = {i.name for p in parts[1:] for i in p.program.inputs}
    held: dict[str, int] = {}
    for ref in refs:
        while ref.name in makers and (makers[ref.name].op in FREE or makers[ref.name].kind == "all_gather"):
            ref = makers[ref.name].refs[0]
        if ref.name in makers:
            placed = makers[ref.name].outs[ref.index]
            if fused and makers[ref.name].op == "aten.silu":
                continue
            held[str(ref)] = placed.local(forward.mesh).nbytes if placed else 0
        else:
            later.add(ref.name)
    ahead = {r.name for i in forward.instrs if i.phase == "forward" for r in i.refs}
    for name in later & ahead & given.keys():
        if given[name].kind == "given":
            held[name] = given[name].placed.local(forward.mesh).nbytes
    return sum(held.values())
