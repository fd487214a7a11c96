"""Tidying a captured graph: dead code dropped, repeats shared, what depends on no input computed now.

Recomputed ops are shared with nothing outside recomputation: merging them with forward would undo
the checkpoint the user asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from laminar.capture.graph.convert import constant_of
from laminar.capture.graph.peephole import peephole
from laminar.capture.ops.torch_ops import caller, constant_tensor, unplain
from laminar.capture.tensor_bytes import as_bytes
from laminar.ir.graph import Constant, Graph, Node, map_refs
from laminar.ir.serial.codec import Dtype, Ref

FOLD_BYTES = 16 << 20
"""Larger results stay computed at run time: a graph should not carry hundreds of megabytes."""


def simplify(graph: Graph) -> Graph:
    """All of it, in the order that helps most."""
    return drop_dead(causal(share(peephole(count_of(fold_constants(drop_dead(graph)))))))


def drop_dead(graph: Graph) -> Graph:
    """Without nodes and constants nobody reads."""
    live = {o.ref.name for o in graph.outputs}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in live:
            kept.append(node)
            live.update(r.name for r in node.ins)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
        constants=tuple(c for c in graph.constants if c.name in live),
        inputs=tuple(i for i in graph.inputs if i.kind != "rng" or i.name in live),
    )


def share(graph: Graph) -> Graph:
    """Equal ops on equal values once."""
    seen: dict[Any, str] = {}
    same: dict[str, str] = {}
    kept = []

    def now(ref: Ref) -> Ref:
        return Ref(same.get(ref.name, ref.name), ref.index)

    for node in graph.nodes:
        args = map_refs(node.args, now)
        key = (node.op, _key(args), node.phase == "recompute")
        if key in seen:
            same[node.name] = seen[key]
        else:
            seen[key] = node.name
            kept.append(replace(node, args=args))
    outputs = tuple(replace(o, ref=now(o.ref)) for o in graph.outputs)
    return replace(graph, nodes=tuple(kept), outputs=outputs)


def _key(args: Any) -> Any:
    """Arguments with 1, 1.0 and True told apart."""
    return tuple(map(_key, args)) if isinstance(args, tuple) else (type(args).__name__, args)


def fold_constants(graph: Graph) -> Graph:
    """Subgraphs that depend on no input become constants, or a `full` if all their elements are equal."""
    values: dict[Ref, torch.Tensor] = {Ref(c.name): constant_tensor(c) for c in graph.constants}
    known: set[str] = {c.name for c in graph.constants}
    nodes: list[Node] = []
    constants = {c.name: c for c in graph.constants}
    for node in graph.nodes:
        small = all(o is None or o.nbytes <= FOLD_BYTES for o in node.outs)
        if not node.op.startswith("aten.") or not small or any(r.name not in known for r in node.ins):
            nodes.append(node)
            continue
        out = caller(node.op)(*[unplain(map_refs(a, values.__getitem__)) for a in node.args])
        known.add(node.name)
        results = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        values.update({Ref(node.name, i): t for i, t in enumerate(results)})
        nodes.append(node)
    needed = {r for n in nodes if n.name not in known for r in n.ins} | {o.ref for o in graph.outputs}
    fixed: dict[Ref, Ref] = {}
    made: list[Node] = []
    for node in nodes:
        if node.name not in known:
            made.append(replace(node, args=map_refs(node.args, lambda r: fixed.get(r, r))))
            continue
        for i, spec in enumerate(node.outs):
            ref = Ref(node.name, i)
            if spec is None or ref not in needed:
                continue
            value = values[ref]
            first = value.reshape(-1)[:1]
            if value.numel() and not value.is_complex() and _all_alike(value):
                name = f"{node.name}_full{i}"
                fill = first.item()
                args = (spec.shape, fill, Dtype(spec.dtype), None, None, None)
                made.append(replace(node, name=name, op="aten.full", args=args, outs=(spec,)))
            else:
                name = f"{node.name}_const{i}"
                once = value[tuple(slice(0, 1) if s == 0 else slice(None) for s in value.stride())]
                constants[name] = constant_of(name, once)
                if once.shape != value.shape:  # what was expanded is carried once, and expanded again
                    source, name = Ref(name), f"{node.name}_expand{i}"
                    wide = (source, spec.shape, False)
                    made.append(replace(node, name=name, op="aten.expand", args=wide, outs=(spec,)))
            fixed[ref] = Ref(name)
    outputs = tuple(replace(o, ref=fixed.get(o.ref, o.ref)) for o in graph.outputs)
    return replace(graph, nodes=tuple(made), constants=tuple(constants.values()), outputs=outputs)


def _all_alike(value: torch.Tensor) -> bool:
    """Whether all elements have the same bits: zeros of both signs differ, and some dtypes can't be compared."""
    rows = as_bytes(value).view(value.numel(), -1)
    return bool((rows == rows[:1]).all())


def count_of(graph: Graph) -> Graph:
    """Indexing by counting, `x[arange(n)[:, None], arange(m)]`, is a view: no sample then reads another's row.

    Such a view only adds dims of size 1, so it is one however its tensor lies in memory.
    """
    constants = {c.name: c for c in graph.constants}
    zeros = {
        n.name for n in graph.nodes if n.op == "aten.full" and n.args[1] == 0 and n.outs[0] and n.outs[0].numel == 1
    }

    def stretch(index: Any, size: int) -> int | None:
        """From which dim, counted from the last, the index runs through 0, 1, ..., size - 1; 0 if there is one only."""
        if not isinstance(index, Ref) or (index.name not in constants and index.name not in zeros):
            return None
        if index.name in zeros:
            return 0 if size == 1 else None
        value = constant_tensor(constants[index.name])
        if (
            value.dtype != torch.int64
            or value.numel() != size
            or not torch.equal(value.reshape(-1), torch.arange(size))
        ):
            return None
        return next((value.ndim - d for d, n in enumerate(value.shape) if n > 1), 0)

    nodes = []
    for node in graph.nodes:
        spec = node.outs[0] if node.outs else None
        if node.op == "aten.index.Tensor" and spec is not None:
            shape, indices = graph.specs[node.args[0]].shape, node.args[1]
            found = [stretch(i, n) for i, n in zip(indices, shape, strict=False)]
            moving = [f for f in found if f]
            if len(indices) == len(shape) and None not in found and moving == sorted(set(moving), reverse=True):
                node = replace(node, op="aten.view", args=(node.args[0], spec.shape))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def causal(graph: Graph) -> Graph:
    """A constant lower-triangular mask given to attention is what `causal` means."""
    constants = {c.name: c for c in graph.constants}
    views = {
        n.name: n for n in graph.nodes if n.op in ("aten.expand", "aten.view", "aten.unsqueeze", "aten.slice.Tensor")
    }

    def constant_behind(ref: Any) -> Constant | None:
        while isinstance(ref, Ref) and ref.name in views:
            ref = views[ref.name].args[0]
        return constants.get(ref.name) if isinstance(ref, Ref) else None

    nodes = []
    for node in graph.nodes:
        if node.op in ("laminar.attention", "laminar.attention_backward"):
            at = 3 if node.op == "laminar.attention" else 4
            mask = constant_behind(node.args[at])
            if mask is not None and not node.args[at + 1 if at == 3 else 7] and _lower_triangular(mask):
                args = list(node.args)
                args[at] = None
                args[4 if at == 3 else 7] = True
                node = replace(node, args=tuple(args))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _lower_triangular(mask: Constant) -> bool:
    shape = mask.spec.shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return False
    t = constant_tensor(mask)
    keep = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if t.dtype == torch.bool:
        return bool((t == keep).all())
    if not t.is_floating_point():
        return False
    return bool((t[..., keep] == 0).all()) and bool((t[..., ~keep] <= torch.finfo(t.dtype).min).all())
