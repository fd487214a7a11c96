"""The logical computation: forward, loss and backward of one step, for one imaginary device.

A graph is device-neutral, carries its constants, and knows nothing of meshes. Ops are named as in
ATen (`aten.mm`, `aten.add.Tensor`), canonical ones as `laminar.attention`; arguments are positional
in schema order, tensors are `Ref`s. `check_graph` is the grammar, and runs whenever a graph is built.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from laminar.errors import GraphError
from laminar.ir.serial.codec import Dtype, Ref, canonical, decode, decode_ref, encode
from laminar.ir.serial.reading import JsonPart
from laminar.ir.tensor import TensorSpec

INPUT_KINDS = ("param", "buffer", "batch", "rng", "scale", "given")
RNG, SCALE = "laminar.rng", "laminar.scale"
"""Names of the inputs that the step itself brings; a model may well have a parameter called scale."""
"""`given`: made by another stage."""
OUTPUT_KINDS = ("loss", "metric", "grad", "buffer", "sent")
"""`sent`: read by another stage."""
PHASES = ("forward", "backward", "recompute")
GRAPH_VERSION = 1


def refs_in(args: Any) -> Iterator[Ref]:
    """Every reference in nested arguments, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for item in args:
            yield from refs_in(item)


def _collect(args: Any, found: list[Ref]) -> None:
    """The same, into a list."""
    for item in args:
        if isinstance(item, Ref):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            _collect(item, found)


def map_refs(args: Any, f: Any) -> Any:
    """Arguments with every reference replaced by `f(ref)`."""
    if isinstance(args, Ref):
        return f(args)
    if isinstance(args, (tuple, list)):
        return tuple([map_refs(item, f) for item in args])
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
    _text: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        found: list[Ref] = []
        _collect(self.args, found)
        object.__setattr__(self, "ins", tuple(found))

    @property
    def text(self) -> str:
        """What counts of it for the identity of a graph, as canonical JSON; graphs of one model share most nodes."""
        text = getattr(self, "_text", "")  # what an earlier version pickled has none
        if not text:
            outs = [str(o) if o else None for o in self.outs]
            text = canonical([self.name, self.op, encode(self.args), outs, self.phase])
            object.__setattr__(self, "_text", text)
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.name, self.op, self.args, self.outs, self.where, self.module, self.phase)

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

    @staticmethod
    def from_json(row: Any) -> Constant:
        """The inverse."""
        name, spec, data = row
        try:
            return Constant(_str(name), TensorSpec.parse(_str(spec)), zlib.decompress(base64.b64decode(data)))
        except zlib.error as error:
            raise ValueError(f"constant {name!r} has other bytes: {error}") from error


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
        check_graph(self)

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
    def notes(self) -> dict[str, Any]:
        """What others have worked out about it, by name, and want to keep as long as there is the graph."""
        return {}

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
        nodes: list[Any] = [
            [n.name, n.op, encode(n.args), [str(o) if o else None for o in n.outs], n.where, n.module, n.phase]
            for n in self.nodes
        ]
        return {**self._json(nodes), "hash": self.hash}

    def _json(self, nodes: list[Any]) -> dict[str, Any]:
        return {
            "laminar_graph": GRAPH_VERSION,
            "inputs": [[i.name, i.kind, str(i.spec), i.trainable, list(i.aliases)] for i in self.inputs],
            "constants": [c.to_json() for c in self.constants],
            "nodes": nodes,
            "outputs": [[o.name, o.kind, encode(o.ref)] for o in self.outputs],
            "batch_tree": self.batch_tree,
            "probed": [[name, sigs] for name, sigs in self.probed],
        }

    @staticmethod
    def from_json(data: dict[str, Any], sealed: bool = True) -> Graph:
        """A graph from `to_json`'s data, with its hash unless it is not `sealed` by one."""
        version = data.get("laminar_graph") if isinstance(data, dict) else None
        if version != GRAPH_VERSION:
            raise GraphError(f"graph version {version!r}, this is version {GRAPH_VERSION}")
        part = JsonPart(data, lambda what: GraphError(f"corrupt graph: {what}", next="capture the model again"))
        fields: dict[str, Any] = {
            "inputs": tuple(row.read(_input) for row in part["inputs"].rows()),
            "constants": tuple(row.read(Constant.from_json) for row in part["constants"].rows()),
            "nodes": tuple(row.read(_node) for row in part["nodes"].rows()),
            "outputs": tuple(row.read(_output) for row in part["outputs"].rows()),
            "batch_tree": part["batch_tree"].text(),
            "probed": tuple(row.read(lambda r: (_str(r[0]), r[1])) for row in part["probed"].rows()),
        }
        graph = part.read(lambda _: Graph(**fields))
        if sealed and part.read(lambda _: graph.hash) != part["hash"].text():
            raise part["hash"].wrong("the graph is not the one that was written: a graph is captured, not edited")
        return graph

    @cached_property
    def hash(self) -> str:
        """Identity of the computation: lines and module names do not count."""
        before, behind = canonical(self._json([])).split('"nodes":[]', 1)
        nodes = ",".join([n.text for n in self.nodes])
        return hashlib.sha256(f'{before}"nodes":[{nodes}]{behind}'.encode()).hexdigest()

    def __str__(self) -> str:
        lines = [f"input  {i.kind:6} %{i.name}: {i.spec}" for i in self.inputs]
        lines += [f"const  %{c.name}: {c.spec}" for c in self.constants]
        lines += [f"{n.phase[0]} {n}    # {n.where}" if n.where else f"{n.phase[0]} {n}" for n in self.nodes]
        lines += [f"output {o.kind:6} {o.name} = {o.ref}" for o in self.outputs]
        return "\n".join(lines)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _input(row: Any) -> Input:
    name, kind, spec, trainable, aliases = row
    if not isinstance(trainable, bool) or not isinstance(aliases, list):
        raise TypeError(f"input {name!r} is not one")
    return Input(_str(name), _str(kind), TensorSpec.parse(_str(spec)), trainable, tuple(map(_str, aliases)))


def _output(row: Any) -> Output:
    name, kind, ref = row
    return Output(_str(name), _str(kind), decode_ref(ref))


def _node(row: Any) -> Node:
    name, op, args, outs, where, module, phase = row
    specs = tuple(TensorSpec.parse(_str(o)) if o else None for o in outs)
    return Node(_str(name), _str(op), decode(args), specs, _str(where), _str(module), _str(phase))


def widen(graph: Graph) -> Graph:
    """The same graph in float64: every floating and complex dtype, in specs, casts and constants' specs.

    Verification needs it because `.double()` on a model leaves float32 casts inside the graph.
    Constants keep their bytes, with the spec they were written in: the runtime casts them.
    """

    def spec(s: TensorSpec) -> TensorSpec:
        return TensorSpec(s.shape, "f64" if s.is_float else "c128") if s.has_gradient else s

    def arg(a: Any) -> Any:
        if isinstance(a, Dtype):
            return Dtype(spec(TensorSpec((), a.name)).dtype)
        return tuple(map(arg, a)) if isinstance(a, tuple) else a

    return replace(
        graph,
        inputs=tuple(replace(i, spec=spec(i.spec)) for i in graph.inputs),
        nodes=tuple(
            replace(n, args=arg(n.args), outs=tuple(spec(o) if o else None for o in n.outs)) for n in graph.nodes
        ),
    )


def check_graph(graph: Graph) -> None:
    """The grammar: names unique, every value made before it is read, kinds and phases known."""

    def fail(what: str, **lines: str) -> None:
        raise GraphError(what, **lines)

    made: dict[str, tuple[TensorSpec | None, ...]] = {}
    given = [(i.name, i.spec) for i in graph.inputs] + [(c.name, c.spec) for c in graph.constants]
    for name, spec in given:
        if name in made:
            fail(f"two inputs or constants are called %{name}")
        made[name] = (spec,)

    def there(ref: Ref) -> bool:
        outs = made.get(ref.name, ())
        return ref.index < len(outs) and outs[ref.index] is not None

    for i in graph.inputs:
        if i.kind not in INPUT_KINDS:
            fail(f"%{i.name} is of unknown kind {i.kind!r}", allowed="  ".join(INPUT_KINDS))
        if i.trainable and (i.kind != "param" or not i.spec.has_gradient):
            fail(f"%{i.name} ({i.kind}, {i.spec}) can't be trainable", allowed="floating and complex parameters")
    for c in graph.constants:
        if len(c.data) != c.spec.nbytes:
            fail(f"constant %{c.name} {c.spec} holds {len(c.data)} bytes, not {c.spec.nbytes}")
    for node in graph.nodes:
        if node.name in made:
            fail(f"two values are called %{node.name}")
        if node.phase not in PHASES:
            fail(f"%{node.name} is in unknown phase {node.phase!r}", allowed="  ".join(PHASES))
        if not node.outs or all(o is None for o in node.outs):
            fail(f"%{node.name} = {node.op} makes nothing")
        if node.op.count(".") < 1:
            fail(f"%{node.name}: {node.op!r} is not an op name", allowed="namespace.name or namespace.name.overload")
        for ref in node.ins:
            if not there(ref):
                fail(f"%{node.name} reads {ref}, which nothing before it makes", at=node.where)
        made[node.name] = node.outs
    seen = set()
    params = {i.name: i for i in graph.inputs}
    specs = graph.specs
    for out in graph.outputs:
        if out.kind not in OUTPUT_KINDS:
            fail(f"output {out.name} is of unknown kind {out.kind!r}", allowed="  ".join(OUTPUT_KINDS))
        if (out.kind, out.name) in seen:
            fail(f"two outputs are called {out.kind} {out.name}")
        seen.add((out.kind, out.name))
        if not there(out.ref):
            fail(f"output {out.name} is {out.ref}, which nothing makes")
        if out.kind in ("grad", "buffer"):
            if out.name not in params:
                fail(f"{out.kind} {out.name} belongs to no input")
            if specs[out.ref].shape != params[out.name].spec.shape:
                fail(f"{out.kind} {out.name} is {specs[out.ref]}, its input {params[out.name].spec}")
        if out.kind == "loss" and specs[out.ref].shape != ():
            fail(f"the loss is {specs[out.ref]}, not a scalar")
