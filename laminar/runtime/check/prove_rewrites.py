"""Proof of a rewrite by trial: both graphs run on the same random numbers, every result compared.

Two polynomials that agree on random points agree, and floating ops are near enough to that: a rule that is wrong
gives other numbers on almost any input. In float64 every floating dtype of both graphs is widened, so that what is
left is rounding, about 1e-15 of the largest element. Results in the graph's own dtypes (`dtype=""`) are for rules
that promise the same bits. Losses, gradients and buffers are all results of the joint graph, so gradients are proved
with the rest.

What it does not show: that a rule is right for shapes and dtypes nobody tried. So it runs on the very graphs that are
rewritten, not on samples of them. For a plan that a search has found (`proof`) that is the model with three layers and
one sample, where a processor can run it in a moment; of a model that is too large for that, every rule used is run on
small tensors of odd sizes, standing alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from laminar.capture.ops.torch_ops import DTYPES
from laminar.errors import GraphError, LaminarError
from laminar.ir.graph import RNG, Graph, Input, widen
from laminar.ir.plans.plan import Plan
from laminar.ir.plans.staged import Staged
from laminar.ir.serial.codec import Ref
from laminar.placement.fold import fold
from laminar.placement.micro_batch import micro
from laminar.rewrite.apply import Rewrite, work_of
from laminar.rewrite.rules import REWRITE_RULES
from laminar.rewrite.standalone import stage
from laminar.rewrite.variants import replayed
from laminar.rules.samples import samples_of
from laminar.runtime.check.one_device import constants_of, run_graph
from laminar.runtime.check.rounding import TermSizes
from laminar.runtime.check.verify import judged, widened

PROOF_TOLERANCE = 1e-12
"""What rounding in float64 may amount to, relative to the largest element of a result."""
MOST_FLOPS, MOST_BYTES = 1e10, 2e9
"""What one run of a model may cost to be run for a proof: about a second on one core."""
PROOF_LAYERS = 3
"""Layers of a model that is run for a proof: the first, the last, and one that is like all others."""


@dataclass(frozen=True)
class Proof:
    """What is known about the rewrites of a plan."""

    rules: Mapping[str, float]
    """The worst relative error of every rule used, standing alone."""
    model: float | None
    """That of the model itself, with few layers and one sample; None if it was too large to be run."""

    @property
    def holds(self) -> bool:
        """Whether all of it is rounding."""
        return all(error <= PROOF_TOLERANCE for error in (*self.rules.values(), self.model or 0.0))

    def __str__(self) -> str:
        worst = max((*self.rules.values(), self.model or 0.0))
        on = "the model with few layers" if self.model is not None else "each rule by itself"
        return f"{'proved' if self.holds else 'WRONG'} on random numbers, {on}: worst error {worst:.0e}"


def proof(captured: Graph, plan: Plan | Staged, of_file: Mapping[str, float] | None = None) -> Proof:
    """Run the rewrites of a plan against the graph they start from; rules are run once and remembered.

    `of_file` has the errors of rules that were read from a file, which nobody here knows the shapes for.
    """
    known = of_file or {}
    names = dict.fromkeys(s.rule for s in plan.rewrites)
    rules = {name: known[name] if name in known else alone(name) for name in names}
    small = fold(captured).small(PROOF_LAYERS)
    with contextlib.suppress(LaminarError):  # whose samples need each other: all of them
        small = micro(small, samples_of(small))
    work = work_of(small)
    if work.flops > MOST_FLOPS or work.moved_bytes > MOST_BYTES:
        return Proof(rules, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # where cores are shared, threads wait for each other longer than all of it takes
    try:
        return Proof(rules, prove(small, replayed(small, plan.rewrites)[0]))
    finally:
        torch.set_num_threads(threads)


@cache
def alone(name: str) -> float:
    """The worst error of a rule of the table on a graph that is its own left side, see `error_on`."""
    rule = next(r for r in REWRITE_RULES if r.name == name)
    return error_on(rule, stage(rule))


def error_on(rule: Rewrite, graph: Graph) -> float:
    """The worst error that a rule makes in a graph that is its own left side; infinite if it does not find itself."""
    sites = rule.find(graph)
    return prove(graph, rule.apply(graph, sites[0])) if sites else math.inf


def prove(
    before: Graph, after: Graph, inputs: Mapping[str, Tensor] | None = None, dtype: str = "f64", seed: int = 0
) -> float:
    """The worst relative error of any result of `after` against `before`; infinite where results differ in kind.

    Inputs are drawn at random unless given. A result that is not finite would prove nothing, so it is refused.
    """
    _comparable(before, after)
    wide = dtype == "f64"
    one, other = (widen(before), widen(after)) if wide else (before, after)
    given = random_inputs(before, seed) if inputs is None else inputs
    fed = widened(given) if wide else {k: v.detach() for k, v in given.items()}
    want = run_graph(one, fed, constants_of(one, wide))
    odd = [k for k, v in want.items() if v.is_floating_point() and not bool(torch.isfinite(v).all())]
    if odd:
        raise GraphError(f"{odd[0]} is not finite on these inputs, so nothing can be proved", next="give other inputs")
    got = run_graph(other, fed, constants_of(other, wide))
    sized = TermSizes(one, fed, constants_of(one, wide))
    errors = [
        judged(k, got[k], w, PROOF_TOLERANCE if wide else 0.0, sized) if got[k].dtype == w.dtype else math.inf
        for k, w in want.items()
    ]
    return max(errors, default=0.0)


def _comparable(before: Graph, after: Graph) -> None:
    """Both must read the same and give back the same, by name."""
    if before.inputs != after.inputs:
        odd = sorted({i.name for i in set(before.inputs) ^ set(after.inputs)})
        raise GraphError(f"the graphs do not read the same: {', '.join(odd[:3])}")
    ours, theirs = ({(o.kind, o.name, str(g.specs[o.ref])) for o in g.outputs} for g in (before, after))
    if ours != theirs:
        odd = sorted(f"{kind} {name} {spec}" for kind, name, spec in ours ^ theirs)
        raise GraphError(f"the graphs do not give back the same: {', '.join(odd[:3])}")


def random_inputs(graph: Graph, seed: int = 0) -> dict[str, Tensor]:
    """Inputs on which a graph can run: floats of both signs, whole numbers that are valid wherever they index.

    Parameters are as large as layers are initialised, so that depth does not blow values up; buffers are positive,
    as variances must be.
    """
    draw = torch.Generator().manual_seed(seed)
    out = {}
    for item in graph.inputs:
        shape, dtype = item.spec.shape, DTYPES[item.spec.dtype]
        if item.name == RNG:
            out[item.name] = torch.tensor([seed + 11, 5], dtype=dtype)
        elif item.spec.dtype == "bool":
            out[item.name] = torch.rand(shape, generator=draw) < 0.7
        elif not item.spec.is_float:
            out[item.name] = torch.randint(0, bound_of(graph, item), shape, generator=draw).to(dtype)
        elif item.kind in ("buffer", "scale"):
            out[item.name] = (torch.rand(shape, generator=draw, dtype=torch.float64) + 0.5).to(dtype)
        else:
            wide = math.sqrt(math.prod(shape[1:])) if item.kind == "param" and len(shape) > 1 else 1.0
            out[item.name] = (torch.randn(shape, generator=draw, dtype=torch.float64) / wide).to(dtype)
    return out


INDEXED = {
    "aten.embedding": (1, 0, 0),
    "aten.nll_loss_forward": (1, 0, -1),
    "aten.nll_loss_backward": (2, 1, -1),
    "aten.nll_loss2d_forward": (1, 0, 1),
    "aten.nll_loss2d_backward": (2, 1, 1),
}
"""Ops that take whole numbers as indices: the argument that holds them, the tensor and the dim they point into."""
MOVED = (
    "aten.view",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.transpose.int",
    "aten.t",
    "aten.permute",
    "aten.unsqueeze",
    "aten.squeeze.dim",
    "aten._to_copy",
    "aten.expand",
    "aten.split.Tensor",
)


def bound_of(graph: Graph, item: Input) -> int:
    """One more than the largest index that every reader of a whole-number input takes; 2 where nobody says."""
    todo, seen, bound = [Ref(item.name)], {item.name}, math.inf
    while todo:
        ref = todo.pop()
        for node in graph.users.get(ref, ()):
            at = INDEXED.get(node.op)
            if at is not None and node.args[at[0]] == ref:
                bound = min(bound, graph.specs[node.args[at[1]]].shape[at[2]])
            elif node.op in ("aten.gather", "aten.index_select") and node.args[2] == ref:
                bound = min(bound, graph.specs[node.args[0]].shape[node.args[1]])
            elif node.op == "aten.embedding_dense_backward" and node.args[1] == ref:
                bound = min(bound, node.args[2])
            elif node.op in MOVED and node.name not in seen:
                seen.add(node.name)
                todo += [Ref(node.name, i) for i in range(len(node.outs))]
    return int(bound) if bound < math.inf else 2
