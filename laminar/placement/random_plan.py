"""Random plans: every op gets a signature drawn from all that are legal, on every axis.

Nothing about them is sensible, which is the point: they reach placements no preset would, and a
program must compute the same numbers under all of them.
"""

from __future__ import annotations

import random

from laminar.ir.graph import Graph
from laminar.ir.mesh import Mesh
from laminar.ir.plans.plan import Choice, Plan
from laminar.ir.sbp import B, NdSbp, Partial, Sbp, Split, chunk, split_size
from laminar.ir.tensor import TensorSpec
from laminar.rules.notation import Signature, call_of, localise
from laminar.rules.signing import blocks_in, options, probed_signatures


def random_plan(graph: Graph, mesh: Mesh, seed: int) -> Plan:
    """A legal plan drawn by `seed`; the same seed gives the same plan."""
    rng = random.Random(seed)
    blocks = blocks_in(graph)
    probed = probed_signatures(graph)
    ops = {}
    for node in graph.nodes:
        call = call_of(node, graph.specs)
        chosen: list[Signature] = []
        for parts in mesh.sizes:
            found = [s for s in options(call, parts, blocks, probed.get(node.name, ())) if _one_kind(s, chosen)]
            # Replicated ops teach nothing, so they are drawn less often than the rest.
            pick = rng.choice(found[1:]) if len(found) > 1 and rng.random() < 0.85 else found[0]
            chosen.append(pick)
            call = localise(call, pick, parts)
        ops[node.name] = Choice(
            tuple(tuple(s.ins[i] for s in chosen) for i in range(len(call.ins))),
            tuple(tuple(s.outs[i] for s in chosen) for i in range(len(call.outs))),
        )
    inputs = {i.name: _placement(i.spec, mesh, rng) for i in graph.inputs}
    outputs = {f"{o.kind}:{o.name}": _placement(graph.specs[o.ref], mesh, rng) for o in graph.outputs}
    for o in graph.outputs:
        if o.kind == "buffer":
            outputs[f"buffer:{o.name}"] = inputs[o.name]
    return Plan(mesh, graph.hash, ops, inputs, outputs, name=f"random {seed}")


def _one_kind(signature: Signature, before: list[Signature]) -> bool:
    """Kinds of partial must not mix on one tensor."""
    for side in ("ins", "outs"):
        for i, p in enumerate(getattr(signature, side)):
            if isinstance(p, Partial) and any(
                isinstance(q := getattr(s, side)[i], Partial) and q.op != p.op for s in before
            ):
                return False
    return True


def _placement(spec: TensorSpec, mesh: Mesh, rng: random.Random) -> NdSbp:
    """How an input is stored or an output wanted: split on a random dim, or whole."""
    shape = list(spec.shape)
    out: list[Sbp] = []
    for parts in mesh.sizes:
        dims = [d for d, n in enumerate(shape) if chunk(n, parts, parts - 1)[1] > 0]
        pick: Sbp = Split(rng.choice(dims)) if dims and rng.random() < 0.6 else B
        if isinstance(pick, Split):
            shape[pick.dim] = split_size(shape[pick.dim], pick, parts, 0)
        out.append(pick)
    return tuple(out)
