"""Ops that couple the samples of a batch: in micro-batches they would compute something else.

They are found by splitting the batch over ranks and looking at what has to be exchanged, and are refused by name unless
the caller wants them to see one micro-batch at a time. So are ops in backward that depend on the size of the loss: a
hook that clamps gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from laminar.errors import PlanError
from laminar.ir.graph import Graph, Node
from laminar.ir.mesh import Mesh
from laminar.ir.ops import FREE
from laminar.ir.sbp import B, Partial, Sbp
from laminar.ir.serial.codec import Ref
from laminar.lower.lower import written
from laminar.placement import presets
from laminar.rules.degrees import breaks
from laminar.rules.notation import call_of
from laminar.rules.ops.table import RULES
from laminar.rules.samples import samples_of
from laminar.rules.signing import blocks_in, options, probed_signatures

MEANS = (
    "aten.nll_loss_forward",
    "aten.nll_loss2d_forward",
    "aten.mean",
    "aten.mean.dim",
    "aten.sum",
    "aten.sum.dim_IntList",
    "aten.mse_loss",
    "aten.div.Tensor",
)
"""Sums and means over samples, and a sum over its count, if they are numbers: a step's loss is the mean over its
micro-batches. Where counts differ (ignored labels), `laminar.Loss(total, weight)` is exact."""
LINEAR_ON_MEANS = FREE | {
    "aten.add.Tensor",
    "aten.sub.Tensor",
    "aten.mul.Scalar",
    "aten.div.Scalar",
    "aten.neg",
    "aten._to_copy",
    "aten.clone",
}
"""What may be done to such a mean on its way to the loss."""
BIAS_FREE_PRODUCTS = ("aten.mm", "aten.bmm", "aten.mv")
"""What torch makes of a linear layer whose bias it adds apart."""


class Coupled(NamedTuple):
    """An op that gives something else where a batch is run in parts."""

    op: str
    where: str
    linear: bool = True
    """Not so: its samples may be independent, but what it does in backward depends on the size of the loss."""

    @property
    def said(self) -> str:
        """What is the matter with it."""
        return (
            f"{self.op} couples the samples of a batch"
            if self.linear
            else f"{self.op} in backward is not linear in the gradient of the loss (a hook, or a custom function)"
        )


def coupled_ops(graph: Graph) -> list[Coupled]:
    """Ops that need samples of the whole batch at once, or in backward the size of its loss (`rules/degrees.py`).

    The former are found by splitting the batch over a few ranks: as many as divide it, or dims in which samples and
    something else are merged could not be split. Where forward has none of them, backward has only those of hooks.
    A graph of one sample has nothing to split: the batch that it is a part of is asked, where that is known, else it is
    only seen what normalises over samples by its name.
    """
    if samples_of(graph) < 2:
        graph = graph.notes.get("whole", graph)
    return _mixing(graph) + [Coupled(n.op, n.where, linear=False) for n in breaks(graph)]


def _mixing(graph: Graph) -> list[Coupled]:
    samples = samples_of(graph)
    if samples < 2:
        return [Coupled(n.op, n.where) for n in graph.nodes if n.op == "laminar.batch_norm"]
    ranks = next(n for n in range(2, samples + 1) if samples % n == 0)
    graph = _trained(graph)
    program = written(graph, presets.data_parallel(graph, Mesh({"dp": ranks})))
    phase = {i.name: i.phase for i in program.instrs}
    forward: dict[str, Coupled] = {}
    backward: dict[str, Coupled] = {}
    for instr in program.instrs:
        reader = instr.cause.reader if instr.cause else ""  # an op that is written out has lines like batch_norm_0.2
        node = graph.by_name.get(reader.partition(".")[0])
        if not instr.moves or node is None:
            continue
        if instr.phase == "forward" and not _is_mean(graph, node):
            forward.setdefault(node.name, Coupled(node.op, node.where))
        elif node.phase == "backward" and phase.get(instr.refs[0].name) == "backward":
            lies = instr.ins[0].nd[0]
            if isinstance(lies, Partial):
                mixes = [] if _adds_up(node) else [node]
            else:
                mixes = [] if forward else list(_needing_all(graph, node, instr.refs[0], lies, ranks))
            backward.update({n.name: Coupled(n.op, n.where) for n in mixes})
    return list(forward.values()) or list(backward.values())


def _adds_up(node: Node) -> bool:
    """Whether an op that reads a gradient summed over the batch might as well be done before that sum."""
    return node.op in (*LINEAR_ON_MEANS, "aten.linalg_matrix_exp") or "_backward" in node.op


def _needing_all(graph: Graph, node: Node, ref: Ref, lies: Sbp, ranks: int) -> Iterator[Node]:
    """Ops from `node` on that need all samples of a gradient; of ops without a rule nothing is known.

    A plan may put samples together before they are needed, where that costs the same.
    """
    blocks, probed = blocks_in(graph), probed_signatures(graph)
    todo, seen = [(node, ref, lies)], {node.name}
    while todo:
        here, read, placed = todo.pop()
        if read not in here.ins:  # what an op is written out to
            continue
        at = here.ins.index(read)
        ways = options(call_of(here, graph.specs), ranks, blocks, probed.get(here.name, ()))
        kept = [s.outs for s in ways if s.ins[at] == placed]
        if not kept and here.op in RULES:
            yield here
        for i, out in enumerate(kept[0] if kept else ()):
            users = graph.users.get(Ref(here.name, i), ()) if out != B and not isinstance(out, Partial) else ()
            todo += [(u, Ref(here.name, i), out) for u in users if u.name not in seen]
            seen.update(u.name for u in users)


def _trained(graph: Graph) -> Graph:
    """Without what is made for metrics alone: those of a batch are the means of its parts' (docs/use/train.md)."""
    outputs = tuple(o for o in graph.outputs if o.kind != "metric" or o.name in ("loss_total", "loss_weight"))
    if len(outputs) == len(graph.outputs):
        return graph
    live, nodes = {o.ref.name for o in outputs}, []
    for node in reversed(graph.nodes):
        if node.name in live:
            nodes.append(node)
            live.update(r.name for r in node.ins)
    return replace(graph, outputs=outputs, nodes=tuple(reversed(nodes)))


def _is_mean(graph: Graph, node: Node) -> bool:
    """Whether an op only makes a sum or mean over samples of which the loss is a linear function, or adds to one."""
    if node.op not in (*MEANS, *LINEAR_ON_MEANS) or any(o is not None and o.shape for o in node.outs):
        return False
    todo = [node]
    weights = {o.ref for o in graph.outputs if o.name == "loss_weight"}
    while todo:
        here = todo.pop()
        for i in range(len(here.outs)):
            for user in graph.users.get(Ref(here.name, i), ()):
                if user.phase == "forward":
                    by_weight = user.op == "aten.div.Tensor" and user.args[1] in weights
                    if user.op not in LINEAR_ON_MEANS and not _by_number(user) and not by_weight:
                        return False
                    todo.append(user)
    return True


def _by_number(node: Node) -> bool:
    """Whether an op multiplies or divides something by a number."""
    return node.op in ("aten.mul.Tensor", "aten.div.Tensor") and isinstance(node.args[0], Ref) and len(node.ins) == 1


def refuse_coupled(graph: Graph) -> None:
    """Refuse a graph that would compute something else micro-batch by micro-batch."""
    found = coupled_ops(graph)
    if found:
        raise PlanError(
            f"{found[0].said}, so micro-batches {'would' if found[0].linear else 'may'} give other numbers",
            at=found[0].where,
            also=f"{len(found) - 1} more such ops" if len(found) > 1 else "",
            next='couple="microbatch" if it may see one micro-batch at a time, or micro_batches=1',
        )
