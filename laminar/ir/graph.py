"""The logical computation: forward, loss and backward of one step, for one imaginary device.

A graph is device-neutral, carries its constants, and knows nothing of meshes. Ops are named as in
ATen (`aten.mm`, `aten.add.Tensor`), canonical ones as `laminar.attention`; arguments are positional
in schema order, tensors are `Ref`s. `check` is the grammar, and runs whenever a graph is built.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from laminar.errors import GraphError
from laminar.ir.codec import Dtype, Ref, content_hash, decode, encode
from laminar.ir.tensor import TensorSpec

INPUT_KINDS = ("param", "buffer", "batch", "rng", "scale", "given")
RNG, SCALE = "laminar.rng", "laminar.scale"
"""Names of the inputs that the step itself brings; a model may well have a parameter called scale."""
"""`given`: made by another stage."""
OUTPUT_KINDS = ("loss", "metric", "grad", "buffer", "sent")
"""`sent`: read by another stage."""
PHASES = ("forward", "backward", "recompute")
VERSION = 1


def refs_in(args: Any) -> Iterator[Ref]:
    """Every reference in nested arguments, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for item in args:
            yield from refs_in(item)


def map_refs(args: Any, f: Any) -> Any:
    """Arguments with every reference replaced by `f(ref)`."""
    if isinstance(args, Ref):
        return f(args)
    if isinstance(args, (tuple, list)):
        return tuple(map_refs(item, f) for item in args)
    return args


@dataclass(frozen=True, slots=True)
class Node:
    """One op: what it reads, what it makes, and whose line it is."""

    name: str
    op: str
    args: tuple[Any, ...]
    outs: tuple[TensorSpec | None, ...]
    where: str = ""
    """The user's line, `model.py:41  self.up(x)`; for a backward op, that of its forward op."""
    module: str = ""
    phase: str = "forward"
    ins: tuple[Ref, ...] = field(init=False, compare=False, repr=False)
    """Tensors read, in order of appearance."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ins", tuple(refs_in(self.args)))

    def __str__(self) -> str:
        outs = ", ".join(str(o) if o else "-" for o in self.outs)
        args = ", ".join(_show(a) for a in self.args)
        return f"%{self.name}: {outs} = {self.op}({args})"


def _show(arg: Any) -> str:
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(_show, arg)) + "]"
    return str(arg)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that comes from outside: a parameter, a buffer, a leaf of the batch, or the RNG key."""

    name: str
    kind: str
    spec: TensorSpec
    trainable: bool = False
    aliases: tuple[str, ...] = ()
    """Other names of the same (tied) tensor."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor the graph carries."""

    name: str
    spec: TensorSpec
    data: bytes = field(repr=False)

    def to_json(self) -> list[str]:
        """Name, spec, and the bytes, compressed."""
        return [self.name, str(self.spec), base64.b64encode(zlib.compress(self.data, 6)).decode()]


@dataclass(frozen=True, slots=True)
class Output:
    """What a step gives back: the loss, a gradient (named by its parameter), a new buffer value."""

    name: str
    kind: str
    ref: Ref


@dataclass(frozen=True)
class Graph:
    """One step of training as data."""

    inputs: tuple[Input, ...]
    constants: tuple[Constant, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    batch_tree: str = "null"
    """Structure of the batch as JSON: leaves are input names."""
    probed: tuple[tuple[str, Any], ...] = ()
    """Signatures found by probing, for ops that have no rule: (node name, list of (ins, outs) texts)."""

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def specs(self) -> dict[Ref, TensorSpec]:
        """The spec of every value."""
        out = {Ref(i.name): i.spec for i in self.inputs} | {Ref(c.name): c.spec for c in self.constants}
        for node in self.nodes:
            for index, spec in enumerate(node.outs):
                if spec is not None:
                    out[Ref(node.name, index)] = spec
        return out

    @cached_property
    def users(self) -> dict[Ref, list[Node]]:
        """Who reads each value, in order."""
        out: dict[Ref, list[Node]] = {}
        for node in self.nodes:
            for ref in dict.fromkeys(node.ins):
                out.setdefault(ref, []).append(node)
        return out

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    def input(self, name: str) -> Input:
        """An input by name."""
        for item in self.inputs:
            if item.name == name:
                return item
        raise KeyError(name)

    def of_kind(self, kind: str) -> tuple[Input, ...]:
        """Inputs of one kind."""
        return tuple(i for i in self.inputs if i.kind == kind)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return {
            "laminar_graph": VERSION,
            "inputs": [[i.name, i.kind, str(i.spec), i.trainable, list(i.aliases)] for i in self.inputs],
            "constants": [c.to_json() for c in self.constants],
            "nodes": [
                [n.name, n.op, encode(n.args), [str(o) if o else None for o in n.outs], n.where, n.module, n.phase]
                for n in self.nodes
            ],
            "outputs": [[o.name, o.kind, encode(o.ref)] for o in self.outputs],
            "batch_tree": self.batch_tree,
            "probed": [[name, sigs] for name, sigs in self.probed],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Graph:
        """A graph from `to_json`'s data."""
        if data.get("laminar_graph") != VERSION:
            raise GraphError(f"graph version {data.get('laminar_graph')!r}, this is version {VERSION}")
        return Graph(
            inputs=tuple(Input(n, k, TensorSpec.parse(s), t, tuple(a)) for n, k, s, t, a in data["inputs"]),
            constants=tuple(
                Constant(n, TensorSpec.parse(s), zlib.decompress(base64.b64decode(d))) for n, s, d in data["constants"]
            ),
            nodes=tuple(
                Node(n, op, decode(args), tuple(TensorSpec.parse(o) if o else None for o in outs), where, module, phase)
                for n, op, args, outs, where, module, phase in data["nodes"]
            ),
            outputs=tuple(Output(n, k, decode(r)) for n, k, r in data["outputs"]),
            batch_tree=data["batch_tree"],
            probed=tuple((name, sigs) for name, sigs in data["probed"]),
        )

    @cached_property
    def hash(self) -> str:
        """Identity of the computation: lines and module names do not count."""
        data = self.to_json()
        data["nodes"] = [n[:4] + n[6:] for n in data["nodes"]]
        return content_hash(data)

    def __str__(self) -> str:
        lines = [f"input  {i.kind:6} %{i.name}: {i.spec}" for i in self.inputs]
        lines += [f"const  %{c.name}: {c.spec}" for c in self.constants]
        lines += [f"{n.phase[0]} {n}    # {n.where}" if n.where else f"{n.phase[0]} {n}" for n in self.nodes]
        lines += [f"output {o.kind:6} {o.name} = {o.ref}" for o in self.outputs]
        return "\n".join(lines)


def widen(graph: Graph) -> Graph:
    """The same graph in float64: every floating dtype, in specs, casts and constants' specs.

    Verification needs it because `.double()` on a model leaves float32 casts inside the graph.
    Constants keep their bytes, with the spec they were written in: the runtime casts them.
    """

    def spec(s: TensorSpec) -> TensorSpec:
        return TensorSpec(s.shape, "f64") if s.is_float else s

    def arg(a: Any) -> Any:
        if isinstance(a, Dtype):
            return Dtype("f64") if TensorSpec((), a.name).is_float else a
        return tuple(map(arg, a)) if isinstance(a, tuple) else a

    return replace(
        graph,
        inputs=tuple(replace(i, spec=spec(i.spec)) for i in graph.inputs),
        nodes=tuple(
            replace(n, args=arg(n.args), outs=tuple(spec(o) if o else None for o in n.outs)) for n in graph.nodes
        ),
    )


def check(graph: Graph) -> None:
    """The grammar: names unique, every value made before it is read, kinds and phases known."""

    def fail(what: str, **lines: str) -> None:
        raise GraphError(what, **lines)

    made: set[Ref] = set()
    names: set[str] = set()
    for name in [*(i.name for i in graph.inputs), *(c.name for c in graph.constants)]:
        if name in names:
            fail(f"two inputs or constants are called %{name}")
        names.add(name)
        made.add(Ref(name))
    for i in graph.inputs:
        if i.kind not in INPUT_KINDS:
            fail(f"%{i.name} is of unknown kind {i.kind!r}", allowed="  ".join(INPUT_KINDS))
        if i.trainable and (i.kind != "param" or not i.spec.is_float):
            fail(f"%{i.name} ({i.kind}, {i.spec}) can't be trainable", allowed="floating parameters")
    for c in graph.constants:
        if len(c.data) != c.spec.nbytes:
            fail(f"constant %{c.name} {c.spec} holds {len(c.data)} bytes, not {c.spec.nbytes}")
    for node in graph.nodes:
        if node.name in names:
            fail(f"two values are called %{node.name}")
        if node.phase not in PHASES:
            fail(f"%{node.name} is in unknown phase {node.phase!r}", allowed="  ".join(PHASES))
        if not node.outs or all(o is None for o in node.outs):
            fail(f"%{node.name} = {node.op} makes nothing")
        if node.op.count(".") < 1:
            fail(f"%{node.name}: {node.op!r} is not an op name", allowed="namespace.name or namespace.name.overload")
        for ref in node.ins:
            if ref not in made:
                fail(f"%{node.name} reads {ref}, which nothing before it makes", at=node.where)
        names.add(node.name)
        made.update(Ref(node.name, i) for i, o in enumerate(node.outs) if o is not None)
    seen = set()
    params = {i.name: i for i in graph.inputs}
    specs = graph.specs
    for out in graph.outputs:
        if out.kind not in OUTPUT_KINDS:
            fail(f"output {out.name} is of unknown kind {out.kind!r}", allowed="  ".join(OUTPUT_KINDS))
        if (out.kind, out.name) in seen:
            fail(f"two outputs are called {out.kind} {out.name}")
        seen.add((out.kind, out.name))
        if out.ref not in made:
            fail(f"output {out.name} is {out.ref}, which nothing makes")
        if out.kind in ("grad", "buffer"):
            if out.name not in params:
                fail(f"{out.kind} {out.name} belongs to no input")
            if specs[out.ref].shape != params[out.name].spec.shape:
                fail(f"{out.kind} {out.name} is {specs[out.ref]}, its input {params[out.name].spec}")
        if out.kind == "loss" and specs[out.ref].shape != ():
            fail(f"the loss is {specs[out.ref]}, not a scalar")
