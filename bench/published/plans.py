"""Tensor parallelism as the published systems do it, as pins for completion.

Products are cut by column, then by row; the embedding and the head by vocabulary; the residual stream is whole on
every rank, or split by token where a stack splits its norms ("sequence parallel").
"""

from __future__ import annotations

from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.plans.plan import Plan
from laminar.ir.sbp import B, Split
from laminar.ir.serial.codec import Ref
from laminar.placement.complete import Pins, completed
from laminar.placement.presets import PRODUCTS, residual_stream

BLOCKS = {"qkv": 3, "kv": 2}
"""Packed projections: how many tensors lie in one, each of them cut."""


def tensor_plan(graph: Graph, tp: int, *, kv_heads: int, gated: bool, split_norms: bool) -> Plan:
    """One block, its embedding and its head on `tp` ranks."""
    pins = Pins(stored_byte_s=1e-9)
    mesh = Mesh({"tp": tp})
    if tp == 1:
        return completed(graph, mesh, [pins], "published")
    pins.spread = {n.name for n in graph.nodes if n.op in PRODUCTS}
    for item in graph.inputs:
        pins.inputs[item.name] = B
        if item.kind != "param":
            continue
        layer, _, last = item.name.rpartition(".")
        layer = layer.rpartition(".")[2]
        blocks = 2 if layer == "up" and gated else BLOCKS.get(layer, 1)
        if layer in ("qkv", "q", "up") or (layer == "kv" and kv_heads % tp == 0):
            pins.inputs[item.name] = Split(0, blocks)
        elif layer in ("out", "down") and last == "weight":
            pins.inputs[item.name] = Split(1)
        elif layer in ("embed", "head"):
            pins.inputs[item.name] = Split(0)
    # Weights are read in shards, and norms follow the residual stream: completion is not to find something better.
    pins.split = matrices(graph, {n for n, p in pins.inputs.items() if isinstance(p, Split)})
    along = Split(1) if split_norms else B
    for ref in residual_stream(graph) | norms(graph):
        pins.values[ref] = along
        if not split_norms:
            pins.read[ref] = B
    return completed(graph, mesh, [pins], "published")


def matrices(graph: Graph, names: set[str]) -> set[Ref]:
    """The matrices among some parameters, also turned or cast."""
    found = {i.name for i in graph.inputs if i.name in names and len(i.spec.shape) > 1}
    for node in graph.nodes:
        if len(node.ins) == 1 and node.ins[0].name in found and (node.op in FREE or node.op == "aten._to_copy"):
            found.add(node.name)
    return {ref for ref in graph.specs if ref.name in found}


def norms(graph: Graph) -> set[Ref]:
    """What norms and dropout of the stream make that has a place for every token, in forward and in backward."""
    inside = [n for n in graph.nodes if n.module.rpartition(".")[2] in ("norm", "norm1", "norm2", "block", "")]
    return {Ref(n.name, k) for n in inside for k, o in enumerate(n.outs) if o is not None and len(o.shape) == 3}
