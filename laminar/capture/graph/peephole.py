"""Small rewrites that remove what tracing leaves behind: copies of copies, views of views, turns there and back.

In a graph without mutation a clone is its input, and only the last of several reshapes matters. Each
rewrite looks at a node and the makers of what it reads; one pass in order sees chains of any length.
"""

from __future__ import annotations

from dataclasses import replace

from laminar.ir.graph import Graph, Node, map_refs
from laminar.ir.ops import RESHAPES
from laminar.ir.serial.codec import Ref
from laminar.ir.tensor import TensorSpec


def peephole(graph: Graph) -> Graph:
    """The same computation with fewer nodes; what became unused is left for dead-code removal."""
    same: dict[Ref, Ref] = {}
    made: dict[str, Node] = {}
    specs = graph.specs
    for node in graph.nodes:
        node = replace(node, args=map_refs(node.args, lambda r: same.get(r, r)))
        source = node.ins[0] if len(node.ins) == 1 else None
        if source is not None and len(node.outs) == 1:
            before = made.get(source.name)
            found = _rewrite(node, source, specs, before)
            if isinstance(found, Ref):
                same[Ref(node.name)] = found
                continue
            node = found
        made[node.name] = node
    outputs = tuple(replace(o, ref=same.get(o.ref, o.ref)) for o in graph.outputs)
    return replace(graph, nodes=tuple(made.values()), outputs=outputs)


def _rewrite(node: Node, source: Ref, specs: dict[Ref, TensorSpec], before: Node | None) -> Node | Ref:
    """A simpler node, or the value it is equal to."""
    out, spec = node.outs[0], specs[source]
    assert out is not None
    if node.op == "aten.clone" or (node.op in ("aten._to_copy", "aten.expand") and out == spec):
        return source
    if node.op in RESHAPES:
        if out.shape == spec.shape:
            return source
        if before is not None and before.op in RESHAPES and before.phase == node.phase:
            (source,) = before.ins
            return (
                source if specs[source].shape == out.shape else replace(node, op="aten.view", args=(source, out.shape))
            )
        if before is not None and before.op == "aten.sum.dim_IntList" and before.args[2] and before.phase == node.phase:
            kept = tuple(n for d, n in enumerate(spec.shape) if d not in {a % len(spec.shape) for a in before.args[1]})
            if kept == out.shape and before.args[1]:
                args = (before.args[0], before.args[1], False, *before.args[3:])
                return replace(node, op=before.op, args=args)
        return replace(node, op="aten.view", args=(source, out.shape))
    turned = before is not None and before.op == node.op
    if turned and before is not None and node.op == "aten.t":
        return before.ins[0]
    if turned and before is not None and node.op == "aten.transpose.int":
        rank = len(spec.shape)
        if {d % rank for d in node.args[1:]} == {d % rank for d in before.args[1:]}:
            return before.ins[0]
    return node
